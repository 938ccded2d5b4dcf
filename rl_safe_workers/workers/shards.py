"""What saves, loads and conversions share: one saver and one loader of Megatron's shards for each worker."""

from __future__ import annotations

from megatron.core import parallel_state

from rl_safe_workers.checkpoint.loader import Loader
from rl_safe_workers.checkpoint.plan import Replicas
from rl_safe_workers.checkpoint.saver import Saver
from rl_safe_workers.workers.base import SafeWorker


class ShardsMixin(SafeWorker):
    """Holds the saver and the loader, made when first used: they need the store and Megatron's groups."""

    _saver: Saver | None = None
    _loader: Loader | None = None

    def _open_saver(self) -> Saver:
        if self._saver is None:
            dense = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
            replicas = Replicas(dense=dense, expert=parallel_state.get_expert_data_parallel_world_size())
            self._saver = Saver(self.control, replicas=replicas)
        return self._saver

    def _open_loader(self) -> Loader:
        if self._loader is None:
            self._loader = Loader(self.control)
        return self._loader
