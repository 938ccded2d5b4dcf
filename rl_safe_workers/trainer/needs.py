"""Finds the parts of a checkpoint that the ranks of one host read, to the byte, without its bytes or their memory.

Each rank's model and optimizer are built by the trainer's own code, so that nothing can differ from a real load: in a
world of fake groups, where collectives move nothing, and on the meta device, where tensors have shapes and no values.
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
    """A policy of which only the shapes exist."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.device = config, cpu.META

    def load_hf_weights(self, path: str) -> None:
        """Reads nothing."""


def find_ranges(config: RunConfig, checkpoint: Path, ranks: Sequence[int], *, rng: bool) -> Ranges:
    """Finds the bytes that some ranks read when they load a checkpoint. No communication; blocking for seconds.

    Changes this process for good: call it in one made for it, which sees no GPU.

    Args:
        config: Layout and model of the run that is to load.
        checkpoint: What `index.read_index` takes.
        ranks: Training ranks.
        rng: Whether each rank also loads its random state, as it does under the layout that was saved.

    Returns:
        Byte ranges by file, as `needed_ranges`.

    Raises:
        CheckpointMismatchError: If the checkpoint lacks a tensor of the model, or has it in another shape.
        CheckpointError: If the checkpoint's metadata cannot be read, or must not be.
    """
    cpu.apply()
    cpu.use_meta_device()
    # Its reference weights would be a copy of what has no values; a load does not touch them.
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
    """Megatron's groups as a training rank sees them; gone afterwards, for the next rank."""
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
    """The rectangle of a piece that a checkpoint has: a vocabulary may be padded further than the one it saved."""
    sizes = tuple(min(n, whole - p) for p, n, whole in zip(piece.offset, piece.shape, shape, strict=True))
    if min(sizes, default=1) > 0:
        yield piece.key, piece.offset, sizes
