"""Checks the GPUs: their number, other processes on them, their connections, and what NCCL can do with them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_safe_workers.doctor.check import GIB, Check, Fact, Report, Subject
from rl_safe_workers.doctor.probes import Answer, ask, run_tool
from rl_safe_workers.findings import Finding, Severity, counted
from rl_safe_workers.versions import UNKNOWN

TORCH_DEADLINE_S, TOOL_DEADLINE_S = 90.0, 15.0
FREE_SHARE = 0.9
"""Share of a GPU's memory that should be free. A CUDA context and a desktop need less than the rest."""
_NVLINK = re.compile(r"NV\d+")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """Answers of torch and ``nvidia-smi``.

    Example: ``Gpus(torch=Answer(values={"devices": [], …}), topology=None, processes=None)``
    """

    torch: Answer
    """Answer of ``torch_probe``."""
    topology: str | None
    """Output of ``nvidia-smi topo -m``; None if there is none."""
    processes: str | None
    """Output of ``nvidia-smi --query-compute-apps``; None if there is none."""

    @property
    def devices(self) -> list[dict[str, Any]]:
        """The GPUs that torch sees."""
        return [] if self.torch.values is None else list(self.torch.values["devices"])


def _gather(subject: Subject) -> Gpus:
    torch = ask("torch_probe", deadline_s=TORCH_DEADLINE_S)
    query = "--query-compute-apps=gpu_uuid,pid,process_name,used_memory"
    return Gpus(
        torch=torch,
        topology=run_tool("nvidia-smi", "topo", "-m", deadline_s=TOOL_DEADLINE_S),
        processes=run_tool("nvidia-smi", query, "--format=csv,noheader", deadline_s=TOOL_DEADLINE_S),
    )


def judge(gpus: Gpus, subject: Subject) -> Report:
    """Compares the GPUs with the needs of the run."""
    if gpus.torch.values is None:
        return _no_answer(gpus.torch.reason, subject)
    facts = [Fact(name="GPUs", value=_devices(gpus.devices))]
    if gpus.devices:
        facts += [
            Fact(name="NCCL", value=_nccl(gpus.torch.values)),
            Fact(name="Transformer Engine", value=_transformer_engine(gpus.torch.values)),
            Fact(name="peer access", value=_peers(gpus.torch.values["peers"])),
            Fact(name="links", value=_links(gpus.topology)),
            Fact(name="processes on GPUs", value=_processes(gpus.processes)),
        ]
    findings = [*_short(gpus, subject), *_taken(gpus, subject), *_apart(gpus, subject), *_odd_nccl(gpus, subject)]
    findings += _broken_layers(gpus, subject)
    return Report(facts=tuple(facts), findings=tuple(findings))


def _no_answer(reason: str, subject: Subject) -> Report:
    fact = Fact(name="GPUs", value=f"not checked: {reason}")
    if subject.config is None:
        return Report(facts=(fact,))
    finding = Finding(
        code="torch-fails",
        severity=Severity.STOPS,
        text=f"a process that imports torch and looks for GPUs fails: {reason}",
        since="always",
        evidence=("python -m rl_safe_workers.doctor.torch_probe",),
        avoid="a torch that can be imported here, and a driver that answers",
    )
    return Report(facts=(fact,), findings=(finding,))


def _devices(devices: Sequence[Mapping[str, Any]]) -> str:
    if not devices:
        return "none"
    return "; ".join(
        f"{device['name']}, "
        + (
            f"{device['free'] / GIB:.1f} GiB free of {device['total'] / GIB:.1f}"
            if device["free"]
            else device["reason"]
        )
        for device in devices
    )


def _nccl(answer: Mapping[str, Any]) -> str:
    version = ".".join(map(str, answer["nccl"])) if answer["nccl"] else "none in this torch"
    if reason := answer["suspends_not"]:
        return f"{version}; it cannot suspend communicators: {reason}"
    return f"{version}; it can suspend communicators, unless NCCL_CUMEM_ENABLE=0"


def _transformer_engine(answer: Mapping[str, Any]) -> str:
    version, reason = answer["transformer_engine"], answer["no_transformer_engine"]
    return reason if version == UNKNOWN else f"{version}; {reason or 'its layers can be used'}"


def _peers(matrix: Sequence[Sequence[bool]]) -> str:
    apart = _apart_pairs(matrix)
    if not apart:
        return "every GPU reads every other's memory"
    return "not between " + ", ".join(f"{a} and {b}" for a, b in apart)


def _apart_pairs(matrix: Sequence[Sequence[bool]]) -> list[tuple[int, int]]:
    return [(a, b) for a, row in enumerate(matrix) for b, there in enumerate(row) if a < b and not there]


def links(topology: str) -> dict[tuple[int, int], str]:
    """Parses ``nvidia-smi topo -m``; returns the link of each pair of GPUs, e.g. ``{(0, 1): "NV18"}``."""
    rows = [line.split() for line in _ESCAPES.sub("", topology).splitlines() if line.startswith("GPU")]
    found = {}
    for cells in rows:
        row = int(cells[0].removeprefix("GPU"))
        for column, cell in enumerate(cells[1 : len(rows) + 1]):
            if row < column:
                found[row, column] = cell
    return found


def _links(topology: str | None) -> str:
    if topology is None:
        return "not checked: nvidia-smi topo -m gives no answer"
    kinds: dict[str, list[str]] = {}
    for (a, b), kind in links(topology).items():
        kinds.setdefault(kind, []).append(f"{a}-{b}")
    if not kinds:
        return "one GPU, none needed"
    if len(kinds) == 1:
        return f"{next(iter(kinds))} between all pairs"
    return "; ".join(f"{kind} between {', '.join(pairs)}" for kind, pairs in kinds.items())


def _processes(listed: str | None) -> str:
    if listed is None:
        return "not checked: nvidia-smi gives no answer"
    return "; ".join(line.strip() for line in listed.splitlines() if line.strip()) or "none"


def _short(gpus: Gpus, subject: Subject) -> Iterator[Finding]:
    """Yields a finding if this machine has too few GPUs; none if the run joins a cluster, which has its own GPUs."""
    if subject.joins_cluster or len(gpus.devices) >= subject.gpus or gpus.torch.values is None:
        return
    version, cuda = gpus.torch.values["torch"], gpus.torch.values["cuda"]
    build = "" if cuda else f", as torch {version} is built without CUDA"
    yield Finding(
        code="gpus-short",
        severity=Severity.STOPS,
        text=f"cluster.device=cuda takes {counted(subject.gpus, 'GPU')}, and torch sees {len(gpus.devices)}{build}",
        since="always",
        evidence=("platforms/cuda.py", "python -m rl_safe_workers.doctor.torch_probe"),
        avoid="fewer of cluster.num_trainers and cluster.num_rollouts, cluster.colocated=true, CUDA_VISIBLE_DEVICES, "
        "or a CUDA build of torch",
    )


def _taken(gpus: Gpus, subject: Subject) -> Iterator[Finding]:
    if not subject.may_use_gpus:
        return
    full = [
        index
        for index, device in enumerate(gpus.devices)
        if device["free"] is None or device["free"] < FREE_SHARE * device["total"]
    ]
    if full:
        yield Finding(
            code="gpu-memory-taken",
            severity=Severity.RISKS,
            text=f"GPUs {', '.join(map(str, full))} have less than {FREE_SHARE:.0%} of their memory free: "
            f"{_devices([gpus.devices[index] for index in full])}",
            since="always",
            evidence=("cudaMemGetInfo", f"nvidia-smi: {_processes(gpus.processes)}"),
            avoid="end what is left of an earlier run, or choose other GPUs with CUDA_VISIBLE_DEVICES",
        )


def _apart(gpus: Gpus, subject: Subject) -> Iterator[Finding]:
    if gpus.torch.values is None or not subject.may_use_gpus:
        return
    if apart := _apart_pairs(gpus.torch.values["peers"]):
        yield Finding(
            code="peer-access",
            severity=Severity.COSTS,
            text=f"GPUs {', '.join(f'{a} and {b}' for a, b in apart)} cannot read each other's memory: NCCL goes "
            "through host memory, and what communicators take is not what was measured",
            since="always",
            evidence=("cudaDeviceCanAccessPeer", "NCCL user guide, NCCL_P2P_DISABLE"),
            avoid="GPUs of one NVLink domain, or without ACS and IOMMU between them",
        )
        return
    slow = [pair for pair, kind in links(gpus.topology or "").items() if not _NVLINK.fullmatch(kind)]
    if slow:
        yield Finding(
            code="no-nvlink",
            severity=Severity.COSTS,
            text=f"{counted(len(slow), 'pair')} of GPUs have no NVLink between them, GPUs {slow[0][0]} and "
            f"{slow[0][1]} first: collectives are slower, and what communicators take was measured on NVLink only",
            since="always",
            evidence=("nvidia-smi topo -m", "docs/benchmarks.md#comms"),
            avoid="GPUs of one NVLink domain",
        )


def _odd_nccl(gpus: Gpus, subject: Subject) -> Iterator[Finding]:
    answer = gpus.torch.values
    if answer is None or not gpus.devices or not subject.may_use_gpus:
        return
    wheels, loaded = answer["nccl_wheels"], answer["nccl_libraries"]
    named = " and ".join(f"{name} {version}" for name, version in sorted(wheels.items()))
    if len(wheels) > 1:
        yield Finding(
            code="nccl-twice",
            severity=Severity.RISKS,
            text=f"{named} are installed: they own the same nvidia/nccl/lib/libnccl.so.2, and the one that was "
            f"installed last has won; NCCL says {'.'.join(map(str, answer['nccl'] or ()))}",
            since="wheels of NCCL for more than one CUDA",
            evidence=("marin 7344",),
            avoid="uninstall all of them, then install the one that torch asks for",
        )
    elif len(loaded) > 1 or (wheels and not any("/nvidia/nccl/" in path for path in loaded)):
        paths = " and ".join(loaded) or "no libnccl.so"
        yield Finding(
            code="nccl-elsewhere",
            severity=Severity.RISKS,
            text=f"a process with torch loads {paths}"
            + (f", and not the library of {named}" if wheels else "")
            + ": tables of versions do not tell which NCCL runs",
            since="always",
            evidence=("/proc/self/maps",),
            avoid="remove libnccl from LD_LIBRARY_PATH and LD_PRELOAD, unless you want that library",
        )


def _broken_layers(gpus: Gpus, subject: Subject) -> Iterator[Finding]:
    answer = gpus.torch.values
    if answer is None or not gpus.devices or not subject.may_use_gpus or not answer["no_transformer_engine"]:
        return
    megatron = None if subject.config is None else subject.config.megatron
    is_needed = megatron is not None and megatron.needs_transformer_engine
    is_wanted = megatron is None or megatron.transformer_impl != "local"
    if is_needed or (is_wanted and answer["transformer_engine"] != UNKNOWN):
        yield Finding(
            code="transformer-engine-fails",
            severity=Severity.STOPS if is_needed else Severity.COSTS,
            text=f"Transformer Engine's layers cannot be used: {answer['no_transformer_engine']}"
            + ("" if is_needed else "; a run takes Megatron's slower local layers"),
            since="always",
            evidence=("python -c 'import transformer_engine.pytorch'",),
            avoid="a Transformer Engine that was built for the installed torch and CUDA",
        )


GPUS = Check(name="GPUs", deadline_s=TORCH_DEADLINE_S + 2 * TOOL_DEADLINE_S + 5, gather=_gather, judge=judge)
