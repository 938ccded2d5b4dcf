"""Saves a training world's state without a collective: planned alone, agreed on over the store, written at once.

One save goes through these steps. Whatever fails on one rank fails the save on all, within the deadline:

    plan       each rank: pieces, who writes them (balance), the holdings of both; kept while the structure stays
    prepare    agreement: every rank can save, holdings match, the disk has room
    write      each rank: one file, durable; here, or staged and on a thread beside the training
    commit     rank 0, once all have written: .metadata, metadata.json, then what the caller adds (the manifest)
"""

from __future__ import annotations

import copy
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult

from rl_safe_workers.checkpoint.folders.manifest import SHARDS, step_dir
from rl_safe_workers.checkpoint.folders.publish import pending_path
from rl_safe_workers.checkpoint.folders.retention import commit, prune, start_save
from rl_safe_workers.checkpoint.format.gc_pause import gc_paused
from rl_safe_workers.checkpoint.save.holdings import Holdings, find_mismatch, places, to_metadata
from rl_safe_workers.checkpoint.save.manifest_making import check_driver_state, make_manifest
from rl_safe_workers.checkpoint.save.megatron_native import save_with_megatron
from rl_safe_workers.checkpoint.save.save_plan import Plan, Replicas, make_plan
from rl_safe_workers.checkpoint.save.save_start import StartReport, short_of_memory
from rl_safe_workers.checkpoint.save.staging import Staging
from rl_safe_workers.checkpoint.save.writer import WrittenFile, write_items
from rl_safe_workers.checkpoint.state.megatron import serialize_objects, store_common, write_format
from rl_safe_workers.checkpoint.state.pieces import split
from rl_safe_workers.checkpoint.state.state import CONTENT_METADATA, sharded_state, state_digest
from rl_safe_workers.comms.hosts import own_host
from rl_safe_workers.compat.param_gathers import complete_param_gathers
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.pending import PendingDecision
from rl_safe_workers.control.plane import ControlPlane, Operation
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.lifecycle import SAVE_ENDS_BEFORE, Phase
from rl_safe_workers.platforms.host_memory import host_memory
from rl_safe_workers.ranks import trainer_id
from rl_safe_workers.worlds.training_rank import Part, TrainingRank

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A rank's report of its writes. The commit gets one from every rank."""

    file: WrittenFile | None
    """None if it had nothing to write."""
    blobs: list[int]
    """Which blob at the end of the file belongs to each object of the holdings."""
    note: str
    """Anything that the caller wants to tell the commit."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Written:
        """Reads what JSON has made of ``asdict``."""
        file = None if fields["file"] is None else WrittenFile(**fields["file"])
        return cls(file=file, blobs=fields["blobs"], note=fields["note"])


Commit = Callable[[Mapping[str, WrittenFile], Sequence[str]], Any]
"""Given every file written, by name, and every rank's note; its value must be fit for JSON."""


class Saver:
    """Saves of one rank, one at a time. Methods are collective over the training world unless they say otherwise."""

    def __init__(self, control: ControlPlane, *, replicas: Replicas) -> None:
        self._control, self._rank, self._replicas = control, control.rank, replicas
        self._plan: Plan | None = None
        self._staging = Staging()
        self._compared: list[tuple[str, Holdings]] = []
        """On rank 0, of every rank: the digest and the holdings that were last compared."""
        self._pending: PendingDecision | None = None

    @property
    def in_flight(self) -> bool:
        """True if there is a save to `finish`: one that is not committed, or that has failed."""
        return self._pending is not None

    @gc_paused()
    def begin(
        self,
        state: dict[str, Any],
        directory: Path,
        *,
        content_metadata: dict[str, Any],
        prepare: Callable[[], None],
        commit: Commit,
        timeout: timedelta,
        background: bool,
        note: str = "",
    ) -> None:
        """Plans, agrees and writes; in the background only a copy is made. `finish` must follow.

        Args:
            state: Megatron's sharded state dict.
            directory: Where the shards go, on storage that every rank sees. ``prepare`` makes it.
            content_metadata: How the state dict was made, for the loader.
            prepare: Called on rank 0 before anything is written. What it raises, every rank does.
            commit: Called on rank 0 once every shard is durable and megatron-core's metadata is written. `finish`
                returns its value.
            timeout: For each agreement before the writing.
            background: Whether to write on a thread.
            note: For the commit.

        Raises:
            CheckpointError: On every rank, if one cannot save, the ranks' tensors do not match, or there is no room.
            PhaseTimeoutError: Naming the ranks that did not report in time.
        """
        assert self._pending is None, "finish the save before"
        operation, failure = self._control.begin("save", phase=Phase.SAVE), None
        try:
            parts = split(state)
            objects = parts.objects
            if self._rank == 0:
                prepare()
                objects += store_common(parts.common, directory, content_metadata)
            keys, blobs, serialized = serialize_objects(objects)
            plan = self._planned(parts.tensors, keys)
        except Exception as error:
            failure = error
        size_bytes = 0 if failure else plan.size_bytes + sum(map(len, serialized))
        staged_bytes = self._staging.missing_bytes(plan.size_bytes) if background and not failure else 0
        start = StartReport(
            digest="" if failure else plan.digest,
            size_bytes=size_bytes,
            host=own_host(),
            staged_bytes=staged_bytes,
            free_memory_bytes=host_memory().free_bytes if staged_bytes else 0,
        )
        self._agree_to_start(operation, failure, None if failure else plan, start, directory, timeout)
        if not directory.is_dir():
            failure = CheckpointError(f"training rank {self._rank} does not see {directory}: is it shared storage?")
        data = [shard.data for shard in parts.tensors]
        file = directory / f"__{self._rank}_0.distcp"
        self._pending = PendingDecision(
            operation.gathering("written"),
            rank_id=trainer_id(self._rank),
            subject=f"save of {directory.parent}",
            setting="rl_safe.timeouts.save",
            error=CheckpointError,
            decide=lambda written: self._commit(directory, [Written.from_json(fields) for fields in written], commit),
        )
        # One at a time: a piece of many experts is a copy of them.
        pieces: Iterable[torch.Tensor] = (piece.tensor(data, rows) for piece, rows in plan.writes)
        if not background:
            pieces = self._staging.one_by_one(pieces, plan.largest_bytes)
        elif failure is None:
            try:
                pieces = self._staging.copy(pieces, plan.size_bytes)
            except Exception as error:
                # The others are on their way already, and have to be told.
                failure = error

        def write() -> dict[str, Any]:
            if failure is not None:
                raise failure
            is_empty = not plan.writes and not serialized
            written = None if is_empty else write_items(file, chain(pieces, serialized))
            return asdict(Written(file=written, blobs=blobs, note=note))

        self._pending.start(write, background=background)

    def fail(self, error: Exception, timeout: timedelta) -> NoReturn:
        """Takes the place of `begin` or `save_with` on a rank that cannot describe its state: no rank saves.

        Raises:
            CheckpointError: Always, on every rank.
            PhaseTimeoutError: Naming the ranks that did not report in time.
        """
        assert self._pending is None, "finish the save before"
        start = self._control.begin("save", phase=Phase.SAVE).gathering("start")
        start.settle(Deadline.after(timeout), failure=error, foreign=CheckpointError)
        raise AssertionError("an agreement with a failure raises")

    def save_with(
        self,
        save: Callable[[], None],
        *,
        prepare: Callable[[], None],
        commit: Commit,
        timeout: timedelta,
        note: str = "",
    ) -> Any:
        """Wraps another's save, which may be collective, in the same steps: all are ready, all have written, commit.

        Raises:
            CheckpointError: On every rank, if one has failed.
            PhaseTimeoutError: Naming the ranks that did not report in time.
        """
        assert self._pending is None, "finish the save before"
        operation, failure = self._control.begin("save", phase=Phase.SAVE), None
        start = operation.gathering("start")
        start.settle(Deadline.after(timeout), decide=lambda reports: prepare(), foreign=CheckpointError)
        try:
            save()
        except Exception as error:
            failure = error
        return operation.gathering("written").settle(
            Deadline.after(timeout),
            failure=failure,
            report=note,
            decide=lambda notes: commit({}, notes),
            foreign=CheckpointError,
        )

    def _planned(self, tensors: list[ShardedTensor], object_keys: list[str]) -> Plan:
        if self._plan is None or not self._plan.fits(tensors, object_keys):
            self._plan = make_plan(tensors, object_keys, self._replicas)
        return self._plan

    def _agree_to_start(
        self,
        operation: Operation,
        failure: Exception | None,
        plan: Plan | None,
        report: StartReport,
        directory: Path,
        timeout: timedelta,
    ) -> None:
        compare: bool = operation.gathering("start").settle(
            Deadline.after(timeout),
            failure=failure,
            report=asdict(report),
            decide=lambda reports: self._decide_start([StartReport(**fields) for fields in reports], directory),
            foreign=CheckpointError,
        )
        if compare:
            assert plan is not None, "rank 0 decides only if every rank has a plan"
            holdings = plan.holdings.to_json().decode()
            operation.gathering("compare").settle(
                Deadline.after(timeout), report=holdings, decide=self._compare, foreign=CheckpointError
            )

    def _decide_start(self, reports: Sequence[StartReport], directory: Path) -> bool:
        """Decides on rank 0 whether there is room, and whether holdings have to be compared."""
        for warning in short_of_memory(reports):
            logger.warning("save of %s: %s", directory.parent, warning)
        needed, free = sum(report.size_bytes for report in reports), shutil.disk_usage(directory).free
        if needed > free:
            raise CheckpointError(f"{needed} bytes to save, {free} free in {directory}: make room there")
        return [report.digest for report in reports] != [digest for digest, _ in self._compared]

    def _compare(self, reports: Sequence[str]) -> None:
        holdings = [Holdings.from_json(report.encode()) for report in reports]
        if mismatch := find_mismatch(holdings):
            raise CheckpointError(f"the ranks' states do not match, nothing is saved: {mismatch}")
        self._compared = [(one.digest(), one) for one in holdings]

    def advance(self) -> None:
        """Moves a save in the background on, without waiting; how it ended is for `poll` or `finish` to say.

        Not collective.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        if self._pending is not None:
            self._pending.advance()

    def poll(self) -> bool:
        """Moves a save in the background on, without waiting. Not collective.

        Ranks learn at different times that a save has failed. So that they stay in step, the failure is logged here
        and raised by `finish`, on every rank.

        Returns:
            Whether it is still in progress.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        if self._pending is None:
            return False
        outcome = self._pending.poll()
        if outcome is not None and outcome.failure is None:
            self._pending = None
        return outcome is None

    def finish(self, timeout: timedelta) -> Any:
        """Waits until the save is committed; returns what the commit did, on every rank. None if there is no save.

        Raises:
            CheckpointError: On every rank, if a rank could not write or rank 0 not commit.
            PhaseTimeoutError: Naming the ranks that had not written in time.
            CommunicatorError: If the run's store is gone.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.finish(Deadline.after(timeout))

    def abandon(self, reason: str) -> None:
        """Gives up a save in flight and tells the others, whose `finish` then fails as soon as it can. Does not wait.

        Not collective: for a rank that will not get to the end of the save. What it is writing is left behind.

        Args:
            reason: What has happened, in one line.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.abandon(reason)

    @gc_paused()
    def _commit(self, directory: Path, everyone: Sequence[Written], commit: Commit) -> Any:
        """Makes the shards a checkpoint, on rank 0."""
        files: dict[str, WrittenFile] = {}
        storage: dict[Any, Any] = {}
        for (_, holdings), written in zip(self._compared, everyone, strict=True):
            if written.file is not None:
                files[written.file.name] = written.file
                storage |= places(holdings, written.file.name, written.file.lengths, written.blobs)
        metadata = to_metadata([holdings for _, holdings in self._compared])
        results = [WriteResult(index=i, size_in_bytes=info.length, storage_data=info) for i, info in storage.items()]
        FileSystemWriter(directory).finish(metadata, [results])
        write_format(directory)
        return commit(files, [written.note for written in everyone])


class CheckpointSaves(Part):
    """Writes ``global_step_N`` directories that exist only when complete; no rollout rank takes part.

    A save issues no collective at all: ranks agree over the run's store, so that none can be left hanging.
    """

    def __init__(self, rank: TrainingRank) -> None:
        super().__init__(rank)
        self._saver: Saver | None = None

    def open_saver(self) -> Saver:
        """Returns the rank's saver, made when first used: it needs the store and Megatron's groups."""
        if self._saver is None:
            dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
            replicas = Replicas(dense=dense, expert=parallel_state.get_expert_data_parallel_world_size())
            self._saver = Saver(self.rank.control, replicas=replicas)
        return self._saver

    def before(self, phase: Phase) -> None:
        """Finishes a save in the background before a phase that it must not reach into; else moves it on.

        Raises:
            CheckpointError: On every rank, before one of those phases, if the save has failed. Other phases do not
                raise it: ranks learn of it at different times, and one that raised would leave the others waiting.
        """
        if self._saver is not None and self._saver.in_flight:
            if phase in SAVE_ENDS_BEFORE:
                self.finalize_checkpoint()
            else:
                self._saver.advance()

    def abort(self, reason: str) -> None:
        """Gives up a save in the background, so that the others need not wait for this rank."""
        if self._saver is not None:
            self._saver.abandon(reason)

    def save_checkpoint(
        self,
        root: str | Path,
        *,
        step: int,
        fingerprint: str,
        layout: Mapping[str, int],
        driver_state: dict[str, Any],
        background: bool | None = None,
    ) -> Path:
        """Saves model, optimizer, random state and the driver's state.

        Collective over: the training world, in phase ``save``, through the store. No process group takes part, unless
        one of Megatron's flags is on, or DDP has put off gathers of parameters (`complete_param_gathers`). With
        ``background`` it returns once this rank's state is copied to host memory; `poll_checkpoint` and
        `finalize_checkpoint` see to the rest.

        Args:
            root: Directory of all checkpoints, on storage that every trainer sees.
            step: Steps completed.
            fingerprint: Digest of the model's architecture.
            layout: Parallel sizes, for the record: a load may have others.
            driver_state: JSON-friendly state of the driver: the data position.
            background: Whether to write while training goes on; None: as ``rl_safe.checkpoint.async_save`` says.

        Returns:
            The checkpoint's path, which exists once the save is committed.

        Raises:
            CheckpointError: On every rank, if one cannot write, there is no room, or the ranks' tensors do not match;
                the previous checkpoint stays as it was.
            PhaseTimeoutError: If a trainer does not arrive, or has not written, in time; names it.
        """
        root = Path(root).absolute()
        config = self.rank.rl_safe.checkpoint
        background = config.async_save if background is None else background
        final = step_dir(root, step)
        pending = pending_path(final)
        # A save in the background has its manifest written when the caller's own may have gone on.
        driver_state = copy.deepcopy(driver_state)
        with self.rank.phase(Phase.SAVE):
            if self.rank.training_rank == 0:
                logger.info(
                    "save of step %d on the %d training ranks alone: fully_parallel_save=%s, "
                    "validate_access_integrity=%s",
                    step,
                    self.rank.training_size,
                    config.fully_parallel_save,
                    config.validate_access_integrity,
                )
            # Before anything that may fail on one rank alone: the others would wait for it.
            complete_param_gathers(self.rank.host.chunks)
            saver = self.open_saver()
            try:
                self._check_default_group()
                check_driver_state(driver_state)
                state = sharded_state(
                    self.rank.host.chunks,
                    self.rank.host.optimizer,
                    training_rank=self.rank.training_rank,
                    size=self.rank.training_size,
                    is_loading=False,
                )
                digest = state_digest(self.rank.host.chunks, self.rank.host.optimizer) if config.digest else ""
            except Exception as error:
                saver.fail(error, self.rank.remaining())

            def commit_it(files: Mapping[str, WrittenFile], digests: Sequence[str]) -> str:
                manifest = make_manifest(pending, files, digests, step, fingerprint, layout, driver_state)
                path = commit(pending, manifest, durable=files)
                removed = prune(root, keep_last=config.keep_last, but=path)
                logger.info("saved %s%s", path, f", removed {', '.join(p.name for p in removed)}" if removed else "")
                return str(path)

            if config.fully_parallel_save or config.validate_access_integrity:
                saver.save_with(
                    lambda: save_with_megatron(state, pending / SHARDS, config, CONTENT_METADATA),
                    prepare=lambda: start_save(root, step),
                    commit=commit_it,
                    timeout=self.rank.remaining(),
                    note=digest,
                )
                return final
            saver.begin(
                state,
                pending / SHARDS,
                content_metadata=CONTENT_METADATA,
                prepare=lambda: start_save(root, step),
                commit=commit_it,
                timeout=self.rank.remaining(),
                background=background,
                note=digest,
            )
            if not background:
                saver.finish(self.rank.remaining())
            return final

    def _check_default_group(self) -> None:
        """Refuses a default group that is not the training world: Megatron describes what a rank holds by its ranks."""
        if (dist.get_rank(), dist.get_world_size()) != (self.rank.training_rank, self.rank.training_size):
            raise CheckpointError(
                f"training rank {self.rank.training_rank} of {self.rank.training_size} is rank {dist.get_rank()} of "
                f"{dist.get_world_size()} in the default group: leave it what init_world or carve_world made it"
            )

    def poll_checkpoint(self) -> bool:
        """Moves a save in the background on, without waiting. Not collective: ranks may call it as often as they like.

        Every phase does it by itself when it is entered. Ranks learn at different times that a save has failed, so the
        failure is logged here and raised by `finalize_checkpoint`, or by a phase that calls it, on every rank.

        Returns:
            Whether the save is still in progress.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        return self._saver is not None and self._saver.poll()

    def finalize_checkpoint(self) -> Path | None:
        """Waits for a save in the background to be committed. Collective over: the training world, through the store.

        The phases offload, save, load, convert and teardown do it by themselves. The deadline is that of phase
        ``save``, from now on.

        Returns:
            The checkpoint's path; None if no save is in progress.

        Raises:
            CheckpointError: On every rank, if the save has failed.
            PhaseTimeoutError: Naming the ranks that have not written in time.
        """
        path = None if self._saver is None else self._saver.finish(self.rank.timeout(Phase.SAVE))
        return None if path is None else Path(path)
