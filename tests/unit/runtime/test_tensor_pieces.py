"""Weights in another storage type come in small pieces that add up to the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.gguf import GgufType, read_gguf
from edgedsv4.formats.gguf_write import GgufWriter
from edgedsv4.kernels.quantize import quantize
from edgedsv4.model.bound_weights import BoundTensor
from edgedsv4.runtime.tensor_pieces import joined_pieces, weight_pieces

SHAPE = (6000, 1024)
LARGEST_PIECE_BYTES = 1 << 24


@pytest.fixture(scope="module")
def weight(tmp_path_factory: pytest.TempPathFactory) -> BoundTensor:
    """A matrix of 24 MB in a file."""
    path = tmp_path_factory.mktemp("pieces") / "m.gguf"
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    writer = GgufWriter(path)
    writer.add_metadata("general.architecture", "deepseek4", GgufType.STRING)
    writer.add_tensor("w", SHAPE, BLOCK_TYPES["F32"], values)
    writer.write()
    record = read_gguf(path).tensors["w"]
    return BoundTensor(record, record.block_type, SHAPE, SHAPE[1])


@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0"])
def test_pieces_are_small_and_add_up(weight: BoundTensor, name: str) -> None:
    kind = BLOCK_TYPES[name]
    pieces = list(weight_pieces(weight, kind))
    assert max(piece.nbytes for piece in pieces) <= LARGEST_PIECE_BYTES
    assert len(pieces) > 1
    values = torch.from_numpy(weight.record.data().view("<f4").reshape(SHAPE).copy())
    whole = b"".join(piece.tobytes() for piece in pieces)
    assert whole == quantize(values, kind).numpy().tobytes()


def test_matrices_are_joined_row_by_row(weight: BoundTensor) -> None:
    kind = BLOCK_TYPES["Q8_0"]
    alone = np.concatenate(list(weight_pieces(weight, kind)))
    joined = np.concatenate(list(joined_pieces([weight, weight], kind)))
    np.testing.assert_array_equal(joined, np.concatenate([alone, alone], axis=1))
