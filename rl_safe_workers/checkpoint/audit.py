"""Audits a checkpoint: is it whole? Needs no GPU, process group or Ray, and keeps off the critical path.

    report = audit(Path("checkpoints/global_step_10"), deep=True)
    report.ok, report.problems

It checks that every element of every tensor is stored exactly once, as megatron-core's access validation would have
done during the save. It also checks what megatron-core never checks: the files have all their bytes, and with ``deep``
these are the bytes that the save wrote. It reads checkpoints of verl, NeMo RL and Megatron-LM too, which have no
manifest of ours.

The audit runs in a child process with limits, so that no checkpoint takes more memory or time than its size justifies.

Pure Python: starts in milliseconds.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from rl_safe_workers.bounded_child import Limits, call_bounded, lift_time_limit
from rl_safe_workers.checkpoint.audit_report import AuditReport, Findings
from rl_safe_workers.checkpoint.folders.manifest_facts import ManifestFacts, read_manifest_facts
from rl_safe_workers.checkpoint.folders.ownership import INCOMPLETE
from rl_safe_workers.checkpoint.format.archives import Archive, crc32_of, damaged_archives, read_pickle
from rl_safe_workers.checkpoint.format.gc_pause import gc_paused
from rl_safe_workers.checkpoint.format.index import (
    COMMON,
    FORMAT,
    METADATA,
    ByteRange,
    CheckpointIndex,
    Format,
    Location,
    chunk_bytes,
    limits_of,
    locate,
    read_format,
    read_records,
)
from rl_safe_workers.checkpoint.format.rectangles import uncovered
from rl_safe_workers.errors import CheckpointError
from rl_safe_workers.foreign_files import open_foreign, printable

FileId = tuple[int, int]
"""Device and inode."""


def audit(directory: Path, *, deep: bool = False) -> AuditReport:
    """Checks a checkpoint and reports all that is wrong with it. Only reads, and executes nothing from the checkpoint.

    Args:
        directory: What `index.locate` takes: a checkpoint of ours, or one of torch_dist format.
        deep: Also read every byte. Compare each file with its digest in our manifest; if it has none, compare each
            stored tensor and object with its own checksum.

    Raises:
        UsageError: If there is no such directory.
        CheckpointError: If it holds no checkpoint, or several.
    """
    location = locate(directory)
    limits = _limits(location)
    if deep:  # the time depends on the number of bytes
        limits = replace(limits, wall_s=None)
    arguments = {"root": str(location.root.absolute()), "shards": str(location.shards.absolute()), "deep": deep}
    answer = call_bounded(
        audit_here, arguments, limits=limits, subject=printable(str(directory)), failure=CheckpointError
    )
    return AuditReport.from_dict(printable(str(directory)), json.loads(answer))


def _limits(location: Location) -> Limits:
    try:
        return limits_of(location)
    except CheckpointError:  # the audit says what is wrong with it
        return Limits(memory_bytes=2**28, cpu_s=2, wall_s=60.0, answer_bytes=2**20)


def audit_here(root: str, shards: str, deep: bool) -> bytes:
    """Audits in this process, a bounded child.

    Returns:
        The report without its directory, as JSON.
    """
    started = time.perf_counter()
    run = _Audit(Location(root=Path(root), shards=Path(shards)))
    with gc_paused():
        run.check()
        if deep:
            lift_time_limit()
            run.check_bytes()
    return json.dumps(run.report(deep=deep, seconds=time.perf_counter() - started).as_dict()).encode()


class _Audit:
    """The checks of one audit, in order: each uses what the checks before it have read."""

    def __init__(self, location: Location) -> None:
        self.location = location
        self.findings = Findings()
        self.manifest: ManifestFacts | None = None
        self.format: Format | None = None
        self.index: CheckpointIndex | None = None
        self.sizes: dict[str, int] = {}
        """Bytes of each file that is there, by path relative to the root."""
        self._wrong: set[str] = set()
        """Files whose size is known to be wrong; a deep audit need not read them."""
        self._identities: dict[str, FileId] = {}
        """Device and inode of each file that is there: many names may lead to the same bytes."""

    def check(self) -> None:
        """Runs every check that does not have to read tensors."""
        with self.findings.catching("manifest"):
            self.manifest = self._read_manifest()
        with self.findings.catching("format"):
            self.format = read_format(self.location)
        with self.findings.catching("metadata"):
            self.index = read_records(self.location)
        self._check_files()
        if self.index is not None:
            self._check_coverage(self.index)
            self._check_places(self.index)
        with self.findings.catching("common"):
            self._check_common()

    def _read_manifest(self) -> ManifestFacts | None:
        if self.location.manifest is not None:
            return read_manifest_facts(self.location.root)
        names = (self.location.shards.name, self.location.shards.absolute().parent.name)
        if any(name.endswith(INCOMPLETE) for name in names):
            raise CheckpointError(f"{self.location.shards} is of a save that did not finish: it has no manifest")
        return None

    def _name(self, shard_file: str) -> str:
        return str(self.location.shards.relative_to(self.location.root) / shard_file)

    def _check_files(self) -> None:
        places = _placed(self.index) if self.index else []
        needed = {self._name(name) for name in {METADATA, FORMAT} | {place.file for _, place, _ in places}}
        listed = self.manifest.files if self.manifest else {}
        for name in sorted(needed | listed.keys()):
            try:
                size = self._look_at(name)
            except OSError as error:
                missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
                self.findings.add("file", f"{name} {'is missing' if missing else f'cannot be read: {error.strerror}'}")
                continue
            if self.manifest and name not in listed:
                self.findings.add("manifest", f"{name} is not in the manifest, so nothing says what it should hold")
            elif self.manifest and size != listed[name].bytes:
                self.findings.add("file", f"{name} has {size} bytes, {listed[name].bytes} were written")
                self._wrong.add(name)

    def _look_at(self, name: str) -> int:
        """Notes the size and the identity of a file; returns the size."""
        with open_foreign(self.location.root / name, within=self.location.root) as file:
            status = os.fstat(file.fileno())
        self.sizes[name], self._identities[name] = status.st_size, (status.st_dev, status.st_ino)
        return status.st_size

    def _check_coverage(self, index: CheckpointIndex) -> None:
        for key, entry in index.tensors.items():
            for wrong in uncovered([(chunk.offsets, chunk.sizes) for chunk in entry.chunks], entry.shape):
                self.findings.add("coverage", f"{key} {list(entry.shape)}: {wrong}")

    def _check_places(self, index: CheckpointIndex) -> None:
        for text in index.unclaimed:
            self.findings.add("range", f"bytes are stored for what is no part of the checkpoint: {text}")
        for key in _unplaced(index):
            self.findings.add("range", f"{key} has no place in any file")
        by_file: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for key, place, least in _placed(index):
            by_file[place.file].append((place.offset, place.stop, key))
            if place.length < least:
                text = f"{key} has {place.length} bytes at {place.offset} of {place.file}, its elements need {least}"
                self.findings.add("range", text)
        for file, ranges in sorted(by_file.items()):
            for text in _misplaced(sorted(ranges), self.sizes.get(self._name(file))):
                self.findings.add("range", f"{file}: {text}")

    def _check_common(self) -> None:
        index, name = self.index, self._name(COMMON)
        key = index.common_object if index else None
        if (self.location.shards / COMMON).exists():
            with self._opened(COMMON) as file:
                size = self._look_at(name)
                read_pickle(Archive(file, 0, size, source=str(self.location.shards / COMMON)))
        elif index and key and (place := index.objects[key]) and self._is_there(place):
            with self._opened(place.file) as file:
                source = f"{key} in {self.location.shards / place.file}"
                read_pickle(Archive(file, place.offset, place.length, source=source))
        elif index and key is None and not (self.manifest and name in self.manifest.files):
            self.findings.add("common", f"there is neither a {COMMON} nor an object in its place")

    def _opened(self, shard_file: str) -> BinaryIO:
        path = self.location.shards / shard_file
        try:
            return open_foreign(path, within=self.location.root)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

    def _is_there(self, place: ByteRange) -> bool:
        return place.stop <= self.sizes.get(self._name(place.file), -1)

    def check_bytes(self) -> None:
        """Reads each file once. Checks it against its digest if it has one, else archive by archive."""
        digests = {name: file.digest for name, file in self.manifest.files.items()} if self.manifest else {}
        read: dict[FileId, str] = {}
        for name, digest in sorted(digests.items()):
            if name in self.sizes and name not in self._wrong and digest:
                identity = self._identities[name]
                with self._readable(name):
                    if identity not in read:
                        read[identity] = crc32_of(self.location.root / name, within=self.location.root)
                    if (found := read[identity]) != digest:
                        text = f"{name} does not have the bytes that were written: {found}, not {digest}"
                        self.findings.add("bytes", text)
        archives: defaultdict[FileId, dict[ByteRange, str]] = defaultdict(dict)
        for key, place, _ in _placed(self.index) if self.index else []:
            if self._is_there(place) and not digests.get(self._name(place.file)):
                archives[self._identities[self._name(place.file)]][place] = key
        size = self.sizes.get(self._name(COMMON))
        if size is not None and not digests.get(self._name(COMMON)):
            archives[self._identities[self._name(COMMON)]][ByteRange(COMMON, 0, size)] = COMMON
        for owners in sorted(archives.values(), key=lambda owners: min(place.file for place in owners)):
            name = min(place.file for place in owners)
            with self._readable(name):
                path = self.location.shards / name
                for place, wrong in damaged_archives(path, list(owners), within=self.location.root):
                    self.findings.add("bytes", f"{owners[place]} at {place.offset} of {place.file} {wrong}")

    @contextmanager
    def _readable(self, name: str) -> Iterator[None]:
        """Records a file that cannot be read as a problem, so that the audit goes on."""
        try:
            yield
        except OSError as error:
            self.findings.add("file", f"{name} cannot be read: {error.strerror}")

    def report(self, *, deep: bool, seconds: float) -> AuditReport:
        """Returns the findings."""
        index, manifest = self.index, self.manifest
        return AuditReport(
            directory=str(self.location.root),
            ok=not self.findings.counts,
            deep=deep,
            problems=tuple(self.findings.problems),
            counts=dict(self.findings.counts),
            has_manifest=self.location.manifest is not None,
            step=manifest.step if manifest else None,
            layout=_printable(manifest.layout) if manifest else None,
            versions=_printable(manifest.versions) if manifest else None,
            backend=self.format.backend if self.format else None,
            tensors=len(index.tensors) if index else 0,
            chunks=sum(len(entry.chunks) for entry in index.tensors.values()) if index else 0,
            objects=len(index.objects) if index else 0,
            files=len(self.sizes),
            bytes=sum(self.sizes.values()),
            seconds=round(seconds, 3),
        )


def _printable(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {printable(str(key)): printable(value) if isinstance(value, str) else value for key, value in facts.items()}


def _placed(index: CheckpointIndex) -> Iterator[tuple[str, ByteRange, int]]:
    """Yields key, place and minimum number of bytes of every chunk and object that has a place."""
    for key, entry in index.tensors.items():
        for chunk in entry.chunks:
            if chunk.place:
                yield key, chunk.place, chunk_bytes(entry, chunk)
    # Equal objects may share their bytes, as the extra states of all experts do.
    shared: dict[ByteRange, str] = {}
    for key, place in index.objects.items():
        if place:
            shared.setdefault(place, key)
    yield from ((key, place, 0) for place, key in shared.items())


def _unplaced(index: CheckpointIndex) -> Iterator[str]:
    for key, entry in index.tensors.items():
        yield from (f"{key} at {list(chunk.offsets)}" for chunk in entry.chunks if not chunk.place)
    yield from (key for key, place in index.objects.items() if not place)


def _misplaced(ranges: list[tuple[int, int, str]], size: int | None) -> Iterator[str]:
    """Says which ranges ``(offset, stop, key)`` of a file, sorted, overlap or pass its end."""
    reach, before = 0, ""
    for offset, stop, key in ranges:
        if offset < reach:
            yield f"bytes {offset} to {stop} of {key} overlap those of {before}"
        if stop > reach:
            reach, before = stop, key
        if size is not None and stop > size:
            yield f"bytes {offset} to {stop} of {key} pass its end at {size}"
