"""Gathers of parameters that Megatron's DDP puts off until the next forward pass (``overlap_param_gather``).

After an optimizer step each data-parallel rank holds new values of its own shard alone, beside old ones of the others.
Weights that are read in between, by a sync with the rollout or by a save, are a mixture of two steps, and nothing tells
(NeMo RL PR 4086). The fields of ``_ParamAndGradBucketGroup`` are private. Seen in megatron-core 0.16 to 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def complete_param_gathers(chunks: Iterable[Any]) -> int:
    """Gathers the parameters whose gather has been put off. The next forward pass then finds nothing to gather.

    Collective over: the data-parallel ranks; all of them put off the same gathers.

    Args:
        chunks: Model chunks. Those that Megatron's DDP does not wrap are left as they are. So are chunks whose
            parameters and gradients share a buffer (``reuse_grad_buf_for_mxfp8_param_ag``): gradients may be there now.

    Returns:
        The number of bucket groups that were gathered.
    """
    gathered = 0
    for chunk in chunks:
        config: Any = getattr(chunk, "ddp_config", None)
        # Megatron's FSDP has such a configuration, too, but no such groups.
        if not hasattr(chunk, "bucket_groups") or not config.overlap_param_gather:
            continue
        if not config.use_distributed_optimizer or config.reuse_grad_buf_for_mxfp8_param_ag:
            continue
        for group in [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]:
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.start_param_sync(force_sync=True)
                gathered += 1
    return gathered
