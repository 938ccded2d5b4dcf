"""The recipes of 8-bit types: names alone, which are asked for but not used."""


class DelayedScaling:
    def __init__(self, **kwargs: object) -> None:
        raise NotImplementedError("the stand-in for Transformer Engine has no 8-bit types")


class Float8CurrentScaling(DelayedScaling): ...


class Float8BlockScaling(DelayedScaling): ...


class MXFP8BlockScaling(DelayedScaling): ...
