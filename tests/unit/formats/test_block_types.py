"""The block type table agrees with ggml's and names every number it refuses."""

from __future__ import annotations

import gguf
import pytest

from edgedsv4.formats.block_types import (
    BLOCK_TYPES,
    REMOVED_IDS,
    UNSUPPORTED,
    BlockType,
    by_ggml_id,
    ggml_type_problem,
)

# gguf-py still has the size of Q8_1's older layout (two floats instead of two halves).
GGML_SIZES = {
    kind: size
    for kind, size in gguf.GGML_QUANT_SIZES.items()
    if kind is not gguf.GGMLQuantizationType.Q8_1
}


@pytest.mark.parametrize("kind", GGML_SIZES, ids=lambda kind: kind.name)
def test_every_ggml_type_has_ggmls_id_and_sizes(kind: gguf.GGMLQuantizationType) -> None:
    elements, size = GGML_SIZES[kind]
    assert by_ggml_id(int(kind)) == BlockType(kind.name, int(kind), elements, size)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_names_and_ids_lead_to_the_same_type(name: str) -> None:
    block_type = BLOCK_TYPES[name]
    assert block_type.name == name
    assert block_type.ggml_id is None or by_ggml_id(block_type.ggml_id) is block_type


@pytest.mark.parametrize("ggml_id", [4, 5, 31, 32, 33, 36, 37, 38])
def test_removed_ids_are_refused_by_name(ggml_id: int) -> None:
    assert by_ggml_id(ggml_id) is None
    problem = ggml_type_problem(ggml_id)
    assert problem is not None
    assert REMOVED_IDS[ggml_id] in problem


@pytest.mark.parametrize("ggml_id", [43, 99, 2**32 - 1, -1])
def test_unknown_ids_are_refused_by_number(ggml_id: int) -> None:
    assert by_ggml_id(ggml_id) is None
    problem = ggml_type_problem(ggml_id)
    assert problem is not None
    assert str(ggml_id) in problem


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_undecodable_types_say_so(name: str) -> None:
    block_type = BLOCK_TYPES[name]
    assert not block_type.is_decodable
    if block_type.ggml_id is not None:
        problem = ggml_type_problem(block_type.ggml_id)
        assert problem is not None
        assert name in problem


def test_a_usable_type_has_no_problem() -> None:
    assert BLOCK_TYPES["Q4_K"].is_decodable
    assert ggml_type_problem(12) is None


@pytest.mark.parametrize(
    ("name", "n", "expected"),
    [("F32", 3, 12), ("Q4_K", 512, 288), ("FP4_E2M1", 6, 3), ("F6_E2M3", 8, 6), ("MXFP4", 0, 0)],
)
def test_row_bytes_counts_whole_blocks(name: str, n: int, expected: int) -> None:
    assert BLOCK_TYPES[name].row_bytes(n) == expected


@pytest.mark.parametrize(("name", "n"), [("Q4_K", 255), ("FP4_E2M1", 1), ("Q8_0", 33), ("F32", -1)])
def test_row_bytes_refuses_broken_blocks(name: str, n: int) -> None:
    with pytest.raises(ValueError, match=name):
        BLOCK_TYPES[name].row_bytes(n)
