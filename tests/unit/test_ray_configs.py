"""The files that start a run on a cluster, read as Ray and KubeRay read them; test_slurm_launcher.py has Slurm's."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import jsonschema
import pytest
import yaml
from ray._private.runtime_env.packaging import create_package
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.providers import _get_node_provider_cls
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv

from rl_safe_workers import __version__, env
from rl_safe_workers.config import RunConfig
from rl_safe_workers.driver.cluster.reservation import bundles
from rl_safe_workers.driver.inputs.preflight import preflight
from rl_safe_workers.recipe import load_recipe
from tests.weights import shapes_of, write_weights

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "ray_configs"
FILES = sorted(CONFIGS.iterdir())
RECIPE = ROOT / "recipes" / "qwen3_30b_a3b_4x8.yaml"
RUNTIME_ENV = CONFIGS / "runtime_env.yaml"
CLUSTER, RAYJOB, SLURM = CONFIGS / "cluster_4x8.yaml", CONFIGS / "rayjob_4x8.yaml", CONFIGS / "slurm_4x8.sbatch"
RAY = "2.60.0"
NAME = r"([A-Z][A-Z0-9]*_[A-Z0-9_]*)"
IN_YAML = re.compile(rf"{NAME}:\s*(?P<value>.+)")
IN_POD = re.compile(rf"- name: {NAME}")
IN_SHELL = re.compile(rf"(?:export )?{NAME}=(?P<value>[^;\s]+).*")


def load(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A line that sets an environment variable."""

    where: str
    name: str
    value: str
    has_reason: bool
    """True if the line above it is a comment."""


def settings(path: Path) -> Iterator[Setting]:
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        text = line.strip()
        if (found := IN_YAML.fullmatch(text)) or (found := IN_SHELL.fullmatch(text)):
            value = found["value"]
        elif found := IN_POD.fullmatch(text):
            value = lines[number + 1].strip().removeprefix("value: ")
        else:
            continue
        above = lines[number - 1].strip()
        has_reason = above.startswith("#") and not above.startswith("#SBATCH")
        yield Setting(where=f"{path.name}:{number + 1}", name=found[1], value=value.strip("\"'"), has_reason=has_reason)


SETTINGS = [setting for path in FILES for setting in settings(path)]


def owned() -> Mapping[str, str]:
    """The variables that env.py has a value for, and it."""
    tables = (env.ALL_ACTORS, env.ROLLOUT_ACTORS, env.TRAINER_ACTORS, env.DETERMINISTIC)
    return {name: value for table in tables for name, value in table.items()}


def documented() -> set[str]:
    return {value for name, value in vars(env).items() if name.isupper() and isinstance(value, str)}


def test_all_variables_of_the_files_are_found() -> None:
    runtime_env, rayjob = load(RUNTIME_ENV)["env_vars"], load(RAYJOB)["spec"]
    groups = [rayjob["rayClusterSpec"]["headGroupSpec"], *rayjob["rayClusterSpec"]["workerGroupSpecs"]]
    pods = [entry["name"] for group in groups for entry in group["template"]["spec"]["containers"][0]["env"]]
    verl = load(CONFIGS / "verl_runtime_env.yaml")["env_vars"]
    shell = re.findall(rf"^ *export {NAME}=", CLUSTER.read_text() + SLURM.read_text(), re.MULTILINE)
    found = sorted(setting.name for setting in SETTINGS)
    assert len(shell) > 4
    of_job = yaml.safe_load(rayjob["runtimeEnvYAML"])["env_vars"]
    assert sorted([*runtime_env, *of_job, *pods, *verl, *shell, "RAY_AUTH_TOKEN"]) == found


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.where}-{setting.name}")
def test_each_variable_has_its_reason_and_agrees_with_what_actors_get(setting: Setting) -> None:
    assert setting.has_reason or setting.name in documented(), f"{setting.where}: why is {setting.name} set?"
    if setting.name not in env.USER_MAY_SET:
        assert setting.value == owned().get(setting.name, setting.value), f"{setting.where} contradicts env.py"


def bundled(excludes: list[str], folder: Path, target: Path) -> set[str]:
    create_package(str(folder), target, include_gitignore=False, excludes=excludes)
    with ZipFile(target) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_ray_accepts_the_environment_of_a_job() -> None:
    for path in (RUNTIME_ENV, CONFIGS / "verl_runtime_env.yaml"):
        config = load(path)
        assert RuntimeEnv(**config)["env_vars"] == config["env_vars"]


def test_the_package_and_the_recipes_are_uploaded_whole(tmp_path: Path) -> None:
    uploaded = bundled(load(RUNTIME_ENV)["excludes"], ROOT, tmp_path / "package.zip")
    for folder in ("rl_safe_workers", "recipes", "ray_configs"):
        files = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}
        assert {file for file in files - uploaded if "__pycache__" not in file} == set()
    assert (tmp_path / "package.zip").stat().st_size < 20 * 2**20
    tops = {name.partition("/")[0] for name in uploaded if "/" in name}
    assert (
        tops & {".git", ".venv", ".venv-verl", ".matrix", "models", "outputs", "checkpoints", "dist", "tests"} == set()
    )


@pytest.mark.parametrize(
    "name",
    [
        *(".git/objects/x", ".venv/bin/python", ".venv-verl/lib/x", ".matrix/x", ".gpu_bundle/x", ".mypy_cache/x"),
        *("models/m/w.safetensors", "checkpoints/c/x", "outputs/o/x", "dist/x.whl", "build/lib/x"),
        *("rl_safe_workers/__pycache__/x.pyc", "rl_safe_workers.egg-info/PKG-INFO", "docs/x.md", "tests/unit/x.py"),
    ],
)
def test_what_a_run_does_not_need_stays_here_even_without_gitignore(name: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for file in (name, "rl_safe_workers/models/kept.py", "rl_safe_workers/checkpoint/kept.py"):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        (tree / file).write_text("x")
    uploaded = bundled(load(RUNTIME_ENV)["excludes"], tree, tmp_path / "package.zip")
    assert uploaded == {"rl_safe_workers/models/kept.py", "rl_safe_workers/checkpoint/kept.py"}


def longest_end_s(config: RunConfig) -> float:
    """Seconds that a driver may need after SIGTERM: each step of its end has a deadline of ``kill_after_s``.

    Ten of them: the evidence, logs, memory, killing actors, giving up placement, Ray's shutdown, the guardian, device
    memory and the report, with one to spare; and the ending of processes, which takes three and a second.
    """
    return 13 * config.rl_safe.teardown.kill_after_s + 1


def test_a_stopped_job_has_time_to_end_its_ranks() -> None:
    stop_wait_s = int(load(RUNTIME_ENV)["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    assert longest_end_s(load_recipe(RECIPE)) < stop_wait_s
    (before_the_end_s,) = re.findall(r"^#SBATCH --signal=B:TERM@(\d+)$", SLURM.read_text(), re.MULTILINE)
    assert stop_wait_s < int(before_the_end_s)
    for group in groups_of(rayjob()):
        assert stop_wait_s < group["template"]["spec"]["terminationGracePeriodSeconds"]


def test_the_recipe_fills_four_nodes_of_eight_gpus(tmp_path: Path) -> None:
    text = (
        '{"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, '
        '"num_key_value_heads": 4, "num_experts": 128, "vocab_size": 151936, "max_position_embeddings": 40960, '
        '"tie_word_embeddings": false}'
    )
    (tmp_path / "config.json").write_text(text)
    (tmp_path / "tokenizer.json").touch()
    write_weights(tmp_path / "model.safetensors", shapes_of(json.loads(text)))
    config = load_recipe(RECIPE, [f"model.path={tmp_path}"])
    preflight(config, cpus=float("inf"))
    assert sum(bundle["GPU"] for bundle in bundles(config.cluster)) == 4 * 8
    assert config.cluster.ray_address == "auto"
    # Ray places the largest bundles first.
    assert config.cluster.cpus_per_rollout > config.cluster.cpus_per_trainer


def test_nothing_that_is_to_stay_goes_into_a_jobs_own_folder() -> None:
    config = load_recipe(RECIPE)
    kept = (config.model.path, config.trainer.output_dir, config.trainer.default_local_dir)
    assert [path for path in kept if not str(path).startswith("/shared/")] == []


@pytest.mark.parametrize("path", [CLUSTER, RAYJOB, SLURM], ids=lambda path: path.name)
def test_each_launcher_runs_a_recipe_that_is_there(path: Path) -> None:
    assert f"recipes/{RECIPE.name}" in path.read_text()
    for name in re.findall(r"recipes/(\w+\.yaml)", path.read_text()):
        assert (ROOT / "recipes" / name).is_file()


def test_ray_up_accepts_the_cluster_until_it_would_connect() -> None:
    config = prepare_config(load(CLUSTER))
    provider = _get_node_provider_cls(config["provider"])
    config = provider.fillout_available_node_types_resources(config)
    validate_config(config)
    resolved = provider.bootstrap_config(config)
    (node_type,) = resolved["available_node_types"].values()
    assert (node_type["min_workers"], node_type["max_workers"]) == (3, 3)
    assert len({resolved["provider"]["head_ip"], *resolved["provider"]["worker_ips"]}) == 4


def test_ray_up_refuses_a_misspelt_key() -> None:
    with pytest.raises(jsonschema.ValidationError, match="worker_start_commands"):
        validate_config(prepare_config(load(CLUSTER) | {"worker_start_commands": []}))


def test_the_nodes_install_the_wheel_that_is_built_now_and_the_pinned_ray() -> None:
    commands = "\n".join(load(CLUSTER)["setup_commands"])
    assert set(re.findall(r"rl_safe_workers-([\w.]+)-py3-none-any\.whl", commands)) == {__version__}
    assert re.findall(r"ray\[default\]==([\w.]+)", commands) == [RAY]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"ray=={RAY}" in extras["gpu"]
    assert load(RAYJOB)["spec"]["rayClusterSpec"]["rayVersion"] == RAY


def write_stub(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("role", ["head", "worker"])
def test_ray_starts_from_the_environment_and_with_a_token(role: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    bin_dir = home / "rl_safe" / "venv" / "bin"
    bin_dir.mkdir(parents=True)
    (bin_dir / "activate").write_text(f"PATH={bin_dir}:$PATH\n")
    write_stub(bin_dir / "ray", 'echo "$* $RAY_AUTH_MODE $RAY_USAGE_STATS_ENABLED" >>"$HOME/calls"')
    for command in load(CLUSTER)[f"{role}_start_ray_commands"]:
        # As Ray's own command runner: in parentheses, in a shell of its own.
        variables = {"HOME": str(home), "PATH": os.environ["PATH"], "RAY_HEAD_IP": "10.0.0.1"}
        subprocess.run(["bash", "-c", f"true && ({command})"], check=True, timeout=30, env=variables)
    stop, start = (home / "calls").read_text().splitlines()
    assert stop.split()[0] == "stop"
    assert start.split()[0] == "start"
    assert start.split()[-2:] == ["token", "0"]
    assert ("--head" in start, "--address=10.0.0.1:6379" in start) == (role == "head", role == "worker")
    assert ("--autoscaling-config=~/ray_bootstrap_config.yaml" in start) == (role == "head")


def rayjob() -> dict[str, Any]:
    return load(RAYJOB)


def groups_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_ray_finds_four_workers_of_eight_gpus_and_a_head_without_actors() -> None:
    job = rayjob()
    cluster = {"metadata": job["metadata"], "spec": job["spec"]["rayClusterSpec"]}
    types = _derive_autoscaling_config_from_ray_cr(cluster)["available_node_types"]
    head, workers = types["headgroup"], types["gpu"]
    assert (head["resources"]["CPU"], head["resources"].get("GPU", 0)) == (0, 0)
    assert (workers["min_workers"], workers["max_workers"], workers["resources"]["GPU"]) == (4, 4, 8)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == 4
    needed = bundles(load_recipe(RECIPE).cluster)
    assert sum(bundle["CPU"] for bundle in needed) <= 4 * workers["resources"]["CPU"]


def test_the_job_has_the_variables_of_every_other_job() -> None:
    runtime_env = yaml.safe_load(rayjob()["spec"]["runtimeEnvYAML"])
    found, others = RuntimeEnv(**runtime_env)["env_vars"], load(RUNTIME_ENV)["env_vars"]
    assert found == others | {env.BASE_DIR: "/shared"}
    assert set(runtime_env) == {"env_vars"}


def test_kuberay_never_begins_anew_where_the_driver_does() -> None:
    spec = rayjob()["spec"]
    assert (spec["backoffLimit"], spec["shutdownAfterJobFinishes"], spec["submissionMode"]) == (0, True, "K8sJobMode")
    assert load_recipe(RECIPE).rl_safe.restarts > 0


def test_the_head_stops_the_job_that_is_submitted_before_it_goes() -> None:
    job = rayjob()
    (container,) = groups_of(job)[0]["template"]["spec"]["containers"]
    command = container["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert shlex.split(command)[:3] == ["ray", "job", "stop"]
    assert job["spec"]["jobId"] in shlex.split(command)


def test_every_mount_is_a_volume_and_workers_have_shared_memory_beside_ray_s() -> None:
    for group in groups_of(rayjob()):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert set(mounts.values()) == set(volumes)
        assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
    memory = volumes[mounts["/dev/shm"]]["emptyDir"]
    assert memory["medium"] == "Memory"
    assert int(memory["sizeLimit"].removesuffix("Gi")) * 2**30 > 2 * int(group["rayStartParams"]["object-store-memory"])


def closed(schema: Any) -> Any:
    """The schema, with what Kubernetes does to keys that it does not know: refused, unless they are to be kept."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        inner.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        inner.pop("type", None)
    return inner


@pytest.mark.skipif("KUBERAY_SRC" not in os.environ, reason="KUBERAY_SRC names no checkout of KubeRay")
def test_kuberay_s_own_schema_accepts_the_job() -> None:
    crds = Path(os.environ["KUBERAY_SRC"]) / "helm-chart" / "kuberay-operator" / "crds"
    (version,) = [v for v in load(crds / "ray.io_rayjobs.yaml")["spec"]["versions"] if v["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    jsonschema.validate(rayjob(), schema)
    wrong = rayjob()
    wrong["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(jsonschema.ValidationError, match="terminationGracePeriod"):
        jsonschema.validate(wrong, schema)
