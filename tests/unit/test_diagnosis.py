"""The rank to blame, by answers of processes and reports of ranks. The answers are made up here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_safe_workers.adapters.job_inquiry import CALL_FRAME, HELPER_FRAME
from rl_safe_workers.diagnostics import diagnosis
from rl_safe_workers.diagnostics.blame import blame
from rl_safe_workers.diagnostics.diagnosis import Diagnosis, diagnose, diagnose_answers
from rl_safe_workers.diagnostics.endings import Ending
from rl_safe_workers.diagnostics.flight_recorder import Record, Work
from rl_safe_workers.diagnostics.inquiry import Answers, RankProcess
from rl_safe_workers.diagnostics.log_lines import Fault
from rl_safe_workers.diagnostics.stacks import Stack
from rl_safe_workers.errors import (
    Awaited,
    Died,
    PhaseTimeoutError,
    Raised,
    RankError,
    Repeats,
    RunError,
    StoreLostError,
    Victim,
)
from rl_safe_workers.frames import COLLECTIVES, Frame
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role, name_ranks, trainer_id, trainer_ids
from rl_safe_workers.root_cause import Spot

Judge = Callable[..., Diagnosis]
WAIT = Frame(file="rl_safe_workers/control/board.py", line=1, function="wait")
WORK = Frame(file="mine.py", line=7, function="step")


def process(
    rank: int, *frames: Frame, status: str = "sleeping", exit_code: int | None = None, last_place: str | None = None
) -> RankProcess:
    stack = Stack(frames=frames, is_in_a_call=True, op=None) if frames else None
    return RankProcess(
        rank_id=trainer_id(rank), pid=1, status=status, exit_code=exit_code, stack=stack, last_place=last_place
    )


def busy(rank: int) -> RankProcess:
    return process(rank, WORK)


def waits(rank: int) -> RankProcess:
    return process(rank, WAIT, WORK)


def killed(rank: int) -> RankProcess:
    return process(rank, status="gone", exit_code=-9, last_place="mine.py:3 (send)")


def ended_well(rank: int) -> RankProcess:
    return process(rank, status="gone", exit_code=0)


def crashed(rank: int, *, exit_code: int = 1) -> RankProcess:
    return process(rank, status="gone", exit_code=exit_code)


def failed(
    rank: int, cause: Any, text: str = "ValueError: no", *, op: str | None = None, place: str = "mine.py:5 (f)"
) -> RankError:
    return RankError(
        rank_id=trainer_id(rank), phase="train", cause=cause, text=text, trace="", raised_at=1.0, place=place, op=op
    )


def late(*missing: int) -> PhaseTimeoutError:
    awaited = Awaited("training world", frozenset(trainer_ids(range(3))))
    return PhaseTimeoutError(
        phase="train", awaited=awaited, missing=trainer_ids(missing), waited_s=9.0, setting="rl_safe.timeouts.train"
    )


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judge:
    """Diagnoses processes whose answers are known already."""

    def judge(
        *ranks: RankProcess, reports: Mapping[int, RunError] | Exception | None = None, evidence: Path | None = None
    ) -> Diagnosis:
        monkeypatch.setattr(diagnosis, "ask_ranks", lambda find, **_: Answers(ranks=find()))

        def told() -> dict[RankId, RunError]:
            if isinstance(reports, Exception):
                raise reports
            return {trainer_id(rank): error for rank, error in (reports or {}).items()}

        return diagnose(ranks, patience_s=1.0, reports=told, evidence=evidence)

    return judge


def culprits(found: Diagnosis) -> set[int]:
    return {one.rank for one in found.culprits}


def test_the_phase_that_a_dead_rank_has_noted_goes_before_the_hosts() -> None:
    dead = replace(killed(1), exit_code=None, never_ends=True, phase="save")
    answers = Answers(ranks=[busy(0), dead])
    found = diagnose_answers(lambda patience_s: answers, patience_s=1.0, phase="train")
    assert found.verdict == "training rank 1 died in phase save, last seen at mine.py:3 (send)"
    assert isinstance(found.error, RankError)
    assert found.error.phase == "save"


def test_a_run_that_is_well_blames_nobody(judged: Judge) -> None:
    found = judged(busy(0), busy(1))
    assert (found.verdict, culprits(found), found.error) == (
        "no rank has failed, and no rank waits for others",
        set(),
        None,
    )
    assert found.ranks == {trainer_id(0): "is at mine.py:7 (step)", trainer_id(1): "is at mine.py:7 (step)"}


def test_the_rank_that_does_something_else_is_blamed_by_those_that_wait(judged: Judge) -> None:
    found = judged(waits(0), busy(1), waits(2))
    assert culprits(found) == {1}
    assert found.verdict == ("hang: the trainers: 0, 2 arrived, 1 did not; training rank 1 is at mine.py:7 (step)")
    assert found.ranks[trainer_id(0)] == "waits for other ranks at mine.py:7 (step)"


def test_ranks_that_all_wait_blame_nobody(judged: Judge) -> None:
    found = judged(waits(0), waits(1))
    assert culprits(found) == set()
    assert found.verdict == "hang: the trainers: all arrived, and did not finish"


def in_collective(rank: int, name: str, line: int) -> RankProcess:
    frames = [Frame(file=COLLECTIVES, line=1, function=name), replace(WORK, line=line)]
    return replace(process(rank), stack=Stack(frames=frames, is_in_a_call=True, op=name))


def test_even_split_shows_both_sides_and_names_nobody() -> None:
    gave_up = failed(1, Victim(), op="barrier", place="mine.py:9 (stop)")
    idle = replace(busy(1), stack=Stack(frames=[WORK], is_in_a_call=False, op=None))
    answers = Answers(ranks=[in_collective(0, "all_reduce", 7), idle])
    found = diagnose_answers(lambda patience_s: answers, patience_s=1.0, reports={trainer_id(1): gave_up})
    assert found.verdict == (
        "hang: no rank is missing, and as many wait at one line as at the other: training rank 0 waits in phase train "
        "in all_reduce at mine.py:7 (step); training rank 1 gave up waiting in phase train in barrier at mine.py:9 "
        "(stop)"
    )
    assert not found.is_told
    assert found.advice.startswith("compare these lines")


def test_a_rank_whose_call_has_ended_is_not_said_to_wait() -> None:
    gave_up = failed(1, Victim(), op="barrier", place="mine.py:9 (stop)")
    idle = [replace(busy(rank), stack=Stack(frames=[WORK], is_in_a_call=False, op=None)) for rank in (0, 1)]
    found = diagnose_answers(lambda _: Answers(ranks=idle), patience_s=1.0, reports={trainer_id(1): gave_up})
    assert found.verdict == (
        "hang: phase train, the trainers: training rank 1 gave up waiting, and no rank runs a call any more"
    )


def at_the_end(rank: int) -> RankProcess:
    return replace(busy(rank), phase="teardown")


@pytest.mark.parametrize(
    ("done", "others", "named", "said"),
    [
        (at_the_end, "teardown in a barrier over the store at mine.py:7 (step)", {2}, "more"),
        (ended_well, "ended", {2}, "more"),
        (waits, "", {2}, ""),
    ],
    ids=["teardown", "ended", "another line"],
)
def test_ranks_that_are_done_are_not_blamed_for_a_collective_that_one_more_comes_to(done, others, named, said) -> None:
    gave_up = failed(2, Victim(), op="all_reduce")
    answers = Answers(ranks=[done(0), done(1), busy(2)])
    found = diagnose_answers(lambda patience_s: answers, patience_s=1.0, reports={trainer_id(2): gave_up})
    assert culprits(found) == named
    assert ("has come to more collectives than the others, who are done: training rank 2" in found.verdict) == bool(
        said
    )
    assert others in found.verdict.rpartition("; ")[2]


def test_a_rank_that_is_done_before_most_is_told_to_have_come_to_fewer_collectives() -> None:
    gave_up = failed(2, Victim(), op="all_reduce", place="mine.py:7 (step)")
    answers = Answers(ranks=[in_collective(0, "all_reduce", 7), at_the_end(1), busy(2)])
    found = diagnose_answers(lambda patience_s: answers, patience_s=1.0, reports={trainer_id(2): gave_up})
    assert culprits(found) == {1}
    assert (
        "training rank 1 has come to fewer collectives than the others: training rank 1 waits in phase" in found.verdict
    )


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (
            {trainer_id(2): failed(2, Victim(), op="all_reduce")},
            "no rank is missing, and training rank 2 has come to more collectives than the others, who are done: "
            "training rank 2 gave up waiting in phase train in all_reduce at mine.py:5 (f); training rank 0 gave up "
            "waiting in phase teardown in a barrier over the store; training rank 1 waits in phase teardown at "
            "mine.py:9 (end)\ncompare these lines: every rank must come to the same collectives, in the same order",
        ),
        (
            {},
            "phase teardown: rank 2 of training world did not arrive within 9.0 s; to wait longer raise "
            "rl_safe.timeouts.train; training rank 2 was last seen in phase train at mine.py:5 (f)",
        ),
    ],
    ids=["it has given up, too", "it has said nothing"],
)
def test_a_rank_that_does_not_come_to_the_end_is_told_with_its_place(
    left: Mapping[RankId, RunError], said: str
) -> None:
    in_teardown = {trainer_id(1): Spot("teardown", None, "mine.py:9 (end)")}
    among: Any = SimpleNamespace(
        failures=lambda: left,
        stops=dict,
        judge=lambda reports: None,  # another rank has
        heard=lambda: None,
        waiting=lambda: in_teardown,
        came_late=lambda reports: None,
        last_seen=lambda rank_id: "was last seen in phase train at mine.py:5 (f)",
    )
    not_come = late(2).as_of(Phase.TEARDOWN, setting="rl_safe.timeouts.train")
    assert blame({trainer_id(0): not_come}, silent=[2], among=among) == ({trainer_id(2)}, said)


def test_nobody_is_the_odd_one_where_other_machines_may_have_more_ranks(judged: Judge) -> None:
    gave_up = failed(2, Victim(), op="barrier")
    found = judged(*(in_collective(rank, "all_reduce", 7) for rank in (0, 1)), reports={2: gave_up})
    assert culprits(found) == set()
    assert found.verdict.startswith("hang: none of the ranks that were asked is missing: ")


def test_where_all_wait_the_rank_in_another_collective_than_most_is_named() -> None:
    most = [in_collective(rank, "all_reduce", 7) for rank in (0, 2)]

    def judge(other: RankProcess) -> Diagnosis:
        answers = Answers(ranks=[*most, other])
        return diagnose_answers(lambda patience_s: answers, patience_s=1.0, host_error=late(0, 1, 2))

    found = judge(in_collective(1, "all_gather", 9))
    assert culprits(found) == {1}
    assert found.verdict == (
        "hang: phase train, training world, all_reduce: 0, 2 arrived, 1 did not within 9.0 s; training rank 0, 2 are "
        "in phase train in all_reduce at mine.py:7 (step); training rank 1 is in all_gather at mine.py:9 (step)"
    )
    assert culprits(judge(in_collective(1, "all_reduce", 7))) == {0, 1, 2}


def test_a_missing_rank_is_told_with_its_own_phase_and_with_what_it_has_gone_on_after(judged: Judge) -> None:
    ends = replace(busy(1), phase="teardown", events=["its thread prefetch has ended at mine.py:3 (send): OSError: no"])
    found = judged(waits(0), ends, reports={0: late(1)})
    assert found.verdict.endswith(
        "training rank 1 is at mine.py:7 (step) in phase teardown, and its thread prefetch has ended at mine.py:3 "
        "(send): OSError: no"
    )


def test_a_rank_that_has_ended_well_too_early_is_blamed_by_those_that_wait(judged: Judge) -> None:
    found = judged(waits(0), process(1, status="gone", exit_code=0))
    assert culprits(found) == {1}
    assert "training rank 1 has ended with exit code 0" in found.verdict


def test_a_death_is_the_root_of_those_that_gave_up(judged: Judge) -> None:
    found = judged(busy(0), killed(1), waits(2), reports={0: failed(0, Victim()), 2: late(1)})
    assert culprits(found) == {1}
    assert found.verdict == "training rank 1 was killed by SIGKILL, last seen at mine.py:3 (send)"


def test_the_report_of_a_rank_that_has_ended_says_more_than_its_end(judged: Judge) -> None:
    found = judged(process(0, status="gone", exit_code=1), waits(1), reports={0: failed(0, Raised())})
    assert culprits(found) == {0}
    assert found.verdict == "training rank 0 failed in phase train at mine.py:5 (f): ValueError: no"


def test_a_stopped_rank_is_named_though_others_have_named_more(judged: Judge) -> None:
    found = judged(
        process(0, status="stopped", last_place="mine.py:3 (send)"), waits(1), waits(2), reports={1: late(0)}
    )
    assert culprits(found) == {0}
    assert found.verdict == "training rank 0 is stopped, last seen at mine.py:3 (send)"


def test_a_rank_that_others_speak_of_is_named_with_what_they_say(judged: Judge) -> None:
    found = judged(waits(0), busy(1), reports={0: failed(0, Repeats(trainer_id(1)), "RunError: rank 1 is full")})
    assert culprits(found) == {1}
    assert found.verdict.startswith(
        "training rank 1 is at mine.py:7 (step); training rank 0 failed in phase train at mine.py:5 "
    )
    assert found.advice.startswith("search the job's log for the first error of training rank 1; ")


@pytest.mark.parametrize("last", [busy, ended_well])
def test_missing_ranks_that_wait_themselves_are_not_blamed(judged: Judge, last: Callable[[int], RankProcess]) -> None:
    assert culprits(judged(waits(0), waits(1), last(2), reports={0: late(1, 2)})) == {2}
    assert culprits(judged(waits(0), crashed(1), last(2), reports={0: late(1, 2), 1: failed(1, Victim())})) == {2}


def test_a_killed_rank_is_blamed_before_those_that_lost_it(judged: Judge) -> None:
    assert culprits(judged(crashed(0), crashed(1, exit_code=-6), killed(2))) == {2}


def test_an_exception_is_blamed_before_those_that_then_crashed(judged: Judge) -> None:
    assert culprits(judged(crashed(0, exit_code=-6), crashed(1), crashed(2), reports={2: failed(2, Raised())})) == {2}


def test_a_rank_that_could_not_be_looked_at_is_not_dead(judged: Judge) -> None:
    found = judged(waits(0), process(1, status="unknown", last_place="mine.py:3 (send)"), waits(2))
    assert found.ranks[trainer_id(1)] == "could not be looked at in time, last seen at mine.py:3 (send)"
    assert found.error is None
    assert culprits(found) == {1}


def test_a_collective_in_the_stack_alone_is_a_wait(judged: Judge) -> None:
    reduce = Frame(file="torch/distributed/distributed_c10d.py", line=1, function="all_reduce")
    found = judged(process(0, reduce, WORK), busy(1))
    assert culprits(found) == {1}


def test_a_verdict_is_one_line(judged: Judge) -> None:
    found = judged(crashed(0), reports={0: failed(0, Raised(), "RuntimeError: no\nframe #0")})
    assert found.verdict == "training rank 0 failed in phase train at mine.py:5 (f): RuntimeError: no"


def test_reports_that_cannot_be_read_leave_the_rest(judged: Judge) -> None:
    found = judged(waits(0), killed(1), reports=StoreLostError("the store is gone"))
    assert culprits(found) == {1}


def test_evidence_that_cannot_be_written_leaves_the_verdict(judged: Judge, tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    assert culprits(judged(waits(0), busy(1), evidence=tmp_path / "hang")) == {1}


def test_the_evidence_names_every_rank(judged: Judge, tmp_path: Path) -> None:
    judged(waits(0), busy(1), evidence=tmp_path / "hang")
    text = (tmp_path / "hang" / "verdict.json").read_text()
    assert '"training rank 1": "is at mine.py:7 (step)"' in text
    assert {path.name for path in (tmp_path / "hang").iterdir()} == {
        "verdict.json",
        "stack_trainer_0.txt",
        "stack_trainer_1.txt",
    }


ENGINE = RankId(Role.ROLLOUT, 0)


def actor(rank: int, *frames: Frame, status: str = "sleeping", in_a_call: bool = True) -> RankProcess:
    """A process that Ray keeps whatever it raises."""
    found = process(rank, *frames, status=status, last_place="mine.py:3 (send)")
    found.never_ends = True
    if found.stack is not None:
        found.stack = replace(found.stack, is_in_a_call=in_a_call)
    return found


def engine(*frames: Frame, status: str = "sleeping") -> RankProcess:
    found = actor(0, *frames, status=status, in_a_call=False)
    found.rank_id = ENGINE
    return found


def of_host(
    *ranks: RankProcess,
    reports: Mapping[RankId, RunError] | None = None,
    host_error: RunError | None = None,
    **more: Any,
) -> Diagnosis:
    answers = Answers(ranks=ranks, homes={one.rank_id: "10.0.0.4" for one in ranks}, **more)
    return diagnose_answers(
        lambda _: answers, patience_s=1.0, reports=reports or {}, phase="train", host_error=host_error
    )


def test_an_actor_that_has_ended_was_killed_and_is_named_with_its_node_and_the_hosts_phase() -> None:
    found = of_host(waits(0), actor(1, status="gone"))
    assert found.verdict == "training rank 1 on 10.0.0.4 died in phase train, last seen at mine.py:3 (send)"
    assert isinstance(found.error, RankError)
    assert (found.error.cause, found.error.phase) == (Died(), "train")
    assert "the kernel log of 10.0.0.4" in found.advice


def test_the_rank_in_a_call_of_its_own_is_named_where_another_ones_call_has_waited_in_vain() -> None:
    gave_up = failed(0, Victim(), op="all_reduce", place="theirs.py:9 (average)")
    found = of_host(actor(0, in_a_call=False), actor(1, WORK), reports={trainer_id(0): gave_up})
    assert found.culprits == {trainer_id(1)}
    assert "training rank 0 gave up waiting; training rank 1 on 10.0.0.4 is at " in found.verdict


def test_an_actor_that_torch_has_ended_because_its_collective_timed_out_is_a_victim() -> None:
    work = Work(op="all_reduce", group="dp", number=3, has_ended=False, created_s=1.0)
    found = of_host(actor(0, status="gone"), actor(1, WORK), records={0: Record.of([work])})
    assert found.culprits == {trainer_id(1)}


def gathers(elements: int) -> Record:
    work = Work(
        op="all_gather",
        group="dp",
        number=3,
        has_ended=False,
        created_s=1.0,
        group_name="3",
        backend="gloo",
        tensors=f"{elements} Float",
        elements=elements,
    )
    return Record.of([work])


def aborted(rank: int) -> RankProcess:
    found = actor(rank, status="gone")
    said = "by a thread of a library, during all_gather at mine.py:3 (send)"
    found.ending = Ending(fault=Fault.ABORTED, said=said, detail="SIGABRT", aborted_in="all_gather")
    return found


def test_a_rank_with_a_longer_tensor_is_named_and_not_the_one_that_gloo_has_ended(tmp_path: Path) -> None:
    found = of_host(
        aborted(2),
        reports={trainer_id(rank): failed(rank, Victim()) for rank in (0, 1, 3)},
        records={0: gathers(4000), 1: gathers(5000), 3: gathers(4000)},
    )
    assert found.verdict == (
        "different shapes in all_gather of dp: training rank 0, 3 with 4000 Float; training rank 1 with 5000 Float; "
        "gloo aborted training rank 2, which received more bytes than expected; training rank 1 was at mine.py:5 (f)"
    )
    assert (culprits(found), found.fault) == ({1}, Fault.SHAPES)
    assert "drop_last" in found.advice


def test_nobody_is_blamed_for_the_shapes_of_two_ranks() -> None:
    found = of_host(aborted(1), reports={trainer_id(0): failed(0, Victim())}, records={0: gathers(4000)})
    assert "the wrong rank is not known, because" in found.verdict
    assert (culprits(found), found.is_told) == (set(), True)


def test_a_rank_that_the_kernel_has_killed_in_a_collective_has_no_other_shape() -> None:
    killed_there = actor(2, status="gone")
    killed_there.ending = Ending(fault=Fault.OOM_KILL, said="the kernel killed python")
    found = of_host(
        killed_there,
        reports={trainer_id(0): failed(0, Victim())},
        records={0: gathers(4000), 1: gathers(5000)},
    )
    assert (culprits(found), found.fault) == ({2}, Fault.OOM_KILL)


def test_a_stopped_actor_is_named_with_the_collective_that_others_were_in() -> None:
    # gloo's record says of a failed collective that it has ended.
    work = Work(op="all_reduce", group="dp", number=3, has_ended=True, created_s=1.0)
    found = of_host(
        actor(0, WORK),
        actor(1, status="stopped"),
        reports={trainer_id(0): failed(0, Victim())},
        records={0: Record.of([work])},
    )
    assert found.verdict == (
        "training rank 1 on 10.0.0.4 is stopped in phase train, last seen at mine.py:3 (send); "
        "training rank 0 was in all_reduce of dp"
    )
    assert found.advice.endswith("to resume it: kill -CONT 1")


def test_what_a_rank_has_left_in_its_folder_counts_as_its_report() -> None:
    answers = Answers(ranks=[waits(0), actor(1, WORK, in_a_call=False)], reports={trainer_id(1): failed(1, Raised())})
    found = diagnose_answers(lambda _: answers, patience_s=1.0)
    assert found.verdict == "training rank 1 failed in phase train at mine.py:5 (f): ValueError: no"


def test_a_process_that_is_in_no_call_of_its_host_holds_nobody_up() -> None:
    reports = {trainer_id(0): failed(0, Victim())}
    found = of_host(actor(0, WORK, in_a_call=False), actor(1, WORK), engine(WORK), engine(), reports=reports)
    assert found.culprits == {trainer_id(1)}


def test_the_drivers_error_names_who_does_not_answer_where_no_rank_does() -> None:
    late_there = PhaseTimeoutError(
        phase="sync", awaited=Awaited("rollout replica 0"), waited_s=9.0, setting="rl_safe.timeouts.sync"
    )
    host = RunError("the sync: rollout replica 0 does not answer", culprit=ENGINE)
    found = of_host(
        actor(0, WORK, in_a_call=False),
        actor(1, WORK),
        engine(WORK),
        reports={trainer_id(0): late_there},
        host_error=host,
    )
    assert found.culprits == {ENGINE}
    assert found.verdict == (
        "phase train: rollout rank 0 on 10.0.0.4 is in no call; the sync: rollout replica 0 does not answer"
    )


@pytest.mark.parametrize("host_error", [None, RunError("the sync: rollout replica 0 does not answer", culprit=ENGINE)])
def test_an_engine_that_a_rank_awaits_is_to_blame_whatever_the_driver_has_heard(host_error: RunError | None) -> None:
    late_there = PhaseTimeoutError(
        phase="sync",
        awaited=Awaited("the weight sync", frozenset({trainer_id(1), ENGINE})),
        missing=[ENGINE],
        waited_s=9.0,
        setting="rl_safe.timeouts.sync",
    )
    reports = {trainer_id(0): failed(0, Repeats(of=trainer_id(1))), trainer_id(1): late_there}
    ranks = actor(0, WORK, in_a_call=False), actor(1, WORK, in_a_call=False), engine(WORK)
    found = of_host(*ranks, reports=reports, host_error=host_error)
    assert found.culprits == {ENGINE}
    assert found.verdict.startswith(
        "hang: phase sync, the weight sync: training rank 1 arrived, rollout rank 0 did not within 9.0 s; rollout "
        "rank 0"
    )


def test_a_wait_for_something_that_is_no_rank_blames_no_rank() -> None:
    late_there = PhaseTimeoutError(
        phase="sync", awaited=Awaited("the rollout"), waited_s=9.0, setting="rl_safe.timeouts.sync"
    )
    found = of_host(actor(0, WORK, in_a_call=False), actor(1, WORK), reports={trainer_id(0): late_there})
    assert found.culprits == set()
    assert found.verdict.startswith("phase sync: the rollout did not finish within 9.0 s")


@pytest.mark.parametrize(("phase", "is_named"), [("rollout", True), ("sync", False)])
def test_a_generation_that_nobody_holds_up_blames_the_reward_worker_that_is_in_a_call(phase, is_named) -> None:
    reward, agent_loop = RankId(Role.REWARD, 0), RankId(Role.AGENT_LOOP, 0)
    ranks = [actor(0, WORK, in_a_call=False), engine(WORK), actor(0, WORK), actor(0, WORK, in_a_call=False)]
    ranks[2].rank_id, ranks[3].rank_id = reward, agent_loop
    members = frozenset(one.rank_id for one in ranks)
    host = PhaseTimeoutError(
        phase=phase, awaited=Awaited("generation", members), waited_s=9.0, setting=f"rl_safe.timeouts.{phase}"
    )
    found = of_host(*ranks, host_error=host)
    assert found.culprits == ({reward} if is_named else set())
    assert ("stack_reward_0.txt" in found.advice) is is_named
    if is_named:
        assert found.verdict == (
            "hang: phase rollout, generation: training rank 0, rollout rank 0, agent loop worker 0 arrived, reward "
            "worker 0 did not within 9.0 s; reward worker 0 on 10.0.0.4 is at mine.py:7 (step)"
        )


POOL = """
    judge (my_rewards.py:7)
    _WorkItem.run (concurrent/futures/thread.py:58)
    _worker (concurrent/futures/thread.py:83)
"""
LOOP = """
    run (my_agent.py:9)
    AgentLoopWorker._run_agent_loop (verl/experimental/agent_loop/agent_loop.py:700)
    run_forever (ray/_private/async_compat.py:9)
"""
IDLE = """
    _worker (concurrent/futures/thread.py:81)
"""


@pytest.mark.parametrize(("stack", "place"), [(POOL, "my_rewards.py:7"), (LOOP, "my_agent.py:9"), (IDLE, None)])
def test_work_on_a_pool_and_in_a_task_counts_as_a_call_of_a_worker_of_verls(stack: str, place: str | None) -> None:
    text = f'Thread 1 (idle): "MainThread"\n    main_loop (ray/worker.py:1)\nThread 2 (idle): "other"{stack}'
    found = Stack.parse(text, HELPER_FRAME)
    assert found.is_in_a_call is (place is not None)
    assert place is None or str(found.place).startswith(place)
    assert not Stack.parse(text, CALL_FRAME).is_in_a_call, "of a rank such threads are no calls"


def test_a_weight_sync_of_verls_that_blocks_before_its_thread_begins_is_in_a_call() -> None:
    text = (
        'Thread 1 (idle): "MainThread"\n    main_loop (ray/worker.py:1)\n'
        'Thread 2 (idle): "other"\n    wait (mine.py:9)\n'
        "    CoroutineUpdate.run (rl_safe_workers/adapters/verl/coroutine_update.py:86)\n"
        "    Handle._run (asyncio/events.py:80)"
    )
    found = Stack.parse(text, CALL_FRAME)
    assert found.is_in_a_call
    assert str(found.place).startswith("mine.py:9")


def test_a_rank_that_is_known_counts_before_the_drivers_error() -> None:
    host = RunError("the step: rollout replica 0 does not answer", culprit=ENGINE)
    assert of_host(waits(0), actor(1, status="stopped"), engine(WORK), host_error=host).culprits == {trainer_id(1)}


@pytest.mark.parametrize(
    ("phases", "astray"),
    [
        (["train", "save", "train"], {1}),
        (["save", "save", "train"], {2}),  # the most count, whatever the host waits for
        (["save", "train"], {0}),
        (["save", "save", "train", "train", "train", "train"], {0, 1}),
        (["save", "logprob"], set()),  # nobody can know
        (["train", "train"], set()),
    ],
)
def test_ranks_that_wait_in_another_phase_than_most_are_named(phases: list[str], astray: set[int]) -> None:
    everyone = frozenset(trainer_ids(range(len(phases))))
    reports = {
        trainer_id(rank): PhaseTimeoutError(
            phase=phase,
            awaited=Awaited("training world", everyone),
            missing=[trainer_id(other) for other, theirs in enumerate(phases) if theirs != phase],
            waited_s=6.0,
            setting=f"rl_safe.timeouts.{phase}",
        )
        for rank, phase in enumerate(phases)
    }
    found = of_host(*(actor(rank, WORK, in_a_call=False) for rank in range(len(phases))), reports=reports)
    assert culprits(found) == astray
    if astray:
        named = name_ranks(trainer_ids(astray))
        assert found.verdict.endswith(f"; {named} waited in phase {phases[min(astray)]}")
