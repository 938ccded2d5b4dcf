"""Checks that a running Ray cluster can be reached and has enough resources for the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rl_safe_workers.config import RunConfig
from rl_safe_workers.doctor.check import Check, Fact, Report, Subject
from rl_safe_workers.doctor.probes import Answer, ask
from rl_safe_workers.findings import Finding, Severity, counted
from rl_safe_workers.topology.layout import ParallelLayout
from rl_safe_workers.topology.placement import DoesNotFitError, place_run

DEADLINE_S = 30.0
"""Deadline of the check. A running cluster answers within two seconds; Ray itself gives up after forty."""
_MISMATCH = "Version mismatch"
_SHOWN_NODES = 8


def judge(answer: Answer, subject: Subject) -> Report:
    """Compares a cluster with the needs of the run, node by node, because a bundle must fit on one node."""
    if answer.values is None:
        return Report(facts=(Fact(name="Ray", value=f"not reached: {answer.reason}"),), findings=(_lost(answer),))
    nodes = [node for node in answer.values["nodes"] if node["alive"]]
    facts = (
        Fact(name="Ray", value=f"{answer.values['ray']}, with the Python of this process, as every node's has to be"),
        Fact(name="nodes", value=_listed(answer.values["nodes"])),
    )
    if subject.config is None:
        return Report(facts=facts)
    short = tuple(_short(nodes, subject))
    return Report(facts=facts, findings=short or tuple(_busy(answer.values["free"], subject)))


def _lost(answer: Answer) -> Finding:
    if _MISMATCH in answer.reason:
        return Finding(
            code="ray-version",
            severity=Severity.STOPS,
            text=f"Ray lets nobody join: {answer.reason}",
            since="every Ray",
            evidence=("ray/_private/utils.py, check_version_info",),
            avoid="one version of Ray and Python on all nodes",
        )
    return Finding(
        code="ray-unreachable",
        severity=Severity.STOPS,
        text=f"the run cannot join Ray: {answer.reason}",
        since="always",
        evidence=("ray.init(address=…)", "docs/ray.md"),
        avoid="start the job on a node of the cluster; set cluster.ray_address=HOST:PORT of its head; set "
        "RAY_AUTH_MODE=token if the cluster was started with a token; or set cluster.ray_address=local",
    )


def _listed(nodes: Sequence[Mapping[str, Any]]) -> str:
    alive = [node for node in nodes if node["alive"]]
    shown = "; ".join(f"{n['address']} {n['cpus']:g} CPUs {n['gpus']:g} GPUs" for n in alive[:_SHOWN_NODES])
    more = f"; and {len(alive) - _SHOWN_NODES} more" if len(alive) > _SHOWN_NODES else ""
    gone = f"; {len(nodes) - len(alive)} gone" if len(alive) < len(nodes) else ""
    return f"{counted(len(alive), 'node')}: {shown}{more}{gone}"


def _short(nodes: Sequence[Mapping[str, Any]], subject: Subject) -> Iterator[Finding]:
    needed = {"CPU": subject.cpus, "GPU": float(subject.gpus)}
    present = {"CPU": sum(node["cpus"] for node in nodes), "GPU": sum(node["gpus"] for node in nodes)}
    lacking = [name for name in needed if needed[name] > present[name] + 1e-4]
    for name in lacking:
        yield Finding(
            code="ray-resources",
            severity=Severity.STOPS,
            text=f"the run needs {needed[name]:g} {name}s, and the cluster has {present[name]:g}",
            since="always",
            evidence=("ray.nodes()",),
            avoid="fewer of cluster.num_trainers and cluster.num_rollouts, less of cluster.cpus_per_trainer and "
            "cluster.cpus_per_rollout, or more nodes",
        )
    if not lacking:
        assert subject.config is not None, "there is a run"
        yield from _unplaced(nodes, subject.config)


def _unplaced(nodes: Sequence[Mapping[str, Any]], config: RunConfig) -> Iterator[Finding]:
    """Yields a finding if the driver will not be able to place every rank. Each place must fit on one node."""
    room = [{"CPU": node["cpus"], "GPU": node["gpus"]} for node in nodes]
    layout = ParallelLayout.of(config.megatron, world_size=config.cluster.num_trainers)
    try:
        place_run(config.cluster, layout, room)
    except DoesNotFitError as error:
        lacking = config.cluster.num_trainers - error.trainers
        who = (
            counted(lacking, "trainer") if lacking else f"{config.cluster.num_rollouts - error.rollouts} rollout ranks"
        )
        yield Finding(
            code="ray-placement",
            severity=Severity.STOPS,
            text=f"the cluster has enough in all, but no node has room for {who} more: the run is refused",
            since="always",
            evidence=("ray.nodes()",),
            avoid="less of cluster.cpus_per_trainer and cluster.cpus_per_rollout, or larger nodes",
        )


def _busy(free: Mapping[str, float], subject: Subject) -> Iterator[Finding]:
    needed = {"CPU": subject.cpus, "GPU": float(subject.gpus)}
    for name, amount in needed.items():
        if amount > free[name] + 1e-4:
            yield Finding(
                code="ray-busy",
                severity=Severity.RISKS,
                text=f"the run needs {amount:g} {name}s, and {free[name]:g} of the cluster's are free: it waits, until "
                "rl_safe.timeouts.start is over",
                since="always",
                evidence=("ray.available_resources()",),
                avoid="wait for, or end, what else runs there",
            )


RAY_CLUSTER = Check(
    name="Ray",
    deadline_s=DEADLINE_S + 5,
    gather=lambda subject: ask("ray_probe", subject.ray, deadline_s=DEADLINE_S),
    judge=judge,
)
