"""Prints the nodes and free resources of a running Ray cluster. `probes.ask` runs this module."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any


def main() -> int:
    """Joins the cluster at the address in its argument, ``auto`` or ``HOST:PORT``, and prints one line of JSON."""
    import ray

    ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR)
    available = ray.available_resources()
    answer = {
        "ray": ray.__version__,
        "nodes": [_node(node) for node in ray.nodes()],
        "free": {name: available.get(name, 0.0) for name in ("CPU", "GPU")},
    }
    print(json.dumps(answer))  # noqa: T201
    ray.shutdown()
    return 0


def _node(node: dict[str, Any]) -> dict[str, Any]:
    resources = node["Resources"]
    return {
        "address": node["NodeManagerAddress"],
        "alive": node["Alive"],
        "cpus": resources.get("CPU", 0.0),
        "gpus": resources.get("GPU", 0.0),
        "memory": resources.get("memory", 0.0),
    }


if __name__ == "__main__":
    sys.exit(main())
