"""NeMo RL's Megatron policy worker, safe. Importing it imports NeMo RL, Megatron-Bridge and Megatron."""

from __future__ import annotations

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from rl_safe_workers.adapters.nemo_rl.mixin import SafePolicyMixin


class SafeMegatronPolicyWorkerImpl(SafePolicyMixin, MegatronPolicyWorkerImpl):
    """Without Ray, to be derived from: NeMo RL's own is split in the same way."""


# The name that NeMo RL's profiler settings know.
@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))
class SafeMegatronPolicyWorker(SafeMegatronPolicyWorkerImpl):
    """The class that ``worker_extension_cls_fqn`` names."""
