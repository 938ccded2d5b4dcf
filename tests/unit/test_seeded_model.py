"""The seeded model: a real HF directory, the same bytes every time."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from rl_safe_workers.config import SeededModelConfig
from rl_safe_workers.errors import ConfigError, ModelError
from rl_safe_workers.models.seeded import CHARACTERS, VOCAB_SIZE, create_seeded_model


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "moe"
    create_seeded_model(path, SeededModelConfig())
    return path


@pytest.fixture(scope="module")
def tokenizer(moe: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(moe, trust_remote_code=False)


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def test_two_calls_give_equal_bytes_whatever_the_callers_random_state(moe: Path, tmp_path: Path) -> None:
    torch.manual_seed(12345)
    create_seeded_model(tmp_path / "again", SeededModelConfig())
    assert digests(tmp_path / "again") == digests(moe)


def test_the_callers_random_state_is_left_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    create_seeded_model(tmp_path / "m", SeededModelConfig(num_hidden_layers=1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_another_seed_gives_other_weights(moe: Path, tmp_path: Path) -> None:
    create_seeded_model(tmp_path / "other", SeededModelConfig(seed=1))
    assert digests(tmp_path / "other")["model.safetensors"] != digests(moe)["model.safetensors"]


def test_the_default_is_a_qwen3_moe_of_under_two_million_parameters_in_fp32(moe: Path) -> None:
    weights = load_file(moe / "model.safetensors")
    assert AutoConfig.from_pretrained(moe).architectures == ["Qwen3MoeForCausalLM"]
    assert 100_000 < sum(w.numel() for w in weights.values()) < 2_000_000
    assert {w.dtype for w in weights.values()} == {torch.float32}


def test_experts_have_the_names_that_other_tools_read(moe: Path) -> None:
    names = load_file(moe / "model.safetensors").keys()
    assert {f"model.layers.1.mlp.experts.{e}.gate_proj.weight" for e in range(8)} <= names
    assert "lm_head.weight" in names


def test_without_experts_it_is_a_dense_qwen3(tmp_path: Path) -> None:
    create_seeded_model(tmp_path / "dense", SeededModelConfig(num_experts=0))
    assert AutoConfig.from_pretrained(tmp_path / "dense").architectures == ["Qwen3ForCausalLM"]
    assert "model.layers.0.mlp.gate_proj.weight" in load_file(tmp_path / "dense" / "model.safetensors")


def test_no_embedding_row_is_zero(moe: Path) -> None:
    rows = load_file(moe / "model.safetensors")["model.embed_tokens.weight"]
    assert rows.shape[0] == VOCAB_SIZE
    assert rows.norm(dim=1).min() > 0.1


def test_the_distribution_is_flat_but_not_uniform(moe: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = AutoModelForCausalLM.from_pretrained(moe, dtype=torch.float32)
    with torch.no_grad():
        logits = model(**tokenizer(["abc", "xyz"], return_tensors="pt")).logits[:, -1]
    probabilities = logits.softmax(-1)
    assert 1.2 / VOCAB_SIZE < probabilities.max() < 0.1
    assert not torch.allclose(probabilities[0], probabilities[1], atol=1e-3)


def test_the_vocabulary_fills_the_models(tokenizer: PreTrainedTokenizerBase, moe: Path) -> None:
    assert len(tokenizer) == AutoConfig.from_pretrained(moe).vocab_size == VOCAB_SIZE
    assert sorted(tokenizer.get_vocab().values()) == list(range(VOCAB_SIZE))


def test_every_character_is_one_token_and_comes_back(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(ids) == len(set(ids)) == len(CHARACTERS) == 96
    assert tokenizer.decode(ids) == CHARACTERS


def test_characters_outside_the_vocabulary_become_unknown_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer("aéb")["input_ids"][1] == tokenizer.unk_token_id


def test_special_tokens_vanish_from_decoded_responses(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [*range(7), *tokenizer("ok")["input_ids"], VOCAB_SIZE - 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ok"


def test_the_chat_template_costs_five_tokens_beside_the_content(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "abc"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert text == "<|im_start|><|user|>abc<|im_end|><|im_start|><|assistant|>"
    assert len(ids) == 5 + len("abc")
    assert tokenizer.unk_token_id not in ids


def test_the_end_of_a_message_ends_generation(moe: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == AutoConfig.from_pretrained(moe).eos_token_id


def test_a_directory_made_by_someone_else_meanwhile_stays(moe: Path) -> None:
    before = digests(moe)
    create_seeded_model(moe, SeededModelConfig(seed=1))
    assert digests(moe) == before


def test_nothing_is_left_beside_the_model(tmp_path: Path) -> None:
    spec = SeededModelConfig(num_hidden_layers=1)
    for _ in range(2):
        create_seeded_model(tmp_path / "m", spec)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_place_that_is_taken_by_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match=r"cannot make a model at .*/m"):
        create_seeded_model(tmp_path / "m", SeededModelConfig(num_hidden_layers=1))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5 must be at most num_experts=4"),
        ({"hidden_siz": 64}, "unknown key hidden_siz; the nearest known key is hidden_size"),
    ],
)
def test_sizes_that_make_no_model_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SeededModelConfig(**sizes)
