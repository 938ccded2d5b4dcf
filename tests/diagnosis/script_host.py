"""A fault in a Megatron script of four ranks under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.diagnosis.host import ROOT, Fault, Seen, ended, told, variables


def run(fault: Fault, folder: Path) -> Seen:
    """Runs the script until the fault has ended it; its root cause is the line that the ranks log."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *(str(ROOT / "tests/diagnosis/script.py"), str(folder)),
    ]
    status, output, after_s = ended(command, variables(fault, folder), folder)
    return Seen(*told(output, r"(?:rank \d+: )?the script has failed on (.*)$"), after_s, output, status)
