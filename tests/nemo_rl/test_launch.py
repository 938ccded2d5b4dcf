"""The driver's side: our worker's name and settings reach NeMo RL, and the policy ends first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rl_safe_workers.adapters.nemo_rl import launch
from rl_safe_workers.adapters.nemo_rl.contract import JOINT_NAMES, NAMES, PROOF_NAMES
from rl_safe_workers.adapters.nemo_rl.generation_setup import BUILDER_MODULE, WORKERS, check_generation
from rl_safe_workers.adapters.nemo_rl.nemo_rl_settings import NODE, VARIABLE, NemoRlSettings, worker_settings
from rl_safe_workers.errors import ConfigError
from tests.nemo_rl.source import write_source


class ByArgument:
    """NeMo RL's Policy of August 2026, as far as its signature goes."""

    def __init__(self, cluster: Any, config: Any, worker_extension_cls_fqn: str | None = None) -> None:
        self.name = worker_extension_cls_fqn


class ByKey:
    """One without the argument, which looks at the key."""

    def __init__(self, cluster: Any, config: Any) -> None:
        self.name = config["worker_extension_cls_fqn"]


def _registry(python: str) -> ModuleType:
    module: Any = ModuleType("nemo_rl.distributed.ray_actor_environment_registry")
    module.ACTOR_ENVIRONMENT_REGISTRY = {launch.HOST_WORKER: python}
    module.get_actor_python_env = lambda name: module.ACTOR_ENVIRONMENT_REGISTRY[name]
    return module


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    module = _registry("/venvs/mcore/bin/python")
    for name in ("nemo_rl", "nemo_rl.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["nemo_rl"], "__file__", str(_source(tmp_path) / "nemo_rl" / "__init__.py"), False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    """Closed when the run ends."""
    with ExitStack() as stack:
        yield stack


def _source(folder: Path, *, without: str = "") -> Path:
    return write_source(folder / "nemo-rl", without=without, names=(*NAMES, *PROOF_NAMES, *JOINT_NAMES))


def _master(**more: Any) -> Any:
    policy = {"megatron_cfg": {"enabled": True, "env_vars": {"A": "1"}}}
    return SimpleNamespace(policy=policy, **more)


ray = time = SimpleNamespace()
"""Names that NeMo RL's loops look up in the module of `setup`, like the next one."""


def refit_policy_generation(policy: Any, generation: Any) -> None:
    """NeMo RL's."""


class _Generation:
    def __init__(self, ended: list[str]) -> None:
        self._ended = ended

    def shutdown(self) -> bool:
        self._ended.append("generation")
        return True


@pytest.mark.parametrize("policy_class", [ByArgument, ByKey])
def test_the_policy_is_made_of_our_workers_and_told_our_settings(policy_class, registry, ends, monkeypatch) -> None:
    monkeypatch.setattr(launch, "_policy_class", lambda: policy_class)
    ended: list[str] = []

    def setup(config: Any, tokenizer: str, policy_factory: Any = None) -> Any:
        policy = policy_factory(cluster=None, config=config.policy)
        policy.shutdown = lambda: ended.append("policy")
        return policy, _Generation(ended)

    master = _master(rl_safe={"timeouts": {"save": 77}})
    policy, generation = launch.safe_setup(setup, ends)(master, "tokenizer")
    assert policy.name == launch.WORKER
    assert registry.ACTOR_ENVIRONMENT_REGISTRY[launch.WORKER] == "/venvs/mcore/bin/python"
    variables = master.policy["megatron_cfg"]["env_vars"]
    assert variables["A"] == "1"
    assert worker_settings(variables).timeouts.save == 77
    assert generation.shutdown()
    assert ended == ["policy", "generation"]


PROVED = {
    "backend": "vllm",
    "vllm_cfg": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "precision": "bfloat16"},
}


@pytest.fixture
def builder(registry, monkeypatch) -> Any:
    """NeMo RL's module that makes its generation workers, of which it only notes the name."""
    module: Any = ModuleType(BUILDER_MODULE)
    stock = module.RayWorkerBuilder = lambda worker, *args, **options: (worker, args, options)
    package, registered = BUILDER_MODULE.split("."), registry.ACTOR_ENVIRONMENT_REGISTRY
    for depth in range(2, len(package)):
        name = ".".join(package[:depth])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, BUILDER_MODULE, module)
    registered |= {worker: f"/venvs/{number}/bin/python" for number, worker in enumerate(WORKERS)}
    for texts in ("PROOF_TEXTS", "JOINT_TEXTS"):
        monkeypatch.setattr(launch, texts, ())
    yield module
    assert module.RayWorkerBuilder is stock


@pytest.mark.parametrize(
    ("settings", "refused"),
    [({"prove_sync_freq": 3}, "rl_safe.prove_sync_freq=3:"), ({"refit_transport": "joint"}, "refit_transport=joint:")],
)
def test_generation_is_of_our_workers_if_a_setting_needs_them(
    settings, refused, builder, registry, monkeypatch
) -> None:
    monkeypatch.setattr(launch, "_policy_class", lambda: ByArgument)
    made = []

    def setup(config: Any, policy_factory: Any = None) -> Any:
        made.extend(builder.RayWorkerBuilder(worker, config, defer_model_load=True) for worker in WORKERS)
        return SimpleNamespace(shutdown=lambda: True), None

    master = _master(rl_safe=settings)
    master.policy["generation"] = PROVED
    with ExitStack() as ends:
        launch.safe_setup(setup, ends)(master)
        with pytest.raises(
            ConfigError, match=rf"{refused} there is no worker of ours for x.VllmQuantGenerationWorker; "
        ):
            builder.RayWorkerBuilder("x.VllmQuantGenerationWorker")
    assert made == [(worker, (master,), {"defer_model_load": True}) for worker in WORKERS.values()]
    pythons = registry.ACTOR_ENVIRONMENT_REGISTRY
    assert [pythons[worker] for worker in WORKERS.values()] == [pythons[worker] for worker in WORKERS]


def test_a_host_that_lacks_what_a_proof_relies_on_is_refused(builder, ends, monkeypatch, tmp_path) -> None:
    old = _source(tmp_path / "old", without="VllmGenerationWorkerImpl")
    monkeypatch.setattr(sys.modules["nemo_rl"], "__file__", str(old / "nemo_rl" / "__init__.py"))
    master = _master(rl_safe={"prove_sync_freq": 0})
    master.policy["generation"] = PROVED
    with pytest.raises(ConfigError, match=r"lacks VllmGenerationWorkerImpl.*: use v0\.7\.0 or a newer one, or set "):
        launch.safe_setup(lambda config, policy_factory=None: pytest.fail("set up"), ends)(master)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("backend", "megatron", "it needs vLLM's engines"),
        ("refit_transport", "nccl_reshard", "it needs NeMo RL's default transport"),
        ("quant_cfg", "NVFP4", "an engine must not be quantised"),
        ("vllm_cfg.pipeline_parallel_size", 2, "an engine's ranks must be tensor-parallel"),
        ("vllm_cfg.expert_parallel_size", 2, "an engine's ranks must be tensor-parallel"),
        ("vllm_cfg.precision", "fp8", "an engine must not be quantised"),
        ("vllm_cfg.kv_cache_dtype", "fp8_e4m3", "its scales are sent as weights"),
    ],
)
def test_a_run_whose_refits_cannot_be_proved_is_refused(key, value, reason) -> None:
    check_generation(PROVED, NemoRlSettings(prove_sync_freq=1))
    outer, _, inner = key.rpartition(".")
    changed = {**PROVED, outer: {**PROVED[outer], inner: value}} if outer else {**PROVED, inner: value}
    with pytest.raises(ConfigError) as caught:
        check_generation(changed, NemoRlSettings(prove_sync_freq=1))
    assert str(caught.value) == (
        f"rl_safe.prove_sync_freq=1 with policy.generation.{key}={value}: {reason}; set rl_safe.prove_sync_freq=-1"
    )


def test_refits_of_tensor_parallel_engines_can_be_proved() -> None:
    for experts in (1, 2):
        parallel = {"tensor_parallel_size": 2, "expert_parallel_size": experts}
        check_generation({**PROVED, "vllm_cfg": {**PROVED["vllm_cfg"], **parallel}}, NemoRlSettings(prove_sync_freq=1))


def test_engines_on_the_gpus_of_trainers_cannot_join() -> None:
    settings = NemoRlSettings(refit_transport="joint")
    check_generation({**PROVED, "colocated": {"enabled": False}}, settings)
    with pytest.raises(ConfigError) as caught:
        check_generation({**PROVED, "colocated": {"enabled": True}}, settings)
    assert str(caught.value) == (
        "rl_safe.refit_transport=joint with policy.generation.colocated.enabled=True: it needs engines on GPUs of "
        "their own; set rl_safe.refit_transport=host"
    )


def test_a_run_without_generation_is_refused_if_refits_are_to_be_proved() -> None:
    with pytest.raises(ConfigError, match="policy.generation.backend=None"):
        check_generation(None, NemoRlSettings(prove_sync_freq=0))


class Policy:
    """As `ByArgument`, looked up by `old_setup` in this module."""

    def __init__(self, cluster: Any, config: Any, worker_extension_cls_fqn: str | None = None) -> None:
        self.name = worker_extension_cls_fqn

    def shutdown(self) -> bool:
        return True


def old_setup(master_config: dict[str, Any], tokenizer: str) -> Any:
    """NeMo RL's of April 2026: without a factory, and with a configuration that is a dict."""
    return Policy(cluster=None, config=master_config["policy"]), None


def test_a_policy_that_setup_makes_by_itself_is_of_our_workers(registry, ends, monkeypatch) -> None:
    monkeypatch.setattr(launch, "_policy_class", lambda: Policy)
    master = {**vars(_master()), "rl_safe": {"timeouts": {"save": 77}}}
    policy, _ = launch.safe_setup(old_setup, ends)(master, "tokenizer")
    assert policy.name == launch.WORKER
    assert worker_settings(master["policy"]["megatron_cfg"]["env_vars"]).timeouts.save == 77
    assert Policy is policy.__class__
    master["rl_safe"] = {"enabled": False}
    assert launch.safe_setup(old_setup, ends)(master, "tokenizer")[0].name is None


def test_a_host_that_lacks_what_the_worker_derives_from_is_refused_before_there_are_workers(
    registry, ends, monkeypatch, tmp_path
) -> None:
    old = _source(tmp_path / "old", without="MegatronPolicyWorkerImpl")
    monkeypatch.setattr(sys.modules["nemo_rl"], "__file__", str(old / "nemo_rl" / "__init__.py"))
    refused = "lacks MegatronPolicyWorkerImpl .* and 13 others.* from commit f00e1006b"
    with pytest.raises(ConfigError, match=refused):
        launch.safe_setup(lambda config, policy_factory=None: pytest.fail("set up"), ends)(_master())
    # Our script does not even import the host's.
    (old / "examples" / "run_grpo.py").write_text("def main(): ...\nraise AssertionError\n")
    monkeypatch.setenv("NEMO_RL_SRC", str(old))
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ConfigError, match=refused):
        launch.main()


def test_a_run_that_turns_us_off_is_nemo_rls_own(ends) -> None:
    master = _master(rl_safe={"enabled": False})
    assert launch.safe_setup(lambda config, policy_factory=None: policy_factory, ends)(master) is None
    assert VARIABLE not in master.policy["megatron_cfg"]["env_vars"]


def test_of_two_runs_that_save_to_one_folder_the_second_is_refused(registry, ends, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(launch, "_policy_class", lambda: Policy)
    checkpointing = {"enabled": True, "checkpoint_dir": str(tmp_path / "results")}

    def begin(stack: ExitStack) -> None:
        launch.safe_setup(old_setup, stack)({**vars(_master()), "checkpointing": checkpointing}, "tokenizer")

    begin(ends)
    with (
        ExitStack() as second,
        pytest.raises(ConfigError, match="another run is in the way: this process"),
    ):
        begin(second)
    ends.close()
    with ExitStack() as third:
        begin(third)
    checkpointing["enabled"] = False
    with ExitStack() as unsaved:
        begin(unsaved)
    assert not (tmp_path / "results").exists()


def test_an_environment_that_is_yet_to_be_built_is_built_under_the_hosts_name(registry, monkeypatch) -> None:
    registry.ACTOR_ENVIRONMENT_REGISTRY[launch.HOST_WORKER] = "uv run --extra mcore"
    venvs: Any = ModuleType("nemo_rl.utils.venvs")
    venvs.create_local_venv_on_each_node = lambda py_executable, venv_name: f"/venvs/{venv_name}/bin/python"
    monkeypatch.setitem(sys.modules, "nemo_rl.utils", ModuleType("nemo_rl.utils"))
    monkeypatch.setitem(sys.modules, venvs.__name__, venvs)
    assert launch.register() == f"/venvs/{launch.HOST_WORKER}/bin/python"
    assert launch.register() == f"/venvs/{launch.HOST_WORKER}/bin/python"


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ({"megatron_cfg": {"enabled": False}}, "needs policy.megatron_cfg.enabled=true"),
        ({"megatron_cfg": {"enabled": True}, "quant_cfg": "nvfp4.yaml"}, "does not support policy.quant_cfg"),
        ({"megatron_cfg": {"enabled": True, "env_vars": {VARIABLE: '{"timeouts": {"save": 1}}'}}}, "differs from"),
    ],
)
def test_a_policy_that_cannot_be_ours_is_refused(policy: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        launch.give_settings(policy, NemoRlSettings())


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (
            {"timeouts": {"saev": 1}},
            "unknown key rl_safe.timeouts.saev; the nearest known key is rl_safe.timeouts.save",
        ),
        ({"timeouts": {"teardown": 25}}, "should be below 20"),
        ({"timeouts": {"train": 0}}, "should be greater than 0"),
        ({"timeouts": {"train": "soon"}}, "rl_safe.timeouts.train"),
        ({"bootstrap": {"on_late": "ignore"}}, "should be 'warn' or 'raise'"),
        ({"bootstrap": {"watch_steps": -1}}, "greater than or equal to 0"),
        ({"bootstrap": {"max_ctas": {"epp": 8}}}, "unknown key rl_safe.bootstrap.max_ctas.epp; the nearest known key"),
        ({"bootstrap": {"max_ctas": {"ep": 65}}}, "max_ctas.ep cannot be 65; it should be less than or equal to 64"),
        ({"bootstrap": {"max_ctas": {"world": 8}}}, "bootstrap: max_ctas.world cannot have a limit"),
        ([], "must hold keys"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(node: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        NemoRlSettings.read(node, source=NODE)


def test_settings_come_back_from_the_variable() -> None:
    node = {"timeouts": {"convert": 7200}, "bootstrap": {"budget": False, "max_ctas": {"ep": 8}}}
    settings = NemoRlSettings.read(node, source=NODE)
    assert settings.rl_safe().bootstrap.max_ctas.limits() == {"ep": 8}
    assert worker_settings({VARIABLE: settings.to_json()}) == settings
    assert worker_settings({}) == NemoRlSettings()
    with pytest.raises(ConfigError, match="is not JSON"):
        worker_settings({VARIABLE: "{"})


def test_the_package_is_on_the_workers_path_once() -> None:
    environ = {"PYTHONPATH": "/elsewhere"}
    launch.share_package(environ)
    launch.share_package(environ)
    elsewhere, root = environ["PYTHONPATH"].split(":")
    assert elsewhere == "/elsewhere"
    assert (Path(root) / "rl_safe_workers" / "__init__.py").is_file()


SETUP = "setup(config, tokenizer, dataset, val_dataset)"
"""The lines of NeMo RL's script."""


def _write_script(source: Path, body: str) -> None:
    (source / "examples" / "run_grpo.py").write_text(
        "import ray, time\n"
        "ended = []\n"
        "class Part:\n"
        "    def shutdown(self): ended.append(type(self).__name__)\n"
        "class Policy(Part): ...\n"
        "class Generation(Part): ...\n"
        "def refit_policy_generation(): ...\n"
        "def setup(config, *data, policy_factory=None): return Policy(), Generation()\n"
        f"tokenizer = dataset = val_dataset = None\ndef main():\n{body}"
    )


def _prepare_script(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_RL_SRC", str(source))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(launch, "_policy_class", lambda: ByArgument)
    monkeypatch.delitem(sys.modules, "run_grpo", raising=False)
    load = launch.load_script

    def loaded(path: Path) -> Any:
        script: Any = load(path)
        script.config = _master()
        return script

    monkeypatch.setattr(launch, "load_script", loaded)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            "    from nemo_rl import own\n    own(config)\n",
            r"lacks 'setup\(config, .* in main \(examples/run_grpo.py\)",
        ),
        (f"    if not config:\n        {SETUP}\n", r"run_grpo\.py ended without calling its setup\(\)"),
    ],
    ids=["another_function", "another_branch"],
)
def test_a_script_that_makes_its_policy_without_us_is_refused(body, text, registry, monkeypatch, tmp_path) -> None:
    source = _source(tmp_path)
    _write_script(source, body)
    _prepare_script(source, monkeypatch)
    with pytest.raises(ConfigError, match=text):
        launch.main()
    sys.modules.pop("run_grpo", None)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_script_runs_with_our_setup_and_the_policy_is_ended_whatever_it_does(
    wrong: bool, registry, monkeypatch, tmp_path
) -> None:
    source = _source(tmp_path)
    _write_script(source, f"    {SETUP}\n    assert not ended\n    assert not {wrong}\n")
    _prepare_script(source, monkeypatch)
    with pytest.raises(AssertionError) if wrong else nullcontext():
        launch.main()
    assert sys.modules.pop("run_grpo").ended == ["Policy", "Generation"]


@pytest.mark.parametrize("source", ["", "/nowhere"])
def test_a_source_that_is_not_there_is_named(source: str, monkeypatch) -> None:
    monkeypatch.setenv("NEMO_RL_SRC", source)
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ConfigError, match="NEMO_RL_SRC"):
        launch.main()


IMPORTS_SCRIPT = """
import runpy, sys
runpy.run_path(sys.argv[1])
from ray._private import ray_constants
assert not ray_constants.RAY_ENABLE_UV_RUN_RUNTIME_ENV
"""


def test_the_script_turns_rays_uv_hook_off() -> None:
    root = Path(launch.__file__).parents[3]
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_UV_RUN_RUNTIME_ENV"}
    script = str(root / "recipes/nemo_rl/run_grpo_safe.py")
    environ["PYTHONPATH"] = str(root)
    done = subprocess.run([sys.executable, "-c", IMPORTS_SCRIPT, script], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
