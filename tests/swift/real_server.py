"""ms-swift's vLLM server of Ray mode with vLLM's CPU build, in an actor of its own. The double generates."""

from __future__ import annotations

from typing import Any

from rl_safe_workers.adapters.swift import proved_server
from tests.swift import engine_double, real_engine

proved_server.EXTENSION = "tests.swift.faulty_extension.FaultySwiftExtension"


class RealServer(proved_server.ProvedServer):
    """Ours, without what a CPU lacks."""

    def __init__(self, **place: Any) -> None:
        real_engine.prepare()
        super().__init__(**place)

    def launch_server(self, **settings: Any) -> Any:
        return super().launch_server(**{**settings, "enable_sleep_mode": False})

    def generate(self, infer_requests: list[Any], request_config: Any = None) -> list[Any]:
        return engine_double.responses(infer_requests)
