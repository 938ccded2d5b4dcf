"""Stands in for triton where there is no GPU: kernels can be defined, and none can be started.

torch looks for triton by itself and expects the whole of it. So this is no package on the path: `put` makes the name
known after torch has looked, and before mcore-bridge defines its kernels.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class Kernel:
    def __init__(self, function: Any) -> None:
        self.__name__ = function.__name__

    def __getitem__(self, grid: object) -> Any:
        raise NotImplementedError(f"the stand-in for triton starts no kernel, such as {self.__name__}")


def jit(function: Any = None, **options: Any) -> Any:
    return Kernel if function is None else Kernel(function)


class Language(ModuleType):
    """Types, which kernels have in their annotations."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def put() -> None:
    import torch._dynamo
    import torch._inductor.runtime.triton_compat

    assert not torch.utils._triton.has_triton_package()
    triton, language = ModuleType("triton"), Language("triton.language")
    triton.jit, triton.language, triton.__version__ = jit, language, "0.0.0"  # type: ignore[attr-defined]
    sys.modules |= {"triton": triton, "triton.language": language}
