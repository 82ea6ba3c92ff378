"""Tiny models as files, and packs made of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import tiny_files
from tiny_model import random_tensors, tiny_config

from edgedsv4.runtime.pack_build import build_pack
from edgedsv4.runtime.pack_options import PackOptions, PackReport

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

CONFIG = tiny_config(compress_ratios=(0, 4, 128))
NO_MARGIN = PackOptions(safety_margin_bytes=0)


def mixed_types(name: str, array: np.ndarray) -> gguf.GGMLQuantizationType:
    """Experts whose matrices differ in size, and layers that differ too."""
    kinds = gguf.GGMLQuantizationType
    if ".experts." in name:
        if name.startswith("layers.0."):
            return kinds.Q8_0
        return kinds.Q5_0 if name.endswith("w2.weight") else kinds.Q4_0
    return tiny_files.llamacpp_types(name, array)


def write_model(path: Path, types: Any = "a", config: ModelConfig = CONFIG, seed: int = 5) -> Path:
    """A GGUF model with a tokenizer; `types` as in `tiny_files.write_gguf`."""
    tiny_files.write_gguf(path, config, random_tensors(config, seed), types=types, tokenizer=True)
    return path


def write_official(path: Path, config: ModelConfig = CONFIG, seed: int = 5) -> Path:
    """An official directory with FP8 matrices and packed FP4 experts."""
    tiny_files.write_official(path, config, random_tensors(config, seed), quantised=True)
    return path


def write_pack(source: Path, target: Path, **changes: Any) -> PackReport:
    """Build a pack of a model."""
    options = PackOptions(safety_margin_bytes=0, **changes)
    return build_pack(source, target, options)
