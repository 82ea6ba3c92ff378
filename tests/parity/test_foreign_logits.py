"""The stored model against logits that two other programs computed from the same weights.

`structure` has every part of the architecture; its logits come from transformers and llama.cpp,
which differ from each other by up to 7.9e-5.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numeric
import numpy as np
import pytest
import torch
from file_model import decoded_model, open_model, values_of
from memory_model import BACKENDS, chunk_sizes, evaluate
from structure_data import unpack

if TYPE_CHECKING:
    from edgedsv4.model.model import Model

LIMIT = 2e-4
PEERS = ("transformers", "llamacpp")


@dataclass(frozen=True)
class Stored:
    """The unpacked files, and the logits of both peers."""

    directory: Path
    token_ids: np.ndarray
    logits: dict[str, np.ndarray]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    directory = unpack(tmp_path_factory.mktemp("structure"))
    return Stored(
        directory,
        np.fromfile(directory / "tokens.i32", dtype=np.int32),
        {peer: np.load(directory / f"logits_{peer}_f32.npy") for peer in PEERS},
    )


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def f32_model(stored: Stored, backend: str) -> Model:
    return open_model(stored.directory / "f32.gguf", backend=backend)


def assert_foreign_logits(got: torch.Tensor, stored: Stored) -> None:
    for peer, expected in stored.logits.items():
        numeric.assert_logits(peer, got, expected, LIMIT)


@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(420, id="one prefill"),
        pytest.param(1, id="decode"),
        *(pytest.param(size, id=f"chunks of {size}") for size in (3, 37, 128, 129)),
    ],
)
def test_f32_file_gives_the_foreign_logits(chunk: int, stored: Stored, f32_model: Model) -> None:
    sizes = chunk_sizes(len(stored.token_ids), chunk)
    assert_foreign_logits(evaluate(f32_model, stored.token_ids, sizes=sizes), stored)


def test_prefill_followed_by_decode_gives_the_foreign_logits(
    stored: Stored, f32_model: Model
) -> None:
    sizes = [300, *[1] * 120]
    assert_foreign_logits(evaluate(f32_model, stored.token_ids, sizes=sizes), stored)


def test_official_directory_holds_the_same_weights(stored: Stored, f32_model: Model) -> None:
    official = values_of(open_model(stored.directory / "official"))
    expected = values_of(f32_model)
    assert official.keys() == expected.keys()
    for name, values in expected.items():
        numeric.assert_same_bits(name, official[name], values)


def test_official_directory_gives_the_foreign_logits(stored: Stored, backend: str) -> None:
    model = open_model(stored.directory / "official", backend=backend)
    assert_foreign_logits(evaluate(model, stored.token_ids), stored)


def test_mxfp4_file_equals_float32_on_its_decoded_weights(stored: Stored, backend: str) -> None:
    model = open_model(stored.directory / "mxfp4.gguf", backend=backend)
    got = evaluate(model, stored.token_ids)
    expected = evaluate(decoded_model(model), stored.token_ids)
    numeric.assert_logits("decoded weights", got, expected, LIMIT)


def test_float64_gives_the_foreign_logits(stored: Stored) -> None:
    model = open_model(stored.directory / "f32.gguf", dtype=torch.float64)
    assert_foreign_logits(evaluate(model, stored.token_ids), stored)
