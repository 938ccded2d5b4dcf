"""The README's script under torchrun, and what becomes of it when a rank fails or comes too early."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

import rl_safe_workers

README = Path(__file__).parents[2] / "README.md"
TIMEOUT_S = 120
SLACK_S = 60.0
"""Seconds for the verdict, torchrun's look every 5 s, and the end of the processes on a busy machine."""


def _script() -> str:
    """The block of the README that is a whole script."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if "init_process_group" in block]
    return found


def _run(folder: Path, script: str, *, ranks: int) -> subprocess.CompletedProcess[str]:
    file = folder / "script.py"
    file.write_text(script)
    # When a rank has ended, the others get some seconds before torchrun ends them.
    options = ["--standalone", "--monitor-interval", "5", "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(file)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_the_readmes_script_connects_trains_and_ends(tmp_path: Path) -> None:
    done = _run(tmp_path, _script(), ranks=4)
    assert done.returncode == 0, done.stderr
    # The ranks write to one pipe, and not line by line.
    found = re.findall(r"rank (\d): \d+ groups in \d+\.\d\d s", done.stdout)
    assert sorted(found) == ["0", "1", "2", "3"]
    assert "the bootstrap has missed" not in done.stderr


@pytest.mark.every_case
def test_a_rank_that_fails_is_named_by_the_others_and_keeps_its_own_error(tmp_path: Path) -> None:
    failing = "    assert dist.get_rank() != 1, 'no more disk'\n    for step in range(0):"
    done = _run(tmp_path, _script().replace("    for step in range(3):", failing), ranks=4)
    assert done.returncode != 0
    assert "AssertionError: no more disk" in done.stderr
    told = r"rank \d: the job has failed on training rank 1: training rank 1 failed between phases at script\.py:\d+ "
    lines = [line for line in done.stderr.splitlines() if line.startswith(("training rank", "teardown", "phase"))]
    assert lines, done.stderr
    assert [line for line in lines if re.search(rf"{told}\(<module>\): AssertionError: no more disk$", line)] == lines
    named = re.findall(r"CommunicatorError: teardown: rank 1 AssertionError: no more disk$", done.stderr, re.MULTILINE)
    assert len(named) == 3


@pytest.mark.parametrize(
    ("has_gpu", "device", "backend"), [(True, torch.device("cuda", 3), "nccl"), (False, torch.device("cpu"), "gloo")]
)
def test_the_readmes_script_uses_the_gpu_of_its_rank_if_there_are_gpus(
    has_gpu: bool, device: torch.device, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = mock.Mock()
    calls.guard.return_value = nullcontext()
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "set_device", calls.set_device)
    monkeypatch.setattr(torch, "ones", lambda size, **kwargs: kwargs.get("device", torch.device("cpu")))
    for name in ("init_process_group", "all_reduce", "get_rank"):
        monkeypatch.setattr(dist, name, getattr(calls, name))
    for name in ("initialize_model_parallel", "get_expert_data_parallel_group"):
        monkeypatch.setattr(parallel_state, name, getattr(calls, name))
    for name in ("bootstrap", "channel_limits", "guard", "teardown"):
        monkeypatch.setattr(rl_safe_workers, name, getattr(calls, name))
    calls.bootstrap.return_value.seconds = 0.0
    calls.channel_limits.return_value.megatron = {}
    exec(compile(_script(), "script.py", "exec"), {})
    limits = mock.call.channel_limits(expert_model_parallel_size=2)
    made = mock.call.init_process_group(backend, pg_options=calls.channel_limits.return_value.world)
    assert calls.mock_calls[: has_gpu + 2] == [*([mock.call.set_device(device)] if has_gpu else []), limits, made]
    assert [call.args[0] for call in calls.all_reduce.call_args_list] == [device] * 3


@pytest.mark.every_case
def test_a_phase_before_the_bootstrap_is_refused_and_a_collective_that_it_missed_is_told(tmp_path: Path) -> None:
    late = """
    try:
        with guard("offload"):
            pass
    except Exception as error:
        print("refused:", error)
    bootstrap()
    with guard("train"):
        dist.all_reduce(torch.ones(1), group=parallel_state.get_data_parallel_group())
"""
    head, _, _ = _script().partition("    report = bootstrap()")
    done = _run(tmp_path, f"{head}{late.lstrip(chr(10))}finally:\n    teardown()\n", ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("bootstrap() has not run") == 2
    assert "the bootstrap has missed allreduce_ (reduce) on DATA_PARALLEL_GROUP" in done.stderr


LATE = """
    if dist.get_rank() == 2:
        import time
        time.sleep(600)
    report = bootstrap(timeout=timedelta(seconds=4))
"""


@pytest.mark.every_case
def test_a_rank_that_does_not_come_to_the_bootstrap_is_named_with_its_line_of_code(tmp_path: Path) -> None:
    script = _script().replace("import os\n", "import os\nfrom datetime import timedelta\n", 1)
    script = script.replace("    report = bootstrap()", LATE.strip("\n"), 1)
    line = script.splitlines().index("        time.sleep(600)") + 1
    done = _run(tmp_path, script, ranks=4)
    assert done.returncode != 0
    told = re.findall(
        r"rank (\d): the job has failed on training rank 2: hang: phase bootstrap, training world: 0-1, 3 arrived, "
        rf"2 did not within [\d.]+ s; training rank 2 is at script\.py:{line} \(<module>\)\n"
        r"if the phase only needs more time, raise bootstrap\(timeout=\.\.\.\); .*(?:\nevidence in (\S+))?$",
        done.stderr,
        re.MULTILINE,
    )
    evidence = dict(told)
    assert set(evidence) >= {"0"}, done.stderr
    assert f"script.py:{line}" in (Path(evidence["0"]) / "stack_trainer_2.txt").read_text()
    shutil.rmtree(Path(evidence["0"]).parent)
    assert "rl_safe.timeouts" not in done.stderr


STOPS = """
            if step == 2 and dist.get_rank() == 1:
                import signal, time
                time.sleep(2), open(f"stopped_{time.time()}", "w"), os.kill(os.getpid(), signal.SIGSTOP)
            dist.all_reduce(torch.ones(1, device=device))
"""


def test_a_rank_that_is_stopped_is_named_and_the_job_ends_in_seconds(tmp_path: Path) -> None:
    limited = _script().replace("bootstrap()", "bootstrap(stopped=timedelta(seconds=3))", 1)
    limited = limited.replace("import os\n", "import os\nfrom datetime import timedelta\n", 1)
    reduces = re.escape("            dist.all_reduce(") + ".*\n"
    script = re.sub(reduces, lambda found: STOPS.removeprefix("\n"), limited)
    assert script.count("SIGSTOP") == 1
    done = _run(tmp_path, script, ranks=4)
    ended_s = time.time()
    assert done.returncode != 0
    marks = list(tmp_path.glob("stopped_*"))
    assert len(marks) == 1, done.stderr[-3000:]
    (mark,) = marks
    assert ended_s - float(mark.name.removeprefix("stopped_")) < 3 + SLACK_S
    told = re.findall(r"training rank 1 \(process (\d+)\) is stopped \(SIGSTOP\)", done.stderr)
    assert len(told) == 1, done.stderr
    line = script.splitlines().index(next(line for line in script.splitlines() if "SIGSTOP" in line)) + 1
    assert "was resumed after" not in done.stderr
    verdict = (
        rf"rank 0: the job has failed on training rank 1: training rank 1 is stopped, last seen at script\.py:{line} "
        r"\(<module>\); training rank 0 was in all_reduce"
    )
    assert len(re.findall(verdict, done.stderr)) == 1, done.stderr
