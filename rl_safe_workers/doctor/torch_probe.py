"""Prints what torch sees of this machine's GPUs. `probes.ask` runs this module."""

from __future__ import annotations

import json
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rl_safe_workers.errors import first_line
from rl_safe_workers.versions import version_of


def main() -> int:
    """Prints one line of JSON: versions, devices, and the pairs of devices that can read each other's memory."""
    import torch

    from rl_safe_workers.comms import nccl_suspend
    from rl_safe_workers.models.layer_choice import why_no_transformer_engine

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    answer = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": nccl_suspend.loaded_version() if count else None,
        "nccl_wheels": _nccl_wheels(),
        "nccl_libraries": _mapped_nccl(),
        "suspends_not": nccl_suspend.why_not(),
        "transformer_engine": version_of("transformer_engine"),
        "no_transformer_engine": why_no_transformer_engine(),
        "devices": [_device(torch, index) for index in range(count)],
        "peers": [
            [a == b or bool(torch.cuda.can_device_access_peer(a, b)) for b in range(count)] for a in range(count)
        ],
    }
    print(json.dumps(answer))  # noqa: T201
    return 0


def _nccl_wheels() -> dict[str, str]:
    """Returns the installed wheels of NCCL, with their versions."""
    found = ((distribution.metadata["Name"], distribution.version) for distribution in distributions())
    return {name: version for name, version in found if name and name.startswith("nvidia-nccl")}


def _mapped_nccl() -> list[str]:
    """Returns the paths of NCCL's libraries that this process has loaded."""
    paths = (line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines())
    return sorted({path for path in paths if Path(path).name.startswith("libnccl.so")})


def _device(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    found = {"name": properties.name, "total": properties.total_memory}
    try:
        # This needs a context on the GPU. A GPU in exclusive mode refuses one while another process uses it.
        free, _ = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        return {**found, "free": None, "reason": first_line(error)}
    return {**found, "free": free, "reason": ""}


if __name__ == "__main__":
    sys.exit(main())
