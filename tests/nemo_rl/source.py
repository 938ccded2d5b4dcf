"""The checkout of NeMo RL that these tests read, named by NEMO_RL_SRC."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SOURCE = os.environ.get("NEMO_RL_SRC", "")
REASON = "NEMO_RL_SRC names no checkout of NeMo RL; PyPI's nemo-rl is a placeholder"
needs_source = pytest.mark.skipif(not (Path(SOURCE) / "nemo_rl").is_dir(), reason=REASON)
