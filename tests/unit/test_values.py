"""Values of archives: those that a checkpoint needs come back, and nothing can make the loading process do more."""

from __future__ import annotations

import argparse
import datetime
import enum
import io
import itertools
import os
import pickle
import resource
import signal
import struct
import types
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.enums import ModelType
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer.enums import AttnBackend

from rl_safe_workers.checkpoint.format.archives import Archive
from rl_safe_workers.checkpoint.format.format_names import COMMON_ENUMS, TREE_NAMES
from rl_safe_workers.checkpoint.format.index import ByteRange, CheckpointIndex, Chunk, Location, TensorEntry
from rl_safe_workers.checkpoint.format.rectangles import Index
from rl_safe_workers.checkpoint.load.loader import Blobs, compare, load_value, read_pieces
from rl_safe_workers.checkpoint.state.pieces import Split
from rl_safe_workers.checkpoint.state.values import _COLLECTIONS, _MAKERS, _STATEFUL, _TYPES
from rl_safe_workers.errors import CheckpointError, UnsafeCheckpointError
from tests.torch_dist import archive


def _load(data: bytes, tmp_path: Path) -> Any:
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        return load_value(Archive(file, 0, len(data), source="FILE"))


def _zip(records: list[tuple[str, bytes]], kind: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", kind) as file:
        warnings.simplefilter("ignore")  # of names that come twice
        for name, data in records:
            file.writestr(name, data)
    return stream.getvalue()


def _pickled(body: bytes, **storages: bytes) -> bytes:
    records = [("archive/data.pkl", b"\x80\x02" + body + b".")]
    return _zip(records + [(f"archive/data/{key[1:]}", data) for key, data in storages.items()])


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


VALUES = [
    {"a": 1, 2: [3.5, None, True], (1, "x"): (), -(2**62): 2**200},
    [{(torch.bfloat16, torch.float32): [1, 2]}],
    argparse.Namespace(lr=1e-3, dtype=torch.bfloat16, save=Path("/x/y"), names={"a", "b"}, device=torch.device("cpu")),
    types.SimpleNamespace(inner=argparse.Namespace(x=frozenset({1}))),
    OrderedDict(b=1, a=2),
    defaultdict(list, {"x": [1]}),
    [b"", b"\x00\xff" * 50, bytearray(b"abc"), 1 + 2j],
    [signal.SIGTERM, ModelType.encoder_or_decoder, AttnBackend.auto],
    [torch.Size((2, 3)), torch.float8_e4m3fn, torch.strided],
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=datetime.UTC),
    [datetime.timedelta(minutes=5), datetime.date(2026, 1, 2), datetime.time(1, 2)],
    [np.float32(0.5), np.int64(-3), np.bool_(True), np.str_("abc"), np.dtype(">i4"), np.dtype("f2")],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_as_what_it_was(value: Any, tmp_path: Path) -> None:
    loaded = _load(archive(value), tmp_path)
    assert loaded == value
    assert type(loaded) is type(value)
    assert repr(loaded) == repr(value) or isinstance(value, argparse.Namespace)


def test_arrays_streams_and_settings_come_back(tmp_path: Path) -> None:
    stream = io.BytesIO(b"content")
    stream.seek(3)
    arrays = [np.arange(6.0).reshape(2, 3), np.asfortranarray(np.ones((2, 3), "i2")), np.zeros((0, 4)), np.array("ab")]
    settings = OptimizerConfig(lr=0.5, params_dtype=torch.bfloat16)
    loaded_arrays, loaded_stream, loaded_settings = _load(archive([arrays, stream, settings]), tmp_path)
    for loaded, wanted in zip(loaded_arrays, arrays, strict=True):
        assert np.array_equal(loaded, wanted)
        assert (loaded.dtype, loaded.flags.f_contiguous) == (wanted.dtype, wanted.flags.f_contiguous)
        assert loaded.flags.writeable
    assert (loaded_stream.getvalue(), loaded_stream.tell()) == (b"content", 3)
    assert loaded_settings == settings


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t(),
        torch.arange(10)[2:5],
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.zeros(0, 3),
        torch.arange(4).to(torch.uint16),
        torch.randn(2, 2).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.randn(2, dtype=torch.complex64),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_a_tensor_comes_back_bit_for_bit(tensor: torch.Tensor, tmp_path: Path) -> None:
    loaded = _load(archive(tensor), tmp_path)
    assert (type(loaded), loaded.dtype, loaded.shape) == (type(tensor), tensor.dtype, tensor.shape)
    assert loaded.requires_grad == tensor.requires_grad
    wanted = tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
    found = loaded.detach().contiguous().view(torch.uint8) if tensor.dim() else loaded.view(1).view(torch.uint8)
    assert torch.equal(found, wanted)


def test_tensors_of_one_storage_share_it(tmp_path: Path) -> None:
    whole = torch.arange(6)
    first, second = _load(archive([whole[:3], whole[3:]]), tmp_path)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_every_listed_name_can_be_made(tmp_path: Path) -> None:
    enums = {f"{module}.{name}" for module, found in COMMON_ENUMS.items() for name in found}
    alone = {name for name in TREE_NAMES if name.startswith("torch.")} | set(_TYPES) | {"numpy.ndarray"}
    assert TREE_NAMES - _MAKERS.keys() - _STATEFUL.keys() - _COLLECTIONS.keys() - enums <= alone


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n(("
    + _text("storage")
    + b"ctorch\nFloatStorage\n"
    + _text("0")
    + _text("cpu")
    + b"%stQ%s%s%s\x89Nt"
    + b"R"
)
"""A tensor of a storage of so many elements, from an offset on, of a shape and a stride."""
ONE, HUGE = b"K\x01\x85", b"J\x00\x00\x00\x40\x85"
BUILD = b"}" + _text("_value_") + b"K\x09sb"


def _thousands(part: bytes, thousands: int) -> bytes:
    """A pickle of a part and a thousand references to it, so many times."""
    return b"(" + part + b"q\x00(" + b"h\x00" * 1000 + b"tq\x01" + b"h\x01" * (thousands - 1) + b"t"


def _colliding_tuples() -> bytes:
    """A dict of 2,500 long tuples of -1 and -2, which have one hash."""
    keys = itertools.islice(itertools.product((-1, -2), repeat=14), 2500)
    members = (b"".join(b"J" + struct.pack("<i", member) for member in key) for key in keys)
    return _pickled(
        b"(" + b"K\x01" * 700 + b"tq\x00}(" + b"".join(b"(h\x00" + key + b"tN" for key in members) + b"u\x86"
    )


ATTACKS = {
    "tuples with one hash": _colliding_tuples(),
    "floats with one hash": _pickled(
        b"}("
        + b"".join(
            b"(G"
            + struct.pack(">d", 2.0 ** (61 * (n % 9)) * 3 ** (n % 7))
            + b"K\x01"
            + b"J"
            + struct.pack("<i", n)
            + b"tN"
            for n in range(1500)
        )
        + b"u"
    ),
    "a million lists": _pickled(_thousands(b"]", 1000)),
    "thousands of dicts": _pickled(_thousands(b"ccollections\nOrderedDict\n)R", 1000)),
    "thousands of paths": _pickled(_thousands(b"cpathlib\nPath\n" + _text("a/" * 2000) + b"\x85R", 10)),
    "thousands of bytes": _pickled(
        _thousands(b"c_codecs\nencode\n" + _text("a" * 10**6) + _text("latin1") + b"\x86R", 10)
    ),
    "a deque": _pickled(b"ccollections\ndeque\n)R"),
    "a frozenset as a key": _pickled(b"}c__builtin__\nfrozenset\n]\x85RNs"),
    "a shape of large numbers": _pickled(
        TENSOR % (b"K\x04", b"K\x00", b"(\x8a\xff" + b"\x7f" * 255 + b"q\x07" + b"h\x07" * 99_000 + b"t", ONE),
        _0=b"\0" * 16,
    ),
    "a member of an enum by gigabytes": _pickled(
        b"(" + _text("x" * 10**6) + b"q\x00h\x00tq\x01csignal\nSignals\n(" + b"h\x01" * 1000 + b"t\x85R\x86"
    ),
    "a pickle of many bytes": _pickled(_text("x" * 17 * 2**20)),
    "more elements than bytes": _pickled(TENSOR % (b"M\x00\x40", b"K\x00", ONE, ONE), _0=b"\0" * 16),
    "a tensor past its storage": _pickled(TENSOR % (b"K\x04", b"K\x04", ONE, ONE), _0=b"\0" * 16),
    "a tensor before its storage": _pickled(TENSOR % (b"K\x04", b"J\xff\xff\xff\xff", ONE, ONE), _0=b"\0" * 16),
    "a tensor of one element many times": _pickled(TENSOR % (b"K\x04", b"K\x00", HUGE, b"K\x00\x85"), _0=b"\0" * 16),
    "a negative shape": _pickled(TENSOR % (b"K\x04", b"K\x00", b"J\xff\xff\xff\xff\x85", ONE), _0=b"\0" * 16),
    "no storage": _pickled(TENSOR % (b"K\x04", b"K\x00", ONE, ONE)),
    "gigabytes of a bytearray": _pickled(b"c__builtin__\nbytearray\n" + HUGE + b"R"),
    "gigabytes of bytes": _pickled(b"c__builtin__\nbytes\n" + HUGE + b"R"),
    "gigabytes of an array": _pickled(
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + ONE + b"U\x01b\x87R(K\x01" + HUGE + b"N\x89Ntb"
    ),
    "an array of objects": _pickled(b"cnumpy\ndtype\n" + _text("O8") + b"\x89\x88\x87R"),
    "a dtype of gigabytes": _pickled(b"cnumpy\ndtype\n" + _text("V999999999") + b"\x89\x88\x87R"),
    "bytes copied again and again": _pickled(
        _text("x" * 10**6) + b"q\x00](" + (b"c_codecs\nencode\nh\x00" + _text("latin1") + b"\x86R") * 100 + b"e\x86"
    ),
    "a tree without end": _pickled(b"]" + b"".join(b"q%ch%c\x86" % (n, n) for n in range(60))),
    "a list in itself": _pickled(b"]q\x00h\x00a"),
    "a nest": _pickled(b"]" * 5000 + b"a" * 4999),
    "keys that collide": _pickled(
        b"}(" + b"".join(b"\x8a\x0c" + (k * (2**61 - 1)).to_bytes(12, "little") + b"N" for k in range(1, 50000)) + b"u"
    ),
    "a state for a class": _pickled(b"csignal\nSignals\n" + BUILD),
    "a state for a member": _pickled(b"csignal\nSignals\nK\x0f\x85R" + BUILD),
    "a state for a dtype": _pickled(b"ctorch\nfloat32\n" + BUILD),
    "a member of no such name": _pickled(b"c__builtin__\ngetattr\ncsignal\nSignals\n" + _text("__init__") + b"\x86R"),
    "an attribute of no enum": _pickled(b"c__builtin__\ngetattr\ncargparse\nNamespace\n" + _text("mro") + b"\x86R"),
    "a call of a type": _pickled(b"c__builtin__\nint\n" + _text("9") + b"\x85R"),
    "a call of a result": _pickled(b"cargparse\nNamespace\n)R)R"),
    "a date of nonsense": _pickled(b"cdatetime\ndatetime\n" + HUGE + b"R"),
    "a position before the start": _pickled(b"c_io\nBytesIO\n)R(NJ\xff\xff\xff\xffNtb"),
    "a pickle that is compressed": _zip([("archive/data.pkl", b"\x80\x02N." + b"\0" * 10**7)], zipfile.ZIP_DEFLATED),
    "two records of one name": _zip([("a/data.pkl", b"\x80\x02N."), ("a/data.pkl", b"\x80\x02N.")]),
    "two folders": _zip([("p/data.pkl", b"\x80\x02N."), ("q/data.pkl", b"\x80\x02N.")]),
    "no pickle": _zip([("archive/version", b"3")]),
    "bytes of another machine": _zip([("archive/data.pkl", b"\x80\x02N."), ("archive/byteorder", b"big")]),
    "a number cut short": _pickled(b"G\x00"),
    "nothing": b"",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_archive_is_an_error_of_ours(attack: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as found:
        _load(ATTACKS[attack], tmp_path)
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 2000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2**18  # KiB


def test_records_that_share_bytes_are_refused(tmp_path: Path) -> None:
    data = bytearray(_zip([("a/data.pkl", b"\x80\x02N."), ("a/data/0", b"\x80\x02N.")]))
    second = data.rindex(b"PK\x01\x02")
    data[second + 42 : second + 46] = struct.pack("<I", 0)  # where the first one is
    with pytest.raises(CheckpointError, match="records overlap"):
        _load(bytes(data), tmp_path)


def test_a_load_changes_no_enum_dtype_or_class(tmp_path: Path) -> None:
    def everything() -> list[Any]:
        members = [dict(vars(member)) for kind in (signal.Signals, ModelType, AttnBackend) for member in kind]
        classes = [dict(vars(kind)) for kind in (argparse.Namespace, types.SimpleNamespace, ModelType, enum.Enum)]
        return [members, classes, [np.dtype(code).str for code in "bhilfd"], torch.serialization.get_safe_globals()]

    before = everything()
    for attack in ("a state for a class", "a state for a member", "a state for a dtype"):
        with pytest.raises(CheckpointError):
            _load(ATTACKS[attack], tmp_path)
    for value in VALUES:
        _load(archive(value), tmp_path)
    assert everything() == before
    assert signal.SIGTERM.value == 15


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (b"N.",)


def test_what_asks_for_a_program_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsafeCheckpointError, match=r"FILE asks for _?pickle.loads"):
        _load(archive([_Runs()]), tmp_path)


def test_files_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    for folder, value in (("p", 1.0), ("q", 2.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "z").write_bytes(archive(torch.full((2,), value)))
    size = (tmp_path / "p" / "z").stat().st_size
    with Blobs(tmp_path) as blobs:
        for folder, value in (("p", 1.0), ("q", 2.0)):
            chunk = Chunk((0,), (2,), ByteRange(f"{folder}/z", 0, size))
            assert blobs.load_tensor(chunk, "key", 8).tolist() == [value] * 2


class _Ones(Blobs):
    """Each chunk holds ones."""

    def load_tensor(self, chunk: Chunk, key: str, nbytes: int) -> torch.Tensor:
        return torch.ones(chunk.sizes)


def _read(stored: Index, chunks: list[tuple[Index, Index]], shards: list[ShardedTensor], folder: Path) -> None:
    entry = TensorEntry("float32", 4, stored, tuple(Chunk(at, size, ByteRange("f", 0, 1)) for at, size in chunks))
    index = CheckpointIndex(
        location=Location(root=folder, shards=folder), tensors={"w": entry}, objects={}, unclaimed=()
    )
    assert compare(Split(shards, [], {}), index) == ""
    read_pieces(shards, index, _Ones(folder))


@pytest.mark.parametrize(
    ("chunks", "said"),
    [
        ([], "16 of 16 elements are stored nowhere"),
        ([((0, 0), (4, 2))], "8 of 16 elements are stored nowhere"),
        ([((0, 0), (2, 4)), ((3, 0), (1, 4))], "4 of 16 elements are stored nowhere"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 2))], r"chunks \[4, 2\] at \[0, 0\] and .* overlap"),
        ([((0, 0), (4, 2)), ((0, 0), (4, 2))], "overlap"),
    ],
)
def test_a_tensor_with_a_hole_is_refused_by_name(chunks: Any, said: str, tmp_path: Path) -> None:
    whole, row = torch.zeros(4, 4), torch.zeros(4)
    with pytest.raises(CheckpointError, match=rf"^w \[4, 4\] is not whole: of \[4, 4\] at \[0, 0\], .*{said}"):
        _read((4, 4), chunks, [ShardedTensor.from_rank_offsets("w", whole)], tmp_path)
    assert whole.count_nonzero() == 0
    rows = [ShardedTensor.from_rank_offsets("w", row, (0, n, 4), prepend_axis_num=1) for n in range(4)]
    with pytest.raises(CheckpointError, match="is not whole"):
        _read((4, 4), chunks, rows, tmp_path)


def test_a_hole_where_nobody_reads_is_no_error(tmp_path: Path) -> None:
    half = torch.zeros(2, 4)
    _read((4, 4), [((0, 0), (3, 4))], [ShardedTensor.from_rank_offsets("w", half, (0, 0, 2))], tmp_path)
    assert half.all()


def test_what_another_shape_does_not_have_is_zero(tmp_path: Path) -> None:
    rows = [torch.full((2, 3), 7.0) for _ in range(3)]
    shards = [
        ShardedTensor.from_rank_offsets("w", row, (0, n, 3), allow_shape_mismatch=True) for n, row in enumerate(rows)
    ]
    _read((3, 3), [((0, 0), (3, 3))], shards, tmp_path)
    assert torch.cat(rows).sum(1).tolist() == [3, 3, 3, 0, 0, 0]
    with pytest.raises(CheckpointError, match="3 of 9 elements are stored nowhere"):
        _read((3, 3), [((0, 0), (2, 3))], shards, tmp_path)


@pytest.mark.timeout(20)
def test_shards_that_are_elsewhere_or_too_large_are_refused(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    data = archive(torch.zeros(2))
    (tmp_path / "outside").write_bytes(data)
    (shards / "link").symlink_to("../outside")
    os.mkfifo(shards / "fifo")
    with (shards / "large").open("wb") as file:
        file.truncate(2**40)
    with Blobs(shards) as blobs:
        for name, length, said in (
            ("link", len(data), "a link that leads out"),
            ("fifo", len(data), "not a regular file"),
            ("large", 2**40, "for elements of 8"),
        ):
            with pytest.raises(CheckpointError, match=said):
                blobs.load_tensor(Chunk((0,), (2,), ByteRange(name, 0, length)), "key", 8)
        with pytest.raises(CheckpointError, match="has 1099511627776 bytes|no archive"):
            blobs.load_object(ByteRange("large", 0, 2**40), "key")
