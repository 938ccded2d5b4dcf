"""The ranks that are named from what an onlooker sees, and the cases in which nobody is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl_safe_workers.diagnostics.holdup import explain_sightings
from rl_safe_workers.diagnostics.onlooker import Members, Sighting, Standing
from rl_safe_workers.diagnostics.proc_facts import ProcessFacts
from rl_safe_workers.frames import Frame


def rank(
    number: int,
    standing: Standing = Standing.WAITS,
    *,
    op: str | None = "all_reduce",
    members: Members = Members.WORLD,
    line: int = 10,
    size: int = 4,
    stays: bool = True,
    peer: int | None = None,
    doubt: str = "",
) -> Sighting:
    return Sighting(
        facts=ProcessFacts(pid=100 + number, state="S", variables={"WORLD_SIZE": str(size)}),
        standing=standing,
        global_rank=number,
        frames=[Frame(file="train.py", line=line, function="step")],
        op=op if standing is Standing.WAITS else None,
        members=members,
        stays=stays,
        peer=peer,
        doubt=doubt,
    )


def group(number: int, line: int = 10) -> Sighting:
    return rank(number, members=Members.SUBGROUP, line=line)


def out(number: int, line: int = 20) -> Sighting:
    return rank(number, Standing.ELSEWHERE, line=line)


def of_class(actor: str, sighting: Sighting) -> Sighting:
    return replace(sighting, actor=actor)


def test_ranks_of_actors_are_named_with_their_class() -> None:
    trainers = [of_class("Trainer", one) for one in (rank(0), rank(1), out(2), rank(3))]
    engine = of_class("Engine", replace(rank(2, Standing.IDLE), facts=ProcessFacts(pid=9, state="S")))
    found = explain_sightings([*trainers, engine])
    assert found.culprits == ["rank 2 of Trainer (process 102)"]
    assert "ranks 0-1, 3 of Trainer wait for it" in found.verdict


@pytest.mark.parametrize(
    ("sightings", "culprits"),
    [
        ([rank(0), out(1), rank(2), rank(3)], [1]),
        ([rank(0), out(1), out(2), rank(3)], [1, 2]),
        ([rank(0), rank(1, op="barrier"), rank(2), rank(3)], [1]),
        ([group(0), out(1), group(2), group(3)], [1]),
        ([rank(0), rank(1, Standing.STOPPED), out(2), rank(3)], [1]),
        ([rank(0), rank(1, Standing.STOPPED), rank(2, Standing.GONE), rank(3)], [2]),
        ([rank(0, peer=1), rank(1, peer=2), out(2), rank(3, peer=2)], [2]),
        ([rank(0), rank(1, Standing.ASLEEP), rank(2), rank(3)], [1]),
        ([rank(0, Standing.DEVICE), rank(1, Standing.DEVICE), out(2), rank(3, Standing.DEVICE)], [2]),
    ],
)
def test_ranks_outside_the_collective_are_named(sightings: list[Sighting], culprits: list[int]) -> None:
    found = explain_sightings(sightings)
    assert found.is_known
    assert found.culprits == [f"rank {one} (process {100 + one})" for one in culprits]


@pytest.mark.parametrize(
    ("sightings", "why"),
    [
        ([], "no process was found"),
        ([rank(0), out(1), out(2), out(3)], "more ranks are outside it than in it"),
        ([group(0), group(1), out(2), out(3)], "the members of a group cannot be seen"),
        ([group(0), out(1), group(2, line=30), group(3, line=30)], "the members of a group cannot be seen"),
        ([group(0, line=30), rank(1), rank(2), rank(3)], "every rank waits, and not in the same collective"),
        ([rank(0), rank(1), rank(2), rank(3)], "every rank waits in the same place"),
        ([rank(0, op="barrier"), rank(1, op="barrier"), rank(2), rank(3), out(4)], "more ranks"),
        ([rank(0, stays=False), rank(1, stays=False), out(2), rank(3, stays=False)], "the ranks move: ranks 0-1"),
        ([rank(0, stays=False, size=2), out(1)], "the ranks move: rank 0 (process 100) was not in"),
        ([rank(0), rank(1), rank(2)], "not all ranks were looked at"),
        ([group(0), out(1)], "not all ranks were looked at"),
        ([out(0), out(1), out(2), out(3)], "no rank waits for others"),
        ([rank(0), rank(1), rank(2), rank(3, Standing.UNKNOWN, doubt="py-spy may not")], "py-spy may not"),
        ([group(0), out(1), group(2), rank(3, Standing.UNKNOWN, doubt="x")], "it cannot be seen whether rank 3"),
    ],
)
def test_nobody_is_named_in_doubt(sightings: list[Sighting], why: str) -> None:
    found = explain_sightings(sightings)
    if why == "more ranks" and found.is_known:  # two against two, and one outside: that one is certain
        assert found.culprits == ["rank 4 (process 104)"]
        return
    assert (found.is_known, list(found.culprits)) == (False, [])
    assert found.verdict.startswith("not known, because ")
    assert why in found.verdict


def test_two_against_two_in_different_collectives_name_nobody() -> None:
    found = explain_sightings([rank(0), rank(1), rank(2, op="barrier"), rank(3, op="barrier")])
    assert found.verdict.startswith("ranks are in different collectives: ")
    assert list(found.culprits) == []


def left(*, dies_with_others: bool = True, size: int = 4, local: int = 4, stays: bool = True) -> Sighting:
    one = out(1)
    variables = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(local)}
    return replace(one, facts=replace(one.facts, variables=variables, dies_with_others=dies_with_others), stays=stays)


def ended(pid: int, exit_code: int | None = 0) -> Sighting:
    return Sighting(facts=ProcessFacts(pid=pid, state="Z", exit_code=exit_code), standing=Standing.GONE)


@pytest.mark.parametrize("others", [[], [ended(1)], [ended(1), ended(2), ended(3)]], ids=["reaped", "some", "zombies"])
def test_the_one_rank_that_has_not_ended_is_named(others: list[Sighting]) -> None:
    found = explain_sightings([left(dies_with_others=len(others) < 3), *others])
    assert found.culprits == ["rank 1 (process 101)"]
    assert found.verdict == "rank 1 (process 101) is at train.py:20 (step); all other ranks have ended"


@pytest.mark.parametrize(
    "sightings",
    [
        [left(dies_with_others=False)],
        [left(size=8)],
        [left(stays=False)],
        [left(), out(2)],
        [left(), ended(1, None)],
        [left(), ended(1, 1), ended(2), ended(3)],
    ],
    ids=["nobody ends it", "more nodes", "it moves", "two are left", "how is not known", "one failed"],
)
def test_nobody_is_named_for_being_left_while_another_may_have_failed(sightings: list[Sighting]) -> None:
    assert "rank 1 (process 101)" not in explain_sightings(sightings).culprits


def test_missing_ranks_are_said_to_be_not_looked_at() -> None:
    found = explain_sightings([rank(0), out(1)])
    assert list(found.notes) == [
        "not looked at: ranks 2-3 have no process here: on another node, or gone; run `rl-safe explain --pid` there"
    ]
    assert found.culprits == ["rank 1 (process 101)"]  # the world needs it, wherever the others are


def test_actors_of_another_class_are_bystanders() -> None:
    trainers = [
        Sighting(
            facts=ProcessFacts(pid=pid, state="S"),
            standing=standing,
            actor="Trainer",
            op="all_reduce",
            members=Members.WORLD,
        )
        for pid, standing in ((1, Standing.WAITS), (2, Standing.IDLE))
    ]
    reward = Sighting(facts=ProcessFacts(pid=3, state="S"), standing=Standing.IDLE, actor="Reward")
    found = explain_sightings([*trainers, reward])
    assert found.culprits == ["actor Trainer (process 2)"]
    assert [row.is_culprit for row in found.rows] == [False, True, False]


def test_one_rank_and_one_process_are_called_so() -> None:
    waiting = rank(0), replace(rank(3), global_rank=None)
    found = explain_sightings([*waiting, out(1)])
    assert "; rank 0 and process 103 wait for it in " in found.verdict


def actor(pid: int, name: str, standing: Standing, *, stays: bool = True) -> Sighting:
    return Sighting(
        facts=ProcessFacts(pid=pid, state="S"),
        standing=standing,
        actor=name,
        op="all_reduce" if standing is Standing.WAITS else None,
        members=Members.WORLD,
        frames=[Frame(file="job.py", line=pid, function=name.lower())],
        stays=stays,
    )


WAITS = actor(1, "Trainer", Standing.WAITS)
CALLS = actor(2, "Trainer", Standing.CALLS)


@pytest.mark.parametrize(
    ("sightings", "culprits"),
    [
        ([WAITS, CALLS, actor(3, "Engine", Standing.ELSEWHERE), actor(4, "Engine", Standing.IDLE)], [3]),
        ([WAITS, CALLS, actor(3, "Engine", Standing.STOPPED), actor(4, "Engine", Standing.ELSEWHERE)], [3]),
        ([CALLS, actor(3, "Engine", Standing.ELSEWHERE)], [3]),
        ([actor(3, "Engine", Standing.ELSEWHERE), actor(4, "Engine", Standing.IDLE)], [3]),
        # Somebody else is late, whatever the caller waits for.
        ([WAITS, CALLS, actor(5, "Trainer", Standing.STOPPED), actor(3, "Engine", Standing.ELSEWHERE)], [5]),
        # Nobody can tell.
        ([WAITS, CALLS, actor(3, "Engine", Standing.ELSEWHERE), actor(4, "Engine", Standing.ELSEWHERE)], []),
        ([WAITS, CALLS, actor(4, "Engine", Standing.IDLE)], []),
        ([WAITS, CALLS, actor(3, "Engine", Standing.UNKNOWN)], []),
        ([actor(3, "Engine", Standing.ELSEWHERE, stays=False), actor(4, "Engine", Standing.IDLE)], []),
        ([actor(3, "Engine", Standing.ELSEWHERE), actor(4, "Engine", Standing.ELSEWHERE)], []),
    ],
)
def test_the_actor_that_a_rank_has_called_is_named(sightings: list[Sighting], culprits: list[int]) -> None:
    found = explain_sightings(sightings)
    assert [int(one.rpartition(" ")[2].rstrip(")")) for one in found.culprits] == culprits, found.verdict
    assert found.is_known == bool(culprits)


def test_nobody_is_named_for_a_call_where_not_every_actor_was_looked_at() -> None:
    found = explain_sightings([WAITS, CALLS, actor(3, "Engine", Standing.ELSEWHERE)], notes=["1 actor is elsewhere"])
    assert found.verdict == (
        "not known, because actor Trainer (process 2) waits for a call of another actor at job.py:2 (trainer); "
        "actor Engine (process 3) is in a call"
    )


def test_who_waits_for_a_call_is_told_from_who_is_in_a_collective() -> None:
    found = explain_sightings([WAITS, CALLS, actor(3, "Engine", Standing.ELSEWHERE)])
    assert found.verdict == (
        "actor Engine (process 3) is at job.py:3 (engine); processes 1-2 wait for it in a call of an actor, "
        "all_reduce of the world"
    )
