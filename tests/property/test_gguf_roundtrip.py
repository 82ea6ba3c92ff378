"""What GgufWriter writes is what read_gguf reads, and every mutation of it is read or refused."""

import tempfile
from pathlib import Path
from typing import Any

import gguf_bytes as gb
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgedsv4.errors import FormatError
from edgedsv4.formats.block_types import BLOCK_TYPES, UNSUPPORTED, BlockType
from edgedsv4.formats.gguf import GgufType, read_gguf
from edgedsv4.formats.gguf_values import NUMBER_TYPES
from edgedsv4.formats.gguf_write import GgufWriter

BOUNDED = settings(max_examples=60, deadline=None, derandomize=True)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
LABEL = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
KEYS = LABEL.filter(lambda key: not key.startswith(("split.", "general.")))
NAMES = LABEL.filter(lambda name: len(name.encode()) <= 64)
TYPES = [t for t in BLOCK_TYPES.values() if t.ggml_id is not None and t.name not in UNSUPPORTED]


def scalars(kind: GgufType) -> st.SearchStrategy[Any]:
    if kind is GgufType.STRING:
        return TEXT
    if kind is GgufType.BOOL:
        return st.booleans()
    dtype = NUMBER_TYPES[kind]
    if dtype.kind == "f":
        return st.floats(width=8 * dtype.itemsize)
    limits = np.iinfo(dtype)
    return st.integers(int(limits.min), int(limits.max))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Any, GgufType]:
    kind = draw(st.sampled_from([k for k in GgufType if k is not GgufType.ARRAY]))
    value = scalars(kind)
    return draw(value | st.lists(value, max_size=5)), kind


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], BlockType, bytes]:
    block_type = draw(st.sampled_from(TYPES))
    blocks = draw(st.integers(1, 3))
    outer = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    nbytes = int(np.prod(outer, dtype=int)) * blocks * block_type.block_bytes
    seed = draw(st.integers(0, 255))
    data = bytes((seed + i) % 256 for i in range(nbytes))
    return (*outer, blocks * block_type.block_elements), block_type, data


def plain(value: Any) -> Any:
    """Comparable by `==`, NaN included; -0.0 and 0.0 differ."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    return [repr(v) for v in value] if isinstance(value, list) else repr(value)


@BOUNDED
@given(
    metadata=st.dictionaries(KEYS, pairs(), max_size=6),
    stored=st.dictionaries(NAMES, tensors(), max_size=6),
    alignment=st.sampled_from([1, 2, 8, 32, 4096]),
    max_tensors=st.none() | st.integers(1, 4),
)
def test_round_trip(
    metadata: dict[str, tuple[Any, GgufType]],
    stored: dict[str, tuple[tuple[int, ...], BlockType, bytes]],
    alignment: int,
    max_tensors: int | None,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = GgufWriter(
            Path(folder) / "model.gguf", alignment=alignment, max_tensors=max_tensors
        )
        writer.add_metadata("general.architecture", "deepseek4", GgufType.STRING)
        for key, (value, kind) in metadata.items():
            writer.add_metadata(key, value, kind)
        for name, (shape, block_type, data) in stored.items():
            writer.add_tensor(name, shape, block_type, data)
        paths = writer.write()
        with read_gguf(paths[-1]) as opened:
            assert opened.warnings == ()
            assert list(opened.tensors) == list(stored)
            for name, (shape, block_type, data) in stored.items():
                record = opened.tensors[name]
                assert (record.shape, record.block_type) == (shape, block_type)
                assert record.data().tobytes() == data
            for key, (value, kind) in metadata.items():
                assert plain(opened.metadata[key]) == plain(value)
                assert opened.value_types[key] is kind


SMALL = gb.small().to_bytes()
U64_EDGES = [0, 1, 2, 7, 31, 33, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 61, 1 << 63, (1 << 64) - 1]


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """The small file with some bytes overwritten, removed or repeated."""
    content = bytearray(SMALL)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content) - 1))
        match draw(st.sampled_from(["byte", "u64", "u32", "cut", "repeat", "insert"])):
            case "byte":
                content[at] = draw(st.integers(0, 255))
            case "u64":
                edge = draw(st.sampled_from(U64_EDGES) | st.integers(0, (1 << 64) - 1))
                content[at : at + 8] = edge.to_bytes(8, "little")
            case "u32":
                content[at : at + 4] = draw(st.integers(0, 50)).to_bytes(4, "little")
            case "cut":
                del content[at : at + draw(st.integers(1, 40))]
            case "repeat":
                length = draw(st.integers(1, 60))
                content[at:at] = content[at : at + length]
            case "insert":
                content[at:at] = draw(st.binary(min_size=1, max_size=20))
        content = content or bytearray(b"G")
    return bytes(content)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(content=mutations())
def test_mutated_file_is_read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content)
        try:
            opened = read_gguf(path)
        except FormatError as error:
            refused = error
        else:
            with opened:
                for record in opened.tensors.values():
                    assert record.data().size == record.nbytes
            return
    assert refused.path == path
    assert refused.offset is None or 0 <= refused.offset <= len(content)
