"""Broken GGUF files, each wrong in one place: one typed error with place, expectation and
finding."""

import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf_bytes as gb
import pytest

from edgedsv4.errors import FormatError
from edgedsv4.formats.gguf import read_gguf

ROOT = Path(__file__).resolve().parents[3]
SMALL = gb.small().to_bytes()
SMALL_HEADER_BYTES = len(gb.small().header())
U64_MAX = (1 << 64) - 1


def refusal(path: Path, content: bytes | gb.Gguf) -> FormatError:
    """The error that reading `content` raises; any other exception fails the test."""
    path = path / "model.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.to_bytes())
    with pytest.raises(FormatError) as caught:
        read_gguf(path)
    assert caught.value.path == path
    assert str(path) in str(caught.value)
    return caught.value


def check(path: Path, content: bytes | gb.Gguf, message: str, offset: int | None) -> None:
    error = refusal(path, content)
    assert re.search(message, str(error)), error
    assert error.offset == offset


def with_pair(*pairs: bytes) -> gb.Gguf:
    return gb.Gguf(pairs=[gb.ARCHITECTURE, *pairs])


def with_tensors(*tensors: bytes, data: int = 64) -> gb.Gguf:
    return gb.Gguf(tensors=list(tensors), data=bytes(data))


# Where the second key begins, and (without a second key) the first tensor.
SECOND = 24 + len(gb.ARCHITECTURE)


# --- the first 24 bytes -------------------------------------------------------------------------


def test_empty_file(tmp_path: Path) -> None:
    check(tmp_path, b"", "empty", None)


@pytest.mark.parametrize("sixteenth", range(16))
def test_every_truncation(tmp_path: Path, sixteenth: int) -> None:
    """Every length from 1 to one byte less than the whole, in sixteen tests."""
    for length in range(max(1, 4 * sixteenth), len(SMALL), 64):
        for cut in range(length, min(length + 4, len(SMALL))):
            error = refusal(tmp_path, SMALL[:cut])
            assert cut < 8 or "truncated download?" in str(error), cut


def test_truncated_data_say_how_much_is_there(tmp_path: Path) -> None:
    check(
        tmp_path,
        SMALL[:-1],
        rf"{len(SMALL) - 1:,} of {len(SMALL):,} bytes present: truncated download\?",
        SMALL_HEADER_BYTES - len(gb.small().tensors[2]),
    )


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        pytest.param(b"GGUX" + SMALL[4:], "expected b'GGUF'", id="one_letter"),
        pytest.param(b"gguf" + SMALL[4:], "expected b'GGUF'", id="lower_case"),
        pytest.param(b"\0" * 64, "expected b'GGUF'", id="zeros"),
        pytest.param(b"FUGG" + SMALL[4:], "big-endian", id="reversed"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull", id="lfs"),
        pytest.param(b"<!doctype html><html>", "web page", id="web_page"),
        pytest.param(b"PK\x03\x04" + bytes(60), "zip", id="zip"),
        pytest.param(b"lmgg" + bytes(60), "old ggml file", id="ggml"),
        pytest.param(b"\x80\0\0\0\0\0\0\0{}", "expected b'GGUF'", id="safetensors"),
    ],
)
def test_wrong_magic(tmp_path: Path, content: bytes, hint: str) -> None:
    check(tmp_path, content, hint, 0)


@pytest.mark.parametrize("version", [2, 3])
def test_big_endian_file(tmp_path: Path, version: int) -> None:
    made = gb.small()
    made.version = int.from_bytes(version.to_bytes(4, "big"), "little")
    check(tmp_path, made, "big-endian", 4)


@pytest.mark.parametrize("version", [0, 1, 4, (1 << 32) - 1])
def test_unsupported_version(tmp_path: Path, version: int) -> None:
    made = gb.small()
    made.version = version
    check(tmp_path, made, f"GGUF version {version:,}, expected 2 or 3", 4)


HUGE_COUNTS = [1 << 63, U64_MAX, 1 << 32, len(SMALL)]


@pytest.mark.parametrize("count", HUGE_COUNTS)
def test_tensor_count_that_cannot_be_there(tmp_path: Path, count: int) -> None:
    made = gb.small()
    made.tensor_count = count
    check(tmp_path, made, f"tensor count is {count:,}", 8)


@pytest.mark.parametrize("count", HUGE_COUNTS)
def test_key_count_that_cannot_be_there(tmp_path: Path, count: int) -> None:
    made = gb.small()
    made.pair_count = count
    check(tmp_path, made, f"key count is {count:,}", 16)


def test_tensor_count_one_too_many(tmp_path: Path) -> None:
    made = gb.small()
    made.tensor_count = 4
    refusal(tmp_path, made)


def test_key_count_one_too_many(tmp_path: Path) -> None:
    made = gb.small()
    made.pair_count = len(made.pairs) + 1
    refusal(tmp_path, made)


def test_key_count_one_too_few(tmp_path: Path) -> None:
    made = gb.small()
    made.pair_count = len(made.pairs) - 1
    refusal(tmp_path, made)


# --- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1000, 65535])
def test_key_length_past_the_end(tmp_path: Path, length: int) -> None:
    made = with_pair(gb.u64(length) + b"key" + bytes(20))
    check(tmp_path, made, "are left in the file", SECOND + 8)


@pytest.mark.parametrize("length", [65536, 1 << 32, 1 << 63, U64_MAX])
def test_key_longer_than_allowed(tmp_path: Path, length: int) -> None:
    made = with_pair(gb.u64(length) + b"key" + bytes(20))
    check(tmp_path, made, "expected 1..65,535", SECOND)


def test_empty_key(tmp_path: Path) -> None:
    check(tmp_path, with_pair(gb.pair("", gb.U8, 1)), "0 bytes long", SECOND)


def test_key_with_nul(tmp_path: Path) -> None:
    check(tmp_path, with_pair(gb.pair("a\0b", gb.U8, 1)), "contains a NUL", SECOND)


INVALID_UTF8 = [
    pytest.param(b"ab\xff", 2, id="stray_byte"),
    pytest.param(b"a\xc3", 1, id="cut_character"),
    pytest.param(b"\xc0\x80", 0, id="overlong_nul"),
    pytest.param(b"x\xed\xa0\x80", 1, id="surrogate"),
    pytest.param(b"\xf4\x90\x80\x80", 0, id="past_unicode"),
]


@pytest.mark.parametrize(("raw", "at"), INVALID_UTF8)
def test_key_with_invalid_utf8(tmp_path: Path, raw: bytes, at: int) -> None:
    check(tmp_path, with_pair(gb.pair(raw, gb.U8, 1)), "not valid UTF-8", SECOND + 8 + at)


def test_long_key_is_shortened_in_the_message(tmp_path: Path) -> None:
    error = refusal(tmp_path, with_pair(gb.pair("k" * 60_000, 99, b"")))
    assert len(str(error)) < 500 + len(str(tmp_path))


def test_duplicate_key(tmp_path: Path) -> None:
    made = with_pair(gb.pair("a", gb.U8, 1), gb.pair("a", gb.STRING, "x"))
    check(tmp_path, made, "key 'a' occurs twice", SECOND + 14)


# --- values -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [13, 255, 1 << 31, (1 << 32) - 1])
def test_unknown_value_type(tmp_path: Path, kind: int) -> None:
    made = with_pair(gb.pair("a", kind, b"\0" * 8))
    check(tmp_path, made, rf"type of key 'a' is {kind}, expected 0\.\.12", SECOND + 9)


@pytest.mark.parametrize("kind", [13, 255, (1 << 32) - 1])
def test_invalid_element_type(tmp_path: Path, kind: int) -> None:
    made = with_pair(gb.pair("a", gb.ARRAY, gb.array(kind, [b"\0"])))
    check(tmp_path, made, f"element type of key 'a' is {kind}", SECOND + 13)


def nested(depth: int) -> bytes:
    payload = gb.array(gb.U8, [b"\1"])
    for _ in range(depth - 1):
        payload = gb.array(gb.ARRAY, [payload])
    return payload


def test_arrays_nested_4_deep_are_allowed(tmp_path: Path) -> None:
    path = with_pair(gb.pair("a", gb.ARRAY, nested(4))).write(tmp_path / "a.gguf")
    with read_gguf(path) as opened:
        assert opened.metadata["a"][0][0][0].tolist() == [1]


@pytest.mark.parametrize("depth", [5, 6, 1000])
def test_arrays_nested_deeper_than_4(tmp_path: Path, depth: int) -> None:
    made = with_pair(gb.pair("a", gb.ARRAY, nested(depth)))
    check(tmp_path, made, "deeper than 4", SECOND + 13 + 4 * 12)


@pytest.mark.parametrize("kind", [k for k in range(13) if k != gb.ARRAY])
@pytest.mark.parametrize("count", [1 << 61, 1 << 63, U64_MAX, U64_MAX // 8 + 2, 1 << 40, 200])
def test_array_count_past_the_end(tmp_path: Path, kind: int, count: int) -> None:
    made = with_pair(gb.pair("a", gb.ARRAY, gb.array(kind, [b"\0" * 16], count=count)))
    check(tmp_path, made, f"length of key 'a' is {count:,}", SECOND + 17)


def test_count_of_nested_arrays_past_the_end(tmp_path: Path) -> None:
    made = with_pair(gb.pair("a", gb.ARRAY, gb.array(gb.ARRAY, [], count=U64_MAX)))
    check(tmp_path, made, "length of key 'a'", SECOND + 17)


@pytest.mark.parametrize("length", [U64_MAX, 1 << 63, 1 << 32, 1000])
def test_string_longer_than_the_file(tmp_path: Path, length: int) -> None:
    made = with_pair(gb.pair("a", gb.STRING, b"")[:-8] + gb.u64(length))
    check(tmp_path, made, f"needs {length:,} bytes", SECOND + 21)


@pytest.mark.parametrize("length", [U64_MAX, 1 << 63, 1 << 32, 1000])
def test_string_in_an_array_longer_than_the_file(tmp_path: Path, length: int) -> None:
    strings = [gb.string("ok"), gb.u64(length)]
    made = with_pair(gb.pair("a", gb.ARRAY, gb.array(gb.STRING, strings)))
    check(tmp_path, made, rf"key 'a'\[1\] needs {length:,} bytes", SECOND + 43)


def test_file_that_ends_in_an_array_of_strings(tmp_path: Path) -> None:
    strings = [gb.string("0123456789abcdef"), b"\1\0\0"]
    header = with_pair(gb.pair("a", gb.ARRAY, gb.array(gb.STRING, strings))).header()
    check(tmp_path, header, r"ends inside key 'a'\[1\]", len(header) - 3)


@pytest.mark.parametrize(("raw", "at"), INVALID_UTF8)
def test_string_with_invalid_utf8(tmp_path: Path, raw: bytes, at: int) -> None:
    made = with_pair(gb.pair("a", gb.STRING, raw))
    check(tmp_path, made, "not valid UTF-8", SECOND + 21 + at)


@pytest.mark.parametrize(("raw", "at"), INVALID_UTF8)
def test_string_in_an_array_with_invalid_utf8(tmp_path: Path, raw: bytes, at: int) -> None:
    strings = [gb.string("ok"), gb.string(raw)]
    made = with_pair(gb.pair("a", gb.ARRAY, gb.array(gb.STRING, strings)))
    check(tmp_path, made, r"key 'a'\[1\] is not valid UTF-8", SECOND + 43 + at)


@pytest.mark.parametrize("byte", [2, 0x80, 0xFF])
def test_bool_other_than_0_or_1(tmp_path: Path, byte: int) -> None:
    made = with_pair(gb.pair("a", gb.BOOL, bytes([byte])))
    check(tmp_path, made, f"is {byte}, a bool must be 0 or 1", SECOND + 13)


def test_bool_in_an_array_other_than_0_or_1(tmp_path: Path) -> None:
    made = with_pair(gb.pair("a", gb.ARRAY, gb.array(gb.BOOL, [b"\1\0\2"], count=3)))
    check(tmp_path, made, r"\[2\] is 2, a bool must be 0 or 1", SECOND + 13 + 12 + 2)


# --- the keys the container itself uses -----------------------------------------------------------


@pytest.mark.parametrize(
    "alignment", [0, 3, 33, 48, (1 << 20) + 1, 1 << 21, 1 << 31, (1 << 32) - 1]
)
def test_illegal_alignment(tmp_path: Path, alignment: int) -> None:
    pair = gb.pair("general.alignment", gb.U32, alignment)
    check(tmp_path, with_pair(pair), f"alignment is {alignment}", SECOND + len(pair))


@pytest.mark.parametrize("kind", [k for k in range(13) if k not in (gb.U32, gb.ARRAY)])
def test_alignment_of_the_wrong_type(tmp_path: Path, kind: int) -> None:
    value = "32" if kind == gb.STRING else 1
    pair = gb.pair("general.alignment", kind, value)
    check(
        tmp_path, with_pair(pair), "general.alignment is a .*expected one U32", SECOND + len(pair)
    )


def test_alignment_as_an_array(tmp_path: Path) -> None:
    pair = gb.pair("general.alignment", gb.ARRAY, gb.array(gb.U32, [gb.u32(32)]))
    check(tmp_path, with_pair(pair), "array of U32, expected one U32", SECOND + len(pair))


def test_missing_architecture(tmp_path: Path) -> None:
    check(tmp_path, gb.Gguf(pairs=[gb.pair("a", gb.U8, 1)]), "architecture is missing", None)


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(gb.pair("general.architecture", gb.U32, 4), id="number"),
        pytest.param(
            gb.pair("general.architecture", gb.ARRAY, gb.array(gb.STRING, [gb.string("a")])),
            id="array",
        ),
    ],
)
def test_architecture_of_the_wrong_type(tmp_path: Path, pair: bytes) -> None:
    check(tmp_path, gb.Gguf(pairs=[pair]), "expected one STRING", None)


# --- the tensor table -----------------------------------------------------------------------------


def test_empty_tensor_name(tmp_path: Path) -> None:
    check(tmp_path, with_tensors(gb.tensor("", (4,))), "0 bytes long, expected 1..64", SECOND)


@pytest.mark.parametrize("length", [65, 200])
def test_tensor_name_too_long(tmp_path: Path, length: int) -> None:
    made = with_tensors(gb.tensor("n" * length, (4,)))
    check(tmp_path, made, f"{length} bytes long, expected 1..64", SECOND)


@pytest.mark.parametrize("length", [1 << 32, U64_MAX])
def test_tensor_name_longer_than_the_file(tmp_path: Path, length: int) -> None:
    made = with_tensors(gb.u64(length) + bytes(60))
    check(tmp_path, made, "expected 1..64", SECOND)


def test_duplicate_tensor_name(tmp_path: Path) -> None:
    entry = gb.tensor("a", (4,))
    check(tmp_path, with_tensors(entry, entry), "tensor 'a' occurs twice", SECOND + len(entry))


def test_tensor_name_with_nul(tmp_path: Path) -> None:
    check(tmp_path, with_tensors(gb.tensor("a\0", (4,))), "contains a NUL", SECOND)


@pytest.mark.parametrize(("raw", "at"), INVALID_UTF8)
def test_tensor_name_with_invalid_utf8(tmp_path: Path, raw: bytes, at: int) -> None:
    made = with_tensors(gb.tensor(raw, (4,)))
    check(tmp_path, made, "not valid UTF-8", SECOND + 8 + at)


@pytest.mark.parametrize("n_dims", [0, 5, 255, (1 << 32) - 1])
def test_number_of_dims(tmp_path: Path, n_dims: int) -> None:
    made = with_tensors(gb.tensor("a", (1, 1, 1, 1, 1), n_dims=n_dims))
    check(tmp_path, made, rf"tensor a has {n_dims:,} dims, expected 1\.\.4", SECOND + 9)


@pytest.mark.parametrize("dim", [0, 1 << 63, U64_MAX])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_illegal_dim(tmp_path: Path, dim: int, place: int) -> None:
    dims = [4] * 4
    dims[place] = dim
    made = with_tensors(gb.tensor("a", dims))
    check(tmp_path, made, f"tensor a has a dim of {dim:,}", SECOND)


@pytest.mark.parametrize(
    "dims",
    [
        (1 << 32, 1 << 31),
        (1 << 32, 1 << 32),
        (1 << 62, 4),
        (1 << 16, 1 << 16, 1 << 16, 1 << 16),
        ((1 << 63) - 1,) * 4,
    ],
)
def test_product_of_dims_overflows(tmp_path: Path, dims: tuple[int, ...]) -> None:
    check(tmp_path, with_tensors(gb.tensor("a", dims)), r"more than 2\^63-1", SECOND)


@pytest.mark.parametrize(
    "dims", [((1 << 63) - 1,), (1 << 61, 2), (1 << 62,)], ids=["one_dim", "two_dims", "times_4"]
)
def test_byte_size_over_64_bits(tmp_path: Path, dims: tuple[int, ...]) -> None:
    check(tmp_path, with_tensors(gb.tensor("a", dims)), "bytes present: truncated", SECOND)


@pytest.mark.parametrize(
    ("kind", "row", "multiple"),
    [(8, 33, 32), (8, 31, 32), (12, 128, 256), (39, 1, 32), (40, 32, 64)],
)
def test_row_that_is_no_multiple_of_the_block(
    tmp_path: Path, kind: int, row: int, multiple: int
) -> None:
    made = with_tensors(gb.tensor("a", (row, 2), kind), data=4096)
    check(tmp_path, made, f"needs a multiple of {multiple}", SECOND)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (4, r"type 4 \(Q4_2\) was removed"),
        (5, r"type 5 \(Q4_3\) was removed"),
        (31, r"type 31 \(Q4_0_4_4\) was removed"),
        (36, r"type 36 \(IQ4_NL_4_4\) was removed"),
        (9, r"type 9 \(Q8_1\) cannot be used"),
        (15, r"type 15 \(Q8_K\) cannot be used"),
        (41, r"type 41 \(Q1_0\) cannot be used"),
        (43, "type 43 is not known"),
        (200, "type 200 is not known"),
        ((1 << 32) - 1, "type 4294967295 is not known"),
    ],
)
def test_type_that_cannot_be_read(tmp_path: Path, kind: int, message: str) -> None:
    made = with_tensors(gb.tensor("a", (256,), kind), data=4096)
    check(tmp_path, made, message, SECOND)


def test_custom_fp8_type_of_a_community_file_gets_advice(tmp_path: Path) -> None:
    made = with_tensors(gb.tensor("blk.0.attn_q_a.weight", (256,), 77), data=4096)
    check(tmp_path, made, r"custom FP8.*take an MXFP4 or Q8_0 file", SECOND)


@pytest.mark.parametrize("offset", [1, 4, 16, 31, 33])
def test_unaligned_offset(tmp_path: Path, offset: int) -> None:
    made = with_tensors(gb.tensor("a", (4,), 0, offset))
    check(tmp_path, made, f"begins at {offset:,}, not a multiple of the alignment 32", SECOND)


@pytest.mark.parametrize("offset", [96, 1 << 32, 1 << 63, U64_MAX - 31])
def test_offset_past_the_end(tmp_path: Path, offset: int) -> None:
    made = with_tensors(gb.tensor("a", (4,), 0, offset))
    check(tmp_path, made, "bytes present: truncated download", SECOND)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((8, 0), (8, 0), id="same_place"),
        pytest.param((32, 0), (4, 96), id="last_bytes"),
        pytest.param((4, 32), (16, 0), id="table_order_reversed"),
        pytest.param((256, 0), (4, 64), id="inside"),
    ],
)
def test_overlapping_tensors(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    entries = [
        gb.tensor(n, (size,), 0, at) for n, (size, at) in zip("ab", (first, second), strict=True)
    ]
    error = refusal(tmp_path, with_tensors(*entries, data=2048))
    assert re.search("tensor [ab] overlaps tensor [ab]", str(error))


def test_small_tensor_inside_a_big_one_behind_others_is_found(tmp_path: Path) -> None:
    entries = [
        gb.tensor("big", (256,), 0, 0),
        gb.tensor("c", (4,), 0, 64),
        gb.tensor("d", (4,), 0, 96),
    ]
    error = refusal(tmp_path, with_tensors(*entries, data=2048))
    assert len(error.problems) == 2
    assert all("overlaps tensor big" in problem for problem in error.problems)


def test_all_faults_of_the_table_are_in_one_error(tmp_path: Path) -> None:
    entries = [gb.tensor(f"t{n}", (4,), 4) for n in range(20)]
    error = refusal(tmp_path, with_tensors(*entries))
    assert len(error.problems) == 20
    assert "tensor t7 " in str(error)
    assert "tensor t8 " not in str(error)
    assert "and 12 more" in str(error)


# --- memory and time
# --------------------------------------------------------------------------------


def filled(kind: int, element: bytes, nbytes: int) -> gb.Gguf:
    payload = gb.array(kind, [element * (nbytes // len(element))], count=nbytes // len(element))
    return with_pair(gb.pair("a", gb.ARRAY, payload))


def long_then_empty_strings() -> gb.Gguf:
    strings = [gb.string("a" * 11_500_000), *[gb.string("")] * 100_000]
    return with_pair(gb.pair("a", gb.ARRAY, gb.array(gb.STRING, strings)))


def many_keys() -> gb.Gguf:
    return with_pair(*[gb.pair(f"{n:x}", gb.U8, 1) for n in range(200_000)])


def many_tensors() -> gb.Gguf:
    return gb.Gguf(tensors=[gb.tensor(f"{n:x}", (1,)) for n in range(80_000)])


MB = 1 << 20
GREEDY = {
    "empty_strings": lambda: filled(gb.STRING, gb.string(""), 8 * MB),
    "short_strings": lambda: filled(gb.STRING, gb.string("ab"), 12 * MB),
    "wide_strings": lambda: filled(gb.STRING, gb.string("a" * 90 + "🌕"), 8 * MB),
    "one_wide_character": lambda: with_pair(gb.pair("a", gb.STRING, "a" * 12 * MB + "🌕")),
    "long_string_then_empty_ones": long_then_empty_strings,
    "empty_arrays": lambda: filled(gb.ARRAY, gb.array(gb.U8, []), 2 * MB),
    "keys": many_keys,
    "tensors": many_tensors,
}


@pytest.mark.parametrize("make", GREEDY.values(), ids=GREEDY)
def test_memory_stays_below_the_file_and_64_mib(
    tmp_path: Path, make: Callable[[], gb.Gguf]
) -> None:
    path = make().write(tmp_path / "a.gguf")
    limit = path.stat().st_size + 64 * MB
    refused = ""
    tracemalloc.start()
    try:
        try:
            read_gguf(path).close()
        except FormatError as error:
            refused = str(error)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit
    assert refused == "" or "more memory than a header may take" in refused


def test_sparse_terabyte_of_strings_is_refused_at_once(tmp_path: Path) -> None:
    body = """
import os, resource, sys
from pathlib import Path
from edgedsv4.errors import FormatError
from edgedsv4.formats.gguf import read_gguf

path = Path(sys.argv[1])
os.truncate(path, 1 << 38)
try:
    read_gguf(path)
except FormatError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 600 << 10, error)
"""
    count = (1 << 38) // 8 - 1000
    made = with_pair(gb.pair("a", gb.ARRAY, gb.array(gb.STRING, [], count=count)))
    path = made.write(tmp_path / "a.gguf")
    done = subprocess.run(
        [sys.executable, "-c", body, str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("True")
    assert "more memory than a header may take" in done.stdout
