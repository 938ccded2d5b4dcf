"""Command lines of verl's Megatron examples, out of a checkout of its repository: what each script would start."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

ENTRY = "verl.trainer.main_ppo"
STARTERS = ("python", "python3", "uv", "ray", "torchrun", "pip", "pip3", "nvidia-smi", "sleep")
"""Programs that the scripts run, or ask; each is replaced by one that writes its arguments down."""
STUB = '#!/bin/sh\nfor argument in "$@"; do printf "%s\\n" "$argument"; done >> "$RECORD"\n'
DROPPED = "megatron.grad_offload"
"""A key of August 2026 that verl 0.9.1 does not have; its own composition refuses it."""


def command_lines(checkout: Path, scratch: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields each script's name and the overrides that it passes with its default variables.

    Scripts that start something else, such as verl's deprecated trainer, are passed over.

    Args:
        checkout: verl's repository, August 2026 or near it.
        scratch: An empty folder.
    """
    programs = scratch / "bin"
    programs.mkdir()
    for name in STARTERS:
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    for script in sorted((checkout / "examples").rglob("*megatron*.sh")):
        record = scratch / "record"
        record.write_text("")
        subprocess.run(
            ["bash", str(script)],
            cwd=scratch,
            env={"PATH": f"{programs}:/usr/bin:/bin", "HOME": "/home/user", "RECORD": str(record)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
        arguments = record.read_text().splitlines()
        if ENTRY in arguments:
            overrides = arguments[arguments.index(ENTRY) + 1 :]
            yield str(script.relative_to(checkout / "examples")), [o for o in overrides if DROPPED not in o]
