"""The switches of 8-bit types, which stay off."""

from collections.abc import Iterator
from contextlib import contextmanager


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def reset() -> None: ...


@contextmanager
def fp8_autocast(enabled: bool = False, **kwargs: object) -> Iterator[None]:
    if enabled:
        raise NotImplementedError("the stand-in for Transformer Engine has no 8-bit types")
    yield


fp8_model_init = fp8_autocast
