from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest

from rl_safe_workers.driver.outputs.metrics import MetricsLog, PhaseTotal
from rl_safe_workers.errors import ConfigError


def lines(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_each_step_is_one_json_line(tmp_path) -> None:
    with MetricsLog(tmp_path / "run", tensorboard=False) as log:
        log.log(1, {"reward/mean": 0.25, "response_length/mean": 12, "note": "warm"})
        log.log(2, {"reward/mean": 0.5})
    assert lines(tmp_path / "run") == log.records
    assert log.records[0] == {"step": 1, "reward/mean": 0.25, "response_length/mean": 12, "note": "warm"}


def test_a_line_is_on_disk_before_the_log_is_closed(tmp_path) -> None:
    log = MetricsLog(tmp_path, tensorboard=False)
    log.log(1, {"reward/mean": 0.25})
    assert len(lines(tmp_path)) == 1
    log.close()


def test_a_resumed_run_appends(tmp_path) -> None:
    for step in (1, 2):
        with MetricsLog(tmp_path, tensorboard=False) as log:
            log.log(step, {})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_steps_that_are_taken_again_are_forgotten_and_what_was_there_before_stays(tmp_path) -> None:
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.log(3, {"reward/mean": 0.1})
    with MetricsLog(tmp_path, tensorboard=False) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward/mean": 0.25})
        log.forget_after(3)
        assert len(log.records) == 3
        log.forget_after(1)
        log.log(2, {"reward/mean": 0.75})
        assert [record["step"] for record in log.records] == [1, 2]
    assert [(line["step"], line["reward/mean"]) for line in lines(tmp_path)] == [(3, 0.1), (1, 0.25), (2, 0.75)]


def test_tensorboard_shows_a_step_that_was_taken_again_once(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(tmp_path, tensorboard=True) as log:
        for step in (1, 2, 3):
            log.log(step, {"reward/mean": 0.25})
        log.forget_after(1)
        log.log(2, {"reward/mean": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.75)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_becomes_null_and_is_named_in_a_warning(tmp_path, caplog, value) -> None:
    with caplog.at_level(logging.WARNING), MetricsLog(tmp_path, tensorboard=False) as log:
        log.log(3, {"actor/loss": value, "reward/mean": 0.5})
    assert lines(tmp_path) == [{"step": 3, "actor/loss": None, "reward/mean": 0.5}]
    assert f"step 3: not a finite number: actor/loss = {value}" in caplog.text
    assert "reward/mean" not in caplog.text


def test_close_is_idempotent(tmp_path) -> None:
    log = MetricsLog(tmp_path, tensorboard=True)
    log.close()
    log.close()


def test_tensorboard_reads_the_scalars_back(tmp_path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with MetricsLog(tmp_path, tensorboard=True) as log:
        log.log(1, {"reward/mean": 0.25, "note": "text stays in the file"})
        log.log(2, {"reward/mean": 0.5})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]


def test_no_tensorboard_directory_unless_asked(tmp_path) -> None:
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.log(1, {})
    assert not (tmp_path / "tensorboard").exists()


def test_tensorboard_that_is_not_installed_is_refused_before_a_file_is_made(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.event_file_writer", None)
    with pytest.raises(ConfigError, match=r"trainer\.logger names tensorboard"):
        MetricsLog(tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_neither_log_nor_tensorboard_imports_torch(tmp_path) -> None:
    program = (
        "import sys, pathlib; from rl_safe_workers.driver.outputs.metrics import MetricsLog;"
        "log = MetricsLog(pathlib.Path(sys.argv[1]), tensorboard=True); log.log(1, {'a': 1.0}); log.close();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 0


def test_phase_total_adds_up() -> None:
    total = PhaseTotal().plus(1.0).plus(2.0)
    assert (total.count, total.total_s, total.mean_s) == (2, 3.0, 1.5)
    assert PhaseTotal().mean_s == 0.0


def test_a_full_disk_is_told_by_the_line_and_not_again_by_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = MetricsLog(tmp_path, tensorboard=False)
    with pytest.raises(OSError, match="No space left on device"):
        log.log(1, {"reward/mean": 0.25})
    log.close()
    assert "metrics.jsonl lacks its last line: [Errno 28] No space left on device" in caplog.text
    assert log.records == []
