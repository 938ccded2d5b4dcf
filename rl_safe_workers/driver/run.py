"""Runs the main job: GRPO over Ray, from start to a coordinated exit."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from rl_safe_workers import env
from rl_safe_workers.checkpoint.folders.claim import RUN_LOCK, claimed
from rl_safe_workers.checkpoint.folders.manifest import complete_checkpoints, last_serial
from rl_safe_workers.config import RunConfig, SeededModelConfig
from rl_safe_workers.control.deadline import attempt
from rl_safe_workers.driver.cluster.cluster import Cluster
from rl_safe_workers.driver.cluster.interrupts import SLICE_S, Interrupts
from rl_safe_workers.driver.engines import Engines
from rl_safe_workers.driver.grpo import GrpoLoop
from rl_safe_workers.driver.inputs.data import PromptDataset, PromptLoader
from rl_safe_workers.driver.inputs.preflight import layout_of
from rl_safe_workers.driver.inputs.prompt_lengths import check_prompt_lengths
from rl_safe_workers.driver.inputs.rewards import resolve_reward
from rl_safe_workers.driver.outputs import metrics as names
from rl_safe_workers.driver.outputs.console import GIB, RunConsole
from rl_safe_workers.driver.outputs.engine_gauges import EngineGauges
from rl_safe_workers.driver.outputs.ledger import (
    export_ledger,
    late_metrics,
    ledger_metrics,
    ledger_table,
    write_ledger,
)
from rl_safe_workers.driver.outputs.metrics import MetricsLog, PhaseTotal
from rl_safe_workers.driver.outputs.phase_trace import write_trace
from rl_safe_workers.driver.outputs.process_memory import MemorySampler
from rl_safe_workers.driver.outputs.run_report import write_report
from rl_safe_workers.driver.resume import (
    ResumePoint,
    check_resume_point,
    check_save_places,
    data_position,
    find_resume_point,
    newest_since,
)
from rl_safe_workers.driver.session import Session
from rl_safe_workers.errors import (
    Awaited,
    ConfigError,
    ModelError,
    PhaseTimeoutError,
    RankError,
    ResourceError,
    RunError,
    UsageError,
)
from rl_safe_workers.foreign_files import printable
from rl_safe_workers.lifecycle import Phase, PhaseEvent
from rl_safe_workers.own_process import module_command
from rl_safe_workers.recipe import to_yaml
from rl_safe_workers.rollout.cuts import engine_ranks, plan_in_words, plan_parts
from rl_safe_workers.rollout.engine_fleet import EngineLoss
from rl_safe_workers.topology.layout import ModelShape
from rl_safe_workers.versions import installed_versions

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=BaseException)


def run(config: RunConfig, *, when_failed: Callable[[], object] = lambda: None) -> None:
    """Runs a whole training job. Leaves no process behind, also after a failure.

    Writes to ``<output_dir>/<run_name>/``: ``config.yaml``, ``metrics.jsonl``, ``comms.json``, ``report.html``,
    ``trace.json``, on GPUs ``device_memory.jsonl``, and after a failure Ray's logs.

    Args:
        config: A configuration that passed `preflight`.
        when_failed: Called after a failure, once all processes of the run have ended. Only the report is left to do.

    Raises:
        UsageError: If the input is wrong. Nothing has been started or written then.
        RunError: If a phase fails or the run is interrupted.
    """
    config = with_absolute_paths(config)
    # Other users of the machine must not be able to write any file of the run.
    os.umask(os.umask(0o077) | stat.S_IWOTH)
    dataset = PromptDataset(config.data.train_files)
    check_prompt_lengths(dataset, Path(config.model.path), most=config.data.max_prompt_length)
    console = RunConsole(None if "console" in config.trainer.logger else Console(quiet=True))
    # All checks run before a folder is made, and again when no other run can change the folders.
    if _is_complete(_starting_point(config, is_claimed=False), config, console):
        return
    with claimed(folders_of(config)):
        resume = _starting_point(config, is_claimed=True)
        if not _is_complete(resume, config, console):
            Job(config, console, dataset, resume, when_failed).run()


def _starting_point(config: RunConfig, *, is_claimed: bool) -> ResumePoint | None:
    """Returns the checkpoint that the run starts from; None for a start from the HF weights. Writes nothing.

    Raises:
        ConfigError: If files of others are in the way, or if the run's folder is in use.
        CheckpointError: As `find_resume_point`.
    """
    resume = find_resume_point(config.trainer, Path(config.model.path))
    check_save_places(config.trainer, resume)
    folder = run_folder(config)
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    # A folder with a lock is not refused here: claiming it will show if the lock's run is still alive.
    if (is_claimed or RUN_LOCK not in present) and (others := sorted(present - {RUN_LOCK})):
        raise ConfigError(
            f"trainer.run_name: the folder {folder} is in use, it holds {printable(others[0])}; choose another name"
        )
    return resume


def _is_complete(resume: ResumePoint | None, config: RunConfig, console: RunConsole) -> bool:
    """Returns True, and prints a line, if the checkpoint is already at the run's last step."""
    total = config.trainer.total_training_steps
    if resume is None or resume.manifest.step < total:
        return False
    where = f"{resume.path} is at step {resume.manifest.step} of {total}"
    console.header({"nothing to do": f"{where}; raise trainer.total_training_steps to go on"})
    return True


def _loader_at(config: RunConfig, dataset: PromptDataset, resume: ResumePoint | None) -> PromptLoader:
    """Returns a loader that continues after a checkpoint; without a checkpoint it starts at the first prompt."""
    loader = PromptLoader(
        dataset, batch_size=config.data.train_batch_size, shuffle=config.data.shuffle, seed=config.trainer.seed
    )
    if resume is not None:
        loader.load_state_dict(data_position(resume))
    return loader


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Returns a copy in which ``model.path`` and ``trainer.default_local_dir`` are absolute."""
    absolute = deepcopy(config)
    absolute.model.path = str(Path(config.model.path).absolute())
    checkpoints = config.trainer.default_local_dir or f"checkpoints/{config.trainer.run_name}"
    absolute.trainer.default_local_dir = str(Path(checkpoints).absolute())
    return absolute


def describe_checkpoints(config: RunConfig, *, resumes: bool) -> str:
    """Returns a line about the folder for checkpoints, and about the checkpoints of earlier runs in it."""
    root = config.trainer.default_local_dir
    if config.trainer.save_freq < 1:
        return "none: trainer.save_freq is -1"
    present = 0 if resumes else len(complete_checkpoints(Path(root or "")))
    older = f"; new saves may remove {present} of an earlier run; to resume from them set trainer.resume_mode=auto"
    return f"{root}{older if present else ''}"


def run_folder(config: RunConfig) -> Path:
    """Returns the folder for all files of a run except checkpoints."""
    return Path(config.trainer.output_dir) / str(config.trainer.run_name)


def folders_of(config: RunConfig) -> dict[str, Path]:
    """Returns the folders that a run writes to, by the configuration key of each.

    Args:
        config: Configuration of the run, with absolute paths.
    """
    trainer = config.trainer
    folders = {"trainer.run_name": run_folder(config)}
    if trainer.save_freq > 0:
        folders = {"trainer.default_local_dir": Path(str(trainer.default_local_dir)), **folders}
    return folders


class Job:
    """One run: owns its parts and its folder, and restarts it after failures if the configuration allows."""

    def __init__(
        self,
        config: RunConfig,
        console: RunConsole,
        dataset: PromptDataset,
        resume: ResumePoint | None,
        when_failed: Callable[[], object],
    ) -> None:
        """Stores its parts. Starts and writes nothing."""
        self._when_failed = when_failed
        self._config, self._console, self._dataset, self._resume = config, console, dataset, resume
        self._loader = _loader_at(config, dataset, resume)
        self._run_dir = run_folder(config)
        self._layout = layout_of(config)
        self._checkpoints = describe_checkpoints(config, resumes=resume is not None)
        self._interrupts = Interrupts()
        self._events: list[PhaseEvent] = []
        self._totals: dict[str, PhaseTotal] = {}
        self._losses: list[EngineLoss] = []
        self._open()
        self._memory = MemorySampler()
        self._started_s = time.monotonic()
        # A restart may resume from any checkpoint with a larger serial. Not a time, because the clock may jump.
        self._last_serial = last_serial(Path(config.trainer.default_local_dir or ""))

    def _open(self, *, again: bool = False) -> None:
        """Makes a new cluster and session for an attempt. All attempts share one record of events."""
        self._run_id = uuid.uuid4().hex[:12]
        self._cluster = Cluster(self._config, run_id=self._run_id, interrupts=self._interrupts, waits_for_nodes=again)
        self._session = Session(self._config, self._cluster, self._console, self._interrupts)
        self._session.events, self._session.totals = self._events, self._totals
        self._engines = Engines(self._config, self._session, self._cluster, self._console, losses=self._losses)

    def run(self) -> None:
        """Sets up, trains, saves and tears down; writes the report in every case. The folders must be claimed."""
        with self._writing():
            (self._run_dir / "config.yaml").write_text(to_yaml(self._config), encoding="utf-8")
        self._console.header(self._description())
        with ExitStack() as stack:
            log = stack.enter_context(
                MetricsLog(self._run_dir, tensorboard="tensorboard" in self._config.trainer.logger)
            )
            stack.enter_context(self._memory)
            # Signals are recorded until all processes have ended, so that a second Ctrl-C does not stop the cleanup.
            stack.enter_context(self._interrupts.listening())
            try:
                self._attempt(log)
            except BaseException as error:
                if isinstance(error, UsageError):
                    # Exit code 2 promises that nothing was started or written.
                    error.exit_code = RunError.exit_code
                blamed = self._keep_evidence(error, self._run_dir)
                self._end(log, blamed)
                if blamed is not error:
                    raise blamed from error
                raise
            self._end(log, None)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Converts an OSError in the body to a RunError that names the run's folder."""
        try:
            yield
        except OSError as error:
            failure = RunError(
                f"{self._run_dir} cannot be written: {error}; free some space on its disk, or change trainer.output_dir"
            )
            failure.is_retryable = False
            raise failure from error

    def _attempt(self, log: MetricsLog) -> None:
        """Trains to the end. After a failure it restarts, at most ``rl_safe.restarts`` times."""
        allowed, last = self._config.rl_safe.restarts, None
        for number in range(1, allowed + 1):
            try:
                self._train_again(log, last)
                return
            except RunError as error:
                if not error.is_retryable:
                    raise
                last = self._keep_evidence(error, self._run_dir / f"attempt_{number}")
                self._take_down()
                self._interrupts.check()
                self._go_back(log)
                start = "the beginning" if self._resume is None else str(self._resume.path)
                self._console.warn(f"restart {number} of {allowed}, from {start}, after: {last}")
                if self._resume is not None and self._resume.manifest.step >= self._config.trainer.total_training_steps:
                    return
        self._train_again(log, last)

    def _train_again(self, log: MetricsLog, last: RunError | None) -> None:
        """Trains once. If a restart finds too few resources, the error names the failure before it, too."""
        try:
            self._train(log)
        except ResourceError as error:
            if last is None:
                raise
            raise RunError(f"{error}; to be started again after: {last}") from error

    def _go_back(self, log: MetricsLog) -> None:
        """Prepares a restart from the newest complete checkpoint of this run, or from the run's own start."""
        root = Path(self._config.trainer.default_local_dir or "")

        def go_back() -> ResumePoint | None:
            found = newest_since(root, self._last_serial) or self._resume
            log.forget_after(0 if found is None else found.manifest.step)
            return found

        # Within a timeout, because the storage may be the cause of the failure.
        self._resume = self._session.within(Phase.START, go_back)
        self._loader = _loader_at(self._config, self._dataset, self._resume)
        self._open(again=True)

    def _train(self, log: MetricsLog) -> None:
        if self._config.model.create is not None and not Path(self._config.model.path).exists():
            with self._console.phase("model", self._config.rl_safe.timeouts.start):
                self._cluster.guard()
                create_model(self._config, self._config.model.create, self._run_id, self._interrupts)
            if self._resume is not None:
                check_resume_point(self._resume, Path(self._config.model.path))
        self._session.set_up()
        self._report_bootstrap()
        loop = GrpoLoop(
            self._config,
            self._session,
            self._engines,
            layout=self._layout,
            loader=self._loader,
            reward=resolve_reward(self._config.reward.function),
            on_phase=self._console.step_phase,
        )
        first = self._restore()
        self._engines.join()
        self._report_weights()
        if first > 0:
            loop.sync_weights()
        total, gauges = self._config.trainer.total_training_steps, EngineGauges()
        with self._console.steps(total, first):
            for step in range(first + 1, total + 1):
                metrics = loop.step(step) | self._comms_metrics(step - first)
                metrics[names.PEAK_MEMORY_GIB] = self._memory.peak_bytes / GIB
                with self._writing():
                    log.log(step, metrics)
                self._console.step_done(step, metrics)
                gauges.set(lost=len(self._losses), serving=len(self._engines.fleet.serving))
                self._maybe_save(step)
        self._engines.end_starting()
        disagreed = self._session.teardown()
        if disagreed:
            raise RunError("; ".join(f"training rank {rank} at teardown: {text}" for rank, text in disagreed.items()))

    def _report_weights(self) -> None:
        """Prints what each weight sync sends to the ranks of an engine."""
        heads = ModelShape.of_model(self._config.model.path).num_key_value_heads
        ranks = engine_ranks(self._config.rollout.tensor_model_parallel_size, heads)
        planned = plan_parts(self._session.specs, ranks, bucket_bytes=self._config.rollout.bucket_bytes)
        self._console.header({"weight sync": plan_in_words(planned)})

    def _report_bootstrap(self) -> None:
        ledgers = self._session.ledgers
        with self._writing():
            write_ledger(self._run_dir / "comms.json", ledgers)
        export_ledger(ledgers)
        if ledgers[0].bytes is not None:
            self._console.console.print(ledger_table(ledgers[0]))

    def _comms_metrics(self, steps: int) -> dict[str, float]:
        """Returns metrics of the communicators: the bootstrap's cost, and late allocations when the watch has ended.

        Args:
            steps: Number of steps since the start of the attempt, this one included.
        """
        found = ledger_metrics(self._session.ledgers) if steps == 1 else {}
        if steps == max(1, self._config.rl_safe.bootstrap.watch_steps):
            late = self._session.late_allocations()
            found |= late_metrics(late)
            for rank, of_rank in enumerate(late):
                self._console.warn(*(f"training rank {rank}: the bootstrap has missed {item}" for item in of_rank))
        return found

    def _restore(self) -> int:
        if self._resume is None:
            return 0
        self._session.load(str(self._resume.path.absolute()), asdict(self._layout))
        return self._resume.manifest.step

    def _maybe_save(self, step: int) -> None:
        trainer = self._config.trainer
        if trainer.save_freq > 0 and (step % trainer.save_freq == 0 or step == trainer.total_training_steps):
            self._session.save(step, asdict(self._layout), {"data": self._loader.state_dict()})

    def _keep_evidence(self, failure: E, folder: Path) -> E | PhaseTimeoutError | RankError:
        return self._cluster.keep_evidence(failure, folder, patience_s=self._config.rl_safe.teardown.kill_after_s)

    def _end(self, log: MetricsLog, failure: BaseException | None) -> None:
        patience_s = self._config.rl_safe.teardown.kill_after_s
        self._take_down()
        if failure is not None:
            self._when_failed()
        wall_s = time.monotonic() - self._started_s
        attempt("writing device memory", self._write_device_memory, timeout_s=patience_s)
        trace = self._run_dir / "trace.json"
        attempt("writing the trace", lambda: write_trace(trace, self._session.events), timeout_s=patience_s)
        attempt("writing the report", lambda: self._write_report(log, failure, wall_s), timeout_s=patience_s)
        # Last, because nobody may read stdout.
        self._console.summary(self._session.totals, wall_s, self._memory.peak_bytes, self._run_dir)

    def _take_down(self) -> None:
        """Ends all processes of an attempt."""
        patience_s = self._config.rl_safe.teardown.kill_after_s
        attempt("reading memory", self._memory.sample, timeout_s=patience_s)
        self._cluster.close(kill_after_s=patience_s)

    def _write_device_memory(self) -> None:
        """Writes each rank's GPU memory at the end of each phase, one JSON object per line. Writes nothing on a CPU."""
        lines = [
            json.dumps(
                {"phase": e.phase, "role": e.role, "rank": e.rank, "end_s": e.end_s, "bytes": {**e.device_bytes}}
            )
            for e in self._session.events
            if e.device_bytes
        ]
        if lines:
            (self._run_dir / "device_memory.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _write_report(self, log: MetricsLog, failure: BaseException | None, wall_s: float) -> None:
        summary = {**self._description(), "wall": f"{wall_s:.1f} s"}
        summary["peak memory, all processes"] = f"{self._memory.peak_bytes / GIB:.2f} GiB"
        if self._losses:
            summary["engines lost and replaced"] = "; ".join(map(str, self._losses))
        summary["result"] = "complete" if failure is None else f"failed: {str(failure) or type(failure).__name__}"
        write_report(
            self._run_dir / "report.html",
            title=self._run_dir.name,
            config_yaml=to_yaml(self._config),
            metrics=log.records,
            events=self._session.events,
            summary=summary,
            logprob_bound=self._config.rollout.max_logprob_gap,
        )

    def _description(self) -> dict[str, str]:
        layout, trainer, rollouts = self._layout, self._config.trainer, self._config.cluster.num_rollouts
        ranks, name = self._config.rollout.tensor_model_parallel_size, self._config.rollout.name
        start = "HF weights" if self._resume is None else f"{self._resume.path} (step {self._resume.manifest.step})"
        return {
            "run": str(self._run_dir),
            "model": self._config.model.path,
            "start": start,
            "checkpoints": self._checkpoints,
            "trainers": f"{layout.world_size}: TP{layout.tensor} PP{layout.pipeline} EP{layout.expert} "
            f"ETP{layout.expert_tensor}, data-parallel {layout.data}, expert-data-parallel {layout.expert_data}",
            "rollouts": f"{rollouts} {name}" if ranks == 1 else f"{rollouts // ranks} {name}, each TP{ranks}",
            "steps": f"{trainer.total_training_steps}, seed {trainer.seed}",
            "versions": ", ".join(f"{name} {version}" for name, version in installed_versions().items()),
        }


def create_model(config: RunConfig, spec: SeededModelConfig, run_id: str, interrupts: Interrupts) -> None:
    """Makes the seeded model at ``model.path``.

    Uses a child process, because this needs torch and transformers, which the driver does not import.

    Raises:
        ModelError: If the model cannot be made.
        PhaseTimeoutError: If it takes longer than ``rl_safe.timeouts.start``.
        Interrupted: On a signal.
    """
    timeout_s = config.rl_safe.timeouts.start
    arguments = [config.model.path, spec.model_dump_json(), config.model.dtype]
    process = subprocess.Popen(
        module_command("rl_safe_workers.models.seeded", *arguments),
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=env.marked(run_id),
        start_new_session=True,  # Ctrl-C in a terminal must reach only this process, which passes it on
    )
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None:
            interrupts.check()
            if time.monotonic() > deadline:
                raise PhaseTimeoutError(
                    phase=Phase.START,
                    awaited=Awaited("the making of the model"),
                    waited_s=timeout_s,
                    setting="rl_safe.timeouts.start",
                )
            time.sleep(SLICE_S)
    finally:
        # As with Ctrl-C, so that the child removes its half-made directory. A child that has ended ignores it.
        process.send_signal(signal.SIGINT)
        attempt("ending the making of the model", process.wait, timeout_s=config.rl_safe.teardown.kill_after_s)
        process.kill()
        _, complaint = process.communicate()
    if process.returncode != 0:
        reason = (complaint.strip().splitlines() or ["no reason given"])[-1]
        raise ModelError(f"model.create: the model at {config.model.path} could not be made: {reason}")
