"""What a training run leaves behind: its whole state, or its weights in shards that are carried.

`state.pt` continues a run as if it had not stopped. Shards are safetensors files of the weights in
bfloat16 under their official names (small parameters float32, expert tables int64), each below 16
MiB; a run resumed from them starts with a fresh optimizer. Rounding to bfloat16 loses nothing of
the experts of a quantised phase, because their codes are made from bfloat16 values anyway.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from edgedsv4.formats.safetensors import read_safetensors_index
from pocket.parameters import from_official, to_official

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

STATE_NAME: Final = "state.pt"
SHARD_BYTES: Final = int(15.9 * (1 << 20))
_DTYPE_NAMES: Final = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
}
_TORCH_DTYPES: Final = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
_FLOAT32_ENDS: Final = ("attn_sink", ".ape", "gate.bias", "_fn", "_base", "_scale")


def save_state(directory: Path, state: Mapping[str, Any]) -> None:
    """Write `state.pt`; a run that is killed meanwhile keeps the old one."""
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{STATE_NAME}.partial"
    torch.save(dict(state), partial)
    partial.replace(directory / STATE_NAME)


def load_state(directory: Path, device: torch.device) -> dict[str, Any] | None:
    """The state in `directory`; None if it holds none."""
    path = directory / STATE_NAME
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    return state


def stored_tensors(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Weights as shards hold them, on the CPU."""
    for name, weight in to_official(weights):
        tensor = weight.detach().cpu()
        if tensor.is_floating_point() and not name.endswith(_FLOAT32_ENDS):
            tensor = tensor.to(torch.bfloat16)
        yield name, tensor


def write_shards(
    directory: Path, weights: Mapping[str, Tensor], notes: Mapping[str, str] | None = None
) -> list[Path]:
    """Write the weights of a network.

    Args:
        directory: made if missing; shards of an earlier call are removed.
        weights: of a network, experts stacked.
        notes: written into every shard's metadata.

    Returns:
        The files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("shard-*.safetensors"):
        old.unlink()
    paths = []
    for number, shard in enumerate(_split(stored_tensors(weights), SHARD_BYTES - (1 << 17))):
        path = directory / f"shard-{number:02d}.safetensors"
        write_safetensors(path, shard, notes)
        paths.append(path)
    return paths


def _split(tensors: Iterator[tuple[str, Tensor]], limit: int) -> Iterator[list[tuple[str, Tensor]]]:
    shard: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if shard and size + nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor))
        size += nbytes
    if shard:
        yield shard


def write_safetensors(
    path: Path, tensors: Sequence[tuple[str, Tensor]], notes: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file.

    Args:
        path: of the file.
        tensors: (name, CPU tensor).
        notes: strings for the file's metadata.
    """
    header: dict[str, Any] = {}
    if notes:
        header["__metadata__"] = dict(notes)
    end = 0
    for name, tensor in tensors:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in tensors:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def read_shards(directory: Path, config: ModelConfig) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights that `write_shards` wrote, and the notes.

    Returns:
        Network weights, float32 (tables int64), experts stacked; and the metadata.

    Raises:
        FormatError: if the files are damaged.
        ShapeError: if they hold another model.
    """
    with read_safetensors_index(directory) as file:
        tensors = {}
        for name, record in file.tensors.items():
            data = torch.frombuffer(bytearray(record.data().tobytes()), dtype=torch.uint8)
            tensors[name] = data.view(_TORCH_DTYPES[record.block_type.name]).view(record.shape)
        notes = dict(file.metadata)
    return from_official(config, tensors), notes
