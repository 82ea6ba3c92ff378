"""What the `safetensors` package writes, the reader gives back; what it accepts, so does that."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from edgedsv4.errors import FormatError
from edgedsv4.formats.safetensors import DTYPES, read_safetensors

STORED = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
}

names = st.text(
    st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1, max_size=40
).filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(0, 5), max_size=4)


# Of an empty dictionary, safetensors 0.8 makes a header that is no JSON.
metadata = st.dictionaries(
    names, st.text(st.characters(blacklist_categories=("Cs",))), min_size=1, max_size=5
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(sorted(STORED, key=str)))
    shape = draw(shapes)
    size = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    if dtype is torch.bool:
        raw &= 1
    return raw.view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@settings(max_examples=60, deadline=None)
@given(
    content=st.dictionaries(names, tensors(), max_size=6),
    metadata=st.none() | metadata,
)
def test_files_of_the_package_are_read_back(
    content: dict[str, torch.Tensor], metadata: dict[str, str] | None
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.safetensors"
        save_file(content, path, metadata)
        with read_safetensors(path) as file:
            assert set(file.tensors) == set(content)
            assert dict(file.metadata) == (metadata or {})
            for name, tensor in content.items():
                record = file.tensors[name]
                assert record.shape == tuple(tensor.shape)
                assert record.block_type is DTYPES[STORED[tensor.dtype]]
                assert record.data().tobytes() == raw_bytes(tensor)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_changed_header_byte_gives_a_file_that_both_readers_agree_on(data: st.DataObject) -> None:
    content = {"a.weight": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(2)}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "x.safetensors"
        save_file(content, path)
        raw = bytearray(path.read_bytes())
        header = 8 + int.from_bytes(raw[:8], "little")
        place = data.draw(st.integers(0, header - 1))
        raw[place] = data.draw(st.integers(0, 255))
        path.write_bytes(raw)
        try:
            with read_safetensors(path) as file:
                ours = {name: record.data().tobytes() for name, record in file.tensors.items()}
        except FormatError:
            return
        theirs = load_file(path)
        assert ours == {name: raw_bytes(tensor) for name, tensor in theirs.items()}
