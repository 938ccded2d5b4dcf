"""Reports lost engines to Ray's dashboard."""

from __future__ import annotations

from ray.util.metrics import Gauge


class EngineGauges:
    """Sets Ray's metrics ``rl_safe_engines_lost`` and ``rl_safe_engines_serving``."""

    def __init__(self) -> None:
        """Makes the metrics. A Ray must be running."""
        self._lost = Gauge("rl_safe_engines_lost", description="Rollout engines that the run has lost so far")
        self._serving = Gauge("rl_safe_engines_serving", description="Rollout engines that get prompts")

    def set(self, *, lost: int, serving: int) -> None:
        """Sets both."""
        self._lost.set(lost)
        self._serving.set(serving)
