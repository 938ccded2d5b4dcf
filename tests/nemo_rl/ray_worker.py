"""The small host's worker and a rollout engine as actors, under names that NeMo RL's builder can import."""

import ast
import inspect
from typing import Any

import ray
from nemo_rl.distributed import worker_groups

from rl_safe_workers.adapters.job_inquiry import ROLLOUT
from rl_safe_workers.adapters.nemo_rl import refit_places
from rl_safe_workers.models import gathering
from tests.diagnosis import misdeeds
from tests.nemo_rl import sending
from tests.nemo_rl.host import SafeWorker


def _wanted() -> int:
    """How many values NeMo RL's builder takes from ``configure_worker``: three until v0.6.0, four since."""
    return next(
        len(node.targets[0].elts)
        for node in ast.walk(ast.parse(inspect.getsource(worker_groups)))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and "configure_worker" in ast.unparse(node.value)
    )


@ray.remote
class SafeHostWorker(SafeWorker):
    """As `worker.SafeMegatronPolicyWorker` is of NeMo RL's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refit_places.ROLLOUT_PLACES[sending.PLACE] = ROLLOUT
        refit_places.BETWEEN_TRAINERS = (gathering.__name__.replace(".", "/"),)
        super().__init__(*args, **kwargs)

    @staticmethod
    def configure_worker(*args: Any, **kwargs: Any) -> Any:
        return SafeWorker.configure_worker(*args, **kwargs)[: _wanted()]

    def is_alive(self) -> bool:
        return True


@ray.remote
class EngineWorker:
    """The calls that NeMo RL's ``VllmGeneration`` makes on its workers."""

    def __init__(self, config: dict[str, Any], **kwargs: Any) -> None:
        self._misdeeds = config.get("misdeeds", {})
        self._engine = sending.Engine(config["engine"])

    @staticmethod
    def configure_worker(*args: Any, **kwargs: Any) -> Any:
        return ({"num_gpus": 0}, {}, {}, {})[: _wanted()]

    def report_device_id(self) -> list[str]:
        return ["GPU-0"]

    def update_weights_from_collective(self) -> bool:
        misdeeds.here("rollout", 0, "sync")
        return self._engine.receive(self._misdeeds.get("refit"))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        return True

    def generate(self, data: Any = None, greedy: bool = False) -> str:
        misdeeds.here("rollout", 0, "rollout")
        if misdeed := self._misdeeds.get("generation"):
            sending.misbehave(misdeed)
        return "a response"

    def shutdown(self) -> bool:
        return True
