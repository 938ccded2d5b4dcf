"""verl's trainer for supervised fine-tuning with our engines: trains, saves, resumes, ends together, is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from rl_safe_workers.adapters.verl import main_sft
from rl_safe_workers.adapters.verl.entry import check_sft
from rl_safe_workers.adapters.verl.search_path import SafeSearchPath
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.ports import port_to_listen_on
from tests.verl.host import train, training_worker
from tests.verl.ranks import run_verl_ranks

ROOT = Path(__file__).parents[2]
ENTRY = "rl_safe_workers.adapters.verl.main_sft"
MEGATRON = ["engine=megatron", "optim=megatron"]
ON = [*MEGATRON, "+rl_safe=enabled"]
SIZE = 2


def _composed(*overrides: str) -> DictConfig:
    GlobalHydra.instance().clear()
    Plugins.instance().register(SafeSearchPath)
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("sft_trainer_engine", list(overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+rl_safe=enabled"], "engine.strategy=fsdp: it must be megatron; set engine=megatron optim=megatron"),
        (["+rl_safe=enabled", "engine=veomni", "optim=veomni"], "engine.strategy=veomni: it must be megatron"),
        ([*ON, "+checkpoint.async_save=true"], "checkpoint.async_save=true: verl's trainer names a step before"),
        ([*ON, "actor_rollout_ref.rl_safe.timeouts.save=0"], "timeouts.save cannot be 0"),
        ([*ON, "+actor_rollout_ref.rl_safe.timeouts.sav=3"], "unknown key .*timeouts.sav"),
    ],
    ids=["fsdp", "veomni", "async_save", "range", "unknown"],
)
def test_what_we_have_nothing_for_is_refused(overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        check_sft(_composed(*overrides))


def test_without_the_key_the_trainer_is_verls() -> None:
    assert check_sft(_composed()) is None


def test_a_wait_for_an_upload_may_take_as_long_as_a_save() -> None:
    settings = check_sft(_composed(*ON, "actor_rollout_ref.rl_safe.timeouts.save=700"))
    assert settings.nccl_timeout == 700
    assert settings.dispatchers == ["alltoall"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "rows.parquet"
    texts = [f"{number} {number * 7}" for number in range(16)]
    chats = [[{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}] for t in texts]
    pd.DataFrame({"messages": chats}).to_parquet(path)
    return path


def _launch(model: Path, rows: Path, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={SIZE}"),
        *("--master-addr=127.0.0.1", f"--master-port={port_to_listen_on('127.0.0.1')}", "-m", ENTRY),
        f"model.path={model}",
        "model.use_remove_padding=false",
        f"data.train_files={rows}",
        *("data.train_batch_size=4", "data.micro_batch_size_per_gpu=2", "data.use_dynamic_bsz=false"),
        *("data.max_length=64", "data.num_workers=0"),
        *(f"trainer.default_local_dir={folder}", "trainer.logger=[console]", "trainer.device=cpu"),
        f"hydra.run.dir={folder.parent}/hydra",
        *overrides,
    ]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VERL_", "RL_SAFE", "MASTER_"))}
    environment = {
        **clean,
        "VERL_PLATFORM": "rl_safe_cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    return subprocess.run(
        command, env=environment, cwd=folder.parent, capture_output=True, text=True, check=False, timeout=280
    )


def _of_megatron(*overrides: str) -> list[str]:
    return [
        *ON,
        "engine.vanilla_mbridge=true",
        "engine.expert_model_parallel_size=2",
        "trainer.total_training_steps=2",
        *overrides,
    ]


def test_a_run_trains_saves_resumes_and_ends_together(tiny_moe, rows, tmp_path) -> None:
    folder = tmp_path / "checkpoints"
    first = _launch(tiny_moe, rows, folder, *_of_megatron())
    assert first.returncode == 0, first.stderr[-3000:]
    assert f"rl_safe active: SafeMegatronEngine on training rank 1 of {SIZE}" in first.stdout
    assert all(f"training rank {rank}: phase teardown done" in first.stdout for rank in range(SIZE))
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert json.loads((folder / "global_step_2" / "ckpt_contents.json").read_text())["schema_version"] == 2
    assert {path.name for path in folder.iterdir()} == {"global_step_2", "latest_checkpointed_iteration.txt"}

    more = _launch(tiny_moe, rows, folder, *_of_megatron("trainer.total_training_steps=3"))
    assert more.returncode == 0, more.stderr[-3000:]
    assert "step 2" in more.stdout
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3"


@pytest.mark.every_case
def test_a_rank_whose_data_waits_is_named_with_its_line_of_code(tiny_moe, rows, tmp_path) -> None:
    waiting = (f"data.custom_cls.path={ROOT}/tests/verl/waiting_rows.py", "data.custom_cls.name=WaitingRows")
    short = "actor_rollout_ref.rl_safe.timeouts.save=20"
    result = _launch(tiny_moe, rows, tmp_path / "checkpoints", *_of_megatron(*waiting, short))
    assert result.returncode != 0
    output = result.stdout + result.stderr
    told = re.findall(r"the job has failed on training rank 1: (.*)", output)
    assert told, output[-3000:]
    assert re.fullmatch(r"hang: .*training rank 1 is at \S+waiting_rows.py:\d+ \(take_cache_lock\)", told[0]), told[0]
    (evidence,) = {Path(found) for found in re.findall(r"^evidence in (\S+)$", output, re.MULTILINE)}
    assert "take_cache_lock" in (evidence / "stack_trainer_1.txt").read_text()
    shutil.rmtree(evidence.parent)


def _fit(rank: int, model: Path) -> None:
    worker = training_worker(model)
    with main_sft._ended():
        train(worker, 1)
        if rank == 1:
            raise ValueError("a row has no messages")


def test_a_rank_that_was_well_names_the_one_that_failed(tiny_moe) -> None:
    well, failed = run_verl_ranks(_fit, SIZE, tiny_moe)
    assert (type(well.error).__name__, str(well.error)) == (
        "CommunicatorError",
        "this rank succeeded, but the job has failed: training rank 1: ValueError: a row has no messages",
    )
    assert isinstance(failed.error, ValueError)


def test_an_fsdp_engine_is_refused_on_one_line(tiny_moe, rows, tmp_path) -> None:
    result = _launch(tiny_moe, rows, tmp_path / "checkpoints", "+rl_safe=enabled")
    lines = [line for line in result.stderr.splitlines() if line.startswith("rl_safe: ")]
    assert result.returncode != 0
    assert set(lines) == {
        "rl_safe: actor_rollout_ref.rl_safe.enabled=true with engine.strategy=fsdp: it must be megatron; set "
        "engine=megatron optim=megatron"
    }
    assert not (tmp_path / "checkpoints").exists()
