"""What a well-formed safetensors file or checkpoint directory gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from raw_safetensors import entry, write_raw

from edgedsv4.errors import FormatError
from edgedsv4.formats.safetensors import (
    DTYPES,
    INDEX_NAME,
    read_safetensors,
    read_safetensors_index,
)

TWO = {"b": entry("F32", [2, 3], 2, 26), "a": entry("U8", [2], 0, 2)}
TWO_DATA = bytes(range(26))


def test_names_shapes_types_and_ranges_are_those_of_the_header(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", TWO, TWO_DATA)
    with read_safetensors(path) as file:
        b = file.tensors["b"]
        assert list(file.tensors) == ["b", "a"]
        assert (b.name, b.shape, b.block_type.name, b.nbytes) == ("b", (2, 3), "F32", 24)
        assert b.offset == path.stat().st_size - 24
        assert b.file is file.files[0]


def test_tensor_bytes_come_from_the_mapping(tmp_path: Path) -> None:
    with read_safetensors(write_raw(tmp_path / "x.safetensors", TWO, TWO_DATA)) as file:
        data = file.tensors["b"].data()
        assert data.tobytes() == TWO_DATA[2:]
        assert not data.flags.writeable
        assert not data.flags.owndata


@pytest.mark.parametrize(
    ("dtype", "name", "shape", "size"),
    [
        ("BOOL", "BOOL", [3], 3),
        ("U8", "U8", [3], 3),
        ("I8", "I8", [3], 3),
        ("U16", "U16", [3], 6),
        ("I16", "I16", [3], 6),
        ("F16", "F16", [3], 6),
        ("BF16", "BF16", [3], 6),
        ("U32", "U32", [3], 12),
        ("I32", "I32", [3], 12),
        ("F32", "F32", [3], 12),
        ("U64", "U64", [3], 24),
        ("I64", "I64", [3], 24),
        ("F64", "F64", [3], 24),
        ("C64", "C64", [3], 24),
        ("F8_E4M3", "FP8_E4M3", [3], 3),
        ("F8_E5M2", "FP8_E5M2", [3], 3),
        ("F8_E8M0", "E8M0", [3], 3),
        ("F8_E4M3FNUZ", "FP8_E4M3FNUZ", [3], 3),
        ("F8_E5M2FNUZ", "FP8_E5M2FNUZ", [3], 3),
        ("F4", "F4", [3, 4], 6),
        ("F6_E2M3", "F6_E2M3", [3, 4], 9),
        ("F6_E3M2", "F6_E3M2", [3, 4], 9),
    ],
)
def test_every_dtype_has_its_type_and_size(
    tmp_path: Path, dtype: str, name: str, shape: list[int], size: int
) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"t": entry(dtype, shape, 0, size)}, bytes(size))
    with read_safetensors(path) as file:
        assert file.tensors["t"].block_type.name == name
        assert file.tensors["t"].nbytes == size


def test_the_dtype_list_is_complete() -> None:
    assert len(DTYPES) == 22


def test_metadata_strings_are_kept(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt", "note": "ü 漢 \n"}, "a": entry("U8", [1], 0, 1)}
    with read_safetensors(write_raw(tmp_path / "x.safetensors", header, b"x")) as file:
        assert file.metadata == {"format": "pt", "note": "ü 漢 \n"}
        assert list(file.tensors) == ["a"]


@pytest.mark.parametrize("shape", [[], [0], [0, 5], [2**40, 0]])
def test_scalars_and_empty_tensors_are_tensors(tmp_path: Path, shape: list[int]) -> None:
    size = 0 if shape else 4
    path = write_raw(tmp_path / "x.safetensors", {"t": entry("F32", shape, 0, size)}, bytes(size))
    with read_safetensors(path) as file:
        assert file.tensors["t"].shape == tuple(shape)
        assert file.tensors["t"].data().size == size


def test_empty_tensors_may_share_an_offset(tmp_path: Path) -> None:
    header = {
        "x": entry("F32", [0], 2, 2),
        "a": entry("U8", [2], 0, 2),
        "b": entry("U8", [1], 2, 3),
        "y": entry("U8", [0], 3, 3),
        "z": entry("U8", [0], 0, 0),
    }
    with read_safetensors(write_raw(tmp_path / "x.safetensors", header, b"abc")) as file:
        assert {n: r.data().tobytes() for n, r in file.tensors.items()} == {
            "x": b"", "a": b"ab", "b": b"c", "y": b"", "z": b"",
        }  # fmt: skip


def test_a_file_may_hold_no_tensor(tmp_path: Path) -> None:
    with read_safetensors(write_raw(tmp_path / "x.safetensors", b"{}")) as file:
        assert dict(file.tensors) == {}


@pytest.mark.parametrize("padding", [b"", b" ", b"   ", b" " * 100, b"\n\t "])
def test_headers_of_any_alignment_are_read(tmp_path: Path, padding: bytes) -> None:
    header = json.dumps({"a": entry("F32", [1], 0, 4)}).encode() + padding
    with read_safetensors(write_raw(tmp_path / "x.safetensors", header, b"\0\0\x80?")) as file:
        assert file.tensors["a"].data().tobytes() == b"\0\0\x80?"


def test_names_may_be_any_text(tmp_path: Path) -> None:
    header = b'{"a\\"\\u00e9\\ud83d\\ude00{}[]:,":' + json.dumps(entry("U8", [1], 0, 1)).encode()
    with read_safetensors(write_raw(tmp_path / "x.safetensors", header + b"}", b"x")) as file:
        assert list(file.tensors) == ['a"é😀{}[]:,']


def make_shards(directory: Path, placed: dict[str, str] | None) -> Path:
    for number, name in enumerate(("a", "b"), start=1):
        header = {name: entry("U8", [2], 0, 2), "__metadata__": {"n": str(number)}}
        write_raw(directory / f"model-0000{number}-of-00002.safetensors", header, name.encode() * 2)
    if placed is not None:
        index = {"metadata": {"total_size": 4, "x": [1.5, None]}, "weight_map": placed}
        (directory / INDEX_NAME).write_text(json.dumps(index))
    return directory


SHARDS = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize("placed", [SHARDS, None], ids=["with index", "without index"])
def test_shards_are_merged(tmp_path: Path, placed: dict[str, str] | None) -> None:
    with read_safetensors_index(make_shards(tmp_path, placed)) as files:
        assert {n: r.data().tobytes() for n, r in files.tensors.items()} == {"a": b"aa", "b": b"bb"}
        assert [file.path.name for file in files.files] == sorted(SHARDS.values())
        assert files.metadata == {"n": "1"}
        assert files.warnings == ()


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", TWO, TWO_DATA)
    with read_safetensors_index(tmp_path) as files:
        assert set(files.tensors) == {"a", "b"}


def test_a_shard_may_be_a_link(tmp_path: Path) -> None:
    store, directory = tmp_path / "blobs", tmp_path / "snapshot"
    store.mkdir()
    directory.mkdir()
    make_shards(directory, SHARDS)
    shard = directory / SHARDS["a"]
    shard.rename(store / "0123abcd")
    shard.symlink_to(store / "0123abcd")
    with read_safetensors_index(directory) as files:
        assert set(files.tensors) == {"a", "b"}


def test_tensors_that_the_index_leaves_out_are_dropped_with_a_warning(tmp_path: Path) -> None:
    make_shards(tmp_path, {"b": SHARDS["b"]})
    header = {"b": entry("U8", [1], 0, 1), "spare": entry("U8", [1], 1, 2)}
    write_raw(tmp_path / SHARDS["b"], header, b"bs")
    with read_safetensors_index(tmp_path) as files:
        assert set(files.tensors) == {"b"}
        assert "'spare'" in files.warnings[0]


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    make_shards(tmp_path, SHARDS)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not a safetensors file")
    with read_safetensors_index(tmp_path) as files:
        assert set(files.tensors) == {"a", "b"}


def test_a_changed_file_is_noticed_when_its_bytes_are_asked_for(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", TWO, TWO_DATA)
    with read_safetensors(path) as file:
        with path.open("ab") as grown:
            grown.write(b"x")
        with pytest.raises(FormatError, match="changed while open"):
            file.tensors["a"].data()


def test_views_outlive_the_file(tmp_path: Path) -> None:
    file = read_safetensors(write_raw(tmp_path / "x.safetensors", TWO, TWO_DATA))
    data = file.tensors["a"].data()
    file.close()
    np.testing.assert_array_equal(data, [0, 1])
