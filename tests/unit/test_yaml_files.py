"""YAML that is made to cost more than it looks like: refused on one line, and soon."""

from __future__ import annotations

import json
import math
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rl_safe_workers.cli.main import main
from rl_safe_workers.errors import ConfigError
from rl_safe_workers.recipe import load_recipe
from rl_safe_workers.yaml_files import check_interpolations, overlaid, parse_yaml, read_yaml, with_defaults

MOST_CPU_S = 4.0
MOST_BYTES = 2**28
BASE = "model: {path: m}\ndata: {train_files: [d.parquet]}\n"


def laughs(levels: int, *, flow: str = "[{}]") -> str:
    lines = ["a0: &a0 [x]"]
    lines += [f"a{n}: &a{n} " + flow.format(", ".join([f"*a{n - 1}"] * 9)) for n in range(1, levels)]
    return "\n".join(lines)


HOSTILE = {
    "deep flow": "a: " + "[" * 3_000 + "]" * 3_000,
    "deep flow without end": "[" * 2**20,
    "deep maps": "".join(f"{' ' * n}a:\n" for n in range(1_000)),
    "deep keys": "? " * 2**19,
    "billion laughs": laughs(10),
    "billion merges": "a: &a {x: 1}\n" + "b: {<<: [" + "*a, " * 20_000 + "]}",
    "itself": "a: &a [*a]",
    "itself in a map": "a: &a {b: *a}",
    "itself at the root": "&a {b: *a}",
    "an anchor anew": "a: &a 1\nb: &a [*a]",
    "nothing": "a: *b",
    "many nodes": "a: [" + "1, " * 300_000 + "]",
    "many keys": "".join(f"k{n}: 1\n" for n in range(100_000)),
    "long text many times": "a: &a " + "x" * 2**19 + "\nb: [" + "*a, " * 5_000 + "]",
    "large": "#" * (2**20 + 1),
    "python object": "a: !!python/object/apply:os.system [false]",
    "python path": "a: !!python/object/apply:pathlib.Path [/etc]",
    "tag": "a: !!int x",
    "number without digits": "a: 0x_",
    "number of many digits": "a: " + "9" * 5_000,
    "many interpolations": "a: '" + "${b}" * 1_001 + "'",
    "control characters": "a: \0",
    "two documents": "a: 1\n---\nb: 2",
    "text": "hunter2",
    "list": "[hunter2]",
    "UTF-16": "a: 1".encode("utf-16"),
    "an undefined alias": "*hunter2",
    "a key that is no name": "{{a: 1}: 2, [a]: 3}",
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def _write(content: str | bytes, name: str = "recipe.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return _write


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_yaml_is_refused_soon_in_little_memory(write: Callable[..., Path], case: str) -> None:
    path = write(HOSTILE[case])
    cpu_s, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with pytest.raises(ConfigError) as caught:
        read_yaml(path)
    assert time.process_time() - cpu_s < MOST_CPU_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - peak < MOST_BYTES
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("case", ["deep flow", "billion laughs", "itself", "python object", "number without digits"])
def test_a_hostile_override_is_refused_as_a_file_is(write: Callable[..., Path], case: str) -> None:
    content = HOSTILE[case]
    assert isinstance(content, str)
    with pytest.raises(ConfigError, match="^command line: "):
        load_recipe(write(BASE), [f"trainer={{{content}}}" if case != "deep flow" else f"trainer.logger={content[3:]}"])


@pytest.mark.timeout(20)
def test_a_fifo_is_no_recipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(ConfigError, match="not a regular file"):
        load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "/".join(["x"] * 3_000), "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_recipe(tmp_path / name)
    (tmp_path / "child.yaml").write_text(f"defaults: {json.dumps(name)}", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read|invalid Unicode"):
        load_recipe(tmp_path / "child.yaml")


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to("a.yaml")
    with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
        load_recipe(tmp_path / "a.yaml")


def test_files_that_name_the_next_twice_are_each_read_once(write: Callable[..., Path]) -> None:
    for n in range(24):
        write(f"defaults: [{n + 1}.yaml, ../{Path(write('', 'x').parent).name}/{n + 1}.yaml]\nk: {n}", f"{n}.yaml")
    files = [path.name for path, _ in with_defaults(write("k: 24", "24.yaml").with_name("0.yaml"))]
    assert files == [f"{n}.yaml" for n in reversed(range(25))]


def test_a_chain_of_files_has_a_limit(write: Callable[..., Path]) -> None:
    for n in range(2_000):
        write(f"defaults: {n + 1}.yaml", f"{n}.yaml")
    with pytest.raises(ConfigError, match="more than 50 files"):
        list(with_defaults(write("", "x").with_name("0.yaml")))


def test_a_file_that_is_no_recipe_is_not_shown(write: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    write("password hunter2\nroot:x:0:0\n", "secret")
    assert main(["run", str(write("defaults: secret\n"))]) == 2
    err = capsys.readouterr().err
    assert "secret: not a mapping of keys" in err
    assert "hunter2" not in err


def test_interpolations_of_interpolations_do_not_explode(write: Callable[..., Path]) -> None:
    files = ["x" * 50, *(f"${{data.train_files[{n}]}}${{data.train_files[{n}]}}" for n in range(60))]
    recipe = write("model: {path: m}\ndata:\n  train_files:\n" + "".join(f"    - {name}\n" for name in files))
    cpu_s = time.process_time()
    with pytest.raises(ConfigError, match="may grow without bounds"):
        load_recipe(recipe)
    assert time.process_time() - cpu_s < MOST_CPU_S


def test_a_long_chain_of_interpolations_is_refused_on_one_line(write: Callable[..., Path]) -> None:
    files = ["x", *(f"${{data.train_files[{n}]}}" for n in range(500))]
    recipe = write("model: {path: m}\ndata:\n  train_files:\n" + "".join(f"    - {name}\n" for name in files))
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["${oc.select:KEY}${oc.select:KEY}", "${.KEY}${.KEY}", "${ KEY }${ KEY }", "${.[KEY]}${.[KEY]}"],
)
def test_each_way_to_name_a_key_counts(text: str) -> None:
    values = {chr(ord("b") + n): text.replace("KEY", chr(ord("c") + n)) for n in range(20)}
    with pytest.raises(ConfigError, match="may grow"):
        check_interpolations(values)


def test_many_values_may_each_name_two_others() -> None:
    names = [f"${{oc.env:HOME}}/${{data.folder}}/{n}" for n in range(100)]
    check_interpolations({"data": {"folder": "${trainer.a}/${trainer.b}", "train_files": names}, "trainer": {}})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("-1.5e3", -1500.0),
        (".inf", math.inf),
        ("2001-01-01", "2001-01-01"),
        ("1e", "1e"),
        ("0x10", 16),
        ("", None),
        ("yes", True),
        ("'1'", "1"),
        ("{a: [1, b]}", {"a": [1, "b"]}),
        ("&x [1]", [1]),
    ],
)
def test_values_are_read_as_omegaconf_reads_them(text: str, value: object) -> None:
    from omegaconf import OmegaConf

    assert parse_yaml(text) == value
    theirs = OmegaConf.to_container(OmegaConf.from_dotlist([f"a={text}"]))
    assert theirs == {"a": value}


def test_aliases_and_merges_of_small_size_are_taken(write: Callable[..., Path]) -> None:
    path = write("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]")
    assert read_yaml(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": [{"x": 1, "y": 2}] * 2}


def test_a_value_to_be_given_leaves_what_is_there() -> None:
    assert overlaid({"a": {"x": 1}, "b": 1}, {"a": {"x": "???", "y": "???"}, "b": {"c": 2}}) == {
        "a": {"x": 1, "y": "???"},
        "b": {"c": 2},
    }


@pytest.mark.parametrize(
    "text",
    [
        "${oc.create:'a: 1'}",
        "${ oc.create :'a: 1'}",
        "${oc.${b}:'a: 1'}",
        "${${b}}",
        "${",
        "${'a'}",
        "${a:${b}}${${c}}",
    ],
)
def test_an_interpolation_that_could_be_anything_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^a\.b cannot be .*: an interpolation is"):
        check_interpolations({"a": {"b": text}})


@pytest.mark.parametrize(
    "text",
    ["${a}", "${.a}", "${a-b.c[0]}", "${ a.b }", "${oc.env:A,${b}}", "${mul:${a}, 2}", "${oc.select:a.b,'x'}", "$a"],
)
def test_interpolations_that_say_what_they_are_pass(text: str) -> None:
    check_interpolations({"a": {"b": text}})


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "${" + "." * 10**5 + "-}",
        "${" + "a" * 10**5 + "-}",
        "${" + "[" * 10**5 + "-}",
        "${" + " " * 10**5 + "(",
        "${oc.env:" + " " * 10**5 + "$",
        "${oc.create" + " " * 10**5 + "(",
        "${a" + " " * 10**5 + "(",
        "${" * 10**5,
        "${a" * 10**5 + "}" * 10**5,
    ],
    ids=lambda text: text[:12].strip(),
)
def test_a_long_interpolation_is_read_in_linear_time(text: str) -> None:
    with suppress(ConfigError):
        check_interpolations({"a": text})


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["1" + ":1" * 10**5, "1" + ":1" * 1000 + ".5"])
def test_a_long_number_of_base_60_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a number of more than 300 characters at line 1, column 4"):
        parse_yaml(f"a: {text}")
    assert parse_yaml("a: 1:30") == {"a": 90}


@pytest.mark.parametrize("name", ["os:environ", "oc.env:HOME"])
def test_no_resolver_runs_code_or_is_added(write: Callable[..., Path], name: str) -> None:
    recipe = write(BASE + f"trainer: {{run_name: '${{{name}}}'}}\n")
    with pytest.raises(ConfigError):  # an unknown resolver; a path is no run name
        load_recipe(recipe)
