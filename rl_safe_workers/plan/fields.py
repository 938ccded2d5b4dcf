"""Lists the facts of a plan, each with its option, its keys in other tools, and its range."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_safe_workers.errors import ConfigError
from rl_safe_workers.plan.families import RULES
from rl_safe_workers.topology.groups import DISPATCHERS

MOST_RANKS = 2**20
_ACTOR = "actor_rollout_ref.actor.megatron"
_ROLLOUT = "actor_rollout_ref.rollout"
_MEGATRON = "policy.megatron_cfg"
_GENERATION = "policy.generation"
_WHOLE = re.compile(r"[+-]?\d{1,18}")
_TRUTH: Mapping[str, bool] = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A fact of a plan.

    Example: ``Field(name="tp", kind=int, help="tensor-parallel size", default=1)`` is set by ``--tp``
    """

    name: str
    kind: type
    help: str
    default: Any = None
    """The default; None if the fact follows from other facts, or is unknown."""
    least: float = 1
    most: float = MOST_RANKS
    choices: Sequence[str] = ()
    recipe: str = ""
    """The fact's key in a recipe; empty if it has none."""
    verl: str = ""
    nemo_rl: str = ""

    @property
    def option(self) -> str:
        """The command's option that sets the fact."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def valid(self) -> str:
        """Describes the valid values."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return "text"
        what = "a whole number" if self.kind is int else "a number"
        return f"{what} from {self.least:g} to {self.most:.0f}"

    def parse(self, value: Any, *, key: str) -> Any:
        """Returns a value converted to the fact's type.

        Args:
            value: Text, or a value from a YAML file.
            key: The key or option that holds it, for the error.

        Raises:
            ConfigError: If the value is not valid; names the key, the value and the valid values.
        """
        found = _PARSERS[self.kind](value)
        if found is None or not self._allows(found):
            raise ConfigError(f"{key}={value!s:.80} cannot be used: it takes {self.valid}")
        return found

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        return self.kind in (bool, str) or self.least <= value <= self.most


def _boolean(value: Any) -> bool | None:
    return value if isinstance(value, bool) else _TRUTH.get(str(value).lower())


def _whole(value: Any) -> int | None:
    return int(str(value)) if not isinstance(value, bool) and _WHOLE.fullmatch(str(value)) else None


def _number(value: Any) -> float | None:
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if math.isfinite(found) and not isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


_PARSERS: Mapping[type, Callable[[Any], Any]] = {bool: _boolean, int: _whole, float: _number, str: _text}
SHARDINGS = ("dp_reshardable", "fully_reshardable", "dp_zero_gather_scatter", "fully_sharded_model_space")
UNKNOWN = "unknown"
HOSTS = ("rl-safe", "megatron", "verl", "nemo-rl", "ms-swift")

FIELDS = (
    # Numbers of processes.
    Field(name="world", kind=int, help="GPUs of trainers and rollouts together"),
    Field(name="trainers", kind=int, help="ranks of the training world", recipe="cluster.num_trainers"),
    Field(name="rollouts", kind=int, help="rollout ranks", least=0, recipe="cluster.num_rollouts"),
    Field(
        name="vllm_tp",
        kind=int,
        help="tensor-parallel size of each vLLM engine",
        recipe="rollout.tensor_model_parallel_size",
        verl=f"{_ROLLOUT}.tensor_model_parallel_size",
        nemo_rl=f"{_GENERATION}.vllm_cfg.tensor_parallel_size",
    ),
    Field(
        name="vllm_pp",
        kind=int,
        help="pipeline-parallel size of each vLLM engine",
        default=1,
        verl=f"{_ROLLOUT}.pipeline_model_parallel_size",
        nemo_rl=f"{_GENERATION}.vllm_cfg.pipeline_parallel_size",
    ),
    Field(
        name="vllm_dp",
        kind=int,
        help="data-parallel size inside each vLLM engine",
        default=1,
        verl=f"{_ROLLOUT}.data_parallel_size",
    ),
    Field(
        name="gpus_per_node",
        kind=int,
        help="GPUs of each node",
        default=8,
        verl="trainer.n_gpus_per_node",
        nemo_rl="cluster.gpus_per_node",
    ),
    Field(
        name="network",
        kind=str,
        help="network between nodes, which decides how much memory NCCL takes for it",
        default="rdma",
        choices=("rdma", "sockets"),
    ),
    Field(
        name="colocated",
        kind=bool,
        help="rollout rank i has the GPU of training rank i",
        default=False,
        recipe="cluster.colocated",
        verl="actor_rollout_ref.hybrid_engine",
        nemo_rl=f"{_GENERATION}.colocated.enabled",
    ),
    # The training world.
    Field(
        name="tp",
        kind=int,
        help="tensor-parallel size",
        default=1,
        recipe="megatron.tensor_model_parallel_size",
        verl=f"{_ACTOR}.tensor_model_parallel_size",
        nemo_rl=f"{_MEGATRON}.tensor_model_parallel_size",
    ),
    Field(
        name="pp",
        kind=int,
        help="pipeline-parallel size",
        default=1,
        recipe="megatron.pipeline_model_parallel_size",
        verl=f"{_ACTOR}.pipeline_model_parallel_size",
        nemo_rl=f"{_MEGATRON}.pipeline_model_parallel_size",
    ),
    Field(
        name="vpp",
        kind=int,
        help="virtual stages of each pipeline stage",
        least=2,
        recipe="megatron.virtual_pipeline_model_parallel_size",
        verl=f"{_ACTOR}.virtual_pipeline_model_parallel_size",
        nemo_rl=f"{_MEGATRON}.virtual_pipeline_model_parallel_size",
    ),
    Field(
        name="ep",
        kind=int,
        help="expert-parallel size",
        default=1,
        recipe="megatron.expert_model_parallel_size",
        verl=f"{_ACTOR}.expert_model_parallel_size",
        nemo_rl=f"{_MEGATRON}.expert_model_parallel_size",
    ),
    Field(
        name="etp",
        kind=int,
        help="expert-tensor-parallel size; as Megatron does, that of --tp if not given",
        recipe="megatron.expert_tensor_parallel_size",
        verl=f"{_ACTOR}.expert_tensor_parallel_size",
        nemo_rl=f"{_MEGATRON}.expert_tensor_parallel_size",
    ),
    Field(
        name="cp",
        kind=int,
        help="context-parallel size",
        default=1,
        recipe="megatron.context_parallel_size",
        verl=f"{_ACTOR}.context_parallel_size",
        nemo_rl=f"{_MEGATRON}.context_parallel_size",
    ),
    Field(
        name="optimizer_instances",
        kind=int,
        help="distributed-optimizer instances",
        default=1,
        recipe="megatron.num_distributed_optimizer_instances",
        verl=f"{_ACTOR}.override_ddp_config.num_distributed_optimizer_instances",
        nemo_rl=f"{_MEGATRON}.distributed_data_parallel_config.num_distributed_optimizer_instances",
    ),
    Field(
        name="dispatcher",
        kind=str,
        help="MoE token dispatcher",
        default="alltoall",
        choices=DISPATCHERS,
        recipe="megatron.moe_token_dispatcher_type",
        verl=f"{_ACTOR}.override_transformer_config.moe_token_dispatcher_type",
        nemo_rl=f"{_MEGATRON}.moe_token_dispatcher_type",
    ),
    Field(
        name="first_stage_layers",
        kind=int,
        help="layers of the first pipeline stage, where it has others",
        verl=f"{_ACTOR}.override_transformer_config.num_layers_in_first_pipeline_stage",
        nemo_rl=f"{_MEGATRON}.num_layers_in_first_pipeline_stage",
    ),
    Field(
        name="last_stage_layers",
        kind=int,
        help="layers of the last pipeline stage, where it has others",
        verl=f"{_ACTOR}.override_transformer_config.num_layers_in_last_pipeline_stage",
        nemo_rl=f"{_MEGATRON}.num_layers_in_last_pipeline_stage",
    ),
    Field(
        name="embedding_as_layer",
        kind=bool,
        default=False,
        help="whether the embedding counts as a layer of the first stage: account_for_embedding_in_pipeline_split",
        verl=f"{_ACTOR}.override_transformer_config.account_for_embedding_in_pipeline_split",
        nemo_rl=f"{_MEGATRON}.account_for_embedding_in_pipeline_split",
    ),
    Field(
        name="loss_as_layer",
        kind=bool,
        default=False,
        help="whether the loss counts as a layer of the last stage: account_for_loss_in_pipeline_split",
        verl=f"{_ACTOR}.override_transformer_config.account_for_loss_in_pipeline_split",
        nemo_rl=f"{_MEGATRON}.account_for_loss_in_pipeline_split",
    ),
    Field(
        name="pipeline_layout",
        kind=str,
        help="Megatron's pipeline_model_parallel_layout, which is not read",
        verl=f"{_ACTOR}.override_transformer_config.pipeline_model_parallel_layout",
        nemo_rl=f"{_MEGATRON}.pipeline_model_parallel_layout",
    ),
    Field(
        name="sends",
        kind=str,
        help="how stages send: Megatron's batch_p2p_comm",
        default=UNKNOWN,
        choices=("batched", "one by one", UNKNOWN),
    ),
    Field(
        name="model",
        kind=str,
        help="directory of an HF config.json, or the file",
        recipe="model.path",
        verl="actor_rollout_ref.model.path",
        nemo_rl="policy.model_name",
    ),
    Field(name="dtype_bytes", kind=int, help="bytes of a weight", default=2, most=8),
    # Versions and environment.
    Field(name="megatron", kind=str, help="megatron-core whose rules count", default=RULES[-1], choices=RULES),
    Field(name="torch", kind=float, help="torch, e.g. 2.11", default=2.11, least=2, most=3),
    Field(name="cumem", kind=bool, help="NCCL_CUMEM_ENABLE", default=True),
    # Behaviour of the host framework, whose habits are the defaults.
    Field(name="host", kind=str, help="whose habits are the defaults of what follows", choices=HOSTS),
    Field(
        name="default_group",
        kind=str,
        help="who is in the trainers' default process group",
        choices=("training", "joint"),
    ),
    Field(name="device_id", kind=bool, help="whether the default group is bound to a device"),
    Field(name="backend", kind=str, help="of the default group", choices=("nccl", "cpu:gloo,cuda:nccl", "gloo")),
    Field(name="bootstrap", kind=bool, help="whether every communicator is connected before the model is built"),
    Field(
        name="budget",
        kind=bool,
        help="whether groups that carry little get few channels",
        recipe="rl_safe.bootstrap.budget",
    ),
    Field(
        name="release_comms",
        kind=bool,
        help="whether communicators' memory is given to the rollout",
        verl="actor_rollout_ref.rl_safe.release_comms",
    ),
    Field(
        name="world_syncs",
        kind=bool,
        help="weight syncs use the trainers' default group, as the built-in run's do if colocated",
        default=False,
        verl="actor_rollout_ref.rl_safe.packed_sync",
    ),
    Field(name="timeout_s", kind=float, help="timeout of the default group, seconds", most=1e9),
    Field(
        name="unread_timeout_s",
        kind=float,
        help="a timeout that is set and that the host does not read",
        most=1e9,
        verl="actor_rollout_ref.nccl_timeout",
    ),
    Field(name="group_timeout_s", kind=float, help="timeout of Megatron's groups, seconds", most=1e9),
    Field(name="gloo", kind=bool, help="whether data-parallel groups have gloo twins"),
    Field(
        name="fully_parallel_save",
        kind=bool,
        help="Megatron's FullyParallelSaveStrategyWrapper",
        recipe="rl_safe.checkpoint.fully_parallel_save",
    ),
    Field(
        name="validate_access_integrity",
        kind=bool,
        help="Megatron's sharding validation",
        recipe="rl_safe.checkpoint.validate_access_integrity",
    ),
    Field(
        name="async_save",
        kind=bool,
        help="whether saves go on beside training",
        recipe="rl_safe.checkpoint.async_save",
        verl="actor_rollout_ref.actor.checkpoint.async_save",
        nemo_rl=f"{_MEGATRON}.checkpoint.async_save",
    ),
    Field(name="finalizes", kind=bool, help="whether someone finalises asynchronous saves"),
    Field(name="optimizer_sharding", kind=str, help="distrib_optim_sharding_type", choices=SHARDINGS),
    Field(name="teardown", kind=str, help="how groups end", choices=("ordered", "one by one", "killed")),
    Field(
        name="write_gib_s",
        kind=float,
        help="GiB that a node writes to the checkpoint's place in a second",
        default=1.6,
        least=0.001,
        most=1e6,
    ),
)
BY_NAME: Mapping[str, Field] = {field.name: field for field in FIELDS}

HOST_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "rl-safe": {
        "default_group": "training",
        "device_id": False,
        "backend": "nccl",
        "bootstrap": True,
        "budget": True,
        "release_comms": False,
        "timeout_s": None,
        "group_timeout_s": None,
        "gloo": True,
        "fully_parallel_save": False,
        "validate_access_integrity": False,
        "async_save": False,
        "finalizes": True,
        "optimizer_sharding": "fully_reshardable",
        "teardown": "ordered",
        "vllm_tp": 1,
    },
    "megatron": {
        "default_group": "training",
        "device_id": False,
        "backend": "nccl",
        "bootstrap": False,
        "budget": False,
        "release_comms": False,
        "timeout_s": 600.0,
        "group_timeout_s": 1800.0,
        "gloo": True,
        "fully_parallel_save": True,
        "validate_access_integrity": True,
        "async_save": False,
        "finalizes": True,
        "optimizer_sharding": "dp_reshardable",
        "teardown": "one by one",
        "vllm_tp": 1,
    },
    "verl": {
        "default_group": "training",
        "device_id": False,
        "backend": "cpu:gloo,cuda:nccl",
        "bootstrap": False,
        "budget": False,
        "release_comms": False,
        "timeout_s": 1800.0,
        "group_timeout_s": 1800.0,
        "gloo": True,
        "fully_parallel_save": True,
        "validate_access_integrity": True,
        "async_save": False,
        "finalizes": False,
        "optimizer_sharding": "dp_reshardable",
        "teardown": "killed",
        "vllm_tp": 2,
    },
    "nemo-rl": {
        "default_group": "training",
        "device_id": False,
        "backend": "nccl",
        "bootstrap": False,
        "budget": False,
        "release_comms": False,
        "timeout_s": 600.0,
        "group_timeout_s": 600.0,
        "gloo": True,
        "fully_parallel_save": True,
        "validate_access_integrity": True,
        "async_save": False,
        "finalizes": True,
        "optimizer_sharding": "fully_reshardable",
        "teardown": "killed",
        "vllm_tp": 1,
    },
    "ms-swift": {
        "default_group": "training",
        "device_id": False,
        "backend": "nccl",
        "bootstrap": False,
        "budget": False,
        "release_comms": False,
        "timeout_s": 18e6,
        "group_timeout_s": 1800.0,
        "gloo": True,
        "fully_parallel_save": True,
        "validate_access_integrity": True,
        "async_save": False,
        "finalizes": True,
        "optimizer_sharding": "dp_reshardable",
        "teardown": "one by one",
        "vllm_tp": 1,
    },
}
"""Defaults of each host, from its source: verl 0.9.1, NeMo RL and ms-swift of August 2026, plain megatron-core 0.19. A
timeout is None if this package sets one for each phase."""
