"""A fault in verl's whole PPO job on this machine: two trainers at EP2, two rollout engines without a model."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.diagnosis.host import ROOT, Fault, Seen, deadline_s, ended, told, variables

STEPS = 2
TIMED = frozenset({"bootstrap", "train", "save", "load", "sync", "rollout", "logprob", "teardown"})
"""Phases whose deadline is short where a fault strikes."""


def run(fault: Fault, folder: Path) -> Seen:
    """Runs verl's quickstart recipe until the fault has ended it; the last lines of the output are the verdict."""
    environment = {**variables(fault, folder), "DEVICE": "cpu", "PYTHON": sys.executable}
    if fault.phase == "load":
        saving = {**environment, **variables(Fault("", ""), folder)}
        ended(command(folder, "trainer.total_training_steps=1", "trainer.save_freq=1"), saving, folder, strikes=False)
    limit_s = deadline_s(fault, is_verl=True)
    phases = {fault.phase, "logprob"} & TIMED
    limits = [f"actor_rollout_ref.rl_safe.timeouts.{phase}={limit_s}" for phase in sorted(phases)]
    status, output, after_s = ended(command(folder, *limits), environment, folder)
    verdict = told(output, r"^rl_safe: (.*)$")
    if not any(verdict):  # verl goes on, and its driver has logged what has failed
        verdict = (told(output, r"^\S*\(SafeTaskRunner .*:rl_safe: (.*)$")[0], "", "")
    return Seen(*verdict, after_s, output, status)


def command(folder: Path, *overrides: str) -> list[str]:
    """Returns the command line of verl's quickstart recipe with engines without a model, in a folder."""
    return [
        *("bash", str(ROOT / "recipes/verl/quickstart.sh")),
        "actor_rollout_ref.model.external_lib=tests.verl.echo_rollout",
        "actor_rollout_ref.rollout.free_cache_engine=true",
        *("actor_rollout_ref.rollout.agent.num_workers=1", "reward.num_workers=1", "data.dataloader_num_workers=0"),
        *(f"trainer.default_local_dir={folder}/checkpoints", f"hydra.run.dir={folder}/hydra"),
        *(f"trainer.total_training_steps={STEPS}", f"trainer.save_freq={STEPS}"),
        *overrides,
    ]
