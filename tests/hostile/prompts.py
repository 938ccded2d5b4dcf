"""Good prompts, and tables that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = [
    {
        "data_source": "char_class",
        "prompt": [{"role": "user", "content": f"abc{number}"}],
        "reward_model": {"style": "rule", "ground_truth": "lowercase"},
        "extra_info": {"split": "train", "index": number},
    }
    for number in range(4)
]


def put_prompts(path: Path, rows: list[dict[str, Any]] | None = None, **options: Any) -> None:
    """Writes a parquet file; the good one unless rows are given."""
    pq.write_table(pa.Table.from_pylist(ROWS if rows is None else rows), path, **options)
