"""Completes gathers of parameters that Megatron's DDP defers to the next forward pass (``overlap_param_gather``).

After an optimizer step, each data-parallel rank has new values only for its own shard. The other shards still have old
values. If a sync with the rollout or a save reads the weights then, it silently gets a mixture of two steps (NeMo RL
PR 4086). The fields of ``_ParamAndGradBucketGroup`` are private. Seen in megatron-core 0.16 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def complete_param_gathers(chunks: Iterable[Any]) -> int:
    """Gathers the parameters whose gather was deferred. The next forward pass then has nothing to gather.

    Collective over: the data-parallel ranks; all of them have deferred the same gathers.

    Args:
        chunks: Model chunks. Skips chunks that Megatron's DDP does not wrap. Also skips chunks whose parameters and
            gradients share a buffer (``reuse_grad_buf_for_mxfp8_param_ag``), because it may contain gradients now.

    Returns:
        The number of bucket groups that were gathered.
    """
    gathered = 0
    for chunk in chunks:
        config: Any = getattr(chunk, "ddp_config", None)
        # Megatron's FSDP also has a ``ddp_config``, but no bucket groups.
        if not hasattr(chunk, "bucket_groups") or not config.overlap_param_gather:
            continue
        if not config.use_distributed_optimizer or config.reuse_grad_buf_for_mxfp8_param_ag:
            continue
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            # A rank alone in its data-parallel group has all values.
            is_alone = group.intra_distributed_optimizer_instance_size == 1
            if group.param_gather_handle is not None or not (group.param_gather_dispatched or is_alone):
                group.start_param_sync(force_sync=True)
                gathered += 1
    return gathered
