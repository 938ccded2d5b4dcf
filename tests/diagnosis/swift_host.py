"""One fault under ms-swift: its own ``megatron`` command under torchrun, with our plugin, on two ranks over gloo.

The first line is the first that one of the ranks prints after ``the job has failed on training rank N:``. A user finds
it by these words, or as the last line of ours above torchrun's report.
"""

from __future__ import annotations

from pathlib import Path

from rl_safe_workers.adapters.swift.__main__ import PLUGIN
from tests.diagnosis.host import Fault, Seen
from tests.swift.commands import End
from tests.swift.commands import run as run_command
from tests.swift.conftest import write_inputs
from tests.swift.jobs import BREAK, CPU, ENGINE, GRPO, ON_CPU, PLAIN, TRAINING, free_port

TIMEOUT_S = 10.0
"""Seconds of every phase."""
SETTINGS = {
    "timeouts": dict.fromkeys(
        (
            *("world", "outside", "start", "bootstrap", "convert", "train", "logprob"),
            *("save", "rollout", "sync", "teardown"),
        ),
        TIMEOUT_S,
    )
}
PLACES = {
    **{phase: phase for phase in ("start", "bootstrap", "convert", "load", "save", "exit", "logprob")},
    "train": "step",
    "rollout": "generation",
    "sync": "export_weights",
}
"""The place in ``break_plugin`` of each phase."""
CALLED = {"load": "convert"}
"""Phases that this host calls otherwise: ms-swift reads a checkpoint while it builds its trainer."""
WITH_ENGINE = ("rollout", "sync", "logprob")
"""Phases of GRPO, with the engine double in each rank."""
ACTS = ("hang", "raise", "kill", "stop", "exit", "segv")
_EP2 = ("--expert_model_parallel_size", "2")
_SHORT = ("--train_iters", "2", "--save_steps", "2")


def run(fault: Fault, folder: Path) -> Seen:
    """Runs a job to its end, and returns what its user sees.

    Args:
        fault: One of `PLACES` and `ACTS`, in training rank 1.
        folder: A new folder. The model and the data go beside it, once for all jobs there.
    """
    assert fault.rank == 1, "break_plugin breaks training rank 1"
    folder.mkdir(parents=True)
    inputs = _inputs(folder.parent / "inputs")
    model = ("--model", str(inputs / "model"))
    if fault.phase == "load":
        model = (*model, "--mcore_model", str(_checkpoint(folder.parent / "checkpoint", inputs)))
    args = ["sft", *model, "--dataset", str(inputs / "data.jsonl"), "--output_dir", str(folder / "out"), *TRAINING]
    if fault.phase in WITH_ENGINE:
        args = ["rlhf", *args[1:], *GRPO, "--vllm_mode", "colocate", "--sleep_level", "1"]
    place = f"{PLACES[fault.phase]}:{fault.act}"
    end = _run(folder, [*args, *_SHORT], plugins=[BREAK], BREAK=place)
    first_line, advice, evidence = (*end.verdict, "", "")[:3]
    return Seen(
        first_line=first_line,
        advice=advice,
        evidence=evidence.removeprefix("evidence in "),
        after_s=end.seconds,
        output=end.output,
        status=-1 if end.status is None else end.status,
    )


def _run(folder: Path, args: list[str], *, plugins: list[Path], **env: str) -> End:
    every = [CPU, *([ENGINE] if args[0] == "rlhf" else []), PLUGIN, *plugins]
    command = [*args, *_EP2, *ON_CPU, *PLAIN, "--external_plugins", *map(str, every)]
    ports = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    return run_command(folder, command, settings=SETTINGS, breaks=bool(env), **ports, **env)


def _inputs(folder: Path) -> Path:
    if not folder.exists():
        folder.mkdir()
        write_inputs(folder, experts=8)
    return folder


def _checkpoint(folder: Path, inputs: Path) -> Path:
    """Returns a checkpoint of the model, exported once."""
    if not folder.exists():
        folder.mkdir()
        args = ["export", "--model", str(inputs / "model"), "--output_dir", str(folder / "out"), "--to_mcore", "true"]
        end = _run(folder, [*args, "--check_model", "false"], plugins=[])
        assert end.status == 0, end.output[-4000:]
    return folder / "out"


def is_supported(fault: Fault) -> bool:
    """Returns True if `run` can make the fault."""
    return fault.phase in PLACES and fault.act in ACTS and fault.rank == 1 and not fault.detail
