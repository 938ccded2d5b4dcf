"""Lets nvidia-resiliency-ext's writer run without a GPU: tensors say that they are on one, and CUDA's calls do nothing.

A tensor that is handed to the writer's process is then shared memory, as CUDA IPC shares it on a GPU: what is written
into it later is seen there, and what takes its place is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from rl_safe_workers.adapters.patches import replaced

_STUBS = {
    "current_device": lambda: "cpu",
    "device_count": lambda: 1,
    "set_device": lambda device: None,
    "synchronize": lambda *args: None,
    "empty_cache": lambda: None,
    "ipc_collect": lambda: None,
}


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = property(lambda self: SimpleNamespace(type="cuda", __str__=lambda: "cuda:0"))  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Copies it to host memory."""
        return self.as_subclass(torch.Tensor).clone()


def run_writer(name: str, *args: Any, **kwargs: Any) -> None:
    """Runs the writer's process.

    Args:
        name: The library's own method for it.
        *args: Its arguments.
        **kwargs: Likewise.
    """
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import PersistentAsyncCaller

    for stubbed, stub in _STUBS.items():
        setattr(torch.cuda, stubbed, stub)
    empty = torch.empty
    torch.empty = lambda *sizes, device=None, **more: empty(*sizes, **more)  # type: ignore[assignment]
    getattr(PersistentAsyncCaller, name)(*args, **kwargs)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Has what megatron-core's planner resolves be on a GPU, and the writer's process run without one."""
    from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
    from nvidia_resiliency_ext.checkpointing.async_ckpt.core import PersistentAsyncCaller

    def resolving(stock: Any) -> Any:
        def resolve_data(planner: Any, item: Any) -> Any:
            found = stock(planner, item)
            return found.as_subclass(OnGpu) if isinstance(found, torch.Tensor) else found

        return resolve_data

    with ExitStack() as stack:
        for name, stub in _STUBS.items():
            stack.enter_context(replaced(torch.cuda, name, lambda stock, stub=stub: stub))
        stack.enter_context(replaced(MCoreSavePlanner, "resolve_data", resolving))
        for name in ("async_loop", "async_loop_for_daemon_worker"):
            stack.enter_context(
                replaced(PersistentAsyncCaller, name, lambda stock, name=name: partial(run_writer, name))
            )
        yield
