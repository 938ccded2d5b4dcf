"""A rank that waits for a process that it has started: the verdict shows where that process is."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_safe_workers.diagnostics import awaited_children, inquiry
from rl_safe_workers.diagnostics.diagnosis import diagnose
from rl_safe_workers.diagnostics.inquiry import RankProcess
from rl_safe_workers.errors import RankError, Victim
from rl_safe_workers.ranks import trainer_id

REPOSITORY = Path(__file__).parents[2]
RANK = """
import multiprocessing, os, sys, time
from pathlib import Path
from rl_safe_workers.diagnostics.answering import answer_when_asked
from rl_safe_workers.ranks import trainer_id

def from_cache(queue):
    print(os.getpid(), flush=True)
    time.sleep(300)  # line 9

def work(asked):
    asked.get()

def next_batch(queue):
    return queue.get()  # line 15

answer_when_asked(Path(sys.argv[1]), trainer_id(1))
context = multiprocessing.get_context("fork")
queue, asked = context.Queue(), context.Queue()
context.Process(target=work, args=(asked,), daemon=True).start()
context.Process(target=from_cache, args=(queue,), daemon=True).start()
next_batch(queue)
"""


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[tuple[RankProcess, int]]:
    """A rank that waits for the second of its two children, and that child."""
    (tmp_path / "rows.py").write_text(RANK)
    (tmp_path / "asked").mkdir()
    process = subprocess.Popen(
        [sys.executable, "rows.py", str(tmp_path / "asked")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield RankProcess(rank_id=trainer_id(1), pid=process.pid, folder=tmp_path / "asked"), child
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("looks", ["from outside", "at its own answer"])
def test_a_child_that_a_rank_waits_for_is_shown_with_its_line_and_its_stack(
    looks: str, rank: tuple[RankProcess, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, child = rank
    if looks == "from outside":
        monkeypatch.setattr(inquiry._Inquiry, "_ask_child", lambda *_: "")
    else:
        monkeypatch.setattr(awaited_children, "py_spy", lambda *_, **__: "")
    victim = RankError(
        rank_id=trainer_id(0), phase="train", cause=Victim(), text="RuntimeError: Timed out", trace="", raised_at=1.0
    )
    found = diagnose([one], patience_s=30.0, reports={trainer_id(0): victim}, evidence=tmp_path / "hang")
    assert re.fullmatch(
        r"hang: phase train, the trainers: training rank 0 gave up waiting; training rank 1 is at \S*rows\.py:15 "
        rf"\(next_batch\), and waits for its process {child}, which is at \S*rows\.py:9 \(from_cache\)",
        found.verdict,
    ), found.verdict
    assert "from_cache" in (tmp_path / "hang" / f"stack_trainer_1_process_{child}.txt").read_text()
