"""The small host's worker as an actor, under a name that NeMo RL's builder can import."""

import ray

from tests.nemo_rl.host import SafeWorker


@ray.remote
class SafeHostWorker(SafeWorker):
    """As `worker.SafeMegatronPolicyWorker` is of NeMo RL's."""
