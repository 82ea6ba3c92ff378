"""Broken GGUF tensor tables: one typed error with place, expectation and finding."""

import re
from pathlib import Path

import gguf_bytes as gb
import pytest
from gguf_refusal import INVALID_UTF8, SECOND, U64_MAX, check, refusal, with_tensors


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
