"""Builds a RunConfig from a recipe and dotted overrides.

A recipe is a YAML file with some of RunConfig's keys; ``defaults:`` names the recipes that it starts from.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from rl_safe_workers import env
from rl_safe_workers.config import ClusterConfig, MegatronConfig, RunConfig
from rl_safe_workers.errors import ConfigError, first_line
from rl_safe_workers.foreign_files import Kind, kind_of
from rl_safe_workers.section import nearest_key, read
from rl_safe_workers.yaml_files import check_interpolations, overlaid, parse_yaml, with_defaults

COMMAND_LINE = "command line"
_RAY_COPIES = "working_dir_files"
"""The folder in which Ray unpacks the working directories of jobs."""
LOCAL_RAY = "local"
"""Stands for the address of a Ray that is started only for the run."""
_MOST_OVERRIDES = 1_000
_DEEPEST_KEY = 20
_ABSENT = object()
OVERRIDE = re.compile(r"[A-Za-z_]\w*(\.\w+)*=.*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The keys of one file or one override. They are merged over the layers before it.

    Example: ``Layer(source="command line", values={"trainer": {"seed": 1}})``
    """

    source: str
    values: dict[Any, Any]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the configuration of a recipe, the recipes it starts from, and the overrides. Later values win.

    Fills ``trainer.run_name`` and ``trainer.default_local_dir`` if they are null. Looks for a relative entry of
    ``data.train_files`` in the current directory, then two levels above each recipe, so that a recipe runs from
    anywhere. An override of ``model.path`` alone turns ``model.create`` off. Writes nothing.

    Args:
        path: The YAML file.
        overrides: ``key=value`` with a dotted key and a YAML value, e.g. ``trainer.logger=[console,tensorboard]``.

    Raises:
        ConfigError: If a file cannot be read, a key or value does not fit, or settings contradict each other.
    """
    files = _read_files(Path(path))
    config = _to_config([*files.values(), *_parse_overrides(overrides)], recipe=Path(path).stem)
    named = {override.partition("=")[0] for override in overrides}
    if "model.path" in named and not any(key.startswith("model.create") for key in named):
        # The recipe's seeded model is for the recipe's own path: a misspelt directory must not become a random model.
        config.model.create = None
    config.check_training()
    roots = [file.parent.parent for file in reversed(files)]
    config.data.train_files = [_locate(name, roots) for name in config.data.train_files]
    _rebase(config)
    return config


def ray_address(cluster: ClusterConfig) -> str:
    """Returns the address of the cluster to use: ``LOCAL_RAY``, ``auto`` or ``host:port``. Resolves a null setting."""
    return cluster.ray_address or env.submitted_to() or LOCAL_RAY


def _rebase(config: RunConfig) -> None:
    """Makes the paths of a run's outputs relative to `env.base_dir`. Leaves the path of an existing model as it is."""
    trainer, base = config.trainer, env.base_dir()
    assert trainer.default_local_dir is not None, "filled by _to_config"
    if not env.has_base_dir():
        written = {"trainer.output_dir": trainer.output_dir}
        if trainer.save_freq > 0:
            written["trainer.default_local_dir"] = trainer.default_local_dir
        for key, path in written.items():
            if _RAY_COPIES in base.parts and not Path(path).is_absolute():
                raise ConfigError(
                    f"{key}={path} is relative, and the working directory is Ray's copy of the submitted folder, which "
                    f"Ray deletes: give an absolute path, or set {env.BASE_DIR} in the job's runtime environment"
                )
        return
    trainer.output_dir = str(base / trainer.output_dir)
    trainer.default_local_dir = str(base / trainer.default_local_dir)
    if kind_at("model.path", config.model.path) is None:
        config.model.path = str(base / config.model.path)
    resume = trainer.resume_from_path
    if resume is not None and kind_at("trainer.resume_from_path", resume) is None:
        trainer.resume_from_path = str(base / resume)


def load_settings(recipe: str | Path | None, overrides: Sequence[str], *, name: str) -> RunConfig:
    """Returns the settings of a command that does not train, from an optional recipe and the overrides.

    Args:
        recipe: A YAML file; None: the defaults, with one trainer for each place in the layout.
        overrides: As for `load_recipe`.
        name: The command's name. The folder for its logs gets this name.

    Raises:
        ConfigError: If a file cannot be read, or a key or value does not fit.
    """
    files = {} if recipe is None else _read_files(Path(recipe))
    config = _to_config([*files.values(), *_parse_overrides(overrides)], recipe=name)
    if recipe is None and not any(override.startswith("cluster.num_trainers=") for override in overrides):
        config.cluster.num_trainers = _fewest_trainers(config.megatron)
    return config


def _fewest_trainers(megatron: MegatronConfig) -> int:
    pipeline = megatron.pipeline_model_parallel_size
    dense = megatron.tensor_model_parallel_size * megatron.context_parallel_size
    experts = megatron.expert_tensor_parallel_size * megatron.expert_model_parallel_size
    return math.lcm(dense, experts) * pipeline


def to_yaml(config: RunConfig) -> str:
    """Returns the whole configuration as YAML, interpolations resolved. ``load_recipe`` reads an equal one back."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def _read_files(path: Path) -> dict[Path, Layer]:
    """Reads a recipe and the recipes that it starts from, each once, parents before children, depth first.

    A parent that is reached twice keeps its first place, so that a parent never overrules its own child.
    """
    layers: dict[Path, Layer] = {}
    for file, values in with_defaults(path):
        _wrap_single_file(values)
        layers[file.resolve()] = Layer(source=str(file), values=values)
    return layers


def _parse_overrides(texts: Sequence[str]) -> list[Layer]:
    if len(texts) > _MOST_OVERRIDES:
        raise ConfigError(f"{COMMAND_LINE}: {len(texts)} overrides are more than {_MOST_OVERRIDES}; write a recipe")
    return [_parse_override(text) for text in texts]


def _parse_override(text: str) -> Layer:
    if OVERRIDE.fullmatch(text) is None:
        raise ConfigError(f"{COMMAND_LINE}: {text!r:.200} is not an override; write key=value, e.g. trainer.seed=1")
    key, _, value = text.partition("=")
    if key.count(".") > _DEEPEST_KEY:
        raise ConfigError(
            f"{COMMAND_LINE}: unknown key {key:.100}; the nearest known key is {nearest_key(RunConfig, key)}"
        )
    try:
        values = parse_yaml(value)
    except ValueError as error:
        raise ConfigError(f"{COMMAND_LINE}: {text!r:.200} cannot be read: {error}; quote the value") from error
    for name in reversed(key.split(".")):
        values = {name: values}
    _wrap_single_file(values)
    return Layer(source=COMMAND_LINE, values=values)


def _wrap_single_file(values: dict[Any, Any]) -> None:
    """Replaces a single file name by a list, because verl's users write ``data.train_files`` either way."""
    data = values.get("data")
    if isinstance(data, dict) and isinstance(files := data.get("train_files"), str) and not files.startswith("${"):
        data["train_files"] = [files]


def _to_config(layers: Sequence[Layer], *, recipe: str) -> RunConfig:
    """Merges the layers over the defaults, resolves interpolations, fills the run's names, and checks the result."""
    values: dict[Any, Any] = {}
    for layer in layers:
        values = overlaid(values, layer.values)
    check_interpolations(values)
    try:
        if missing := sorted(OmegaConf.missing_keys(OmegaConf.create(values))):
            raise ConfigError(f"{', '.join(missing)} has no value; set it in the recipe or as {missing[0]}=VALUE")
        merged = OmegaConf.create(overlaid(RunConfig().model_dump(mode="json"), values))
        resolved = cast(dict[Any, Any], OmegaConf.to_container(merged, resolve=True))
    except GrammarParseError as error:
        raise ConfigError(f"{error.full_key} cannot be read: {first_line(error)}; quote the value") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key} cannot be resolved: {first_line(error)}") from error
    except RecursionError as error:
        raise ConfigError("interpolations lead on too deeply to be resolved; write the values out") from error
    config = read(RunConfig, resolved, source_of=lambda key: _source(key, layers))
    trainer = config.trainer
    # Two runs may start in the same second.
    trainer.run_name = trainer.run_name or f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    trainer.default_local_dir = trainer.default_local_dir or f"checkpoints/{recipe}"
    return config.checked()


def _source(key: str, layers: Sequence[Layer]) -> str:
    """Returns the prefix of an error about a key: the name of the last layer with that key, or "" if there is none."""
    for layer in reversed(layers):
        value: Any = layer.values
        for name in key.partition("[")[0].split(".") if key else ():
            value = value.get(name) if isinstance(value, Mapping) and name in value else _ABSENT
        if key and value is not _ABSENT:
            return f"{layer.source}: "
    return ""


def _locate(name: str, roots: Sequence[Path]) -> str:
    """Returns the first existing path of ``name`` and each ``root / name``; ``name`` if none exists, for the error."""
    candidates = [name, *(str(root / name) for root in roots)]
    return next((candidate for candidate in candidates if kind_at("data.train_files", candidate) is not None), name)


def kind_at(key: str, path: str | Path) -> Kind | None:
    """Returns the kind of file at a key's path; None if there is none.

    Raises:
        ConfigError: If the path cannot be looked at, e.g. because a folder may not be read.
    """
    try:
        return kind_of(path)
    except OSError as error:
        raise ConfigError(f"{key}={path!s:.200} cannot be looked at: {error.strerror or error}; check it") from error
