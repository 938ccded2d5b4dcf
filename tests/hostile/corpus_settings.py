"""Hostile values of single keys, in a recipe and on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from hypothesis import strategies as st

from rl_safe_workers.config import RunConfig
from rl_safe_workers.section import Section, known_keys, section_of
from tests.hostile.case import EITHER, Case, Command, Site
from tests.hostile.corpus_recipes import BASE, RECIPE, put_recipe
from tests.hostile.grow import MANY_DIGITS, digits, grow, texts

PLANS = ("plan", "plan-json")
"""A plan looks at a part of the settings alone."""
ABSURD = {
    "digits": digits(MANY_DIGITS),
    "minus-digits": digits(-MANY_DIGITS),
    "nan": ".nan",
    "infinite": ".inf",
    "minus-infinite": "-.inf",
    "1e300": "1.0e+300",
    "minus-1e30": "-1.0e+30",
}
"""Numbers that no setting can have."""
_ALIKE = ("rl_safe.timeouts.", "rl_safe.bootstrap.max_ctas.")
"""Sections whose keys are all alike: one of each gets every value."""
_FEW = ("digits", "nan", "1e300", "text")
WRONG_TYPES = {
    "list": "[1, 2]",
    "section": "{a: 1}",
    "text": "surprise",
    "escape": r'"\e[2J"',
    "surrogate": r'"\ud800"',
    "nul": r'"a\0b"',
    "null": "null",
}


@dataclass(frozen=True)
class Spec:
    """The values that one key may hold."""

    kind: type
    """``int``, ``float``, ``bool``, ``str``, ``list``, or ``Section`` for a key that holds further keys."""
    optional: bool


def specs(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, Spec]]:
    """Every dotted key of a run, sections before what they hold."""
    for name, field in section.model_fields.items():
        inner, optional = section_of(field.annotation), type(None) in get_args(field.annotation)
        schema = section.model_json_schema()["properties"][name]
        # A choice of names has no type of its own there.
        word = next((one["type"] for one in [schema, *schema.get("anyOf", ())] if "type" in one), "string")
        yield prefix + name, Spec(kind=Section if inner is not None else KINDS[word], optional=optional)
        if inner is not None:
            yield from specs(inner, f"{prefix}{name}.")


KINDS = {"integer": int, "number": float, "boolean": bool, "string": str, "array": list, "object": Section}


def cases() -> Iterator[Case]:
    """All of them."""
    for key, spec in specs():
        for word, value in _values(key, spec).items():
            yield _setting(key, spec, word, value)
    for number, override in enumerate(OVERRIDES):
        yield _override(f"{number:02}", override)
    yield from _grown()


def _values(key: str, spec: Spec) -> dict[str, str]:
    found = {**ABSURD, **WRONG_TYPES} if spec.kind in (int, float) else WRONG_TYPES
    few = key.startswith(_ALIKE) and not key.endswith((".world", ".start"))
    return {word: found[word] for word in _FEW if word in found} if few else found


def _setting(key: str, spec: Spec, word: str, value: str) -> Case:
    def make(site: Site) -> None:
        put_recipe(site, f"defaults: base.yaml\n{_nested(key, value)}")
        (site.input / "base.yaml").write_text(BASE)

    commands = [Command("recipe", (RECIPE,)), Command("plan", (RECIPE,))]
    if "\\" not in value:
        # The same as an override, whose text an attacker has not escaped.
        commands.append(Command("recipe", ("base.yaml", f"{key}={value}")))
    accepts = ("plan",) if _is_wrong(spec, word) else EITHER
    return Case(name=f"setting/{key}-{word}", make=make, commands=tuple(commands), accepts=accepts)


def _nested(key: str, value: str) -> str:
    """The YAML of one dotted key."""
    *sections, last = key.split(".")
    lines = [f"{'  ' * depth}{section}:" for depth, section in enumerate(sections)]
    return "\n".join([*lines, f"{'  ' * len(sections)}{last}: {value}\n"])


def _is_wrong(spec: Spec, word: str) -> bool:
    """Returns True if no key of this kind may have the value; the rest may be refused, or mean something."""
    if word in ABSURD:
        return True
    if word == "null":
        return not spec.optional and spec.kind not in (Section, list)
    if word == "list":
        return spec.kind is not list
    if word == "section":
        return spec.kind is not Section
    return spec.kind not in (str, list)


OVERRIDES = (
    "",
    "=",
    "=1",
    "trainer",
    "trainer.seed",
    ".=1",
    "..=1",
    "trainer.=1",
    ".seed=1",
    "trainer..seed=1",
    "trainer.seed.=1",
    "a." * 3000 + "a=1",
    "trainer." * 500 + "seed=1",
    "trainer.seed=" + "[" * 3000,
    "trainer.seed=" + "[" * 3000 + "]" * 3000,
    "trainer.seed=" + "{a: " * 3000,
    "trainer.run_name=" + "${" * 500 + "}" * 500,
    "trainer.run_name=${trainer.run_name}",
    "trainer.run_name=${oc.env:HOME}",
    "trainer.run_name=${oc.env:NO_SUCH_VARIABLE}",
    "trainer.run_name=\ud800",
    "trainer.run_name=\udcff\udcfe",
    "trainer.run_name=\x1b[2J",
    "trainer.run_name=a\nb",
    "trainer.run_name=../../x",
    "trainer.run_name=" + "a" * 300,
    "\ud800=1",
    "\x1b[2J=1",
    "a\nb=1",
    "trainer.\x1b[2J=1",
    "trainer[seed]=1",
    "trainer.logger[0]=x",
    "trainer.logger.0=x",
    "trainer.logger=[",
    "trainer.logger=]",
    "trainer.logger={",
    "trainer.seed=}",
    "trainer.seed=1=2",
    "trainer.seed==1",
    "trainer.seed=",
    "trainer.seed= ",
    "trainer.seed=:",
    "trainer.seed=- 1",
    "trainer.seed=&a [*a]",
    "trainer.seed=*a",
    "trainer.seed=!!python/object/apply:os.system ['true']",
    "trainer.seed=!!int x",
    "trainer.seed=" + "9" * 100_000,
    "trainer.seed=1" + ":59" * 20_000,
    "trainer.seed=0x" + "f" * 100_000,
    "trainer.seed=.nan",
    "trainer.seed=1e3",
    "trainer=1",
    "trainer=[1]",
    "trainer={}",
    "trainer=null",
    "trainer={seed: {a: 1}}",
    "defaults=x",
    "defaults=../outside/secret.txt",
    "+trainer.seed=1",
    "~trainer.seed",
    "++trainer.seed=1",
    "--json",
    "-x",
    "--",
    "-",
    "@file",
    "--\x1b[2J",
    "--surprise=\ud800",
    "-\n",
    "trainer.seed=1 # comment",
    "trainer.seed='1",
    'trainer.seed="1',
    "trainer.seed=|\n 1",
    "trainer.seed=? a",
    "trainer.seed=%",
    "trainer.seed=@",
    "trainer.seed=`",
    "trainer.seed=\t1",
    "__class__=1",
    "trainer.__class__=1",
    "trainer.__dict__.seed=1",
    "_content=1",
    "trainer._metadata=1",
    "0=1",
    "1.2=3",
    "trainer.seed=" + "a" * 100_000,
    "k" * 100_000 + "=1",
    "model.create=null",
    "model.create.surprise=1",
    "data.train_files=x",
    "data.train_files=[[x]]",
    "data.train_files={a: b}",
    "data.train_files=${data}",
    "data.train_files=../outside/secret.txt",
    "model.path=",
    "model.path=\x00",
    "trainer.output_dir=/etc/passwd",
    "cluster.ray_address=\x1b[2J:1",
    "reward.function=:",
    "reward.function=os:",
    "reward.function=:system",
    "reward.function=..",
    "rl_safe.bootstrap.max_ctas={x: 1}",
)
"""Overrides that somebody may write, or be made to paste."""


def _override(name: str, *overrides: str) -> Case:
    # An argument of a program holds no NUL, and every other one of ours comes through the operating system.
    named = tuple(override for override in overrides if "\x00" not in override)
    commands = [
        Command("recipe", (RECIPE, *overrides)),
        Command("plan", (RECIPE, *named)),
        Command("plan", ("--from", "verl", *named)),
        Command("plan", ("--from", "nemo-rl", RECIPE, *named)),
    ]
    return Case(
        name=f"override/{name}", make=lambda site: put_recipe(site, BASE), commands=tuple(commands), accepts=EITHER
    )


def _grown() -> Iterator[Case]:
    keys = st.sampled_from(sorted(known_keys(RunConfig)))
    words = st.one_of(keys, texts(), st.lists(texts(), min_size=1, max_size=4).map(".".join))
    marks = st.sampled_from(("=", "=", "=", "", "==", "=${", "=[", "=!!", "+=", ":"))
    tails = st.one_of(
        texts(), keys, st.sampled_from((".nan", "[1,2", "{a: b}", "'x", "&a *a", "${trainer.seed}", "1e999"))
    )
    overrides = st.tuples(words, marks, tails).map("".join)
    for number, found in enumerate(grow(st.lists(overrides, min_size=1, max_size=3), 150, seed=61)):
        yield _override(f"grown/{number:03}", *found)
