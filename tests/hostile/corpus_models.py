"""Hostile models: sizes that no model has, and safetensors whose headers lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hypothesis import strategies as st

from tests.hostile import pickles
from tests.hostile.case import EITHER, Case, Command, Site
from tests.hostile.corpus_manifests import TEXTS as HOSTILE_JSON
from tests.hostile.grow import MANY_DIGITS, edit_file, edits, grow, to_json, values
from tests.hostile.models import CONFIG, EMBEDDING, INDEX, WEIGHTS, put_model, safetensors
from tests.hostile.special import SPECIAL, replace

MODEL = "model"
MIB = 2**20
SHAPES = (
    Command("shape", (MODEL,)),
    Command("plan", ("--model", MODEL, "--world", "8", "--trainers", "4", "--ep", "2")),
)
READS = (Command("weights", (MODEL,)),)


def model(name: str, change: Callable[[Site], None], **facts: object) -> Case:
    """A case of a good model, changed."""

    def make(site: Site) -> None:
        put_model(site.input / MODEL)
        change(site)

    fields = {"commands": (*SHAPES, *READS), **facts}
    return Case(name=f"model/{name}", make=make, **fields)  # type: ignore[arg-type]


def cases() -> Iterator[Case]:
    """All of them."""
    for what in SPECIAL:
        # Links in a model's folder are the user's own: the Hugging Face cache is made of them.
        for file, accepts in {
            "config.json": ("weights",),
            WEIGHTS: ("plan",),
            INDEX: ("plan",),
            "tokenizer.json": ("plan", "shape", "weights"),
        }.items():
            if (file, what) != (INDEX, "missing"):
                yield model(
                    f"{what}/{file}",
                    partial(_replace, file, what),
                    accepts=("plan", "weights", "shape") if (file, what) in _NO_INDEX else accepts,
                    may_read_outside=what == "link-secret",
                )
    for size in _SIZES:
        for word, value in _WRONG.items():
            yield model(
                f"config-{size}-{word}",
                partial(_configure, {size: value}),
                commands=SHAPES,
                accepts=_who_may(size, word),
            )
    for number, changes in enumerate(_CHANGES):
        yield model(f"config-changed/{number:02}", partial(_configure, changes), commands=SHAPES, accepts=EITHER)
    for word, write in HOSTILE_JSON.items():
        for file in ("config.json", INDEX):
            yield model(
                f"{file}-{word}",
                partial(_write, file, write),
                accepts=("weights",) if file == "config.json" else ("plan",),
            )
    for word, index in _INDEXES.items():
        yield model(f"index-{word}", partial(_write_index, index), accepts=("plan",))
    for word, data in WEIGHT_FILES.items():
        accepts = EITHER if word in _SOUND else ("plan", "shape")
        yield model(f"weights-{word}", partial(_write, WEIGHTS, data), accepts=accepts)
    yield from _grown()


_NO_INDEX = {
    (INDEX, what)
    for what in ("fifo", "socket", "folder", "link-loop", "link-proc-mem", "link-proc-kmsg", "link-dev-zero")
}
"""Files that a reader may take for no index at all, as long as it does not open them."""


def _replace(file: str, what: str, site: Site) -> None:
    replace(site.input / MODEL / file, what, site)


def _write(file: str, data: Callable[[], bytes], site: Site) -> None:
    (site.input / MODEL / file).write_bytes(data())


# config.json

_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts",
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
    "intermediate_size",
    "head_dim",
)
_NEEDED = _SIZES[:7]
"""Sizes that the preflight reads."""
_WRONG: dict[str, Any] = {
    "minus-one": -1,
    "zero": 0,
    "1e12": 10**12,
    "float-1e12": 1e12,
    "1e300": 1e300,
    "digits": MANY_DIGITS,
    "text": "8",
    "true": True,
    "fraction": 1.5,
    "nan": float("nan"),
    "infinite": float("inf"),
    "list": [8],
    "section": {"a": 1},
    "escape": "\x1b[2J",
    "null": None,
    "layers-1e8": 10**8,
}


def _who_may(size: str, word: str) -> tuple[str, ...]:
    if size not in _NEEDED:
        return EITHER
    if word in ("null", "layers-1e8") or (size, word) == ("num_experts", "zero"):
        return EITHER
    # A plan takes what one key does not say as Llama has it.
    return ("plan",) if word in ("zero", "null") else ()


_CHANGES: tuple[dict[str, Any], ...] = (
    {"model_type": "\x1b[2J"},
    {"model_type": "\ud800"},
    {"model_type": None},
    {"model_type": ["qwen3"]},
    {"model_type": {"a": 1}},
    {"model_type": "x" * MIB},
    {"model_type": 7},
    {"mlp_only_layers": [10**30]},
    {"mlp_only_layers": "x"},
    {"mlp_only_layers": list(range(10**5))},
    {"mlp_only_layers": [{}]},
    {"decoder_sparse_step": 0},
    {"decoder_sparse_step": -1},
    {"quantization_config": {"a": "\x1b[2J"}},
    {"quantization_config": [[[]]]},
    {"hidden_act": "\x1b[2J"},
    {"rope_scaling": {"factor": float("nan")}},
    {"text_config": {"text_config": 7}},
    {"text_config": []},
    {"auto_map": {"AutoConfig": "evil.Config"}},
    {"tie_word_embeddings": "\x1b[2J"},
    {"num_key_value_heads": 3},
    {"num_attention_heads": 3},
    {"num_experts_per_tok": -1},
    {"kv_lora_rank": -1},
    {"kv_lora_rank": 2**31 - 1},
    {"q_lora_rank": "x"},
    {"first_k_dense_replace": 10**9},
    {"n_shared_experts": 10**30},
    {"num_hidden_layers": 99_999, "num_experts": 2**31 - 1, "hidden_size": 2**31 - 1},
    {"attention_bias": "\ud800"},
    {"use_sliding_window": [1]},
    {"surprise": "x" * MIB},
)


def _configure(changes: dict[str, Any], site: Site) -> None:
    (site.input / MODEL / "config.json").write_text(to_json({**CONFIG, **changes}))


# The index

_INDEXES: dict[str, Any] = {
    "above": {"weight_map": {"a": "../../outside/secret.txt"}},
    "above-safetensors": {"weight_map": {"a": "../x.safetensors"}},
    "absolute": {"weight_map": {"a": "/etc/passwd"}},
    "nul": {"weight_map": {"a": "a\x00b"}},
    "escape": {"weight_map": {"a": "\x1b[2J"}},
    "surrogate": {"weight_map": {"a": "\ud800"}},
    "long": {"weight_map": {"a": "a" * 5_000}},
    "number": {"weight_map": {"a": 7}},
    "null": {"weight_map": {"a": None}},
    "list": {"weight_map": {"a": [WEIGHTS]}},
    "section": {"weight_map": {"a": {}}},
    "empty": {"weight_map": {"a": ""}},
    "folder": {"weight_map": {"a": "."}},
    "other-file": {"weight_map": {"a": "config.json"}},
    "mixed": {"weight_map": {"a": WEIGHTS, "b": 7}},
    "map-list": {"weight_map": [WEIGHTS]},
    "map-text": {"weight_map": WEIGHTS},
    "map-null": {"weight_map": None},
    "map-missing": {},
    "wrong-name": {"weight_map": {"\x1b[2J\ud800": WEIGHTS}},
    "many-absent": {"weight_map": {f"w{n}": f"f{n}.safetensors" for n in range(200_000)}},
}


def _write_index(index: Any, site: Site) -> None:
    (site.input / MODEL / INDEX).write_text(to_json(index))


# safetensors


def _header(**tensors: Any) -> bytes:
    return to_json(tensors).encode("utf-8", "surrogatepass")


def _tensor(shape: list[Any], offsets: list[Any], dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def _many(count: int) -> bytes:
    return json.dumps({f"t{n}": _tensor([1], [4 * n, 4 * n + 4]) for n in range(count)}).encode()


def _beside_embedding(tensor: dict[str, Any]) -> bytes:
    """A file of the embedding that every model has, and one more tensor."""
    embedding = _tensor([128, 128], [0, 32768], "F16")
    return safetensors(_header(**{EMBEDDING: embedding, "a": tensor}), bytes(tensor["data_offsets"][1]))


WEIGHT_FILES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "seven-bytes": lambda: bytes(7),
    "header-zero": lambda: safetensors(b"", length=0),
    "header-2-to-the-63": lambda: safetensors(b"{}", length=2**63),
    "header-2-to-the-64": lambda: safetensors(b"{}", length=2**64 - 1),
    "header-past-end": lambda: safetensors(b"{}", length=10**6),
    "header-90-mib": lambda: safetensors(b"{}" + b" " * (90 * MIB)),
    "header-200-mib": lambda: safetensors(b"{}" + b" " * (200 * MIB)),
    "header-not-json": lambda: safetensors(b"\x1b[2Jx"),
    "header-not-utf-8": lambda: safetensors(b'{"\xff": 1}'),
    "header-list": lambda: safetensors(b"[]"),
    "header-deep": lambda: safetensors(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "header-deep-lists": lambda: safetensors(b'{"a":' + b"[" * 100_000),
    "header-of-a-million": lambda: safetensors(_many(300_000), bytes(4 * 300_000)),
    "metadata-number": lambda: safetensors(b'{"__metadata__": 7}'),
    "past-end": lambda: safetensors(_header(a=_tensor([1000], [0, 4000]))),
    "reversed": lambda: safetensors(_header(a=_tensor([4], [16, 0]))),
    "negative": lambda: safetensors(_header(a=_tensor([4], [-16, 0]))),
    "offset-2-to-the-63": lambda: safetensors(_header(a=_tensor([4], [2**63, 2**63 + 16]))),
    "offset-digits": lambda: safetensors(_header(a=_tensor([4], [0, MANY_DIGITS]))),
    "overlapping": lambda: safetensors(_header(a=_tensor([16], [0, 64]), b=_tensor([8], [32, 64]))),
    "equal": lambda: safetensors(_header(a=_tensor([16], [0, 64]), b=_tensor([16], [0, 64]))),
    "hole": lambda: safetensors(_header(a=_tensor([4], [0, 16]), b=_tensor([4], [32, 48])), bytes(48)),
    "more-data": lambda: safetensors(_header(a=_tensor([4], [0, 16])), bytes(64)),
    "unknown-dtype": lambda: safetensors(_header(a=_tensor([16], [0, 64], "\x1b[2J"))),
    "dtype-number": lambda: safetensors(_header(a=_tensor([16], [0, 64], 7))),
    "shape-negative": lambda: safetensors(_header(a=_tensor([-16], [0, 64]))),
    "shape-overflow": lambda: safetensors(_header(a=_tensor([2**32, 2**32], [0, 64]))),
    "shape-too-small": lambda: safetensors(_header(a=_tensor([2], [0, 64]))),
    "shape-zero-and-huge": lambda: _beside_embedding(_tensor([0, 2**62], [32768, 32768])),
    "scalar": lambda: _beside_embedding(_tensor([], [32768, 32772])),
    "shape-text": lambda: safetensors(_header(a=_tensor(["16"], [0, 64]))),
    "shape-of-100000": lambda: safetensors(_header(a=_tensor([1] * 100_000, [0, 4])), bytes(4)),
    "name-escape": lambda: safetensors(
        b'{"\\u001b[2J": {"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}}', bytes(4)
    ),
    "name-surrogate": lambda: safetensors(
        b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', bytes(4)
    ),
    "name-twice": lambda: safetensors(
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F32", "shape": [16], '
        b'"data_offsets": [0, 64]}}'
    ),
    "no-fields": lambda: safetensors(_header(a={})),
    "null": lambda: safetensors(_header(a=None)),
    "pickle": lambda: pickles.program(pickles.name("os", "system")),
    "zip": lambda: pickles.archive(pickles.program(pickles.name("os", "system"))),
}
"""Files of weights by name."""
_SOUND = ("scalar", "shape-zero-and-huge", "shape-of-100000", "header-90-mib", "header-of-a-million", "name-escape")
"""Names of headers that a reader may take."""


def _grown() -> Iterator[Case]:
    for number, todo in enumerate(grow(edits(), 90, seed=81)):
        yield model(f"weights-edited/{number:03}", partial(_edit, WEIGHTS, todo), commands=READS, accepts=EITHER)
    for number, todo in enumerate(grow(edits(), 50, seed=82)):
        yield model(f"config-edited/{number:03}", partial(_edit, "config.json", todo), commands=SHAPES, accepts=EITHER)
    changes = st.dictionaries(st.sampled_from(sorted(CONFIG)), values(), min_size=1, max_size=2)
    for number, change in enumerate(grow(changes, 80, seed=83)):
        yield model(f"config-grown/{number:03}", partial(_configure, change), commands=SHAPES, accepts=EITHER)
    whole = st.one_of(st.integers(-2, 70), st.sampled_from((2**31, 2**32, 2**63, 2**64)))
    kinds = st.sampled_from(("F32", "BF16", "BOOL", "U8", "F64", "F8_E4M3", "I64", "C64", "F4", "", "f32"))
    tensors = st.builds(_tensor, st.lists(whole, max_size=3), st.lists(whole, min_size=2, max_size=2), kinds)
    headers = st.dictionaries(
        st.sampled_from(("a", "b", "c", "__metadata__")), st.one_of(tensors, values()), max_size=3
    )
    for number, header in enumerate(grow(headers, 80, seed=84)):
        yield model(
            f"weights-grown/{number:03}",
            partial(_write, WEIGHTS, partial(_grown_file, header)),
            commands=READS,
            accepts=EITHER,
        )


def _edit(file: str, todo: list[tuple[str, int, int, bytes]], site: Site) -> None:
    edit_file(site.input / MODEL / file, todo)


def _grown_file(header: dict[str, Any]) -> bytes:
    return safetensors(to_json(header).encode())
