"""A 2 GB model of realistic proportions for measuring: random blocks, written in seconds.

Sizes lie between the pocket model and V4-Flash: all kinds of layers, 64 experts of which 6 are
used, heads as wide as Flash's, weights far beyond any cache. Matrices are stored as converted
files have them: experts MXFP4 or Q4_K, other matrices of an FP8 checkpoint Q8_0, the rest BF16 or
F32. Scales are chosen so that every product of a unit input is of order one and logits are finite.

    python tests/bench/mid_model.py [--experts mxfp4|q4_k] [--out build/bench]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgedsv4.config import ModelConfig, RopeScaling
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.gguf_stream import MetadataEntry, StreamedFile, StreamedTensor, stream_gguf
from edgedsv4.formats.gguf_values import GgufType
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

Bytes = npt.NDArray[np.uint8]
EXPERT_TYPES = {"mxfp4": "MXFP4", "q4_k": "Q4_K"}
DEFAULT_FOLDER = Path("build/bench")
_PIECE_BLOCKS = 1 << 17
_GAINS = {"attn.wo_a": 2.0, "attn.wo_b": 2.0, "w1": 1.8, "w3": 1.8, "w2": 1.8}
"""Standard deviation of a product's outputs for inputs of unit variance, where it is not 1."""
_BF16_ROLES = ("embed", "head", "ffn.gate")
_BF16_ENDS = (".wgate", "compressor.wkv", "weights_proj")
_PARAMETERS: Mapping[str, tuple[float, float]] = {
    "norm": (1.0, 0.15),
    "attn_sink": (0.0, 0.9),
    "ape": (0.0, 0.7),
    "_base": (0.0, 0.6),
    "_scale": (0.8, 0.15),
    "gate.bias": (0.0, 0.15),
}
"""Mean and standard deviation of parameters that are no matrices, by the end of their role."""


def mid_config() -> ModelConfig:
    """Shape of the model."""
    layers = 12
    return ModelConfig(
        architecture="deepseek4",
        vocab_size=32_000,
        hidden_size=2048,
        num_layers=layers,
        num_heads=32,
        head_dim=512,
        rope_dim=64,
        q_lora_rank=512,
        output_groups=4,
        output_lora_rank=512,
        window=128,
        index_heads=32,
        index_dim=128,
        index_topk=512,
        num_experts=64,
        experts_per_token=6,
        num_shared_experts=1,
        expert_width=512,
        routed_scale=1.5,
        num_hash_layers=3,
        swiglu_limits=(10.0,) * layers,
        shared_swiglu_limits=(10.0,) * layers,
        hc_streams=4,
        hc_sinkhorn_iterations=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        compress_rope_theta=160_000.0,
        rope_scaling=RopeScaling(factor=16.0, original_context=65_536),
        max_context=1 << 20,
        compress_ratios=(0, 0, 4, 128, 4, 128, 4, 128, 4, 128, 4, 128),
        bos_id=0,
        eos_id=1,
        pad_id=2,
    )


def mid_model(folder: Path, experts: str) -> Path:
    """Path of the model with these experts, a key of `EXPERT_TYPES`; written if it is not there."""
    path = folder / f"mid-{experts}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        build(path, mid_config(), EXPERT_TYPES[experts])
    return path


def build(path: Path, config: ModelConfig, expert_type: str, seed: int = 0) -> None:
    """Write a model of random blocks; widths must be multiples of the types' blocks."""
    specs = list(_specs(config, expert_type))
    tensors = [
        StreamedTensor(
            spec.name, spec.shape, BLOCK_TYPES[spec.block_type], _pieces(spec, (seed, number))
        )
        for number, spec in enumerate(specs)
    ]
    name = f"mid model, {expert_type} experts, seed {seed}"
    stream_gguf([StreamedFile(path, _metadata(config, name), tensors)])


@dataclass(frozen=True)
class _Spec:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    block_type: str
    std: float
    mean: float = 0.0


def _specs(config: ModelConfig, expert_type: str) -> Iterator[_Spec]:
    for row in ROOT_ROWS:
        yield _spec(f"{row.gguf}.weight", row, dimensions(config, 0))
    for layer in range(config.num_layers):
        traits = LayerTraits.of(config, layer)
        dims = dimensions(config, traits.ratio)
        for row in (row for row in LAYER_ROWS if row.present(traits)):
            suffix = "bias" if row.role.endswith("bias") else "weight"
            name = f"blk.{layer}.{row.gguf}.{suffix}"
            if row.kind is Kind.TABLE:
                shape = (config.vocab_size, config.experts_per_token)
                yield _Spec(name, shape, "I32", std=config.num_experts)
            else:
                yield _spec(name, row, dims)
        for row in EXPERT_ROWS:
            shape = (config.num_experts, *(dims[dim] for dim in row.dims))
            std = _GAINS[row.role] / math.sqrt(shape[-1])
            yield _Spec(f"blk.{layer}.{row.gguf}.weight", shape, expert_type, std)


def _spec(name: str, row: WeightRow, dims: Mapping[str, int]) -> _Spec:
    shape = tuple(dims[dim] for dim in row.dims)
    for end, (mean, std) in _PARAMETERS.items():
        if row.role.endswith(end):
            return _Spec(name, shape, "F32", std, mean)
    if row.role == "embed":
        return _Spec(name, shape, "BF16", 1.0)
    gain = _GAINS.get(row.role.removeprefix("ffn.shared_experts."), 1.0)
    std = gain / math.sqrt(shape[-1])
    if row.kind is Kind.PARAMETER:
        return _Spec(name, shape, "F32", std)
    is_bf16 = row.role in _BF16_ROLES or row.role.endswith(_BF16_ENDS)
    return _Spec(name, shape, "BF16" if is_bf16 else "Q8_0", std)


def _pieces(spec: _Spec, key: tuple[int, int]) -> Callable[[], Iterator[Bytes]]:
    make = _MAKERS[spec.block_type]
    block_elements = BLOCK_TYPES[spec.block_type].block_elements
    if spec.block_type == "I32":
        blocks, step = math.prod(spec.shape), math.prod(spec.shape)
    else:
        blocks, step = math.prod(spec.shape) // block_elements, _PIECE_BLOCKS * 32 // block_elements

    def pieces() -> Iterator[Bytes]:
        words = np.random.Philox(key=np.array(key, dtype=np.uint64))
        for start in range(0, blocks, step):
            yield make(words, min(step, blocks - start), spec).reshape(-1).view(np.uint8)

    return pieces


def _random_bytes(words: np.random.Philox, rows: int, width: int) -> Bytes:
    raw = np.asarray(words.random_raw(-(-rows * width // 8)), dtype=np.uint64)
    return raw.view(np.uint8)[: rows * width].reshape(rows, width)


def _uniform(words: np.random.Philox, count: int) -> npt.NDArray[np.float32]:
    """Numbers of mean 0 and standard deviation 1."""
    raw = _random_bytes(words, count, 4).reshape(-1).view(np.uint32)
    unit = (raw >> 8).astype(np.float32) / np.float32(1 << 23) - 1
    return unit * np.float32(math.sqrt(3))


def _f32(words: np.random.Philox, blocks: int, spec: _Spec) -> npt.NDArray[np.float32]:
    return _uniform(words, blocks) * np.float32(spec.std) + np.float32(spec.mean)


def _bf16(words: np.random.Philox, blocks: int, spec: _Spec) -> npt.NDArray[np.uint16]:
    return (_f32(words, blocks, spec).view(np.uint32) >> 16).astype(np.uint16)


def _i32(words: np.random.Philox, _: int, spec: _Spec) -> npt.NDArray[np.int32]:
    """A table of distinct experts per row; `spec.std` is the number of experts."""
    rows, used = spec.shape
    draws = _random_bytes(words, rows, 2 * int(spec.std)).view(np.uint16)
    order = np.argsort(draws, axis=1, kind="stable")[:, :used]
    return np.ascontiguousarray(order, dtype=np.int32)


def _scales(words: np.random.Philox, blocks: int, scale: float) -> npt.NDArray[np.float16]:
    """Half-precision scales around one value."""
    spread = 1 + _uniform(words, blocks) * np.float32(0.1)
    return (np.float32(scale) * spread).astype(np.float16)


def _q8_0(words: np.random.Philox, blocks: int, spec: _Spec) -> Bytes:
    data = np.empty((blocks, 34), dtype=np.uint8)
    codes = _random_bytes(words, blocks, 32)
    data[:, 2:] = np.where(codes == 0x80, 0, codes)
    # Codes -127..127 are equally likely but for 0: their standard deviation is 73.3.
    data[:, :2] = _scales(words, blocks, spec.std / 73.3).view(np.uint8).reshape(-1, 2)
    return data


def _mxfp4(words: np.random.Philox, blocks: int, spec: _Spec) -> Bytes:
    data = np.empty((blocks, 17), dtype=np.uint8)
    data[:, 1:] = _random_bytes(words, blocks, 16)
    # The 16 codes of E2M1 have a standard deviation of 2.93; scales take two neighbouring powers.
    exponent = 127 + math.floor(math.log2(spec.std / 2.93))
    data[:, 0] = exponent + (_random_bytes(words, blocks, 1)[:, 0] & 1)
    return data


def _q4_k(words: np.random.Philox, blocks: int, spec: _Spec) -> Bytes:
    """Codes 0..15 times s, less 7.5 s: each group's minimum equals its scale, which is 32..63."""
    data = np.empty((blocks, 144), dtype=np.uint8)
    scale = _scales(words, blocks, spec.std / (4.61 * 48.4))
    data[:, 0:2] = scale.view(np.uint8).reshape(-1, 2)
    data[:, 2:4] = (scale * np.float16(7.5)).view(np.uint8).reshape(-1, 2)
    groups = 32 + (_random_bytes(words, blocks, 8) & 31)
    low, high = groups[:, :4], groups[:, 4:]
    data[:, 4:8] = data[:, 8:12] = low | (high >> 4) << 6
    data[:, 12:16] = (high & 15) | (high & 15) << 4
    data[:, 16:] = _random_bytes(words, blocks, 128)
    return data


_MAKERS: Mapping[str, Callable[[np.random.Philox, int, _Spec], npt.NDArray[np.generic]]] = {
    "F32": _f32,
    "BF16": _bf16,
    "I32": _i32,
    "Q8_0": _q8_0,
    "MXFP4": _mxfp4,
    "Q4_K": _q4_k,
}


def _metadata(config: ModelConfig, name: str) -> list[MetadataEntry]:
    def text(key: str, value: str) -> MetadataEntry:
        return MetadataEntry(key, value, GgufType.STRING)

    tokens, types = _tokens(config.vocab_size)
    ids = {"bos": config.bos_id, "eos": config.eos_id, "padding": config.pad_id}
    return [
        text("general.architecture", "deepseek4"),
        text("general.name", name),
        *config_entries(config),
        text("tokenizer.ggml.model", "gpt2"),
        text("tokenizer.ggml.pre", "joyai-llm"),
        MetadataEntry("tokenizer.ggml.tokens", tokens, GgufType.STRING),
        MetadataEntry("tokenizer.ggml.token_type", np.array(types), GgufType.I32),
        MetadataEntry("tokenizer.ggml.merges", _MERGES, GgufType.STRING),
        *(
            MetadataEntry(f"tokenizer.ggml.{key}_token_id", token_id, GgufType.U32)
            for key, token_id in ids.items()
            if token_id is not None
        ),
    ]


_MERGES = ["t h", "th e", "i n", "e r"]


def _tokens(vocab_size: int) -> tuple[list[str], list[int]]:
    """(texts, types): the tokens of the chat, the 256 bytes, a few merges, and unused ones."""
    special = [special_tokens.BOS, special_tokens.EOS, special_tokens.PAD]
    special += [special_tokens.USER, special_tokens.ASSISTANT]
    markup = [special_tokens.THINK, special_tokens.END_THINK, special_tokens.DSML]
    plain = [CHAR_OF_BYTE[byte] for byte in range(256)]
    plain += [merge.replace(" ", "") for merge in _MERGES]
    rest = vocab_size - len(special) - len(markup) - len(plain)
    unused = [f"<unused{number}>" for number in range(rest)]
    types = [3] * len(special) + [4] * len(markup) + [1] * len(plain) + [5] * len(unused)
    return [*special, *markup, *plain, *unused], types


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--experts", choices=sorted(EXPERT_TYPES), default="mxfp4")
    parser.add_argument("--out", type=Path, default=DEFAULT_FOLDER, help="folder to write to")
    options = parser.parse_args()
    start = time.perf_counter()
    path = mid_model(options.out, options.experts)
    print(f"{path}: {path.stat().st_size:,} bytes, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
