"""verl's whole job with a tensor-parallel vLLM engine on CPU: proved syncs, some wrong once, the last one twice.

In the first job, verl sends the weights one by one. In the other two they are packed, the last with Megatron-Bridge.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.verl.vllm_on_cpu import OF_BRIDGE, OF_VLLM, PYTHON, path_to_both
from tests.verl.whole_job import LIMIT_S, run_job

EXTENSION = "tests.verl.faulty_engine.FaultyWorkerExtension"
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
LAST_STEP = 6
WRONG = {
    2: ["model.layers.0.self_attn.o_proj.weight"],
    3: [f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1)],
    4: ["model.layers.1.mlp.gate.weight"],
}
"""Weights that are wrong once, by the step: a flipped bit, two experts swapped, a stale one."""


def _told(names: Sequence[str]) -> str:
    return "; ".join(rf"rollout rank 0: {re.escape(name)}: sent [0-9a-f]{{16}}, held [0-9a-f]{{16}}" for name in names)


@pytest.mark.every_case
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.skipif(not (OF_VLLM / "vllm").is_dir(), reason="vLLM's environment is not there: scripts/setup test")
# The last value is the weight that is changed on its way to the engine in step 5. If packed, it is the first one sent.
@pytest.mark.parametrize(
    ("packed", "with_bridge", "on_the_wire"),
    [
        pytest.param(False, False, "model.norm.weight", id="one by one"),
        pytest.param(True, False, "model.embed_tokens.weight", id="packed"),
        pytest.param(True, True, "model.norm.weight", id="packed, Megatron-Bridge"),
    ],
)
def test_wrong_weights_in_an_engine_are_named_and_end_the_job_if_the_sync_is_wrong_twice(
    packed: bool, with_bridge: bool, on_the_wire: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_bridge and not (OF_BRIDGE / "megatron/bridge").is_dir():
        pytest.skip("Megatron-Bridge's environment is not there: scripts/setup bridge")
    # vLLM's CPU build would want a NUMA node for each of the engine's two workers.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    beside = tmp_path / "site"
    beside.mkdir()
    status, output = run_job(
        tmp_path,
        "actor_rollout_ref.rl_safe.prove_sync_freq=1",
        f"actor_rollout_ref.rl_safe.packed_sync={packed}",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        # An entropy bonus, so that weights change whatever the rewards are.
        *("actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.entropy_coeff=0.1"),
        *("actor_rollout_ref.rollout.max_model_len=128", "actor_rollout_ref.rollout.max_num_batched_tokens=512"),
        *("actor_rollout_ref.rollout.max_num_seqs=16", "+actor_rollout_ref.rollout.enable_sleep_mode=false"),
        *(f"+{ENGINE}.worker_extension_cls={EXTENSION}", f"+{ENGINE}.kv_cache_memory_bytes={64 * 2**20}"),
        "trainer.save_freq=-1",
        *(["actor_rollout_ref.actor.megatron.vanilla_mbridge=false"] if with_bridge else []),
        python=str(PYTHON),
        path=path_to_both(beside, with_bridge=with_bridge),
        modules=",".join(["tests.verl.vllm_on_cpu", *(["tests.verl.bridge_on_cpu"] if with_bridge else [])]),
        steps=LAST_STEP,
    )
    lines = re.findall(r"step:(\d) - (.*rl_safe/sync_proved.*)", output)
    assert len(lines) == LAST_STEP - 1, output[-3000:]
    assert [float(is_packed) for is_packed in re.findall(r"rl_safe/sync_packed:(\S+)", output)] == [1.0] * packed * len(
        lines
    )
    wrong = {**WRONG, 5: [on_the_wire]}
    # Both workers learn the direct way at first, and anew whenever a sync is redone.
    learned = output.count("packed weight syncs now go straight into the model")
    assert learned == 2 * (1 + len(wrong)) * packed
    steps = {
        int(step): dict(re.findall(r"rl_safe/sync_(\w*(?:proved|redone)):(\S+)", metrics)) for step, metrics in lines
    }
    proved = steps[1]["proved"]
    assert float(proved) > 0
    for step, metrics in steps.items():
        redone = "1.0" if step in wrong else "0.0"
        assert metrics == {"proved": proved, "not_proved": "0.0", "redone": redone}, step
    for step, names in wrong.items():
        assert re.search(rf"the weight sync of step {step} is redone: {_told(names)}\s", output), step
    assert status == 1
    first = output.rpartition("\nrl_safe: ")[2].splitlines()[0]
    told = rf"the weight sync of step {LAST_STEP} has put wrong weights into an engine, twice: {_told(wrong[2])}$"
    assert re.search(told, first), first
