"""Replaces megatron-core's ``dist_checkpointing.save`` while a host saves: same format, but no collectives.

Each host sets megatron-core's two flags in its own way. In a conversion, Megatron-Bridge turns both on, whatever NeMo
RL says. ``ckpt_assume_constant_structure`` turns the validation off only from the second save on. ms-swift always turns
both on. All their saves end in this one function, which they call through the package (NeMo RL:
training/checkpointing.py:1381 of Bridge; ms-swift: megatron/utils/megatron_lm_utils.py:360).
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

from rl_safe_workers.adapters.patches import replaced
from rl_safe_workers.checkpoint.folders.durable import fsync
from rl_safe_workers.checkpoint.folders.shard_folder import clear_shards
from rl_safe_workers.checkpoint.save.save_plan import Replicas
from rl_safe_workers.checkpoint.save.saver import Saver
from rl_safe_workers.checkpoint.save.writer import WrittenFile
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.errors import RlSafeError
from rl_safe_workers.lifecycle import SAVE_ENDS_BEFORE, Phase
from rl_safe_workers.worlds.training_rank import Part, TrainingRank

logger = logging.getLogger(__name__)


class BackgroundSave:
    """A save that runs while the host trains. The host uses it like megatron-core's ``AsyncRequest``."""

    def __init__(self, saver: Saver) -> None:
        """Follows the save that a saver has begun."""
        self.saver = saver
        self._then: list[Callable[[], None]] = []

    def add_finalize_fn(self, then: Callable[[], None]) -> None:
        """Adds a function that this rank calls once the save is complete."""
        self._then.append(then)

    def finalise(self) -> None:
        """Calls the functions that `add_finalize_fn` was given."""
        for then in self._then:
            then()


class PendingShards(Part):
    """Holds the save in the background. There is at most one at a time."""

    def __init__(self, rank: TrainingRank) -> None:
        """Follows no save yet."""
        super().__init__(rank)
        self._save: BackgroundSave | None = None

    def __len__(self) -> int:
        return 0 if self._save is None else 1

    @property
    def current(self) -> BackgroundSave | None:
        """The save, if there is one."""
        return self._save

    def follow(self, saver: Saver) -> BackgroundSave:
        """Takes over a save that has begun in the background, to finalise it later; returns it."""
        self._save = BackgroundSave(saver)
        return self._save

    def before(self, phase: Phase) -> None:
        """Finishes the save before a phase that it must not overlap; before other phases, only polls it."""
        if phase in SAVE_ENDS_BEFORE:
            self.finish()
        else:
            self.poll()

    def abort(self, reason: str) -> None:
        """Abandons the save in the background, so that the other ranks do not wait for this one."""
        save, self._save = self._save, None
        if save is not None:
            save.saver.abandon(reason)

    def poll(self) -> None:
        """Finalises the save in the background if it is complete. Not collective; does not wait."""
        # `finish` raises a failure, on every rank.
        if self._save is not None and not self._save.saver.poll() and not self._save.saver.in_flight:
            self._finalise()

    def finish(self) -> None:
        """Waits for the save in the background and finalises it.

        Collective over: the training world, through the store.

        Raises:
            CheckpointError: On every rank, if a rank has failed.
            PhaseTimeoutError: If ranks have not written in time; names them.
        """
        if self._save is None:
            return
        try:
            self._save.saver.finish(self.rank.timeout(Phase.SAVE))
        except RlSafeError:
            self._save = None
            raise
        self._finalise()

    def _finalise(self) -> None:
        save, self._save = self._save, None
        if save is not None:
            save.finalise()


class ShardWriter:
    """Writes the host's shards. It keeps one saver for each kind of save, so that each kind is planned once."""

    def __init__(self, control: ControlPlane, *, folders: int, pending: PendingShards | None = None) -> None:
        """Writes nothing yet.

        Args:
            control: This rank's place in the training world.
            folders: How many nested folders the host makes for a save, above the folder of the shards.
            pending: Finishes saves in the background. None: every save is complete when its call returns.
        """
        self._control, self._folders, self._pending = control, folders, pending
        self._savers: dict[str, Saver] = {}
        self._is_writing = False
        self._awaits: Callable[[], Saver] | None = None
        """Returns the saver in which other ranks may already wait. None once this rank has reached it, or outside of
        `saving`."""

    @contextmanager
    def saving(self, kind: str, *, remaining: Callable[[], timedelta], optimizer_replicated: bool) -> Iterator[None]:
        """Writes the saves of the body in place of megatron-core.

        Args:
            kind: Names the saver, e.g. ``"training"``.
            remaining: Returns the time left in the phase.
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
        """Fails the save on the ranks that wait in it for this rank. Does nothing if no rank can be waiting.

        Raises:
            CheckpointError: On every rank, if all ranks have learned of the failure.
            PhaseTimeoutError: If ranks did not report in time; names them.
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
        if self._is_writing:
            # This call comes from the saver: megatron-core stores the objects that are equal on all ranks.
            return original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs)
        directory = Path(given.arguments["checkpoint_dir"]).absolute()
        self._awaits = None
        background = bool(given.arguments.get("async_sharded_save"))
        if self._control.rank == 0:
            logger.info(
                "%s save to %s on the %d training ranks alone, %s",
                kind,
                directory,
                self._control.size,
                "in the background" if background else "at once",
            )
        saver = self._saver(kind, optimizer_replicated=optimizer_replicated)
        self._is_writing = True
        try:
            self._begin(saver, given.arguments, directory, remaining=remaining, background=background)
        finally:
            self._is_writing = False
        if background:
            assert self._pending is not None, "nobody would see to the end of the save"
            return self._pending.follow(saver)
        saver.finish(remaining())
        return None

    def _begin(
        self,
        saver: Saver,
        given: Mapping[str, Any],
        directory: Path,
        *,
        remaining: Callable[[], timedelta],
        background: bool,
    ) -> None:
        saver.begin(
            given["sharded_state_dict"],
            directory,
            content_metadata=dict(given.get("content_metadata") or {}),
            prepare=partial(clear_shards, directory, below=self._host_folder(directory)),
            commit=partial(make_durable, directory, parents=1),
            timeout=remaining(),
            background=background,
        )

    def _host_folder(self, directory: Path) -> Path:
        """Returns the folder in which the host makes its folders for a save, e.g. ``tmp_5/policy/weights/iter_5``."""
        return directory.parents[min(self._folders, len(directory.parents) - 1)]

    def _saver(self, kind: str, *, optimizer_replicated: bool) -> Saver:
        if kind not in self._savers:
            replicas = replicas_in_megatron(optimizer=optimizer_replicated)
            self._savers[kind] = Saver(self._control.scope(f"shards/{kind}"), replicas=replicas)
        return self._savers[kind]


def replicas_in_megatron(*, optimizer: bool) -> Replicas:
    """Returns how many ranks hold each kind of state, by Megatron's groups.

    Args:
        optimizer: Whether optimizer states are replicated, because there is no distributed optimizer.
    """
    return Replicas(
        dense=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        expert=parallel_state.get_expert_data_parallel_world_size(),
        optimizer=optimizer,
    )


def make_durable(directory: Path, files: Mapping[str, WrittenFile], notes: Sequence[str], *, parents: int) -> str:
    """Syncs the metadata and the directories to disk, which the ranks have not done; returns the directory's path.

    Args:
        directory: The folder of the shards.
        files: The files of the ranks, by name.
        notes: The ranks' notes, which a saver passes to each such function. This one needs none.
        parents: Number of folders above it that the host has made for the save.
    """
    for path in directory.iterdir():
        if path.name not in files and path.is_file():
            fsync(path)
    for folder in (directory, *directory.parents[:parents]):
        fsync(folder)
    return str(directory)
