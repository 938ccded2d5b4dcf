"""Makes verl's agent loops remember the errors that engines and reward workers raise.

verl itself drops the prompt of such an error, and never tells its driver why.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1 import agent_loop_tq

from rl_safe_workers.adapters.call_errors import CallError, call_error_of, keep_origins


def remembering(plain: Any) -> type:
    """Returns a subclass of verl's agent loop worker. It remembers the errors of its remote calls for the driver.

    Args:
        plain: verl's ``AgentLoopWorkerTQ``, without Ray.
    """

    class SafeAgentLoopWorker(plain):
        """Remembers the errors of this worker's remote calls."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            keep_origins()
            self._rl_safe_heard: dict[tuple[str, str | None], CallError] = {}
            super().__init__(*args, **kwargs)

        async def _run_agent_loop(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return await super()._run_agent_loop(*args, **kwargs)
            except Exception as error:
                if (called := call_error_of(error)) is not None:
                    self._rl_safe_heard[called.actor_id, called.place] = called
                raise

        async def rl_safe_heard(self) -> list[CallError]:
            """Returns the newest error for each called actor and line of code."""
            return list(self._rl_safe_heard.values())

    return SafeAgentLoopWorker


def use_agent_loops() -> None:
    """Makes verl's manager of agent loops use our workers in this process."""
    stock: Any = agent_loop_tq.AgentLoopWorkerTQ
    agent_loop_tq.AgentLoopWorkerTQ = ray.remote(remembering(stock.__ray_actor_class__))
