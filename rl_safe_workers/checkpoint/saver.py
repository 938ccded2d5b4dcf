"""Saves a training world's state without a collective: planned alone, agreed on over the store, written at once.

One save goes through these steps. Whatever fails on one rank fails the save on all, within the deadline:

    plan       each rank: pieces, who writes them (balance), a catalogue of both; kept while the structure stays
    prepare    agreement: every rank can save, catalogues match, the disk has room
    write      each rank: one file, durable; here, or staged and on a thread beside the training
    commit     rank 0, once all have written: .metadata, metadata.json, then what the caller adds (the manifest)
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult

from rl_safe_workers.checkpoint.catalogue import Catalogue, find_mismatch, places, to_metadata
from rl_safe_workers.checkpoint.collector import collector_paused
from rl_safe_workers.checkpoint.flight import Flight, Written
from rl_safe_workers.checkpoint.megatron import serialize_objects, store_common, write_format
from rl_safe_workers.checkpoint.pieces import split
from rl_safe_workers.checkpoint.plan import Plan, Replicas, make_plan
from rl_safe_workers.checkpoint.staging import Staging
from rl_safe_workers.checkpoint.writer import WrittenFile, write_items
from rl_safe_workers.control.deadline import Deadline
from rl_safe_workers.control.plane import ControlPlane, Operation
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.lifecycle import Phase

Commit = Callable[[Mapping[str, WrittenFile], Sequence[str]], Any]
"""Given every file written, by name, and every rank's note; its value must be fit for JSON."""


class Saver:
    """Saves of one rank, one at a time. Every method is called by all ranks of the training world alike."""

    def __init__(self, control: ControlPlane, *, replicas: Replicas) -> None:
        self._control, self._rank, self._replicas = control, control.rank, replicas
        self._plan: Plan | None = None
        self._staging = Staging()
        self._catalogues: list[tuple[str, Catalogue]] = []
        """On rank 0, of every rank: the digest and the catalogue that were last compared."""
        self._flight: Flight | None = None

    @property
    def in_flight(self) -> bool:
        """Whether there is a save to `finish`: one that is not committed, or that has failed."""
        return self._flight is not None

    @collector_paused()
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
            content_metadata: How the state dict was made, for whoever loads it.
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
        assert self._flight is None, "finish the save before"
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
        self._agree_to_start(operation, failure, None if failure else plan, size_bytes, directory, timeout)
        if not directory.is_dir():
            failure = CheckpointError(f"training rank {self._rank} does not see {directory}: is it shared storage?")
        data = [shard.data for shard in parts.tensors]
        file = directory / f"__{self._rank}_0.distcp"
        self._flight = Flight(
            operation.gathering("written"),
            directory,
            rank=self._rank,
            commit=lambda written: self._commit(directory, written, commit),
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

        def write() -> Written:
            if failure is not None:
                raise failure
            if not plan.writes and not serialized:
                return Written(file=None, blobs=blobs, note=note)
            return Written(file=write_items(file, chain(pieces, serialized)), blobs=blobs, note=note)

        self._flight.write(write, background=background)

    def fail(self, error: Exception, timeout: timedelta) -> NoReturn:
        """Takes the place of `begin` or `save_with` on a rank that cannot describe its state: no rank saves.

        Raises:
            CheckpointError: Always, on every rank.
            PhaseTimeoutError: Naming the ranks that did not report in time.
        """
        assert self._flight is None, "finish the save before"
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
        assert self._flight is None, "finish the save before"
        operation, failure = self._control.begin("save", phase=Phase.SAVE), None
        start = operation.gathering("start")
        start.settle(Deadline.after(timeout), decide=lambda reports: prepare(), foreign=CheckpointError)
        try:
            save()
        except Exception as error:
            failure = error
        return operation.gathering("written").settle(
            Deadline.after(timeout), failure=failure, report=note, decide=lambda notes: commit({}, notes),
            foreign=CheckpointError,
        )  # fmt: skip

    def _planned(self, tensors: list[ShardedTensor], object_keys: list[str]) -> Plan:
        if self._plan is None or not self._plan.fits(tensors, object_keys):
            self._plan = make_plan(tensors, object_keys, self._replicas)
        return self._plan

    def _agree_to_start(
        self,
        operation: Operation,
        failure: Exception | None,
        plan: Plan | None,
        size_bytes: int,
        directory: Path,
        timeout: timedelta,
    ) -> None:
        report = [plan.digest if plan else "", size_bytes]
        compare: bool = operation.gathering("start").settle(
            Deadline.after(timeout), failure=failure, report=report,
            decide=lambda reports: self._decide_start(reports, directory), foreign=CheckpointError,
        )  # fmt: skip
        if compare:
            assert plan is not None, "rank 0 decides only if every rank has a plan"
            catalogue = plan.catalogue.to_json().decode()
            operation.gathering("compare").settle(
                Deadline.after(timeout), report=catalogue, decide=self._compare, foreign=CheckpointError
            )

    def _decide_start(self, reports: Sequence[tuple[str, int]], directory: Path) -> bool:
        """Decides on rank 0 whether there is room, and whether catalogues have to be compared."""
        needed, free = sum(size for _, size in reports), shutil.disk_usage(directory).free
        if needed > free:
            raise CheckpointError(f"{needed} bytes to save, {free} free in {directory}: make room there")
        return [digest for digest, _ in reports] != [digest for digest, _ in self._catalogues]

    def _compare(self, reports: Sequence[str]) -> None:
        catalogues = [Catalogue.from_json(report.encode()) for report in reports]
        if mismatch := find_mismatch(catalogues):
            raise CheckpointError(f"the ranks' states do not match, nothing is saved: {mismatch}")
        self._catalogues = [(catalogue.digest(), catalogue) for catalogue in catalogues]

    def advance(self) -> None:
        """Moves a save in the background on, without waiting; how it ended is for `poll` or `finish` to say.

        Not collective.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        if self._flight is not None:
            self._flight.advance()

    def poll(self) -> bool:
        """Moves a save in the background on, without waiting. Not collective.

        Ranks learn at different times that a save has failed. So that they stay in step, the failure is logged here
        and raised by `finish`, on every rank.

        Returns:
            Whether it is still in progress.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        if self._flight is None:
            return False
        outcome = self._flight.poll()
        if outcome is not None and outcome.failure is None:
            self._flight = None
        return outcome is None

    def finish(self, timeout: timedelta) -> Any:
        """Waits until the save is committed; returns what the commit did, on every rank. None if there is no save.

        Raises:
            CheckpointError: On every rank, if a rank could not write or rank 0 not commit.
            PhaseTimeoutError: Naming the ranks that had not written in time.
            CommunicatorError: If the run's store is gone.
        """
        flight, self._flight = self._flight, None
        return None if flight is None else flight.conclude(flight.finish(timeout))

    def abandon(self, reason: str) -> None:
        """Gives up a save in flight and tells the others, whose `finish` then fails as soon as it can. Does not wait.

        Not collective: for a rank that will not get to the end of the save. What it is writing is left behind.

        Args:
            reason: What has happened, in one line.

        Raises:
            CommunicatorError: If the run's store is gone.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.abandon(reason)

    @collector_paused()
    def _commit(self, directory: Path, everyone: Sequence[Written], commit: Commit) -> Any:
        """Makes the shards a checkpoint, on rank 0."""
        files: dict[str, WrittenFile] = {}
        storage: dict[Any, Any] = {}
        for (_, catalogue), written in zip(self._catalogues, everyone, strict=True):
            if written.file is not None:
                files[written.file.name] = written.file
                storage |= places(catalogue, written.file.name, written.file.lengths, written.blobs)
        metadata = to_metadata([catalogue for _, catalogue in self._catalogues])
        results = [WriteResult(index=i, size_in_bytes=info.length, storage_data=info) for i, info in storage.items()]
        FileSystemWriter(directory).finish(metadata, [results])
        write_format(directory)
        return commit(files, [written.note for written in everyone])
