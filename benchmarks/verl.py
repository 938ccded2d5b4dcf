"""Compares verl's own job with its engines and with ours, on two GPUs: steps, memory, saves, resumes, faults, phases.

Needs verl, its vLLM, Megatron-Bridge and Transformer Engine in this Python; ``scripts/gpu_parts`` packs them.
`PARTS` says which parts run side by side. After `SECONDS`, or at Ctrl-C, it ends all jobs. The table then has the
figures that were measured before. With ``RL_SAFE_BENCH_DEVICE=cpu``, the parts without vLLM run on CPU, to try the
benchmark.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import host_meter, verl_bare_steps, verl_glue
from benchmarks.gpus import count_gpus, gpu_row
from benchmarks.host_jobs import Job, on_one_numa_node
from benchmarks.script import median_and_interval, median_with_bounds
from benchmarks.table import Goal, Row, at_least, at_most
from benchmarks.verl_faults import ENGINE_FAULTS, FAULTS, faults
from benchmarks.verl_jobs import (
    ACTOR,
    GIVING,
    MIB,
    ON_CPU,
    OURS,
    PLUGIN,
    ROOT,
    STOCK,
    UNCOMPILED,
    WITHOUT_VLLM,
    Jobs,
    Wanted,
    checkpoints_of,
    memory_of,
    metrics_of,
    slowest,
)
from rl_safe_workers.errors import ResourceError

PARTS = os.environ.get(
    "RL_SAFE_BENCH_PARTS",
    "steps+saves;resumes;faults" + ("" if ON_CPU else "+variants+proofs;engine_faults;packed") + ";phases",
)
"""The parts to run, one after another. Parts joined by a plus run side by side. `resumes` must come after `saves`."""
SECONDS = float(os.environ.get("RL_SAFE_BENCH_SECONDS", "3600"))
"""Seconds after which all jobs are ended."""
MBRIDGE = "RL_SAFE_BENCH_MBRIDGE_SITE"
"""Environment variable: a folder with megatron-core 0.16.1, which mbridge supports. Without it, mbridge is left out."""
STEPS, LEFT_OUT = (8, 3) if ON_CPU else (20, 3)
PAIRS, PAIRS_LEFT_OUT = (60, 4) if ON_CPU else (30, 4)
"""Number of pairs of a step with phases and a bare step, and number of first pairs that do not count."""
_ENGINES: Mapping[str, Sequence[str]] = {
    "engines of one GPU": (),
    "a tensor-parallel engine": ("actor_rollout_ref.rollout.tensor_model_parallel_size=2",),
    "a tensor- and expert-parallel engine": (
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.expert_parallel_size=2",
    ),
}
"""Overrides of verl's configuration by kind of engine. All have as many GPUs in all."""
SAVED_STEPS, RESUMED_STEPS, PACKED_STEPS = 3, 2, 8
_PACKED = "actor_rollout_ref.rl_safe.packed_sync=true"
QUIET_WITHIN_S = 300.0
"""Seconds that steps wait for the end of the parts beside them."""
RELATIVE = 0.0 if ON_CPU else 1e-6
"""Largest relative difference of losses and norms of equal states. Some GPU kernels add in any order."""
TRAINED_RELATIVE = 0.0 if ON_CPU else 1e-2
"""The same after some steps, because updates accumulate the differences."""
_AT_ONCE, _RESPONSE_TOKENS = 4 if ON_CPU else 8, 2048
"""Samples of a microbatch, and tokens of each answer: some 16,000 tokens at a time, see `WIDE_MODEL`."""
_FIXED_LENGTHS = (
    "data.train_batch_size=16",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu={_AT_ONCE}",
    "actor_rollout_ref.rollout.n=4",
    f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={_AT_ONCE}",
    *(
        ()
        if ON_CPU
        else (
            f"data.max_response_length={_RESPONSE_TOKENS}",
            f"+actor_rollout_ref.rollout.custom.tokens={_RESPONSE_TOKENS}",
            # Copies to the host and back are part of an update, and their time varies.
            f"{ACTOR}.megatron.param_offload=false",
            f"{ACTOR}.megatron.optimizer_offload=false",
            # A longer update varies less.
            f"{ACTOR}.ppo_epochs=4",
        )
    ),
)
_LEARNING = (
    # All answers to a prompt are equal, so advantages within a group would be 0. With whitened advantages, the loss has
    # only the entropy's part.
    "algorithm.adv_estimator=reinforce_plus_plus",
    f"{ACTOR}.entropy_coeff=0.1",
    f"{ACTOR}.optim.lr=1e-3",
    "data.shuffle=false",
)
_EQUAL_WORK = f"{ACTOR}.optim.lr=1e-6"
"""An override of timed steps, after `_LEARNING`. Both jobs must send as many tokens to each expert, so their weights
must stay nearly equal. With 1e-3 they soon differ, because GPU kernels add in any order."""
_SAVING = (
    *_LEARNING,
    *WITHOUT_VLLM,
    f"{ACTOR}.megatron.dist_ckpt_optim_fully_reshardable=true",
)
"""Overrides of jobs that save and that resume at another layout. verl's other format cannot be resharded."""


def measure(report: Callable[[str], None]) -> list[Row]:
    """Runs verl's jobs.

    Args:
        report: Takes a line of progress after each job and part.

    Raises:
        ResourceError: If there are fewer than two GPUs. One is enough for `packed` alone.
    """
    if not ON_CPU and count_gpus() < (1 if PARTS == "packed" else 2):
        raise ResourceError("bench verl: needs two GPUs")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="rl_safe_verl_", ignore_cleanup_errors=True) as name:
        jobs = Jobs(Path(name), report)
        with _stopped_in_time(jobs):
            for side_by_side in PARTS.split(";"):
                rows += measure_together(side_by_side.split("+"), jobs)
        jobs.clean()
    return rows


@contextmanager
def _stopped_in_time(jobs: Jobs) -> Iterator[None]:
    """Stops the jobs after `SECONDS`, at SIGINT, and at SIGTERM."""
    timer = threading.Timer(SECONDS, jobs.stop)
    timer.daemon = True
    timer.start()
    before = {number: signal.signal(number, lambda *_: jobs.stop()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def measure_together(names: Sequence[str], jobs: Jobs) -> list[Row]:
    """Measures parts side by side. `steps` are timed only after the other parts have ended."""
    jobs.is_quiet.clear()
    with ThreadPoolExecutor(len(names)) as pool:
        found = {name: pool.submit(_PARTS[name], jobs) for name in names}
        for name in sorted(names, key=lambda name: name == "steps"):
            if name == "steps":
                jobs.is_quiet.set()
            failure = found[name].exception()
            jobs.report(f"{name}: {'done' if failure is None else repr(failure)}")
    rows = []
    for name in names:
        failed = found[name].exception() is not None
        rows += [row(f"part {name}: failed", "", failed, at_most(0))] if failed else found[name].result()
    return rows


def steps(jobs: Jobs) -> list[Row]:
    """Times our steps and stock's in turns, and measures the memory that each process takes outside of torch."""
    turns = jobs.folder / "turns"
    turns.mkdir()
    overrides = [
        *_FIXED_LENGTHS,
        *_LEARNING,
        _EQUAL_WORK,
        *WITHOUT_VLLM,
        f"trainer.total_training_steps={STEPS}",
        f"trainer.save_freq={STEPS}",
    ]
    wanted = [
        Wanted(
            name=f"{who} steps",
            who=who,
            overrides=overrides,
            model="wide_moe",
            variables={host_meter.TURNS: f"{turns}:{who}:{other}"},
        )
        for who, other in ((STOCK, OURS), (OURS, STOCK))
    ]
    with on_one_numa_node() as cpus, ThreadPoolExecutor(1) as pool:
        jobs.report(f"both jobs run on the same {cpus} CPUs")
        with host_meter.no_turns(turns):
            running = pool.submit(jobs.run, wanted)
            jobs.is_quiet.wait(QUIET_WITHIN_S)
        done = running.result()
    found = {who: done.get(f"{who} steps") for who in (STOCK, OURS)}
    rows = _exit_rows(wanted, done)
    # A sync into test engines says little, so its ratio has no goal. Neither has that of a net update: in some updates
    # of both jobs, a garbage collection of all objects takes as long as half an update.
    for name, label, net, bound in (
        ("update_actor", "actor update", False, 1.03),
        ("update_actor", "actor update without garbage collection", True, 9e9),
        ("update_weights", "weight sync", False, 9e9),
    ):
        of_both = [slowest(found[who], name, net=net)[LEFT_OUT:] for who in (OURS, STOCK)]
        rows += paired_rows(label, *of_both, goal=at_most(bound))
    for who in (STOCK, OURS):
        taken, net_s = (slowest(found[who], "update_actor", net=net) for net in (False, True))
        jobs.report(f"{who}: updates {_rounded(taken)}, without garbage collection {_rounded(net_s)}")
    rows += _memory_rows(jobs, found[OURS], found[STOCK])
    rows.append(row("late collectives", "", _late(found[OURS]), at_most(0)))
    rows.append(
        row("save", "s", _median(found[OURS], "save_checkpoint"), at_most(1), _median(found[STOCK], "save_checkpoint"))
    )
    return rows


def paired_rows(label: str, ours: Sequence[float], stock: Sequence[float], *, goal: Goal) -> list[Row]:
    """Returns rows for steps in turns: the number of steps that both have, and their ratio with its interval."""
    count = min(len(ours), len(stock))
    rows = [row(f"{label}: steps of both, the first {LEFT_OUT} left out", "", count, at_least(STEPS - LEFT_OUT))]
    if not count:
        return rows
    bounds = median_with_bounds([a / b for a, b in zip(ours[:count], stock[:count], strict=True)])
    return [
        *rows,
        row(f"{label}: median of the steps' ratios", "", bounds["step_ratio"], goal),
        row(f"{label}: lower end of its 95 % interval", "", bounds["step_ratio_low"], at_least(0)),
        row(f"{label}: upper end of its 95 % interval", "", bounds["step_ratio_high"], goal),
        row(f"{label}: median", "s", median(ours[:count]), at_most(9e9), median(stock[:count])),
    ]


def _memory_rows(jobs: Jobs, ours: Job | None, stock: Job | None) -> list[Row]:
    if ON_CPU:
        return []
    after = {OURS: memory_of(ours), STOCK: memory_of(stock)}
    for who, found in after.items():
        jobs.report(f"{who}: { ({key: round(value / MIB) for key, value in found.items()}) }")
    rows = []
    for point, label in (("init_model", "set-up"), ("update_actor 2", "3 steps")):
        mib = [after[who].get(point, float("nan")) / MIB for who in (OURS, STOCK)]
        goal = at_most(0.6) if label == "3 steps" else at_most(9e9)
        rows.append(row(f"outside torch after {label}", "MiB", mib[0], goal, mib[1]))
    for who in (OURS, STOCK):
        grown = after[who].get("update_actor 2", float("nan")) - after[who].get("update_actor 0 begins", float("nan"))
        rows.append(row(f"{who}: growth outside torch in the first 3 steps", "MiB", grown / MIB, at_most(9e9)))
    return rows


def saves(jobs: Jobs) -> list[Row]:
    """Measures saves, also in the background. `resumes` continues from them."""
    few = [*_SAVING, f"trainer.total_training_steps={SAVED_STEPS}", "trainer.save_freq=1"]
    in_background = [*few, f"{ACTOR}.checkpoint.async_save=true"]
    wanted = [
        Wanted(name=f"{who} {label}", who=who, overrides=overrides, variables=UNCOMPILED)
        for label, overrides in (("save", few), ("async save", in_background))
        for who in (STOCK, OURS)
    ]
    done = jobs.run(wanted)
    rows = _exit_rows(wanted, done)
    both = [metrics_of(done[name].output()) if name in done else {} for name in ("ours save", "stock save")]
    for key in ("actor/loss", "actor/grad_norm"):
        gaps = [apart(*(of_steps.get(step, {}).get(key) for of_steps in both)) for step in range(1, SAVED_STEPS + 1)]
        rows.append(
            row(
                f"{key} of {SAVED_STEPS} steps, largest relative difference",
                "",
                largest(gaps),
                at_most(TRAINED_RELATIVE),
            )
        )
    for label in ("save", "async save"):
        ours, stock = (_median(done.get(f"{who} {label}"), "save_checkpoint") for who in (OURS, STOCK))
        rows.append(row(f"of a small model: {label}", "s", ours, at_most(1), stock))
        for who in (OURS, STOCK):
            tracker = checkpoints_of(jobs, f"{who} {label}") / "latest_checkpointed_iteration.txt"
            step = int(tracker.read_text()) if tracker.exists() else -1
            goal = at_least(SAVED_STEPS if who == OURS else -1)
            rows.append(row(f"{who}, {label}: step of the tracker, -1 for none", "", step, goal))
    return rows


def resumes(jobs: Jobs) -> list[Row]:
    """Resumes from our saves and from stock's, with our engines and with stock's, at another layout."""
    last = SAVED_STEPS + RESUMED_STEPS
    wanted = [
        Wanted(
            name=f"{who} resumes {saved_by}",
            who=who,
            variables=UNCOMPILED,
            overrides=[
                *_SAVING,
                f"trainer.total_training_steps={last}",
                "trainer.save_freq=-1",
                "trainer.resume_mode=resume_path",
                f"trainer.resume_from_path={checkpoints_of(jobs, f'{saved_by} save')}/global_step_{SAVED_STEPS}",
                # At EP1 Megatron has one optimizer instead of two, and stock verl cannot load that (optimizer.py:1219).
                f"{ACTOR}.megatron.tensor_model_parallel_size=2",
                f"{ACTOR}.megatron.expert_tensor_parallel_size=1",
                # verl saves a random state for each tensor-parallel rank, so there is none for the second rank.
                f"{ACTOR}.checkpoint.load_contents=[model,optimizer]",
            ],
        )
        for saved_by in (STOCK, OURS)
        for who in (STOCK, OURS)
    ]
    done = jobs.run(wanted)
    rows = _exit_rows(wanted, done)
    of_steps = {name: metrics_of(job.output()) for name, job in done.items()}
    for saved_by in (STOCK, OURS):
        for step in range(SAVED_STEPS + 1, last + 1):
            ours, stock = (of_steps.get(f"{who} resumes {saved_by}", {}).get(step, {}) for who in (OURS, STOCK))
            for key in ("actor/loss", "actor/grad_norm"):
                jobs.report(f"saved by {saved_by}: {key} of step {step}: ours {ours.get(key)}, stock {stock.get(key)}")
                name = f"saved by {saved_by}, EP2 to TP2 EP2: {key} of step {step}, relative difference"
                rows.append(row(name, "", apart(ours.get(key), stock.get(key)), at_most(RELATIVE)))
    return rows


def apart(one: float | None, other: float | None) -> float:
    """Returns the difference of two figures relative to the first; nan if one is missing or 0."""
    if not one or not other or not isfinite(one) or not isfinite(other):
        return float("nan")
    return abs(one - other) / abs(one)


def largest(gaps: Sequence[float]) -> float:
    """Returns the largest gap; nan if one is nan."""
    return max(gaps) if all(isfinite(gap) for gap in gaps) else float("nan")


def variants(jobs: Jobs) -> list[Row]:
    """Runs three steps with mbridge, with a dense Qwen2.5, and with communicators given to the rollout."""
    few = ["trainer.total_training_steps=3", "trainer.save_freq=3"]
    wanted = [
        Wanted(name=GIVING, who=GIVING, overrides=few, variables=UNCOMPILED),
        Wanted(
            name="ours, dense",
            who=OURS,
            overrides=[*few, f"{ACTOR}.megatron.expert_model_parallel_size=1"],
            model="small_dense",
            variables=UNCOMPILED,
        ),
    ]
    if MBRIDGE in os.environ:
        path = f"{ROOT}:{os.environ[MBRIDGE]}:{os.environ.get('PYTHONPATH', '')}"
        vanilla = [*few, f"{ACTOR}.megatron.vanilla_mbridge=true"]
        wanted += [
            Wanted(name=f"{who}, mbridge", who=who, overrides=vanilla, variables={**UNCOMPILED, "PYTHONPATH": path})
            for who in (OURS, STOCK)
        ]
    done = jobs.run(wanted)
    rows = _exit_rows(wanted, done)
    for name, job in done.items():
        of_steps = metrics_of(job.output()).values()
        gaps = [of_step.get("training/rollout_probs_diff_max", float("nan")) for of_step in of_steps]
        rows += [
            row(f"{name}: steps", "", len(of_steps), at_least(3)),
            row(f"{name}: largest gap of probabilities", "", max(gaps, default=9e9), at_most(0.05)),
        ]
        if not name.startswith(STOCK):
            rows.append(row(f"{name}: late collectives", "", _late(job), at_most(0)))
    return rows + (_release_rows(jobs, done[GIVING]) if GIVING in done else [])


def proofs(jobs: Jobs) -> list[Row]:
    """Runs eight steps with each kind of vLLM engine. The first weight sync is verl's own, and the others are packed.

    Every other sync is proved.
    """
    few = [
        "trainer.total_training_steps=8",
        "trainer.save_freq=-1",
        "actor_rollout_ref.rl_safe.prove_sync_freq=2",
        _PACKED,
    ]
    wanted = [
        Wanted(name=engine, who=OURS, overrides=[*few, *overrides], variables=UNCOMPILED)
        for engine, overrides in _ENGINES.items()
    ]
    done = jobs.run(wanted)
    rows = _exit_rows(wanted, done)
    for engine, job in done.items():
        of_steps = [metrics for _, metrics in sorted(metrics_of(job.output()).items())]
        of_steps = [of_step for of_step in of_steps[2:] if "timing_s/update_weights" in of_step]
        proved, plain = (
            [one for one in of_steps if ("rl_safe/sync_proved" in one) is is_so] for is_so in (True, False)
        )
        if not (proved and plain):
            continue
        seconds = [median(one["timing_s/update_weights"] for one in each) for each in (proved, plain)]
        rows += [
            row(f"{engine}: weights not proved, syncs redone", "",
                max(one["rl_safe/sync_not_proved"] + one["rl_safe/sync_redone"] for one in proved), at_most(0)),
            row(f"{engine}: a proved weight sync, against another", "s", seconds[0], at_most(1.25), seconds[1]),
        ]  # fmt: skip
    return rows


def packed(jobs: Jobs) -> list[Row]:
    """Times weight syncs of thousands of small weights in turns: stock's, and ours packed."""
    turns = jobs.folder / "packed_turns"
    turns.mkdir()
    few = [f"trainer.total_training_steps={PACKED_STEPS}", "trainer.save_freq=-1"]
    if count_gpus() == 1:
        few += ["trainer.n_gpus_per_node=1", f"{ACTOR}.megatron.expert_model_parallel_size=1"]
    wanted = [
        Wanted(
            name=f"{who} syncs",
            who=who,
            overrides=[*few, *([_PACKED] if who == OURS else [])],
            model="many_moe",
            variables={**UNCOMPILED, host_meter.TURNS: f"{turns}:{who}:{other}"},
        )
        for who, other in ((STOCK, OURS), (OURS, STOCK))
    ]
    done = jobs.run(wanted)
    rows = _exit_rows(wanted, done)
    ours, stock = (slowest(done.get(f"{who} syncs"), "update_weights") for who in (OURS, STOCK))
    jobs.report(f"syncs: ours {_rounded(ours)}, stock {_rounded(stock)}")
    # The first sync is verl's own, and the second one goes through the loaders.
    counted = [each[LEFT_OUT:] for each in (ours, stock)]
    if all(counted):
        rows.append(
            row("packed sync of thousands of weights", "s", median(counted[0]), at_most(0.2), median(counted[1]))
        )
    of_steps = metrics_of(done[f"{OURS} syncs"].output()).values() if f"{OURS} syncs" in done else ()
    were_packed = [of_step.get("rl_safe/sync_packed", 0) for of_step in of_steps]
    rows.append(row("steps with a packed sync", "", sum(were_packed), at_least(PACKED_STEPS - 1)))
    return rows


def _release_rows(jobs: Jobs, giving: Job) -> list[Row]:
    of_steps = metrics_of(giving.output()).values()
    connected = max((_communicators_mib(of_step) for of_step in of_steps), default=0) or float("nan")
    released = min((of_step.get("rl_safe/released_mib", 0) for of_step in of_steps), default=0)
    after = memory_of(giving)
    jobs.report(f"release_comms: { ({key: round(value / MIB) for key, value in after.items()}) }")
    back_mib = (after.get("update_actor 1", 0) - after.get("update_weights 2", 0)) / MIB
    return [
        row("released, by our own figures, of what was connected", "", released / connected, at_least(0.95)),
        row("outside torch, less at rollout, of what was connected", "", back_mib / connected, at_least(0.95)),
    ]


def _communicators_mib(of_step: Mapping[str, float]) -> float:
    """Returns the MiB of the communicators that the bootstrap has connected, without NCCL's kernels."""
    return of_step.get("rl_safe/bootstrap_mib", 0) - of_step.get("rl_safe/kernels_mib", 0)


def phases(jobs: Jobs) -> list[Row]:
    """Measures the time that phases, barriers and the driver's deadlines add to a step. Half of the steps are bare."""
    # Use few samples. The added time does not depend on their number, and is easier to see in a short step.
    few = [*WITHOUT_VLLM, f"trainer.total_training_steps={2 * PAIRS}", "trainer.save_freq=-1"]
    modules = {"VERL_USE_EXTERNAL_MODULES": f"{PLUGIN},{verl_glue.__name__},{verl_bare_steps.__name__}"}
    wanted = [Wanted(name="ours, every second step bare", who=OURS, overrides=few, variables=modules)]
    done = jobs.run(wanted)
    rows = _exit_rows(wanted, done)
    of_steps = [metrics for job in done.values() for _, metrics in sorted(metrics_of(job.output()).items())]
    return rows + added_rows(of_steps[2 * PAIRS_LEFT_OUT :])


def added_rows(of_steps: Sequence[Mapping[str, float]]) -> list[Row]:
    """Returns rows for the extra time of a step with phases over the bare step of the same pair.

    Args:
        of_steps: The metrics of each step. Each two consecutive steps are a pair.
    """
    pairs = [sorted(pair, key=verl_bare_steps.was_bare) for pair in zip(of_steps[::2], of_steps[1::2], strict=False)]
    rows = [row("phases: pairs of steps", "", len(pairs), at_least(PAIRS - PAIRS_LEFT_OUT))]
    if not pairs:
        return rows
    added_s = [ours["timing_s/step"] - bare["timing_s/step"] for ours, bare in pairs]
    middle_s, low_s, high_s = median_and_interval(added_s)
    bare_s = median(bare["timing_s/step"] for _, bare in pairs)
    return [
        *rows,
        row("phases: a bare step, median", "s", bare_s, at_most(9e9)),
        row("phases: added to a step, median of the pairs", "s", middle_s, at_most(9e9)),
        row("phases: lower end of its 95 % interval", "s", low_s, at_most(9e9)),
        row("phases: upper end of its 95 % interval", "s", high_s, at_most(9e9)),
    ]


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [round(each, 4) for each in seconds]


def _late(job: Job | None) -> float:
    """Returns the number of collectives that the bootstrap missed; 9e9 if no step reports it."""
    of_steps = metrics_of(job.output()).values() if job else ()
    return max((of_step.get("rl_safe/late_allocations", 9e9) for of_step in of_steps), default=9e9)


def _median(job: Job | None, name: str) -> float:
    return median(slowest(job, name) or [float("nan")])


def _exit_rows(wanted: Sequence[Wanted], done: Mapping[str, Job]) -> list[Row]:
    """Returns a row with the exit status of each job; 99 stands for a job that was not started."""
    rows = []
    for name in (each.name for each in wanted):
        status = done[name].poll() if name in done else None
        rows.append(row(f"{name}: exit status", "", 99 if status is None else abs(status), at_most(0)))
    return rows


def row(name: str, unit: str, ours: float, goal: Any, peer: float | None = None) -> Row:
    """Returns a row for a figure of this benchmark."""
    return gpu_row(f"verl, {name}", unit, ours, goal, peer)


_PARTS: Mapping[str, Callable[[Jobs], list[Row]]] = {
    "steps": steps,
    "saves": saves,
    "resumes": resumes,
    "variants": variants,
    "proofs": proofs,
    "packed": packed,
    "phases": phases,
    "faults": lambda jobs: faults(jobs, FAULTS),
    "engine_faults": lambda jobs: faults(jobs, ENGINE_FAULTS),
}
