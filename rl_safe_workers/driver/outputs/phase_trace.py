"""Writes ``trace.json``: the phases of every rank over time, for ui.perfetto.dev and chrome://tracing.

The format is Chrome's "Trace Event Format". Its two processes are the trainers and the rollout ranks, its threads are
the ranks, and each pass through a phase is a complete event.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_safe_workers.lifecycle import PhaseEvent
from rl_safe_workers.ranks import RankId, Role


def trace_events(events: Sequence[PhaseEvent]) -> list[dict[str, Any]]:
    """Returns the trace's events: first the names of processes and threads, then the phases, sorted by their start.

    Times are microseconds since the first phase began. The name of a failed phase ends in ``(failed)``, so that viewers
    give it a different colour and a search finds it.
    """
    # Viewers reserve thread 0 for the idle thread, so threads are numbered from 1, over both roles.
    ranks = sorted({RankId(event.role, event.rank) for event in events})
    threads = {rank_id: number for number, rank_id in enumerate(ranks, start=1)}
    processes = {role: number for number, role in enumerate(Role, start=1)}
    origin_s = min((event.start_s for event in events), default=0.0)
    trace = [
        _name("process_name", f"{role.noun}s", pid=processes[role], tid=0)
        for role in Role
        if any(rank_id.role is role for rank_id in ranks)
    ]
    trace += [
        _name("thread_name", str(rank_id), pid=processes[rank_id.role], tid=thread)
        for rank_id, thread in threads.items()
    ]
    for event in sorted(events, key=lambda event: event.start_s):
        # Both ends are rounded, not the length, so that a phase never ends after the next one starts.
        start_us, end_us = (round((at_s - origin_s) * 1e6) for at_s in (event.start_s, event.end_s))
        trace.append(
            {
                "ph": "X",
                "name": str(event.phase) if event.ok else f"{event.phase} (failed)",
                "cat": "phase" if event.ok else "phase,failed",
                "pid": processes[event.role],
                "tid": threads[RankId(event.role, event.rank)],
                "ts": start_us,
                "dur": max(0, end_us - start_us),
                "args": {"ok": event.ok, "start_unix_s": event.start_s, "device_bytes": dict(event.device_bytes)},
            }
        )
    return trace


def _name(kind: str, name: str, *, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def write_trace(path: Path, events: Sequence[PhaseEvent]) -> None:
    """Writes the trace of a run, one event per line. Without phases the file is valid and has no events."""
    lines = ",\n".join(json.dumps(event) for event in trace_events(events))
    path.write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n', encoding="utf-8")
