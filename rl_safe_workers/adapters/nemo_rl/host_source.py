"""Reads a checkout of NeMo RL or of Megatron-Bridge and says what of the contract it lacks. Imports nothing of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rl_safe_workers.adapters.host_contract import HostName, HostText, lacking
from rl_safe_workers.adapters.nemo_rl.contract import NAMES, SINCE, UNTIL
from rl_safe_workers.errors import ConfigError


def check_host(root: Path, names: Iterable[HostName] = NAMES, texts: Iterable[HostText] = ()) -> None:
    """Refuses a NeMo RL that this adapter does not fit.

    Args:
        root: Its checkout, or the folder that holds its package.
        names: What it must have.
        texts: What it must do.

    Raises:
        ConfigError: Naming what it lacks.
    """
    if lacks := lacking(root, names, texts):
        raise ConfigError(
            f"the NeMo RL in {root} lacks {lacks}, which rl_safe_workers needs: use one from commit "
            f"{SINCE} to {UNTIL}, such as v0.6.0 or v0.7.0 (docs/nemo_rl.md), or run its own examples/run_grpo.py"
        )
