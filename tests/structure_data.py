"""The stored reference model `tests/data/structure` as the files it was published as.

Only the official checkpoint is stored whole. The two GGUF files hold the same values in other
types, so they are made again here from the official tensors and their stored headers, with code of
its own (nothing of `edgedsv4` but the header reader), and their SHA-256 shows that they are the
original files byte for byte.
"""

from __future__ import annotations

import hashlib
import lzma
import shutil
from pathlib import Path

import gguf
import numpy as np
import safetensors.torch
import torch
from tiny_files import gguf_name

from edgedsv4.formats.gguf import read_gguf

STORED = Path(__file__).parent / "data" / "structure"
SHA256 = {
    "f32.gguf": "fe23df5d6d7fcf3690080538f68bcbfa12c3af929f9eaa0b0e0512c335810fc4",
    "mxfp4.gguf": "6b63425add11ff269bbc7fb802b87f9d1fe6cf934d56df8cd236821113713578",
}
_SIZES = {"f32.gguf": 18678656, "mxfp4.gguf": 4681536}
_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}

Stored = dict[str, torch.Tensor]


def official_tensors() -> Stored:
    """Official name -> tensor as stored."""
    return safetensors.torch.load_file(STORED / "official" / "model.safetensors")


def dequantized(name: str, stored: Stored) -> np.ndarray:
    """Values of one official tensor, float32 (expert tables int64)."""
    tensor = stored[name]
    scale = stored.get(name.removesuffix(".weight") + ".scale")
    if scale is None:
        return (tensor if tensor.dtype == torch.int64 else tensor.float()).numpy()
    powers = np.exp2(scale.view(torch.uint8).numpy().astype(np.float64) - 127)
    if tensor.dtype == torch.int8:
        codes = _codes(tensor)
        table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = np.where(codes < 8, table[codes % 8], -table[codes % 8])
        return (values * powers.repeat(32, 1)).astype(np.float32)
    rows, columns = tensor.shape
    spread = powers.repeat(128, 0).repeat(128, 1)[:rows, :columns]
    return (tensor.float().numpy() * spread).astype(np.float32)


def unpack(directory: Path) -> Path:
    """Fill a directory with `official/`, `f32.gguf`, `mxfp4.gguf`, the tokens and the logits.

    Args:
        directory: made if missing; 26 MB are written.
    Returns:
        the directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copytree(STORED / "official", directory / "official", dirs_exist_ok=True)
    for file in STORED.glob("*.*"):
        if file.suffix in (".npy", ".i32"):
            shutil.copy(file, directory / file.name)
    stored = official_tensors()
    for name in SHA256:
        _write(directory / name, stored)
    return directory


def _write(path: Path, stored: Stored) -> None:
    header = lzma.decompress((STORED / f"{path.stem}.header.xz").read_bytes())
    path.write_bytes(header + bytes(_SIZES[path.name] - len(header)))
    names = {gguf_name(name): name for name in stored if ".experts." not in name}
    whole = bytearray(path.read_bytes())
    with read_gguf(path) as file:
        for record in file.tensors.values():
            kind = record.block_type.name
            if "_exps" in record.name:
                data = _experts(record.name, kind, stored)
            else:
                data = _encoded(names[record.name], kind, stored)
            whole[record.offset : record.offset + record.nbytes] = data.tobytes()
    found = hashlib.sha256(whole).hexdigest()
    if found != SHA256[path.name]:
        raise RuntimeError(f"{path.name} differs from the original file: sha256 {found}")
    path.write_bytes(whole)


def _encoded(name: str, kind: str, stored: Stored) -> np.ndarray:
    values = dequantized(name, stored)
    if kind == "I32":
        return values.astype(np.int32)
    if kind == "BF16":
        return stored[name].view(torch.int16).numpy()
    if kind == "Q8_0":
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    return values


def _experts(gguf_tensor: str, kind: str, stored: Stored) -> np.ndarray:
    _, layer, leaf, _ = gguf_tensor.split(".")
    part = next(p for p, word in _PARTS.items() if leaf == f"ffn_{word}_exps")
    names = [f"layers.{layer}.ffn.experts.{e}.{part}.weight" for e in range(8)]
    if kind == "F32":
        return np.stack([dequantized(name, stored) for name in names])
    return np.stack([_mxfp4(name, stored) for name in names])


def _mxfp4(name: str, stored: Stored) -> np.ndarray:
    """ggml's MXFP4 blocks: the scale, then 16 bytes with elements j (low) and j + 16 (high)."""
    codes = _codes(stored[name])
    blocks = codes.reshape(len(codes), -1, 32)
    scale = stored[name.replace(".weight", ".scale")].view(torch.uint8).numpy()
    return np.concatenate([scale[..., None], blocks[..., :16] | blocks[..., 16:] << 4], axis=-1)


def _codes(packed: torch.Tensor) -> np.ndarray:
    raw = packed.view(torch.uint8).numpy()
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)
