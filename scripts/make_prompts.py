"""Makes recipes/data/char_class.parquet: short prompts that all ask for lowercase letters, in verl's layout.

One class for all prompts, so that a tiny random model learns within a few steps of GRPO: about a quarter of the
characters that it writes at first are lowercase letters.
"""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

OPENINGS = ("write", "give me", "only", "say", "more", "list", "type", "just")
WORDINGS = ("lowercase", "small letters", "a to z", "abc", "lower case", "letters a-z", "no capitals", "lowercase text")


def make_rows(seed: int) -> list[dict[str, Any]]:
    """Returns one row for each pair of opening and wording, in an order that depends on the seed."""
    pairs = list(itertools.product(OPENINGS, WORDINGS))
    random.Random(seed).shuffle(pairs)
    return [
        {
            "data_source": "char_class",
            "prompt": [{"role": "user", "content": f"{opening} {wording}"}],
            "ability": "format",
            "reward_model": {"style": "rule", "ground_truth": "lowercase"},
            "extra_info": {"split": "train", "index": index},
        }
        for index, (opening, wording) in enumerate(pairs)
    ]


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("recipes/data/char_class.parquet"))
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(make_rows(arguments.seed)), arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
