"""Reward functions: what the built-in ones give, and the one line that each failure gets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rl_safe_workers.driver.inputs.rewards import CHARACTER_CLASSES, resolve_reward
from rl_safe_workers.errors import RewardFunctionError

USER_MODULE = """
def half(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) / 2

def broken(data_source, solution_str, ground_truth, extra_info):
    return 1 / 0

def leaving(data_source, solution_str, ground_truth, extra_info):
    import sys
    sys.exit(0)

def nan(data_source, solution_str, ground_truth, extra_info):
    return float("nan")

def nothing(data_source, solution_str, ground_truth, extra_info):
    return None

def numpy_scalar(data_source, solution_str, ground_truth, extra_info):
    import numpy as np
    return np.float32(0.5)

constant = 3
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module of the user's, in the current directory."""
    (tmp_path / "my_rewards.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield "my_rewards"
    sys.modules.pop("my_rewards", None)


def score(name: str, response: str, ground_truth: str = "lowercase") -> float:
    return resolve_reward(name)("source-7", response, ground_truth, None)


def complaint(name: str, response: str = "abc", ground_truth: str = "lowercase") -> str:
    with pytest.raises(RewardFunctionError) as caught:
        score(name, response, ground_truth)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ground_truth", "response", "expected"),
    [
        ("lowercase", "abAB", 0.5),
        ("uppercase", "abcD", 0.25),
        ("digits", "12ab5", 0.6),
        ("vowels", "aEx.", 0.5),
        ("punctuation", "a.!", 2 / 3),
        ("whitespace", "a \n", 2 / 3),
        ("letters", "aB3", 2 / 3),
        ("lowercase", "", 0.0),
        ("lowercase", "éß", 0.0),
    ],
)
def test_char_class_gives_the_share_of_characters_in_the_class(
    ground_truth: str, response: str, expected: float
) -> None:
    assert score("char_class", response, ground_truth) == pytest.approx(expected)


def test_every_character_of_a_class_scores_one() -> None:
    for name, members in CHARACTER_CLASSES.items():
        assert score("char_class", "".join(members), name) == 1.0


def test_an_unknown_character_class_is_named_with_the_known_ones() -> None:
    message = complaint("char_class", ground_truth="emoji")
    assert "'emoji'" in message
    assert "lowercase" in message


def test_exact_match_ignores_surrounding_white_space_only() -> None:
    assert score("exact_match", " 42\n", "42") == 1.0
    assert score("exact_match", "4 2", "42") == 0.0


def test_the_working_directory_hides_no_installed_module(user_module: str) -> None:
    sys.path[:] = [path for path in sys.path if path != str(Path.cwd())]
    resolve_reward(f"{user_module}:half")
    assert sys.path[-1] == str(Path.cwd())


def test_a_misspelt_built_in_gets_the_nearest_name() -> None:
    assert "did you mean char_class" in complaint("char_clas")


def test_a_far_off_built_in_gets_all_names() -> None:
    assert "char_class, exact_match" in complaint("zzz")


def test_a_users_function_is_found_in_the_current_directory(user_module: str) -> None:
    assert score(f"{user_module}:half", "abcd") == 2.0


def test_a_missing_module_is_named(user_module: str) -> None:
    assert "importing 'no_such_module'" in complaint("no_such_module:f")


def test_a_module_that_raises_while_imported_is_named(user_module: str) -> None:
    Path("bad_module.py").write_text("raise RuntimeError('boom')")
    message = complaint("bad_module:f")
    assert "'bad_module'" in message
    assert "RuntimeError: boom" in message


def test_a_missing_function_is_named_with_its_module(user_module: str) -> None:
    assert "'absent' of 'my_rewards'" in complaint(f"{user_module}:absent")


def test_something_not_callable_is_refused(user_module: str) -> None:
    assert "not callable" in complaint(f"{user_module}:constant")


@pytest.mark.parametrize("name", [":function", "module:"])
def test_half_a_name_is_refused(name: str) -> None:
    assert "module:function" in complaint(name)


def test_a_function_that_would_end_the_run_as_if_it_were_complete_is_an_error(user_module: str) -> None:
    assert "raised SystemExit: 0 at my_rewards.py:10 (leaving)" in complaint(f"{user_module}:leaving")


def test_an_exception_of_a_users_function_names_function_and_sample(user_module: str) -> None:
    message = complaint(f"{user_module}:broken", response="xyz", ground_truth="T")
    for part in ("my_rewards:broken", "ZeroDivisionError", "'source-7'", "'T'", "'xyz'"):
        assert part in message


@pytest.mark.parametrize(("function", "shown"), [("nan", "nan"), ("nothing", "None")])
def test_a_result_that_is_no_finite_number_is_refused(user_module: str, function: str, shown: str) -> None:
    assert f"returned {shown} for" in complaint(f"{user_module}:{function}")


def test_a_numpy_scalar_becomes_a_plain_float(user_module: str) -> None:
    reward = score(f"{user_module}:numpy_scalar", "abc")
    assert type(reward) is float
    assert reward == np.float32(0.5)


def test_a_long_response_is_shortened_in_the_message(user_module: str) -> None:
    assert len(complaint(f"{user_module}:broken", response="x" * 10_000)) < 400


@pytest.mark.parametrize(
    "text", ["raise SystemExit(0)", "raise ValueError('a\\nb')", "def f(: pass", "import nowhere_at_all"]
)
def test_a_module_that_fails_at_import_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "failing_reward.py").write_text(text)
    with pytest.raises(RewardFunctionError, match="importing 'failing_reward' failed"):
        resolve_reward("failing_reward:f")


@pytest.mark.parametrize("name", ["sys:nowhere", "sys:version", "os:nowhere", "..:f", "a b:f", "\x1b[2J:f", ":f", "f:"])
def test_a_name_of_no_function_is_one_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(RewardFunctionError, match=r"reward.function"):
        resolve_reward(name)
    assert sys.path == before


def test_a_function_from_elsewhere_does_not_put_the_folder_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    resolve_reward("os:getpid")
    assert sys.path == before
