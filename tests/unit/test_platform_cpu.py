"""The shims that let Megatron run without a GPU, each on its own, in a process that they cannot leave."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

PROBE = """
import json, logging, sys
import torch

seen = {}

def is_available():
    return True

def names():
    return [torch.cuda.current_device, torch.zeros, torch.Tensor.type, torch.cuda.Stream, torch.cuda.get_rng_state]

from rl_safe_workers.errors import ResourceError
from rl_safe_workers.platforms import cpu

before, unpatched = names(), torch.cuda.is_available
torch.cuda.is_available = is_available
try:
    cpu.apply()
except ResourceError as error:
    seen["refusal"] = str(error)
seen["untouched"] = names() == before
torch.cuda.is_available = unpatched

cpu.apply()
after = names()
cpu.apply()
seen["applied"] = [a is not b for a, b in zip(after, before)]
seen["idempotent"] = names() == after

device = torch.cuda.current_device()
made = {
    "zeros": torch.zeros(2, device="cuda"),
    "ones": torch.ones(2, device="cuda:0"),
    "empty": torch.empty(2, device=torch.device("cuda")),
    "full": torch.full((2,), 7.0, device=device),
    "arange": torch.arange(2, device="cuda", dtype=torch.float32),
    "tensor": torch.tensor([1.0], device="cuda"),
    "cuda": torch.ones(2).cuda(),
    "module": torch.nn.Linear(2, 2).cuda(0).weight,
}
seen["devices"] = {name: str(tensor.device) for name, tensor in made.items()}
seen["values"] = [made["full"].tolist(), made["arange"].tolist(), torch.zeros(2, device="meta").device.type]

import os
import torch.distributed as dist
from datetime import timedelta

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
ways = [{}, {"timeout": timedelta(seconds=7)}, timedelta(seconds=8)]
groups = [
    dist.ProcessGroupGloo(dist.HashStore(), 0, 1, *([way] if isinstance(way, timedelta) else []),
                          **(way if isinstance(way, dict) else {}))
    for way in ways
]
seen["gloo_timeouts"] = [group.options._timeout.total_seconds() for group in groups]
own = dist.ProcessGroupGloo._Options()
own._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
groups.append(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, own))
seen["gloo_shares"] = [group.options._devices[0] is groups[0].options._devices[0] for group in groups]
seen["gloo_sum"] = []
for group in groups:
    ones = torch.ones(2)
    group.allreduce([ones]).wait()
    seen["gloo_sum"] += ones.tolist()

stream, event = torch.cuda.Stream(device=0), torch.cuda.Event()
stream.wait_stream(torch.cuda.current_stream())
stream.wait_event(stream.record_event())
event.record(stream)
event.synchronize()
torch.cuda.synchronize()
with torch.cuda.stream(stream):
    seen["in_stream"] = torch.cuda.current_stream() == stream == torch.cuda.default_stream()

from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher

torch.cuda.manual_seed(5)
state, first = torch.cuda.get_rng_state(), torch.rand(3)
megatron_random._set_cuda_rng_state(state)
seen["rng_repeats"] = torch.equal(first, torch.rand(3))
tracker = megatron_random.CudaRNGStatesTracker()
tracker.add("expert", 11)
with tracker.fork("expert"):
    forked = torch.rand(3)
outside = torch.cuda.get_rng_state()
torch.manual_seed(11)
seen["fork_draws_from_its_own_seed"] = torch.equal(forked, torch.rand(3))
torch.set_rng_state(outside)

class Collect(logging.Handler):
    records = []
    def emit(self, record):
        self.records.append(record.getMessage())
logger = logging.getLogger(megatron_random.__name__)
logger.addHandler(Collect())
logger.warning("CPU RNG state changed within GPU RNG context")
logger.warning("something else")
seen["warnings"] = Collect.records

seen["types"] = [torch.zeros(1).type(), torch.zeros(1, dtype=torch.bfloat16).type()]
seen["converted"] = [str(torch.zeros(1).type(torch.float64).dtype), str(torch.zeros(1).type("torch.IntTensor").dtype)]

splits = torch.tensor([1, 2])
seen["splits"] = [
    type(token_dispatcher.maybe_move_tensor_to_cpu(splits, as_numpy=True)).__name__,
    token_dispatcher.maybe_move_tensor_to_cpu(splits) is splits,
    token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True),
]
cpu.use_meta_device()
made = [torch.empty(2), torch.zeros(2, device=torch.cuda.current_device()), torch.empty(2, device="cuda")]
seen["on meta"] = [tensor.device.type for tensor in (*made, torch.empty(2, device="cpu"), torch.tensor(1.0))]
seen["type on meta"] = made[0].type()
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", "-c", PROBE]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_a_process_that_sees_a_gpu_is_refused_and_left_as_it_was(seen: dict[str, Any]) -> None:
    assert seen["refusal"].endswith("hide it with CUDA_VISIBLE_DEVICES=")
    assert seen["untouched"]


def test_every_group_of_shims_is_applied_and_only_once(seen: dict[str, Any]) -> None:
    assert seen["applied"] == [True] * 5
    assert seen["idempotent"]


def test_what_is_made_for_cuda_is_made_on_the_cpu(seen: dict[str, Any]) -> None:
    assert set(seen["devices"].values()) == {"cpu"}
    assert len(seen["devices"]) == 8


def test_everything_else_about_a_tensor_stays(seen: dict[str, Any]) -> None:
    assert seen["values"] == [[7.0, 7.0], [0.0, 1.0], "meta"]


def test_gloo_groups_share_one_device_unless_they_bring_their_own(seen: dict[str, Any]) -> None:
    assert seen["gloo_timeouts"] == [1800.0, 7.0, 8.0]
    assert seen["gloo_shares"] == [True, True, True, False]
    assert seen["gloo_sum"] == [1.0] * 8


def test_there_is_one_stream(seen: dict[str, Any]) -> None:
    assert seen["in_stream"]


def test_megatrons_random_state_is_that_of_the_cpu(seen: dict[str, Any]) -> None:
    assert seen["rng_repeats"]
    assert seen["fork_draws_from_its_own_seed"]


def test_only_the_warning_that_means_nothing_here_is_dropped(seen: dict[str, Any]) -> None:
    assert seen["warnings"] == ["something else"]


def test_tensors_name_the_type_that_the_optimizers_expect(seen: dict[str, Any]) -> None:
    assert seen["types"] == ["torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor"]


def test_conversions_by_type_still_work(seen: dict[str, Any]) -> None:
    assert seen["converted"] == ["torch.float64", "torch.int32"]


def test_splits_become_numpy_arrays_when_asked_for(seen: dict[str, Any]) -> None:
    assert seen["splits"] == ["ndarray", True, None]


def test_on_the_meta_device_models_are_built_of_shapes_and_values_stay_values(seen: dict[str, Any]) -> None:
    assert seen["on meta"] == ["meta", "meta", "cpu", "cpu", "cpu"]
    assert seen["type on meta"] == "torch.cuda.FloatTensor"
