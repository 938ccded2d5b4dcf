"""A fault in a job of NeMo RL's own worker groups: two trainers at EP2, one engine without a model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.diagnosis.host import TIMEOUT_S, Fault, Seen, ended, told, variables
from tests.nemo_rl.source import SOURCE


def run(fault: Fault, folder: Path) -> Seen:
    """Runs the job until the fault has ended it; its root cause is the error that Python prints last."""
    environment = variables(fault, folder)
    environment["PYTHONPATH"] = os.pathsep.join((environment["PYTHONPATH"], SOURCE))
    command = [sys.executable, "-m", "tests.diagnosis.nemo_rl_job", str(folder), fault.phase, str(TIMEOUT_S)]
    status, output, after_s = ended(command, {**environment, "RAY_USAGE_STATS_ENABLED": "0"}, folder)
    return Seen(*told(output, r"^rl_safe_workers\.errors\.\w+: (.*)$"), after_s, output, status)
