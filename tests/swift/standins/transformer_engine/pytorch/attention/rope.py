"""Rotary embedding. The fused kernel needs a GPU: turn it off with ``--apply_rope_fusion false``."""


def apply_rotary_pos_emb(*args: object, **kwargs: object) -> object:
    raise NotImplementedError("the stand-in for Transformer Engine has no fused rotary embedding")
