"""Faults of the machine under a run: it ends soon and says why, or goes on, and loses and leaves nothing."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from rl_safe_workers.checkpoint.folders.manifest import step_dir
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import Role
from tests.chaos.cases import CONFIG, FIRST_STEP, LAST_STEP, SLACK_S
from tests.chaos.conftest import MACHINE, checkpoints_of
from tests.chaos.machine import WAIT_S, MachineFault
from tests.chaos.plan import Fault, Kind
from tests.chaos.striker import FILLER, NOTICED_S, fill
from tests.chaos.test_matrix import (
    ATTEMPT_S,
    Record,
    assert_checkpoint_is_undamaged,
    assert_completed,
    assert_newest_checkpoint_is_undamaged,
    named_at_restarts,
    run_with,
    seconds_from,
)
from tests.integration.runs import Outcome, Running, files_under, finish, rl_safe, running

GOES_ON = (*CONFIG, "trainer.resume_mode=auto")
HOUR_S = 3600
LONG_FOLDER = "x" * 60
OPEN_FILES = 256


def name_of(fault: MachineFault) -> str:
    """The id of a parameter."""
    return fault.name.lower()


@contextmanager
def small_disk(folder: Path, *, size_bytes: int) -> Iterator[None]:
    """Mounts a file system of its own on a folder, or skips the test where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "rl_safe_test", str(folder)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs to mount a small file system: {getattr(error, 'stderr', error)}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for those of sockets; pytest's own does not."""
    folder = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.chaos  # tests/distributed fills a disk, too
@pytest.mark.timeout(600)  # as below: the first one waits for the undisturbed run
@pytest.mark.parametrize("row", [MachineFault.FULL_DISK, MachineFault.FULL_DISK_IN_BACKGROUND], ids=name_of)
def test_a_full_disk_fails_the_save_and_costs_no_other(
    row: MachineFault, undisturbed: Outcome, record_property: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_property(MACHINE, (str(row), None))
    root = checkpoints_of(tmp_path)
    fault = Fault(kind=Kind.FILL, role=Role.TRAINER, rank=1, phase=Phase.SAVE, folder=str(tmp_path), disk=str(root))
    in_background = row is MachineFault.FULL_DISK_IN_BACKGROUND
    overrides = [*GOES_ON, f"rl_safe.checkpoint.async_save={str(in_background).lower()}"]
    with small_disk(root, size_bytes=64 * 2**20):
        outcome, ended_at = run_with([fault], overrides, undisturbed, tmp_path, monkeypatch)
        assert outcome.code == 1, outcome.err
        assert f"save of {step_dir(root, FIRST_STEP + 1)}.incomplete failed: " in outcome.last_error
        no_space = rf"\[Errno 28\] No space left on device: '{root}/\S+'"
        full = f"training rank 1: OSError: {no_space}: free some space on its disk"
        assert re.search(full, outcome.last_error), outcome.last_error
        seconds = seconds_from(fault, ended_at)
        assert seconds <= SLACK_S
        assert outcome.left == []
        assert_newest_checkpoint_is_undamaged(tmp_path, undisturbed, {FIRST_STEP})
        (root / FILLER).unlink()
        model = f"model.path={undisturbed.folder / 'model'}"
        again = finish(rl_safe("quickstart.yaml", model, *overrides, "trainer.run_name=again"), tmp_path)
        assert again.code == 0, again.err
        assert_newest_checkpoint_is_undamaged(tmp_path, undisturbed, {LAST_STEP})
        assert [*root.glob("*.incomplete")] == []
    record_property(MACHINE, (str(row), seconds))


def continue_after_verdict(run: Running) -> None:
    """Lets a stopped process of the run go on as soon as the run has said who is missing."""

    def has_judged() -> bool:
        return "hang: " in run.err

    run.wait_until(has_judged, timeout_s=ATTEMPT_S)
    for process in run.processes():
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                process.resume()


UNWATCHED = "rl_safe.timeouts.stopped=0"
"""Leaves a stopped rank to the timeout of a phase."""
STOPPED = {
    MachineFault.STOPPED_TRAINER: (Role.TRAINER, 1, Phase.TRAIN, Phase.TRAIN),
    MachineFault.STOPPED_ENGINE: (Role.ROLLOUT, 0, Phase.ROLLOUT, Phase.ROLLOUT),
    MachineFault.STOPPED_IDLE_TRAINER: (Role.TRAINER, 1, Phase.ROLLOUT, Phase.ONLOAD),
    MachineFault.STOPPED_IDLE_ENGINE: (Role.ROLLOUT, 0, Phase.TRAIN, Phase.SYNC),
}
"""The role that is stopped, the phase in which it is stopped, and the phase in which it is missed."""


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", STOPPED, ids=name_of)
def test_a_stopped_rank_is_said_to_be_stopped(
    row: MachineFault, undisturbed: Outcome, record_property: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_property(MACHINE, (str(row), None))
    role, rank, phase, missed_in = STOPPED[row]
    fault = Fault(kind=Kind.STOP, role=role, rank=rank, phase=phase, folder=str(tmp_path))
    overrides = [*GOES_ON, UNWATCHED, *(f"rl_safe.timeouts.{name}={WAIT_S}" for name in {phase, missed_in})]
    outcome, ended_at = run_with([fault], overrides, undisturbed, tmp_path, monkeypatch, continue_after_verdict)
    assert outcome.code == 1, outcome.err
    (verdict,) = [line for line in outcome.err.splitlines() if line.startswith(f"hang: phase {missed_in}, ")]
    assert re.search(f"; {role.noun} {rank} is stopped( at [^;]+|, last seen at [^;]+)?; ", verdict), verdict
    assert f"phase {missed_in}: " in outcome.last_error
    seconds = seconds_from(fault, ended_at)
    assert seconds <= WAIT_S + SLACK_S + (NOTICED_S if fault.finds_it_idle else 0.0)
    assert outcome.left == []
    assert_newest_checkpoint_is_undamaged(tmp_path, undisturbed, {FIRST_STEP})
    record_property(MACHINE, (str(row), seconds))


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_rank_that_was_stopped_touches_nothing_of_the_next_attempt(
    undisturbed: Outcome, record_property: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = MachineFault.STOPPED_AND_STARTED_AGAIN
    record_property(MACHINE, (str(row), None))
    fault = Fault(kind=Kind.STOP, role=Role.TRAINER, rank=1, phase=Phase.SAVE, folder=str(tmp_path))
    overrides = [*GOES_ON, UNWATCHED, f"rl_safe.timeouts.save={WAIT_S}", "rl_safe.restarts=1"]
    outcome, _ = run_with([fault], overrides, undisturbed, tmp_path, monkeypatch, continue_after_verdict)
    assert len(named_at_restarts(outcome)) == 1, outcome.err
    assert_completed(outcome, undisturbed)
    assert outcome.left == []
    assert_newest_checkpoint_is_undamaged(tmp_path, undisturbed, {LAST_STEP})
    record_property(MACHINE, (str(row), 0.0))


@contextmanager
def recorded(row: MachineFault, record_property: Record) -> Iterator[None]:
    """Records a row of the page: failed, unless the body comes to its end."""
    record_property(MACHINE, (str(row), None))
    yield
    record_property(MACHINE, (str(row), 0.0))


def run_to_the_end(
    undisturbed: Outcome,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    prefix: tuple[str, ...] = (),
    meanwhile: Callable[[Running], object] = lambda run: None,
) -> None:
    """Runs on from the first checkpoint, on a machine that is at fault, and must end as the undisturbed run."""
    outcome, _ = run_with([], GOES_ON, undisturbed, folder, monkeypatch, meanwhile, prefix=prefix)
    assert_completed(outcome, undisturbed)
    assert outcome.left == []
    assert_checkpoint_is_undamaged(step_dir(checkpoints_of(folder), LAST_STEP), undisturbed)


BARE = (
    *("env", "HOME=/proc", "LC_ALL=C", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0"),
    *("sh", "-c", f'ulimit -n {OPEN_FILES} && exec "$@"', "sh"),
)
"""Begins a command line that runs without a home and a locale, and with few open files."""


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_run_needs_no_home_no_locale_and_few_open_files(
    undisturbed: Outcome, record_property: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(MachineFault.BARE, record_property):
        run_to_the_end(undisturbed, tmp_path, monkeypatch, prefix=BARE)


@pytest.fixture(scope="session")
def wall_clock_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``wall_clock.c``, compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, to set the clock of a run alone")
    library = tmp_path_factory.mktemp("wall_clock") / "wall_clock.so"
    source = Path(__file__).with_name("wall_clock.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def run_while_the_clock_is_set(
    library: Path,
    first_s: int,
    undisturbed: Outcome,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sets the run's clock by ``first_s`` seconds at its start, and back by twice as much after its first step."""
    (clock := folder / "clock").write_bytes(bytes(8))

    def set_by(seconds: int) -> None:
        with clock.open("r+b") as file:  # it is mapped
            file.write(struct.pack("=q", seconds * 10**9))

    def jump(run: Running) -> None:
        run.wait_until(run.has_started_a_trainer, timeout_s=ATTEMPT_S)
        set_by(first_s)
        run.wait_until(run.has_finished_a_step, timeout_s=ATTEMPT_S)
        set_by(-first_s)

    faked = ("env", f"LD_PRELOAD={library}", f"WALL_CLOCK_FILE={clock}")
    run_to_the_end(undisturbed, folder, monkeypatch, prefix=faked, meanwhile=jump)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("row", "first_s"),
    [
        pytest.param(MachineFault.CLOCK_FORWARD_AND_BACK, HOUR_S, id="forward_first"),
        pytest.param(MachineFault.CLOCK_BACK_AND_FORWARD, -HOUR_S, id="back_first"),
    ],
)
def test_a_clock_that_is_set_changes_nothing(
    row: MachineFault,
    first_s: int,
    undisturbed: Outcome,
    record_property: Record,
    wall_clock_library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with recorded(row, record_property):
        run_while_the_clock_is_set(wall_clock_library, first_s, undisturbed, tmp_path, monkeypatch)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_temporary_folder_that_fills_up_does_not_end_training(
    undisturbed: Outcome, record_property: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(run: Running) -> None:
        run.wait_until(run.has_finished_a_step, timeout_s=ATTEMPT_S)
        fill(temp)

    with (
        recorded(MachineFault.TEMP_FILLS_UP, record_property),
        short_folder() as temp,
        small_disk(temp, size_bytes=32 * 2**20),
    ):
        run_to_the_end(undisturbed, tmp_path, monkeypatch, prefix=("env", f"TMPDIR={temp}"), meanwhile=fill_up)
        assert [path.name for path in temp.iterdir()] == [FILLER]


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_full_disk_under_the_metrics_is_named(undisturbed: Outcome, record_property: Record, tmp_path: Path) -> None:
    record_property(MACHINE, (str(MachineFault.FULL_OUTPUT), None))
    command = rl_safe(
        "quickstart.yaml",
        f"model.path={undisturbed.folder / 'model'}",
        "model.create={}",
        *CONFIG,
        "trainer.run_name=full",
    )
    with small_disk(tmp_path / "outputs", size_bytes=2**20), running(command, tmp_path) as run:
        run.wait_until(run.has_started_a_trainer, timeout_s=ATTEMPT_S)
        fill(tmp_path / "outputs")
        outcome = run.finish()
    assert outcome.code == 1, outcome.err
    assert outcome.last_error == (
        "rl-safe: error: outputs/full cannot be written: [Errno 28] No space left on device; "
        "free some space on its disk, or change trainer.output_dir"
    )
    assert "Traceback" not in outcome.err
    assert outcome.left == []
    record_property(MACHINE, (str(MachineFault.FULL_OUTPUT), 0.0))


@pytest.mark.parametrize("row", [MachineFault.FULL_TEMP, MachineFault.LONG_TEMP], ids=name_of)
def test_a_temporary_folder_that_ray_cannot_start_in_is_refused(
    row: MachineFault, undisturbed: Outcome, record_property: Record, tmp_path: Path
) -> None:
    record_property(MACHINE, (str(row), None))
    (work := tmp_path / "run").mkdir()
    command = rl_safe("quickstart.yaml", f"model.path={undisturbed.folder / 'model'}", "model.create={}")
    with short_folder() as temp, ExitStack() as stack:
        folder = temp / LONG_FOLDER if row is MachineFault.LONG_TEMP else temp
        if row is MachineFault.LONG_TEMP:
            folder.mkdir()
        else:
            stack.enter_context(small_disk(temp, size_bytes=2**20))
        outcome = finish(["env", f"TMPDIR={folder}", *command], work)
    assert outcome.code == 2, outcome.err
    assert outcome.err.startswith(f"rl-safe: error: the folder for temporary files, {folder}, ")
    assert "set TMPDIR to" in outcome.err
    assert (outcome.err.count("\n"), outcome.out) == (1, "")
    assert files_under(work) == {}
    assert outcome.left == []
    record_property(MACHINE, (str(row), 0.0))
