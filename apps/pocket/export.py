"""`python -m pocket.export`: trained weights -> a checkpoint directory in DeepSeek's own layout.

The official form holds FP8 matrices with a power-of-two scale per 128 x 128 square, packed FP4
experts with one per 32 elements, bfloat16 and float32 for the rest; the experts' codes are those
that the quantised phase trained with. The fp4 form has the same experts and bfloat16 in place of
FP8: what the shipped GGUF file is made of. The plain form holds bfloat16 (or float32) throughout.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from edgedsv4.errors import Dsv4Error
from edgedsv4.kernels.kv_quant import quantize_index_keys
from pocket.checkpoint import load_state, read_shards, stored_tensors, write_safetensors
from pocket.configs import CONFIGS, config_json, named_config
from pocket.fake_quant import fp4_weights
from pocket.optimizer import Optimizer
from pocket.parameters import initial_weights, is_trained, to_official

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

logger = logging.getLogger(__name__)

Form = Literal["official", "fp4", "bf16", "f32"]
FP8_BLOCK = 128
FP8_MAX = 448.0
_FP8_LEAVES = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "e_proj", "h_proj")


def load_weights(source: Path, config_name: str) -> dict[str, Tensor]:
    """Weights of a run: from its `state.pt`, else from shards.

    Raises:
        Dsv4Error: if the directory holds neither, or another model.
    """
    config = named_config(config_name)
    state = load_state(source, torch.device("cpu"))
    if state is None:
        return read_shards(source, config)[0]
    tables = [
        state["optimizer"]["tables"][f"layers.{layer}.ffn.gate.tid2eid"].numpy()
        for layer in range(config.num_hash_layers)
    ]
    weights = initial_weights(config, 0, tables)
    optimizer = Optimizer(weights, config.output_groups, torch.device("cpu"))
    optimizer.load_state(state["optimizer"])
    return {name: weight.detach() for name, weight in optimizer.weights.items()}


def write_checkpoint(
    directory: Path,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    form: Form,
    tokenizer: Path | None = None,
) -> None:
    """Write `config.json`, `model.safetensors` and a copy of the tokenizer.

    Args:
        directory: made if missing.
        config: shape of the model.
        weights: of a network, experts stacked.
        form: storage types.
        tokenizer: a `tokenizer.json`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    record = config_json(config, is_quantised=form == "official")
    if form == "f32":
        record["torch_dtype"] = "float32"
    (directory / "config.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    tensors = list(checkpoint_tensors(weights, form))
    write_safetensors(directory / "model.safetensors", tensors, {"format": "pt"})
    if tokenizer is not None:
        shutil.copyfile(tokenizer, directory / "tokenizer.json")


def checkpoint_tensors(weights: Mapping[str, Tensor], form: Form) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a checkpoint, by name, on the CPU."""
    if form == "f32":
        yield from ((name, weight.detach().cpu()) for name, weight in to_official(weights))
        return
    for name, tensor in stored_tensors(weights):
        stem = name.removesuffix(".weight")
        if form in ("official", "fp4") and is_expert(name):
            codes, scales = quantize_index_keys(tensor)
            yield name, codes.view(torch.int8)
            yield f"{stem}.scale", scales.view(torch.float8_e8m0fnu)
        elif form == "official" and is_fp8(name):
            fp8, scales = fp8_blocks(tensor.float())
            yield name, fp8
            yield f"{stem}.scale", scales.view(torch.float8_e8m0fnu)
        else:
            yield name, tensor


def is_expert(name: str) -> bool:
    """Whether the tensor is a matrix of a routed expert."""
    return ".ffn.experts." in name


def is_fp8(name: str) -> bool:
    """Whether official checkpoints store the tensor as FP8."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    return ".compressor." not in name and (leaf in _FP8_LEAVES or ".shared_experts." in name)


def fp8_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Round to e4m3 with a scale 2^ceil(log2(amax / 448)) per square of 128.

    Args:
        matrix: [rows, columns] float32.

    Returns:
        e4m3 codes [rows, columns] and E8M0 bytes [ceil(rows / 128), ceil(columns / 128)].
    """
    rows, columns = matrix.shape
    down, across = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    padded = matrix.new_zeros(down * FP8_BLOCK, across * FP8_BLOCK)
    padded[:rows, :columns] = matrix
    blocks = padded.view(down, FP8_BLOCK, across, FP8_BLOCK)
    ratio = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-30) / FP8_MAX
    mantissa, exponent = torch.frexp(ratio)  # ratio = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = (exponent - (mantissa == 0.5).to(exponent.dtype)).clamp(-127, 127)
    scaled = torch.ldexp(blocks, -exponent[:, None, :, None])
    codes = scaled.view(padded.shape)[:rows, :columns].clamp(-FP8_MAX, FP8_MAX)
    return codes.to(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8)


def with_rounded_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights with the experts as the official form stores them."""
    return {
        name: fp4_weights(weight) if is_expert(name) and is_trained(name) else weight
        for name, weight in weights.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m pocket.export", description=__doc__)
    parser.add_argument("source", type=Path, help="directory of a state.pt, or of shards")
    parser.add_argument("out", type=Path, help="checkpoint directory to write")
    parser.add_argument("--config", choices=list(CONFIGS), default="pocket-v4")
    parser.add_argument("--form", choices=["official", "fp4", "bf16", "f32"], default="official")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json to put beside")
    args = parser.parse_args(arguments)
    try:
        weights = load_weights(args.source, args.config)
        config = named_config(args.config)
        write_checkpoint(args.out, config, weights, args.form, args.tokenizer)
    except Dsv4Error as error:
        logger.error("%s", error)
        return 2
    total = sum(path.stat().st_size for path in args.out.iterdir())
    logger.info("%s: %.1f MB", args.out, total / 1e6)
    return 0


if __name__ == "__main__":
    sys.exit(main())
