"""The kernel of digests, interpreted on the CPU: it finds what numpy finds. ``scripts/test --bridge`` has Triton."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_safe_workers.rollout import digest
from tests.digest_cases import cases, cut_tensors

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def told_by(what: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.unit.kernel_digests", what]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    return told_by("interpret")


@needs_triton
@pytest.mark.parametrize("name", cases())
def test_numpy_finds_the_same(name: str, interpreted: dict[str, Any]) -> None:
    expected = cases()[name].expected
    assert (interpreted[name], interpreted[f"{name}, with all others"]) == (expected, expected)


@needs_triton
def test_numpy_finds_the_same_for_parts_of_tensors(interpreted: dict[str, Any]) -> None:
    assert interpreted["parts"] == [one for of in cut_tensors().values() for one in of.expected]


@needs_triton
def test_a_table_reads_what_the_memory_holds_now(interpreted: dict[str, Any]) -> None:
    (first, anew), (second, anew_later) = interpreted["table"]
    assert (first, second) == (anew, anew_later)
    assert first[0] == second[0]
    assert first[1] != second[1]


@needs_triton
def test_there_is_no_table_for_a_tensor_that_must_be_copied(interpreted: dict[str, Any]) -> None:
    assert interpreted["no table"]


@pytest.mark.parametrize("name", cut_tensors())
def test_torch_finds_the_same_for_parts_of_a_tensor(name: str) -> None:
    tensor, sizes, expected = cut_tensors()[name]
    assert digest.digests_of([tensor], sizes=[sizes]).tolist() == expected


@needs_triton
def test_each_variant_compiles_and_loads_wide_if_the_addresses_allow_it() -> None:
    loads = told_by("compile")
    assert len(loads) == 4
    assert {variant: wide > 0 for variant, wide in loads.items()} == {
        variant: "is_aligned=True" in variant for variant in loads
    }


@pytest.mark.parametrize("name", cases())
def test_torch_finds_the_same(name: str) -> None:
    tensors, spans, expected = cases()[name]
    assert int(digest.digests_of(tensors, spans).sum()) == expected


def test_a_kernel_that_cannot_be_built_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "rl_safe_workers.rollout.digest_kernel", None)
    digest._kernel.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert [digest._kernel(torch.device("cpu")) for _ in range(2)] == [None, None]
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "digests of weights take longer, because their kernel cannot be built"
    ]
    digest._kernel.cache_clear()
