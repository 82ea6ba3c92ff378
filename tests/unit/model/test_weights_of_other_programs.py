"""Files of other programs: one model as checkpoint, as F32 and as llama.cpp's MXFP4 file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from structure_data import unpack

from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize
from edgedsv4.model.weight_table import bind_weights

if TYPE_CHECKING:
    from pathlib import Path

    from edgedsv4.model.bound_weights import BoundTensor


@pytest.fixture(scope="module")
def structure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("structure"))


def values(bound: BoundTensor) -> torch.Tensor:
    """Bits of a weight's numbers, so that -0 and 0 differ."""
    if bound.block_type.name in ("I32", "I64"):
        kind = "<i8" if bound.block_type.name == "I64" else "<i4"
        return torch.from_numpy(bound.record.data().view(kind).astype(np.int64))
    matrix = QuantMatrix(
        bound.block_type,
        bound.rows,
        bound.columns,
        torch.from_numpy(bound.data().copy()),
        None if bound.scale is None else torch.from_numpy(bound.scale.data().copy()),
    )
    return dequantize(matrix).view(torch.int32)


def test_official_checkpoint_equals_its_dequantised_file_bit_for_bit(structure: Path):
    with (
        open_checkpoint(structure / "official") as official,
        open_checkpoint(structure / "f32.gguf") as f32_file,
    ):
        ours, theirs = bind_weights(official), bind_weights(f32_file)
        differ = [
            role
            for role, bound in ours.tensors.items()
            if not torch.equal(values(bound), values(theirs.tensors[role]))
        ]
        assert differ == []
        assert len(ours.tensors) == 160
        for layer in range(6):
            for expert_id in range(8):
                pairs = zip(
                    ours.experts[layer].expert(expert_id),
                    theirs.experts[layer].expert(expert_id),
                    strict=True,
                )
                assert all(torch.equal(values(a), values(b)) for a, b in pairs)


def numbers(bound: BoundTensor) -> torch.Tensor:
    """A weight's numbers: ggml decodes FP4's negative zero to zero."""
    return values(bound).view(torch.float32)


def test_experts_of_the_converted_file_equal_the_official_ones(structure: Path):
    with (
        open_checkpoint(structure / "official") as official,
        open_checkpoint(structure / "mxfp4.gguf") as converted,
    ):
        ours, theirs = bind_weights(official), bind_weights(converted)
        assert theirs.experts[3].w1[0].block_type.name == "MXFP4"
        for layer in range(6):
            for expert_id in range(8):
                pairs = zip(
                    ours.experts[layer].expert(expert_id),
                    theirs.experts[layer].expert(expert_id),
                    strict=True,
                )
                assert all(torch.equal(numbers(a), numbers(b)) for a, b in pairs)


def test_files_of_other_programs_open_without_warnings(structure: Path):
    for name in ("official", "f32.gguf", "mxfp4.gguf"):
        with open_checkpoint(structure / name) as checkpoint:
            assert checkpoint.warnings == ()
            assert checkpoint.config.num_draft_layers == 0
            assert bind_weights(checkpoint).warnings == ()
