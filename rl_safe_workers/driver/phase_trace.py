"""``trace.json``: the phases of every rank over time, as ui.perfetto.dev and chrome://tracing open them.

The format is Chrome's "Trace Event Format": trainers and rollout ranks are its processes, ranks its threads, and each
stay in a phase is a complete event.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_safe_workers.lifecycle import PhaseEvent
from rl_safe_workers.ranks import RankId, Role


def trace_events(events: Sequence[PhaseEvent]) -> list[dict[str, Any]]:
    """Returns the trace's events: names of processes and threads first, then the stays by their start.

    Times are microseconds since the first stay began. A stay that failed says so in its name, so that viewers give it
    a colour of its own and find it.
    """
    # Viewers keep thread 0 for the idle one, so threads are counted from 1, over both roles.
    ranks = sorted({RankId(event.role, event.rank) for event in events})
    threads = {rank_id: number for number, rank_id in enumerate(ranks, start=1)}
    processes = {role: number for number, role in enumerate(Role, start=1)}
    origin_s = min((event.start_s for event in events), default=0.0)
    trace = [
        _name("process_name", f"{role} ranks", pid=processes[role], tid=0)
        for role in Role
        if any(rank_id.role is role for rank_id in ranks)
    ]
    trace += [
        _name("thread_name", str(rank_id), pid=processes[rank_id.role], tid=thread)
        for rank_id, thread in threads.items()
    ]
    for event in sorted(events, key=lambda event: event.start_s):
        # Both ends are rounded, not the length: a stay never ends after the next one starts.
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
    """Writes the trace of a run, one event a line; valid, and without events, if there was no phase."""
    lines = ",\n".join(json.dumps(event) for event in trace_events(events))
    path.write_text(f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n', encoding="utf-8")
