"""Hostile recipes: YAML that is no settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hypothesis import strategies as st

from tests.hostile.case import EITHER, Case, Command, Site
from tests.hostile.grow import grow, texts, to_json, values
from tests.hostile.prompts import put_prompts
from tests.hostile.special import SPECIAL, replace

RECIPE = "recipe.yaml"
BASE = """\
model: {path: model, create: {}}
data: {train_files: [prompts.parquet]}
megatron: {expert_model_parallel_size: 2}
trainer: {run_name: good, output_dir: outputs, default_local_dir: checkpoints}
"""
"""A good recipe."""
OWN = (Command("recipe", (RECIPE,)), Command("plan", (RECIPE,)), Command("plan", (RECIPE, "--json")))
OTHERS = (Command("plan", ("--from", "verl", RECIPE)), Command("plan", ("--from", "nemo-rl", RECIPE)))
"""The same file as other frameworks' settings."""
OTHER_HOSTS = ("plan-from-verl", "plan-from-nemo-rl")
MIB = 2**20
_NOT_PLANNED = ("timestamp", "timestamp-bad")
"""Wrong in a section that a plan does not look at."""


def put_recipe(site: Site, text: str | bytes) -> None:
    """Writes a recipe, and the prompts that it names."""
    (site.input / RECIPE).write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    put_prompts(site.input / "prompts.parquet")


def recipe(name: str, text: Callable[[Site], str | bytes] | str | bytes, **facts: object) -> Case:
    """A case of a recipe.

    Args:
        name: Of the case.
        text: What the file holds, or makes it.
        facts: Fields of the case.
    """

    def make(site: Site) -> None:
        put_recipe(site, text(site) if callable(text) else text)

    fields = {"commands": (*OWN, *OTHERS), "accepts": OTHER_HOSTS, **facts}
    return Case(name=f"recipe/{name}", make=make, **fields)  # type: ignore[arg-type]


def cases() -> Iterator[Case]:
    """All of them."""
    for name, text in STRUCTURES.items():
        accepts = (*OTHER_HOSTS, "plan") if name in _NOT_PLANNED else OTHER_HOSTS
        yield recipe(name, text, accepts=accepts)
    for name, text in LENIENT.items():
        # A model's folder is the user's own, wherever it lies.
        yield recipe(name, text, accepts=EITHER, may_read_outside=name == "model-outside")
    for what in SPECIAL:
        # A recipe is the user's own, so that a link is followed; what lies behind it is not shown.
        facts: dict[str, Any] = {
            "may_read_outside": what == "link-secret",
            "accepts": EITHER if what in ("empty", "link-secret") else (),
        }
        yield Case(name=f"recipe/file-{what}", make=partial(_put_special, what), commands=(*OWN, *OTHERS), **facts)
        make = partial(_put_special_default, what)
        yield Case(name=f"recipe/defaults-file-{what}", make=make, commands=(*OWN, OTHERS[1]), **facts)
    yield from _defaults()
    yield from _names()
    yield from _grown()


def _laughs(levels: int, count: int, *, key: bool = False) -> str:
    lines = ["a0: &a0 [lol, lol]"]
    for level in range(1, levels):
        inner = ", ".join([f"*a{level - 1}"] * count)
        lines.append(f"a{level}: &a{level} " + (f"{{? [{inner}] : 1}}" if key else f"[{inner}]"))
    return "\n".join(lines) + "\n"


def _section(key: str, value: str) -> str:
    return f"{BASE}{key}: {value}\n"


def _runs(tag: str, argument: str) -> Callable[[Site], str]:
    return lambda site: f"{BASE}actor: !!python/{tag} {argument.format(canary=site.canary)}\n"


STRUCTURES: dict[str, Callable[[Site], str | bytes] | str | bytes] = {
    "deep-lists-3000": _section("actor", "[" * 3000 + "]" * 3000),
    "deep-sections-3000": _section("actor", "{a: " * 3000 + "1" + "}" * 3000),
    "deep-blocks-3000": BASE + "\n".join(" " * depth + f"k{depth}:" for depth in range(3000)),
    "deep-dashes": _section("actor", "\n" + "- " * 3000 + "a"),
    "deep-questions": _section("actor", "\n" + "? " * 3000 + "a"),
    "deep-lists-open": _section("actor", "[" * 200_000),
    "alias-in-itself": _section("actor", "&a [*a]"),
    "alias-in-own-section": _section("actor", "&a {b: *a}"),
    "alias-of-the-whole": "&a\nmodel: *a\n",
    "alias-key-of-itself": _section("actor", "&a {? *a : 1}"),
    "billion-laughs": BASE + _laughs(12, 10),
    "billion-laughs-keys": BASE + _laughs(12, 10, key=True),
    "laughs-doubled": BASE + _laughs(60, 2),
    "many-aliases": BASE + "a: &a [" + "x, " * 10_000 + "x]\nb: [" + "*a, " * 10_000 + "*a]\n",
    "merge-keys": BASE
    + "a0: &a0 {x: 1}\n"
    + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], k{n}: 1}}\n" for n in range(1, 40)),
    "merge-itself": _section("actor", "&a {<<: *a}"),
    "interpolation-of-itself": _section("reward", "{function: '${reward.function}'}"),
    "interpolations-of-each-other": _section(
        "reward", "{function: '${rollout.name}'}\nrollout: {name: '${reward.function}'}"
    ),
    "interpolation-500-deep": _section("reward", "{function: '" + "${" * 500 + "rollout.name" + "}" * 500 + "'}"),
    "interpolation-5000-deep": _section("reward", "{function: '" + "${" * 5000 + "}" * 5000 + "'}"),
    "interpolation-open": _section("reward", "{function: '" + "${" * 3000 + "'}"),
    "interpolation-chain": _section(
        "trainer2", "{" + ", ".join(f"k{n}: '${{trainer2.k{n + 1}}}'" for n in range(500)) + "}"
    ),
    "interpolation-doubled": BASE.replace(
        "run_name: good",
        "logger: [console, " + ", ".join(f"'${{trainer.logger.{n}}}${{trainer.logger.{n}}}'" for n in range(40)) + "]",
    ),
    "interpolation-resolver": _section("reward", "{function: '${no.such:resolver}'}"),
    "interpolation-escape": _section("reward", r'{function: "${\e[2J}"}'),
    "tag-apply": _runs("object/apply:os.system", "['touch {canary}/apply']"),
    "tag-new": _runs("object/new:os.mkdir", "['{canary}/new']"),
    "tag-object": _runs("object:subprocess.Popen", "{{args: [touch, '{canary}/object']}}"),
    "tag-name": _runs("name:os.system", ""),
    "tag-module": _runs("module:os", ""),
    "tag-tuple": _section("actor", "!!python/tuple [1, 2]"),
    "tag-binary": _section("actor", "!!binary " + "A" * 400),
    "tag-binary-bad": _section("actor", "!!binary '%%%'"),
    "tag-set": _section("actor", "!!set {a, b}"),
    "tag-int-of-text": _section("actor", "{ppo_epochs: !!int x}"),
    "tag-int-huge": _section("actor", "{ppo_epochs: !!int " + "9" * 10_000 + "}"),
    "tag-float-of-text": _section("actor", "{clip_ratio: !!float x}"),
    "tag-bool-of-text": _section("actor", "{use_kl_loss: !!bool x}"),
    "tag-timestamp-bad": _section("actor", "!!timestamp 2001-99-99"),
    "timestamp-bad": _section("reward", "{function: 2001-99-99}"),
    "timestamp": _section("reward", "{function: 2001-12-14}"),
    "tag-unknown": _section("actor", "!x 1"),
    "tag-escape": _section("actor", "!<\x1b[2J> 1"),
    "tag-long": _section("actor", "!" + "x" * 100_000 + " 1"),
    "sexagesimal": _section("actor", "{ppo_epochs: 1" + ":59" * 40_000 + "}"),
    "sexagesimal-float": _section("actor", "{clip_ratio: 1" + ":59" * 40_000 + ".5}"),
    "digits": _section("actor", "{ppo_epochs: " + "9" * 10_000 + "}"),
    "digits-million": _section("actor", "{ppo_epochs: " + "9" * 10**6 + "}"),
    "hexadecimal": _section("actor", "{ppo_epochs: 0x" + "f" * 10**6 + "}"),
    "binary-digits": _section("actor", "{ppo_epochs: 0b" + "1" * 10**6 + "}"),
    "underscores": _section("actor", "{ppo_epochs: 1" + "_" * 10**6 + "}"),
    "float-1e400": _section("actor", "{clip_ratio: 1.0e+400}"),
    "key-null": BASE + "null: 1\n",
    "key-number": BASE + "7: 1\n",
    "key-nan": BASE + ".nan: 1\n",
    "key-true": BASE + "true: 1\n",
    "key-date": BASE + "2001-12-14: 1\n",
    "key-list": BASE + "? [a, b]\n: 1\n",
    "key-section": BASE + "? {a: b}\n: 1\n",
    "key-empty": BASE + "'': 1\n",
    "key-dotted": BASE + "trainer.seed: 1\n",
    "key-escape": BASE + '"\\e[2J\\a": 1\n',
    "key-surrogate": BASE + '"\\ud800": 1\n',
    "key-newline": BASE + '"a\\nrl-safe: error: forged": 1\n',
    "key-long": BASE + "a" * 100_000 + ": 1\n",
    "key-dunder": BASE + "__class__: {__init__: 1}\n",
    "keys-twice": BASE + BASE,
    "keys-many": BASE + "".join(f"k{n}: 1\n" for n in range(50_000)),
    "value-of-unknown-key-long": _section("surprise", "'" + "x" * 10**6 + "'"),
    "empty": "",
    "null": "null\n",
    "list": "[1, 2]\n",
    "text": "hello\n",
    "number": "7\n",
    "documents": "---\n" * 50_000,
    "two-documents": BASE + "---\n" + BASE,
    "unclosed-quote": BASE + "actor: 'x\n",
    "unclosed-quote-long": BASE + "actor: '" + "x" * 10**6,
    "tab": BASE + "\tactor: 1\n",
    "nul": BASE + "\x00",
    "nul-only": b"\x00" * 4096,
    "control-character": BASE + "actor: \x1b[2J\n",
    "utf-16-half": BASE.encode("utf-16")[:-1],
    "latin-1": BASE.encode() + b"actor: \xff\xfe\n",
    "surrogate-bytes": BASE + "reward: {function: \ud800}\n",
    "binary": bytes(range(256)) * 400,
    "directive": "%YAML 9.9\n---\n" + BASE,
    "anchor-long": _section("actor", "&" + "a" * 10**6 + " 1"),
    "alias-unknown": _section("actor", "*nothing"),
    "alias-escape": _section("actor", "*\x1b[2J"),
    "missing-mark": "model: {path: '???'}\ndata: {train_files: [prompts.parquet]}\n",
    "64-mib-of-comment": lambda site: b"#" * (64 * MIB) + b"\n",
    "64-mib-of-spaces": lambda site: b" " * (64 * MIB),
    "8-mib-of-keys": lambda site: "".join(f"k{n}: 1\n" for n in range(700_000)),
    "8-mib-of-list": lambda site: "model: [" + "a, " * (3 * MIB) + "a]\n",
    "8-mib-of-text": lambda site: "model: '" + "a" * (8 * MIB) + "'\n",
}
"""Texts that are no recipe, by name."""

LENIENT: dict[str, Callable[[Site], str | bytes] | str | bytes] = {
    "directive-long": "%TAG ! " + "x" * 100_000 + "\n---\n" + BASE,
    "utf-16": BASE.encode("utf-16"),
    "byte-order-mark": b"\xef\xbb\xbf" + BASE.encode(),
    "environment": _section("reward", "{function: '${oc.env:HOME}'}"),
    "environment-default": _section("reward", "{function: '${oc.env:NO_SUCH,char_class}'}"),
    "decode": _section("rollout", "{n: '${oc.decode:\"[1,2]\"}'}"),
    "create": _section("actor", "'${oc.create:{ppo_epochs: 1}}'"),
    "dict-values": _section("trainer3", "'${oc.dict.values:trainer}'"),
    "reward-os-system": _section("reward", "{function: 'os:system'}"),
    "reward-exit": _section("reward", "{function: 'os:_exit'}"),
    "reward-escape": _section("reward", r'{function: "\e[2J:x"}'),
    "reward-surrogate": _section("reward", r'{function: "\ud800:\ud800"}'),
    "reward-nul": _section("reward", r'{function: "os:\0"}'),
    "reward-relative": _section("reward", "{function: '..x:y'}"),
    "reward-long": _section("reward", "{function: '" + "a." * 50_000 + ":y'}"),
    "reward-antigravity": _section("reward", "{function: 'no_such_module_of_canary:run'}"),
    "model-nul": BASE.replace("path: model", r'path: "a\0b"'),
    "model-long": BASE.replace("path: model", "path: " + "a" * 5_000),
    "model-surrogate": BASE.replace("path: model", r'path: "\ud800"'),
    "model-secret": BASE.replace("path: model", "path: ../outside/secret.txt"),
    "model-outside": BASE.replace("path: model", "path: ../outside"),
    "model-dev-zero": BASE.replace("path: model", "path: /dev/zero"),
    "files-nul": BASE.replace("prompts.parquet", r'"a\0b.parquet"'),
    "files-long": BASE.replace("prompts.parquet", "a" * 5_000 + ".parquet"),
    "files-surrogate": BASE.replace("prompts.parquet", r'"\ud800.parquet"'),
    "files-escape": BASE.replace("prompts.parquet", r'"\e[2J.parquet"'),
    "files-many": BASE.replace("[prompts.parquet]", "[" + "prompts.parquet, " * 20_000 + "prompts.parquet]"),
    "files-empty-name": BASE.replace("prompts.parquet", "''"),
    "ray-address-escape": _section("cluster", r'{ray_address: "\e[2J:1"}'),
    "ray-address-long": _section("cluster", "{ray_address: '" + "a" * 10**6 + ":1'}"),
    "ray-address-slow": _section("cluster", "{ray_address: '" + ":1" * 50_000 + "x'}"),
}
"""Texts that may be a recipe, by name: they must do no harm."""


# Defaults

_SECRET_FILES = ("../outside/secret.txt", "/etc/passwd", "/etc/shadow", "/proc/self/environ", "/proc/self/maps")


def _put_special(what: str, site: Site) -> None:
    replace(site.input / RECIPE, what, site)


def _put_special_default(what: str, site: Site) -> None:
    put_recipe(site, f"defaults: other.yaml\n{BASE}")
    replace(site.input / "other.yaml", what, site)


def _defaults() -> Iterator[Case]:
    commands = (*OWN, OTHERS[1])

    def case(name: str, make: Callable[[Site], None], **facts: object) -> Case:
        fields = {"commands": commands, "accepts": ("plan-from-nemo-rl",), **facts}
        return Case(name=f"recipe/defaults-{name}", make=make, **fields)  # type: ignore[arg-type]

    for number, file in enumerate(_SECRET_FILES):
        # The file may be opened, as its user said; its text may not be shown.
        yield case(
            f"secret/{number}", lambda site, f=file: put_recipe(site, f"defaults: {f}\n{BASE}"), may_read_outside=True
        )
    for word, value in {
        "number": "7",
        "list-of-numbers": "[7]",
        "section": "{a: b}",
        "nul": r'"a\0b"',
        "long": "a" * 5_000,
        "surrogate": r'"\ud800"',
        "escape": r'"\e[2J.yaml"',
        "folder": ".",
        "itself": RECIPE,
        "empty-name": "['']",
        "many": "[" + "other.yaml, " * 50_000 + "other.yaml]",
        "interpolation": "'${oc.env:HOME}'",
        "tilde": "~root",
    }.items():
        yield case(word, lambda site, v=value: put_recipe(site, f"defaults: {v}\n{BASE}"))
    yield case("of-24-that-double", partial(_doubling, 24), accepts=EITHER)
    yield case("of-60-that-double", partial(_doubling, 60), accepts=EITHER)
    yield case("chain-of-1500", partial(_chain, 1500), accepts=EITHER)
    yield case("of-each-other", _each_other)
    yield case("binary", _binary_default)


def _doubling(count: int, site: Site) -> None:
    """Files that each name the next twice, by names that differ: two to the power of ``count`` ways through them."""
    put_recipe(site, f"defaults: [r0.yaml, ./r0.yaml]\n{BASE}")
    for number in range(count):
        following = f"defaults: [r{number + 1}.yaml, ./r{number + 1}.yaml]\n" if number + 1 < count else ""
        (site.input / f"r{number}.yaml").write_text(f"{following}trainer: {{seed: {number}}}\n")


def _chain(count: int, site: Site) -> None:
    put_recipe(site, f"defaults: r0.yaml\n{BASE}")
    for number in range(count):
        following = f"defaults: r{number + 1}.yaml\n" if number + 1 < count else ""
        (site.input / f"r{number}.yaml").write_text(f"{following}trainer: {{seed: {number}}}\n")


def _each_other(site: Site) -> None:
    put_recipe(site, f"defaults: \x65ther.yaml\n{BASE}")
    (site.input / "ether.yaml").write_text(f"defaults: {RECIPE}\n")


def _binary_default(site: Site) -> None:
    put_recipe(site, f"defaults: prompts.parquet\n{BASE}")


# Names of what a run writes

_BAD_NAMES = {
    "nul": r'"a\0b"',
    "long": "a" * 300,
    "above": "../../x",
    "above-inside": "a/../../../x",
    "absolute": "/tmp/x",
    "escape": r'"\e[2J"',
    "newline": r'"a\nb"',
    "dot": "'.'",
    "dots": "'..'",
    "empty": "''",
    "slash": "'/'",
    "surrogate": r'"\ud800"',
    "return": r'"a\rb"',
    "bell": r'"\a"',
    "interpolated": "'${oc.decode:\"../x\"}'",
}
_BAD_FOLDERS = {
    "file": "/etc/passwd",
    "below-file": "/etc/passwd/x",
    "nul": r'"a\0b"',
    "long": "a" * 5_000,
    "escape": r'"\e[2J"',
    "surrogate": r'"\ud800"',
    "own-file": RECIPE,
    "device": "/dev/zero",
    "proc": "/proc/self",
}

_NO_FOLDER = ("file", "below-file", "own-file", "device")
"""Kinds of entry that may stand at a path, but never in the place of a folder."""


def _names() -> Iterator[Case]:
    for word, value in _BAD_NAMES.items():
        yield recipe(f"run-name-{word}", BASE.replace("run_name: good", f"run_name: {value}"), commands=OWN)
    for word, value in _BAD_FOLDERS.items():
        # A plan makes no folder.
        accepts = EITHER if word == "proc" else ("plan",) if word in _NO_FOLDER else ()
        yield recipe(
            f"output-dir-{word}",
            BASE.replace("output_dir: outputs", f"output_dir: {value}"),
            commands=OWN,
            accepts=accepts,
        )
        text = BASE.replace("default_local_dir: checkpoints", f"default_local_dir: {value}, save_freq: 1")
        yield recipe(f"local-dir-{word}", text, commands=OWN, accepts=accepts)


def _grown() -> Iterator[Case]:
    for number, value in enumerate(grow(values(), 60, seed=51)):
        yield recipe(f"grown-value/{number:03}", to_json(value), accepts=EITHER)
    sections = (
        "model",
        "data",
        "algorithm",
        "actor",
        "megatron",
        "rollout",
        "trainer",
        "cluster",
        "rl_safe",
        "defaults",
    )
    layers = st.dictionaries(st.one_of(st.sampled_from(sections), texts()), values(), min_size=1, max_size=3)
    for number, layer in enumerate(grow(layers, 80, seed=52)):
        yield recipe(f"grown-layer/{number:03}", to_json(layer), accepts=EITHER)
    pieces = st.sampled_from(
        (
            "{",
            "}",
            "[",
            "]",
            ": ",
            ", ",
            "&a ",
            "*a ",
            "!!int ",
            "!!python/name:os.system ",
            "- ",
            "? ",
            "\n",
            "  ",
            "'",
            '"',
            "|\n",
            ">\n",
            "<<",
            "a",
            "1",
            "${",
            "}",
            "trainer",
            "seed",
            "defaults",
            "~",
            "%",
            "@",
            "`",
            "#",
            "---\n",
            "...\n",
            "\t",
            "\\",
            "\ud800",
            "\x85",
            "\u2028",
        )
    )
    for number, parts in enumerate(grow(st.lists(pieces, min_size=1, max_size=30), 100, seed=53)):
        yield recipe(f"grown-text/{number:03}", "".join(parts), accepts=EITHER)
