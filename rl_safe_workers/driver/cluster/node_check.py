"""Checks before any actor starts that the nodes of a run have the same versions, the same code and the same files."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_safe_workers.driver.cluster import node_probe
from rl_safe_workers.driver.cluster.interrupts import SLICE_S
from rl_safe_workers.driver.cluster.nodes import LOOK_AT_NODES, Node, await_nodes
from rl_safe_workers.errors import ClusterError, ConfigError, NodeMismatchError
from rl_safe_workers.versions import STACK

CACHED_S = 3.0
_MARKER, _LEFT_BEHIND_S = ".seen_by_all_", 86400.0
Facts = Mapping[str, Any]
"""The result of `node_probe.look` on a node; or, under ``error``, the reason why the probe failed."""


def check_nodes(
    nodes: Sequence[Node],
    *,
    shared: Sequence[Path],
    timeout_s: float,
    check: Callable[[], None],
) -> None:
    """Compares the versions and files of the nodes with each other, and their code with this process's.

    Args:
        nodes: The nodes on which actors will run.
        shared: Absolute paths that must exist on all nodes.
        timeout_s: Seconds until all nodes must have answered.
        check: Called several times a second. An exception that it raises ends the wait.

    Raises:
        NodeMismatchError: If nodes differ. It names each node and the differences.
        ClusterError: If a node cannot run a task.
        PhaseTimeoutError: If a node does not answer in time. It names the nodes.
    """
    paths = [str(path) for path in shared]
    found = look_at(nodes, paths, timeout_s=timeout_s, check=check)
    if any(facts.get("paths") for facts in found.values()):
        # A network file system may show a new file only after its caches have expired.
        wait_until = time.monotonic() + CACHED_S
        while time.monotonic() < wait_until:
            check()
            time.sleep(SLICE_S)
        found = look_at(nodes, paths, timeout_s=timeout_s, check=check)
    if failed := {name: facts["error"] for name, facts in found.items() if "error" in facts}:
        raise ClusterError("; ".join(f"node {name} cannot run a task: {error}" for name, error in failed.items()))
    if complaints := compare(found, code=node_probe.fingerprint()):
        raise NodeMismatchError(f"the nodes of the cluster differ: {'; '.join(complaints)}")


@contextmanager
def marker(folder: Path) -> Iterator[Path]:
    """Keeps an empty file in a folder while the body runs. Makes the folder if needed.

    Each node may have a different folder by the same name. A node that sees this file sees the driver's folder.

    Raises:
        ConfigError: If the folder or the file cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_MARKER}*"):  # old ones are from killed drivers; young ones may be in use
            with suppress(FileNotFoundError):
                if left.stat().st_mtime < time.time() - _LEFT_BEHIND_S:
                    left.unlink()
        descriptor, name = tempfile.mkstemp(prefix=_MARKER, dir=folder)
        os.close(descriptor)
    except OSError as error:
        raise ConfigError(
            f"trainer.default_local_dir={folder}: {error.strerror or error}; checkpoints need a folder that the driver "
            "can write to, on storage that all nodes share"
        ) from error
    try:
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def look_at(
    nodes: Sequence[Node], paths: Sequence[str], *, timeout_s: float, check: Callable[[], None]
) -> dict[str, Facts]:
    """Returns the facts about each node, by the node's name.

    Raises:
        PhaseTimeoutError: If a node does not answer in time. It names the nodes.
    """
    # Pickled by value: a reference would be resolved in the node's own version of the package.
    cloudpickle.register_pickle_by_value(node_probe)
    try:
        probe = ray.remote(node_probe.look)
        refs = {
            probe.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)
            ).remote(list(STACK), list(paths)): node
            for node in nodes
        }
    finally:
        cloudpickle.unregister_pickle_by_value(node_probe)
    await_nodes(refs, LOOK_AT_NODES, timeout_s=timeout_s, check=check)
    return {str(node): _answer(ref) for ref, node in refs.items()}


def _answer(ref: Any) -> Facts:
    try:
        facts: Facts = ray.get(ref)
    except RayError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"error": lines[-1].strip() if lines else type(error).__name__}
    return facts


def compare(found: Mapping[str, Facts], *, code: str | None) -> list[str]:
    """Returns one line for each node that differs; an empty list if the nodes can run together.

    The versions of a node are compared with the versions that most nodes have, not with the driver's, because the
    driver may be on a machine without a GPU.

    Args:
        found: The facts about each node, by the node's name.
        code: `node_probe.fingerprint` of this process.
    """
    usual = _usual([facts["versions"] for facts in found.values()])
    wrong = {name: _differences(facts, usual, code) for name, facts in found.items()}
    return [f"{name} {', '.join(of_node)}" for name, of_node in wrong.items() if of_node]


def _usual(versions: Sequence[Mapping[str, str]]) -> dict[str, str | None]:
    names = {name: None for of_node in versions for name in of_node}
    usual = {}
    for name in names:
        there = [of_node.get(name) for of_node in versions]
        usual[name] = max(dict.fromkeys(there), key=there.count)
    return usual


def _differences(facts: Facts, usual: Mapping[str, str | None], code: str | None) -> list[str]:
    wrong = []
    if facts["code"] is None:
        wrong.append("has no rl_safe_workers (install the wheel there, or submit the job with its working directory)")
    elif facts["code"] != code:
        wrong.append(f"runs other code of rl_safe_workers ({facts['code']}, the driver {code})")
    for name, version in usual.items():
        there = facts["versions"].get(name)
        if there != version:
            wrong.append(f"has {_version(name, there)}, most have {_version(name, version)}")
    wrong += [f"does not see {path} (put it on storage that all nodes share)" for path in facts["paths"]]
    return wrong


def _version(name: str, version: str | None) -> str:
    return f"no {name}" if version is None else f"{name} {version}"
