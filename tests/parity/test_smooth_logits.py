"""The stored model in which nothing discrete can flip, in float32 and with everything rounded.

`smooth` has the shapes of `structure`, but every expert follows from the token id and every
compressed row is seen, so differences stay small and the cost of a rounding can be read off.
"""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import TYPE_CHECKING

import numeric
import numpy as np
import pytest
from file_model import open_model
from memory_model import BACKENDS, chunk_sizes, evaluate
from tiny_files import gguf_name
from tiny_model import Tensors, random_tensors, write_gguf

from edgedsv4.formats.checkpoint import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from edgedsv4.config import Profile

PARTS = {"w1": "gate", "w3": "up", "w2": "down"}


@pytest.fixture(scope="module")
def stored(request: pytest.FixtureRequest) -> Path:
    folder: Path | None = request.config.option.smooth
    if folder is None:
        pytest.fail("name the folder that holds the model: --smooth FOLDER")
    return folder


@pytest.fixture(scope="module")
def f32_file(stored: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("smooth") / "f32.gguf"
    path.write_bytes(lzma.decompress((stored / "f32.gguf.xz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def mxfp4_file(f32_file: Path) -> Path:
    """MXFP4 experts (exact, they come from FP4), Q8_0 for FP8 sources, BF16 and F32 else."""
    path = f32_file.with_name("mxfp4.gguf")
    with open_checkpoint(f32_file) as checkpoint:
        write_gguf(path, checkpoint.config, official_values(checkpoint), types="a")
    return path


@pytest.fixture(scope="module")
def token_ids(stored: Path) -> np.ndarray:
    return np.fromfile(stored / "tokens.i32", dtype=np.int32)


@pytest.fixture(scope="module")
def peers(stored: Path) -> dict[str, np.ndarray]:
    names = ("transformers", "llamacpp")
    return {name: np.load(stored / f"logits_{name}_f32.npy") for name in names}


def official_values(checkpoint: Checkpoint) -> Tensors:
    """The tensors of an all-F32 GGUF file under their official names."""
    return {
        name: stored_values(checkpoint, name) for name in random_tensors(checkpoint.config, seed=0)
    }


def stored_values(checkpoint: Checkpoint, name: str) -> np.ndarray:
    if ".experts." in name:
        _, layer, _, _, expert, part, _ = name.split(".")
        record = checkpoint.tensors[f"blk.{layer}.ffn_{PARTS[part]}_exps.weight"]
        return record.data().view(np.float32).reshape(record.shape)[int(expert)]
    record = checkpoint.tensors[gguf_name(name)]
    if name.endswith("tid2eid"):
        return record.data().view(np.int32).reshape(record.shape).astype(np.int64)
    return record.data().view(np.float32).reshape(record.shape)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(420, id="one prefill"),
        pytest.param(1, id="decode"),
        *(pytest.param(size, id=f"chunks of {size}") for size in (3, 37, 128, 129)),
    ],
)
def test_f32_file_gives_the_foreign_logits(
    chunk: int,
    backend: str,
    f32_file: Path,
    token_ids: np.ndarray,
    peers: dict[str, np.ndarray],
) -> None:
    sizes = chunk_sizes(len(token_ids), chunk)
    got = evaluate(open_model(f32_file, backend=backend), token_ids, sizes=sizes)
    for name, logits in peers.items():
        numeric.assert_logits(name, got, logits, 2e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("profile", "limit"),
    [
        # Q8_0 weights alone: 0.0057 measured.
        pytest.param("exact", 0.012, id="exact"),
        # FP8 rows cost 0.028 of their own: transformers with rows so rounded shows the same.
        pytest.param("default", 0.04, id="default"),
    ],
)
def test_quantised_file_stays_close_to_the_float32_logits(
    profile: Profile,
    limit: float,
    backend: str,
    mxfp4_file: Path,
    token_ids: np.ndarray,
    peers: dict[str, np.ndarray],
) -> None:
    got = evaluate(open_model(mxfp4_file, profile=profile, backend=backend), token_ids)
    assert numeric.mean_kl(peers["transformers"], got) <= limit
