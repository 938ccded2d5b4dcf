"""The doctor's checks, each with facts that are made up: what is judged wrongly here is judged wrongly anywhere."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_safe_workers.doctor import children, gpus, machine, ray_cluster, ray_here, storage, support
from rl_safe_workers.doctor.check import GIB, MIB, Check, Fact, Report, Subject
from rl_safe_workers.doctor.probes import Answer, ask
from rl_safe_workers.findings import Finding, Severity
from rl_safe_workers.platforms import host_memory
from rl_safe_workers.recipe import load_recipe

ROOT = Path(__file__).parents[2]
STOPS, RISKS, COSTS = Severity.STOPS, Severity.RISKS, Severity.COSTS


def subject(recipe: str | None = "quickstart.yaml", *overrides: str, **fields: Any) -> Subject:
    """The run of a recipe; with ``cluster.ray_address=auto`` it joins a cluster."""
    if recipe is None:
        return Subject(**fields)
    path = str(ROOT / "recipes" / recipe)
    return Subject(recipe=path, overrides=overrides, config=load_recipe(path, overrides), **fields)


CPU, GPU = subject(), subject("quickstart_gpu.yaml")
JOINS, JOINS_GPU = (subject(r, "cluster.ray_address=auto") for r in ("quickstart.yaml", "quickstart_gpu.yaml"))
ANY = subject(None)


def codes(report: Report) -> dict[str, Severity]:
    return {finding.code: finding.severity for finding in report.findings}


def value(report: Report, name: str) -> str:
    return next(fact.value for fact in report.facts if fact.name == name)


# Check


def test_a_check_that_hangs_is_left_at_its_deadline_and_says_so() -> None:
    check = Check(
        name="slow", deadline_s=0.1, gather=lambda subject: time.sleep(30), judge=lambda facts, subject: Report()
    )
    started_s = time.monotonic()
    assert check.run(ANY).facts == (Fact(name="slow", value="not checked: no answer within 0.1 s"),)
    assert time.monotonic() - started_s < 5


def test_a_check_that_cannot_look_says_why() -> None:
    def look(subject: Subject) -> None:
        raise PermissionError(13, "Permission denied", "/x")

    report = Check(name="place", deadline_s=5, gather=look, judge=lambda facts, subject: Report()).run(ANY)
    assert value(report, "place") == "not checked: PermissionError: [Errno 13] Permission denied: '/x'"


def test_a_probe_that_does_not_exist_or_hangs_is_an_answer_with_a_reason() -> None:
    assert "No module named" in ask("no_such_probe", deadline_s=30).reason
    assert ask("torch_probe", deadline_s=0.01).reason == "no answer within 0.01 s"


# Versions

INSTALLED = {
    "Python": "3.11.7",
    "torch": "2.13.0+cpu",
    "megatron-core": "0.16.1",
    "vLLM": "0.32.0",
    "ray": "2.60.0",
    "transformers": "5.19.0",
    "mbridge": "0.15.1",
}


def readme_cells() -> list[support.Cell]:
    rows = re.findall(r"^\| (CPU, gloo|H200, NCCL) \|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    found = []
    for label, rest in rows:
        python, torch, megatron, vllm, ray, state = (cell.strip() for cell in rest.split("|"))
        found.append(
            support.Cell(
                device="cpu" if label.startswith("CPU") else "cuda",
                python=python,
                torch=torch.partition("+")[0],
                megatron=megatron,
                vllm=None if vllm == "-" else vllm.split()[-1],
                ray=None if ray == "-" else ray,
                was_run=state.startswith("run"),
            )
        )
    return found


def test_the_matrix_is_the_readmes() -> None:
    assert list(support.MATRIX) == readme_cells()


def test_every_row_of_the_matrix_is_of_versions_that_the_code_is_written_for() -> None:
    for cell in support.MATRIX:
        assert codes(support.judge(INSTALLED | cell.versions(), ANY)).get("version-unsupported") is None


def test_a_row_that_was_run_is_said_to_be() -> None:
    report = support.judge(INSTALLED, CPU)
    assert (codes(report), value(report, "support matrix")) == ({}, "run")


def test_what_was_run_on_cpus_was_not_on_gpus() -> None:
    report = support.judge(INSTALLED, GPU)
    assert (codes(report), value(report, "support matrix")) == ({"versions-not-run": RISKS}, "not run")


@pytest.mark.parametrize(
    ("change", "code", "severity"),
    [
        ({"ray": "2.56.1"}, "versions-not-run", RISKS),
        ({"torch": "2.12.0"}, "versions-not-run", RISKS),
        ({"torch": "2.10.0"}, "version-unsupported", RISKS),
        ({"torch": "2.16.0"}, "version-unsupported", RISKS),
        ({"megatron-core": "0.15.3"}, "version-unsupported", RISKS),
        ({"megatron-core": "0.21.0"}, "version-unsupported", RISKS),
        ({"Python": "3.14.0"}, "version-unsupported", RISKS),
    ],
)
def test_other_versions_are_named(change: dict[str, str], code: str, severity: Severity) -> None:
    report = support.judge(INSTALLED | change, CPU)
    (name, version), *_ = change.items()
    assert codes(report) == {code: severity}
    assert f"{name} {version}" in report.findings[0].text


@pytest.mark.parametrize("name", support.NEEDED)
def test_a_missing_package_stops_a_run_and_nothing_else(name: str) -> None:
    left = {package: version for package, version in INSTALLED.items() if package != name}
    assert codes(support.judge(left, CPU)) == {"package-missing": STOPS}
    assert f"{name} is not installed" in support.judge(left, CPU).findings[0].text
    assert codes(support.judge(left, ANY)) == {}
    assert f"{name} -" in value(support.judge(left, ANY), "versions")


# Machine

WELL = machine.Machine(
    cpus=8,
    memory_total=64 * GIB,
    memory_free=60 * GIB,
    shared_total=32 * GIB,
    shared_free=32 * GIB,
    files_soft=1024,
    files_hard=2**20,
    locked=machine.UNLIMITED,
    rdma=(),
)
MACHINES: list[tuple[str, Severity, dict[str, Any], Subject]] = [
    ("cpus-short", STOPS, {"cpus": 1}, CPU),
    ("memory-short", RISKS, {"memory_free": 3 * GIB}, CPU),
    ("shm-ray", COSTS, {"shared_free": 200 * MIB}, CPU),
    ("shm-ray", COSTS, {"shared_free": 9 * GIB}, JOINS),
    ("shm-nccl", RISKS, {"shared_total": 512 * MIB}, GPU),
    ("open-files", RISKS, {"files_hard": 4096}, CPU),
    ("open-files", RISKS, {"files_hard": 20000}, JOINS),
    ("locked-memory", RISKS, {"locked": 8 * MIB, "rdma": ("mlx5_0",)}, GPU),
]


@pytest.mark.parametrize("run", [CPU, GPU, JOINS, JOINS_GPU, ANY])
def test_a_machine_that_is_large_enough_has_nothing_wrong(run: Subject) -> None:
    assert codes(machine.judge(WELL, run)) == {}


@pytest.mark.parametrize(("code", "severity", "change", "run"), MACHINES)
def test_what_a_machine_lacks_is_found(code: str, severity: Severity, change: dict[str, Any], run: Subject) -> None:
    assert codes(machine.judge(replace(WELL, **change), run)) == {code: severity}


@pytest.mark.parametrize(
    ("change", "run"),
    [
        ({"cpus": 1}, JOINS),  # they are the cluster's
        ({"cpus": 1, "memory_free": GIB}, ANY),
        ({"shared_total": 512 * MIB}, CPU),
        ({"shared_free": 10 * GIB}, JOINS),
        ({"memory_total": 2000 * GIB, "memory_free": 1900 * GIB, "shared_free": 128 * GIB}, JOINS),
        ({"memory_total": 2000 * GIB, "memory_free": 20 * GIB, "shared_free": 8 * GIB}, JOINS),
        ({"files_hard": 20000}, CPU),
        ({"files_hard": machine.UNLIMITED}, JOINS),
        ({"locked": 8 * MIB}, GPU),
        ({"locked": 8 * MIB, "rdma": ("mlx5_0",)}, CPU),
    ],
)
def test_what_a_run_does_not_need_is_not_missed(change: dict[str, Any], run: Subject) -> None:
    assert codes(machine.judge(replace(WELL, **change), run)) == {}


def test_this_machine_can_be_read() -> None:
    found = machine.read_machine()
    assert 0 < found.memory_free <= found.memory_total
    assert found.cpus > 0


V1 = ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("", "memory.max", "memory.current", "")


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes control groups: each has a limit, and 200 MiB in use, of which the kernel caches 100 and 50 of files."""
    monkeypatch.setattr(host_memory, "CGROUP", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_CGROUP", tmp_path / "own")

    def make(version: tuple[str, str, str, str], path: str, limits: dict[str, str]) -> None:
        top, limit, used, prefix = version
        (tmp_path / "own").write_text(f"9:cpuset:{path}\n{'4:memory' if top else '0:'}:{path}\n")
        for group, most in limits.items():
            folder = tmp_path / top / group
            folder.mkdir(parents=True, exist_ok=True)
            (folder / limit).write_text(f"{most}\n")
            (folder / used).write_text(f"{200 * MIB}\n")
            pages = {"anon": 50 * MIB, "inactive_file": 100 * MIB, "active_file": 50 * MIB}
            (folder / "memory.stat").write_text("".join(f"{prefix}{name} {size}\n" for name, size in pages.items()))

    return make


@pytest.mark.parametrize("version", [V1, V2])
@pytest.mark.parametrize(
    ("path", "limits"),
    [
        ("/", {"": f"{256 * MIB}"}),
        ("/docker/0af3", {"": f"{256 * MIB}"}),  # the path of the host; the container sees its own group at the top
        ("/../x", {"": f"{256 * MIB}"}),
        ("/slice/unit", {"": f"{2**63 - 4096}", "slice": f"{256 * MIB}", "slice/unit": f"{512 * MIB}"}),
    ],
)
def test_memory_is_a_containers_and_what_is_cached_of_files_is_free(
    put: Any, version: tuple[str, str, str, str], path: str, limits: dict[str, str]
) -> None:
    put(version, path, limits)
    found = machine.read_machine()
    assert (found.memory_total, found.memory_free) == (256 * MIB, 206 * MIB)


@pytest.mark.parametrize(("version", "none"), [(V2, "max"), (V1, str(2**63 - 4096))])
def test_a_group_without_a_limit_has_the_machines_memory(
    put: Any, version: tuple[str, str, str, str], none: str
) -> None:
    put(version, "/", {"": none})
    assert machine.read_machine().memory_total == psutil.virtual_memory().total


def test_the_object_store_is_as_large_as_ray_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import utils

    for free in (GIB, 20 * GIB, 60 * GIB, 400 * GIB, 1900 * GIB):
        for shared in (64 * MIB, 9 * GIB, 10 * GIB, 19 * GIB, 128 * GIB, 500 * GIB):
            monkeypatch.setattr(utils, "get_shared_memory_bytes", lambda shared=shared: shared)
            ours = machine.cluster_store(replace(WELL, memory_total=2 * free, memory_free=free, shared_free=shared))
            assert ours == utils.resolve_object_store_memory(free), (free, shared)


def test_ours_and_the_drivers_object_store_are_of_one_size() -> None:
    from rl_safe_workers.driver.cluster.joining import OBJECT_STORE_BYTES

    assert machine.LOCAL_OBJECT_STORE_BYTES == OBJECT_STORE_BYTES


def test_random_machines_are_judged_without_a_crash_and_the_better_one_never_worse() -> None:
    chance = random.Random(9)
    for _ in range(300):
        run = chance.choice([CPU, GPU, JOINS, JOINS_GPU, ANY])
        sizes = {name: chance.randrange(64 * GIB) for name in ("memory_free", "shared_total", "shared_free", "locked")}
        poor = replace(WELL, cpus=chance.randrange(9), files_hard=chance.randrange(2**17), **sizes)
        more = replace(poor, memory_free=poor.memory_free * 2, shared_free=poor.shared_free * 2, cpus=poor.cpus * 2)
        assert codes(machine.judge(more, run)).keys() <= codes(machine.judge(poor, run)).keys()


# Storage

DISK = storage.Storage(
    path=Path("/ckpt"),
    there=Path("/ckpt"),
    file_system="ext4",
    free_bytes=100 * GIB,
    write_s=0.1,
    save_bytes=10 * GIB,
    save_s=20.0,
)
DISKS: list[tuple[str, Severity, dict[str, Any], Subject]] = [
    ("checkpoints-unwritable", STOPS, {"write_s": None, "reason": "Read-only file system", "save_bytes": None}, CPU),
    ("checkpoints-in-memory", RISKS, {"file_system": "tmpfs"}, CPU),
    ("checkpoints-apart", RISKS, {"file_system": "ext4"}, JOINS),
    ("disk-short", STOPS, {"free_bytes": 9 * GIB}, CPU),
    ("disk-short", RISKS, {"free_bytes": 29 * GIB}, CPU),
    ("save-timeout", STOPS, {"save_s": 1801.0}, CPU),
]


@pytest.mark.parametrize(("code", "severity", "change", "run"), DISKS)
def test_what_is_wrong_with_the_place_of_checkpoints_is_found(
    code: str, severity: Severity, change: dict[str, Any], run: Subject
) -> None:
    assert codes(storage.judge(replace(DISK, **change), run)) == {code: severity}


@pytest.mark.parametrize(
    ("change", "run"),
    [
        ({}, CPU),
        ({"free_bytes": 30 * GIB, "save_s": 1800.0}, CPU),
        ({"file_system": "nfs4"}, JOINS),
        ({"file_system": "fuse.juicefs"}, JOINS),
        ({"file_system": "tmpfs", "free_bytes": 0}, subject("quickstart.yaml", "trainer.save_freq=-1")),
    ],
)
def test_a_place_that_will_do_has_nothing_wrong(change: dict[str, Any], run: Subject) -> None:
    assert codes(storage.judge(replace(DISK, **change), run)) == {}


def test_a_measurement_leaves_nothing_and_makes_no_folder(tmp_path: Path) -> None:
    found = storage.measure(Subject(checkpoint_path=tmp_path / "not" / "there"))
    assert found.there == tmp_path
    assert found.bytes_s is not None
    assert found.bytes_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_that_cannot_write_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> float:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "_write_and_sync", refuse)
    found = storage.measure(Subject(checkpoint_path=tmp_path))
    assert (found.write_s, found.reason) == (None, "No space left on device")


def test_shared_memory_is_known_for_what_it_is() -> None:
    assert storage.measure(Subject(checkpoint_path=Path("/dev/shm"))).file_system == "tmpfs"


def test_a_save_is_predicted_where_the_model_is_there_and_only_there(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, '
        '"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 260, '
        '"tie_word_embeddings": false}'
    )
    place = {"checkpoint_path": tmp_path}
    overrides = ("megatron.expert_model_parallel_size=1",)
    there = storage.measure(subject("quickstart.yaml", f"model.path={tmp_path}", *overrides, **place))
    parameters = 2 * 260 * 64 + 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16) + 64
    assert there.save_bytes is not None
    assert there.save_bytes == pytest.approx(16 * parameters, rel=0.01)  # fp32, and 12 bytes of optimizer
    assert there.write_s is not None
    assert there.save_s == pytest.approx(there.save_bytes / storage.WRITTEN_BYTES * there.write_s, rel=0.01)
    absent = storage.measure(subject("quickstart.yaml", "model.path=/no/such/model", **place))
    assert absent.save_bytes is None
    assert "not predicted" in value(storage.judge(absent, CPU), "a save")


# Spawned processes

CHILD = children.Child(here="/a/rl_safe_workers", there="/a/rl_safe_workers", main="/a/bin/rl-safe", seconds=0.3)


def test_a_spawned_process_imports_this_package() -> None:
    found = children.spawn()
    assert found.there == found.here == str(ROOT / "rl_safe_workers")
    assert codes(children.judge(found, ANY)) == {}


@pytest.mark.parametrize(
    ("change", "code", "severity", "said"),
    [
        ({"there": None, "code": 1}, "spawn-import", STOPS, "ended with code 1"),
        ({"there": None, "code": None}, "spawn-import", STOPS, "did not end"),
        ({"there": "/b/rl_safe_workers"}, "spawn-other-package", RISKS, "/b/rl_safe_workers"),
    ],
)
def test_a_spawned_process_that_does_not_is_found(
    change: dict[str, Any], code: str, severity: Severity, said: str
) -> None:
    report = children.judge(replace(CHILD, **change), ANY)
    assert codes(report) == {code: severity}
    assert said in report.findings[0].text


# GPUs

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tNODE\t0-15\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tSYS\t16-31\t1\t\tN/A
NIC0\tPXB\tNODE\tSYS\t X

Legend:

  X    = Self
"""


NCCL_OF_THE_WHEEL = "/venv/lib/python3.12/site-packages/nvidia/nccl/lib/libnccl.so.2"


def seen(count: int, **change: Any) -> Answer:
    device = {"name": "H200", "total": 140 * GIB, "free": 139 * GIB, "reason": ""}
    said = {
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "nccl": [2, 28, 9],
        "nccl_wheels": {"nvidia-nccl-cu13": "2.28.9"},
        "nccl_libraries": [NCCL_OF_THE_WHEEL],
        "suspends_not": "NCCL has that since 2.29.7",
        "transformer_engine": "2.12.0",
        "no_transformer_engine": "",
        "devices": [device] * count,
        "peers": [[True] * count] * count,
    }
    return Answer(values=said | change)


def on_gpus(torch: Answer, topology: str | None = None) -> gpus.Gpus:
    return gpus.Gpus(torch=torch, topology=topology, processes=None)


def test_links_are_read_from_the_matrix_of_nvidia_smi() -> None:
    assert gpus.links(TOPOLOGY) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "SYS"}


def test_a_run_on_gpus_needs_them_and_another_does_not() -> None:
    nothing = on_gpus(seen(0, torch="2.13.0+cpu", cuda=None, nccl=None))
    report = gpus.judge(nothing, GPU)
    assert codes(report) == {"gpus-short": STOPS}
    assert "takes 2 GPUs, and torch sees 0, as torch 2.13.0+cpu is built without CUDA" in report.findings[0].text
    assert codes(gpus.judge(nothing, CPU)) == codes(gpus.judge(nothing, ANY)) == {}
    assert codes(gpus.judge(nothing, JOINS_GPU)) == {}  # they are on other nodes
    assert value(gpus.judge(nothing, CPU), "GPUs") == "none"
    assert codes(gpus.judge(on_gpus(seen(2)), GPU)) == {}
    assert codes(gpus.judge(on_gpus(seen(1)), GPU)) == {"gpus-short": STOPS}


def test_colocated_ranks_share_gpus() -> None:
    shared = subject("quickstart_gpu.yaml", "cluster.colocated=true")
    assert codes(gpus.judge(on_gpus(seen(1)), shared)) == {}


def test_memory_that_others_hold_is_found() -> None:
    device = {"name": "H200", "total": 140 * GIB, "reason": ""}
    taken = seen(2, devices=[device | {"free": 139 * GIB}, device | {"free": 100 * GIB}])
    report = gpus.judge(on_gpus(taken), GPU)
    assert codes(report) == {"gpu-memory-taken": RISKS}
    assert "GPUs 1 have less" in report.findings[0].text
    refused = seen(1, devices=[device | {"free": None, "reason": "CUDA error: busy"}])
    assert codes(gpus.judge(on_gpus(refused), ANY)) == {"gpu-memory-taken": RISKS}
    assert "CUDA error: busy" in value(gpus.judge(on_gpus(refused), ANY), "GPUs")


def test_gpus_without_peer_access_or_nvlink_are_slower() -> None:
    apart = gpus.judge(on_gpus(seen(2, peers=[[True, False], [False, True]]), TOPOLOGY), GPU)
    assert codes(apart) == {"peer-access": COSTS}
    assert value(apart, "peer access") == "not between 0 and 1"
    slow = gpus.judge(on_gpus(seen(3), TOPOLOGY), GPU)
    assert codes(slow) == {"no-nvlink": COSTS}
    assert slow.findings[0].text.startswith("2 pairs of GPUs have no NVLink between them, GPUs 0 and 2 first")
    assert value(slow, "links") == "NV18 between 0-1; SYS between 0-2, 1-2"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, "2.28.9; it cannot suspend communicators: NCCL has that since 2.29.7"),
        ({"suspends_not": "", "nccl": [2, 29, 7]}, "2.29.7; it can suspend"),
    ],
)
def test_it_is_said_whether_communicators_can_be_suspended(change: dict[str, Any], said: str) -> None:
    assert said in value(gpus.judge(on_gpus(seen(1, **change)), ANY), "NCCL")


BROKEN = {"no_transformer_engine": "Transformer Engine does not import: OSError: undefined symbol"}
ABSENT = {"transformer_engine": "unknown", "no_transformer_engine": "Transformer Engine is not installed"}


@pytest.mark.parametrize(
    ("change", "overrides", "said", "found"),
    [
        ({}, (), "2.12.0; its layers can be used", {}),
        (ABSENT, (), "Transformer Engine is not installed", {}),
        (ABSENT, ("megatron.fp8=hybrid",), "Transformer Engine is not installed", {"transformer-engine-fails": STOPS}),
        (BROKEN, (), "2.12.0; Transformer Engine does not import: OSError", {"transformer-engine-fails": COSTS}),
        (BROKEN, ("megatron.transformer_impl=local",), "2.12.0; Transformer Engine does not", {}),
    ],
)
def test_transformer_engine_is_named_with_the_reason_why_it_cannot_be_used(
    change: dict[str, Any], overrides: Sequence[str], said: str, found: dict[str, Severity]
) -> None:
    report = gpus.judge(on_gpus(seen(2, **change)), subject("quickstart_gpu.yaml", *overrides))
    assert value(report, "Transformer Engine").startswith(said)
    assert codes(report) == found


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (
            {"nccl_wheels": {"nvidia-nccl-cu12": "2.27.5", "nvidia-nccl-cu13": "2.28.9"}},
            "nccl-twice",
            "nvidia-nccl-cu12 2.27.5 and nvidia-nccl-cu13 2.28.9 are installed",
        ),
        (
            {"nccl_libraries": ["/opt/nccl/libnccl.so.2"]},
            "nccl-elsewhere",
            "loads /opt/nccl/libnccl.so.2, and not the library of nvidia-nccl-cu13 2.28.9",
        ),
        (
            {"nccl_libraries": ["/opt/libnccl.so.2", NCCL_OF_THE_WHEEL]},
            "nccl-elsewhere",
            "loads /opt/libnccl.so.2 and ",
        ),
    ],
)
def test_an_nccl_that_is_not_the_one_of_the_wheel_is_found(change: dict[str, Any], code: str, text: str) -> None:
    report = gpus.judge(on_gpus(seen(2, **change)), GPU)
    assert codes(report) == {code: RISKS}
    assert text in report.findings[0].text
    assert codes(gpus.judge(on_gpus(seen(2, **change)), CPU)) == {}


def test_a_library_of_the_system_without_a_wheel_is_as_it_should_be() -> None:
    container = seen(2, nccl_wheels={}, nccl_libraries=["/usr/lib/x86_64-linux-gnu/libnccl.so.2"])
    assert codes(gpus.judge(on_gpus(container), GPU)) == {}
    assert codes(gpus.judge(on_gpus(seen(2, nccl_wheels={}, nccl_libraries=[])), GPU)) == {}


def test_a_torch_that_cannot_be_imported_stops_a_run() -> None:
    broken = on_gpus(Answer(reason="ImportError: libtorch.so"))
    assert codes(gpus.judge(broken, CPU)) == {"torch-fails": STOPS}
    assert codes(gpus.judge(broken, ANY)) == {}
    assert value(gpus.judge(broken, ANY), "GPUs") == "not checked: ImportError: libtorch.so"


# Ray


def cluster(*nodes: tuple[float, float], free: dict[str, float] | None = None, gone: int = 0) -> Answer:
    there = [
        {"address": f"10.0.0.{i}", "alive": i >= gone, "cpus": cpus, "gpus": gpus_, "memory": 0.0}
        for i, (cpus, gpus_) in enumerate(nodes)
    ]
    alive = there[gone:]
    free = free or {"CPU": sum(n["cpus"] for n in alive), "GPU": sum(n["gpus"] for n in alive)}
    return Answer(values={"ray": "2.60.0", "nodes": there, "free": free})


CLUSTERS: list[tuple[Answer, Subject, dict[str, Severity]]] = [
    (cluster((8, 0)), JOINS, {}),
    (cluster((1, 0)), JOINS, {"ray-resources": STOPS}),
    (cluster((8, 0), (1, 0), gone=1), JOINS, {"ray-resources": STOPS}),
    (cluster((8, 1)), JOINS_GPU, {"ray-resources": STOPS}),
    (cluster((8, 1), (8, 1)), JOINS_GPU, {}),
    (cluster((0.4, 0), (0.4, 0), (0.4, 0), (0.4, 0)), JOINS, {"ray-placement": STOPS}),
    (cluster((0.5, 0), (0.4, 0), (0.4, 0), (0.4, 0)), JOINS, {"ray-placement": STOPS}),
    (cluster((8, 0), free={"CPU": 1.0, "GPU": 0.0}), JOINS, {"ray-busy": RISKS}),
    (cluster((1, 0)), ANY, {}),
    (Answer(reason="no answer within 30 s"), JOINS, {"ray-unreachable": STOPS}),
    (Answer(reason="RuntimeError: Version mismatch: Ray 2.1"), JOINS, {"ray-version": STOPS}),
]


@pytest.mark.parametrize(("answer", "run", "found"), CLUSTERS)
def test_a_cluster_is_compared_with_the_run(answer: Answer, run: Subject, found: dict[str, Severity]) -> None:
    assert codes(ray_cluster.judge(answer, run)) == found


def test_nodes_are_listed_with_what_they_have_and_who_is_gone() -> None:
    report = ray_cluster.judge(cluster((8, 1), (16, 8), gone=1), JOINS)
    assert value(report, "nodes") == "1 node: 10.0.0.1 16 CPUs 8 GPUs; 1 gone"


START = ray_here.Start(temp=Path("/tmp"), writable=True, used_share=0.5, loopback="")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, {}),
        ({"temp": Path("/" + "x" * 60)}, {"ray-temp-long": STOPS}),
        ({"writable": False}, {"ray-temp-unwritable": STOPS}),
        ({"used_share": 0.96}, {"ray-temp-full": RISKS}),
        ({"loopback": "Cannot assign requested address"}, {"ray-loopback": STOPS}),
    ],
)
def test_what_keeps_ray_from_starting_here_is_found(change: dict[str, Any], found: dict[str, Severity]) -> None:
    assert codes(ray_here.judge(replace(START, **change), CPU)) == found


def test_every_finding_says_since_when_on_what_evidence_and_what_avoids_it() -> None:
    reports = [
        *(machine.judge(replace(WELL, **change), run) for _, _, change, run in MACHINES),
        *(storage.judge(replace(DISK, **change), run) for _, _, change, run in DISKS),
        *(ray_cluster.judge(answer, run) for answer, run, _ in CLUSTERS),
    ]
    found: list[Finding] = [finding for report in reports for finding in report.findings]
    assert len(found) > 20
    for finding in found:
        assert all([finding.since, finding.evidence, finding.avoid]), finding.code
        assert not finding.text.endswith("."), finding.code
