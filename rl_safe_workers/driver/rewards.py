"""Verifiable rewards: the built-in ones, and those that a user names as ``module:function``.

Pure Python; a reward runs in the driver process, once per sample.
"""

from __future__ import annotations

import difflib
import importlib
import math
import string
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from rl_safe_workers.errors import RewardFunctionError

CHARACTER_CLASSES: Mapping[str, frozenset[str]] = {
    "digits": frozenset(string.digits),
    "letters": frozenset(string.ascii_letters),
    "lowercase": frozenset(string.ascii_lowercase),
    "punctuation": frozenset(string.punctuation),
    "uppercase": frozenset(string.ascii_uppercase),
    "vowels": frozenset("aeiouAEIOU"),
    "whitespace": frozenset(" \n"),
}
"""Classes of characters that ``char_class`` knows, by the name that stands in ``reward_model.ground_truth``."""


class RewardFunction(Protocol):
    """How good one response is; verl's signature, so that a user's function serves both."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None
    ) -> float:
        """Returns the reward, finite, larger for a better response."""
        ...


def resolve_reward(name: str) -> RewardFunction:
    """Finds a reward function and guards it.

    Args:
        name: A built-in name, or ``module:function``; the module may lie in the current directory.

    Returns:
        The function; when it raises, or returns what is no finite number, the caller gets a RewardFunctionError.

    Raises:
        RewardFunctionError: No such built-in, or the function cannot be imported.
    """
    return GuardedReward(name, _import_function(name) if ":" in name else _builtin(name))


class GuardedReward:
    """Calls a reward function and turns each of its failures into one line that names the sample."""

    def __init__(self, name: str, function: RewardFunction) -> None:
        self.name = name
        self._function = function

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None
    ) -> float:
        """Returns the reward as a float; raises RewardFunctionError."""
        sample = f"data_source={data_source!r}, ground_truth={ground_truth!r}, response={_shorten(solution_str)}"
        try:
            reward: object = self._function(data_source, solution_str, ground_truth, extra_info)
        except RewardFunctionError:
            raise
        except Exception as error:  # a user's function may raise anything
            raise RewardFunctionError(
                f"reward function {self.name} raised {type(error).__name__}: {error} for {sample}"
            ) from error
        # numpy's scalars register as Real; a bool is a number that users do return.
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise RewardFunctionError(
                f"reward function {self.name} returned {_shorten(reward)} for {sample}; return a finite float"
            )
        return float(reward)


def char_class(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None) -> float:
    """Rewards the share of the response's characters that belong to the class named ``ground_truth``.

    Returns:
        Between 0 and 1; 0 for an empty response.

    Raises:
        RewardFunctionError: There is no such class.
    """
    if ground_truth not in CHARACTER_CLASSES:
        raise RewardFunctionError(
            f"char_class: no character class {ground_truth!r} (data_source={data_source!r}); "
            f"reward_model.ground_truth must be one of {', '.join(CHARACTER_CLASSES)}"
        )
    members = CHARACTER_CLASSES[ground_truth]
    return sum(c in members for c in solution_str) / max(1, len(solution_str))


def exact_match(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None) -> float:
    """Rewards 1 if the response equals the ground truth but for surrounding white space, else 0."""
    return float(solution_str.strip() == ground_truth.strip())


BUILT_IN: Mapping[str, RewardFunction] = {"char_class": char_class, "exact_match": exact_match}
"""Functions that ``reward.function`` may name without a module."""


def _builtin(name: str) -> RewardFunction:
    if name in BUILT_IN:
        return BUILT_IN[name]
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean {near[0]}" if near else f"known are {', '.join(BUILT_IN)}"
    raise RewardFunctionError(f"reward.function: no built-in reward {name!r}; {hint}, or your own module:function?")


def _import_function(name: str) -> RewardFunction:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise RewardFunctionError(f"reward.function: {name!r} is not of the form module:function")
    # A user's module lies beside the recipe that they run. Last, so that nothing there takes the place of torch, say.
    with _found_in(Path.cwd()) as is_from_there:
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # importing a user's module may raise anything
            raise RewardFunctionError(
                f"reward.function: importing {module_name!r:.100} failed: {type(error).__name__}: {error}; "
                "check the module"
            ) from error
        function = _function_of(module, module_name, attribute)
        is_from_there(module)
        return function


@contextmanager
def _found_in(folder: Path) -> Iterator[Callable[[ModuleType], None]]:
    """Has modules found in a folder for the body; for good if a module that the body shows is from there.

    Such a module may import others of the folder when it is called.
    """
    entry, stays = str(folder), False

    def show(module: ModuleType) -> None:
        nonlocal stays
        file = getattr(module, "__file__", None)
        stays = file is not None and Path(file).is_relative_to(folder)

    if entry in sys.path:
        yield show
        return
    sys.path.append(entry)
    try:
        yield show
    finally:
        if not stays:
            sys.path.remove(entry)


def _function_of(module: ModuleType, module_name: str, attribute: str) -> RewardFunction:
    function: RewardFunction | None = getattr(module, attribute, None)
    if not callable(function):
        what = "is not callable" if hasattr(module, attribute) else "does not exist"
        raise RewardFunctionError(
            f"reward.function: {attribute!r} of {module_name!r} ({getattr(module, '__file__', 'built in')}) {what}"
        )
    return function


def _shorten(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}..."
