"""Limits of NCCL channels for the groups that NeMo RL uses."""

from __future__ import annotations

import pytest
import torch

from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NODE, NemoRlSettings
from rl_safe_workers.adapters.nemo_rl.policy_process import NemoRlComms
from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.workers.safe_trainer import SafeTrainer


def _limits(stages: int, **max_ctas: int) -> dict[str, int]:
    """Returns the limits with which NeMo RL would make the groups of 8 ranks."""
    settings = NemoRlSettings.read({"bootstrap": {"max_ctas": max_ctas}}, source=NODE)
    trainer = SafeTrainer(
        training_rank=0,
        training_size=8,
        rl_safe=settings.rl_safe(),
        megatron=MegatronConfig(expert_model_parallel_size=2, pipeline_model_parallel_size=stages),
        features=Features(moe=True),
        device=torch.device("cpu"),
        host_comms=NemoRlComms(),
    )
    return trainer.comms.wanted_limits()


@pytest.mark.parametrize("stages", [2, 4])
def test_the_pipeline_group_has_no_limit_for_refits(stages: int) -> None:
    limits = _limits(stages)
    assert "pp" not in limits
    assert limits["mp"] == 1
    assert _limits(stages, pp=32)["pp"] == 32


def test_a_single_pipeline_stage_keeps_its_limit() -> None:
    assert _limits(1)["pp"] == 1
