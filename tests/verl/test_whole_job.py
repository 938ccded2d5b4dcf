"""verl's whole PPO job on this machine, with rollout engines that have no model: it trains, or names who is silent."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

import pytest

from rl_safe_workers.reaping.processes import TEMP_PREFIX
from tests.verl.host import show
from tests.verl.whole_job import LIMIT_S, ROOT, run_job

TIMEOUT_S, ALLOWED_S = 10.0, 10.0
"""The deadline, and how much later the job may have ended: verl polls every two seconds, and Ray has to end, too."""
STOP_LIMIT_S = 3.0
"""The longest time for which a process may be stopped."""
HANDING_OUT_S = 40.0
"""The deadline of generation: on a busy machine agent loops are slow to take their first prompts."""


def _job(folder: Path, *overrides: str, fault: str = "") -> tuple[int, str, float]:
    """Runs two steps; returns the exit status, the output, and seconds from the fault to the end.

    Args:
        folder: An empty folder.
        overrides: Further arguments.
        fault: The call of the second engine that has no answer, and the step of its weights.
    """
    (folder / "fault").write_text(fault)
    status, output = run_job(
        folder,
        "actor_rollout_ref.model.external_lib=tests.verl.echo_rollout",
        "actor_rollout_ref.rollout.free_cache_engine=true",
        f"+actor_rollout_ref.rollout.custom.fault={folder}/fault",
        f"reward.custom_reward_function.path={ROOT}/tests/verl/faulty_reward.py",
        "reward.custom_reward_function.name=score",
        f"+reward.custom_reward_function.reward_kwargs.fault={folder}/fault",
        "trainer.save_freq=2",
        *overrides,
    )
    since = folder / "fault.since"
    took_s = time.time() - float(since.read_text()) if since.exists() else 0.0
    return status, output, took_s


@pytest.mark.every_case  # test_submitted_job.py runs the same job on a Ray that is there
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_job_trains_and_gives_its_communicators_away_between_updates(tmp_path) -> None:
    status, output, _ = _job(tmp_path, "actor_rollout_ref.rl_safe.release_comms=true")
    assert status == 0, output[-3000:]
    steps = re.findall(r"step:\d - .*rl_safe/active:1\.0.*timing_s/rl_safe_release:(\d+\.\d+)", output)
    assert len(steps) == 2
    assert (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2"


FAULTS = {
    "trainer_killed": (
        *("train killed", "train"),
        r"training rank 1 on \S+ died in phase train, last seen at \S+faulty_training.py:\d+ \(\S*go_wrong\)",
    ),
    "trainer_stopped": (
        *("train stopped", "train"),
        r"training rank 1 on \S+ is stopped in phase train(, last seen)? at \S+faulty_training.py:\d+ \(\S*go_wrong\); "
        r"training rank 0 was in \w+ of \w+$",
    ),
    "trainer_stopped_for_too_long": (
        *("train stopped", "train"),
        r"training rank 1 on \S+ is stopped in phase train, last seen at \S+faulty_training.py:\d+ \(\S*go_wrong\)",
    ),
    "trainer_raises": (
        *("train raises", "train"),
        r"training rank 1 on \S+ failed in phase train at \S+faulty_training.py:\d+ \(\S*go_wrong\): ValueError: no",
    ),
    "trainer_in_another_phase": (
        *("train elsewhere", "train"),
        r"hang: phase train, training world: 0 arrived, 1 did not within \S+ s; training rank 1 on \S+ ",
    ),
    "generation": (
        *("generate 1", "rollout"),
        r"hang: phase rollout, generation: training rank 0-1, rollout rank 0, agent loop worker 0, reward worker 0 "
        r"arrived, rollout rank 1 did not within ",
    ),
    "agent_loop_killed": (
        *("reward kills the agent loop", "train"),
        r"agent loop worker 0 on \S+ died in phase rollout(: |$)",
    ),
    "reward_hangs": (
        *("reward hangs", "rollout"),
        r"hang: phase rollout, generation: training rank 0-1, rollout rank 0-1, agent loop worker 0 arrived, "
        r"reward worker 0 did not within \S+ s; reward worker 0 on \S+ is at "
        r"\S+faulty_reward.py:\d+ \(run_in_sandbox\)$",
    ),
    "sync": (
        *("wake_kv_cache 1", "sync"),
        r"hang: phase sync, the weight sync: training rank 1 arrived, rollout rank 1 did not within ",
    ),
    "sleep": (
        *("sleep 1", "sync"),
        r"hang: phase sync, the weight sync \(sleep_replicas\): .* arrived, rollout rank 1 did not within ",
    ),
}


UNBOUND = ("trainer_stopped_for_too_long", "agent_loop_killed")
"""Faults that are seen long before a deadline."""


@pytest.mark.every_case  # the sample of the diagnosis has an engine that hangs in a sync, and a rank stopped in a save
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_job_and_its_first_line_says_where_it_began(name, tmp_path) -> None:
    fault, phase, told = FAULTS[name]
    limit_s = HANDING_OUT_S if phase == "rollout" else TIMEOUT_S
    limits = dict.fromkeys((phase, "logprob"), limit_s) | {"stopped": 0.0}
    if name in UNBOUND:
        limits = {"stopped": STOP_LIMIT_S}  # every phase may last for longer than the test
    overrides = (f"actor_rollout_ref.rl_safe.timeouts.{key}={value}" for key, value in limits.items())
    status, output, took_s = _job(tmp_path, *overrides, fault=fault)
    last = output.rpartition("\nrl_safe: ")[2].splitlines()[:3]
    show(f"{name}: ended {took_s:.1f} s after the fault:", *last)
    assert status == 1
    assert re.match(told, last[0]), last[0]
    assert last[1]
    evidence = Path(last[2].removeprefix("evidence in "))
    assert evidence.parent == tmp_path / "checkpoints"
    assert {"verdict.json", "stack_trainer_0.txt", "stack_rollout_0.txt"} <= {path.name for path in evidence.iterdir()}
    assert name != "reward_hangs" or "run_in_sandbox" in (evidence / "stack_reward_0.txt").read_text()
    assert took_s < limit_s + ALLOWED_S
    assert not list(Path(tempfile.gettempdir()).glob(f"{TEMP_PREFIX}{evidence.name.rpartition('_')[2]}*"))
