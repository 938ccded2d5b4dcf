"""A reward that takes a while, so that something can happen meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

STRUCK = "RL_SAFE_TEST_STRUCK"
"""Names the file that tells the test that the reward is being computed; it holds the Unix time."""
PAUSE_S = 6.0


def reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    struck = Path(os.environ[STRUCK])
    if not struck.exists():
        struck.write_text(str(time.time()))
        time.sleep(PAUSE_S)
    return float(len(solution_str) % 2)
