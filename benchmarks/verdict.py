"""Measures the verdict on a failed job of thousands of ranks: the driver's work between the failure and its report.

The ranks leave their reports in a real TCPStore, from 64 processes. The answers of each node arrive as the bytes that
Ray would deliver. Stacks and Flight Recorder files come from a real run over gloo. The judge has one core.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import pickle
import resource
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from benchmarks.forks import in_a_fork
from benchmarks.table import Goal, Row, at_least, at_most, machine_in_words
from rl_safe_workers.control.plane import ControlPlane
from rl_safe_workers.control.seal import new_secret
from rl_safe_workers.diagnostics.diagnosis import diagnose_answers
from rl_safe_workers.diagnostics.flight_recorder import Record, read_flights
from rl_safe_workers.diagnostics.inquiry import Answers, RankProcess
from rl_safe_workers.diagnostics.stacks import Stack
from rl_safe_workers.errors import Awaited, PhaseTimeoutError
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import TRAINING_WORLD, trainer_id, trainer_ids
from rl_safe_workers.versions import installed_versions

SIZES = (1024, 4096)
"""Number of ranks of the small and of the large job."""
CLIENTS, NODE_RANKS = 64, 8
RUNS = 3
LONGEST_S, LARGEST_GIB, STEEPEST = 10.0, 1.0, 1.5
"""Goals of the large job: seconds and memory of its verdict, and its time per rank relative to the small job's."""
_PATIENCE = timedelta(seconds=300)
_PATIENCE_S = 3.0
"""The same as `adapters.job_verdict.PATIENCE_S`."""
_WORKS = 2000
"""Number of collectives in a Flight Recorder file, which is then full."""
_LOST_PEER = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.4]:23456"
_DIED, _HANGS, _COLLECTIVES, _PHASES = "one died", "one hangs", "different collectives", "two phases"
CASES: Mapping[str, str] = {
    _DIED: "a process is gone, and all others report that they have lost a peer",
    _HANGS: "a rank does something else, and all others report that it did not come",
    _COLLECTIVES: "a quarter waits in another group than the rest, and a rank in none; the driver gave up",
    _PHASES: "a quarter waits in another phase than the rest; each names the other ranks as missing",
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The answer of a real rank: its stacks and its Flight Recorder file."""

    text: str
    stack: Stack
    record: Record
    flight: bytes
    """The Flight Recorder file, compressed as for the transfer."""

    @classmethod
    def of(cls, text: str, flight: bytes) -> Sample:
        """Reads the files that a rank has left."""
        record = read_flights({"flight_gloo_0": flight})[0]
        return cls(text=text, stack=Stack.parse(text), record=record, flight=zlib.compress(flight, level=1))


def _sample(folder: Path, rank: int, port: int) -> None:
    """Writes the sample of a rank: two ranks run collectives, and rank 0 waits in one that rank 1 never enters."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(_WORKS)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.new_group([0, 1], group_desc="DATA_PARALLEL_GROUP")
    value = torch.ones(8)
    for _ in range(_WORKS):
        dist.all_reduce(value, group=group)
    threading.Timer(1.0, _leave, (folder, rank, store)).start()
    if rank == 0:
        dist.all_reduce(value, group=group)
    threading.Event().wait()


def _leave(folder: Path, rank: int, store: TCPStore) -> None:
    dump = torch._C._distributed_c10d._dump_fr_trace  # type: ignore[attr-defined]
    (folder / f"flight_{rank}").write_bytes(dump(True, False, False))
    with (folder / f"stack_{rank}").open("wb") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
    store.set(f"done/{rank}", b"")
    store.wait([f"done/{other}" for other in range(2)])
    os._exit(0)


def samples(folder: Path) -> tuple[Sample, Sample]:
    """Runs two ranks over gloo; returns the sample of the rank that waits, and of the rank that does not."""
    with _Owner() as port:
        _join([_started(_sample, folder, rank, port) for rank in range(2)])
    first, second = (
        Sample.of(text=(folder / f"stack_{rank}").read_text(), flight=(folder / f"flight_{rank}").read_bytes())
        for rank in range(2)
    )
    return first, second


class _Owner:
    """A process that owns a store, like training rank 0. Entering it returns the store's port."""

    def __enter__(self) -> int:
        self._over = _FORK.Event()
        ports: Any = _FORK.SimpleQueue()
        self._process = _started(self._own, ports)
        return int(ports.get())

    def _own(self, ports: Any) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
        ports.put(store.port)
        self._over.wait()
        os._exit(0)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        _join([self._process])


_FORK: Any = multiprocessing.get_context("fork")


def _started(work: Callable[..., object], *args: object) -> Any:
    process = _FORK.Process(target=work, args=args)
    process.start()
    return process


def _join(processes: Iterable[Any]) -> None:
    for process in processes:
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"a process of the benchmark has ended with exit code {process.exitcode}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A failed job.

    Example: ``Job(case="one died", size=4096, folder=folder, port=4711, secret=new_secret(), samples=samples)``
    """

    case: str
    size: int
    folder: Path
    port: int
    secret: bytes
    samples: tuple[Sample, Sample]

    @property
    def culprit(self) -> int:
        """The rank that the failure began with, if it is a single rank."""
        return self.size // 2

    @property
    def astray(self) -> range:
        """The ranks in the other phase or group."""
        return range(self.size // 4)

    def culprits(self) -> set[int]:
        """Returns the ranks that a correct verdict names."""
        return set(self.astray) if self.case == _PHASES else {self.culprit}

    def report_from(self, client: int) -> None:
        """Does the work of one client's ranks: they report over a single connection, and each node answers."""
        members = trainer_ids(range(self.size))
        ranks = range(self.size // CLIENTS * client, self.size // CLIENTS * (client + 1))
        everyone = frozenset(members)
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=_PATIENCE)
        first = ControlPlane(store, world=TRAINING_WORLD, rank=ranks[0], members=members, secret=self.secret)
        for rank in ranks:
            if (error := self._error_of(rank, Awaited(TRAINING_WORLD, everyone))) is not None:
                plane = first.of_world(TRAINING_WORLD, rank=rank, members=members)
                plane.report_failure(error, phase=Phase.TRAIN)
        for node in range(ranks.start // NODE_RANKS, ranks.stop // NODE_RANKS):
            places = range(NODE_RANKS * node, NODE_RANKS * (node + 1))
            answers = Answers.of_nodes([self._answer_of(rank) for rank in places])
            (self.folder / f"node_{node}").write_bytes(pickle.dumps(answers))

    def _error_of(self, rank: int, awaited: Awaited) -> Exception | None:
        if self.case == _COLLECTIVES or (self.case != _PHASES and rank == self.culprit):
            return None
        if self.case == _DIED:
            try:
                raise RuntimeError(_LOST_PEER)
            except RuntimeError as error:
                return error
        phase, missing = Phase.TRAIN, {self.culprit}
        if self.case == _PHASES:
            is_astray = rank in self.astray
            phase = Phase.LOGPROB if is_astray else Phase.TRAIN
            missing = set(range(self.size)).difference(self.astray) if is_astray else set(self.astray)
        return PhaseTimeoutError(
            phase=phase,
            awaited=awaited,
            missing=trainer_ids(missing),
            waited_s=600.0 + rank / self.size,
            setting=f"rl_safe.timeouts.{phase}",
        )

    def _answer_of(self, rank: int) -> Answers:
        is_culprit = rank == self.culprit and self.case != _PHASES
        sample: Sample = pickle.loads(pickle.dumps(self.samples[is_culprit]))  # answers of two ranks share no object
        process = RankProcess(
            rank_id=trainer_id(rank), pid=1000 + rank, folder=Path("/tmp/rl_safe_job"), never_ends=True, cpu_s=1.0
        )
        if is_culprit and self.case == _DIED:
            return Answers(ranks=[replace(process, status="gone", last_place="my_loss.py:40 (loss)")])
        process = replace(process, status="sleeping", text=sample.text, source="faulthandler", stack=sample.stack)
        record = sample.record
        if self.case == _COLLECTIVES and rank in self.astray:
            record = _in_another_group(record)
        return Answers(
            ranks=[process],
            records={rank: record},
            flights={f"flight_gloo_{rank}": sample.flight},
            last_places={trainer_id(rank): "my_loss.py:40 (loss)"},
        )

    def judge(self, evidence: Path) -> dict[str, Any]:
        """Judges as the driver of a host does; returns the seconds, the memory and the kept evidence."""
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        members = trainer_ids(range(self.size))
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=_PATIENCE)
        plane = ControlPlane(store, world=TRAINING_WORLD, rank=-1, members=members, secret=self.secret)
        nodes = range(self.size // NODE_RANKS)
        gave_up = PhaseTimeoutError(
            phase=Phase.TRAIN,
            awaited=Awaited("the trainers", frozenset(members)),
            missing=members,
            waited_s=600.0,
            setting="rl_safe.timeouts.train",
        )

        def ask(patience_s: float) -> Answers:
            told: list[Answers] = [pickle.loads((self.folder / f"node_{node}").read_bytes()) for node in nodes]
            homes = {one: f"10.0.{one.rank // NODE_RANKS // 256}.{one.rank // NODE_RANKS % 256}" for one in members}
            return replace(Answers.of_nodes(told), homes=homes)

        judged = partial(
            diagnose_answers,
            ask,
            patience_s=_PATIENCE_S,
            reports=plane.reported_failures,
            phase=Phase.TRAIN,
            host_error=gave_up if self.case == _COLLECTIVES else None,
        )
        # Without evidence: its time depends on the disk, and it has a deadline of its own.
        cpu_s = time.process_time()
        judged()
        cpu_s = time.process_time() - cpu_s
        started_s = time.monotonic()
        found = judged(evidence=evidence)
        return {
            "verdict_s": time.monotonic() - started_s,
            "cpu_s": cpu_s,
            "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "verdict": found.verdict,
            "is_right": {one.rank for one in found.culprits} == self.culprits(),
            "files": sum(1 for _ in evidence.iterdir()),
            "kept_mib": sum(path.stat().st_size for path in evidence.iterdir()) / 2**20,
        }


def _in_another_group(record: Record) -> Record:
    work = record.under_way
    assert work is not None, "the sample of a rank that waits holds no collective under way"
    other = replace(work, op="all_to_all", group="EXPERT_MODEL_PARALLEL_GROUP")
    return replace(record, under_way=other, last=other)


def _judged(case: str, size: int, both: tuple[Sample, Sample]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as name, _Owner() as port:
        folder = Path(name)
        job = Job(case=case, size=size, folder=folder, port=port, secret=new_secret(), samples=both)
        said, over = _FORK.SimpleQueue(), _FORK.Event()

        def live(client: int) -> None:
            try:
                job.report_from(client)
                said.put("")
            except BaseException as error:
                said.put(repr(error))
                raise
            over.wait()
            os._exit(0)

        started_s = time.monotonic()
        clients = [_started(live, client) for client in range(CLIENTS)]
        complaints = [complaint for complaint in (said.get() for _ in clients) if complaint]
        reported_s = time.monotonic() - started_s
        result = folder / "result.json"
        is_judged = not complaints and in_a_fork(partial(job.judge, folder / "evidence"), result)
        over.set()
        if complaints:
            raise RuntimeError(complaints[0])
        if not is_judged:
            raise RuntimeError(result.with_suffix(".error").read_text(encoding="utf-8"))
        _join(clients)
        return {**json.loads(result.read_text(encoding="utf-8")), "reported_s": reported_s}


def measure(report: Callable[[str], None]) -> list[Row]:
    """Judges each case with few ranks and with many, in turns.

    Args:
        report: Takes a line of progress for each verdict.

    Raises:
        RuntimeError: If a process of the benchmark fails.
    """
    with tempfile.TemporaryDirectory(prefix="rl_safe_bench_") as name:
        both = samples(Path(name))
    rows: list[Row] = []
    for case in CASES:
        found: dict[int, list[dict[str, Any]]] = {size: [] for size in SIZES}
        for number in range(RUNS):
            for size in SIZES if number % 2 == 0 else reversed(SIZES):
                found[size].append(_judged(case, size, both))
                report(f"{case}, {size} ranks: {json.dumps(found[size][-1])}")
        rows += _rows(case, *(found[size] for size in SIZES))
    return rows


def _rows(case: str, few: Sequence[Mapping[str, Any]], many: Sequence[Mapping[str, Any]]) -> list[Row]:
    small, large = SIZES
    growth = median(one["cpu_s"] for one in many) / median(one["cpu_s"] for one in few) / (large / small)
    figures: list[tuple[str, str, float, Goal]] = [
        (f"{case}, {large} ranks: verdict", "s", median(one["verdict_s"] for one in many), at_most(LONGEST_S)),
        (f"{case}, {large} ranks: memory", "GiB", max(one["gib"] for one in many), at_most(LARGEST_GIB)),
        (f"{case}: processor time a rank, against {small} ranks", "", growth, at_most(STEEPEST)),
        (f"{case}: right verdicts", "", sum(one["is_right"] for one in (*few, *many)), at_least(2 * RUNS)),
    ]
    return [
        Row(
            name=name,
            unit=unit,
            ours=ours,
            goal=goal,
            runs=RUNS,
            machine=machine_in_words(),
            versions=installed_versions(),
        )
        for name, unit, ours, goal in figures
    ]
