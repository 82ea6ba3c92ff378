"""A tiny DeepSeek-V4 of seeded random weights, built on the spot, for trying everything but sense.

It has every kind of layer and the tokens of the chat encoding, speaks single bytes, and babbles.
The file is ordinary GGUF and the same bytes everywhere: values come from Philox words, which numpy
keeps stable, not from its distributions. Two things are not left to chance, so that a reply is
printable for the most part and ends: rows of the head are larger for printable characters, largest
for the end of the turn, and tokens that only structure a prompt have none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgedsv4.config import ModelConfig, RopeScaling
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.gguf_values import GgufType
from edgedsv4.formats.gguf_write import GgufWriter
from edgedsv4.model.weight_names import (
    EXPERT_ROWS,
    LAYER_ROWS,
    ROOT_ROWS,
    Kind,
    LayerTraits,
    WeightRow,
    dimensions,
)
from edgedsv4.runtime.conversion_metadata import config_entries
from edgedsv4.text import special_tokens
from edgedsv4.text.byte_alphabet import CHAR_OF_BYTE

FloatArray = npt.NDArray[np.float32]

_ARCHITECTURE = "deepseek4"
_CONTROL = 3
_USER_DEFINED = 4
_NORMAL = 1
_BOUNDARIES = (special_tokens.BOS, special_tokens.EOS, special_tokens.PAD)
_MARKUP = (special_tokens.THINK, special_tokens.END_THINK, special_tokens.DSML)
_ROLES = (
    special_tokens.SYSTEM,
    special_tokens.USER,
    special_tokens.ASSISTANT,
    special_tokens.LATEST_REMINDER,
    *special_tokens.TASK_TOKENS.values(),
)
_PRINTABLE_GAIN = 3.0
_END_GAIN = 4.0
# Standard deviation of matrix rows for inputs of unit variance, where it is not 1.
_GAINS: Mapping[str, float] = {"attn.wo_a": 2.0, "attn.wo_b": 2.0, "w1": 1.8, "w3": 1.8, "w2": 1.8}
# Mean and standard deviation of the parameters that are not matrices, by the end of their role.
_PARAMETERS: Mapping[str, tuple[float, float]] = {
    "norm": (1.0, 0.15),
    "attn_sink": (0.0, 0.9),
    "ape": (0.0, 0.7),
    "_base": (0.0, 0.6),
    "_scale": (0.8, 0.15),
    "gate.bias": (0.0, 0.15),
}


def random_config() -> ModelConfig:
    """Shape of the tiny model."""
    layers = 4
    return ModelConfig(
        architecture=_ARCHITECTURE,
        vocab_size=len(_tokens()[0]),
        hidden_size=128,
        num_layers=layers,
        num_heads=4,
        head_dim=64,
        rope_dim=16,
        q_lora_rank=96,
        output_groups=2,
        output_lora_rank=48,
        window=128,
        index_heads=8,
        index_dim=32,
        index_topk=64,
        num_experts=8,
        experts_per_token=2,
        num_shared_experts=1,
        expert_width=64,
        routed_scale=1.5,
        num_hash_layers=1,
        swiglu_limits=(10.0,) * layers,
        shared_swiglu_limits=(10.0,) * layers,
        hc_streams=4,
        hc_sinkhorn_iterations=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        compress_rope_theta=160_000.0,
        rope_scaling=RopeScaling(factor=16.0, original_context=4096),
        max_context=65_536,
        compress_ratios=(0, 4, 128, 4),
        bos_id=0,
        eos_id=1,
        pad_id=2,
    )


def build_random_model(path: Path, seed: int = 0) -> None:
    """Write the tiny model.

    Args:
        path: GGUF file to write, about 3 MB.
        seed: 0..2^63-1; the same seed gives the same bytes.

    Raises:
        CapacityError: if the disk is full.
        OSError: if the file cannot be written.
    """
    config = random_config()
    writer = GgufWriter(path)
    _add_metadata(writer, config, seed)
    _add_tokenizer(writer, config)
    draw = _Draw(seed)
    for row in ROOT_ROWS:
        _add(writer, f"{row.gguf}.weight", row, _values(row, dimensions(config, 0), draw))
    for layer in range(config.num_layers):
        _add_layer(writer, config, layer, draw)
    writer.write()


class _Draw:
    """A stream of numbers that depends on the seed alone."""

    def __init__(self, seed: int) -> None:
        self._words = np.random.Philox(key=seed)

    def floats(self, shape: tuple[int, ...], std: float, mean: float = 0.0) -> FloatArray:
        """Evenly distributed numbers of this mean and standard deviation."""
        unit = self._unit(math.prod(shape)).reshape(shape)
        return ((2 * unit - 1) * (math.sqrt(3) * std) + mean).astype(np.float32)

    def orders(self, rows: int, count: int) -> npt.NDArray[np.int64]:
        """[rows, count], each row a permutation of 0..count-1."""
        return np.argsort(self._unit(rows * count).reshape(rows, count), axis=1, kind="stable")

    def _unit(self, count: int) -> npt.NDArray[np.float64]:
        words = np.asarray(self._words.random_raw(count), dtype=np.uint64)
        return (words >> np.uint64(11)) / float(1 << 53)


def _add_layer(writer: GgufWriter, config: ModelConfig, layer: int, draw: _Draw) -> None:
    traits = LayerTraits.of(config, layer)
    dims = dimensions(config, traits.ratio)
    for row in (row for row in LAYER_ROWS if row.present(traits)):
        suffix = "bias" if row.role.endswith("bias") else "weight"
        if row.kind is Kind.TABLE:
            table = draw.orders(config.vocab_size, config.num_experts)
            values = np.ascontiguousarray(table[:, : config.experts_per_token], dtype=np.int32)
            name = f"blk.{layer}.{row.gguf}.weight"
            writer.add_tensor(name, values.shape, BLOCK_TYPES["I32"], values)
        else:
            _add(writer, f"blk.{layer}.{row.gguf}.{suffix}", row, _values(row, dims, draw))
    for row in EXPERT_ROWS:
        experts = [_values(row, dims, draw) for _ in range(config.num_experts)]
        _add(writer, f"blk.{layer}.{row.gguf}.weight", row, np.stack(experts))


def _values(row: WeightRow, dims: Mapping[str, int], draw: _Draw) -> FloatArray:
    shape = tuple(dims[name] for name in row.dims)
    for end, (mean, std) in _PARAMETERS.items():
        if row.role.endswith(end):
            return draw.floats(shape, std, mean)
    if row.role == "embed":
        return draw.floats(shape, 1.0)
    gain = _GAINS.get(row.role.removeprefix("ffn.shared_experts."), 1.0)
    values = draw.floats(shape, gain / math.sqrt(shape[-1]))
    return values * _head_gains()[:, None] if row.role == "head" else values


def _head_gains() -> FloatArray:
    """Standard deviation of each token's logit."""
    texts, types = _tokens()
    gains = np.array([1.0 if kind == _NORMAL else 0.0 for kind in types], dtype=np.float32)
    for byte in (*range(0x20, 0x7F), 0x0A):
        gains[texts.index(CHAR_OF_BYTE[byte])] = _PRINTABLE_GAIN
    gains[texts.index(special_tokens.EOS)] = _END_GAIN
    return gains


def _add(writer: GgufWriter, name: str, row: WeightRow, values: FloatArray) -> None:
    """Add a tensor: matrices in bfloat16, parameters in float32."""
    if row.kind is Kind.MATRIX:
        words = values.view(np.uint32)
        # Round to nearest, ties to even; no value here is near the largest float.
        rounded = (words + 0x7FFF + (words >> 16 & 1)) >> 16
        data = np.ascontiguousarray(rounded.astype("<u2"))
        writer.add_tensor(name, values.shape, BLOCK_TYPES["BF16"], data)
    else:
        data = np.ascontiguousarray(values, dtype="<f4")
        writer.add_tensor(name, values.shape, BLOCK_TYPES["F32"], data)


def _tokens() -> tuple[list[str], list[int]]:
    """(texts, types): where a sentence begins and ends, the 256 bytes, the tokens of the chat."""
    letters = [CHAR_OF_BYTE[byte] for byte in range(256)]
    texts = [*_BOUNDARIES, *letters, *_ROLES, *_MARKUP]
    types = [_CONTROL] * 3 + [_NORMAL] * 256 + [_CONTROL] * len(_ROLES)
    return texts, types + [_USER_DEFINED] * len(_MARKUP)


def _add_tokenizer(writer: GgufWriter, config: ModelConfig) -> None:
    texts, types = _tokens()
    writer.add_metadata("tokenizer.ggml.model", "gpt2", GgufType.STRING)
    writer.add_metadata("tokenizer.ggml.pre", "joyai-llm", GgufType.STRING)
    writer.add_metadata("tokenizer.ggml.tokens", texts, GgufType.STRING)
    writer.add_metadata("tokenizer.ggml.token_type", np.array(types), GgufType.I32)
    writer.add_metadata("tokenizer.ggml.merges", [], GgufType.STRING)
    ids = {"bos": config.bos_id, "eos": config.eos_id, "padding": config.pad_id}
    for name, token_id in ids.items():
        if token_id is not None:
            writer.add_metadata(f"tokenizer.ggml.{name}_token_id", token_id, GgufType.U32)


def _add_metadata(writer: GgufWriter, config: ModelConfig, seed: int) -> None:
    writer.add_metadata("general.architecture", _ARCHITECTURE, GgufType.STRING)
    writer.add_metadata("general.name", f"random-tiny, seed {seed}", GgufType.STRING)
    for entry in config_entries(config):
        writer.add_metadata(entry.key, entry.value, entry.value_type)
