"""All mixins together: what makes a Megatron actor safe beside vLLM."""

from __future__ import annotations

from rl_safe_workers.workers.checkpoint import CheckpointMixin
from rl_safe_workers.workers.convert import ConvertMixin
from rl_safe_workers.workers.offload import OffloadMixin
from rl_safe_workers.workers.teardown import TeardownMixin


class MegatronActorMixin(OffloadMixin, ConvertMixin, CheckpointMixin, TeardownMixin):
    """Mix over a class that has ``chunks``, ``optimizer``, ``device`` and ``export_hf_weights`` (see MegatronHost).

    To convert it needs ``load_hf_weights`` too (see convert.ConvertHost).

    The order of calls::

        setup_worker → init_world or carve_world → init_groups → bootstrap
            → (the host builds its model) → join → offload, onload, send_weights, save_checkpoint … → teardown
    """
