"""An actor for the tests of the driver's waits. This module does not import torch, so the actor starts fast."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray

from rl_safe_workers.rollout.sync_proof import HeldWeights, SentWeights


@ray.remote(num_cpus=0)
class SilentWorker:
    """A worker of either kind, some of whose calls may have no answer."""

    def __init__(self, silent: str = "", wrong: int = 0, plan: dict[str, Any] | None = None) -> None:
        self._silent, self._wrong = silent, wrong
        """Number of refits after which it holds other weights than were sent."""
        self._plan, self._told = plan, None

    def rl_safe_prove(self) -> str | None:
        return None

    def rl_safe_sent(self) -> SentWeights:
        return SentWeights(digests={"w": 7}, seconds=0.0)

    def rl_safe_held(self) -> HeldWeights:
        self.call("held")
        self._wrong -= 1
        held = (("w", 8 if self._wrong >= 0 else 7),)
        return HeldWeights(digests=held, converted=0, unread=(), faults=(), seconds=0.0)

    def rl_safe_engine(self) -> dict[str, Any]:
        obstacle = "its weights are quantised" if self._silent == "quantised" else None
        return {"size": 2, "kv_heads": 4, "expert_parallel": False, "obstacle": obstacle}

    def rl_safe_plan_refits(self) -> dict[str, Any] | None:
        self.call("plan")
        return self._plan

    def rl_safe_join(self, *told: Any) -> None:
        self.call("join")
        self._told = told

    def rl_safe_leave(self) -> None:
        Path(self._plan["leaves"]).touch()

    def told(self) -> Any:
        return self._told

    def is_alive(self) -> bool:
        return True

    def call(self, name: str, answer: Any = None) -> Any:
        if self._silent == name:
            time.sleep(60)
        return answer

    def finish_save(self, seconds: float) -> None:
        time.sleep(seconds)

    def rl_safe_end_groups(self) -> dict[int, str]:
        return self.call("end", {})  # type: ignore[no-any-return]

    def shutdown(self, failure: str | None = None) -> bool:
        return failure is None

    def pid(self) -> int:
        return os.getpid()
