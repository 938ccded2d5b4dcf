"""NeMo RL's Megatron policy worker with our mixin. Importing this imports NeMo RL, Megatron-Bridge and Megatron."""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from rl_safe_workers.adapters.nemo_rl.mixin import SafePolicyMixin


class SafeMegatronPolicyWorkerImpl(SafePolicyMixin, MegatronPolicyWorkerImpl):
    """The worker without Ray, as a base class. NeMo RL splits its own worker in the same way."""


# NeMo RL's profiler settings use this name.
@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class SafeMegatronPolicyWorker(SafeMegatronPolicyWorkerImpl):
    """The worker as a Ray actor; ``worker_extension_cls_fqn`` names this class."""
