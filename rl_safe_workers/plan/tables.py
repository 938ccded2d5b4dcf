"""Prints a plan as tables of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from rl_safe_workers.findings import Finding, counted, print_findings
from rl_safe_workers.plain_console import PlainConsole
from rl_safe_workers.plan.families import ENGINE, JOINT
from rl_safe_workers.plan.memory_plan import LAZY, WAYS, Span
from rl_safe_workers.plan.plan import Communicator, Plan, is_spare
from rl_safe_workers.plan.saves import GIB
from rl_safe_workers.ranks import format_ranks
from rl_safe_workers.topology.memory import MIB

_MANY_NODES, _SHOWN_GROUPS, _SHOWN_MEMBERS = 16, 2, 8
_NARROW = 132


def print_plan(plan: Plan, findings: Sequence[Finding]) -> None:
    """Prints a plan and its hazards to stdout."""
    console = PlainConsole()
    # A pipe has no width. Tables of the default 80 columns would cut the names of groups.
    console.width = max(console.width, _NARROW) if not console.is_terminal else console.width
    console.print(headline(plan), soft_wrap=True)
    for table in tables(plan):
        console.print()
        console.print(table)
    console.print()
    print_findings(console, findings)


def headline(plan: Plan) -> str:
    """Returns one line that says what is planned."""
    request, layout = plan.request, plan.request.layout
    shared = "on the same GPUs" if request.colocated else "beside them"
    sizes = (
        f"TP{layout.tensor} PP{layout.pipeline} CP{layout.context} EP{layout.expert} ETP{layout.expert_tensor}, "
        f"data-parallel {layout.data}, expert-data-parallel {layout.expert_data}"
    )
    many = f", {request.optimizer_instances} optimizer instances" if request.optimizer_instances > 1 else ""
    people = f"{counted(request.trainers, 'trainer')} ({sizes}{many})"
    rollouts = f" and {counted(request.rollouts, 'rollout rank')} {shared}" if request.rollouts else ""
    nodes = f"{counted(request.nodes, 'node')} of {counted(request.gpus_per_node, 'GPU')}"
    return f"{people}{rollouts}, on {nodes}; megatron-core {request.megatron}, as {request.host} runs it"


def tables(plan: Plan) -> Iterator[Table]:
    """Yields the tables in order."""
    yield _nodes(plan)
    yield _communicators(plan)
    if takes_device_memory(plan):
        yield _memory(plan)
    if plan.saves:
        yield _saves(plan)


def takes_device_memory(plan: Plan) -> bool:
    """Returns True if the communicators take device memory. gloo's take none."""
    return "nccl" in plan.request.backend


def node_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields nodes and the ranks on them. In large runs, consecutive nodes with equal roles and counts are one row."""
    runs: list[tuple[list[int], list[str], str]] = []
    for node, roles in plan.roles_by_node():
        ranks = [f"{role} {format_ranks([r.start, r.stop - 1]).replace(', ', '-')}" for role, r in roles.items()]
        alike = " ".join(f"{role} {len(ranks)}" for role, ranks in roles.items())
        if plan.request.nodes > _MANY_NODES and runs and runs[-1][2] == alike:
            runs[-1][0].append(node)
            runs[-1][1][:] = _joined(runs[-1][1], ranks)
        else:
            runs.append(([node], ranks, alike))
    for nodes, ranks, _ in runs:
        yield format_ranks(nodes), ", ".join(ranks)


def _joined(before: list[str], after: list[str]) -> list[str]:
    return [
        f"{old.partition('-')[0]}-{new.rpartition('-')[2].rpartition(' ')[2]}"
        for old, new in zip(before, after, strict=True)
    ]


def communicator_row(plan: Plan, communicator: Communicator) -> tuple[str, ...]:
    """Returns a communicator's cells: name, groups, members, op classes, first phase, nodes, MiB at first use."""
    family = communicator.family
    taken = {group.description: group.by_way[LAZY] for group in plan.memory.groups}.get(family.description)
    outside = family.description in (JOINT, ENGINE)
    carries = ", ".join(communicator.classes) or ("weights" if family.description == JOINT else "")
    carries = "tokens" if family.description == ENGINE else carries
    crosses = f"{communicator.crossing} cross" if communicator.crossing else "-"
    return (
        family.description,
        f"{family.count} x {family.size}",
        _members(communicator),
        carries or "nothing",
        str(communicator.first_phase or "-"),
        crosses,
        "" if taken is None or outside or not takes_device_memory(plan) else f"{taken.likely / MIB:.0f}",
    )


def _members(communicator: Communicator) -> str:
    shown = []
    for ranks, _ in zip(communicator.family.all_ranks(), range(_SHOWN_GROUPS), strict=False):
        many = len(ranks) > _SHOWN_MEMBERS
        shown.append(" ".join(map(str, ranks[:_SHOWN_MEMBERS])) + (f" .. {ranks[-1]}" if many else ""))
    return " | ".join(shown) + (" | .." if communicator.family.count > _SHOWN_GROUPS else "")


def _nodes(plan: Plan) -> Table:
    table = Table("node", "ranks", title="Ranks", title_justify="left")
    for row in node_rows(plan):
        table.add_row(*row)
    return table


COMMUNICATOR_HEADINGS = ("communicator", "groups", "members", "carries", "used from", "nodes", "MiB")


def _communicators(plan: Plan) -> Table:
    table = Table(*COMMUNICATOR_HEADINGS, title="Communicators, MiB if left to first use", title_justify="left")
    table.columns[0].no_wrap = True
    spare = [communicator for communicator in plan.communicators if is_spare(communicator)]
    for communicator in plan.communicators:
        if communicator not in spare:
            table.add_row(*communicator_row(plan, communicator))
    names = ", ".join(communicator.family.description for communicator in spare)
    table.caption = f"Made and not used: {names}"
    table.caption_justify = "left"
    return table


def _gib(span: Span) -> str:
    return f"{span.likely / GIB:.2f} ({span.low / GIB:.2f} to {span.high / GIB:.2f})"


def memory_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields each way of connecting communicators, with its GiB on each GPU."""
    for way in WAYS:
        yield way, _gib(plan.memory.total(way))
        if way == LAZY:
            yield "  of it in the first step, at the peak", _gib(plan.memory.late())


def _memory(plan: Plan) -> Table:
    table = Table("connected", "GiB on each GPU (range)", title="Communicator memory", title_justify="left")
    for row in memory_rows(plan):
        table.add_row(*row)
    return table


SAVE_HEADINGS = ("sharding of the optimizer", "fully parallel", "GiB, most of a rank", "ranks that write", "seconds")


def save_rows(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yields a row of cells for each way of saving."""
    for way in plan.saves:
        if not way.bytes_by_rank:
            yield way.sharding, _yes(way.fully_parallel), "raises", "-", "-"
        else:
            yield (
                way.sharding,
                _yes(way.fully_parallel),
                f"{way.most / GIB:.2f}",
                str(way.writers),
                f"{way.seconds:.1f}",
            )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _saves(plan: Plan) -> Table:
    total = max(way.total for way in plan.saves) / GIB
    title = f"A save of {total:.1f} GiB, at {plan.request.write_gib_s:g} GiB/s a node"
    table = Table(*SAVE_HEADINGS, title=title, title_justify="left")
    for row in save_rows(plan):
        table.add_row(*row)
    return table
