"""Adapts Megatron-Bridge to the interface of `bridge.WeightBridge`, with Transformer Engine's layers or local ones.

The weight mapping is Megatron-Bridge's, reached through its AutoBridge (models/conversion/auto_bridge.py). Line numbers
are those of 0.6.2.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import megatron.core.extensions.transformer_engine  # noqa: F401 (before the placeholder, which it would take for real)
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.utils import unwrap_model
from transformers import PretrainedConfig

from rl_safe_workers.errors import ModelError, first_line
from rl_safe_workers.models.conversion_tasks import own_weights_of_tasks
from rl_safe_workers.models.family_settings import family_settings
from rl_safe_workers.models.local_spec import LOCAL_LAYER_SETTINGS, BiasedRowParallelLinear, decoder_block_spec
from rl_safe_workers.models.own_weights import OwnWeight

logger = logging.getLogger(__name__)


@contextmanager
def _importable() -> Iterator[None]:
    """Lets the library be imported without Transformer Engine, without warnings, and without traces in the log.

    peft/lora_layers.py:20 always imports Transformer Engine. It uses the names below to tell layers apart, and other
    names only for Transformer Engine's layers. Other modules take the placeholder for the real library. This affects
    only their layer specs. The import of megatron.training adds a handler to the root logger (training/training.py:36).
    """
    root, handlers, level = logging.root, logging.root.handlers[:], logging.root.level
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    names = [] if find_spec("transformer_engine") else ["transformer_engine", "transformer_engine.pytorch"]
    try:
        for name in names:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__dict__.update(
                __version__="0.0.0",
                Linear=type("Linear", (), {}),
                LayerNormLinear=type("LayerNormLinear", (), {}),
                ops=SimpleNamespace(Sequential=object),
            )
        if names:
            sys.modules[names[0]].pytorch = sys.modules[names[1]]  # type: ignore[attr-defined]
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        for name in names:
            del sys.modules[name]
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)


with _importable():
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
    from megatron.bridge.models.conversion.param_mapping import AutoMapping
    from megatron.bridge.models.olmoe.olmoe_provider import OLMoESelfAttention

# Layers of `local_spec`, by the names of their classes.
AutoMapping.register_module_type("Linear", "replicated")
AutoMapping.register_module_type(BiasedRowParallelLinear.__name__, "row")


class _AutoBridge(AutoBridge):
    """An AutoBridge that also knows the names of single experts, and refuses to leave out a weight."""

    @property
    def _model_bridge(self) -> Any:
        made = super()._model_bridge
        registry, build = made.mapping_registry, made.build_conversion_tasks

        def tasks(pretrained: Any, chunks: list[Any], **options: Any) -> list[Any]:
            found: list[Any] = build(pretrained, chunks, **options)
            _check_complete(found, chunks)
            return found

        made.mapping_registry, made.build_conversion_tasks = lambda: _with_single_experts(registry()), tasks
        return made


def _with_single_experts(registry: Any) -> Any:
    """Returns a registry that also has the experts of a SequentialMLP. Some registries have grouped experts only."""
    aliases, known = [], {mapping.megatron_param for mapping in registry}
    for mapping in registry:
        before, grouped, layer = mapping.megatron_param.rpartition(".mlp.experts.linear_fc")
        single = f"{before}.mlp.experts.local_experts.*.linear_fc{layer.removesuffix('*')}"
        if grouped and layer.endswith("*") and single not in known:
            alias = copy.copy(mapping)
            alias.megatron_param = single
            aliases.append(alias)
    return MegatronMappingRegistry(*registry, *aliases)


def _check_complete(tasks: list[Any], chunks: Sequence[torch.nn.Module]) -> None:
    """Raises ModelError if a weight of this rank has no task.

    The library only warns, and goes on without it (models/conversion/model_bridge.py:1725).
    """
    found = {
        (task.vp_stage, task.param_name) for task in tasks if task is not None and task.megatron_module is not None
    }
    for stage, chunk in enumerate(chunks):
        is_tied = chunk.share_embeddings_and_output_weights
        for name in chunk.state_dict():
            if (stage, name) in found or name.endswith("_extra_state") or (is_tied and name == "output_layer.weight"):
                continue
            raise ModelError(f"Megatron-Bridge has no HF weight for {name}: the conversion would leave it out")


def _parallel_settings() -> dict[str, Any]:
    """Returns the parallel sizes of the live Megatron groups, by the names of TransformerConfig's fields."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "sequence_parallel": tensor > 1,
    }


class MegatronBridge:
    """An AutoBridge together with its model provider.

    Attributes:
        config: The provider, which is also Megatron's TransformerConfig.
    """

    def __init__(self, auto_bridge: Any, provider: Any) -> None:
        """Wraps the two. ``provider`` must be finalized."""
        self._auto_bridge, self.config = auto_bridge, provider

    def _model_provider(self, post_model_creation_callbacks: list[Any]) -> Any:
        """Returns the provider's ``provide(pre_process, post_process, vp_stage=None)``, which also marks sinks."""

        def provide(**stage: Any) -> torch.nn.Module:
            model: torch.nn.Module = self.config.provide(**stage)
            for name, parameter in model.named_parameters():
                if name.endswith(".softmax_offset"):
                    # Without the mark (transformer/dot_product_attention.py:129), the norm of the gradient includes
                    # only the attention sinks of tensor-parallel rank 0.
                    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
            return model

        return provide

    def load_weights(self, models: Sequence[torch.nn.Module], weights_path: str) -> None:
        """Reads HF weights into model chunks. Collective over: the groups that split each weight."""
        self._auto_bridge.load_hf_weights(list(models), hf_path=weights_path)

    @torch.no_grad()
    def export_weights(self, models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields every HF weight, unsharded, on every rank. Collective over: the training world, at each item."""
        yield from self._auto_bridge.export_hf_weights(list(models), cpu=False, show_progress=False)

    @torch.no_grad()
    def own_weights(self, models: Sequence[torch.nn.Module]) -> list[OwnWeight] | None:
        """Returns the HF weights that this rank's tensor-parallel group can build; None if a weight needs other ranks.

        Collective over: the training world. It exports all weights once.
        """
        announced = {name: (weight.shape, weight.dtype) for name, weight in self.export_weights(models)}
        chunks = [unwrap_model(model) for model in models]
        tasks = filter(None, self._auto_bridge.get_conversion_tasks(chunks))
        own = own_weights_of_tasks(self._auto_bridge, chunks, tasks, announced)
        if isinstance(own, str):
            logger.info("a weight sync gathers every weight on every training rank: %s", own)
            return None
        return own


def why_no_mapping(hf_config: PretrainedConfig) -> str:
    """Returns the library's reason why it has no mapping for a model, and "" if it has one."""
    try:
        AutoBridge.from_hf_config(hf_config)
    except ValueError as error:
        return first_line(error)
    return ""


def open_megatron_bridge(
    hf_path: str,
    hf_config: PretrainedConfig,
    *,
    dtype: torch.dtype,
    settings: dict[str, Any],
    transformer_engine: bool,
) -> MegatronBridge:
    """Opens an HF directory with Megatron-Bridge.

    Args:
        hf_path: Local HF directory. Remote code is never run.
        hf_config: The model's configuration.
        dtype: Parameter dtype of the Megatron model.
        settings: Fields of Megatron's TransformerConfig that override the provider's own.
        transformer_engine: True for Transformer Engine's layers, False for Megatron's local ones.

    Raises:
        ModelError: If the library cannot build the model under this layout.
    """
    auto_bridge = _AutoBridge.from_hf_pretrained(hf_path, trust_remote_code=False)
    parallel = _parallel_settings()
    _check_supported(hf_config, parallel)
    provider = auto_bridge.to_megatron_provider(load_weights=False)
    types = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype is torch.bfloat16, "fp16": False}
    layers = {} if transformer_engine else _local_layers(hf_config)
    for name, value in {**family_settings(hf_config), **types, **parallel, **layers, **settings}.items():
        setattr(provider, name, value)
    provider.finalize()
    return MegatronBridge(auto_bridge, provider)


def _local_layers(hf_config: PretrainedConfig) -> dict[str, Any]:
    own_attention = {"self_attention": OLMoESelfAttention} if hf_config.model_type == "olmoe" else {}
    return {**LOCAL_LAYER_SETTINGS, "transformer_layer_spec": partial(decoder_block_spec, **own_attention)}


def _check_supported(hf: PretrainedConfig, parallel: dict[str, Any]) -> None:
    """Raises ModelError if the library cannot build the model, or would convert it wrongly.

    The library's OLMoE attention normalises over all heads (models/olmoe/olmoe_provider.py:105). A matrix's shape
    decides whether the library transposes an expert of GPT-OSS (models/gpt_oss/gpt_oss_bridge.py:270).
    """
    problem = ""
    if hf.model_type == "olmoe":
        if (size := parallel["tensor_model_parallel_size"]) > 1:
            problem = f"tensor_model_parallel_size={size} is not supported: set it to 1"
        elif hf.num_key_value_heads != hf.num_attention_heads:
            problem = (
                f"num_key_value_heads={hf.num_key_value_heads} is not supported: only num_attention_heads="
                f"{hf.num_attention_heads} is"
            )
    elif hf.model_type == "gpt_oss":
        if (size := parallel["expert_tensor_parallel_size"]) > 1:
            problem = f"expert_tensor_parallel_size={size} is not supported: set it to 1"
        elif hf.hidden_size == 2 * hf.intermediate_size:
            problem = (
                f"intermediate_size={hf.intermediate_size} is not supported, because it is half of hidden_size="
                f"{hf.hidden_size}"
            )
    if problem:
        raise ModelError(f"Megatron-Bridge, {hf.model_type}: {problem}")
