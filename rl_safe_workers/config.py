"""The configuration of a run: what the keys are, and how a recipe and dotted overrides become one.

Keys follow the names that verl's users know; the node ``rl_safe`` holds what every host framework shares.
Each part of the program is given its own node, never the whole run.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum

from omegaconf import MISSING


class ResumeMode(StrEnum):
    """Where a run starts from; the names are verl's."""

    disable = "disable"
    """From the HF weights."""
    auto = "auto"
    """From the newest complete checkpoint of ``trainer.default_local_dir``, or the HF weights if there is none."""
    resume_path = "resume_path"
    """From ``trainer.resume_from_path``."""


class AdvEstimator(StrEnum):
    """How rewards become advantages."""

    grpo = "grpo"
    """Reward minus the mean of its group, over its standard deviation (arXiv:2402.03300, section 4.1.2)."""
    rloo = "rloo"
    """Reward minus the mean of the other samples of its group (arXiv:2402.14740)."""


@dataclass(kw_only=True)
class SeededModelConfig:
    """A tiny Qwen3 or Qwen3-MoE made from a seed when ``model.path`` does not exist yet."""

    seed: int = 0
    num_hidden_layers: int = 2
    hidden_size: int = 128
    intermediate_size: int = 256
    moe_intermediate_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    """0 makes a dense Qwen3."""
    num_experts_per_tok: int = 2


@dataclass(kw_only=True)
class ModelConfig:
    """The HF model."""

    path: str = MISSING
    """A local Qwen3 or Qwen3-MoE directory: ``config.json``, safetensors and a tokenizer. Remote code stays off."""
    create: SeededModelConfig | None = None
    """Set: make a seeded model at ``path`` if nothing is there."""
    dtype: str = "float32"
    """Of the parameters of trainer and rollout: ``float32``; on GPUs also ``bfloat16``, with an optimizer in fp32."""


@dataclass(kw_only=True)
class DataConfig:
    """Prompts: parquet files in verl's layout (``data_source``, ``prompt``, ``reward_model.ground_truth``)."""

    train_files: list[str] = MISSING
    train_batch_size: int = 8
    """Prompts per step; each is sampled ``rollout.n`` times."""
    max_prompt_length: int = 64
    """Tokens; a longer prompt is an error, as with verl's ``truncation=error``. None is dropped or truncated."""
    max_response_length: int = 32
    """Tokens generated at most."""
    shuffle: bool = True


@dataclass(kw_only=True)
class AlgorithmConfig:
    """From rewards to advantages."""

    adv_estimator: AdvEstimator = AdvEstimator.grpo
    norm_adv_by_std_in_grpo: bool = True


@dataclass(kw_only=True)
class OptimConfig:
    """Adam, through Megatron's DistributedOptimizer."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""


@dataclass(kw_only=True)
class ActorConfig:
    """The policy update."""

    ppo_epochs: int = 1
    """Passes over each step's samples."""
    ppo_mini_batch_size: int | None = None
    """Prompts per optimizer step; None: all of the step's."""
    ppo_micro_batch_size_per_gpu: int = 4
    """Sequences per forward on each data-parallel rank."""
    clip_ratio: float = 0.2
    use_kl_loss: bool = False
    """Adds the KL divergence from the starting weights to the loss."""
    kl_loss_coef: float = 0.001
    optim: OptimConfig = field(default_factory=OptimConfig)


@dataclass(kw_only=True)
class MegatronConfig:
    """Parallel sizes of the training world and Megatron's own settings."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    """Virtual stages of each pipeline stage, which interleave; None: it is one piece."""
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    num_distributed_optimizer_instances: int = 1
    """Data-parallel ranks are split into so many sets, each with an optimizer state of its own."""
    moe_token_dispatcher_type: str = "alltoall"
    """``alltoall`` or ``allgather``."""
    param_offload: bool = True
    """Move parameters to host memory before each rollout."""
    grad_offload: bool = True
    """Free gradient buffers before each rollout."""
    optimizer_offload: bool = True
    """Move optimizer state to host memory before each rollout."""


@dataclass(kw_only=True)
class RolloutConfig:
    """Generation."""

    name: str = "vllm"
    tensor_model_parallel_size: int = 1
    n: int = 8
    """Samples per prompt."""
    temperature: float = 1.0
    max_logprob_gap: float = 1e-5
    """Largest allowed difference, in nats, between rollout and trainer in the log-probability of a sampled token."""
    kv_cache_gib: float = 0.25
    """KV cache of each rollout rank."""
    block_size: int = 32
    """Tokens per KV block; the CPU backend needs a multiple of 32."""
    release_comms: str = "never"
    """Give the memory of the trainers' communicators to the rollout, and connect them again after it: ``never``,
    ``auto`` (where both share GPUs) or ``always``."""
    enable_rollout_routing_replay: bool = False
    """Let the trainers send each token to the experts that the rollout has sent it to; for MoE models on GPUs."""
    update_weights_bucket_megabytes: int = 256
    """MiB per broadcast of a weight sync at most; a larger weight travels alone. Every rank needs room for two."""

    @property
    def bucket_bytes(self) -> int:
        """``update_weights_bucket_megabytes`` in bytes."""
        return self.update_weights_bucket_megabytes * 2**20


@dataclass(kw_only=True)
class RewardConfig:
    """The verifiable reward."""

    function: str = "char_class"
    """A built-in name, or ``module:function`` called as ``f(data_source, solution_str, ground_truth, extra_info)``."""


@dataclass(kw_only=True)
class TrainerConfig:
    """The run itself."""

    run_name: str | None = None
    """Name under ``output_dir``; None: the recipe's name and the time."""
    output_dir: str = "outputs"
    total_training_steps: int = 20
    save_freq: int = -1
    """Save every so many steps and after the last one; -1: never."""
    default_local_dir: str | None = None
    """Where checkpoints go; None: ``checkpoints/<recipe>``, so that ``resume_mode=auto`` finds them again."""
    resume_mode: ResumeMode = ResumeMode.disable
    resume_from_path: str | None = None
    """A ``global_step_N`` directory, with ``resume_mode=resume_path``."""
    seed: int = 0
    logger: list[str] = field(default_factory=lambda: ["console"])
    """``console``, ``tensorboard``, or both."""


@dataclass(kw_only=True)
class ClusterConfig:
    """Processes and what each may use."""

    device: str = "cpu"
    """``cpu`` or ``cuda``; with the latter each trainer and each rollout rank has one GPU."""
    colocated: bool = False
    """Whether rollout rank i shares the GPU of training rank i, in turn: one sleeps while the other works."""
    num_trainers: int = 4
    num_rollouts: int = 1
    cpus_per_trainer: float = 0.25
    cpus_per_rollout: float = 0.5
    ray_address: str | None = None
    """``local`` starts Ray on the loopback interface; ``auto`` or ``host:port`` joins a running cluster. None: in a
    submitted job that job's cluster, ``local`` elsewhere."""


@dataclass(kw_only=True)
class TimeoutsConfig:
    """Seconds that each phase may take (see lifecycle.Phase)."""

    start: float = 300.0
    world: float = 120.0
    groups: float = 300.0
    bootstrap: float = 300.0
    convert: float = 1800.0
    load: float = 1800.0
    joint: float = 300.0
    offload: float = 300.0
    rollout: float = 1800.0
    reward: float = 600.0
    onload: float = 300.0
    logprob: float = 1800.0
    train: float = 1800.0
    sync: float = 600.0
    save: float = 1800.0
    teardown: float = 60.0


@dataclass(kw_only=True)
class MaxCtasConfig:
    """NCCL's channels at most, by Megatron's name of a group in ``nccl_communicator_config_path``.

    Null: 1 where a group carries only scalars, NCCL's own number elsewhere. ``world`` is the default group.
    """

    world: int | None = None
    dp_cp: int | None = None
    intra_dp_cp: int | None = None
    dp: int | None = None
    cp: int | None = None
    mp: int | None = None
    tp: int | None = None
    pp: int | None = None
    embd: int | None = None
    pos_embd: int | None = None
    tp_dp_cp: int | None = None
    tp_dp: int | None = None
    tp_cp: int | None = None
    ep: int | None = None
    ep_tp: int | None = None
    tp_ep_mp: int | None = None
    tp_ep_pp: int | None = None
    ep_dp: int | None = None
    intra_ep_dp: int | None = None
    inter_ep_dp: int | None = None
    intra_dist_opt_instance: int | None = None

    def limits(self) -> dict[str, int]:
        """Those that are set."""
        return {key.name: limit for key in fields(self) if (limit := getattr(self, key.name)) is not None}


@dataclass(kw_only=True)
class BootstrapConfig:
    """Connecting communicators before memory fills."""

    on_missing: str = "raise"
    """What offload and rollout do if the bootstrap has not run: ``raise``, or ``bootstrap`` first."""
    budget: bool = True
    """Give groups that carry only scalars, or have one rank, a single channel, and those between pipeline stages 12;
    false: NCCL's own number for all."""
    max_ctas: MaxCtasConfig = field(default_factory=MaxCtasConfig)
    watch_steps: int = 3
    """In how many first training steps each collective is looked at for device memory that it takes late; 0: never."""
    on_late: str = "warn"
    """What to do about it: ``warn`` or ``raise``."""


@dataclass(kw_only=True)
class CheckpointConfig:
    """How the training world saves."""

    fully_parallel_save: bool = False
    """Megatron's FullyParallelSaveStrategyWrapper; adds an all-gather per save."""
    validate_access_integrity: bool = False
    """Megatron's sharding validation; adds an all-gather of all metadata per save."""
    digest: bool = False
    """Store a digest of each rank's state and compare it after a load; costs one pass over the state."""
    async_save: bool = False
    """Write while training goes on; the trainers wait for a copy to host memory only, and for the rest before they
    offload, save again or end."""
    keep_last: int = 2
    """Complete checkpoints kept; older ones are removed after a new one is committed. 0 keeps all."""


@dataclass(kw_only=True)
class TeardownConfig:
    """How a run ends."""

    kill_after_s: float = 10.0
    """Seconds between asking a process to end and killing it."""


@dataclass(kw_only=True)
class RlSafeConfig:
    """What every host framework shares."""

    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    bootstrap: BootstrapConfig = field(default_factory=BootstrapConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    teardown: TeardownConfig = field(default_factory=TeardownConfig)
    restarts: int = 0
    """How often a run whose ranks fail is started again, from its newest complete checkpoint."""


@dataclass(kw_only=True)
class RunConfig:
    """A whole run, as a recipe states it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    rl_safe: RlSafeConfig = field(default_factory=RlSafeConfig)
