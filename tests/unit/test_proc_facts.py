"""Facts of the operating system about a process, from the texts of ``/proc``."""

from __future__ import annotations

import signal

import pytest

from rl_safe_workers.diagnostics import proc_facts

MASKS = ("SigBlk", "SigIgn", "SigCgt")
NEITHER = dict.fromkeys(MASKS, 640)
"""Signals 8 and 10."""


@pytest.mark.parametrize(
    ("masks", "dies"),
    [(NEITHER, True), *(({**NEITHER, name: 0x4000}, False) for name in MASKS), ({}, False)],
    ids=["neither", *MASKS, "not ours to read"],
)
def test_a_signal_ends_who_neither_catches_nor_ignores_nor_blocks_it(masks: dict[str, int], dies: bool) -> None:
    status = "".join(f"{name}:\t{mask:016x}\n" for name, mask in masks.items())
    assert proc_facts._dies_of(signal.SIGTERM, f"Name:\tpython\n{status}Seccomp:\t0\n") is dies
