"""Every storage type a model file can name: elements that share a block, and its bytes.

A tensor's size follows from its shape and this table alone, so headers can be checked without
touching tensor data. GGUF names its types by number, safetensors by string; both end in the same
`BlockType`.

Source: the ggml type enumeration and block structs of llama.cpp; the dtype list of the safetensors
format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class BlockType:
    """One storage type."""

    name: str
    """Name as ggml spells it (`Q4_K`), or our own for types only safetensors has (`FP8_E4M3`)."""
    ggml_id: int | None
    """Number in a GGUF tensor table; None for types that GGUF cannot hold."""
    block_elements: int
    """Consecutive elements of a row that are coded together."""
    block_bytes: int
    """Bytes of one block."""

    @property
    def is_decodable(self) -> bool:
        """Whether this library can turn the type into numbers."""
        return self.name not in UNSUPPORTED

    def row_bytes(self, n: int) -> int:
        """Bytes of a row of `n` elements.

        Raises:
            ValueError: if `n` is negative or not a whole number of blocks; check `n %
                block_elements` first.
        """
        blocks, rest = divmod(n, self.block_elements)
        if rest or n < 0:
            raise ValueError(
                f"a {self.name} row must be a multiple of {self.block_elements} elements, found {n}"
            )
        return blocks * self.block_bytes


_GGML_TYPES = (
    BlockType("F32", 0, 1, 4),
    BlockType("F16", 1, 1, 2),
    BlockType("Q4_0", 2, 32, 18),
    BlockType("Q4_1", 3, 32, 20),
    BlockType("Q5_0", 6, 32, 22),
    BlockType("Q5_1", 7, 32, 24),
    BlockType("Q8_0", 8, 32, 34),
    # Two half-precision fields; gguf-py's size table still counts the floats of an older layout.
    BlockType("Q8_1", 9, 32, 36),
    BlockType("Q2_K", 10, 256, 84),
    BlockType("Q3_K", 11, 256, 110),
    BlockType("Q4_K", 12, 256, 144),
    BlockType("Q5_K", 13, 256, 176),
    BlockType("Q6_K", 14, 256, 210),
    BlockType("Q8_K", 15, 256, 292),
    BlockType("IQ2_XXS", 16, 256, 66),
    BlockType("IQ2_XS", 17, 256, 74),
    BlockType("IQ3_XXS", 18, 256, 98),
    BlockType("IQ1_S", 19, 256, 50),
    BlockType("IQ4_NL", 20, 32, 18),
    BlockType("IQ3_S", 21, 256, 110),
    BlockType("IQ2_S", 22, 256, 82),
    BlockType("IQ4_XS", 23, 256, 136),
    BlockType("I8", 24, 1, 1),
    BlockType("I16", 25, 1, 2),
    BlockType("I32", 26, 1, 4),
    BlockType("I64", 27, 1, 8),
    BlockType("F64", 28, 1, 8),
    BlockType("IQ1_M", 29, 256, 56),
    BlockType("BF16", 30, 1, 2),
    BlockType("TQ1_0", 34, 256, 54),
    BlockType("TQ2_0", 35, 256, 66),
    BlockType("MXFP4", 39, 32, 17),
    BlockType("NVFP4", 40, 64, 36),
    BlockType("Q1_0", 41, 128, 18),
    BlockType("Q2_0", 42, 64, 18),
)

_SAFETENSORS_TYPES = (
    BlockType("BOOL", None, 1, 1),
    BlockType("U8", None, 1, 1),
    BlockType("U16", None, 1, 2),
    BlockType("U32", None, 1, 4),
    BlockType("U64", None, 1, 8),
    BlockType("C64", None, 1, 8),
    # OCP 8-bit float, "fn" form: no infinity, 0x7F and 0xFF are NaN. As a weight it needs a
    # block scale.
    BlockType("FP8_E4M3", None, 1, 1),
    BlockType("FP8_E5M2", None, 1, 1),
    BlockType("FP8_E4M3FNUZ", None, 1, 1),
    BlockType("FP8_E5M2FNUZ", None, 1, 1),
    # A power of two: byte b is 2^(b - 127), 0xFF is NaN.
    BlockType("E8M0", None, 1, 1),
    # 4-bit float, two per byte: element 2i in the low nibble. As a weight it needs a scale
    # per 32 elements.
    BlockType("FP4_E2M1", None, 2, 1),
    # safetensors' own dtype of the same packing; the loader decides whether it is an FP4_E2M1
    # weight.
    BlockType("F4", None, 2, 1),
    BlockType("F6_E2M3", None, 4, 3),
    BlockType("F6_E3M2", None, 4, 3),
)

BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {block_type.name: block_type for block_type in (*_GGML_TYPES, *_SAFETENSORS_TYPES)}
)
"""Every known type by name, decodable or not."""

UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "Q8_1": "it only ever holds activations",
        "Q8_K": "it only ever holds activations",
        "Q1_0": "1-bit weights have no decoder here",
        "Q2_0": "2-bit weights of this kind have no decoder here",
        "C64": "complex numbers have no use in this model",
        "FP8_E4M3FNUZ": "this FP8 variant has no decoder here",
        "FP8_E5M2FNUZ": "this FP8 variant has no decoder here",
        "F6_E2M3": "6-bit floats have no decoder here",
        "F6_E3M2": "6-bit floats have no decoder here",
    }
)
"""Types with a known size that are never decoded, and why."""

REMOVED_IDS: Mapping[int, str] = MappingProxyType(
    {
        4: "Q4_2",
        5: "Q4_3",
        31: "Q4_0_4_4",
        32: "Q4_0_4_8",
        33: "Q4_0_8_8",
        36: "IQ4_NL_4_4",
        37: "IQ4_NL_4_8",
        38: "IQ4_NL_8_8",
    }
)
"""Numbers that ggml gave out once and withdrew; their block layout is not known any more."""

_BY_ID = MappingProxyType({t.ggml_id: t for t in _GGML_TYPES})


def by_ggml_id(ggml_id: int) -> BlockType | None:
    """The type behind a number of a GGUF tensor table, or None for removed and unknown numbers."""
    return _BY_ID.get(ggml_id)


def ggml_type_problem(ggml_id: int) -> str | None:
    """Why a tensor of this GGUF type number cannot be read, for a message; None if it can be."""
    block_type = by_ggml_id(ggml_id)
    if block_type is not None:
        reason = UNSUPPORTED.get(block_type.name)
        return (
            None
            if reason is None
            else f"type {ggml_id} ({block_type.name}) cannot be used: {reason}"
        )
    if ggml_id in REMOVED_IDS:
        return (
            f"type {ggml_id} ({REMOVED_IDS[ggml_id]}) was removed from ggml;"
            " convert the model again with a current llama.cpp"
        )
    return (
        f"type {ggml_id} is not known (a type of a private fork?);"
        " use a file with standard types, such as MXFP4 or Q8_0"
    )
