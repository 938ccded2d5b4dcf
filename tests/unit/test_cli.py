"""The command line: exit codes, what lands on stderr, and what is not imported."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import rl_safe_workers
from rl_safe_workers.cli.main import main
from rl_safe_workers.cli.terminal import PrintableFormatter
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import CommunicatorError, Interrupted, LogprobGapError, Raised, RankError
from rl_safe_workers.ranks import trainer_id

REPOSITORY = Path(__file__).parents[2]
Run = Callable[[RunConfig], None]


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe that passes the preflight, in a current directory of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.parquet").write_bytes(b"")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "model: {path: m, create: {}}\n"
        "data: {train_files: [train.parquet]}\n"
        "cluster: {cpus_per_trainer: 0.01, cpus_per_rollout: 0.01}\n"
    )
    return str(path)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[Run], None]:
    """Puts a function in the place of the driver's ``run``."""

    def _install(run: Run) -> None:
        module = ModuleType("rl_safe_workers.driver.run")
        module.run = lambda config, when_failed: run(config)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return _install


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    logger = logging.getLogger("rl_safe_workers")
    before = logger.level
    yield
    logger.setLevel(before)


def test_a_run_gets_the_recipe_with_its_overrides(recipe: str, driver: Callable[[Run], None]) -> None:
    seen: list[RunConfig] = []
    driver(seen.append)
    assert main(["run", recipe, "trainer.seed=7"]) == 0
    assert seen[0].trainer.seed == 7


def test_an_override_may_follow_an_option(recipe: str, driver: Callable[[Run], None]) -> None:
    seen: list[RunConfig] = []
    driver(seen.append)
    assert main(["run", recipe, "rollout.n=4", "-v", "trainer.seed=7"]) == 0
    assert (seen[0].rollout.n, seen[0].trainer.seed) == (4, 7)


@pytest.mark.parametrize(("option", "level"), [([], logging.WARNING), (["-v"], logging.INFO)])
def test_verbose_turns_on_info(recipe: str, driver: Callable[[Run], None], option: list[str], level: int) -> None:
    driver(lambda config: None)
    main(["run", recipe, *option])
    assert logging.getLogger("rl_safe_workers.lifecycle").getEffectiveLevel() == level


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("trainer.sed=1", "command line: unknown key trainer.sed; the nearest known key is trainer.seed"),
        ("cluster.num_trainers=0", "command line: cluster.num_trainers cannot be 0; it should be"),
        ("megatron.tensor_model_parallel_size=3", "4 trainers do not divide by tensor 3"),
        ("model.create=null", "model.path=m does not exist"),
        ("data.train_files=[x.parquet]", "data.train_files has x.parquet"),
        ("reward.function=nope:f", "reward.function: "),
        ("cluster.cpus_per_trainer=4096", "4 trainers x 4096 CPUs"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_and_nothing_is_written(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, start: str
) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert main(["run", recipe, override]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"rl-safe: error: {start}")
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failed_run_is_exit_code_1(
    recipe: str, driver: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: RunConfig) -> None:
        raise LogprobGapError(step=3, gap=0.1, bound=1e-5)

    driver(fail)
    assert main(["run", recipe]) == 1
    assert capsys.readouterr().err.startswith("rl-safe: error: step 3: log-probability gap 0.1")


def test_the_traceback_of_a_rank_comes_before_its_error(
    recipe: str, driver: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: RunConfig) -> None:
        trace = "Traceback (most recent call last):\nValueError: x\n"
        raise RankError(
            rank_id=trainer_id(2), phase="train", cause=Raised(), text="ValueError: x", trace=trace, raised_at=0.0
        )

    driver(fail)
    assert main(["run", recipe]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "Traceback (most recent call last):",
        "ValueError: x",
        "rl-safe: error: training rank 2 failed in phase train: ValueError: x",
    ]


def test_an_error_that_quotes_several_lines_is_shown_on_one(
    recipe: str, driver: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: RunConfig) -> None:
        raise CommunicatorError("group tp:\n    no route")

    driver(fail)
    assert main(["run", recipe]) == 1
    assert capsys.readouterr().err == "rl-safe: error: group tp: no route\n"


ESCAPES = "\x1b]0;title\x07\x1b[2J\u202e\x9b31m\r\n\udc80"


def assert_plain(text: str, most: int = 2_100) -> None:
    """Nothing that a terminal takes as a command, and little of it."""
    assert all(line.isprintable() for line in text.split("\n"))
    assert len(text) <= most


def test_an_error_shows_control_characters_escaped_and_is_short(
    recipe: str, driver: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: RunConfig) -> None:
        raise CommunicatorError(f"{ESCAPES} group " + "x" * 10**6 + " check it")

    driver(fail)
    assert main(["run", recipe]) == 1
    err = capsys.readouterr().err
    assert_plain(err)
    assert err.startswith("rl-safe: error: \\x1b]0;title\\x07\\x1b[2J")
    assert err.endswith(" check it\n")
    assert err.count("\n") == 1


def test_the_traceback_of_a_rank_shows_control_characters_escaped(
    recipe: str, driver: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: RunConfig) -> None:
        trace = f"Traceback:\n\t{ESCAPES}\n" + "x" * 10**6
        raise RankError(rank_id=trainer_id(2), phase="train", cause=Raised(), text=ESCAPES, trace=trace, raised_at=0.0)

    driver(fail)
    main(["run", recipe])
    assert_plain(capsys.readouterr().err.replace("\t", ""), 25_000)


@pytest.mark.parametrize(
    "arguments", [["run", "r.yaml", f"--{ESCAPES}"], [ESCAPES], ["run", "r" * 10**5, "--x" * 10**5]]
)
def test_refused_arguments_show_control_characters_escaped(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert_plain(capsys.readouterr().err, 3_000)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", ESCAPES],
        ["run", "RECIPE", f"trainer.run_name={ESCAPES}"],
        ["run", "RECIPE", f"{ESCAPES}=1"],
        ["run", "RECIPE", f"model.path={ESCAPES}"],
        ["run", "RECIPE", f"reward.function={ESCAPES}:f"],
        ["plan", ESCAPES],
        ["plan", "--from", "verl", ESCAPES],
        ["plan", "--trainers", ESCAPES],
        ["plan", "--trainers", "8", "--model", ESCAPES],
        ["plan", "--trainers", "8", "--svg", f"{ESCAPES}/x"],
        ["doctor", ESCAPES],
        ["doctor", "--checkpoint-path", ESCAPES],
        ["audit", ESCAPES],
        ["audit", "x" * 300],
        ["audit", "a/" * 3_000],
        ["slices", "x" * 300, "--node", "0"],
        ["convert", "--hf", "x" * 300, "--out", "y"],
        ["plan", "--trainers", "8", "--model", "x" * 300],
        ["plan", "--trainers", "8", "--html", "x" * 300],
        ["plan", "x" * 10**5],
        ["slices", ESCAPES, "--node", "0"],
        ["convert", "--hf", ESCAPES, "--out", ESCAPES, f"x={ESCAPES}"],
    ],
)
def test_hostile_arguments_are_refused_on_one_plain_line(
    recipe: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([recipe if argument == "RECIPE" else argument for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert_plain(err)
    assert err.startswith("rl-safe: error: ")
    assert err.count("\n") == 1


def test_log_lines_are_plain_and_none_passes_for_two() -> None:
    formatter = PrintableFormatter("%(levelname)s %(message)s")
    record = logging.LogRecord("x", logging.WARNING, "", 0, "file %s", (f"{ESCAPES}\nERROR forged",), None)
    text = formatter.format(record)
    assert_plain(text)
    assert not any(line.startswith("ERROR") for line in text.splitlines())


def test_a_signal_is_128_and_its_number(recipe: str, driver: Callable[[Run], None]) -> None:
    def interrupt(config: RunConfig) -> None:
        raise Interrupted(signum=15)

    driver(interrupt)
    assert main(["run", recipe]) == 143


def test_control_c_is_exit_code_130(
    recipe: str, driver: Callable[[Run], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(config: RunConfig) -> None:
        raise KeyboardInterrupt

    driver(interrupt)
    assert main(["run", recipe]) == 130
    assert capsys.readouterr().err == "rl-safe: interrupted\n"


def test_a_bug_keeps_its_traceback(recipe: str, driver: Callable[[Run], None]) -> None:
    def fail(config: RunConfig) -> None:
        raise ZeroDivisionError

    driver(fail)
    with pytest.raises(ZeroDivisionError):
        main(["run", recipe])


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "r.yaml", "--nope"], ["nope"]])
def test_arguments_that_are_not_understood_are_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_the_module_stands_for_the_command() -> None:
    shown = python("-m", "rl_safe_workers", "--version")
    assert shown == f"rl-safe {rl_safe_workers.__version__}\n"


def test_the_command_line_loads_neither_torch_nor_ray() -> None:
    code = "import sys, json, rl_safe_workers.cli.main; print(json.dumps(list(sys.modules)))"
    assert not {"torch", "ray", "transformers", "pyarrow"} & set(json.loads(python("-c", code)))


@pytest.mark.parametrize(
    ("name", "variables"), [("é", {}), ("e", {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})], ids=["C", "ASCII"]
)
def test_the_locale_changes_nothing(tmp_path: Path, name: str, variables: dict[str, str]) -> None:
    recipe = f"# é\nmodel: {{path: {name}}}\ndata: {{train_files: [{name}.parquet]}}\n"
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "rl_safe_workers", "plan", "recipe.yaml", "--html", "plan.html"],
        capture_output=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "LC_ALL": "C", **variables, "PYTHONPATH": str(REPOSITORY)},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"4 trainers" in done.stdout
    (tmp_path / "plan.html").read_text(encoding="utf-8")


def python(*arguments: str) -> str:
    """Runs a fresh interpreter in the repository and returns what it prints."""
    done = subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, text=True, timeout=60, cwd=REPOSITORY
    )
    return done.stdout


@pytest.mark.parametrize("options", [["--json"], []])
def test_a_reader_that_stops_reading_makes_no_traceback(options: list[str]) -> None:
    command = [sys.executable, "-m", "rl_safe_workers", "plan", "--world", "64", "--trainers", "32", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    # rich ends the process itself where it prints a table.
    assert process.returncode == (128 + signal.SIGPIPE if options else 1)
