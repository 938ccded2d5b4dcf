"""A fault in a job of ms-swift's own ``megatron`` command under torchrun: two ranks at EP2, over gloo."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_safe_workers.adapters.swift.__main__ import PLUGIN
from rl_safe_workers.adapters.swift.swift_settings import VARIABLE, SwiftTimeouts
from rl_safe_workers.ports import port_to_listen_on
from tests.diagnosis.host import TIMEOUT_S, Fault, Seen, ended, told, variables
from tests.swift.conftest import write_inputs
from tests.swift.jobs import CPU, ON_CPU, PLAIN, TRAINING, environment


def run(fault: Fault, folder: Path) -> Seen:
    """Runs the job until the fault has ended it; its root cause is the line that a rank logs."""
    settings = {"timeouts": dict.fromkeys(SwiftTimeouts.model_fields, TIMEOUT_S)}
    ours = {VARIABLE: json.dumps(settings), "NPROC_PER_NODE": "2", "MASTER_PORT": str(port_to_listen_on("127.0.0.1"))}
    faults = variables(fault, folder)
    stock = environment()
    paths = os.pathsep.join((faults["PYTHONPATH"], stock["PYTHONPATH"]))
    every = {**{name: value for name, value in stock.items() if name not in os.environ}, **faults, **ours}
    command = [str(Path(sys.executable).parent / "megatron"), *_arguments(folder)]
    status, output, after_s = ended(command, {**every, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ""}, folder)
    # torch puts the rank in front of each line while a rank ends.
    plain = re.sub(r"^\[rank\d+\]: ?", "", output, flags=re.MULTILINE)
    first_line, advice, evidence = told(plain, r"^training rank \d+: the job has failed on (.*)$")
    if not Path(evidence).is_dir():  # where a rank has raised, the line is alone
        advice = evidence = ""
    return Seen(first_line, advice, evidence, after_s, output, status)


def _arguments(folder: Path) -> Sequence[str]:
    inputs = folder / "inputs"
    inputs.mkdir()
    write_inputs(inputs, experts=8)
    plugins = [CPU, PLUGIN]
    return [
        "sft",
        *("--model", str(inputs / "model"), "--dataset", str(inputs / "data.jsonl")),
        *("--output_dir", str(folder / "out"), "--expert_model_parallel_size", "2"),
        *(*TRAINING, "--train_iters", "2", *ON_CPU, *PLAIN, "--external_plugins", *map(str, plugins)),
    ]
