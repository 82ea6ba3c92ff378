"""Damaged and hostile packs end in one `FormatError`, whatever their numbers claim."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from pack_files import SmallPack, entry_place, mixed_pack, set_entry, set_header

from edgedsv4.errors import FormatError
from edgedsv4.formats.expert_pack import read_expert_pack
from edgedsv4.formats.expert_pack_header import ENTRY_BYTES, HEADER_BYTES
from edgedsv4.formats.expert_pack_trailer import MAX_TRAILER_BYTES

Damage = Callable[[bytearray], None]
BUDGET = 64 << 20


def refused(tmp_path: Path, content: bytes | bytearray) -> FormatError:
    path = tmp_path / "x.pack"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError) as caught:
            read_expert_pack(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.path == path
    assert str(path) in str(caught.value)
    assert peak < len(content) + BUDGET
    return caught.value


def header(name: str, value: int) -> Damage:
    return lambda content: set_header(content, name, value)


def entry(name: str, number: int, value: int | bytes) -> Damage:
    return lambda content: set_entry(content, name, number, value)


def flipped(name: str, number: int) -> Damage:
    def damage(content: bytearray) -> None:
        content[entry_place(name, number)[0]] ^= 1

    return damage


def swapped(first: int, second: int) -> Damage:
    def damage(content: bytearray) -> None:
        a, b = (HEADER_BYTES + n * ENTRY_BYTES for n in (first, second))
        one, two = content[a : a + ENTRY_BYTES], content[b : b + ENTRY_BYTES]
        content[a : a + ENTRY_BYTES], content[b : b + ENTRY_BYTES] = two, one

    return damage


def copied(source: int, target: int) -> Damage:
    def damage(content: bytearray) -> None:
        a, b = (HEADER_BYTES + n * ENTRY_BYTES for n in (source, target))
        content[b : b + ENTRY_BYTES] = content[a : a + ENTRY_BYTES]

    return damage


def magic(text: bytes) -> Damage:
    return lambda content: content.__setitem__(slice(0, 24), text.ljust(24, b"\0"))


CASES: dict[str, tuple[Damage, str]] = {
    "wrong magic": (magic(b"SGLANG-EXPERTPACK-v3"), "not an expert pack"),
    "magic of version 2 with version 1": (magic(b"EDGEDSV4-XPACK-2"), "version is 1"),
    "magic without its zeros": (magic(b"SGLANG-EXPERTPACK-v1xxxx"), "not an expert pack"),
    "version 0": (header("version", 0), "version is 0"),
    "version 2^32-1": (header("version", (1 << 32) - 1), "version is 4294967295"),
    "header size": (header("header_bytes", 180), "header_bytes is 180, expected 176"),
    "entry size": (header("entry_bytes", 0), "entry_bytes is 0, expected 328"),
    "required flag missing": (header("flags", 1), "flags are 0x1, expected 0x3"),
    "reserved flag": (header("flags", 0x83), "flags 0x80 are not known"),
    "flag of version 2": (header("flags", 7), "flags 0x4 are not known"),
    "index count": (header("index_count", 19), "index_count is 19, expected 18"),
    "index count 2^64-1": (header("index_count", (1 << 64) - 1), "index_count is 18,446,744"),
    "layers 0": (header("num_layers", 0), "num_layers is 0, expected 1..512"),
    "layers 2^32-1": (header("num_layers", (1 << 32) - 1), "num_layers is 4,294,967,295"),
    "experts 0": (header("num_experts", 0), "num_experts is 0, expected 1..4096"),
    "experts 2^32-1": (header("num_experts", (1 << 32) - 1), "num_experts is 4,294,967,295"),
    "top_k 0": (header("top_k", 0), "top_k is 0, expected 1..3"),
    "top_k above experts": (header("top_k", 4), "top_k is 4, expected 1..3"),
    "role count": (header("role_count", 2), "role_count is 2, expected 3"),
    "data_start inside the index": (header("data_start", 512), "inside the index"),
    "data_start unaligned": (header("data_start", 6145), "multiple of the alignment"),
    "data_start past EOF": (header("data_start", 1 << 62), "truncated copy"),
    "alignment 0": (header("alignment", 0), "alignment is 0, expected a power of two"),
    "alignment 3": (header("alignment", 3), "alignment is 3, expected a power of two"),
    "alignment 2^63": (header("alignment", 1 << 63), "multiple of the alignment"),
    "layer out of range": (entry("layer", 4, 2), "layer is 2, not below 2"),
    "expert out of range": (entry("expert", 4, 65535), "expert is 65535, not below 3"),
    "role out of range": (entry("role", 4, 3), "role is 3, not below 3"),
    "rank": (entry("rank", 4, 3), "rank is 3, not 2"),
    "entry missing and another twice": (copied(4, 5), "2 times.*is missing"),
    "entries in another order": (swapped(4, 5), "not in the order"),
    "type unknown": (entry("dtype_id", 0, 999), "type 999"),
    "type removed": (entry("dtype_id", 0, 4), "was removed"),
    "type not MXFP4": (entry("dtype_id", 0, 8), "version 1 holds MXFP4 only"),
    "type differs in a layer": (entry("dtype_id", 3, 8), "differs from that of its layer"),
    "type name": (entry("dtype", 4, b"Q8_0\0"), "dtype is b'Q8_0', expected MXFP4"),
    "quant scheme": (entry("quant_scheme", 4, b"MXFP5"), "quant_scheme is b'MXFP5'"),
    "transform": (entry("transform_id", 4, b"shuffle-v1\0"), "not identity-v1"),
    "block size": (entry("block_size", 4, 16), "block_size is 16, expected 32"),
    "type name without terminator": (entry("dtype", 4, b"M" * 16), "not a text with a NUL"),
    "tensor name without terminator": (entry("tensor_name", 4, b"b" * 80), "with a NUL"),
    "scheme without terminator": (entry("quant_scheme", 4, b"M" * 16), "with a NUL"),
    "transform without terminator": (entry("transform_id", 4, b"i" * 16), "with a NUL"),
    "tensor name empty": (entry("tensor_name", 4, bytes(80)), "with a NUL"),
    "bytes behind the end of a text": (
        entry("tensor_name", 4, b"blk\0blk"),
        "tensor_name is .*not a text with a NUL",
    ),
    "dim 0": (entry("shape", 0, bytes(8)), "expected dims of 1"),
    "dim 2^63": (entry("shape", 0, (1 << 63).to_bytes(8, "little")), "expected dims of 1"),
    "third dim": (entry("shape", 4, (64).to_bytes(8, "little") * 3), "expected \\[64, 32, 0, 0\\]"),
    "dims of another matrix": (entry("shape", 5, (9).to_bytes(8, "little")), "\\[32, 64, 0, 0\\]"),
    "size not dtype x shape": (entry("pack_nbytes", 4, 1000), "pack_nbytes is 1,000, expected"),
    "slice size": (entry("source_slice_nbytes", 4, 0), "source_slice_nbytes is 0, expected"),
    "tensor size": (entry("source_tensor_nbytes", 4, 5), "source_tensor_nbytes is 5, expected"),
    "slice offset": (entry("source_slice_offset", 4, 5), "source_slice_offset is 5, expected"),
    "tensor offset 2^64-1": (
        entry("source_tensor_offset", 4, (1 << 64) - 1),
        "source_tensor_offset is .*not below 2\\^62",
    ),
    "object over the one before it": (entry("pack_offset", 3, 6144), "pack_offset is 6,144"),
    "matrix beyond the stride": (entry("pack_offset", 2, 6144 + 3072), "pack_offset is 9,216"),
    "object past EOF": (entry("pack_offset", 17, 1 << 63), "pack_offset is 9,223,372"),
    "checksum not that of the slice": (flipped("checksum", 4), "checksum differs"),
    "generation 0": (
        lambda content: [set_entry(content, "generation", n, 0) for n in (3, 4, 5)] and None,
        "generation is 0",
    ),
    "generation differs in an object": (flipped("generation", 4), "generation differs"),
}


def test_undamaged_pack_is_read(tmp_path: Path) -> None:
    with read_expert_pack(SmallPack().write(tmp_path / "x.pack")) as pack:
        assert pack.header.data_start == 6144


@pytest.mark.parametrize("name", CASES)
def test_damaged_pack_is_refused(tmp_path: Path, name: str) -> None:
    damage, words = CASES[name]
    content = SmallPack().content()
    damage(content)
    error = refused(tmp_path, content)
    with pytest.raises(FormatError, match=f"(?s){words}"):
        raise error


def test_all_faults_of_the_header_are_listed(tmp_path: Path) -> None:
    content = SmallPack().content()
    for name in ("header_bytes", "role_count", "top_k", "alignment"):
        set_header(content, name, 0)
    error = refused(tmp_path, content)
    assert len(error.problems) == 4


def test_all_faults_of_the_index_are_listed(tmp_path: Path) -> None:
    content = SmallPack().content()
    for name in ("pack_nbytes", "block_size", "source_slice_offset"):
        set_entry(content, name, 4, 1)
    set_entry(content, "generation", 3, 1)
    error = refused(tmp_path, content)
    assert len(error.problems) == 4
    assert all("entry" in problem for problem in error.problems)


@pytest.mark.parametrize("version", [1, 2])
def test_every_truncation_is_refused(tmp_path: Path, version: int) -> None:
    content = SmallPack(version=version).content()
    ends = [*range(1, HEADER_BYTES + 3), *range(HEADER_BYTES + 3, len(content), 97)]
    for end in [*ends, len(content) - 1]:
        path = tmp_path / "cut"
        path.write_bytes(content[:end])
        with pytest.raises(FormatError):
            read_expert_pack(path)


def test_pack_shorter_than_its_last_object_is_told_as_truncated(tmp_path: Path) -> None:
    error = refused(tmp_path, SmallPack().content()[:-1])
    assert error.fault == "truncated"
    assert "the last expert is cut off" in str(error)


def test_empty_file_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, b"").fault == "truncated"


def test_bytes_behind_a_version_1_pack_are_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, SmallPack().content() + b"{}")
    assert "2 bytes behind the last expert" in str(error)


@pytest.mark.parametrize(
    ("name", "entry_number", "value", "words"),
    [
        ("pack_offset", 1, 6144, "pack_offset"),
        ("dtype_id", 0, 0, "differs from that"),
        ("pack_nbytes", 2, 1, "pack_nbytes"),
        ("shape", 0, 100, r"\[100, 256, 0, 0\]"),
    ],
)
def test_damaged_version_2_is_refused(
    tmp_path: Path, name: str, entry_number: int, value: int, words: str
) -> None:
    content = mixed_pack().content()
    data = value.to_bytes(8, "little")[: entry_place(name, 0)[1]]
    set_entry(content, name, entry_number, data)
    error = refused(tmp_path, content)
    with pytest.raises(FormatError, match=words):
        raise error


@pytest.mark.parametrize("flags", [3, 7, 11])
def test_flags_that_contradict_the_sizes_are_refused(tmp_path: Path, flags: int) -> None:
    content = mixed_pack().content()
    set_header(content, "flags", flags)
    assert "by the sizes of the matrices" in str(refused(tmp_path, content))


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    content = SmallPack(version=2, types=[("Q8_0", "Q8_0", "Q8_0")]).content()
    for number in range(9):
        set_entry(content, "dtype_id", number, 10)  # Q2_K has blocks of 256
    assert "needs a multiple of 256" in str(refused(tmp_path, content))


TRAILERS = {
    "not JSON": b"\0",
    "no object": b"[]",
    "nested deep": b"[" * 100_000,
    "another format": b'{"format": "x"}',
    "no table": b'{"format": "edgedsv4-xpack-trailer-1", "expert_freq": 3}',
    "no tokens": b'{"format": "edgedsv4-xpack-trailer-1", "expert_freq": {"counts": []}}',
    "layers missing": b'{"format": "edgedsv4-xpack-trailer-1",'
    b' "expert_freq": {"tokens": 1, "counts": [[1, 2, 3]]}}',
    "experts missing": b'{"format": "edgedsv4-xpack-trailer-1",'
    b' "expert_freq": {"tokens": 1, "counts": [[1, 2, 3], [1]]}}',
    "negative": b'{"format": "edgedsv4-xpack-trailer-1",'
    b' "expert_freq": {"tokens": 1, "counts": [[1, 2, 3], [1, -2, 3]]}}',
    "bool": b'{"format": "edgedsv4-xpack-trailer-1",'
    b' "expert_freq": {"tokens": 1, "counts": [[1, 2, 3], [1, true, 3]]}}',
    "float": b'{"format": "edgedsv4-xpack-trailer-1",'
    b' "expert_freq": {"tokens": 1, "counts": [[1, 2, 3], [1, 1.5, 3]]}}',
    "large": b" " * (MAX_TRAILER_BYTES + 1),
}


@pytest.mark.parametrize("name", TRAILERS)
def test_damaged_trailer_is_refused(tmp_path: Path, name: str) -> None:
    made = mixed_pack()
    made.frequency = None
    error = refused(tmp_path, made.content() + TRAILERS[name])
    assert "last expert" in str(error)


def test_pack_that_was_replaced_while_open_is_noticed(tmp_path: Path) -> None:
    path = SmallPack().write(tmp_path / "x.pack")
    with read_expert_pack(path) as pack:
        path.unlink()
        SmallPack(seed=2).write(path)
        with pytest.raises(FormatError, match="changed while open"):
            pack.file.check_unchanged()


def test_directory_in_place_of_a_pack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="is a directory"):
        read_expert_pack(tmp_path)
