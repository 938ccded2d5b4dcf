from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from rl_safe_workers.driver.outputs.phase_trace import trace_events, write_trace
from rl_safe_workers.lifecycle import Phase, PhaseEvent
from rl_safe_workers.ranks import Role

STARTED_S = 1_763_000_000.0


def event(phase=Phase.TRAIN, *, role=Role.TRAINER, rank=0, start_s=0.0, seconds=1.0, ok=True, held=None):
    start_s += STARTED_S
    return PhaseEvent(
        phase=phase, role=role, rank=rank, start_s=start_s, end_s=start_s + seconds, ok=ok, device_bytes=held or {}
    )


def named(trace, kind):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["ph"] == "M" and e["name"] == kind}


def stays(trace):
    return [e for e in trace if e["ph"] == "X"]


def test_each_role_is_a_process_and_each_rank_a_thread_of_it() -> None:
    trace = trace_events([event(role=Role.ROLLOUT), event(rank=10), event(rank=2), event(rank=2, start_s=3)])
    assert named(trace, "process_name") == {(1, 0): "training ranks", (2, 0): "rollout ranks"}
    assert named(trace, "thread_name") == {
        (1, 1): "training rank 2",
        (1, 2): "training rank 10",
        (2, 3): "rollout rank 0",
    }
    assert sorted((e["pid"], e["tid"]) for e in stays(trace)) == [(1, 1), (1, 1), (1, 2), (2, 3)]


def test_a_stay_is_a_complete_event_in_microseconds_since_the_first_began() -> None:
    trace = trace_events([event(start_s=2.5, seconds=0.25, held={"weights": 7}), event(Phase.WORLD, seconds=2)])
    first, second = stays(trace)
    assert (first["name"], first["ts"], first["dur"]) == ("world", 0, 2_000_000)
    assert (second["name"], second["ts"], second["dur"]) == ("train", 2_500_000, 250_000)
    assert second["args"] == {"ok": True, "start_unix_s": STARTED_S + 2.5, "device_bytes": {"weights": 7}}


def test_a_failed_stay_says_so_in_its_name() -> None:
    (stay,) = stays(trace_events([event(Phase.SAVE, ok=False)]))
    assert (stay["name"], stay["cat"], stay["args"]["ok"]) == ("save (failed)", "phase,failed", False)


def test_stays_that_touch_do_not_overlap_after_rounding() -> None:
    ends = [STARTED_S + n * 7e-7 for n in range(50)]
    events = [replace(event(), start_s=start_s, end_s=end_s) for start_s, end_s in pairwise(ends)]
    found = stays(trace_events(events))
    assert all(one["ts"] + one["dur"] <= following["ts"] for one, following in pairwise(found))


@pytest.mark.parametrize("events", [[], [event(), event(rank=1, ok=False)]])
def test_the_file_is_json_as_viewers_read_it(tmp_path, events) -> None:
    write_trace(tmp_path / "trace.json", events)
    read = json.loads((tmp_path / "trace.json").read_text())
    assert read == {"displayTimeUnit": "ms", "traceEvents": trace_events(events)}
