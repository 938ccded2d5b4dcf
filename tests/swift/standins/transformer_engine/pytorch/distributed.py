"""The tracker of random states, named as a base class alone."""

from contextlib import AbstractContextManager, nullcontext


class CudaRNGStatesTracker:
    def __init__(self) -> None:
        raise NotImplementedError("use Megatron's own tracker, without --te_rng_tracker")


def is_fp8_activation_recompute_enabled() -> bool:
    return False


def activation_recompute_forward(*args: object, **kwargs: object) -> AbstractContextManager[None]:
    return nullcontext()
