"""Patches this process so that Megatron-core runs on gloo and CPU tensors, with a reason for each patch.

Megatron-core names the CUDA device in many places where any device would work. Each shim below patches such places;
line numbers are those of megatron-core 0.16.1. The shims change the whole process: call `apply` once, at the start of
a process without a GPU, before Megatron builds anything.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from rl_safe_workers.errors import ResourceError

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
META = torch.device("meta")
BACKEND = "gloo"
"""Backend of the training world."""
_applied = False


class _NullEvent:
    """Replaces ``torch.cuda.Event``. On a CPU all earlier work is already done."""

    def synchronize(self) -> None: ...

    def wait(self, stream: object = None) -> None: ...

    def record(self, stream: object = None) -> None: ...


class _NullStream:
    """Replaces ``torch.cuda.Stream``. A CPU has only one stream, so all of these are equal."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NullStream)

    def __hash__(self) -> int:
        return 0

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> _NullEvent:
        return _NullEvent()


@contextmanager
def _null_stream_context(stream: object) -> Iterator[None]:
    yield


def _names_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create


def _shim_devices() -> None:
    """Redirects ``device=torch.cuda.current_device()`` and ``device="cuda"`` to the CPU.

    Used in layers, buffers, schedules and clip_grads: tensor_parallel/layers.py:261,
    distributed/param_and_grad_buffer.py:800, pipeline_parallel/schedules.py:596, optimizer/clip_grads.py:103,
    rotary_pos_embedding.py:162, dist_checkpointing/strategies/state_dict_saver.py:252.
    """
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # mbridge/core/util.py:161 and others move modules and tensors to the current device.
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _shim_streams() -> None:
    """Replaces streams and synchronisation.

    Used in the token dispatcher, pipeline communication and checkpoint writer:
    transformer/moe/token_dispatcher.py:445, pipeline_parallel/p2p_communication.py:398,
    dist_checkpointing/strategies/filesystem_async.py:230.
    """
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.Stream = _NullStream  # type: ignore[assignment,misc]
    torch.cuda.Event = _NullEvent  # type: ignore[assignment,misc]
    torch.cuda.stream = _null_stream_context  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: _NullStream()  # type: ignore[assignment,return-value]
    torch.cuda.default_stream = lambda device=None: _NullStream()  # type: ignore[assignment,return-value]


def _is_not_rng_warning(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("CPU RNG state changed within GPU RNG context")


def _shim_rng() -> None:
    """Makes Megatron use the CPU's random generator as its "cuda" one (tensor_parallel/random.py:95, 235, 248).

    Megatron warns if the CPU generator changes while the "cuda" one is in use. That warning is suppressed, because both
    are the same generator here.
    """
    from megatron.core.tensor_parallel import random

    logging.getLogger(random.__name__).addFilter(_is_not_rng_warning)

    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


def _shim_tensor_type_names() -> None:
    """Makes ``tensor.type()`` return CUDA names, because optimizers compare it with ``"torch.cuda.FloatTensor"``.

    optimizer/optimizer.py:690, optimizer/distrib_optimizer.py:420, optimizer/clip_grads.py:167.
    """
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        return name.replace(".meta", "").replace("torch.", "torch.cuda.", 1) if not args and not kwargs else name

    torch.Tensor.type = type_  # type: ignore[assignment,method-assign]


def _shim_token_dispatcher() -> None:
    """Makes the token dispatcher convert splits to numpy arrays on a CPU, too.

    Megatron converts them only when it moves them from a GPU (token_dispatcher.py:885), and all_to_all_single refuses
    splits that are tensors.
    """
    from megatron.core.transformer.moe import token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def _shim_gloo_devices() -> None:
    """Makes the gloo groups of this process share the network device of the first one.

    torch gives each group a device of its own. A device has a thread that wakes up every 10 ms, whether or not anything
    happens (gloo/transport/tcp/loop.cc), and a rank has some fifty groups.
    """
    gloo: Any = dist.ProcessGroupGloo  # the stubs leave much of it out
    make, devices = gloo.__init__, dict[int, Any]()

    @functools.wraps(make)
    def init(self: Any, store: Any, rank: int, size: int, options: Any = None, *, timeout: Any = None) -> None:
        if isinstance(options, timedelta):  # torch's other signature
            options, timeout = None, options
        here = os.getpid()  # a fork does not have the thread
        if options is None and here in devices:
            options = gloo._Options()
            options._devices, options._timeout = devices[here], timeout or default_pg_timeout
        if options is not None:
            make(self, store, rank, size, options)
            return
        make(self, store, rank, size, timeout=timeout or default_pg_timeout)
        devices[here] = self.options._devices

    gloo.__init__ = init


def apply() -> None:
    """Applies every shim to this process. Idempotent.

    Raises:
        ResourceError: If this process sees a GPU. Hide it with ``CUDA_VISIBLE_DEVICES=``.
    """
    global _applied
    if _applied:
        return
    if torch.cuda.is_available():
        raise ResourceError(
            "the CPU platform cannot be used in a process that sees a GPU: hide it with CUDA_VISIBLE_DEVICES="
        )
    _shim_devices()
    _shim_streams()
    _shim_rng()
    _shim_tensor_type_names()
    _shim_token_dispatcher()
    _shim_gloo_devices()
    _applied = True
    logger.info("CPU platform: Megatron runs on gloo with the shims of %s", __name__)


def observer(owned: Callable[[], Mapping[str, int]], **options: Any) -> None:
    """Returns None, because a CPU has no device memory to account for."""


def start() -> torch.device:
    """Applies every shim and returns the CPU device. Idempotent.

    Raises:
        ResourceError: As `apply`.
    """
    apply()
    return CPU


def use_meta_device() -> None:
    """Makes this process build models on the meta device: parameters, buffers and optimizer state take no memory.

    Call it after `apply`. It cannot be undone. Megatron makes most tensors on the current device. The router and the
    norms use ``torch.empty`` without a device (transformer/moe/router.py:54).
    """
    on_cpu = torch.empty

    @functools.wraps(on_cpu)
    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None:
            kwargs["device"] = META
        return on_cpu(*args, **kwargs)

    torch.cuda.current_device = lambda: META  # type: ignore[assignment,return-value]
    torch.empty = empty
