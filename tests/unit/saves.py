"""Saves of one small shard, committed or not yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rl_safe_workers.checkpoint.folders.manifest import SHARDS, Manifest, file_sizes
from rl_safe_workers.checkpoint.folders.retention import commit, start_save


def written(root: Path, step: int, contents: str = "shard") -> tuple[Path, Manifest]:
    """A save whose shards are written and which is not committed yet."""
    start_save(root, step)
    pending = root / f"global_step_{step}.incomplete"
    (pending / SHARDS / "__0_0.distcp").write_text(contents)
    files = {name: {"bytes": size, "digest": "crc32:00000000"} for name, size in file_sizes(pending).items()}
    manifest = Manifest(
        step=step,
        model_fingerprint="abc",
        layout={"world_size": 4, "tensor": 1},
        saved_at=1000.0 + step,
        versions={"torch": "2.13.0"},
        files=files,
        driver_state={"position": step},
        digests={},
    )
    return pending, manifest


def saved(root: Path, step: int, *, at: float | None = None) -> Path:
    """A complete checkpoint."""
    pending, manifest = written(root, step)
    return commit(pending, manifest if at is None else replace(manifest, saved_at=at))
