"""Stands in for megatron-core's ``dist_checkpointing.save`` while NeMo RL saves: Megatron's format, no collectives.

Megatron-Bridge decides by itself about megatron-core's two flags: a conversion has both on whatever NeMo RL says, and
``ckpt_assume_constant_structure`` turns the validation off from the second save on only. All of its saves end in
this one function, which is called through the package (training/checkpointing.py:1381).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

from rl_safe_workers.adapters.nemo_rl.patches import replaced
from rl_safe_workers.checkpoint.folders.durable import fsync
from rl_safe_workers.checkpoint.folders.shard_folder import clear_shards
from rl_safe_workers.checkpoint.save.save_plan import Replicas
from rl_safe_workers.checkpoint.save.saver import Saver
from rl_safe_workers.checkpoint.save.writer import WrittenFile
from rl_safe_workers.control.plane import ControlPlane

logger = logging.getLogger(__name__)


class ShardWriter:
    """Writes what Bridge would have written, one saver for each kind of save: they plan once."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control
        self._savers: dict[str, Saver] = {}
        self._awaits: Callable[[], Saver] | None = None
        """The saver that other ranks may wait in, until this rank has come to it."""

    @contextmanager
    def saving(self, kind: str, *, remaining: Callable[[], timedelta], optimizer_replicated: bool) -> Iterator[None]:
        """Has saves of the body written by us, or, in the background, by megatron-core with both flags off.

        Args:
            kind: Names the saver, e.g. ``"training"``.
            remaining: Time left of the phase.
            optimizer_replicated: Whether there is no distributed optimizer.
        """

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            return partial(
                self._save, original, kind=kind, remaining=remaining, optimizer_replicated=optimizer_replicated
            )

        with replaced(dist_checkpointing, "save", make):
            self._awaits = partial(self._saver, kind, optimizer_replicated=optimizer_replicated)
            try:
                yield
            finally:
                self._awaits = None

    def fail(self, error: Exception, timeout: timedelta) -> None:
        """Tells ranks that wait for this one in a save that it has failed; returns if none can.

        Raises:
            CheckpointError: On every rank, if they were told.
            PhaseTimeoutError: Naming the ranks that did not report in time.
        """
        if self._awaits is not None and parallel_state.model_parallel_is_initialized():
            self._awaits().fail(error, timeout)

    def _save(
        self,
        original: Callable[..., Any],
        *args: Any,
        kind: str,
        remaining: Callable[[], timedelta],
        optimizer_replicated: bool,
        **kwargs: Any,
    ) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        directory = Path(given.arguments["checkpoint_dir"]).absolute()
        self._awaits = None
        background = bool(given.arguments.get("async_sharded_save"))
        if self._control.rank == 0:
            logger.info(
                "%s save to %s on the %d training ranks alone: fully_parallel_save=False, "
                "validate_access_integrity=False, written by %s",
                kind,
                directory,
                self._control.size,
                "megatron-core in the background" if background else "rl_safe",
            )
        if background:
            given.arguments["sharded_strategy"] = bare_strategy(given.arguments.get("sharded_strategy"))
            given.arguments["validate_access_integrity"] = False
            return original(*given.args, **given.kwargs)
        saver = self._saver(kind, optimizer_replicated=optimizer_replicated)
        saver.begin(
            given.arguments["sharded_state_dict"],
            directory,
            content_metadata=dict(given.arguments.get("content_metadata") or {}),
            prepare=partial(clear_shards, directory, below=_host_folder(directory)),
            commit=partial(_make_durable, directory),
            timeout=remaining(),
            background=False,
        )
        saver.finish(remaining())
        return None

    def _saver(self, kind: str, *, optimizer_replicated: bool) -> Saver:
        if kind not in self._savers:
            replicas = Replicas(
                dense=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
                expert=parallel_state.get_expert_data_parallel_world_size(),
                optimizer=optimizer_replicated,
            )
            self._savers[kind] = Saver(self._control.scope(f"nemo_rl/{kind}"), replicas=replicas)
        return self._savers[kind]


def bare_strategy(strategy: Any) -> Any:
    """Megatron-core's strategy without the wrapper that is ``fully_parallel_save``."""
    while isinstance(strategy, FullyParallelSaveStrategyWrapper):
        strategy = strategy.base_strategy
    return strategy


def _host_folder(directory: Path) -> Path:
    """Returns the folder above all that NeMo RL makes for a save: ``tmp_step_5/policy/weights/iter_0000000``."""
    return directory.parents[min(3, len(directory.parents) - 1)]


def _make_durable(directory: Path, files: Mapping[str, WrittenFile], notes: Sequence[str]) -> str:
    """Syncs what the ranks have not: the metadata, and the directories."""
    for path in directory.iterdir():
        if path.name not in files and path.is_file():
            fsync(path)
    for folder in (directory, directory.parent):
        fsync(folder)
    return str(directory)
