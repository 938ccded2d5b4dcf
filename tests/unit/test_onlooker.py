"""An onlooker's two looks: a rank that polls waits, if another one stands still that it cannot go on without."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rl_safe_workers.diagnostics import onlooker
from rl_safe_workers.diagnostics.onlooker import Members, Sighting, _Look, observe
from rl_safe_workers.diagnostics.proc_facts import ProcessFacts
from rl_safe_workers.frames import COLLECTIVES, Frame

POLLS = 400
"""Switches between two looks of a rank that polls."""


def look(
    rank: int, *frames: Frame, op: str | None = None, switches: int = 0, members: Members = Members.WORLD
) -> _Look:
    pid = 100 + rank
    facts = ProcessFacts(
        pid=pid, state="S", switches=switches, system_call="read", variables={"RANK": str(rank), "WORLD_SIZE": "2"}
    )
    return _Look(facts=facts, at_s=switches / POLLS, thread=pid, frames=frames, op=op, members=members)


def collective(
    *,
    inside: int = 1,
    called_at: int = 9,
    switches: int = 0,
    op: str = "barrier",
    members: Members = Members.WORLD,
) -> _Look:
    frames = [("store.py", inside, "check"), (COLLECTIVES, 5, op), ("train.py", called_at, "step")]
    named = (Frame(file=file, line=line, function=function) for file, line, function in frames)
    return look(0, *named, op=op, switches=switches, members=members)


def outside(*, line: int = 3, switches: int = 0) -> _Look:
    return look(1, Frame(file="data.py", line=line, function="read"), switches=switches)


def seen(monkeypatch: pytest.MonkeyPatch, waits: Sequence[_Look], others: Sequence[_Look]) -> Sighting:
    """Returns how rank 0 is seen, by two looks at it and two at rank 1."""
    looks = iter([dict(zip((100, 101), pair, strict=True)) for pair in zip(waits, others, strict=True)])
    monkeypatch.setattr(onlooker, "_look_at_all", lambda *_: next(looks))
    monkeypatch.setattr(onlooker, "_look", lambda *_, **__: others[1])
    return observe([100, 101], patience_s=10.0, pause_s=0.0)[0]


@pytest.mark.parametrize("inside", [1, 2], ids=["at one line", "at two lines of a loop"])
def test_a_rank_that_polls_waits_for_one_that_stands_still(inside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    polling = collective(), collective(inside=inside, switches=POLLS)
    assert seen(monkeypatch, polling, (outside(), outside())).stays


@pytest.mark.parametrize(
    ("waits", "others"),
    [
        ((collective(), collective(switches=POLLS)), (outside(), outside(switches=1))),
        ((collective(), collective(switches=POLLS)), (outside(), outside(line=4))),
        ((collective(), collective(switches=POLLS, called_at=10)), (outside(), outside())),
        ((collective(), collective(switches=POLLS, members=Members.SUBGROUP)), (outside(), outside())),
        ((collective(op="broadcast"), collective(op="broadcast", switches=POLLS)), (outside(), outside())),
    ],
    ids=["the other runs", "the other has moved", "it is called anew", "of a group", "with a root"],
)
def test_a_rank_that_may_have_gone_round_moves(
    waits: Sequence[_Look], others: Sequence[_Look], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not seen(monkeypatch, waits, others).stays
