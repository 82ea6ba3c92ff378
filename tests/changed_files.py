"""Copies of a model file with some of its tensors or entries changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from edgedsv4.formats.block_types import BLOCK_TYPES, BlockType
from edgedsv4.formats.gguf import GgufType, read_gguf
from edgedsv4.formats.gguf_write import GgufWriter

GgufTensor = tuple[tuple[int, ...], BlockType, np.ndarray]
GgufTensors = dict[str, GgufTensor]


def f32(array: np.ndarray) -> GgufTensor:
    """An array as an F32 tensor of a GGUF file."""
    return array.shape, BLOCK_TYPES["F32"], np.ascontiguousarray(array, dtype=np.float32)


def change_gguf(
    source: Path,
    target: Path,
    edit: Callable[[GgufTensors], None] | None = None,
    metadata: Mapping[str, tuple[Any, GgufType] | None] | None = None,
) -> Path:
    """Write `source` again with edited tensors.

    Args:
        source: a GGUF file.
        target: the file to write.
        edit: changes name -> (shape, type, bytes) in place.
        metadata: keys to set, or to leave out (None).
    Returns:
        `target`.
    """
    writer = GgufWriter(target)
    changes = dict(metadata or {})
    with read_gguf(source) as file:
        keys = {key: (value, file.value_types[key]) for key, value in file.metadata.items()}
        for key, entry in {**keys, **changes}.items():
            if entry is not None:
                writer.add_metadata(key, *entry)
        tensors = {
            name: (record.shape, record.block_type, record.data().copy())
            for name, record in file.tensors.items()
        }
    if edit is not None:
        edit(tensors)
    for name, (shape, block_type, data) in tensors.items():
        writer.add_tensor(name, shape, block_type, data)
    writer.write()
    return target


def change_official(
    source: Path,
    target: Path,
    edit: Callable[[dict[str, torch.Tensor]], None] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write an official directory again with edited tensors and configuration entries."""
    target.mkdir(parents=True, exist_ok=True)
    entries = json.loads((source / "config.json").read_text(encoding="utf-8"))
    entries.update(config or {})
    (target / "config.json").write_text(json.dumps(entries), encoding="utf-8")
    tensors = safetensors.torch.load_file(source / "model.safetensors")
    if edit is not None:
        edit(tensors)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, target / "model.safetensors")
    return target
