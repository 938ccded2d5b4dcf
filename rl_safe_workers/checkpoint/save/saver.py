"""Saves a training world's state without a collective: each rank plans alone, all agree over the store, all write.

One save goes through these steps. A failure on one rank fails the save on all ranks, within the deadline:

    plan       each rank: its pieces, which replica writes them (balance), its holdings; kept while the structure stays
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
from rl_safe_workers.setting_names import timeout_setting
from rl_safe_workers.worlds.training_rank import Part, TrainingRank

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A rank's report of its writes. The commit gets one from every rank."""

    file: WrittenFile | None
    """None if it had nothing to write."""
    blobs: list[int]
    """For each object of the holdings, the index of its blob at the end of the file."""
    note: str
    """Text from the caller to the commit."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Written:
        """Rebuilds a report from the JSON of ``asdict``."""
        file = None if fields["file"] is None else WrittenFile(**fields["file"])
        return cls(file=file, blobs=fields["blobs"], note=fields["note"])


Commit = Callable[[Mapping[str, WrittenFile], Sequence[str]], Any]
"""Takes the written files by name, and every rank's note. Returns a value that JSON can hold."""


class Saver:
    """Saves of one rank, one at a time. Methods are collective over the training world unless they say otherwise."""

    def __init__(self, control: ControlPlane, *, replicas: Replicas) -> None:
        self._control, self._rank, self._replicas = control, control.rank, replicas
        self._plan: Plan | None = None
        self._staging = Staging()
        self._compared: list[tuple[str, Holdings]] = []
        """Digest and holdings of every rank from the last comparison; empty on other ranks than 0."""
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
        """Plans, agrees and writes. With ``background``, copies the state for a thread to write. `finish` must follow.

        Args:
            state: Megatron's sharded state dict.
            directory: Where the shards go, on storage that every rank sees. ``prepare`` makes it.
            content_metadata: How the state dict was made, for the loader.
            prepare: Called on rank 0 before anything is written. If it raises, every rank raises.
            commit: Called on rank 0 once every shard is durable and megatron-core's metadata is written. `finish`
                returns its value.
            timeout: Longest wait for each agreement before the writing.
            background: Whether to write on a thread.
            note: Text for the commit.

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
            setting=timeout_setting(Phase.SAVE),
            error=CheckpointError,
            decide=lambda written: self._commit(directory, [Written.from_json(fields) for fields in written], commit),
        )
        # Make one tensor at a time: a piece of many experts is a copy of them.
        pieces: Iterable[torch.Tensor] = (piece.tensor(data, rows) for piece, rows in plan.writes)
        if not background:
            pieces = self._staging.one_by_one(pieces, plan.largest_bytes)
        elif failure is None:
            try:
                pieces = self._staging.copy(pieces, plan.size_bytes)
            except Exception as error:
                # Do not raise yet: the others have begun to write, and `finish` must tell them.
                failure = error

        def write() -> dict[str, Any]:
            if failure is not None:
                raise failure
            is_empty = not plan.writes and not serialized
            written = None if is_empty else write_items(file, chain(pieces, serialized))
            return asdict(Written(file=written, blobs=blobs, note=note))

        self._pending.start(write, background=background)

    def fail(self, error: Exception, timeout: timedelta) -> NoReturn:
        """Makes the save fail on every rank. A rank that cannot describe its state calls it instead of `begin`.

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
        """Runs another program's save, which may be collective, in the same steps: agree, write, commit.

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
        """Checks on rank 0 that the disk has room; returns True if holdings must be compared."""
        for warning in short_of_memory(reports):
            logger.warning("save of %s: %s", directory.parent, warning)
        needed, free = sum(report.size_bytes for report in reports), shutil.disk_usage(directory).free
        if needed > free:
            raise CheckpointError(f"{needed} bytes to save, {free} free in {directory}: free some space on its disk")
        return [report.digest for report in reports] != [digest for digest, _ in self._compared]

    def _compare(self, reports: Sequence[str]) -> None:
        holdings = [Holdings.from_json(report.encode()) for report in reports]
        if mismatch := find_mismatch(holdings):
            raise CheckpointError(f"the ranks' states do not match, nothing is saved: {mismatch}")
        self._compared = [(one.digest(), one) for one in holdings]

    def advance(self) -> None:
        """Advances a save in the background, without waiting. `poll` or `finish` says how it ended.

        Not collective.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        if self._pending is not None:
            self._pending.advance()

    def poll(self) -> bool:
        """Advances a background save, without waiting. Not collective.

        Ranks learn at different times that a save has failed. So this method only logs the failure, and `finish` raises
        it on every rank. That keeps the ranks in step.

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
        """Waits until the save is committed; returns the commit's value on every rank, or None if there is no save.

        Raises:
            CheckpointError: On every rank, if a rank could not write or rank 0 could not commit.
            PhaseTimeoutError: Naming the ranks that had not written in time.
            CommunicatorError: If the run's store is gone.
        """
        pending, self._pending = self._pending, None
        return None if pending is None else pending.finish(Deadline.after(timeout))

    def abandon(self, reason: str) -> None:
        """Gives up a save in flight and tells the others, so that their `finish` fails soon. Does not wait.

        Not collective: for a rank that will not reach the end of the save. Its thread may go on writing.

        Args:
            reason: The cause, in one line.

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
    """Writes ``global_step_N`` directories, which exist only when complete. No rollout rank takes part.

    A save issues no collective. The ranks agree over the run's store, so no rank can hang in a collective.
    """

    def __init__(self, rank: TrainingRank) -> None:
        super().__init__(rank)
        self._saver: Saver | None = None

    def open_saver(self) -> Saver:
        """Returns the rank's saver. Makes it at the first call, because it needs the store and Megatron's groups."""
        if self._saver is None:
            dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
            replicas = Replicas(dense=dense, expert=parallel_state.get_expert_data_parallel_world_size())
            self._saver = Saver(self.rank.control, replicas=replicas)
        return self._saver

    def before(self, phase: Phase) -> None:
        """Finishes a background save before a phase that it must not overlap; advances it before other phases.

        Raises:
            CheckpointError: On every rank, if the save has failed and this is such a phase. Before other phases nothing
                is raised: ranks learn of the failure at different times, and a rank that raised would leave the others
                waiting.
        """
        if self._saver is not None and self._saver.in_flight:
            if phase in SAVE_ENDS_BEFORE:
                self.finalize_checkpoint()
            else:
                self._saver.advance()

    def abort(self, reason: str) -> None:
        """Gives up a background save, so that the others do not wait for this rank."""
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

        Collective over: the training world, in phase ``save``, through the store. It uses a process group only if one
        of Megatron's flags is on, or if DDP has deferred gathers of parameters (`complete_param_gathers`). With
        ``background`` it returns once this rank's state is copied to host memory. `poll_checkpoint` and
        `finalize_checkpoint` do the rest.

        Args:
            root: Directory of all checkpoints, on storage that every trainer sees.
            step: Steps completed.
            fingerprint: Digest of the model's architecture.
            layout: Parallel sizes, for the record: a load may have others.
            driver_state: JSON-friendly state of the driver: the data position.
            background: Whether to write while training goes on; None to follow ``rl_safe.checkpoint.async_save``.

        Returns:
            The checkpoint's path, which exists once the save is committed.

        Raises:
            CheckpointError: On every rank, if one cannot write, there is no room, or the ranks' tensors do not match.
                The previous checkpoint stays as it was.
            PhaseTimeoutError: If a trainer does not arrive or write in time; the message names it.
        """
        root = Path(root).absolute()
        config = self.rank.rl_safe.checkpoint
        background = config.async_save if background is None else background
        final = step_dir(root, step)
        pending = pending_path(final)
        # A background save writes its manifest later, when the caller may have changed its own dict.
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
            # This comes before anything that may fail on one rank alone, because the others would wait in the gather.
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
        """Refuses a default group that is not the training world: Megatron describes a rank's state by its ranks."""
        if (dist.get_rank(), dist.get_world_size()) != (self.rank.training_rank, self.rank.training_size):
            raise CheckpointError(
                f"training rank {self.rank.training_rank} of {self.rank.training_size} is rank {dist.get_rank()} of "
                f"{dist.get_world_size()} in the default group: keep the default group of init_world or carve_world"
            )

    def poll_checkpoint(self) -> bool:
        """Advances a background save, without waiting. Not collective: ranks may call it as often as they like.

        Every phase does this at its start. Ranks learn at different times that a save has failed, so this method only
        logs the failure. `finalize_checkpoint`, or a phase that calls it, raises it on every rank.

        Returns:
            Whether the save is still in progress.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        return self._saver is not None and self._saver.poll()

    def finalize_checkpoint(self) -> Path | None:
        """Waits until a background save is committed. Collective over: the training world, through the store.

        The phases offload, save, load, convert and teardown do this at their start. The deadline is the timeout of
        phase ``save``, counted from this call.

        Returns:
            The checkpoint's path; None if no save is in progress.

        Raises:
            CheckpointError: On every rank, if the save has failed.
            PhaseTimeoutError: Naming the ranks that have not written in time.
        """
        path = None if self._saver is None else self._saver.finish(self.rank.timeout(Phase.SAVE))
        return None if path is None else Path(path)
