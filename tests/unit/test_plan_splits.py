"""Which models a plan refuses to cut over a layout is what megatron-core itself refuses, and stages are its stages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from rl_safe_workers.plan.hazards import find
from rl_safe_workers.plan.plan import Plan, make_plan
from rl_safe_workers.plan.request import Source, make_request

pytestmark = pytest.mark.filterwarnings("ignore:full scope is deprecated:UserWarning")
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 8}
Facts = dict[str, Any]


def plan_of(folder: Path, facts: Facts, **sizes: int) -> Plan:
    (folder / "config.json").write_text(json.dumps(SHAPE | sizes))
    return make_plan(make_request(Source(name="test", values=facts | {"model": str(folder)})))


def codes(plan: Plan) -> set[str]:
    return {finding.code for finding in find(plan)}


def stages_of_megatron(layers: int, facts: Facts) -> list[int] | None:
    """Layers of each stage; None: it refuses."""
    try:
        config = TransformerConfig(
            num_layers=layers,
            hidden_size=64,
            num_attention_heads=4,
            pipeline_model_parallel_size=facts["pp"],
            pipeline_dtype=float,
            virtual_pipeline_model_parallel_size=facts.get("vpp"),
            num_layers_in_first_pipeline_stage=facts.get("first_stage_layers"),
            num_layers_in_last_pipeline_stage=facts.get("last_stage_layers"),
            account_for_embedding_in_pipeline_split=facts.get("embedding_as_layer", False),
            account_for_loss_in_pipeline_split=facts.get("loss_as_layer", False),
        )
        return [
            sum(
                get_num_layers_to_build(config, vp_stage=virtual if "vpp" in facts else None, pp_rank=stage)
                for virtual in range(facts.get("vpp", 1))
            )
            for stage in range(facts["pp"])
        ]
    except (AssertionError, ValueError):
        return None


def splits() -> Iterator[Facts]:
    for stages, virtual in product((2, 3, 4), (None, 2, 3)):
        facts: Facts = {"trainers": stages, "pp": stages} | ({} if virtual is None else {"vpp": virtual})
        for embedding, loss in product((False, True), repeat=2):
            yield facts | {"embedding_as_layer": embedding, "loss_as_layer": loss}
        for first, last in product((None, 1, 2, 4), repeat=2):
            fixed = {"first_stage_layers": first, "last_stage_layers": last}
            yield facts | {name: count for name, count in fixed.items() if count is not None}


def test_layers_are_cut_as_megatron_cuts_them_and_refused_where_it_refuses(tmp_path: Path) -> None:
    answers = {True: 0, False: 0}
    for facts, layers in product(splits(), range(8, 15)):
        expected = stages_of_megatron(layers, facts)
        if facts["pp"] == 2 and "first_stage_layers" in facts and "last_stage_layers" in facts:
            continue  # with no stage between, a sum that does not fit is bad input
        plan = plan_of(tmp_path, facts, num_hidden_layers=layers, num_attention_heads=4)
        assert ("layers-indivisible" in codes(plan)) == (expected is None), (facts, layers, expected)
        assert expected in (None, plan.layers), (facts, layers)
        answers[expected is None] += 1
    assert min(answers.values()) > 100


def test_heads_are_refused_where_megatron_refuses_them(tmp_path: Path) -> None:
    for tensor, heads, groups in product((1, 2, 3, 4, 6, 8, 16), (8, 12, 16), (1, 2, 4, 8)):
        try:
            TransformerConfig(
                num_layers=1,
                hidden_size=96,
                num_attention_heads=heads,
                num_query_groups=groups,
                tensor_model_parallel_size=tensor,
            )
        except ValueError:
            refused = True
        else:
            refused = False
        facts = {"trainers": tensor, "tp": tensor}
        sizes = {"num_hidden_layers": 1, "num_attention_heads": heads, "num_key_value_heads": groups}
        for host in ("megatron", "verl", "nemo-rl", "ms-swift"):
            found = codes(plan_of(tmp_path, facts | {"host": host}, **sizes))
            assert ("heads-indivisible" in found) == refused, (tensor, heads, groups)
        assert ("heads-indivisible" in codes(plan_of(tmp_path, facts | {"host": "rl-safe"}, **sizes))) == (
            bool(heads % tensor or groups % tensor)
        )
