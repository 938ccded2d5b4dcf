"""The end of a wait for the run's store if the machine of its owner has lost its network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ALONE = ("unshare", "--user", "--map-root-user", "--net")
LOST_S = 3


def _may_have_a_network_of_its_own() -> bool:
    try:
        return subprocess.run([*ALONE, "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not _may_have_a_network_of_its_own(), reason="needs unshare, ip and user namespaces")
def test_a_wait_ends_when_the_network_of_the_stores_owner_is_lost() -> None:
    script = Path(__file__).with_name("lost_network.py")
    done = subprocess.run(
        [*ALONE, sys.executable, str(script), str(LOST_S)],
        env={**os.environ, "PYTHONPATH": str(script.parents[2])},
        capture_output=True,
        text=True,
        timeout=45,
    )
    assert done.returncode == 0, done.stderr
    seconds, _, text = done.stdout.strip().partition(" ")
    assert text == (
        "phase train: rank 1 of training world has lost the run's store: its owner, training rank 0, has ended, or its "
        "machine is gone"
    )
    assert float(seconds) < 4 * LOST_S
