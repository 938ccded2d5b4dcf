"""The small host's worker as an actor, under a name that NeMo RL's builder can import."""

import ast
import inspect
from typing import Any

import ray
from nemo_rl.distributed import worker_groups

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

    @staticmethod
    def configure_worker(*args: Any, **kwargs: Any) -> Any:
        return SafeWorker.configure_worker(*args, **kwargs)[: _wanted()]
