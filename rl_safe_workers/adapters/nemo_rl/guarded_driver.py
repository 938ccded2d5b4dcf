"""Puts deadlines on the waits of NeMo RL's driver for generation and for refits of the rollout.

NeMo RL's loops call functions of their module and methods of their objects, and wait in these calls. While the script
runs, we replace the functions in the module and the methods in the classes. We do not change the objects, because they
are also sent to other processes.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray

from rl_safe_workers.adapters.driver_waits import DriverWaits, Party, Standstill
from rl_safe_workers.adapters.group_ends import AFTER_FAILURE_S, end_of, error_of
from rl_safe_workers.adapters.job_verdict import JobVerdict
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NODE, NemoRlTimeouts
from rl_safe_workers.adapters.patches import PassThrough, replaced
from rl_safe_workers.adapters.sync_prover import SyncProver
from rl_safe_workers.config import ABORT_S
from rl_safe_workers.errors import ConfigError, in_one_line
from rl_safe_workers.lifecycle import Phase
from rl_safe_workers.ranks import RankId, Role, trainer_id
from rl_safe_workers.worlds.address import StoreAddress

logger = logging.getLogger(__name__)

REFIT = "refit_policy_generation"
ROLLOUTS = (
    *("run_multi_turn_rollout", "run_async_multi_turn_rollout"),
    *("run_nemo_gym_rollout_sync", "run_async_nemo_gym_rollout"),
)
"""Functions by which NeMo RL's loops generate. Each version has only one of the last two."""
MAKES_SYNC = "create_weight_synchronizer"
"""Function of newer versions that makes the object that refits the rollout."""
_ANSWER_S = 2.0
"""Seconds that the driver adds to the trainers' own deadlines, so that their answers arrive."""
GENERATIONS = ("VllmGeneration", "TrtllmGeneration", "SGLangGeneration", "MegatronGeneration", "DynamoGeneration")
"""Classes of NeMo RL's generation objects, by their names in the module of ``setup``. Older versions have fewer."""
JOINS = ("init_collective", "init_collective_mcore_generation")
"""Methods of NeMo RL's ``Policy`` that return Ray references to the trainers' part in joining the rollout."""
PREPARES = "prepare_refit_info"
"""Method of NeMo RL's policy and generation object. It waits until the workers know the weights of a refit."""
ENGINE_CALLS = (
    *("prepare_refit_info", "prepare_for_generation", "finish_generation", "invalidate_kv_cache"),
    *("snapshot_step_metrics", "get_step_metrics", "clear_logger_metrics", "get_logger_metrics"),
)
"""Methods of NeMo RL's generation object that wait for engines, apart from generation and refits."""
POLICY_CALLS = {
    "train": Phase.TRAIN,
    "get_logprobs": Phase.LOGPROB,
    "get_reference_policy_logprobs": Phase.LOGPROB,
    "get_topk_logits": Phase.LOGPROB,
    "calibrate_qkv_fp8_scales": Phase.LOGPROB,
    "save_checkpoint": Phase.SAVE,
    "finalize_async_save": Phase.SAVE,
}
"""Methods of NeMo RL's ``Policy`` that wait for trainers, with the phase of the trainers in each."""
FINALIZES = "finalize_async_save"
"""Method of NeMo RL's ``Policy`` that a thread calls, to wait for the save in the background."""


def parties_of(policy: Any, generation: Any) -> list[Party]:
    """Lists the processes that NeMo RL's driver waits for: trainers, and the leader of each rollout engine.

    Args:
        policy: NeMo RL's ``Policy``.
        generation: NeMo RL's generation object; None, or the policy itself, if there is no other.
    """
    trainers = getattr(getattr(policy, "worker_group", None), "workers", ())
    found = [
        Party(f"training rank {rank}", trainer_id(rank), worker, worker.is_alive.remote)
        for rank, worker in enumerate(trainers)
    ]
    if generation is None or generation is policy:
        return found
    for engine, worker in enumerate(_leaders(getattr(generation, "worker_group", None))):
        ask = _question(generation, worker)
        found.append(Party(f"rollout engine {engine}", RankId(Role.ROLLOUT, engine), worker, ask))
    return found


def _leaders(group: Any) -> Sequence[Any]:
    """Returns the workers that hold an engine: the first worker of each data-parallel shard."""
    if group is None:
        return ()
    return [group.workers[group.get_dp_leader_worker_idx(shard)] for shard in range(group.dp_size)]


def _question(generation: Any, worker: Any) -> Callable[[], Any]:
    """Returns a remote call that a worker must answer. An engine of vLLM or TRT-LLM must answer it, too."""
    cfg = getattr(generation, "cfg", None) or {}
    # A recipe for TRT-LLM, which has only asynchronous workers, may inherit vLLM's node.
    is_async = cfg.get("backend") == "trtllm" or (cfg.get("vllm_cfg") or {}).get("async_engine")
    of_engine = "report_device_id_async" if is_async else "report_device_id"
    names = (of_engine, "is_alive", "__ray_ready__")  # every actor has the last one
    return next(getattr(worker, name).remote for name in names if hasattr(worker, name))  # type: ignore[no-any-return]


class GuardedDriver:
    """Puts deadlines on the waits of NeMo RL's driver, and ends its workers.

    Attributes:
        policy: NeMo RL's ``Policy``, once there is one.
        generation: NeMo RL's generation object; the policy itself, or None, if there is no other.
    """

    def __init__(
        self,
        timeouts: NemoRlTimeouts,
        ends: ExitStack,
        *,
        evidence: Path,
        prove_sync_freq: int = -1,
        joins: bool = False,
    ) -> None:
        """Stores its arguments. `guard_setup` and `guard_loops` begin to guard.

        Args:
            timeouts: The deadlines.
            ends: Is closed when the script has ended, which restores everything that was replaced.
            evidence: The folder for the evidence of a failure.
            prove_sync_freq: The setting. Any value but -1 needs generation workers of `generation_setup.WORKERS`.
            joins: Whether refits go over our joint group, in place of NeMo RL's communicator. Needs the same workers.
        """
        self.policy: Any = None
        self.generation: Any = None
        self._ends = ends
        self._waits = DriverWaits(timeouts, self._parties)
        self._verdict = JobVerdict(self._parties, evidence)
        self._prove_sync_freq, self._joins_rollout = prove_sync_freq, joins
        self._joined: Sequence[Any] = ()
        """The leaders of the engines in our joint group."""
        self._joins = set[Any]()
        """Ray references to the trainers' part in joining the rollout."""
        self._is_saved = threading.Event()
        """Set unless a thread waits for a save in the background."""
        self._is_saved.set()
        self._responses = 0
        """Number of responses that have ended. Counts only generation that this process drives."""

    def _parties(self) -> list[Party]:
        return parties_of(self.policy, self.generation)

    def guard_setup(self, module: Any) -> None:
        """Guards the waits inside NeMo RL's ``setup``, and finds the generation object as soon as it exists.

        Args:
            module: The module of ``setup``.
        """
        if hasattr(module, MAKES_SYNC):
            self._replace(module, MAKES_SYNC, self._making_sync)
        for kind in (getattr(module, name) for name in GENERATIONS if hasattr(module, name)):
            self._replace(kind, "__init__", self._making_generation)
            if hasattr(kind, PREPARES):
                self._replace(kind, PREPARES, self._bounding(Phase.SYNC, f"the rollout's {PREPARES}"))
                if self._joins_rollout:
                    self._replace(kind, PREPARES, self._joining_after)
                    self._replace(kind, JOINS[0], _joining_nothing)
        # With the default transport, `setup` itself waits for trainers and engines to join.
        self._replace(module, "ray", lambda stock: _Names(stock, get=self._get_in_setup))

    def guard_loops(self, module: Any) -> None:
        """Guards the waits of NeMo RL's loops, and makes the policy's workers end before the rollout's.

        NeMo RL ends only the rollout, or ends it first. It may leave the policy to Python's garbage collection, which
        may run after Ray has shut down.

        Args:
            module: The module of ``setup``, which has the loops.
        """
        kind = type(self.policy if self.generation is None else self.generation)
        if self.has_engines:
            self._replace(kind, "shutdown", self._ending_policy_first)
        self._replace(module, REFIT, self._bounding(Phase.SYNC, "the refit"))
        if self._prove_sync_freq >= 0:
            self._replace(module, REFIT, self._proving)
        if hasattr(type(self.policy), FINALIZES):
            self._replace(module, REFIT, self._after_saves)
        for name in ROLLOUTS:
            if hasattr(module, name):
                self._replace(module, name, self._bounding(Phase.ROLLOUT, "generation", self._ended_responses))
        for name in ENGINE_CALLS:
            if hasattr(kind, name):
                self._replace(kind, name, self._bounding(Phase.SYNC, f"the rollout's {name}"))
        for name, phase in POLICY_CALLS.items():
            if hasattr(type(self.policy), name):
                self._replace(type(self.policy), name, self._noting(phase))
        if hasattr(type(self.policy), FINALIZES):
            self._replace(type(self.policy), FINALIZES, self._finalizing)
        for name, counting in (("generate", self._counting), ("generate_async", self._counting_each)):
            if hasattr(kind, name):
                self._replace(kind, name, counting)
        # The asynchronous loop polls an actor for its responses.
        polls = _Polls(self._waits)
        self._replace(module, "ray", lambda stock: _Names(stock, get=polls.get))
        self._replace(module, "time", lambda stock: _Names(stock, sleep=polls.sleep))

    @property
    def has_engines(self) -> bool:
        """True if something other than the policy generates."""
        return self.generation is not None and self.generation is not self.policy

    def end(self) -> None:
        """Ends all known workers. Skips those that have already ended."""
        if (owner := self.generation if self.has_engines else self.policy) is not None:
            owner.shutdown()

    def making(self, factory: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the factory of the policy, to find a worker that dies or hangs before ``setup`` returns."""

        def make(*args: Any, **kwargs: Any) -> Any:
            self.policy = factory(*args, **kwargs)
            kind = type(self.policy)
            for name in JOINS:
                if hasattr(kind, name):
                    self._replace(kind, name, self._joining)
            if self._joins_rollout:
                self._replace(kind, JOINS[0], _joining_nothing)
            if hasattr(kind, PREPARES):
                self._replace(kind, PREPARES, self._bounding(Phase.SYNC, f"the trainers' {PREPARES}"))
            return self.policy

        return make

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Ends all workers if the body fails.

        Raises:
            JobError: If the body has failed because of a worker; says which.
        """
        try:
            yield
        except Exception as error:
            verdict = self._verdict.on(error, self._waits.failed_in)
            self._end_at_once(error)
            self.end()
            if verdict is error:
                raise
            raise verdict from error
        except BaseException as error:
            self._end_at_once(error)
            self.end()
            raise

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Ends all workers when the body ends. The body runs the script.

        Raises:
            JobError: If the body has failed because of a worker; says which. Also if the body ends well after NeMo RL
                has swallowed the error of the last wait.
        """
        with self.judging():
            yield
            # NeMo RL only prints the errors of asynchronous GRPO's first refit and of the calls after the last step.
            if (swallowed := self._waits.failure) is not None:
                raise swallowed
            self._end_in_order()
        self.end()

    def _end_in_order(self) -> None:
        """Makes the trainers end their groups together. NeMo RL would silently kill a trainer that does not.

        Raises:
            RunError: If trainers have not ended their groups in time; names the ranks.
        """
        trainers = getattr(self.policy, "worker_group", None)
        if trainers is None or not trainers.workers:
            return
        with self._waits.waiting(Phase.TEARDOWN):
            for leader in self._joined:
                # A trainer that leaves an NCCL group waits for the other side. So its error tells if an engine stays.
                leader.rl_safe_leave.remote()
            calls = [worker.rl_safe_end_groups.remote() for worker in trainers.workers]
            error = error_of([end_of(calls, self._waits.timeout_s(Phase.TEARDOWN) + ABORT_S + _ANSWER_S)])
            if error is not None:
                raise error

    def _ending_policy_first(self, end_generation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(end_generation)
        def shutdown(generation: Any, *args: Any, **kwargs: Any) -> Any:
            if generation is not self.generation:
                return end_generation(generation, *args, **kwargs)
            failure = sys.exc_info()[1] or self._waits.failure
            if failure is None:
                try:
                    self._end_in_order()
                except Exception as error:
                    failure = error  # NeMo RL would only print it, so `ending` raises it
            if failure is not None:
                self._end_at_once(failure)
            try:
                self.policy.shutdown()
            finally:
                ended = end_generation(generation, *args, **kwargs)
            return ended

        return shutdown

    def _end_at_once(self, failure: BaseException) -> None:
        """Ends all workers after a failure. Does not wait for workers that wait for another process."""
        own = getattr(self.generation, "_policy", None)  # Megatron's engines of a dedicated policy
        groups = [getattr(each, "worker_group", None) for each in (self.policy, self.generation, own)]
        if not any(group is not None and group.workers for group in groups):
            return
        cause = self._verdict.on(failure, self._waits.failed_in)
        if cause is failure:
            cause = failure.cause if isinstance(failure, ray.exceptions.RayTaskError) else failure
            logger.error("the job has failed: %s", in_one_line(cause))
        trainers = groups[0]
        if trainers is not None and trainers.workers:
            calls = [worker.shutdown.remote(in_one_line(cause)) for worker in trainers.workers]
            ray.wait(calls, num_returns=len(calls), timeout=AFTER_FAILURE_S)
        for group in groups:
            if group is not None:
                group.shutdown(force=True)

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        self._ends.enter_context(replaced(owner, name, make))

    def _ended_responses(self) -> int:
        return self._responses

    def _bounding(
        self, phase: Phase, what: str, progress: Callable[[], object] = lambda: None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(stock: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(stock)
            def call(*args: Any, **kwargs: Any) -> Any:
                return self._waits.bounded(phase, what, functools.partial(stock, *args, **kwargs), progress=progress)

            return call

        return make

    def _proving(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def senders() -> Sequence[Any]:
            # Under NeMo RL's own transports, every trainer has all weights.
            trainers: Sequence[Any] = self.policy.worker_group.workers
            return trainers if self._joins_rollout else trainers[:1]

        prover = SyncProver(
            self._waits,
            every=self._prove_sync_freq,
            announce=lambda: ray.get([trainer.rl_safe_prove.remote() for trainer in senders()]),
            sent=lambda: ray.get([trainer.rl_safe_sent.remote() for trainer in senders()]),
            engines=lambda: _leaders(self.generation.worker_group),
        )

        def fall_asleep() -> None:
            # A refit of engines on the trainers' GPUs needs sleeping engines at its beginning, and leaves them awake.
            if self.generation.cfg["colocated"]["enabled"]:
                self.generation.finish_generation()

        @functools.wraps(stock)
        def refit(*args: Any, **kwargs: Any) -> Any:
            found = prover.sync(functools.partial(stock, *args, **kwargs), what="the refit", before_redoing=fall_asleep)
            metrics = prover.take_metrics()
            # Newer versions log the dictionary that a refit returns. Older versions return nothing.
            return {**found, **metrics} if isinstance(found, dict) else found

        return refit

    def _joining_after(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def prepare(generation: Any, *args: Any, **kwargs: Any) -> Any:
            found = stock(generation, *args, **kwargs)
            engine, plan = self._waits.bounded(
                Phase.SYNC, "the plan of the refits", functools.partial(self._plan, generation)
            )
            join = functools.partial(self._join, generation, engine, plan)
            self._waits.bounded(Phase.JOINT, "joining the rollout", join)
            return found

        return prepare

    def _plan(self, generation: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the arguments of `cuts.engine_ranks` for each engine, and the trainers' plan; see `JointRefit.plan`.

        Raises:
            ConfigError: If the engines cannot receive weights over our joint group; says why.
        """
        engines = ray.get([leader.rl_safe_engine.remote() for leader in _leaders(generation.worker_group)])
        for number, engine in enumerate(engines):
            if (obstacle := engine.pop("obstacle")) is not None:
                raise ConfigError(
                    f"{NODE}.refit_transport=joint: engine {number} cannot take part: {obstacle}; set it to host"
                )
        plans = ray.get([trainer.rl_safe_plan_refits.remote() for trainer in self.policy.worker_group.workers])
        (plan,) = filter(None, plans)
        return engines[0], plan

    def _join(self, generation: Any, engine: dict[str, Any], plan: dict[str, Any]) -> None:
        """Makes trainers and vLLM's workers join our joint group."""
        trainers, leaders = self.policy.worker_group.workers, _leaders(generation.worker_group)
        address = StoreAddress(host=plan["host"], port=plan["port"], secret=bytes.fromhex(plan["secret"]))
        ranks = list(range(len(leaders) * engine["size"]))
        info = ray.put({**plan, "rollout_ranks": ranks, "kv_heads": engine["kv_heads"]})
        calls = [trainer.rl_safe_join.remote(address, ranks, engine) for trainer in trainers]
        calls += [leader.rl_safe_join.remote(number * engine["size"], info) for number, leader in enumerate(leaders)]
        ray.get(calls)
        self._joined = leaders

    def _finalizing(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def finalize(*args: Any, **kwargs: Any) -> Any:
            self._is_saved.clear()
            try:
                return stock(*args, **kwargs)
            finally:
                self._is_saved.set()

        return finalize

    def _after_saves(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def refit(*args: Any, **kwargs: Any) -> Any:
            # A trainer does one call at a time. So its part in the refit waits for the save, however long that takes.
            if not self._is_saved.is_set():
                self._waits.bounded(Phase.SAVE, "the save in the background", self._is_saved.wait)
            return stock(*args, **kwargs)

        return refit

    def _noting(self, phase: Phase) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(stock: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(stock)
            def call(*args: Any, **kwargs: Any) -> Any:
                with self._waits.waiting(phase):
                    return stock(*args, **kwargs)

            return call

        return make

    def _making_generation(self, stock: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(stock)
        def init(generation: Any, *args: Any, **kwargs: Any) -> None:
            stock(generation, *args, **kwargs)
            if self.generation is None:
                self.generation = generation

        return init

    def _joining(self, stock: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        @functools.wraps(stock)
        def join(*args: Any, **kwargs: Any) -> list[Any]:
            calls = stock(*args, **kwargs)
            self._joins.update(calls)
            return calls

        return join

    def _get_in_setup(self, refs: Any, **options: Any) -> Any:
        """Calls ``ray.get``, under the deadline of phase ``joint`` if it waits for trainers to join the rollout."""
        get = functools.partial(ray.get, refs, **options)
        if not isinstance(refs, list) or self._joins.isdisjoint(refs):
            return get()
        return self._waits.bounded(Phase.JOINT, "joining the rollout", get)

    def _making_sync(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def create(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(stock).bind(*args, **kwargs).arguments
            self.policy, self.generation = given["policy"], given["generation"]
            made = stock(*args, **kwargs)
            kind = type(made)
            self._replace(kind, "init_communicator", self._bounding(Phase.JOINT, "joining the rollout"))
            self._replace(kind, "sync_weights", self._bounding(Phase.SYNC, "the refit"))
            return made

        return create

    def _counting(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def generate(*args: Any, **kwargs: Any) -> Any:
            found = stock(*args, **kwargs)
            self._responses += 1
            return found

        return generate

    def _counting_each(self, stock: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
        @functools.wraps(stock)
        async def generate_async(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async for response in stock(*args, **kwargs):
                self._responses += 1
                yield response

        return generate_async


def _joining_nothing(stock: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Replaces a method that starts joining NeMo RL's communicator. Joins nothing and returns no Ray references."""

    @functools.wraps(stock)
    def join(*args: Any, **kwargs: Any) -> list[Any]:
        return []

    return join


class _Names(PassThrough):
    """Stands for a module in the namespace of another one, with some of its functions replaced."""

    def __init__(self, stock: Any, **functions: Callable[..., Any]) -> None:
        super().__init__(stock)
        vars(self).update(functions)


class _Polls:
    """Bounds the polls of the asynchronous loop for finished responses. Raises if the answers stop changing."""

    def __init__(self, waits: DriverWaits) -> None:
        self._waits, self._standstill = waits, Standstill()
        self._looks = waits.looks(Phase.ROLLOUT, "generation")
        self._answers: list[int] = []
        """Numbers in the answers since the last pause, such as the number of prompts with all their responses."""

    def get(self, refs: Any, *, timeout: float | None = None, **options: Any) -> Any:
        """Calls ``ray.get``, with the timeout of generation if the loop gives none.

        Raises:
            PhaseTimeoutError: If there is no answer in time.
            RunError: If the call fails and a process does not answer.
        """
        if timeout is not None or self._waits.is_bounding:
            return ray.get(refs, timeout=timeout, **options)
        limit_s = self._waits.timeout_s(Phase.ROLLOUT)
        with self._waits.waiting(Phase.ROLLOUT):
            try:
                found = ray.get(refs, timeout=limit_s, **options)
            except ray.exceptions.GetTimeoutError:
                raise self._waits.late(Phase.ROLLOUT, "generation", limit_s) from None
            except ray.exceptions.RayError as error:
                if (blaming := self._waits.blaming("generation", error)) is None:
                    raise
                raise blaming from error
        if isinstance(found, int):
            self._answers.append(found)
        return found

    def sleep(self, seconds: float) -> None:
        """Calls ``time.sleep``, by which the loop waits for the next poll.

        Raises:
            PhaseTimeoutError: If the answers have not changed within the timeout of generation.
            RunError: If an engine has died.
        """
        with self._waits.waiting(Phase.ROLLOUT):
            self._looks.check()
            answers, self._answers = tuple(self._answers), []
            waited_s = self._standstill.seconds(answers)
            if waited_s >= self._waits.timeout_s(Phase.ROLLOUT):
                detail = "no prompt's responses have ended for that long"
                raise self._waits.late(Phase.ROLLOUT, "generation", waited_s, detail)
        time.sleep(seconds)
