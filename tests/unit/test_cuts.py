"""The plan by which the ranks of a tensor-parallel engine get parts of a bucket, without torch."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import pytest

from rl_safe_workers.rollout.cuts import BucketPart, engine_ranks, layer_of, parts_of, plan_in_words, plan_parts
from rl_safe_workers.rollout.protocol import WeightSpec, bucket_of

HIDDEN, VOCABULARY = 64, 70_000


def _spec(name: str, *shape: int) -> WeightSpec:
    return WeightSpec(name=name, dtype="bfloat16", shape=shape)


BUCKET = bucket_of(
    [
        _spec("model.embed_tokens.weight", VOCABULARY, HIDDEN),
        _spec("model.layers.0.self_attn.q_proj.weight", 128, HIDDEN),
        _spec("model.layers.0.self_attn.k_proj.weight", 32, HIDDEN),
        _spec("model.layers.0.self_attn.q_proj.bias", 128),
        _spec("model.layers.0.self_attn.o_proj.weight", HIDDEN, 128),
        _spec("model.layers.1.self_attn.q_b_proj.weight", 256, HIDDEN),
        _spec("model.layers.1.self_attn.kv_b_proj.weight", 512, HIDDEN),
        _spec("model.layers.0.mlp.gate.weight", 8, HIDDEN),
        _spec("model.layers.0.mlp.experts.3.up_proj.weight", 96, HIDDEN),
        _spec("model.layers.0.mlp.experts.3.down_proj.weight", HIDDEN, 96),
        _spec("model.norm.weight", HIDDEN),
    ]
)
WHOLE = {"gate", "norm"}


def _rows(part: BucketPart, number: int) -> range:
    cut = part.cuts[number]
    assert cut is not None
    return range(cut.first, cut.first + cut.length)


@pytest.mark.parametrize("size", [2, 4])
def test_each_element_goes_to_one_rank_and_what_is_not_cut_to_all(size: int) -> None:
    parts = parts_of(BUCKET, engine_ranks(size, kv_heads=4))
    for number, spec in enumerate(BUCKET.specs):
        if layer_of(spec.name) in WHOLE:
            assert [part.cuts[number] for part in parts] == [None] * size
            continue
        axis = part.axis if (part := parts[0].cuts[number]) is not None else 0
        assert [row for one in parts for row in _rows(one, number)] == [*range(spec.shape[axis])]
        held = [part.bucket.specs[number] for part in parts]
        assert sum(math.prod(one.shape) for one in held) == math.prod(spec.shape)


def test_ranks_share_a_key_value_head_if_there_are_more_ranks_than_heads() -> None:
    parts = parts_of(BUCKET, engine_ranks(4, kv_heads=2))
    assert [_rows(part, 2) for part in parts] == [range(16), range(16), range(16, 32), range(16, 32)]


def test_the_parts_lie_one_after_another() -> None:
    parts = parts_of(BUCKET, engine_ranks(4, kv_heads=4))
    assert parts[0].start == 0
    assert all(one.end == following.start for one, following in pairwise(parts))


def test_an_engine_of_one_rank_gets_the_bucket() -> None:
    (part,) = parts_of(BUCKET, engine_ranks(1, kv_heads=4))
    assert (part.bucket, part.start, set(part.cuts)) == (BUCKET, 0, {None})


def test_the_plan_in_words() -> None:
    assert (
        plan_in_words([(BUCKET, parts_of(BUCKET, engine_ranks(1, kv_heads=4)))]) == "11 weights, 8.7 MiB, in 1 bucket"
    )
    told = plan_in_words([(BUCKET, parts_of(BUCKET, engine_ranks(2, kv_heads=4)))])
    assert told == (
        "11 weights, 8.7 MiB, in 1 bucket; the ranks of an engine get 4.4, 4.3 MiB: "
        "7 weights cut by rows, 2 by columns, 2 whole"
    )


@pytest.mark.parametrize(("size", "owners"), [(2, [0, 0, 0, 1, 1, 1]), (4, [0, 0, 1, 1, 2, 3])])
def test_an_expert_goes_only_to_the_rank_that_holds_it(size: int, owners: list[int]) -> None:
    names = [f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(len(owners))]
    specs = [_spec("model.norm.weight", HIDDEN), *(_spec(name, HIDDEN, 96) for name in names)]
    # A bucket has few experts, so it does not tell how many there are.
    planned = plan_parts(specs, engine_ranks(size, kv_heads=4, expert_parallel=True), bucket_bytes=3 * HIDDEN * 96)
    assert len(planned) > len(owners) // 2
    got = {
        spec.name: [rank for rank, part in enumerate(parts) if part.bucket.sizes[number]]
        for bucket, parts in planned
        for number, spec in enumerate(bucket.specs)
    }
    owned = {name: [rank] for name, rank in zip(names, owners, strict=True)}
    assert got == {"model.norm.weight": [*range(size)], **owned}
    elsewhere = len(owners) - owners.count(0)
    assert plan_in_words(planned).endswith(
        f"0 weights cut by rows, 0 by columns, {owners.count(0) + 1} whole, and not the {elsewhere} of experts that "
        "other ranks hold"
    )


def test_the_plan_needs_no_torch() -> None:
    code = "import sys, rl_safe_workers.rollout.cuts; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
