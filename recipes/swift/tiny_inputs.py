"""Writes a tiny Qwen3-MoE and 64 short conversations into a folder: tiny_inputs.py FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
if not (folder / "tiny-moe").exists():
    create_seeded_model(folder / "tiny-moe", SeededModelConfig(), dtype="bfloat16")
turns = [(f"{i} + {i}", f"{2 * i}") for i in range(64)]
rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns]
(folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
