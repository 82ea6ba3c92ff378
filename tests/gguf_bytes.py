"""Builds GGUF files byte by byte, valid or broken in exactly one place."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def scalar(kind: int, value: float | str | bytes) -> bytes:
    if kind == STRING:
        assert isinstance(value, (str, bytes))
        return string(value)
    return struct.pack("<" + _FORMATS[kind], value)


def pair(key: str | bytes, kind: int, value: float | str | bytes) -> bytes:
    """One key with a scalar; `bytes` for any other kind than STRING are taken as they are."""
    raw = value if isinstance(value, bytes) and kind != STRING else scalar(kind, value)
    return string(key) + u32(kind) + raw


def array(kind: int, elements: Sequence[bytes], *, count: int | None = None) -> bytes:
    """Payload of an array (element type, length, elements)."""
    return u32(kind) + u64(len(elements) if count is None else count) + b"".join(elements)


def tensor(
    name: str | bytes,
    dims: Sequence[int],
    kind: int = 0,
    offset: int = 0,
    *,
    n_dims: int | None = None,
) -> bytes:
    """One line of the tensor table; dims fastest first."""
    count = len(dims) if n_dims is None else n_dims
    return string(name) + u32(count) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


ARCHITECTURE = pair("general.architecture", STRING, "deepseek4")


@dataclass
class Gguf:
    """The fields of a file; every one of them may lie."""

    pairs: list[bytes] = field(default_factory=lambda: [ARCHITECTURE])
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    tensor_count: int | None = None
    pair_count: int | None = None
    alignment: int = 32

    def header(self) -> bytes:
        n_tensors = len(self.tensors) if self.tensor_count is None else self.tensor_count
        n_pairs = len(self.pairs) if self.pair_count is None else self.pair_count
        counts = u32(self.version) + u64(n_tensors) + u64(n_pairs)
        return self.magic + counts + b"".join(self.pairs) + b"".join(self.tensors)

    def to_bytes(self) -> bytes:
        header = self.header()
        return header + bytes(-len(header) % self.alignment) + self.data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


def small() -> Gguf:
    """A valid file with every value type, nested arrays, and three tensors; under 2 KB."""
    kinds = [k for k in range(13) if k != ARRAY]
    sample = {STRING: "wörd", BOOL: True, F32: 0.5, F64: -0.25}
    pairs = [ARCHITECTURE]
    for kind in kinds:
        value = sample.get(kind, 7)
        pairs.append(pair(f"scalar.{kind}", kind, value))
        pairs.append(pair(f"array.{kind}", ARRAY, array(kind, [scalar(kind, value)] * 3)))
    inner = array(I16, [scalar(I16, -2)] * 2)
    texts = array(STRING, [string("a"), string("")])
    pairs.append(pair("nested", ARRAY, array(ARRAY, [inner, texts])))
    tensors = [
        tensor("token_embd.weight", (32, 3), 8, 0),
        tensor("output_norm.weight", (5,), 0, 128),
        tensor("blk.0.ffn_up_exps.weight", (32, 2, 2), 39, 160),
    ]
    data = bytes(i % 251 for i in range(160 + 68))
    return Gguf(pairs, tensors, data)
