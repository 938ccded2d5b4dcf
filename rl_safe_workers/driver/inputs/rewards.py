"""Computes verifiable rewards, with a built-in function or one that the user names as ``module:function``.

Pure Python. The function runs in the driver process, once per sample.
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
from rl_safe_workers.frames import place_of

CHARACTER_CLASSES: Mapping[str, frozenset[str]] = {
    "digits": frozenset(string.digits),
    "letters": frozenset(string.ascii_letters),
    "lowercase": frozenset(string.ascii_lowercase),
    "punctuation": frozenset(string.punctuation),
    "uppercase": frozenset(string.ascii_uppercase),
    "vowels": frozenset("aeiouAEIOU"),
    "whitespace": frozenset(" \n"),
}
"""The characters of each class of ``char_class``, by the name in ``reward_model.ground_truth``."""


class RewardFunction(Protocol):
    """A function that rates one response. It has verl's signature, so that a user's function works in both."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None
    ) -> float:
        """Returns the reward: a finite number, larger for a better response."""
        ...


def resolve_reward(name: str) -> RewardFunction:
    """Finds a reward function and wraps it in a `GuardedReward`.

    Args:
        name: A built-in name, or ``module:function``. The module may be in the current directory.

    Returns:
        The function. It raises RewardFunctionError if the wrapped function raises, or returns no finite number.

    Raises:
        RewardFunctionError: If there is no such built-in function, or the function cannot be imported.
    """
    return GuardedReward(name, _import_function(name) if ":" in name else _builtin(name))


class GuardedReward:
    """Calls a reward function, and converts each of its failures to an error that names the sample."""

    def __init__(self, name: str, function: RewardFunction) -> None:
        self.name = name
        self._function = function

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None
    ) -> float:
        """Returns the reward as a float.

        Raises:
            RewardFunctionError: If the function raises, or returns no finite number.
        """
        sample = f"data_source={data_source!r}, ground_truth={ground_truth!r}, response={_shorten(solution_str)}"
        try:
            reward: object = self._function(data_source, solution_str, ground_truth, extra_info)
        except RewardFunctionError:
            raise
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            raise RewardFunctionError(
                f"reward function {self.name} raised {type(error).__name__}: {error} at {place_of(error)} for {sample}"
            ) from error
        # numpy's scalars count as Real, and so does a bool, which users do return.
        if not isinstance(reward, Real) or not math.isfinite(reward):
            raise RewardFunctionError(
                f"reward function {self.name} returned {_shorten(reward)} for {sample}; return a finite float"
            )
        return float(reward)


def char_class(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None) -> float:
    """Rewards the share of the response's characters that belong to the class named ``ground_truth``.

    Returns:
        The share, between 0 and 1; 0 for an empty response.

    Raises:
        RewardFunctionError: If there is no class of that name.
    """
    if ground_truth not in CHARACTER_CLASSES:
        raise RewardFunctionError(
            f"char_class: no character class {ground_truth!r} (data_source={data_source!r}); "
            f"reward_model.ground_truth must be one of {', '.join(CHARACTER_CLASSES)}"
        )
    members = CHARACTER_CLASSES[ground_truth]
    return sum(c in members for c in solution_str) / max(1, len(solution_str))


def exact_match(data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None) -> float:
    """Returns 1 if the response equals the ground truth, except for surrounding white space; else 0."""
    return float(solution_str.strip() == ground_truth.strip())


BUILT_IN: Mapping[str, RewardFunction] = {"char_class": char_class, "exact_match": exact_match}
"""Built-in functions, by the name that ``reward.function`` takes."""


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
    # A user's module is often beside the recipe. The folder is last in the path, so it cannot replace, say, torch.
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
    """Adds a folder to the module path while the body runs.

    The folder stays in the path if the body passes a module from it to the yielded function: such a module may import
    others from the folder when it is called.
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
