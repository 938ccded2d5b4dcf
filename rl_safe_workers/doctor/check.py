"""A check of the doctor: it gathers facts within a deadline, then judges them without looking at the machine again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rl_safe_workers.config import ClusterConfig, RunConfig
from rl_safe_workers.control.deadline import Deadline, DeadlineExceededError, run_bounded
from rl_safe_workers.findings import Finding
from rl_safe_workers.recipe import LOCAL_RAY, ray_address

T = TypeVar("T")

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The subject of an examination: this machine, for a run if there is a recipe.

    Example: ``Subject(recipe="recipes/quickstart.yaml", overrides=("trainer.seed=1",), config=config)``
    """

    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    config: RunConfig | None = None
    """The recipe's configuration; None to examine the machine for any run."""
    checkpoint_path: Path | None = None
    """Folder of checkpoints to examine instead of the recipe's."""

    @property
    def may_use_gpus(self) -> bool:
        """True if the run uses GPUs. Also True without a recipe, because any run may use them."""
        return self.config is None or self.config.cluster.device == "cuda"

    @property
    def needs_gpus(self) -> bool:
        """True if the run is known to use GPUs."""
        return self.config is not None and self.config.cluster.device == "cuda"

    @property
    def ray(self) -> str:
        """Ray's address: ``LOCAL_RAY``, ``auto`` or ``HOST:PORT``. Without a recipe, the address a job would use."""
        return ray_address(ClusterConfig() if self.config is None else self.config.cluster)

    @property
    def joins_cluster(self) -> bool:
        """True if the run joins a running Ray cluster, and so may have processes on other machines."""
        return self.config is not None and self.ray != LOCAL_RAY

    @property
    def gpus(self) -> int:
        """Number of GPUs that the run needs."""
        if self.config is None or not self.needs_gpus:
            return 0
        cluster = self.config.cluster
        return cluster.num_trainers + (0 if cluster.colocated else cluster.num_rollouts)

    @property
    def cpus(self) -> float:
        """Number of CPUs that the run requests from Ray."""
        if self.config is None:
            return 0.0
        cluster = self.config.cluster
        return cluster.num_trainers * cluster.cpus_per_trainer + cluster.num_rollouts * cluster.cpus_per_rollout

    @property
    def processes(self) -> int:
        """Number of trainers and rollout ranks."""
        return 0 if self.config is None else self.config.cluster.num_trainers + self.config.cluster.num_rollouts

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        named = None if self.config is None else self.config.trainer.default_local_dir
        return self.checkpoint_path or Path(named or "checkpoints")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A fact about the machine, without a judgement.

    Example: ``Fact(name="open files", value="20000, at most 20000")``
    """

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The facts and findings of a check.

    Example: ``Report(facts=(Fact(name="GPUs", value="none"),))``
    """

    facts: tuple[Fact, ...] = ()
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Check(Generic[T]):
    """A check: a function that gathers facts, and a function that judges them.

    Example: ``Check(name="shared memory", deadline_s=5, gather=look, judge=judge)``
    """

    name: str
    deadline_s: float
    gather: Callable[[Subject], T]
    """Looks at the machine. If it raises, the error is the reported reason why the check was not made."""
    judge: Callable[[T, Subject], Report]
    """Judges the gathered facts, and looks at nothing else."""

    def run(self, subject: Subject) -> Report:
        """Gathers facts within the deadline, and returns their judgement. If it cannot, the report says why."""
        try:
            # A thread that hangs in the kernel, e.g. on a dead network file system, is left behind.
            found = run_bounded(
                lambda: self.gather(subject), Deadline.after(self.deadline_s), name=f"check {self.name}"
            )
        except DeadlineExceededError:
            return self.not_made(f"no answer within {self.deadline_s:g} s")
        except Exception as error:  # the report names the error, and the other checks go on
            return self.not_made(f"{type(error).__name__}: {error}")
        return self.judge(found, subject)

    def not_made(self, reason: str) -> Report:
        """Returns the report of a check that was not made."""
        return Report(facts=(Fact(name=self.name, value=f"not checked: {' '.join(reason.split())}"),))
