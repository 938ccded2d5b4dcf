"""Reads a plan's facts from a recipe of ours, from verl's command line or YAML, or from NeMo RL's YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_safe_workers.errors import ConfigError, first_line
from rl_safe_workers.foreign_files import kind_of
from rl_safe_workers.model_files import CONFIG
from rl_safe_workers.plan.fields import BY_NAME, FIELDS, HOST_DEFAULTS
from rl_safe_workers.plan.request import Source
from rl_safe_workers.yaml_files import check_interpolations, overlaid, parse_yaml, read_yaml, with_defaults

FROM = ("verl", "nemo-rl")
_LAUNCHERS = ("python", "python3", "-m", "-u", "uv", "run", "bash", "--")
_MODULES = ("verl.trainer.", "rl_safe_workers.adapters.verl.", "--config")
_MOST_LAYERS = 1_000
_LONGEST_KEY = 500
_SUFFIXES = (".yaml", ".yml")
_NOT_READ = ("world", "rollouts")
_LISTS = (BY_NAME["pipeline_layout"].verl, BY_NAME["pipeline_layout"].nemo_rl)
"""Keys whose value may be a list. A list is kept as text."""
_VERL_RESHARDABLE = "actor_rollout_ref.actor.megatron.dist_ckpt_optim_fully_reshardable"
_NEMO_RL_VLLM = "policy.generation.vllm_cfg"
_RL_SAFE = "actor_rollout_ref.rl_safe"
_OURS_IN_VERL = (
    "bootstrap",
    "budget",
    "timeout_s",
    "group_timeout_s",
    "fully_parallel_save",
    "validate_access_integrity",
    "finalizes",
    "teardown",
)
"""Habits of verl that our engines replace."""


def recipe_source(path: str, overrides: Sequence[str]) -> Source:
    """Reads a recipe of ours as a run would.

    Raises:
        ConfigError: As ``recipe.load_recipe``.
    """
    from rl_safe_workers.recipe import kind_at, load_recipe

    config = load_recipe(path, overrides)
    values: dict[str, Any] = {"host": "rl-safe"}
    keys = {field.name: field.recipe for field in FIELDS if field.recipe}
    for name, key in keys.items():
        found: Any = config
        for part in key.split("."):
            found = getattr(found, part)
        values[name] = found
    if kind_at("model.path", Path(config.model.path) / CONFIG) is None:
        # The run itself makes the model, and the recipe has its sizes.
        values["model"] = None
    values["dtype_bytes"] = 4 if config.model.dtype == "float32" else 2
    values["backend"] = "gloo" if config.cluster.device == "cpu" else "nccl"
    values["release_comms"] = config.rollout.release_comms == "always" or (
        config.rollout.release_comms == "auto" and config.cluster.colocated
    )
    return Source(name=path, values=values, keys=keys, max_ctas=config.rl_safe.bootstrap.max_ctas.limits())


def verl_source(arguments: Sequence[str]) -> Source:
    """Reads verl's whole command, the arguments of ``verl.trainer.main_ppo``, or YAML files. Later values win.

    Raises:
        ConfigError: If a file cannot be read, or if an argument is neither a file nor ``key=value``.
    """
    layers: list[Mapping[Any, Any]] = []
    for argument in arguments:
        if _is_launcher(argument):
            continue
        if argument.endswith(_SUFFIXES) and "=" not in argument:
            layers.append(read_yaml(Path(argument)))
        else:
            layers.append(_override(argument, host="verl"))
    config = _to_config(layers, host="verl")
    names = {field.name: field.verl for field in FIELDS if field.verl}
    values = {"host": "verl", **_selected(config, names)}
    _add_verl_rank_counts(values, names, config)
    _add_verl_sharding(values, names, config)
    if not _has_our_engines(config):
        return Source(name="verl", values=values, keys=names)
    return _with_our_engines(values, names, config)


def nemo_rl_source(arguments: Sequence[str]) -> Source:
    """Reads a YAML of NeMo RL's, the files in its ``defaults``, and ``key=value`` arguments after it.

    Raises:
        ConfigError: If a file cannot be read, or if a setting leaves no trainer.
    """
    if not arguments or not arguments[0].endswith(_SUFFIXES):
        raise ConfigError("--from nemo-rl takes a YAML file, and key=value after it")
    files = [values for _, values in with_defaults(Path(arguments[0]))]
    settings = [_override(argument, host="nemo-rl") for argument in arguments[1:]]
    config = _to_config([*files, *settings], host="nemo-rl")
    names = {field.name: field.nemo_rl for field in FIELDS if field.nemo_rl}
    values = {"host": "nemo-rl", **_selected(config, names)}
    _add_nemo_rl_rank_counts(values, names, config)
    _add_nemo_rl_engines(values, names, config)
    if not _is_there(values.get("model")):
        values.pop("model", None)  # the name of a model on a hub, which we do not look up
    return Source(name=arguments[0], values=values, keys=names)


def read_source(host: str, arguments: Sequence[str]) -> Source:
    """Reads the facts of a host's configuration; the host is one of `FROM`.

    Raises:
        ConfigError: As the host's reader, or if the host is unknown.
    """
    readers = {"verl": verl_source, "nemo-rl": nemo_rl_source}
    if host not in readers:
        raise ConfigError(f"--from={host} is not known: it takes one of {', '.join(FROM)}")
    return readers[host](arguments)


def _is_launcher(argument: str) -> bool:
    return argument in _LAUNCHERS or argument.startswith(_MODULES) or argument.endswith(".py")


def _add_verl_rank_counts(values: dict[str, Any], names: dict[str, str], config: DictConfig) -> None:
    """Adds the numbers of ranks. Trainers use ``trainer.nnodes`` nodes; rollouts share them or have their own nodes."""
    nodes = _count(config, "trainer.nnodes", default=1)
    size = _count(config, "trainer.n_gpus_per_node", default=8)
    own_nodes = _count(config, "actor_rollout_ref.rollout.nnodes", default=0, least=0)
    own_size = _count(config, "actor_rollout_ref.rollout.n_gpus_per_node", default=size)
    names |= {"trainers": "trainer.nnodes", "world": "trainer.nnodes", "rollouts": "actor_rollout_ref.rollout.nnodes"}
    values |= {"trainers": nodes * size, "gpus_per_node": size, "colocated": own_nodes == 0}
    if own_nodes:
        values["rollouts"] = own_nodes * own_size
    if not _is_there(values.get("model")):
        values.pop("model", None)  # a path on the cluster, or a name on a hub


def _add_nemo_rl_rank_counts(values: dict[str, Any], names: dict[str, str], config: DictConfig) -> None:
    """Adds the numbers of ranks. Trainers use the cluster's nodes without those of a non-colocated generation."""
    nodes = _count(config, "cluster.num_nodes", default=1)
    size = _count(config, "cluster.gpus_per_node", default=8)
    names |= {"trainers": "cluster.num_nodes", "world": "cluster.num_nodes"}
    resources = "policy.generation.colocated.resources"
    names["rollouts"] = f"{resources}.num_nodes"
    colocated = values.get("colocated", True)
    if BY_NAME["colocated"].parse(colocated, key=names["colocated"]):
        values |= {"trainers": nodes * size, "colocated": True}
        return
    own_size = _count(config, f"{resources}.gpus_per_node", default=size)
    default = 0 if nodes == 1 else 1
    own_nodes = _count(config, f"{resources}.num_nodes", default=default, least=0)
    rollouts = own_nodes * own_size if nodes > 1 else own_size
    if rollouts >= nodes * size:
        key = f"{resources}.num_nodes" if nodes > 1 else f"{resources}.gpus_per_node"
        most = nodes - 1 if nodes > 1 else size - 1
        raise ConfigError(
            f"{key}={own_nodes if nodes > 1 else own_size} leaves no trainer of cluster.num_nodes={nodes} with "
            f"cluster.gpus_per_node={size}: it takes a whole number from 1 to {most}"
        )
    values |= {"trainers": nodes * size - rollouts, "rollouts": rollouts, "colocated": False}


def _add_verl_sharding(values: dict[str, Any], names: dict[str, str], config: DictConfig) -> None:
    """Adds verl's sharding, one of two, by a flag (megatron_checkpoint_manager.py, 0.9.1, line 440)."""
    names["optimizer_sharding"] = _VERL_RESHARDABLE
    flag = _select(config, _VERL_RESHARDABLE)
    if flag is not None:
        fully = BY_NAME["fully_parallel_save"].parse(flag, key=_VERL_RESHARDABLE)
        values["optimizer_sharding"] = "fully_reshardable" if fully else "dp_reshardable"


def _has_our_engines(config: DictConfig) -> bool:
    """Returns True if verl's configuration enables our engines, by a key or by ``+rl_safe=enabled``."""
    key = f"{_RL_SAFE}.enabled"
    flag = _select(config, key)
    return bool(_select(config, "rl_safe") == "enabled" if flag is None else BY_NAME["bootstrap"].parse(flag, key=key))


def _with_our_engines(values: dict[str, Any], names: dict[str, str], config: DictConfig) -> Source:
    from rl_safe_workers.config import BootstrapConfig
    from rl_safe_workers.section import read

    key = f"{_RL_SAFE}.bootstrap"
    given = OmegaConf.select(config, key, default=OmegaConf.create())
    if not isinstance(given, DictConfig):
        raise ConfigError(f"{key}={given!s:.80} cannot be used: it takes keys, such as {key}.budget=true")
    bootstrap = read(BootstrapConfig, cast(dict[str, Any], OmegaConf.to_container(given)), node=key)
    values.pop("unread_timeout_s", None)  # our engines read it
    return Source(
        name="verl",
        values={**values, "budget": bootstrap.budget},
        keys={**names, "budget": f"{key}.budget"},
        max_ctas=bootstrap.max_ctas.limits(),
        habits={name: HOST_DEFAULTS["rl-safe"][name] for name in _OURS_IN_VERL},
    )


def _add_nemo_rl_engines(values: dict[str, Any], names: dict[str, str], config: DictConfig) -> None:
    """Adds the engines' data parallelism. An engine has it inside if expert parallelism exceeds tensor parallelism."""
    key = names["vllm_dp"] = f"{_NEMO_RL_VLLM}.expert_parallel_size"
    expert, tensor = _count(config, key, default=1), _count(config, names["vllm_tp"], default=1)
    if expert > 1 and expert % tensor:
        raise ConfigError(f"{key}={expert} with {names['vllm_tp']}={tensor}: it takes 1 or a multiple of {tensor}")
    values["vllm_dp"] = max(expert // tensor, 1)


def _is_there(model: object) -> bool:
    try:
        return model is not None and kind_of(str(model)) is not None
    except OSError:
        return False


def _count(config: DictConfig, key: str, *, default: int, least: int = 1) -> int:
    value = _select(config, key)
    field = BY_NAME["rollouts" if least == 0 else "trainers"]
    return default if value is None else cast(int, field.parse(value, key=key))


def _selected(config: DictConfig, names: Mapping[str, str]) -> dict[str, Any]:
    found = {name: _select(config, key) for name, key in names.items() if name not in _NOT_READ}
    return {name: value for name, value in found.items() if value is not None}


def _select(config: DictConfig, key: str) -> Any:
    try:
        value = OmegaConf.select(config, key, throw_on_missing=False)
    except (OmegaConfBaseException, RecursionError) as error:
        first = first_line(error)
        raise ConfigError(f"{key} cannot be resolved ({first}): give it as {key}=VALUE") from error
    if isinstance(value, ListConfig) and key in _LISTS:
        return str(value)
    if isinstance(value, (Mapping, list, DictConfig)):
        raise ConfigError(f"{key} holds a section: it takes a single value")
    return value


def _override(argument: str, *, host: str) -> dict[Any, Any]:
    text = argument.lstrip("+~")
    key, equals, value = text.partition("=")
    refusal = ConfigError(f"--from {host}: {argument!r:.80} is not understood: it takes key=value or a YAML file")
    if not equals or not key or len(key) > _LONGEST_KEY:
        raise refusal
    try:
        parse_yaml(value)
        return cast(dict[Any, Any], OmegaConf.to_container(OmegaConf.from_dotlist([text]), resolve=False))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        first = first_line(error)
        raise ConfigError(f"--from {host}: {argument!r:.80} cannot be read ({first}): quote the value") from error
    except IndexError as error:  # OmegaConf raises it for a key that begins with a bracket
        raise refusal from error


def _to_config(layers: Sequence[Mapping[Any, Any]], *, host: str) -> DictConfig:
    if len(layers) > _MOST_LAYERS:
        raise ConfigError(f"--from {host}: {len(layers)} files and settings are more than {_MOST_LAYERS}: write a YAML")
    values: Mapping[Any, Any] = {}
    for layer in layers:
        values = overlaid(values, layer)
    check_interpolations(values)
    try:
        return OmegaConf.create(dict(values))
    except OmegaConfBaseException as error:
        first = first_line(error)
        raise ConfigError(f"--from {host}: {error.full_key or 'a value'} cannot be used: {first}") from error
