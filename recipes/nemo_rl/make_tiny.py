"""Makes the inputs of the recipes tiny*.yaml: a tiny seeded Qwen3-MoE, its tokenizer, and prompts.

    python recipes/nemo_rl/make_tiny.py FOLDER    # then: export RL_SAFE_TINY=FOLDER

The reward comes from NeMo RL's environment code_jaccard, which needs no network. It compares the words of the answer
with those of the solution. Here each character is a word, and the solution has all small letters.
"""

from __future__ import annotations

import argparse
import json
import string
from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import Tokenizer

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.models.seeded import create_seeded_model

PROMPTS = Path(__file__).resolve().parents[1] / "data" / "char_class.parquet"
MODEL = SeededModelConfig(hidden_size=256, head_dim=64, num_experts=8)
SOLUTION = " ".join(string.ascii_lowercase)
PASSES = 16
"""Number of times that each prompt is written. NeMo RL's asynchronous GRPO reads the data only once. If the data ends
too early, a resumed run of stock NeMo RL waits for ever."""


def make_tiny(folder: Path, model: SeededModelConfig = MODEL) -> None:
    """Writes ``folder/model`` and ``folder/train.jsonl``."""
    create_seeded_model(folder / "model", model, dtype="bfloat16")
    _decode_to_words(folder / "model" / "tokenizer.json")
    rows = pq.read_table(PROMPTS).column("prompt").to_pylist()
    lines = [json.dumps({"input": prompt[0]["content"], "output": SOLUTION}) for prompt in rows]
    (folder / "train.jsonl").write_text("\n".join(lines * PASSES) + "\n")


def _decode_to_words(path: Path) -> None:
    """Makes the tokenizer put spaces between the characters that it decodes."""
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.decoder = None
    tokenizer.save(str(path))


def main() -> None:
    """Writes the inputs into the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=SeededModelConfig.model_validate_json, default=MODEL, help="its sizes, as JSON")
    arguments = parser.parse_args()
    make_tiny(arguments.folder, arguments.model)


if __name__ == "__main__":
    main()
