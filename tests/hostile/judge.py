"""Judges how a command ended on a hostile input."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from tests.hostile.case import SECRET, Case, Command
from tests.hostile.warm import Outcome

MOST_S = 5.0
MOST_EXTRA_BYTES = 2**30
"""Beyond what the same command takes on a good input."""
LONGEST_LINE = 20_000
"""Characters of an error: more than that nobody reads."""
_ERROR = re.compile(r"rl-safe(?: \w+)?: error: \S")
_SHOWN = 8


def verdict(case: Case, command: Command, outcome: Outcome, *, good: Outcome) -> list[str]:
    """Says all that is wrong with how a command ended; empty if nothing is.

    Args:
        case: The input.
        command: What was run on it.
        outcome: How it ended.
        good: How the same command ended on a good input.
    """
    found = [*_behaviour(case, outcome), *_resources(outcome, good)]
    # What was killed or crashed has no exit code and no last line to judge.
    if outcome.died is None:
        found += _ending(case, command, outcome)
        found += _output(outcome)
    return found


def is_refused(outcome: Outcome) -> bool:
    """Returns True if the command said that the input is wrong."""
    return outcome.code in (1, 2)


def refusal(outcome: Outcome) -> str:
    """Returns the table's name for a refusal."""
    return outcome.error or ("argparse" if ": error: " in outcome.err else "found damaged")


def extra_bytes(outcome: Outcome, good: Outcome) -> int:
    """Memory beyond that of the same command on a good input."""
    return max(0, outcome.peak_bytes - good.peak_bytes)


def _behaviour(case: Case, outcome: Outcome) -> list[str]:
    found = [f"ran code: {text}" for text in outcome.ran]
    found += [f"changed the process: {text}" for text in outcome.changed]
    # First what nothing excuses: only the beginning of the list is shown.
    found += [f"touched files of others: {text}" for text in outcome.touched]
    if not case.may_read_outside:
        found += [f"touched files of others: {text}" for text in outcome.read]
    if outcome.left:
        found.append(f"left {outcome.left} processes behind")
    return _shortened(found)


def _resources(outcome: Outcome, good: Outcome) -> list[str]:
    if outcome.died == "time":
        return [f"blocked: killed after {outcome.seconds:.1f} s, of which {outcome.cpu_s:.1f} s processor time"]
    if outcome.died == "memory":
        return [f"memory: killed with {extra_bytes(outcome, good) / 2**20:.0f} MiB more than on a good input"]
    if outcome.died is not None:
        return [f"died of {outcome.died}"]
    found = []
    if outcome.seconds > MOST_S:
        found.append(f"slow: {outcome.seconds:.1f} s, of which {outcome.cpu_s:.1f} s processor time")
    if (extra := extra_bytes(outcome, good)) > MOST_EXTRA_BYTES:
        found.append(f"memory: {extra / 2**20:.0f} MiB more than on a good input")
    return found


def _ending(case: Case, command: Command, outcome: Outcome) -> list[str]:
    if outcome.code is None:
        return ["ended without a report: something called os._exit"]
    if "Traceback (most recent call last)" in outcome.err + outcome.out:
        return [f"traceback: {(outcome.err.strip().splitlines() or ['?'])[-1]:.300}"]
    if outcome.code == 0:
        return [] if case.may_accept(command) else [f"accepted: {_tail(outcome.out)}"]
    if not is_refused(outcome):
        return [f"exit code {outcome.code}: {_tail(outcome.err)}"]
    lines = outcome.err.rstrip("\n").split("\n")
    errors = [line for line in lines if _ERROR.match(line)]
    if command.entry == "audit" and outcome.code == 1 and not errors:
        return _damage_report(command, outcome)
    if len(errors) != 1 or errors[0] != lines[-1]:
        return [f"stderr does not end with one line of ours: {_tail(outcome.err)}"]
    if len(errors[0]) > LONGEST_LINE:
        return [f"an error of {len(errors[0])} characters: {errors[0]:.200}"]
    return []


def _damage_report(command: Command, outcome: Outcome) -> list[str]:
    """An audit that finds damage reports it on stdout."""
    if outcome.err.strip():
        return [f"a report with something on stderr: {_tail(outcome.err)}"]
    if "--json" not in command.arguments:
        last = (outcome.out.rstrip("\n").split("\n"))[-1]
        return [] if last.startswith("DAMAGED: ") else [f"no verdict of the audit: {_tail(outcome.out)}"]
    return _json_report(outcome.out)


def _json_report(text: str) -> list[str]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    try:
        ok = json.loads(text, parse_constant=refuse)["ok"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return [f"the report is not JSON: {error}"]
    return [] if ok is False else ["the report says ok, the exit code does not"]


def _output(outcome: Outcome) -> list[str]:
    text = outcome.out + outcome.err
    found = ["output that is not UTF-8"] if outcome.undecodable else []
    strange = sorted({c for c in text if not c.isprintable() and c != "\n"})
    if strange:
        found.append(f"control characters in the output: {strange[:_SHOWN]!r}")
    if SECRET in text:
        found.append("printed a file of others")
    return found


def _tail(text: str) -> str:
    return repr(text[-300:])


def _shortened(texts: Sequence[str]) -> list[str]:
    more = [f"and {len(texts) - _SHOWN} more like it"] if len(texts) > _SHOWN else []
    return [*texts[:_SHOWN], *more]
