"""The outcomes of the inputs, as a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

HEAD = (
    "kind",
    "inputs",
    "runs",
    "accepted",
    "refused",
    "slowest s",
    "most MiB",
    "tracebacks",
    "blocks",
    "code ran",
    "outside",
    "failing",
)


def result(
    name: str, command: str, *, refusal: str | None, seconds: float, extra_bytes: int, failures: Sequence[str]
) -> dict[str, Any]:
    """Returns the outcome of one command on one input, fit for JSON.

    Args:
        name: The input.
        command: The command.
        refusal: Class of the error; None if the input was accepted.
        seconds: Wall-clock time.
        extra_bytes: Memory beyond that of a good input.
        failures: What was wrong.
    """
    return {
        "name": name,
        "command": command,
        "refusal": refusal,
        "seconds": seconds,
        "extra_bytes": extra_bytes,
        "failures": list(failures),
    }


def lines(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the table, who refused by which error, the slowest and largest runs, and each failing input."""
    kinds: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for found in results:
        kinds[found["name"].partition("/")[0]].append(found)
    rows = [HEAD, *(_row(kind, of_kind) for kind, of_kind in kinds.items()), _row("all", results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        yield "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]
        )
    refusals = Counter(found["refusal"] for found in results if found["refusal"] is not None)
    yield "refused by: " + ", ".join(f"{name} {count}" for name, count in refusals.most_common())
    yield from _extremes(results)
    yield from _failing(results)


def _row(kind: str, results: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    def failing(*words: str) -> str:
        hit = [found for found in results if any(text.startswith(words) for text in found["failures"])]
        return str(len(hit))

    accepted = sum(found["refusal"] is None and not found["failures"] for found in results)
    refused = sum(found["refusal"] is not None for found in results)
    return (
        kind,
        str(len({found["name"] for found in results})),
        str(len(results)),
        str(accepted),
        str(refused),
        f"{max((found['seconds'] for found in results), default=0):.1f}",
        f"{max((found['extra_bytes'] for found in results), default=0) / 2**20:.0f}",
        failing("traceback", "died"),
        failing("blocked", "slow"),
        failing("ran code", "changed the process", "ended without"),
        failing("touched", "files of others", "printed a file"),
        str(len({found["name"] for found in results if found["failures"]})),
    )


def _extremes(results: Sequence[Mapping[str, Any]], count: int = 3) -> Iterator[str]:
    slowest = sorted(results, key=lambda found: -found["seconds"])[:count]
    yield "slowest: " + ", ".join(f"{f['name']} {f['command']} {f['seconds']:.1f} s" for f in slowest)
    largest = sorted(results, key=lambda found: -found["extra_bytes"])[:count]
    yield "largest: " + ", ".join(f"{f['name']} {f['command']} {f['extra_bytes'] / 2**20:.0f} MiB" for f in largest)


def _failing(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    by_name: defaultdict[str, list[str]] = defaultdict(list)
    for found in results:
        by_name[found["name"]] += [f"{found['command']}: {text}" for text in found["failures"]]
    failing = {name: texts for name, texts in by_name.items() if texts}
    if not failing:
        yield f"no input of {len(by_name)} fails"
        return
    yield f"{len(failing)} of {len(by_name)} inputs fail; one again: scripts/test --hostile -k NAME"
    for name, texts in failing.items():
        yield f"  {name}"
        yield from (f"    {ascii(text)[1:-1]:.300}" for text in texts)
