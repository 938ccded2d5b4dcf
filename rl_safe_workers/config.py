"""Defines the configuration of a run: every key with its type, range and default, and the rules between keys.

Keys have verl's names where verl has the same setting. All host frameworks use the nodes ``rl_safe.bootstrap`` and
``rl_safe.timeouts``. Only the built-in trainer uses the rest of ``rl_safe``. A rule belongs to the smallest section
that holds all of its keys. The preflight checks rules that need the model, the data or the machine.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from rl_safe_workers.errors import ConfigError
from rl_safe_workers.foreign_files import complaint_about_path
from rl_safe_workers.section import Contradiction, Section
from rl_safe_workers.topology.budget import NCCL_MAXIMUM

_LONGEST_RUN_NAME = 200
"""Bytes. Leaves room for suffixes that are added to the name."""
_MOST_SEQUENCES = 2**20
_MOST_SEEDED = 10**9
"""Largest product of layers and widths of a recipe's seeded model, which has two or three times as many parameters."""
_ROWS_OF_8_BITS = 16
"""Rows of an 8-bit matrix come in multiples of this."""
_HOST_AND_PORT = re.compile(r"(?!\w+://)\S+:\d+")
ABORT_S = 10.0
"""Seconds by which a teardown may exceed its timeout, to abort groups that cannot be destroyed."""
MIN_BOOTSTRAP_TIMEOUT_S = 1.0
"""Smallest timeout of the bootstrap, in seconds. A waiting rank needs half of it to learn of other ranks' failures."""


def _checked_path(path: str) -> str:
    if complaint := complaint_about_path(path):
        raise ValueError(complaint)
    return path


def _checked_run_name(name: str) -> str:
    plain = name not in ("", ".", "..") and "/" not in name and name.isprintable()
    if not plain or len(name.encode()) > _LONGEST_RUN_NAME:
        raise ValueError(f"should be a folder's name: at most {_LONGEST_RUN_NAME} bytes, no / and no control character")
    return name


def _checked_address(address: str) -> str:
    if address not in ("local", "auto") and not _HOST_AND_PORT.fullmatch(address):
        raise ValueError("should be local, auto or host:port, as of `ray start`")
    return address


def _checked_save_freq(steps: int) -> int:
    if steps == 0:
        raise ValueError("should be -1 (never) or at least 1")
    return steps


Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600)]
"""A deadline: at most 30 days, since nothing may wait without one."""
Ranks = Annotated[int, Field(ge=1, le=2**20)]
"""A number of ranks, or the size of a parallel axis."""
Count = Annotated[int, Field(ge=1, le=2**20)]
"""A number of samples, prompts or passes."""
Tokens = Annotated[int, Field(ge=1, le=2**24)]
Steps = Annotated[int, Field(ge=0, le=10**9)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Width = Annotated[int, Field(ge=1, le=2**20)]
"""A size of a seeded model."""
Cpus = Annotated[float, Field(gt=0, le=4096)]
Ctas = Annotated[int, Field(ge=1, le=NCCL_MAXIMUM)]
Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
BridgeLibrary = Literal["auto", "mbridge", "megatron_bridge"]
FilePath = Annotated[str, AfterValidator(_checked_path)]
"""A path that a file can have: no control character, no name of more than 255 bytes."""


class ResumeMode(StrEnum):
    """The starting point of a run. The names are verl's."""

    disable = "disable"
    """From the HF weights."""
    auto = "auto"
    """From the newest complete checkpoint of ``trainer.default_local_dir``, or the HF weights if there is none."""
    resume_path = "resume_path"
    """From ``trainer.resume_from_path``."""


class AdvEstimator(StrEnum):
    """The estimator that turns rewards into advantages."""

    grpo = "grpo"
    """Reward minus the mean of its group, over its standard deviation (arXiv:2402.03300, section 4.1.2)."""
    rloo = "rloo"
    """Reward minus the mean of the other samples of its group (arXiv:2402.14740)."""


class Logger(StrEnum):
    """A destination of a run's metrics."""

    console = "console"
    tensorboard = "tensorboard"


class SeededModelConfig(Section):
    """A tiny Qwen3 or Qwen3-MoE made from a seed when ``model.path`` does not exist yet."""

    seed: Seed = 0
    num_hidden_layers: Width = 2
    hidden_size: Width = 128
    intermediate_size: Width = 256
    moe_intermediate_size: Width = 64
    num_attention_heads: Width = 4
    num_key_value_heads: Width = 2
    head_dim: Annotated[int, Field(ge=2, le=2**20, multiple_of=2)] = 32
    """Even: RoPE turns pairs."""
    num_experts: int = Field(8, ge=0, le=2**20)
    """0 makes a dense Qwen3 model."""
    num_experts_per_tok: Width = 2

    @model_validator(mode="after")
    def _check_shape(self) -> SeededModelConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise Contradiction(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.num_experts and self.num_experts_per_tok > self.num_experts:
            raise Contradiction(
                f"num_experts_per_tok={self.num_experts_per_tok} must be at most num_experts={self.num_experts}"
            )
        return self

    def check_small(self) -> None:
        """Raises ConfigError if the model is too large for a recipe. Benchmarks, which make larger ones, skip this."""
        width = max(self.intermediate_size, max(1, self.num_experts) * self.moe_intermediate_size)
        heads = (self.num_attention_heads + self.num_key_value_heads) * self.head_dim
        if self.num_hidden_layers * self.hidden_size * (width + heads) > _MOST_SEEDED:
            raise ConfigError(
                f"model.create: {self.num_hidden_layers} layers of {self.hidden_size} x {width + heads} are too large "
                "a model: give a model.path, or lower model.create.hidden_size"
            )


class ModelConfig(Section):
    """The HF model."""

    path: FilePath = ""
    """Required. A local directory of a supported model type, with ``config.json``, safetensors and a tokenizer. Its own
    code never runs."""
    create: SeededModelConfig | None = None
    """If set, a seeded model is made at ``path`` when nothing is there."""
    dtype: Dtype = "float32"
    """The parameters' type, for trainer and rollout. ``bfloat16`` trains on GPUs only, with optimizer state in
    float32."""
    bridge: BridgeLibrary = "auto"
    """The library that maps HF weights to Megatron's. ``auto`` takes mbridge, or Megatron-Bridge if mbridge has none
    for the model."""


class DataConfig(Section):
    """Prompts: parquet files in verl's layout (``data_source``, ``prompt``, ``reward_model.ground_truth``)."""

    train_files: list[FilePath] = Field(default_factory=list)
    """Required."""
    train_batch_size: Count = 8
    """Prompts per step; each is sampled ``rollout.n`` times."""
    max_prompt_length: Tokens = 64
    """Tokens. A longer prompt is an error, as with verl's ``truncation=error``. No prompt is dropped or truncated."""
    max_response_length: Tokens = 32
    """Largest number of tokens in a response."""
    shuffle: bool = True


class AlgorithmConfig(Section):
    """The computation of advantages from rewards."""

    adv_estimator: AdvEstimator = AdvEstimator.grpo
    norm_adv_by_std_in_grpo: bool = True


class OptimConfig(Section):
    """Adam, through Megatron's DistributedOptimizer."""

    lr: float = Field(1e-3, gt=0, le=1e3)
    weight_decay: float = Field(0.0, ge=0, le=1e3)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0, le=1)
    clip_grad: float = Field(1.0, ge=0, le=1e9)
    """Largest global gradient norm; 0 turns clipping off."""


class ActorConfig(Section):
    """The policy update."""

    ppo_epochs: Count = 1
    """Passes over each step's samples."""
    ppo_mini_batch_size: Count | None = None
    """Prompts per optimizer step; None: all of the step's."""
    ppo_micro_batch_size_per_gpu: Count = 4
    """Sequences per forward on each data-parallel rank."""
    clip_ratio: float = Field(0.2, gt=0, le=1e3)
    use_kl_loss: bool = False
    """Adds the KL divergence from the starting weights to the loss."""
    kl_loss_coef: float = Field(0.001, ge=0, le=1e6)
    optim: OptimConfig = Field(default_factory=OptimConfig)


class MegatronConfig(Section):
    """Parallel sizes of the training world and Megatron's own settings."""

    tensor_model_parallel_size: Ranks = 1
    pipeline_model_parallel_size: Ranks = 1
    virtual_pipeline_model_parallel_size: Count | None = None
    """Number of virtual stages in each pipeline stage, for an interleaved schedule; None: stages are not cut."""
    expert_model_parallel_size: Ranks = 1
    expert_tensor_parallel_size: Ranks = 1
    context_parallel_size: Ranks = 1
    num_distributed_optimizer_instances: Ranks = 1
    """Number of sets into which data-parallel ranks are split. Each set has its own optimizer state."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    transformer_impl: Literal["auto", "transformer_engine", "local"] = "auto"
    """Transformer Engine's layers or Megatron's local ones; ``auto``: Transformer Engine's on GPUs, if it imports."""
    moe_grouped_gemm: bool | None = None
    """Multiply with the weights of all experts of a rank at once; None: only with Transformer Engine's layers."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Multiply in 8 bits, with Transformer Engine's layers; weights stay in ``model.dtype``. None: never."""
    fp8_recipe: Literal["delayed", "tensorwise"] = "delayed"
    """Scales of 8-bit tensors: from earlier steps (``delayed``) or from the tensor itself (``tensorwise``)."""
    param_offload: bool = True
    """Move parameters to host memory before each rollout."""
    grad_offload: bool = True
    """Free gradient buffers before each rollout."""
    optimizer_offload: bool = True
    """Move optimizer state to host memory before each rollout."""

    @property
    def needs_transformer_engine(self) -> bool:
        """True if Megatron's local layers do not support these settings."""
        return bool(self.transformer_impl == "transformer_engine" or self.fp8 or self.moe_grouped_gemm)

    @property
    def sequence_multiple(self) -> int:
        """The length of a batch must be a multiple of this number of tokens.

        Sequence parallelism divides the sequence by the tensor-parallel size. Transformer Engine wants rows of 8-bit
        matrices in multiples of 16 (transformer_engine/pytorch/utils.py:439 for the product, cuBLAS for gradients).
        """
        return self.tensor_model_parallel_size * (_ROWS_OF_8_BITS if self.fp8 else 1)

    @model_validator(mode="after")
    def _check_layers(self) -> MegatronConfig:
        if self.transformer_impl == "local" and (self.fp8 or self.moe_grouped_gemm):
            key = "moe_grouped_gemm=true" if self.moe_grouped_gemm else f"fp8={self.fp8}"
            raise Contradiction(
                f"{key} needs Transformer Engine's layers, and transformer_impl is local: set it to transformer_engine"
            )
        return self

    @model_validator(mode="after")
    def _check_virtual_stages(self) -> MegatronConfig:
        virtual, stages = self.virtual_pipeline_model_parallel_size, self.pipeline_model_parallel_size
        if virtual is not None and (virtual < 2 or stages < 2):
            raise Contradiction(
                f"virtual_pipeline_model_parallel_size={virtual} with pipeline_model_parallel_size={stages}: both must "
                "be at least 2; for a schedule that is not interleaved set virtual_pipeline_model_parallel_size=null"
            )
        return self


class RolloutConfig(Section):
    """Generation by the rollout engines."""

    name: Literal["vllm"] = "vllm"
    tensor_model_parallel_size: Ranks = 1
    """Consecutive rollout ranks that share one vLLM engine, each with a part of every large weight."""
    n: Annotated[int, Field(ge=1, le=2**16)] = 8
    """Samples per prompt; training needs at least 2."""
    temperature: float = Field(1.0, gt=0, le=1e3)
    max_logprob_gap: float = Field(1e-5, ge=0, le=1e3)
    """Largest allowed difference, in nats, between rollout and trainer in the log-probability of a sampled token."""
    kv_cache_gib: float = Field(0.25, gt=0, le=2**16)
    """KV cache of each rollout rank."""
    block_size: int = Field(32, ge=1, le=2**16)
    """Tokens per KV block; the CPU backend needs a multiple of 32."""
    release_comms: Literal["never", "auto", "always"] = "never"
    """Give the memory of the trainers' communicators to the rollout, and connect them again after it: ``never``,
    ``auto`` (where both share GPUs) or ``always``."""
    enable_rollout_routing_replay: bool = False
    """Make the trainers send each token to the experts that the rollout chose; for MoE models on GPUs."""
    update_weights_bucket_megabytes: int = Field(512, ge=1, le=2**20)
    """Largest size in MiB of a bucket of weights in a weight sync. A larger weight is sent alone. A rank needs room for
    two buckets. A trainer needs room for one more if it shares its GPU with a rollout rank, and for another one if it
    is on a GPU and an engine has several ranks."""

    prove_sync_freq: Annotated[int, Field(ge=-1, le=10**9)] = -1
    """Read weights back after the first weight sync and after every Nth one, and compare them with the sent weights.
    1: after all, 0: after the first, -1: never. On GPUs tested for four steps only."""
    replace_lost_engines: Annotated[int, Field(ge=0, le=10**6)] = 0
    """Largest number of lost engines (dead or silent) that a run replaces; 0: a lost engine ends the run."""

    @property
    def bucket_bytes(self) -> int:
        """``update_weights_bucket_megabytes`` in bytes."""
        return self.update_weights_bucket_megabytes * 2**20


class RewardConfig(Section):
    """The verifiable reward."""

    function: str = "char_class"
    """A built-in name, or ``module:function`` called as ``f(data_source, solution_str, ground_truth, extra_info)``."""


class TrainerConfig(Section):
    """The run itself."""

    run_name: Annotated[str, AfterValidator(_checked_run_name)] | None = None
    """Name under ``output_dir``; None: the recipe's name and the time."""
    output_dir: FilePath = "outputs"
    total_training_steps: Annotated[int, Field(ge=1, le=10**9)] = 20
    save_freq: Annotated[int, Field(ge=-1, le=10**9), AfterValidator(_checked_save_freq)] = -1
    """Save after every N steps and after the last one; -1: never."""
    default_local_dir: FilePath | None = None
    """Where checkpoints go; None: ``checkpoints/<recipe>``, so that ``resume_mode=auto`` finds them again."""
    resume_mode: ResumeMode = ResumeMode.disable
    resume_from_path: FilePath | None = None
    """A ``global_step_N`` directory, with ``resume_mode=resume_path``."""
    seed: Seed = 0
    logger: list[Logger] = Field(default_factory=lambda: [Logger.console])

    @model_validator(mode="after")
    def _check_resume(self) -> TrainerConfig:
        asks = self.resume_mode is ResumeMode.resume_path
        if asks and self.resume_from_path is None:
            raise Contradiction("resume_mode=resume_path needs resume_from_path=DIR")
        if not asks and self.resume_from_path is not None:
            raise Contradiction(
                f"resume_from_path={self.resume_from_path} is not read with resume_mode={self.resume_mode}: "
                "set resume_mode=resume_path"
            )
        return self


class ClusterConfig(Section):
    """The numbers of processes, and the resources of each."""

    device: Device = "cpu"
    """With ``cuda`` each trainer and each rollout rank has one GPU."""
    colocated: bool = False
    """True if rollout rank i shares the GPU of training rank i. They take turns: one sleeps while the other works."""
    num_trainers: Ranks = 4
    num_rollouts: Annotated[int, Field(ge=0, le=2**20)] = 1
    """0 if nothing is generated, as in a conversion. Training needs at least 1."""
    cpus_per_trainer: Cpus = 0.25
    cpus_per_rollout: Cpus = 0.5
    ray_address: Annotated[str, AfterValidator(_checked_address)] | None = None
    """``local`` starts Ray on the loopback interface; ``auto`` or ``host:port`` joins a running cluster. None: in a
    submitted job that job's cluster, ``local`` elsewhere."""


class PhaseTimeouts(Section):
    """Seconds that each phase of any host framework may take (see lifecycle.Phase)."""

    bootstrap: Annotated[Seconds, Field(ge=MIN_BOOTSTRAP_TIMEOUT_S)] = 300.0
    """At least the time that ranks need to learn of each other's failures over the store."""
    logprob: Seconds = 1800.0
    train: Seconds = 1800.0
    save: Seconds = 1800.0
    teardown: Seconds = 60.0
    stopped: Annotated[float, Field(ge=0, le=30 * 24 * 3600)] = 10.0
    """Longest time for which a process of the run may stay stopped (SIGSTOP) before it is ended; 0: no limit."""


class TimeoutsConfig(PhaseTimeouts):
    """Seconds that each phase may take."""

    start: Seconds = 300.0
    world: Seconds = 120.0
    groups: Seconds = 300.0
    convert: Seconds = 1800.0
    load: Seconds = 1800.0
    joint: Seconds = 300.0
    offload: Seconds = 300.0
    rollout: Seconds = 1800.0
    reward: Seconds = 600.0
    onload: Seconds = 300.0
    sync: Seconds = 600.0


class MaxCtasConfig(Section):
    """Largest number of NCCL channels of each group, by Megatron's name in ``nccl_communicator_config_path``.

    Null: 1 if a group carries only scalars, else NCCL's own number. ``world`` is the default group.
    """

    world: Ctas | None = None
    dp_cp: Ctas | None = None
    intra_dp_cp: Ctas | None = None
    dp: Ctas | None = None
    cp: Ctas | None = None
    mp: Ctas | None = None
    tp: Ctas | None = None
    pp: Ctas | None = None
    embd: Ctas | None = None
    pos_embd: Ctas | None = None
    tp_dp_cp: Ctas | None = None
    tp_dp: Ctas | None = None
    tp_cp: Ctas | None = None
    ep: Ctas | None = None
    ep_tp: Ctas | None = None
    tp_ep_mp: Ctas | None = None
    tp_ep_pp: Ctas | None = None
    ep_dp: Ctas | None = None
    intra_ep_dp: Ctas | None = None
    inter_ep_dp: Ctas | None = None
    intra_dist_opt_instance: Ctas | None = None

    def limits(self) -> dict[str, int]:
        """Returns the limits that are set, by key."""
        return self.model_dump(exclude_none=True)


class BootstrapConfig(Section):
    """Connecting communicators before memory fills."""

    on_missing: Literal["raise", "bootstrap"] = "raise"
    """Reaction if an offload, a rollout or a weight sync comes before the bootstrap: raise, or bootstrap first."""
    budget: bool = True
    """Limit NCCL's channels: 1 for groups that carry only scalars or have one rank, 12 for groups between pipeline
    stages. False: NCCL's own number for all."""
    max_ctas: MaxCtasConfig = Field(default_factory=MaxCtasConfig)
    watch_steps: Steps = 3
    """Number of first training steps in which late allocations by collectives are detected; 0: none."""
    on_late: Literal["warn", "raise"] = "warn"
    """Reaction to a late allocation."""


class CheckpointConfig(Section):
    """How the training world saves."""

    fully_parallel_save: bool = False
    """Megatron's FullyParallelSaveStrategyWrapper; adds an all-gather per save."""
    validate_access_integrity: bool = False
    """Megatron's sharding validation; adds an all-gather of all metadata per save."""
    digest: bool = False
    """Store a digest of each rank's state and compare it after a load; costs one pass over the state."""
    async_save: bool = False
    """Write while training goes on. The trainers wait only for a copy to host memory. They wait for the rest before
    they offload, save again or end."""
    keep_last: Steps = 2
    """Number of complete checkpoints to keep. Older ones are removed after a new one is committed. 0 keeps all."""

    @model_validator(mode="after")
    def _check_async(self) -> CheckpointConfig:
        for flag in ("fully_parallel_save", "validate_access_integrity"):
            if self.async_save and getattr(self, flag):
                raise Contradiction(
                    f"async_save=true with {flag}=true: megatron-core's own save is collective and cannot go on beside "
                    "training; turn one of the two off"
                )
        return self


class TeardownConfig(Section):
    """How a run ends."""

    kill_after_s: Seconds = 10.0
    """Seconds between asking a process to end and killing it."""


class RlSafeConfig(Section):
    """Settings of a training rank. An adapter builds them from its host's settings."""

    timeouts: TimeoutsConfig = Field(default_factory=TimeoutsConfig)
    bootstrap: BootstrapConfig = Field(default_factory=BootstrapConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    teardown: TeardownConfig = Field(default_factory=TeardownConfig)
    restarts: Steps = 0
    """Number of restarts after ranks fail, each from the run's newest complete checkpoint."""


class RunConfig(Section):
    """A whole run, as a recipe states it."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    actor: ActorConfig = Field(default_factory=ActorConfig)
    megatron: MegatronConfig = Field(default_factory=MegatronConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    rl_safe: RlSafeConfig = Field(default_factory=RlSafeConfig)

    def check_training(self) -> None:
        """Checks the rules that only a training run must keep, not a conversion or a live check.

        Raises:
            ConfigError: If a required key is empty, or for the first broken rule.
        """
        required = {"data.train_files": self.data.train_files, "model.path": self.model.path}
        if missing := [key for key, value in required.items() if not value]:
            raise ConfigError(f"{', '.join(missing)} has no value; set it in the recipe or as {missing[0]}=VALUE")
        batch, mini_batch, n = self.data.train_batch_size, self.actor.ppo_mini_batch_size, self.rollout.n
        if mini_batch is not None and batch % mini_batch:
            raise ConfigError(f"actor.ppo_mini_batch_size={mini_batch} does not divide data.train_batch_size={batch}")
        if batch * n > _MOST_SEQUENCES:
            raise ConfigError(
                f"data.train_batch_size={batch} x rollout.n={n} are more than {_MOST_SEQUENCES} sequences a step; "
                "lower one of them"
            )
        if n < 2:
            # Every estimator compares the samples of one prompt.
            raise ConfigError(f"rollout.n={n}: training compares the samples of a prompt; set it to 2 or more")
        if self.cluster.num_rollouts < 1:
            raise ConfigError("cluster.num_rollouts=0: training needs a rollout rank; set it to 1 or more")
        if self.model.create is not None:
            self.model.create.check_small()
        if self.cluster.device == "cpu" and self.model.dtype != "float32":
            raise ConfigError(f"model.dtype={self.model.dtype} must be float32 with cluster.device=cpu")

    @model_validator(mode="after")
    def _check_support(self) -> RunConfig:
        """Refuses settings that the built-in trainer does not support. Hosts build only single sections."""
        megatron, rollout, cluster = self.megatron, self.rollout, self.cluster
        if cluster.colocated and cluster.device == "cpu":
            raise Contradiction("cluster.colocated=true needs cluster.device=cuda: there is no GPU to share")
        if cluster.colocated and cluster.num_rollouts != cluster.num_trainers:
            raise Contradiction(
                f"cluster.colocated=true with cluster.num_trainers={cluster.num_trainers} and cluster.num_rollouts="
                f"{cluster.num_rollouts}: each trainer shares its GPU with one rollout rank, so set them equal"
            )
        if cluster.device == "cpu" and (megatron.fp8 or megatron.transformer_impl == "transformer_engine"):
            key = f"fp8={megatron.fp8}" if megatron.fp8 else "transformer_impl=transformer_engine"
            raise Contradiction(f"megatron.{key} needs cluster.device=cuda: Transformer Engine's layers run on GPUs")
        if megatron.context_parallel_size > 1:
            raise Contradiction(
                f"megatron.context_parallel_size={megatron.context_parallel_size} must be 1: "
                "the built-in trainer does not split sequences"
            )
        if cluster.num_rollouts % rollout.tensor_model_parallel_size:
            raise Contradiction(
                f"cluster.num_rollouts={cluster.num_rollouts} must be a multiple of rollout.tensor_model_parallel_size="
                f"{rollout.tensor_model_parallel_size}: so many rollout ranks share one vLLM engine"
            )
        if rollout.replace_lost_engines and cluster.colocated:
            raise Contradiction(
                f"rollout.replace_lost_engines={rollout.replace_lost_engines} with cluster.colocated=true: only an "
                "engine with a place of its own can be replaced; set replace_lost_engines=0"
            )
        if cluster.device == "cpu" and rollout.enable_rollout_routing_replay:
            raise Contradiction(
                "rollout.enable_rollout_routing_replay=true needs cluster.device=cuda: vLLM's CPU build does not tell "
                "which experts it has chosen"
            )
        if cluster.device == "cpu" and rollout.block_size % 32:
            raise Contradiction(f"rollout.block_size={rollout.block_size} must be a multiple of 32 on CPU")
        return self
