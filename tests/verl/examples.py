"""Command lines of verl's Megatron examples, out of a checkout of its repository: what each script would start."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

ENTRY = "verl.trainer.main_ppo"
STARTERS = ("python", "python3", "uv", "ray", "torchrun", "pip", "pip3", "hf", "nvidia-smi", "sleep")
"""Programs that the scripts run, or ask; each is replaced by one that writes its arguments down."""
STUB = '#!/bin/sh\nfor argument in "$@"; do printf "%s\\n" "$argument"; done >> "$RECORD"\n'
VARIABLES = {"HOME": "/home/user", "HDFS_ROOT": "/hdfs", "DATA_ROOT": "/data", "RAY_DATA_HOME": "/data"}
"""Variables that scripts ask for and have no default of."""
DROPPED = "megatron.grad_offload"
"""A key of August 2026 that verl 0.9.1 does not have; its own composition refuses it."""


def arguments_of(script: Path, scratch: Path, **variables: str) -> list[str]:
    """Returns what a script passes to the programs that it starts.

    Args:
        script: One for bash.
        scratch: A folder of its own.
        **variables: Of its environment.
    """
    programs, record = scratch / "bin", scratch / "record"
    programs.mkdir(exist_ok=True)
    record.write_text("")
    for name in STARTERS:
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    subprocess.run(
        ["bash", str(script)],
        cwd=scratch,
        env={"PATH": f"{programs}:/usr/bin:/bin", "RECORD": str(record), **VARIABLES, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    return record.read_text().splitlines()


def command_lines(checkout: Path, scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields each script's name and the arguments that it passes with its default variables: options and overrides.

    Scripts that start something else, such as verl's deprecated trainer, are passed over.

    Args:
        checkout: verl's repository, August 2026 or near it.
        scratch: An empty folder.
    """
    for script in sorted((checkout / "examples").rglob("*megatron*.sh")):
        arguments = arguments_of(script, scratch)
        if ENTRY in arguments:
            passed = arguments[arguments.index(ENTRY) + 1 :]
            yield str(script.relative_to(checkout / "examples")), [a for a in passed if DROPPED not in a]
