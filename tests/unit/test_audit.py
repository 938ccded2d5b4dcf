"""An audit passes what is whole and names every kind of damage."""

from __future__ import annotations

import io
import json
import os
import resource
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from rl_safe_workers.checkpoint.audit import audit, audit_here
from rl_safe_workers.checkpoint.audit_report import LISTED, AuditReport
from rl_safe_workers.checkpoint.folders.manifest import MANIFEST, SHARDS
from rl_safe_workers.checkpoint.format.index import read_index
from rl_safe_workers.cli.main import main
from rl_safe_workers.errors import CheckpointError
from tests.torch_dist import Cut, archive, experts, grid, write_checkpoint, write_metadata

CUTS = {
    "weight": grid((8, 6), (2, 3), torch.bfloat16),
    "uneven": Cut((4, 4), [((0, 0), (1, 4)), ((1, 0), (3, 1)), ((1, 1), (3, 3))]),
    "step": Cut((), [((), ())], torch.int64),
    "empty": Cut((0, 4), []),
}


def _texts(report: AuditReport, kind: str) -> list[str]:
    return [problem.text for problem in report.problems if problem.kind == kind]


def _only(report: AuditReport, kind: str) -> str:
    """The text of the one problem there is."""
    assert report.counts == {kind: 1}, report.problems
    return report.problems[0].text


def _write_manifest(root: Path, **changes: Any) -> None:
    paths = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != MANIFEST]
    files = {
        str(path.relative_to(root)): {
            "bytes": path.stat().st_size,
            "digest": f"crc32:{zlib.crc32(path.read_bytes()):08x}",
        }
        for path in paths
    }
    manifest = {"schema": 2, "step": 3, "layout": {"tensor": 2}, "versions": {"torch": "2"}, "saved_at": 1.0}
    manifest |= {"model_fingerprint": "x", "driver_state": {}, "digests": {}}
    (root / MANIFEST).write_text(json.dumps({**manifest, "files": files, **changes}))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A checkpoint as Megatron-LM has it."""
    write_checkpoint(tmp_path / "iter_0000003", CUTS)
    return tmp_path / "iter_0000003"


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """A checkpoint as we have it."""
    root = tmp_path / "global_step_3"
    write_checkpoint(root / SHARDS, CUTS)
    _write_manifest(root)
    return root


def _damage_metadata(directory: Path, change: Callable[[Metadata], object]) -> None:
    metadata = write_checkpoint(directory, CUTS)
    change(metadata)
    write_metadata(directory, metadata)


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_checkpoint_of_others_passes(foreign: Path, deep: bool) -> None:
    report = audit(foreign, deep=deep)
    assert report.problems == ()
    assert (report.ok, report.deep, report.has_manifest, report.step) == (True, deep, False, None)
    assert (report.tensors, report.chunks, report.objects, report.files) == (4, 12, 1, 5)
    assert report.bytes == sum(path.stat().st_size for path in foreign.iterdir())


@pytest.mark.parametrize("deep", [False, True])
def test_a_whole_checkpoint_of_ours_passes(ours: Path, deep: bool) -> None:
    report = audit(ours, deep=deep)
    assert report.problems == ()
    assert (report.ok, report.has_manifest, report.step, report.backend) == (True, True, 3, "torch_dist")
    assert (report.layout, report.versions) == ({"tensor": 2}, {"torch": "2"})


def test_the_experts_of_a_model_are_covered(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, experts(layers=3, count=4, hidden=8), contents=False)
    assert audit(tmp_path).problems == ()
    assert audit(tmp_path).chunks == 3 * (2 * 3 * 4 + 4 * 3)


def test_a_hole_is_found(foreign: Path) -> None:
    _damage_metadata(foreign, lambda m: m.storage_data.pop(MetadataIndex("weight", (2, 3))))
    assert _only(audit(foreign), "range") == "weight at [2, 3] has no place in any file"

    def lose(metadata: Metadata) -> None:
        metadata.state_dict_metadata["uneven"].chunks.pop()  # type: ignore[union-attr]
        metadata.storage_data.pop(MetadataIndex("uneven", (1, 1)))

    _damage_metadata(foreign, lose)
    assert _only(audit(foreign), "coverage") == "uneven [4, 4]: 9 of 16 elements are stored nowhere"


def test_an_overlap_is_found_even_where_the_sizes_add_up(foreign: Path) -> None:
    def move(metadata: Metadata) -> None:
        chunk = metadata.state_dict_metadata["weight"].chunks[3]  # type: ignore[union-attr]
        info = metadata.storage_data.pop(MetadataIndex("weight", chunk.offsets))
        chunk.offsets = torch.Size((1, 3))
        metadata.storage_data[MetadataIndex("weight", (1, 3))] = info

    _damage_metadata(foreign, move)
    text = _only(audit(foreign), "coverage")
    assert text == "weight [8, 6]: chunks [2, 3] at [0, 3] and [2, 3] at [1, 3] overlap"


def test_a_chunk_outside_its_tensor_is_found(foreign: Path) -> None:
    def grow(metadata: Metadata) -> None:
        metadata.state_dict_metadata["weight"].chunks[0] = ChunkStorageMetadata(  # type: ignore[union-attr]
            torch.Size((0, 0)), torch.Size((2, 7))
        )

    _damage_metadata(foreign, grow)
    assert "weight [8, 6]: chunk [2, 7] at [0, 0] lies outside" in _texts(audit(foreign), "coverage")


def test_bytes_of_a_chunk_that_is_not_there_are_found(foreign: Path) -> None:
    _damage_metadata(foreign, lambda m: m.state_dict_metadata.pop("step"))
    assert _only(audit(foreign), "range").endswith("no part of the checkpoint: step at ()")


def test_a_range_past_the_end_is_found(foreign: Path) -> None:
    def move(metadata: Metadata) -> None:
        metadata.storage_data[MetadataIndex("step", ())] = _StorageInfo("__0_0.distcp", 10**6, 2000)

    _damage_metadata(foreign, move)
    size = (foreign / "__0_0.distcp").stat().st_size
    assert _only(audit(foreign), "range") == f"__0_0.distcp: bytes 1000000 to 1002000 of step pass its end at {size}"


def test_overlapping_ranges_are_found(foreign: Path) -> None:
    def widen(metadata: Metadata) -> None:
        info = metadata.storage_data[MetadataIndex("weight", (0, 0))]
        metadata.storage_data[MetadataIndex("step", ())] = _StorageInfo(info.relative_path, info.offset + 8, 1000)

    _damage_metadata(foreign, widen)
    (text,) = _texts(audit(foreign), "range")
    assert "of step overlap those of weight" in text


def test_a_range_too_short_for_its_elements_is_found(foreign: Path) -> None:
    def shorten(metadata: Metadata) -> None:
        metadata.storage_data[MetadataIndex("weight", (0, 0))].length = 11

    _damage_metadata(foreign, shorten)
    assert _only(audit(foreign), "range").startswith("weight has 11 bytes at 0 of __0_0.distcp, its elements need 12")


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json", "common.pt", ".metadata"])
def test_a_missing_file_is_found(foreign: Path, name: str) -> None:
    (foreign / name).unlink()
    report = audit(foreign, deep=True)
    assert not report.ok
    assert any(name in problem.text for problem in report.problems)


@pytest.mark.parametrize("name", ["__0_0.distcp", "metadata.json", "common.pt", ".metadata"])
def test_a_missing_file_of_ours_is_found(ours: Path, name: str) -> None:
    (ours / SHARDS / name).unlink()
    assert f"{SHARDS}/{name} is missing" in _texts(audit(ours, deep=True), "file")


def test_a_truncated_file_is_found(foreign: Path, ours: Path) -> None:
    for shards in (foreign, ours / SHARDS):
        os.truncate(shards / "__1_0.distcp", (shards / "__1_0.distcp").stat().st_size - 1)
    assert "pass its end" in _only(audit(foreign, deep=True), "range")
    report = audit(ours)
    assert report.counts == {"file": 1, "range": 1}
    size = (ours / SHARDS / "__1_0.distcp").stat().st_size
    assert _texts(report, "file") == [f"{SHARDS}/__1_0.distcp has {size} bytes, {size + 1} were written"]


def _data_position(shards: Path, key: str) -> tuple[Path, int]:
    """The file of a tensor's first chunk, and where in it the chunk's elements start."""
    place = read_index(shards).tensors[key].chunks[0].place
    assert place is not None
    blob = (shards / place.file).read_bytes()[place.offset : place.stop]
    header = zipfile.ZipFile(io.BytesIO(blob)).getinfo("archive/data/0").header_offset
    name, extra = struct.unpack("<HH", blob[header + 26 : header + 30])
    return shards / place.file, place.offset + header + 30 + name + extra


def test_a_flipped_byte_is_found_by_a_deep_audit_alone(foreign: Path, ours: Path) -> None:
    path, position = _data_position(foreign, "weight")
    _flip(path, position)
    assert audit(foreign).ok
    assert _only(audit(foreign, deep=True), "bytes") == (
        f"weight at 0 of {path.name} does not have the bytes that were saved: checksum of data/0"
    )
    path, position = _data_position(ours / SHARDS, "uneven")
    _flip(path, position)
    assert audit(ours).ok
    assert f"{SHARDS}/{path.name} does not have the bytes that were written" in _only(audit(ours, deep=True), "bytes")


def test_any_flipped_byte_of_ours_is_found(ours: Path) -> None:
    path = ours / SHARDS / "__0_0.distcp"
    whole = path.read_bytes()
    for position in range(0, len(whole), 997):
        _flip(path, position)
        assert audit(ours, deep=True).counts == {"bytes": 1}
        path.write_bytes(whole)


def test_a_flipped_byte_anywhere_never_ends_the_audit(foreign: Path) -> None:
    for name in ("__0_0.distcp", "common.pt", ".metadata", "metadata.json"):
        whole = (foreign / name).read_bytes()
        for number, position in enumerate(range(0, len(whole), 131)):
            _flip(foreign / name, position)
            # An error that is not ours fails here; the command would say that the file cannot be read.
            audit_here(str(foreign), str(foreign), deep=True)
            if number % 10 == 0:
                assert main(["audit", str(foreign), "--deep"]) in (0, 1)
            (foreign / name).write_bytes(whole)


def test_bytes_that_are_no_archive_are_found(foreign: Path) -> None:
    place = read_index(foreign).tensors["weight"].chunks[0].place
    assert place is not None
    with (foreign / place.file).open("r+b") as file:
        file.seek(place.offset)
        file.write(b"\0" * place.length)
    assert "weight at 0 of __0_0.distcp is no archive of torch.save" in _only(audit(foreign, deep=True), "bytes")


def test_a_manifest_of_a_newer_schema_is_found(ours: Path) -> None:
    _write_manifest(ours, schema=4)
    assert "was written by a newer rl_safe_workers (manifest schema 4" in _only(audit(ours), "manifest")


@pytest.mark.parametrize(
    "files", [{"../x": {"bytes": 1, "digest": "crc32:0"}}, {"x": {"bytes": 1, "digest": "md5:0"}}, 3]
)
def test_a_malformed_manifest_is_found(ours: Path, files: object) -> None:
    _write_manifest(ours, files=files)
    assert "is malformed" in _only(audit(ours), "manifest")


def test_a_manifest_of_schema_1_is_read(ours: Path) -> None:
    sizes = {str(p.relative_to(ours)): p.stat().st_size for p in ours.rglob("*") if p.is_file() and p.name != MANIFEST}
    _write_manifest(ours, schema=1, files=sizes)
    assert audit(ours, deep=True).ok
    path, position = _data_position(ours / SHARDS, "weight")
    _flip(path, position)
    assert "checksum of" in _only(audit(ours, deep=True), "bytes")


def test_a_file_that_the_manifest_does_not_list_is_found(ours: Path) -> None:
    _write_manifest(ours, files={})
    assert set(audit(ours).counts) == {"manifest"}


def test_an_interrupted_save_is_found(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "global_step_4.incomplete" / SHARDS, CUTS)
    for directory in (tmp_path / "global_step_4.incomplete", tmp_path / "global_step_4.incomplete" / SHARDS):
        assert "did not finish" in _only(audit(directory), "manifest")


class _Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("false",)


def test_a_checkpoint_that_runs_a_program_is_found_by_name(foreign: Path) -> None:
    _damage_metadata(foreign, lambda m: setattr(m, "planner_data", _Hostile()))
    assert "asks for posix.system" in _only(audit(foreign), "metadata")
    write_checkpoint(foreign, {}, common={"args": _Hostile()})
    assert "common.pt asks for posix.system" in _only(audit(foreign), "common")


def test_the_common_object_of_newer_megatron_is_read(foreign: Path) -> None:
    metadata = write_checkpoint(foreign, {}, objects=["common_state/shard_0_1"])
    (foreign / "common.pt").unlink()
    assert audit(foreign).ok
    (place,) = metadata.storage_data.values()
    hostile = archive({"args": _Hostile()})
    (foreign / place.relative_path).write_bytes(hostile)
    place.offset, place.length = 0, len(hostile)
    write_metadata(foreign, metadata)
    assert "common_state/shard_0_1 in" in _only(audit(foreign), "common")


def test_all_problems_are_counted_and_the_first_of_a_kind_listed(foreign: Path) -> None:
    def lose(metadata: Metadata) -> None:
        for index in [i for i in metadata.storage_data if i.fqn == "many"]:
            del metadata.storage_data[index]

    metadata = write_checkpoint(foreign, {"many": grid((LISTED + 5,), (1,))})
    lose(metadata)
    metadata.state_dict_metadata["many"].size = torch.Size((100,))  # type: ignore[union-attr]
    write_metadata(foreign, metadata)
    report = audit(foreign)
    assert report.counts == {"range": LISTED + 5, "coverage": 1}
    assert len(report.problems) == LISTED + 1


def test_the_command_prints_a_verdict_and_returns_it(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(foreign), "--deep"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("whole (every byte read")
    (foreign / "__0_0.distcp").unlink()
    assert main(["audit", str(foreign)]) == 1
    out = capsys.readouterr().out
    assert "file: __0_0.distcp is missing" in out
    assert "DAMAGED: 1 problem" in out


def test_the_command_prints_json(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(ours), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["step"], report["problems"]) == (True, 3, [])


def test_a_pickle_that_asks_for_gigabytes_is_damage(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # LONG_BINPUT makes the unpickler's memo as long as the number that follows.
    (foreign / ".metadata").write_bytes(b"\x80\x04Nr" + struct.pack("<I", 2**27) + b".")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert main(["audit", str(foreign)]) == 1
    assert "MemoryError" in capsys.readouterr().out
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_the_command_refuses_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(tmp_path)]) == 1
    assert main(["audit", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err.count("rl-safe: error: ") == 2
    with pytest.raises(CheckpointError):
        audit(tmp_path)


def test_an_audit_loads_no_torch_and_no_numpy(foreign: Path) -> None:
    code = (
        "import sys; from rl_safe_workers.cli.main import main; from rl_safe_workers.checkpoint import ranges; "
        f"code = main(['audit', {str(foreign)!r}, '--deep']); "
        "sys.exit(code or len({'torch', 'numpy', 'megatron', 'ray'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
