"""Broken GGUF headers and metadata, each wrong in one place: one error with place and finding."""

from pathlib import Path

import gguf_bytes as gb
import pytest
from gguf_refusal import INVALID_UTF8, SECOND, U64_MAX, check, refusal, with_pair

from edgedsv4.formats.gguf import read_gguf

SMALL = gb.small().to_bytes()
SMALL_HEADER_BYTES = len(gb.small().header())


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


@pytest.mark.parametrize(("raw", "at"), INVALID_UTF8)
def test_key_with_invalid_utf8(tmp_path: Path, raw: bytes, at: int) -> None:
    check(tmp_path, with_pair(gb.pair(raw, gb.U8, 1)), "not valid UTF-8", SECOND + 8 + at)


def test_long_key_is_shortened_in_the_message(tmp_path: Path) -> None:
    error = refusal(tmp_path, with_pair(gb.pair("k" * 60_000, 99, b"")))
    assert len(str(error)) < 500 + len(str(tmp_path))


def test_duplicate_key(tmp_path: Path) -> None:
    made = with_pair(gb.pair("a", gb.U8, 1), gb.pair("a", gb.STRING, "x"))
    check(tmp_path, made, "key 'a' occurs twice", SECOND + 14)


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
