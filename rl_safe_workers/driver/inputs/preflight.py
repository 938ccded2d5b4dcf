"""Checks a run's input before anything is started or written.

Reads the configuration, the model's ``config.json`` and file names. Imports no torch and starts no process.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import fields
from pathlib import Path

from rl_safe_workers.config import ModelConfig, RunConfig, SeededModelConfig
from rl_safe_workers.driver.inputs.rewards import resolve_reward
from rl_safe_workers.errors import ConfigError, DataError, LayoutError, ModelError, ResourceError
from rl_safe_workers.models.hf_directory import check_tokenizer, read_hf_directory
from rl_safe_workers.models.seeded import MAX_POSITIONS, VOCAB_SIZE
from rl_safe_workers.recipe import kind_at
from rl_safe_workers.topology.budget import plan_limits
from rl_safe_workers.topology.groups import Features
from rl_safe_workers.topology.layout import (
    ModelShape,
    ParallelLayout,
    check_layout,
    check_model,
    check_trainable,
    divisors,
)


def preflight(config: RunConfig, *, cpus: float) -> None:
    """Refuses bad input. Blocks for milliseconds. Idempotent; writes nothing.

    Args:
        config: Configuration of the run. It need not come from a recipe.
        cpus: Number of CPUs that the run may use; infinite to leave the check to a cluster's scheduler.

    Raises:
        UsageError: On the first problem found, with the subclass that fits. The message says what to change.
    """
    config.checked().check_training()
    layout = layout_of(config)
    check_layout(layout)
    shape = read_model_shape(config.model)
    check_model(layout, shape)
    check_trainable(layout, shape)
    if config.rollout.enable_rollout_routing_replay and not shape.num_experts:
        raise ConfigError(f"rollout.enable_rollout_routing_replay=true: {config.model.path} has no experts to route to")
    _check_engines(config, shape)
    _check_lengths(config, shape)
    _check_batch(config, layout)
    _check_virtual_stages(config, layout, shape)
    _check_instances(config, layout)
    plan_limits(layout, Features.of(config.megatron), config.rl_safe.bootstrap.max_ctas.limits())
    _check_files(config)
    _check_places(config)
    resolve_reward(config.reward.function)
    if "tensorboard" in config.trainer.logger and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "trainer.logger has tensorboard, which is not installed: pip install tensorboard, or leave it out"
        )
    _check_cpus(config, cpus)


def layout_of(config: RunConfig) -> ParallelLayout:
    """Returns the layout of the training world that a configuration asks for, unchecked."""
    return ParallelLayout.of(config.megatron, world_size=config.cluster.num_trainers)


def read_model_shape(config: ModelConfig) -> ModelShape:
    """Returns the shape of the model at ``model.path``, or of the model that ``model.create`` would make there.

    Raises:
        ModelError: If the directory is missing, is incomplete, or has an unsupported architecture.
    """
    path, kind = Path(config.path), kind_at("model.path", config.path)
    if kind == "folder":
        shape = _read_model_dir(path)
        _check_is_asked_for(path, shape, config.create)
        return shape
    if kind is not None:
        raise ModelError(f"model.path={path} is not a directory; give the directory that holds config.json")
    if config.create is None:
        raise ModelError(
            f"model.path={path} does not exist; give a local directory of a supported model (docs/checkpoints.md), "
            "or model.create={} to make a small seeded one there"
        )
    return _seeded_shape(config.create)


def _check_is_asked_for(path: Path, shape: ModelShape, create: SeededModelConfig | None) -> None:
    """Raises ModelError if ``model.create`` asks for other sizes than the model that is already there."""
    if create is None or shape.vocab_size != VOCAB_SIZE:
        return
    for field in fields(ModelShape):
        there, asked = getattr(shape, field.name), getattr(_seeded_shape(create), field.name)
        if there != asked:
            raise ModelError(
                f"model.path={path} holds a model with {field.name} {there}, model.create asks for {asked}: "
                "remove it or choose another model.path"
            )


def _read_model_dir(path: Path) -> ModelShape:
    shape = read_hf_directory(path)
    check_tokenizer(path)
    return shape


def _seeded_shape(spec: SeededModelConfig) -> ModelShape:
    return ModelShape(
        model_type="qwen3_moe" if spec.num_experts else "qwen3",
        num_layers=spec.num_hidden_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        num_experts=spec.num_experts,
        vocab_size=VOCAB_SIZE,
        hidden_size=spec.hidden_size,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
    )


def _check_engines(config: RunConfig, shape: ModelShape) -> None:
    ranks = config.rollout.tensor_model_parallel_size
    if shape.num_attention_heads % ranks:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size={ranks}: {config.model.path} has {shape.num_attention_heads} "
            "attention heads, which so many ranks cannot share evenly"
        )


def _check_lengths(config: RunConfig, shape: ModelShape) -> None:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    if prompt + response > shape.max_position_embeddings:
        raise ConfigError(
            f"data.max_prompt_length={prompt} and data.max_response_length={response} make {prompt + response} tokens, "
            f"but {config.model.path} has {shape.max_position_embeddings} positions; lower one of them"
        )


def _check_batch(config: RunConfig, layout: ParallelLayout) -> None:
    """Raises ConfigError unless all data-parallel ranks get equally many whole micro-batches per optimizer step."""
    mini_batch = config.actor.ppo_mini_batch_size
    key = "data.train_batch_size" if mini_batch is None else "actor.ppo_mini_batch_size"
    prompts = config.data.train_batch_size if mini_batch is None else mini_batch
    sequences, micro_batch = prompts * config.rollout.n, config.actor.ppo_micro_batch_size_per_gpu
    product = f"{key}={prompts} x rollout.n={config.rollout.n} = {sequences} sequences"
    if sequences % layout.data:
        raise ConfigError(f"{product} do not divide over {layout.data} data-parallel ranks; change one of them")
    per_rank = sequences // layout.data
    if per_rank % micro_batch:
        fitting = ", ".join(map(str, divisors(per_rank)))
        raise ConfigError(
            f"actor.ppo_micro_batch_size_per_gpu={micro_batch} does not divide the {per_rank} sequences of each of "
            f"{layout.data} data-parallel ranks ({product}); use one of {fitting}"
        )


def _check_virtual_stages(config: RunConfig, layout: ParallelLayout, shape: ModelShape) -> None:
    key, virtual = "megatron.virtual_pipeline_model_parallel_size", config.megatron.virtual_pipeline_model_parallel_size
    if virtual is None:
        return
    pieces = layout.pipeline * virtual
    if shape.num_layers % pieces:
        raise LayoutError(
            f"{key}={virtual} cuts {layout.pipeline} stages into {pieces} pieces, which do not divide "
            f"{shape.num_layers} layers"
        )
    sequences = (config.actor.ppo_mini_batch_size or config.data.train_batch_size) * config.rollout.n // layout.data
    micro_batches = sequences // config.actor.ppo_micro_batch_size_per_gpu
    if micro_batches % layout.pipeline:
        raise ConfigError(
            f"{key}={virtual}: the {micro_batches} micro batches of each data-parallel rank at an optimizer step do "
            f"not divide by {layout.pipeline} stages; change actor.ppo_micro_batch_size_per_gpu"
        )


def _check_instances(config: RunConfig, layout: ParallelLayout) -> None:
    key, instances = "megatron.num_distributed_optimizer_instances", config.megatron.num_distributed_optimizer_instances
    for size, name in ((layout.data * layout.context, "data-parallel"), (layout.expert_data, "expert-data-parallel")):
        if size % instances:
            raise LayoutError(
                f"{key}={instances} does not divide the {name} size {size}: set it to "
                f"{' or '.join(map(str, divisors(size)))}"
            )
    if instances > 1 and config.trainer.save_freq > 0:
        raise ConfigError(
            f"{key}={instances} with trainer.save_freq={config.trainer.save_freq}: saves support only one instance; "
            f"set {key}=1, or trainer.save_freq=-1"
        )


def _check_files(config: RunConfig) -> None:
    for name in config.data.train_files:
        if Path(name).suffix != ".parquet":
            raise DataError(f"data.train_files has {name}, which does not end in .parquet; convert it to parquet")
        if kind_at("data.train_files", name) != "file":
            raise DataError(f"data.train_files has {name}, which does not exist or is not a file; check the path")
    resume = config.trainer.resume_from_path
    if resume is not None and kind_at("trainer.resume_from_path", resume) != "folder":
        raise ConfigError(f"trainer.resume_from_path={resume} is not a directory; give a global_step_N directory")


def _check_places(config: RunConfig) -> None:
    """Refuses folders that the run must write but cannot make."""
    trainer = config.trainer
    places = {"trainer.output_dir": Path(trainer.output_dir, trainer.run_name or "")}
    if trainer.save_freq > 0 and trainer.default_local_dir:
        places["trainer.default_local_dir"] = Path(trainer.default_local_dir)
    if config.model.create is not None:
        places["model.path"] = Path(config.model.path)
    for key, place in places.items():
        nearest = next(path for path in (place, *place.parents) if kind_at(key, path) is not None)
        if kind_at(key, nearest) != "folder":
            raise ConfigError(f"{key}={place}: {nearest} exists and is not a folder; choose another place")
        if key == "trainer.output_dir" and not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(f"{key}={place}: you have no permission to write to {nearest}; choose another place")


def _check_cpus(config: RunConfig, cpus: float) -> None:
    cluster = config.cluster
    needed = cluster.num_trainers * cluster.cpus_per_trainer + cluster.num_rollouts * cluster.cpus_per_rollout
    # Sums of fractions such as 0.1 are not exact. Ray itself counts in ten-thousandths.
    if needed > cpus + 1e-4:
        raise ResourceError(
            f"{cluster.num_trainers} trainers x {cluster.cpus_per_trainer:g} CPUs + {cluster.num_rollouts} rollouts x "
            f"{cluster.cpus_per_rollout:g} CPUs = {needed:g} CPUs, but there are {cpus:g}; lower "
            "cluster.cpus_per_trainer, cluster.cpus_per_rollout, cluster.num_trainers or cluster.num_rollouts"
        )
