"""Creates Megatron's groups over the training world."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from tempfile import NamedTemporaryFile
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from rl_safe_workers.comms.live_groups import live_groups
from rl_safe_workers.compat import torch_groups
from rl_safe_workers.config import MegatronConfig
from rl_safe_workers.topology.budget import NCCL_MAXIMUM


def world_options(limits: Mapping[str, int]) -> Any:
    """Returns NCCL's options for the default group, which Megatron's file does not cover; None for NCCL's defaults."""
    if "world" not in limits:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = limits["world"]
    return options


@contextmanager
def nccl_config(limits: Mapping[str, int]) -> Iterator[str]:
    """Writes Megatron's ``nccl_communicator_config_path`` file for the body. JSON is also YAML, so it writes JSON."""
    with NamedTemporaryFile("w", suffix=".yaml", prefix="rl_safe_nccl_") as file:
        json.dump({key: {"max_ctas": limit} for key, limit in limits.items() if key != "world"}, file)
        file.flush()
        yield file.name


def limits_of_groups() -> dict[str, int]:
    """Returns the limits in CTAs with which NCCL's groups were made, by Megatron's key. Not collective.

    A group without a limit has no entry. Groups of other backends have none.

    Raises:
        CommunicatorError: If Megatron's groups do not exist.
    """
    return {
        live.kind.key: limit
        for live in live_groups()
        if live.kind is not None and (limit := limit_of(live.group)) is not None
    }


def limit_of(group: Any) -> int | None:
    """Returns the limit in CTAs with which NCCL's group was made; None if it has none, or is another backend's."""
    for backend in torch_groups.backends_of(group):
        limit = int(getattr(getattr(backend.options, "config", None), "max_ctas", 0))
        if 1 <= limit <= NCCL_MAXIMUM:
            return limit
    return None


def init_megatron_groups(
    config: MegatronConfig, *, seed: int, timeout: timedelta, limits: Mapping[str, int] | None = None
) -> None:
    """Creates every Megatron group and seeds its RNG tracker. Collective over: the training world.

    Args:
        config: As for `create_megatron_groups`.
        seed: Base seed; Megatron offsets it by tensor, pipeline and expert rank.
        timeout: As for `create_megatron_groups`.
        limits: As for `create_megatron_groups`.
    """
    create_megatron_groups(config, timeout=timeout, limits=limits)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def create_megatron_groups(
    config: MegatronConfig,
    *,
    timeout: timedelta,
    limits: Mapping[str, int] | None = None,
    with_gloo_twins: bool = False,
) -> None:
    """Creates every Megatron group. Collective over: the training world.

    Args:
        config: The parallel sizes.
        timeout: Longest wait of one collective of these groups. New groups do not inherit the default group's.
        limits: Limits in CTAs by key, as `topology.budget.plan_limits` returns them; None if no group uses NCCL.
        with_gloo_twins: Whether to make gloo twins of the data-parallel groups, as Megatron does by default. Set it for
            a host that uses them; each costs a connection.
    """
    with nullcontext(None) if limits is None else nccl_config(limits) as path:
        _initialize(config, timeout=timeout, nccl_config=path, with_gloo_twins=with_gloo_twins)


def _initialize(config: MegatronConfig, *, timeout: timedelta, nccl_config: str | None, with_gloo_twins: bool) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline_model_parallel_size,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=config.num_distributed_optimizer_instances,
        nccl_communicator_config_path=nccl_config,
        # The annotation says int, but Megatron makes a timedelta from it, so a fraction works.
        distributed_timeout_minutes=timeout.total_seconds() / 60,
        create_gloo_process_groups=with_gloo_twins,
    )


def sizes_of_groups() -> MegatronConfig:
    """Returns the sizes with which Megatron's groups were made. Not collective."""
    return MegatronConfig(
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
    )
