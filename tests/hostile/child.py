"""A child of a warm process: runs one command on one input, and tells how it ended."""

from __future__ import annotations

import gc
import io
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

from rl_safe_workers.cli import terminal
from rl_safe_workers.errors import RlSafeError
from tests.hostile.canary import Witness, changed_state, process_state
from tests.hostile.case import Command, Site
from tests.hostile.entries import ENTRIES


def run_child(command: Command, site: Site, *, report: int, out: Path, err: Path) -> NoReturn:
    """Runs a command in this process, a fresh child, and ends it.

    Args:
        command: What to run.
        site: Of the input.
        report: Descriptor for the report, one JSON object.
        out: File that takes stdout.
        err: File that takes stderr.
    """
    _redirect(out, err)
    try:
        _run_watched(command, site, report)
    except BaseException:
        traceback.print_exc()
        raise


def _run_watched(command: Command, site: Site, report: int) -> NoReturn:
    os.setsid()
    # Should it take memory faster than it is watched, the kernel ends it before anybody else.
    Path("/proc/self/oom_score_adj").write_text("1000")
    os.chdir(site.input)
    os.environ.update(TMPDIR=str(site.temp), HOME=str(site.temp))
    tempfile.tempdir = None
    errors = _remember_reported()
    before = process_state()
    witness = Witness(site)
    code = _run(command)
    # In this order: reading the state opens files.
    ran, read, touched = list(witness.ran), list(witness.read), list(witness.touched)
    facts = {
        "code": code,
        "error": errors[-1] if errors else None,
        "ran": ran,
        "read": read,
        "touched": touched,
        "changed": changed_state(before, process_state()),
    }
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(report, json.dumps(facts).encode())
    os._exit(code & 0xFF)


def _run(command: Command) -> int:
    gc.enable()
    terminal.set_up(verbose=False)
    _, entry = ENTRIES[command.entry]
    try:
        return entry(*command.arguments)
    except RlSafeError as error:
        terminal.report(error)
        return error.exit_code
    except BaseException:
        traceback.print_exc()
        return 70


def _remember_reported() -> list[str]:
    """Keeps the class of each error that the command reports."""
    found: list[str] = []
    report = terminal.report

    def remember(error: Any) -> None:
        found.append(type(error).__name__)
        report(error)

    terminal.report = remember
    return found


def _redirect(out: Path, err: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number, path in ((1, out), (2, err)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    # As Python has them where the terminal is UTF-8.
    sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", closefd=False), encoding="utf-8", errors="strict")
    sys.stderr = io.TextIOWrapper(
        os.fdopen(2, "wb", closefd=False), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
