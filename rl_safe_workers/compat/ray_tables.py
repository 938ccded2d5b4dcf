"""Reads Ray's tables of actors and of free resources from the cluster's control store. Blocking.

``ray._private.state`` is private, and so is the id of a handle. ``ray.util.state`` needs the dashboard, which a local
run does not start. Seen in Ray 2.55 to 2.60.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray._private import services, state, worker
from ray._raylet import GcsClientOptions  # type: ignore[attr-defined]
from ray.exceptions import RaySystemError

from rl_safe_workers.errors import ClusterError, first_line

DEAD = "DEAD"
"""The state of an actor that has ended and will not restart."""


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Returns the free resources of each node, by Ray's hexadecimal id of the node."""
    found: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return found


def actor_table() -> list[Mapping[str, Any]]:
    """Returns a row for every actor of the cluster, with ``ActorID``, ``JobID``, ``State``, ``Address`` and more."""
    return list(state.actors().values())


def actors_at(address: str) -> list[Mapping[str, Any]]:
    """Returns the `actor_table` of a cluster that this process has not joined. Starts no job there.

    Args:
        address: ``HOST:PORT`` of the cluster's control store, or ``auto`` for the cluster on this machine.

    Raises:
        ClusterError: If no cluster answers there.
    """
    try:
        _use_token()
        known = services.canonicalize_bootstrap_address_or_die(address)
        options = GcsClientOptions.create(known, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False)
        state.state._initialize_global_state(options)
        return actor_table()
    except (ConnectionError, RaySystemError, RuntimeError, ValueError) as error:
        raise ClusterError(f"no Ray cluster answers at {address}: {first_line(error)}") from error
    finally:
        state.state.disconnect()


def _use_token() -> None:
    """Makes this process authenticate with the user's token, if there is one. Ray's own command does so since 2.52."""
    try:
        from ray._private.authentication import authentication_token_setup
    except ImportError:
        return
    enable = getattr(authentication_token_setup, "maybe_enable_token_auth_if_token_available", None)
    if enable is not None:
        enable(warn_if_disabled=False)


def logs_folder() -> Path | None:
    """Returns the folder of Ray's logs on this process's node; None if this process has joined no cluster."""
    node = worker.global_worker.node
    return None if node is None else Path(node.get_logs_dir_path())


def death_in_words(row: Mapping[str, Any]) -> str:
    """Returns Ray's message about an actor's death, from its row of the `actor_table`; empty if there is none."""
    cause = row.get("DeathCause")
    kind = None if cause is None else cause.WhichOneof("context")
    return "" if kind is None else str(getattr(getattr(cause, kind), "error_message", ""))


def actor_state(actor_id: str) -> str | None:
    """Returns an actor's state, such as ``ALIVE`` or ``DEAD``; None if Ray does not know the hexadecimal id."""
    found: str | None = state.actors(actor_id=actor_id).get("State")
    return found


def actor_id(handle: Any) -> str:
    """Returns Ray's hexadecimal id of an actor."""
    found: str = handle._actor_id.hex()
    return found


def actor_id_of_call(reference: Any) -> str:
    """Returns the hexadecimal id of the actor that a reference waits for."""
    found: str = reference.task_id().actor_id().hex()
    return found
