"""Compares two steps of one run: did everything move that should have moved?

    report = audit_steps(Path("checkpoints/global_step_10"), Path("checkpoints/global_step_20"))
    report.ok, report.problems

A host's save may write stale weights or stale optimizer state, and look well otherwise (NeMo RL 3312). Each step is
whole then, and `audit` finds nothing. This module finds it by comparing the steps. A unit is a tensor, or one matrix
of a tensor that stacks layers or experts. For each unit, the module compares the weight and, if they are stored, the
optimizer's fp32 weight and its two moments. Two correct steps never show one of these patterns:

- Everything is equal.
- The moments moved, and the fp32 weight did not.
- The fp32 weight moved, and the weight did not, although rounding the fp32 weight would have changed it.
- The weight moved, and the moments, which are not zero, did not.

An expert that got no token may keep all its values. It raises no alarm.

Needs no GPU, torch, process group or Ray. Checksums tell most chunks apart without reading them.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from rl_safe_workers.bounded_child import call_bounded, lift_time_limit
from rl_safe_workers.checkpoint.audit_report import Findings, Problem, StepsReport
from rl_safe_workers.checkpoint.folders.manifest_facts import read_manifest_facts
from rl_safe_workers.checkpoint.format.archives import Archive
from rl_safe_workers.checkpoint.format.index import (
    CheckpointIndex,
    Chunk,
    Location,
    TensorEntry,
    chunk_bytes,
    limits_of,
    locate,
    read_records,
)
from rl_safe_workers.checkpoint.format.rectangles import Index
from rl_safe_workers.errors import CheckpointError, UsageError
from rl_safe_workers.foreign_files import open_foreign, printable

Words = NDArray[np.unsignedinteger[Any]]
"""The bits of a tensor's elements."""

_STATE = re.compile(r"(?:^|\.)optimizer\.state\.(param|exp_avg|exp_avg_sq)\.([^\s]+)")
"""Key of an optimizer state of megatron-core's Adam, in its formats ``fully_reshardable`` and
``fully_sharded_model_space``."""
_MASTER, _MOMENTS = "param", ("exp_avg", "exp_avg_sq")
_FLOATS = ("float64", "float32", "bfloat16", "float16")
_BLOCK_BYTES = 32 * 2**20
_ROOM_BYTES = 8 * 2**30
"""Memory for values: a few blocks, or one row of each step if a row is larger, e.g. all experts of a layer."""


def audit_steps(first: Path, second: Path) -> StepsReport:
    """Compares two checkpoints of one run, the earlier first. Only reads, and executes nothing from the checkpoints.

    Args:
        first: What `index.locate` takes.
        second: As ``first``. Its tensors must be cut into the same chunks.

    Raises:
        UsageError: If a directory is missing, or both are the same checkpoint.
        CheckpointError: If one holds no checkpoint, is damaged, or is cut in another way than the other.
    """
    places = [locate(directory) for directory in (first, second)]
    if places[0].shards.resolve() == places[1].shards.resolve():
        raise UsageError(f"{printable(str(second))} is the same checkpoint as the first; give two steps of a run")
    limits = [limits_of(place) for place in places]
    memory_bytes = sum(limit.memory_bytes for limit in limits) + _ROOM_BYTES
    answer = call_bounded(
        compare_here,
        {
            "roots": [str(place.root.absolute()) for place in places],
            "shards": [str(p.shards.absolute()) for p in places],
        },
        limits=replace(limits[0], memory_bytes=memory_bytes, wall_s=None),
        subject=printable(str(second)),
        failure=CheckpointError,
    )
    fields = json.loads(answer)
    names = {"first": printable(str(first)), "second": printable(str(second))}
    problems = tuple(Problem(**problem) for problem in fields["problems"])
    return StepsReport(**{**fields, **names, "steps": tuple(fields["steps"]), "problems": problems})


def compare_here(roots: list[str], shards: list[str]) -> bytes:
    """Compares in this process, a bounded child; returns the report as JSON."""
    started_s = time.perf_counter()
    lift_time_limit()
    with ExitStack() as stack:
        pair = [
            stack.enter_context(_Step(Location(root=Path(root), shards=Path(folder))))
            for root, folder in zip(roots, shards, strict=True)
        ]
        comparison = _Comparison(*pair)
        comparison.run()
    findings = comparison.findings
    report = StepsReport(
        first="",
        second="",
        steps=(pair[0].number, pair[1].number),
        ok=not findings.counts,
        problems=tuple(findings.problems),
        counts=dict(findings.counts),
        units=comparison.units,
        moved=comparison.moved,
        not_judged=comparison.not_judged,
        seconds=round(time.perf_counter() - started_s, 3),
    )
    return json.dumps(report.as_dict()).encode()


class _Step(ExitStack):
    """One checkpoint. Reads its tensors by rows."""

    def __init__(self, location: Location) -> None:
        super().__init__()
        self.location = location
        self.number = read_manifest_facts(location.root).step if location.manifest is not None else None
        self.index: CheckpointIndex = read_records(location)
        self._files: dict[str, BinaryIO] = {}

    def archive(self, key: str, chunk: Chunk) -> tuple[BinaryIO, Archive]:
        """Opens the archive of a chunk."""
        if chunk.place is None:
            raise CheckpointError(f"{key} at {list(chunk.offsets)} has no place in any file; audit this step alone")
        name = chunk.place.file
        if name not in self._files:
            path = self.location.shards / name
            try:
                self._files[name] = self.enter_context(open_foreign(path, within=self.location.root))
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        source = f"{key} in {self.location.shards / name}"
        return self._files[name], Archive(self._files[name], chunk.place.offset, chunk.place.length, source=source)

    def rows(self, key: str, start: int, stop: int) -> Words:
        """Reads rows of a tensor (indices of its first dimension) from all chunks that hold some of them."""
        entry = self.index.tensors[key]
        shape = entry.shape or (1,)
        found = np.zeros((stop - start, *shape[1:]), f"u{entry.itemsize}")
        for chunk in entry.chunks:
            offsets, sizes = chunk.offsets or (0,), chunk.sizes or (1,)
            first, last = max(start, offsets[0]), min(stop, offsets[0] + sizes[0])
            if first >= last or 0 in sizes:
                continue
            place = tuple(slice(o, o + n) for o, n in zip(offsets[1:], sizes[1:], strict=True))
            part = self._chunk_rows(key, entry, chunk, first - offsets[0], last - offsets[0])
            found[(slice(first - start, last - start), *place)] = part
        return found

    def _chunk_rows(self, key: str, entry: TensorEntry, chunk: Chunk, start: int, stop: int) -> Words:
        file, archive = self.archive(key, chunk)
        sizes = chunk.sizes or (1,)
        row_bytes = chunk_bytes(entry, chunk) // sizes[0]
        begin, end = archive.place("data/0")
        if end - begin != chunk_bytes(entry, chunk):
            raise CheckpointError(
                f"{archive.source} holds {end - begin} bytes, but its elements need {chunk_bytes(entry, chunk)}"
            )
        file.seek(begin + start * row_bytes)
        data = file.read((stop - start) * row_bytes)
        return np.frombuffer(data, f"u{entry.itemsize}").reshape(stop - start, *sizes[1:])


class _Comparison:
    """Compares every weight of two steps, with its optimizer state."""

    def __init__(self, first: _Step, second: _Step) -> None:
        self.first, self.second = first, second
        self.findings = Findings()
        self.units = self.moved = self.not_judged = 0
        self._is_anything_moved = False

    def run(self) -> None:
        """Compares all, and adds what is wrong to `findings`."""
        self._check_keys()
        common = self.first.index.tensors.keys() & self.second.index.tensors.keys()
        states: dict[str, dict[str, str]] = {}
        for key in common:
            if match := _STATE.search(key):
                states.setdefault(match[2], {})[match[1]] = key
        weights = [key for key in common if not _STATE.search(key) and "optimizer" not in key]
        for key in sorted(weights):
            if self.second.index.tensors[key].dtype in _FLOATS:
                self._compare(key, states.get(key, {}))
        if self.units and not self._is_anything_moved:
            self.findings.add("copy", f"all {self.units} weights and their optimizer states are equal in both steps")

    def _check_keys(self) -> None:
        first, second = self.first.index.tensors, self.second.index.tensors
        for key in sorted(first.keys() ^ second.keys()):
            where = "first" if key in first else "second"
            self.findings.add("keys", f"{key} is in the {where} step only")
        for key in sorted(first.keys() & second.keys()):
            if (first[key].shape, first[key].dtype) != (second[key].shape, second[key].dtype):
                raise CheckpointError(f"{key} has another shape or dtype in the second step; give two steps of one run")

    def _compare(self, key: str, states: Mapping[str, str]) -> None:
        shape = self.second.index.tensors[key].shape
        names = {"weight": key}
        names |= {name: of for name, of in states.items() if self.second.index.tensors[of].shape == shape}
        moved = {name: self._moved_units(of) for name, of in names.items()}
        self.units += moved["weight"].size
        self.moved += int(moved["weight"].sum())
        self._is_anything_moved |= any(of_name.any() for of_name in moved.values())
        for unit in np.ndindex(moved["weight"].shape):
            self._judge(_Unit(key, names, unit), {name: bool(of_name[unit]) for name, of_name in moved.items()})

    def _judge(self, unit: _Unit, moved: Mapping[str, bool]) -> None:
        moments = [name for name in _MOMENTS if name in moved]
        updated = [name for name in moments if moved[name]]
        if moved.get(_MASTER) is False and updated:
            self.findings.add("weights", f"{unit}: the fp32 weight is equal in both steps, but {updated[0]} moved")
        elif not moved["weight"] and (moved.get(_MASTER) or updated):
            self._judge_rounding(unit)
        is_updated = moved["weight"] or moved.get(_MASTER, False)
        # Zeros stay zeros where an expert gets no token, and weight decay moves its weight.
        if is_updated and not updated and any(self._has_values(unit, name) for name in moments):
            self.findings.add("optimizer", f"{unit}: the moments are equal in both steps, but the weight moved")

    def _judge_rounding(self, unit: _Unit) -> None:
        """Judges a weight that did not move although its optimizer did: small updates are lost in low precision."""
        dtype = self.second.index.tensors[unit.names["weight"]].dtype
        if _MASTER in unit.names:
            if self._is_rounded(unit, dtype):
                return
        elif dtype not in ("float32", "float64"):
            self.not_judged += 1
            return
        self.findings.add("weights", f"{unit}: the weight is equal in both steps, but the optimizer moved")

    def _is_rounded(self, unit: _Unit, dtype: str) -> bool:
        pairs = zip(self._parts(unit, "weight"), self._parts(unit, _MASTER), strict=True)
        return all(np.array_equal(weight, _rounded(master.view(np.float32), dtype)) for weight, master in pairs)

    def _has_values(self, unit: _Unit, name: str) -> bool:
        return any(part.any() for part in self._parts(unit, name))

    def _parts(self, unit: _Unit, name: str) -> Iterator[Words]:
        """Yields the elements of a unit in the second step, in parts of bounded size."""
        key = unit.names[name]
        entry = self.second.index.tensors[key]
        if unit.index:
            first, *others = unit.index
            yield np.ascontiguousarray(self.second.rows(key, first, first + 1)[(0, *others)])
            return
        for start, stop in _blocks(entry, self.second.index.tensors[unit.names["weight"]]):
            yield self.second.rows(key, start, stop)

    def _moved_units(self, key: str) -> NDArray[np.bool_]:
        """Returns which units of a tensor differ between the steps."""
        entry = self.second.index.tensors[key]
        units = np.zeros(_units_of(entry.shape), np.bool_)
        if not units.shape and self._differs_by_checksum(key):
            return np.array(True)
        for start, stop in _blocks(entry):
            differs = self.first.rows(key, start, stop) != self.second.rows(key, start, stop)
            if units.shape:
                units[start:stop] = differs.any(axis=(-2, -1))
            else:
                units |= differs.any()
        return units

    def _differs_by_checksum(self, key: str) -> bool:
        """Returns True if a chunk's checksum differs. Equal checksums prove nothing: torch may write none."""
        first = {(c.offsets, c.sizes): c for c in self.first.index.tensors[key].chunks}
        for chunk in self.second.index.tensors[key].chunks:
            if before := first.get((chunk.offsets, chunk.sizes)):
                both = (self.first, before), (self.second, chunk)
                if len({step.archive(key, of)[1].checksum("data/0") for step, of in both}) > 1:
                    return True
        return False


@dataclass(frozen=True, slots=True)
class _Unit:
    """A tensor, or the matrix of one layer or expert in a stacked tensor."""

    key: str
    names: Mapping[str, str]
    """Keys of the weight and of its optimizer states."""
    index: Index
    """Place of the matrix; empty for a whole tensor."""

    def __str__(self) -> str:
        return f"{self.key}{list(self.index)}" if self.index else self.key


def _units_of(shape: Index) -> Index:
    """Returns the sizes of the leading axes, along which megatron-core stacks layers and experts."""
    return shape[:-2] if len(shape) > 2 else ()


def _blocks(*entries: TensorEntry) -> Iterator[tuple[int, int]]:
    """Cuts the rows of tensors of one shape into blocks of bounded size."""
    shape = entries[0].shape or (1,)
    itemsize = max(entry.itemsize for entry in entries)
    row_bytes = max(1, int(np.prod(shape[1:], dtype=np.int64)) * itemsize)
    step = max(1, _BLOCK_BYTES // row_bytes)
    yield from ((start, min(shape[0], start + step)) for start in range(0, shape[0], step))


def _rounded(values: NDArray[np.float32], dtype: str) -> Words:
    """Rounds fp32 values to a dtype, to the nearest, ties to even, as torch does; returns their bits."""
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    if dtype == "bfloat16":
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return bits
