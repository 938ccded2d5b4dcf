"""Makes a tiny model from a seed, as a real HF directory: the quickstart's Qwen3, and other families for tests.

The libraries transformers and tokenizers write all files, so every reader of HF directories can read them.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


logger = logging.getLogger(__name__)

VOCAB_SIZE = 128
"""Number of vocabulary entries: a multiple of every tensor-parallel size in the tests, so no rank pads its slice."""
CHARACTERS = "".join(map(chr, range(32, 127))) + "\n"
"""Printable ASCII and the newline. Each character is one token."""
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>", *ROLES)
"""Tokens with the first ids. A role is one token, so that a message has three tokens more than its content."""
INITIALIZER_RANGE = 0.02
"""Standard deviation of the weights. The output distribution is then nearly uniform, but depends on the prompt."""
MAX_POSITIONS = 512
"""Largest number of tokens of prompt and response together."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|><|{{ message['role'] }}|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|><|assistant|>{% endif %}"
)


PUBLISHED_LATENT_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""DeepSeek-V3's own sizes of latent attention, as ``settings``. Most of vLLM's kernels ask for them: a cache entry has
512 + 64 numbers (vllm/v1/attention/backends/mla/cpu_mla.py:61, flashattn_mla.py:109)."""
_FP32_BUFFER = "e_score_correction_bias"
"""The experts' bias, which published models hold in float32 beside weights in bfloat16."""


class Family(StrEnum):
    """The architectures that can be made. With experts, the first three become Qwen2-MoE, Qwen3-MoE and Mixtral."""

    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    LLAMA = "llama"
    DEEPSEEK_V3 = "deepseek_v3"
    GLM4_MOE = "glm4_moe"
    OLMOE = "olmoe"
    GPT_OSS = "gpt_oss"


def create_seeded_model(
    path: Path,
    spec: SeededModelConfig,
    *,
    family: Family = Family.QWEN3,
    dtype: str = "float32",
    is_tied: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Makes an HF directory at ``path``: config, safetensors, tokenizer and generation config.

    Deterministic: the same spec gives the same bytes. The directory appears complete or not at all. If another process
    has made it first, the other's directory stays. Not collective.

    Args:
        path: The directory to make. Its parents are made, too.
        spec: Sizes and seed. ``num_experts=0`` makes a dense model.
        family: The architecture.
        dtype: The dtype of every weight: ``"float32"`` or ``"bfloat16"``.
        is_tied: True if the output layer shares its weight with the embedding.
        settings: Arguments of transformers' configuration class that replace the family's own, e.g.
            `PUBLISHED_LATENT_SIZES` or ``{"rope_parameters": {...}}``.

    Raises:
        ModelError: If ``path`` cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise ModelError(f"cannot make a model at {path}: {error}; set model.path to a writable place") from error
    try:
        _write_model(_hf_config(spec, family, is_tied=is_tied, settings=settings or {}), spec.seed, dtype, staging)
        build_tokenizer().save_pretrained(staging)
        _make_readable(staging)
        _publish(staging, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Makes the character tokenizer: special tokens first, then one id per character, then reserved ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    reserved = [f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - len(SPECIAL_TOKENS) - len(CHARACTERS))]
    tokens = [*SPECIAL_TOKENS, *CHARACTERS, *reserved]
    # A BPE without merges splits text into characters and needs no pre-tokenizer.
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[], unk_token="<|unknown|>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (*SPECIAL_TOKENS, *reserved)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unknown|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _write_model(hf_config: PretrainedConfig, seed: int, dtype: str, directory: Path) -> None:
    """Saves weights, config and generation config. Hides the progress bar, which is useless for one shard."""
    from transformers.utils import logging as hf_logging

    model, bar_was_on = _build_model(hf_config, seed, dtype), hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        model.save_pretrained(directory)
    finally:
        if bar_was_on:
            hf_logging.enable_progress_bar()


def _build_model(hf_config: PretrainedConfig, seed: int, dtype: str) -> PreTrainedModel:
    """Builds a model with weights from its own random stream. The caller's random state does not change."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
        _draw_biases(model)
    if dtype != "float32":
        kept = {name: buffer for name, buffer in model.named_buffers() if name.endswith(_FP32_BUFFER)}
        model = model.to(getattr(torch, dtype))
        for name, buffer in kept.items():
            owner, _, own_name = name.rpartition(".")
            model.get_submodule(owner).register_buffer(own_name, buffer)
    model.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=[SPECIAL_TOKENS.index("<|im_end|>"), 0], pad_token_id=0, do_sample=True
    )
    return model


def _draw_biases(model: PreTrainedModel) -> None:
    """Draws every bias. transformers sets biases to zero, and no test would notice the loss of a zero bias."""
    for name, bias in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("bias"):
            bias.data.normal_(std=INITIALIZER_RANGE)


def _hf_config(
    spec: SeededModelConfig, family: Family, *, is_tied: bool, settings: Mapping[str, Any]
) -> PretrainedConfig:
    import transformers

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_hidden_layers,
        "num_attention_heads": spec.num_attention_heads,
        "num_key_value_heads": spec.num_key_value_heads,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": is_tied,
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"),
        # With a padding id, transformers zeroes and masks that row. Megatron does not mask it, and RMSNorm of a zero
        # row has a huge gradient.
        "pad_token_id": None,
    }
    name, own = _family_config(spec, family)
    config: PretrainedConfig = getattr(transformers, name)(**{**common, **own, **settings})
    return config


def _family_config(spec: SeededModelConfig, family: Family) -> tuple[str, dict[str, Any]]:
    """Returns transformers' configuration class and the settings that only this family has."""
    match family:
        case Family.DEEPSEEK_V3:
            return "DeepseekV3Config", _deepseek_settings(spec)
        case Family.GLM4_MOE:
            return "Glm4MoeConfig", _glm_settings(spec)
        case Family.LLAMA if not spec.num_experts:
            return "LlamaConfig", {"head_dim": spec.head_dim}
        case Family.LLAMA:
            # No head_dim, because published Mixtrals have null.
            return "MixtralConfig", {**_wide_experts(spec), "sliding_window": None}
        case Family.GPT_OSS:
            return "GptOssConfig", {**_wide_experts(spec), "head_dim": spec.head_dim}
        case Family.OLMOE:
            experts = {"num_experts": spec.num_experts, "num_experts_per_tok": spec.num_experts_per_tok}
            return "OlmoeConfig", {**experts, "intermediate_size": spec.moe_intermediate_size}
        case Family.QWEN2 if not spec.num_experts:
            return "Qwen2Config", {}
        case Family.QWEN2:
            shared = {"shared_expert_intermediate_size": spec.intermediate_size, "norm_topk_prob": False}
            return "Qwen2MoeConfig", {**_qwen_experts(spec), **shared}
        case _ if not spec.num_experts:
            return "Qwen3Config", {"head_dim": spec.head_dim}
        case _:
            return "Qwen3MoeConfig", {**_qwen_experts(spec), "head_dim": spec.head_dim, "norm_topk_prob": True}


def _qwen_experts(spec: SeededModelConfig) -> dict[str, Any]:
    return {
        "moe_intermediate_size": spec.moe_intermediate_size,
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _wide_experts(spec: SeededModelConfig) -> dict[str, Any]:
    """Returns the settings of a family that keeps the width of its experts in ``intermediate_size``."""
    return {
        "num_local_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "intermediate_size": spec.moe_intermediate_size,
    }


def _grouped_experts(spec: SeededModelConfig) -> dict[str, Any]:
    """Returns settings for one dense layer, and then layers with one group of routed experts and a shared expert."""
    return {
        "moe_intermediate_size": spec.moe_intermediate_size,
        "n_routed_experts": spec.num_experts,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
    }


def _glm_settings(spec: SeededModelConfig) -> dict[str, Any]:
    """Returns settings for one dense layer, and then layers with routed and shared experts."""
    return {
        "head_dim": spec.head_dim,
        "attention_bias": True,
        "use_qk_norm": True,
        **_grouped_experts(spec),
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }


def _deepseek_settings(spec: SeededModelConfig) -> dict[str, Any]:
    """Returns settings for latent attention, one dense layer, and then layers with routed and shared experts."""
    return {
        "num_key_value_heads": spec.num_attention_heads,
        "q_lora_rank": spec.hidden_size // 2,
        "kv_lora_rank": spec.hidden_size // 4,
        "qk_nope_head_dim": spec.head_dim,
        "qk_rope_head_dim": spec.head_dim // 2,
        "v_head_dim": spec.head_dim,
        **_grouped_experts(spec),
        # Only readers other than transformers need these two: vllm/model_executor/models/deepseek_v2.py:327, 387.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def _make_readable(directory: Path) -> None:
    """Gives other users read access, which temporary directories and safetensors files lack."""
    directory.chmod(0o755)
    for file in directory.iterdir():
        file.chmod(0o644)


def _publish(staging: Path, path: Path) -> None:
    """Renames ``staging`` to ``path``, unless another process has already made a model there."""
    try:
        staging.rename(path)
    except OSError as error:
        if not (path / "config.json").is_file():
            raise ModelError(
                f"cannot make a model at {path}: {error}; remove what is there or change model.path"
            ) from error
        logger.info("model %s was made by another process", path)


def main(argv: Sequence[str]) -> int:
    """Makes a model from the command line: ``python -m rl_safe_workers.models.seeded PATH SPEC_AS_JSON DTYPE``."""
    path, spec, dtype = argv
    try:
        create_seeded_model(Path(path), SeededModelConfig(**json.loads(spec)), dtype=dtype)
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
