"""Ray's tables of actors and of free resources, as the cluster's control store has them. Blocking.

``ray._private.state`` is private, as is the id of a handle. ``ray.util.state`` needs the dashboard, which a local run
does not start. Seen in Ray 2.55 to 2.60.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray._private import state


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Returns the free resources of each node, by Ray's hexadecimal id of the node."""
    found: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    return found


def actor_table() -> list[Mapping[str, Any]]:
    """Returns what Ray knows of every actor of the cluster: ``ActorID``, ``JobID``, ``State``, ``Address`` and more."""
    return list(state.actors().values())


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
