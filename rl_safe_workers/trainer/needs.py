"""Finds the byte ranges of a checkpoint that the ranks of one host read, without reading or holding the weights.

The trainer's own code builds each rank's model and optimizer, so the result equals a real load. It runs in a world of
fake groups, whose collectives move no data, and on the meta device, whose tensors have shapes but no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl_safe_workers.checkpoint.format.index import CheckpointIndex, read_index
from rl_safe_workers.checkpoint.format.rectangles import Index
from rl_safe_workers.checkpoint.load.loader import compare, read_content_metadata
from rl_safe_workers.checkpoint.ranges import Needs, Ranges, needed_ranges
from rl_safe_workers.checkpoint.state.pieces import Piece, Split, coalesce, split
from rl_safe_workers.checkpoint.state.state import sharded_state
from rl_safe_workers.comms.megatron_groups import init_megatron_groups
from rl_safe_workers.config import RunConfig
from rl_safe_workers.errors import CheckpointMismatchError
from rl_safe_workers.platforms import cpu
from rl_safe_workers.trainer.policy import MegatronPolicy

_UNUSED = timedelta(minutes=1)
"""Timeout of groups that never wait."""


class _Blueprint(MegatronPolicy):
    """A policy that has shapes but no values."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.device = config, cpu.META

    def load_hf_weights(self, path: str) -> None:
        """Reads nothing."""


def find_ranges(config: RunConfig, checkpoint: Path, ranks: Sequence[int], *, rng: bool) -> Ranges:
    """Finds the bytes that some ranks read when they load a checkpoint. Communicates with nobody. Blocks for seconds.

    It changes this process for good. Call it in a process that was started for it and sees no GPU.

    Args:
        config: Layout and model of the run that is to load.
        checkpoint: The checkpoint's directory, as for `index.read_index`.
        ranks: Training ranks.
        rng: True if each rank also loads its random state, as it does if the layout equals the saved one.

    Returns:
        Byte ranges by file, as `needed_ranges`.

    Raises:
        CheckpointMismatchError: If the checkpoint lacks a tensor of the model, or has it in another shape.
        CheckpointError: If the checkpoint's metadata cannot be read, or is not safe to read.
    """
    cpu.apply()
    cpu.use_meta_device()
    # No reference weights: they would be a copy of tensors without values, and a load does not touch them.
    config.actor.use_kl_loss = False
    index = read_index(checkpoint)
    metadata = read_content_metadata(index.location.shards)
    rectangles: set[tuple[str, Index, Index]] = set()
    objects: set[str] = set()
    for rank in ranks:
        with _place_of(rank, config):
            policy = _Blueprint(config)
            policy.build()
            state = sharded_state(
                policy.chunks,
                policy.optimizer,
                training_rank=rank,
                size=config.cluster.num_trainers,
                is_loading=True,
                metadata=metadata,
                rng=rng,
            )
            found = _needs(split(state), index)
        rectangles.update(found.rectangles)
        objects.update(found.objects)
    return needed_ranges(index, Needs(rectangles=sorted(rectangles), objects=sorted(objects)))


@contextmanager
def _place_of(rank: int, config: RunConfig) -> Iterator[None]:
    """Makes Megatron's groups as a training rank sees them, and destroys them afterwards for the next rank."""
    dist.init_process_group("fake", rank=rank, world_size=config.cluster.num_trainers, store=FakeStore())
    try:
        init_megatron_groups(config.megatron, seed=config.trainer.seed, timeout=_UNUSED)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _needs(parts: Split, index: CheckpointIndex) -> Needs:
    if complaint := compare(parts, index):
        raise CheckpointMismatchError(f"{index.location.root} does not fit the model: {complaint}")
    pieces = coalesce(parts.tensors)
    return Needs(
        rectangles=[r for piece in pieces for r in _stored_part(piece, index.tensors[piece.key].shape)],
        objects=[item.unique_key for item in parts.objects],
    )


def _stored_part(piece: Piece, shape: Index) -> Iterator[tuple[str, Index, Index]]:
    """Yields the rectangle of a piece that is in the checkpoint. The model's vocabulary may have more padding."""
    sizes = tuple(min(n, whole - p) for p, n, whole in zip(piece.offset, piece.shape, shape, strict=True))
    if min(sizes, default=1) > 0:
        yield piece.key, piece.offset, sizes
