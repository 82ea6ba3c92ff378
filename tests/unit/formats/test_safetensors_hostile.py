"""Damaged and malicious safetensors files: one typed error, at a place, at bounded cost."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from raw_safetensors import entry, raw_file, write_raw

from edgedsv4.errors import FormatError
from edgedsv4.formats import safetensors
from edgedsv4.formats.safetensors import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    read_safetensors,
    read_safetensors_index,
)

GOOD = {"b": entry("F32", [2, 3], 2, 26), "a": entry("U8", [2], 0, 2)}
GOOD_DATA = bytes(26)
U8 = json.dumps(entry("U8", [1], 0, 1)).encode()


def short(value: Any) -> str:
    """A test id that stays readable for long inputs."""
    return ascii(value)[:60]


def refuse(path: Path, match: str | None = None) -> FormatError:
    with pytest.raises(FormatError, match=match) as caught:
        read_safetensors(path)
    assert caught.value.path == path
    return caught.value


@pytest.mark.parametrize("kept", range(len(raw_file(GOOD, GOOD_DATA))))
def test_every_truncation_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw_file(GOOD, GOOD_DATA)[:kept])
    refuse(path)


@pytest.mark.parametrize(
    ("length", "match"),
    [
        (0, "header length"),
        (1, "header length"),
        (MAX_HEADER_BYTES + 1, "header length"),
        (2**63, "header length"),
        (2**64 - 1, "header length"),
        (MAX_HEADER_BYTES, "truncated download"),
        (1000, "truncated download"),
    ],
)
def test_an_impossible_header_length_is_refused(tmp_path: Path, length: int, match: str) -> None:
    path = write_raw(tmp_path / "x.safetensors", GOOD, GOOD_DATA, length=length)
    assert refuse(path, match).offset == 0


@pytest.mark.parametrize("size", [1, 7, 8, 9])
def test_a_file_too_short_for_a_header_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x02\0\0\0\0\0\0\0{"[:size])
    refuse(path, "too short|truncated")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "x.safetensors", "no such file")


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b" {}",
        b'"a"',
        b"\0\0",
        b"{{",
        b'{"a"}',
        b'{"a":}',
        b'{"a":' + U8,
        b'{"a":' + U8 + b",}",
        b"{," + b'"a":' + U8 + b"}",
        b"{a:" + U8 + b"}",
        b'{"a":' + U8 + b'"b":' + U8 + b"}",
        b'{"a":' + U8 + b"}}",
        b'{"a":' + U8 + b"} x",
        b'{"a":' + U8 + b"}\0",
        b'{"a' + U8 + b"}",
        b'{"a\n":' + U8 + b"}",
        b'{"a\\x":' + U8 + b"}",
        b'{"a\xff":' + U8 + b"}",
        b'{"a\\ud800":' + U8 + b"}",
        b'{"a\\u0000":' + U8 + b"}",
        b'{"":' + U8 + b"}",
        b'{"' + b"n" * 513 + b'":' + U8 + b"}",
    ],
    ids=short,
)
def test_a_header_that_is_no_object_of_named_tensors_is_refused(
    tmp_path: Path, header: bytes
) -> None:
    error = refuse(write_raw(tmp_path / "x.safetensors", header, b"x"))
    assert error.offset is not None


@pytest.mark.parametrize(
    "value",
    [
        b"1",
        b"null",
        b"[]",
        b"{}",
        b'"U8"',
        b'{"dtype":"U8","shape":[1]}',
        b'{"dtype":"U8","data_offsets":[0,1]}',
        b'{"shape":[1],"data_offsets":[0,1]}',
        b'{"dtype":"U8","shape":[1],"data_offsets":[0,1],"extra":0}',
        b'{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}',
        b'{"dtype":"U8","shape":[1],"data_offsets":[0,1],"shape":[1]}',
        b'{"dtype":"U8","shape":[1],"data_offsets":[0,NaN]}',
        b'{"dtype":"U8","shape":[1],"data_offsets":[0,Infinity]}',
    ],
    ids=short,
)
def test_an_entry_without_exactly_its_three_members_is_refused(
    tmp_path: Path, value: bytes
) -> None:
    refuse(write_raw(tmp_path / "x.safetensors", b'{"a":' + value + b"}", b"x"))


@pytest.mark.parametrize(
    "dtype", ["F8", "u8", "", "Q4_K", 8, None, ["U8"], "F32\0", "U" * 500], ids=short
)
def test_an_unknown_dtype_is_refused_by_name(tmp_path: Path, dtype: Any) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"tensor.x": entry(dtype, [1], 0, 1)}, b"x")
    assert "tensor.x" in str(refuse(path, "unknown dtype"))


@pytest.mark.parametrize(
    "shape",
    [
        [-1],
        [1.0],
        [True],
        ["1"],
        [None],
        [[1]],
        {"0": 1},
        "1",
        1,
        None,
        [2**63],
        [10**300],
        [2**62, 2],
        [2**32, 2**32],
        [2**62, 2**62, 0],
    ],
    ids=short,
)
def test_an_impossible_shape_is_refused(tmp_path: Path, shape: Any) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"a": entry("U8", shape, 0, 1)}, b"x")
    refuse(path, "shape|overflows|JSON")


@pytest.mark.parametrize(
    "offsets",
    [
        [1, 0],
        [0, 2],
        [-1, 0],
        [0],
        [0, 1, 1],
        [],
        [0, True],
        [0, 1.0],
        ["0", "1"],
        [0, 2**64],
        [2**63, 2**63 + 1],
        None,
        {},
    ],
    ids=short,
)
def test_impossible_offsets_are_refused(tmp_path: Path, offsets: Any) -> None:
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": offsets}}
    refuse(write_raw(tmp_path / "x.safetensors", header, b"x"), "data_offsets|truncated")


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("F32", [2], 7), ("F32", [2], 9), ("F32", [], 0), ("U8", [0], 1), ("BF16", [3, 3], 9)],
)
def test_a_size_that_is_not_dtype_times_shape_is_refused(
    tmp_path: Path, dtype: str, shape: list[int], size: int
) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"a": entry(dtype, shape, 0, size)}, bytes(size))
    refuse(path, "takes")


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [("F4", [3], 2), ("F4", [2, 1], 1), ("F4", [], 1), ("F6_E2M3", [2], 2)],
)
def test_rows_that_end_inside_a_byte_are_refused(
    tmp_path: Path, dtype: str, shape: list[int], size: int
) -> None:
    path = write_raw(tmp_path / "x.safetensors", {"a": entry(dtype, shape, 0, size)}, bytes(size))
    refuse(path, "multiple")


@pytest.mark.parametrize(
    ("ranges", "match"),
    [
        ([(0, 4), (2, 6)], "overlaps"),
        ([(0, 6), (0, 6)], "overlaps"),
        ([(0, 6), (2, 4)], "overlaps"),
        ([(0, 3), (4, 6)], "hole"),
        ([(1, 6)], "hole"),
        ([(0, 5)], "belong to none"),
        ([(3, 6), (0, 2)], "hole"),
        ([(0, 6), (3, 3)], "overlaps"),
        ([], "belong to none"),
    ],
)
def test_bytes_with_two_owners_or_none_are_refused(
    tmp_path: Path, ranges: list[tuple[int, int]], match: str
) -> None:
    header = {f"t{i}": entry("U8", [e - b], b, e) for i, (b, e) in enumerate(ranges)}
    error = refuse(write_raw(tmp_path / "x.safetensors", header, bytes(6)), match)
    assert error.offset is not None


def test_a_name_twice_is_refused(tmp_path: Path) -> None:
    header = b'{"a":' + U8 + b',"a":' + U8 + b"}"
    refuse(write_raw(tmp_path / "x.safetensors", header, b"x"), "'a' appears twice")


def test_a_name_twice_in_other_spelling_is_refused(tmp_path: Path) -> None:
    header = b'{"a":' + U8 + b',"\\u0061":' + U8 + b"}"
    refuse(write_raw(tmp_path / "x.safetensors", header, b"x"), "'a' appears twice")


@pytest.mark.parametrize(
    "metadata",
    [b"1", b"[]", b'{"a":1}', b'{"a":null}', b'{"a":{}}', b'{"a":"x","a":"y"}', b'{"a":"\\ud800"}'],
    ids=short,
)
def test_metadata_other_than_unique_strings_is_refused(tmp_path: Path, metadata: bytes) -> None:
    header = b'{"__metadata__":' + metadata + b',"a":' + U8 + b"}"
    refuse(write_raw(tmp_path / "x.safetensors", header, b"x"))


def test_metadata_twice_is_refused(tmp_path: Path) -> None:
    header = b'{"__metadata__":{},"__metadata__":{},"a":' + U8 + b"}"
    refuse(write_raw(tmp_path / "x.safetensors", header, b"x"), "__metadata__ appears twice")


def test_the_error_names_the_tensor_and_the_byte(tmp_path: Path) -> None:
    header = b'{"a":' + U8 + b',"b.weight":' + json.dumps(entry("F33", [1], 0, 1)).encode() + b"}"
    path = write_raw(tmp_path / "x.safetensors", header, b"x")
    error = refuse(path, "F33")
    assert "b.weight" in str(error)
    assert error.offset == path.read_bytes().index(b'{"dtype": "F33"')


BOMBS = {
    "arrays in a shape": b'{"a":{"dtype":"U8","shape":' + b"[" * 300_000,
    "objects": b'{"a":' * 300_000,
    "many small arrays": b'{"a":{"dtype":"U8","shape":[' + b"[]," * 300_000 + b"[]]}}",
    "one long number": b'{"a":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b"]}}",
    "one long name": b'{"' + b"n" * 1_000_000 + b'":1}',
    "one long dtype": b'{"a":{"dtype":"' + b"U" * 1_000_000 + b'"}}',
    "backslashes": b'{"' + b"\\" * 1_000_001,
    "metadata of nested objects": b'{"__metadata__":' + b'{"a":' * 300_000,
    "large metadata": b'{"__metadata__":{"a":"' + b"x" * 9_000_000 + b'"}}',
    "spaces": b"{" + b" " * 1_000_000,
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_json_bombs_cost_no_memory(tmp_path: Path, bomb: bytes) -> None:
    path = write_raw(tmp_path / "x.safetensors", bomb)
    tracemalloc.start()
    try:
        refuse(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(bomb) + (1 << 20)


def test_more_tensors_than_the_file_can_pay_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "FREE_RECORDS", 10)
    header = {f"t{i}": entry("U8", [0], 0, 0) for i in range(40)}
    refuse(write_raw(tmp_path / "x.safetensors", header), "more than")


def test_a_large_legal_header_costs_little_more_than_its_records(tmp_path: Path) -> None:
    header = {f"layers.{i}.weight": entry("U8", [1, 1], i, i + 1) for i in range(20_000)}
    path = write_raw(tmp_path / "x.safetensors", header, bytes(20_000))
    tracemalloc.start()
    try:
        with read_safetensors(path) as file:
            assert len(file.tensors) == 20_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000 * safetensors.RECORD_BYTES * 1.5


A = "model-00001-of-00002.safetensors"
B = "model-00002-of-00002.safetensors"


def shards(directory: Path, index: Any) -> Path:
    write_raw(directory / A, {"a": entry("U8", [1], 0, 1)}, b"a")
    write_raw(directory / B, {"b": entry("U8", [1], 0, 1)}, b"b")
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    (directory / INDEX_NAME).write_bytes(text)
    return directory


def refuse_directory(directory: Path, match: str | None = None) -> FormatError:
    with pytest.raises(FormatError, match=match) as caught:
        read_safetensors_index(directory)
    return caught.value


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "/" + A,
        "../" + A,
        "..",
        ".",
        "",
        "./" + A,
        "sub/" + A,
        "sub\\" + A,
        "..\\" + A,
        A + "/",
        A + "\0",
        "x" * 300,
        ".hidden.safetensors",
    ],
    ids=short,
)
def test_an_index_naming_a_file_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    shards(tmp_path, {"weight_map": {"a": A, "b": name}})
    refuse_directory(tmp_path, "same directory|more than 255")


def test_missing_shards_are_all_named_at_once(tmp_path: Path) -> None:
    placed = {"a": A, "b": B, "c": "gone-1.safetensors", "d": "gone-2.safetensors"}
    shards(tmp_path, {"weight_map": placed})
    error = refuse_directory(tmp_path, "gone-1.*\n.*gone-2")
    assert len(error.problems) == 2


def test_a_shard_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    shards(tmp_path, {"weight_map": {"a": A, "b": "dir.safetensors"}})
    (tmp_path / "dir.safetensors").mkdir()
    refuse_directory(tmp_path, "dir.safetensors")


def test_tensors_that_are_not_where_the_index_says_are_all_named(tmp_path: Path) -> None:
    shards(tmp_path, {"weight_map": {"a": B, "b": B, "c": A}})
    error = refuse_directory(tmp_path, "not where it says")
    assert len(error.problems) == 2
    assert "'c' is not in" in str(error)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shards(tmp_path, {"weight_map": {"a": A, "b": B}})
    write_raw(tmp_path / B, {"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 1, 2)}, b"ab")
    refuse_directory(tmp_path, f"'a' is in both {A} and {B}")


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    shards(tmp_path, b"")
    (tmp_path / INDEX_NAME).unlink()
    write_raw(tmp_path / "model.safetensors", {"a": entry("U8", [1], 0, 1)}, b"a")
    refuse_directory(tmp_path, "'a' is in both")


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"{",
        b'{"weight_map":{}}',
        b'{"weight_map":[]}',
        b'{"weight_map":null}',
        b'{"weight_map":{"a":1}}',
        b'{"weight_map":{"a":["model-00001-of-00002.safetensors"]}}',
        b'{"weight_map":{"a":"%s","a":"%s"}}' % (A.encode(), B.encode()),
        b'{"weight_map":{"a":"%s"},"weight_map":{"a":"%s"}}' % (A.encode(), A.encode()),
        b'{"weight_map":{"a":"%s"}} {}' % A.encode(),
        b'{"metadata":{"x":NaN},"weight_map":{"a":"%s"}}' % A.encode(),
        b'{"metadata":' + b"[" * 100_000,
        b'{"metadata":"' + b"x" * 100_000 + b'","weight_map":{"a":"%s"}}' % A.encode(),
        b'{"weight_map":{"a\xff":"%s"}}' % A.encode(),
    ],
    ids=short,
)
def test_an_index_that_is_no_weight_map_is_refused(tmp_path: Path, index: bytes) -> None:
    refuse_directory(shards(tmp_path, index))


def test_an_index_with_too_many_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "MAX_INDEX_NAMES", 3)
    shards(tmp_path, {"weight_map": {str(i): A for i in range(4)}})
    refuse_directory(tmp_path, "more than 3 tensors")


def test_shards_with_more_tensors_than_they_can_pay_for_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "FREE_RECORDS", 20)
    for number in range(4):
        header = {f"{number}.{i}": entry("U8", [0], 0, 0) for i in range(15)}
        write_raw(tmp_path / f"{number}.safetensors", header)
    refuse_directory(tmp_path, "more than")


def test_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).symlink_to(tmp_path / "gone")
    refuse_directory(tmp_path, "no such file")


@pytest.mark.parametrize("hidden", [True, False])
def test_a_directory_without_weights_is_refused(tmp_path: Path, hidden: bool) -> None:
    if hidden:
        (tmp_path / ".part.safetensors").write_bytes(b"x")
    refuse_directory(tmp_path, "no safetensors file")


def test_files_are_closed_when_a_later_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards(tmp_path, {"weight_map": {"a": A, "b": B}})
    (tmp_path / B).write_bytes(b"broken")
    closed: list[Path] = []
    real = safetensors.MappedFile.close

    def spy(file: safetensors.MappedFile) -> None:
        closed.append(file.path)
        real(file)

    monkeypatch.setattr(safetensors.MappedFile, "close", spy)
    refuse_directory(tmp_path)
    assert tmp_path / A in closed
