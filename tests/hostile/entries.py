"""Our real entry points, as the harness calls them. A change of their signatures is followed here alone.

Each takes arguments, with paths relative to the working directory, and returns an exit code. Each raises what the
product raises: the child reports an RlSafeError as the command does, and anything else is a failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

Entry = Callable[..., int]


def _command(*words: str) -> Entry:
    def entry(*arguments: str) -> int:
        from rl_safe_workers.cli.main import main

        try:
            return main([*words, *arguments])
        except SystemExit as stop:  # argparse
            return stop.code if isinstance(stop.code, int) else 1

    return entry


# Checkpoints


def index(directory: str) -> int:
    """Reads the metadata of a checkpoint."""
    from rl_safe_workers.checkpoint.format.index import read_index

    read_index(Path(directory))
    return 0


def manifest(directory: str) -> int:
    """Reads the manifest of a checkpoint, as a resumed run does."""
    from rl_safe_workers.checkpoint.folders.manifest import read_manifest

    read_manifest(Path(directory))
    return 0


def resume(root: str, data: str) -> int:
    """Finds the checkpoint that a run resumes from, and goes to its place in the data."""
    from rl_safe_workers.config import ResumeMode, TrainerConfig
    from rl_safe_workers.driver.inputs.data import PromptDataset, PromptLoader
    from rl_safe_workers.driver.resume import find_resume_point
    from rl_safe_workers.errors import CheckpointError

    trainer = TrainerConfig(resume_mode=ResumeMode.auto, default_local_dir=root)
    point = find_resume_point(trainer, Path("no-model"))
    if point is None:
        raise CheckpointError(f"{root} has no checkpoint")
    loader = PromptLoader(PromptDataset([data]), batch_size=2, shuffle=True, seed=0)
    loader.load_state_dict(point.manifest.driver_state["data"])
    for _ in range(5):
        loader.next_batch()
    return 0


def common(shards: str) -> int:
    """Reads the common state."""
    from rl_safe_workers.checkpoint.load.loader import read_content_metadata

    read_content_metadata(Path(shards))
    return 0


def load(shards: str) -> int:
    """Loads the good checkpoint's tensors and objects in a training world of one rank."""
    import torch.distributed as dist

    from rl_safe_workers.checkpoint.load.loader import Loader
    from rl_safe_workers.control.plane import ControlPlane
    from rl_safe_workers.control.seal import new_secret
    from rl_safe_workers.ranks import trainer_ids
    from tests.hostile.checkpoints import wanted_state

    store = dist.HashStore()
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=0, world_size=1)
    loader = Loader(ControlPlane(store, world="training world", rank=0, members=trainer_ids([0]), secret=new_secret()))
    loader.load(wanted_state, Path(shards), timeout=timedelta(seconds=20))
    return 0


# Folders of checkpoints


def find(root: str) -> int:
    """Looks for checkpoints."""
    from rl_safe_workers.checkpoint.folders.manifest import find_checkpoints

    find_checkpoints(Path(root))
    return 0


def settle(root: str) -> int:
    """Tidies up after an interrupted save."""
    from rl_safe_workers.checkpoint.folders.retention import settle

    settle(Path(root))
    return 0


def prune(root: str, keep_last: str) -> int:
    """Removes old checkpoints."""
    from rl_safe_workers.checkpoint.folders.retention import prune

    prune(Path(root), keep_last=int(keep_last))
    return 0


def commit(root: str, step: str) -> int:
    """Saves a step."""
    save_step(Path(root), int(step), saved_at=2e9)
    return 0


def save_step(root: Path, step: int, *, saved_at: float) -> None:
    """Makes a checkpoint as a run does: a folder in progress, which is filled and then given its name."""
    from rl_safe_workers.checkpoint.folders.manifest import SHARDS, Manifest, step_dir
    from rl_safe_workers.checkpoint.folders.publish import pending_path
    from rl_safe_workers.checkpoint.folders.retention import commit, start_save
    from rl_safe_workers.checkpoint.format.archives import crc32_of

    start_save(root, step)
    pending = pending_path(step_dir(root, step))
    shard = pending / SHARDS / "__0_0.distcp"
    shard.write_bytes(b"bytes of ours")
    name = str(shard.relative_to(pending))
    files: dict[str, Any] = {name: {"bytes": shard.stat().st_size, "digest": crc32_of(shard)}}
    manifest = Manifest(
        step=step,
        model_fingerprint="0",
        layout={},
        saved_at=saved_at,
        versions={},
        files=files,
        driver_state={},
        digests={},
    )
    commit(pending, manifest)


def lock(path: str) -> int:
    """Takes and lets go the lock of a folder."""
    from rl_safe_workers.checkpoint.folders.lock import exclusive

    with exclusive(Path(path), timeout=timedelta(seconds=1), setting="rl_safe.timeouts.save"):
        return 0


def leftovers(temp: str) -> int:
    """Removes temporary folders of runs that are gone."""
    from rl_safe_workers.reaping.processes import remove_leftovers

    remove_leftovers(Path(temp))
    return 0


# Settings


def recipe(path: str, *overrides: str) -> int:
    """Does everything that a run does before it starts anything; what is accepted must survive a round trip."""
    from rl_safe_workers.driver.inputs.preflight import preflight
    from rl_safe_workers.recipe import load_recipe, to_yaml

    config = load_recipe(path, overrides)
    preflight(config, cpus=math.inf)
    again = Path(config.trainer.run_name or "").with_suffix(".again.yaml").name
    copy = Path("..") / "temp" / again
    copy.write_text(to_yaml(config))
    assert load_recipe(copy) == config, "an accepted recipe comes back as another"
    copy.unlink()
    return 0


# Data and models


def prompts(file: str) -> int:
    """Reads prompts; those that are accepted must be what their types say."""
    from rl_safe_workers.driver.inputs.data import PromptDataset

    dataset = PromptDataset([file])
    for row in range(len(dataset)):
        prompt = dataset[row]
        texts = [prompt.data_source, prompt.ground_truth]
        texts += [message[key] for message in prompt.messages for key in ("role", "content")]
        assert all(isinstance(text, str) for text in texts), f"an accepted prompt holds other than text: {prompt}"
    return 0


def shape(directory: str) -> int:
    """Reads a model's sizes, as the preflight does, and its fingerprint."""
    from rl_safe_workers.checkpoint.folders.manifest import model_fingerprint
    from rl_safe_workers.config import ModelConfig
    from rl_safe_workers.driver.inputs.preflight import read_model_shape

    found = read_model_shape(ModelConfig(path=directory))
    sizes = (found.num_layers, found.num_attention_heads, found.num_key_value_heads, found.vocab_size)
    assert all(type(size) is int and 0 < size < 2**40 for size in (*sizes, found.hidden_size)), f"accepted: {found}"
    assert type(found.num_experts) is int
    assert 0 <= found.num_experts < 2**40, f"accepted: {found}"
    model_fingerprint(directory)
    return 0


def weights(directory: str) -> int:
    """Reads every weight of a model that the preflight lets through."""
    from rl_safe_workers.models.hf_directory import read_hf_directory
    from rl_safe_workers.models.hf_reader import HfReader

    read_hf_directory(Path(directory))
    reader = HfReader(directory)
    for name in reader.dtypes():
        reader.load_one_hf_weight(name).sum()
    return 0


# The harness's own


def misdeed(name: str) -> int:
    """Does harm by itself; see `misdeeds`."""
    from tests.hostile import misdeeds

    return misdeeds.misdeed(name)


ENTRIES: dict[str, tuple[str, Entry]] = {
    "audit": ("pure", _command("audit")),
    "index": ("pure", index),
    "manifest": ("pure", manifest),
    "resume": ("arrow", resume),
    "common": ("torch", common),
    "load": ("torch", load),
    "find": ("pure", find),
    "settle": ("pure", settle),
    "prune": ("pure", prune),
    "commit": ("pure", commit),
    "lock": ("pure", lock),
    "leftovers": ("pure", leftovers),
    "recipe": ("pure", recipe),
    "plan": ("pure", _command("plan")),
    "prompts": ("arrow", prompts),
    "shape": ("pure", shape),
    "weights": ("torch", weights),
    "misdeed": ("pure", misdeed),
}
"""By name: the warm process that runs it, and what is called."""

WARM: dict[str, tuple[str, ...]] = {
    "pure": (
        "rl_safe_workers.cli.main",
        "rl_safe_workers.checkpoint.audit",
        "rl_safe_workers.checkpoint.folders.lock",
        "rl_safe_workers.checkpoint.folders.publish",
        "rl_safe_workers.driver.inputs.preflight",
        "rl_safe_workers.plan.as_json",
        "rl_safe_workers.plan.hazards",
        "rl_safe_workers.plan.plan",
        "rl_safe_workers.plan.sources",
        "rl_safe_workers.plan.tables",
        "rl_safe_workers.reaping.processes",
        "tests.hostile.misdeeds",
    ),
    "arrow": ("rl_safe_workers.cli.main", "rl_safe_workers.driver.inputs.data", "rl_safe_workers.driver.resume"),
    "torch": (
        "rl_safe_workers.cli.main",
        "rl_safe_workers.checkpoint.load.loader",
        "rl_safe_workers.models.hf_reader",
        "tests.hostile.checkpoints",
    ),
}
"""Modules that each warm process imports once."""
