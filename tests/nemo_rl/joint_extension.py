"""Our part of a vLLM worker under NeMo RL, for a worker that is a process of its own without a GPU."""

from tests.nemo_rl.proved_refits import import_without_gpus, remove_conflicts

import_without_gpus()

from rl_safe_workers.adapters.nemo_rl.vllm_extension import SafeVllmExtension  # noqa: E402

remove_conflicts()

__all__ = ["SafeVllmExtension"]
