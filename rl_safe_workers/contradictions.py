"""What is wrong with a configuration whose keys and types are right: values out of range and settings that clash.

Only what the configuration alone can tell. Whether it fits the model, the data and the machine is the preflight's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from operator import attrgetter

from rl_safe_workers.config import (
    ResumeMode,
    RunConfig,
    SeededModelConfig,
    TimeoutsConfig,
)
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.foreign_files import complaint_about_path

POSITIVE = (
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "actor.ppo_epochs",
    "actor.ppo_mini_batch_size",
    "actor.ppo_micro_batch_size_per_gpu",
    "actor.clip_ratio",
    "actor.optim.lr",
    "actor.optim.eps",
    "megatron.tensor_model_parallel_size",
    "megatron.pipeline_model_parallel_size",
    "megatron.expert_model_parallel_size",
    "megatron.expert_tensor_parallel_size",
    "megatron.context_parallel_size",
    "megatron.num_distributed_optimizer_instances",
    "rollout.tensor_model_parallel_size",
    "rollout.n",
    "rollout.temperature",
    "rollout.kv_cache_gib",
    "rollout.block_size",
    "rollout.update_weights_bucket_megabytes",
    "trainer.total_training_steps",
    "cluster.num_trainers",
    "cluster.num_rollouts",
    "cluster.cpus_per_trainer",
    "cluster.cpus_per_rollout",
    "rl_safe.teardown.kill_after_s",
    *(f"rl_safe.timeouts.{field.name}" for field in fields(TimeoutsConfig)),
)
"""Finite and above 0, where set. A timeout is finite because nothing may wait without a deadline."""
NOT_NEGATIVE = (
    "actor.kl_loss_coef",
    "actor.optim.weight_decay",
    "actor.optim.beta1",
    "actor.optim.beta2",
    "actor.optim.clip_grad",
    "rollout.max_logprob_gap",
    "trainer.seed",
    "rl_safe.checkpoint.keep_last",
    "rl_safe.bootstrap.watch_steps",
    "rl_safe.restarts",
)
"""Finite and at least 0."""
MOST = 2**31 - 1
"""Largest number that a key may hold; in seconds, 68 years."""
PATHS = (
    "model.path",
    "trainer.output_dir",
    "trainer.default_local_dir",
    "trainer.resume_from_path",
)
_LONGEST_RUN_NAME = 200
_MOST_SEQUENCES = 2**20
_MOST_SEEDED = 10**9
"""Product of layers and widths of a seeded model; some two or three times as many parameters."""
CHOICES: Mapping[str, Sequence[str]] = {
    "model.dtype": ("float32", "bfloat16"),
    "cluster.device": ("cpu", "cuda"),
    "megatron.moe_token_dispatcher_type": ("alltoall", "allgather"),
    "rollout.name": ("vllm",),
    "rollout.release_comms": ("never", "auto", "always"),
    "rl_safe.bootstrap.on_missing": ("raise", "bootstrap"),
    "rl_safe.bootstrap.on_late": ("warn", "raise"),
}
_HOST_AND_PORT = re.compile(r"(?!\w+://)\S+:\d+")
HEARING_S = 1.0
"""Twice what a rank waits at the store before it looks whether another one has given up (control/supervision.py)."""
LOGGERS = ("console", "tensorboard")


def check_config(config: RunConfig) -> None:
    """Raises ConfigError for the first value out of range, or pair of settings that contradict each other."""
    for complaint in _complaints(config):
        raise ConfigError(complaint)


def check_settings(config: RunConfig) -> None:
    """Raises ConfigError for the first value out of range, or that the platform cannot do; for what trains nothing."""
    found = (_ranges(config), _choices(config, ["cluster.device"]), _names(config), _devices(config), _platform(config))
    for complaint in chain.from_iterable(found):
        raise ConfigError(complaint)


def _complaints(config: RunConfig) -> Iterator[str]:
    yield from _ranges(config)
    yield from _choices(config)
    yield from _names(config)
    yield from _batch(config)
    yield from _trainer(config)
    yield from _devices(config)
    if config.cluster.device == "cpu" and config.model.dtype != "float32":
        yield f"model.dtype={config.model.dtype} must be float32 with cluster.device=cpu"
    yield from _platform(config)
    yield from _checkpoint(config)
    if config.model.create is not None:
        yield from _seeded_model(config.model.create)


def _checkpoint(config: RunConfig) -> Iterator[str]:
    checkpoint = config.rl_safe.checkpoint
    for flag in ("fully_parallel_save", "validate_access_integrity"):
        if checkpoint.async_save and getattr(checkpoint, flag):
            yield (
                f"rl_safe.checkpoint.async_save=true with rl_safe.checkpoint.{flag}=true: megatron-core's own save is "
                "collective and cannot go on beside training; turn one of the two off"
            )


def _ranges(config: RunConfig) -> Iterator[str]:
    for key in POSITIVE:
        value = attrgetter(key)(config)
        if value is not None and not 0 < value < math.inf:
            yield f"{key}={value} must be a number above 0 and finite"
    for key in NOT_NEGATIVE:
        value = attrgetter(key)(config)
        if not 0 <= value < math.inf:
            yield f"{key}={value} must be a number of at least 0 and finite"
    for key in (*POSITIVE, *NOT_NEGATIVE):
        value = attrgetter(key)(config)
        if value is not None and value > MOST:
            yield f"{key}={value} must be at most {MOST}"
    if config.rl_safe.timeouts.bootstrap < HEARING_S:
        yield (
            f"rl_safe.timeouts.bootstrap={config.rl_safe.timeouts.bootstrap} is less than the {HEARING_S} s in which "
            "ranks hear of each other over the store"
        )
    for key in ("actor.optim.beta1", "actor.optim.beta2"):
        if attrgetter(key)(config) >= 1:
            yield f"{key}={attrgetter(key)(config)} must be below 1"


def _choices(config: RunConfig, keys: Iterable[str] = CHOICES) -> Iterator[str]:
    for key in keys:
        value = attrgetter(key)(config)
        if value not in CHOICES[key]:
            yield f"{key}={value} is not supported: use {' or '.join(CHOICES[key])}"
    for name in config.trainer.logger:
        if name not in LOGGERS:
            yield f"trainer.logger has {name!r}: use any of {', '.join(LOGGERS)}"


def _names(config: RunConfig) -> Iterator[str]:
    """Looks at names alone; what is there, and whether it can be written, is the preflight's."""
    run_name = config.trainer.run_name
    if run_name is not None and not is_run_name(run_name):
        yield (
            f"trainer.run_name={run_name!r:.80} is no name of a folder: use at most {_LONGEST_RUN_NAME} bytes, "
            "without / and without control characters"
        )
    paths = {key: attrgetter(key)(config) for key in PATHS}
    paths |= {f"data.train_files[{number}]": name for number, name in enumerate(config.data.train_files)}
    for key, path in paths.items():
        if path and (complaint := complaint_about_path(path)):
            yield f"{key}={path!r:.80} {complaint}"


def is_run_name(name: str) -> bool:
    """Whether a text can be the name of one folder, with room for what is added to it.

    >>> is_run_name("grpo-7b"), is_run_name("../grpo"), is_run_name("..")
    (True, False, False)
    """
    plain = name not in ("", ".", "..") and "/" not in name and name.isprintable()
    return plain and len(name.encode()) <= _LONGEST_RUN_NAME


def _batch(config: RunConfig) -> Iterator[str]:
    if not config.data.train_files:
        yield "data.train_files is empty: name at least one parquet file"
    batch, mini_batch = config.data.train_batch_size, config.actor.ppo_mini_batch_size
    if mini_batch is not None and batch % mini_batch:
        yield f"actor.ppo_mini_batch_size={mini_batch} does not divide data.train_batch_size={batch}"
    if batch * config.rollout.n > _MOST_SEQUENCES:
        yield (
            f"data.train_batch_size={batch} x rollout.n={config.rollout.n} are more than {_MOST_SEQUENCES} sequences "
            "a step; lower one of them"
        )
    if config.rollout.n < 2:
        # Every estimator there is compares the samples of one prompt.
        yield (
            f"rollout.n={config.rollout.n} with algorithm.adv_estimator={config.algorithm.adv_estimator}: "
            "a group needs at least 2 samples to compare"
        )


def _trainer(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.save_freq != -1 and trainer.save_freq < 1:
        yield f"trainer.save_freq={trainer.save_freq} must be -1 (never) or at least 1"
    if trainer.resume_mode is ResumeMode.resume_path and trainer.resume_from_path is None:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path=DIR"
    if trainer.resume_mode is not ResumeMode.resume_path and trainer.resume_from_path is not None:
        yield (
            f"trainer.resume_from_path={trainer.resume_from_path} is not read with trainer.resume_mode="
            f"{trainer.resume_mode}: set trainer.resume_mode=resume_path"
        )


def _devices(config: RunConfig) -> Iterator[str]:
    cluster = config.cluster
    address = cluster.ray_address
    if address not in (None, "local", "auto") and not _HOST_AND_PORT.fullmatch(address or ""):
        yield f"cluster.ray_address={address} is not supported: use local, auto or host:port, as of `ray start`"
    if cluster.colocated and cluster.device == "cpu":
        yield "cluster.colocated=true needs cluster.device=cuda: there is no GPU to share"
    if cluster.colocated and cluster.num_rollouts != cluster.num_trainers:
        yield (
            f"cluster.colocated=true with cluster.num_trainers={cluster.num_trainers} and cluster.num_rollouts="
            f"{cluster.num_rollouts}: each trainer shares its GPU with one rollout rank, so set them equal"
        )


def _platform(config: RunConfig) -> Iterator[str]:
    megatron, rollout, cluster = config.megatron, config.rollout, config.cluster
    virtual = megatron.virtual_pipeline_model_parallel_size
    if virtual is not None and (virtual < 2 or megatron.pipeline_model_parallel_size < 2):
        yield (
            f"megatron.virtual_pipeline_model_parallel_size={virtual} with megatron.pipeline_model_parallel_size="
            f"{megatron.pipeline_model_parallel_size}: stages are cut into 2 or more, and there must be 2 or more of "
            "them; set it to null"
        )
    if megatron.context_parallel_size > 1:
        yield (
            f"megatron.context_parallel_size={megatron.context_parallel_size} must be 1: "
            "Megatron's attention without Transformer Engine has no context parallelism"
        )
    if rollout.tensor_model_parallel_size > 1:
        yield (
            f"rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} must be 1: "
            "each vLLM engine is one process; for more of them raise cluster.num_rollouts"
        )
    if cluster.device == "cpu" and rollout.enable_rollout_routing_replay:
        yield (
            "rollout.enable_rollout_routing_replay=true needs cluster.device=cuda: vLLM's CPU build does not tell "
            "which experts it has chosen"
        )
    if cluster.device == "cpu" and rollout.block_size % 32:
        yield f"rollout.block_size={rollout.block_size} must be a multiple of 32 on CPU"


def _seeded_model(spec: SeededModelConfig) -> Iterator[str]:
    for field in fields(spec):
        value, least = getattr(spec, field.name), int(field.name not in ("seed", "num_experts"))
        if not least <= value <= MOST:
            yield f"model.create.{field.name}={value} must be at least {least} and at most {MOST}"
    width = max(spec.intermediate_size, max(1, spec.num_experts) * spec.moe_intermediate_size)
    heads = (spec.num_attention_heads + spec.num_key_value_heads) * spec.head_dim
    if spec.num_hidden_layers * spec.hidden_size * (width + heads) > _MOST_SEEDED:
        yield (
            f"model.create with {spec.num_hidden_layers} layers of {spec.hidden_size} x {width + heads} is no small "
            "model: give a model.path, or lower model.create.hidden_size"
        )
    if spec.num_attention_heads % spec.num_key_value_heads:
        yield (
            f"model.create.num_key_value_heads={spec.num_key_value_heads} does not divide "
            f"model.create.num_attention_heads={spec.num_attention_heads}"
        )
    if spec.head_dim % 2:
        yield f"model.create.head_dim={spec.head_dim} must be even: RoPE turns pairs"
    if spec.num_experts and not 1 <= spec.num_experts_per_tok <= spec.num_experts:
        yield (
            f"model.create.num_experts_per_tok={spec.num_experts_per_tok} must be at most "
            f"model.create.num_experts={spec.num_experts}"
        )
