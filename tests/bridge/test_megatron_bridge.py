"""The real Megatron-Bridge without Transformer Engine: its import, its choice, and what is refused.

`tests/distributed/test_families.py` and `test_conversion.py` have what it computes and converts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import ModelError
from rl_safe_workers.models import megatron_bridge
from rl_safe_workers.models.bridge import open_bridge
from rl_safe_workers.models.megatron_bridge import MegatronBridge
from rl_safe_workers.models.seeded import Family, create_seeded_model
from rl_safe_workers.worlds.address import StoreAddress
from tests.distributed.families import make
from tests.distributed.ranks import run_ranks, values
from tests.distributed.worker import Worker, run_config, served_store

MADE = {"dtype": torch.float32, "transformer_engine": False}


def test_the_import_leaves_no_placeholder_and_no_handler() -> None:
    code = """if True:
        import logging, sys
        import rl_safe_workers.models.megatron_bridge
        from megatron.core.extensions import transformer_engine
        assert not transformer_engine.HAVE_TE
        assert [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"] == []
        assert (logging.root.handlers, logging.root.level) == ([], logging.WARNING)
        assert logging.root.manager.disable == logging.NOTSET
    """
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_model_that_no_bridge_has_is_refused_with_the_library_s_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    message = (
        "mbridge has no mapping for gpt2; Megatron-Bridge: ✗ Model architecture not supported by AutoBridge; the s"
    )
    with pytest.raises(ModelError, match=message):
        open_bridge(str(tmp_path), **MADE)


def test_a_model_without_its_mapping_is_refused_by_name(tmp_path: Path) -> None:
    create_seeded_model(tmp_path / "m", SeededModelConfig(), family=Family.LLAMA)
    with pytest.raises(
        ModelError, match="model.bridge is megatron_bridge; .*'MixtralForCausalLM' is not yet supported"
    ):
        open_bridge(str(tmp_path / "m"), library="megatron_bridge", **MADE)


@pytest.fixture
def layout(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The parallel sizes of a world of one rank, without groups."""
    sizes = {"tensor_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    monkeypatch.setattr(megatron_bridge, "_parallel_settings", lambda: sizes)
    return sizes


@pytest.mark.parametrize(
    ("family", "settings", "sizes", "message"),
    [
        (
            Family.OLMOE,
            {"num_key_value_heads": 4},
            {"tensor_model_parallel_size": 2},
            "tensor_model_parallel_size=2 is",
        ),
        (Family.OLMOE, {}, {}, "num_key_value_heads=2 is not supported: only num_attention_heads=4 is"),
        (Family.GPT_OSS, {}, {}, "intermediate_size=64 is not supported, because it is half of hidden_size=128"),
        (Family.GPT_OSS, {}, {"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size=2 is not supported"),
        (Family.GLM4_MOE, {"norm_topk_prob": False}, {}, "norm_topk_prob=False with num_experts_per_tok=2"),
    ],
)
def test_what_it_would_compute_or_convert_otherwise_is_refused(
    family: Family,
    settings: dict[str, Any],
    sizes: dict[str, int],
    message: str,
    tmp_path: Path,
    layout: dict[str, Any],
) -> None:
    create_seeded_model(tmp_path / "m", SeededModelConfig(), family=family, settings=settings)
    layout.update(sizes)
    with pytest.raises(ModelError, match=message):
        open_bridge(str(tmp_path / "m"), library="megatron_bridge", **MADE)


def _incomplete(rank: int, address: StoreAddress, model: Path) -> list[str]:
    """Builds OLMoE with the library that mbridge leaves, and loads it once the router's mapping is gone."""
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.olmoe.olmoe_bridge import OlMoEBridge

    made = Worker(run_config(model), rank=rank, size=1)
    made.start(address)
    made.build()
    assert isinstance(made.bridge, MegatronBridge)
    assert made.bridge.config.expert_model_parallel_size == parallel_state.get_expert_model_parallel_world_size() == 1
    whole = OlMoEBridge.mapping_registry
    OlMoEBridge.mapping_registry = lambda self: MegatronMappingRegistry(
        *(mapping for mapping in whole(self) if "router" not in mapping.megatron_param)
    )
    messages = []
    for convert in (lambda: made.load_hf_weights(str(model)), lambda: list(made.export_hf_weights())):
        with pytest.raises(ModelError) as caught:
            convert()
        messages.append(str(caught.value))
    return messages


def _sinks_in_the_norm(rank: int, address: StoreAddress, model: Path) -> list[bool]:
    made = Worker(run_config(model, tp=2, ep=2), rank=rank, size=2)
    made.start(address)
    made.build()
    names = dict(made.chunks[0].named_parameters())
    return [param_is_not_tensor_parallel_duplicate(names[name]) for name in names if name.endswith(".softmax_offset")]


def test_the_norm_of_the_gradient_has_the_sinks_of_every_rank(tmp_path: Path) -> None:
    """Their part is too small for the tolerance of `test_families`."""
    model = make(tmp_path / "m", "gpt_oss")
    with served_store() as address:
        assert values(run_ranks(_sinks_in_the_norm, 2, address, model)) == [[True, True], [True, True]]


def test_a_weight_that_the_library_would_leave_out_is_named(tmp_path: Path) -> None:
    model = make(tmp_path / "m", "olmoe")
    with served_store() as address:
        (messages,) = values(run_ranks(_incomplete, 1, address, model))
    assert messages == 2 * [
        "Megatron-Bridge has no HF weight for decoder.layers.0.mlp.router.weight: the conversion would leave it out"
    ]
