"""Which implementation computes, and what is said about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import random_tensors, tiny_config, write_gguf

from edgedsv4.config import EngineOptions
from edgedsv4.errors import BackendUnavailableError
from edgedsv4.formats.checkpoint import Checkpoint, open_checkpoint
from edgedsv4.kernels import dispatch
from edgedsv4.model import native_network
from edgedsv4.model.model import Model
from edgedsv4.model.native_model import NativeModel
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime.backends import OPERATIONS, BackendChoice, choose_backend, load_model

CPU = torch.device("cpu")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    config = tiny_config(compress_ratios=(0, 4), num_hash_layers=1)
    write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config, 1), types="a")
    return open_checkpoint(tmp_path / "tiny.gguf")


def choice(checkpoint: Checkpoint, **options: str) -> BackendChoice:
    return choose_backend(bind_weights(checkpoint), EngineOptions(**options), CPU)


def test_every_operation_that_dispatches_is_listed() -> None:
    folder = Path(dispatch.__file__).parent
    sources = [path.read_text() for path in folder.glob("*.py")]
    named = {s.split('operation="')[1].split('"')[0] for s in sources if 'operation="' in s}
    # Choosing a token is no part of a forward, and does not follow the engine's backend.
    assert named == {*OPERATIONS, "sample"}


def test_auto_takes_the_c_kernels(checkpoint: Checkpoint) -> None:
    assert choice(checkpoint) == BackendChoice("native", ())


@pytest.mark.parametrize("dtype", ["f64", "bf16"])
def test_auto_says_why_it_cannot_take_them(checkpoint: Checkpoint, dtype: str) -> None:
    found = choice(checkpoint, dtype=dtype)
    assert found.name == "reference"
    assert len(found.notes) == 1
    assert "compute in float32" in found.notes[0]


def test_named_c_kernels_that_cannot_run_are_an_error(checkpoint: Checkpoint) -> None:
    with pytest.raises(BackendUnavailableError, match=r"'native' cannot run here: .*float64"):
        choice(checkpoint, backend="native", dtype="f64")


def test_a_missing_extension_is_named(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_network, "HAVE_NATIVE", False)
    monkeypatch.setattr(native_network, "WHY_NOT", "they are not built")
    assert choice(checkpoint).notes == ("computed by torch, which is slower: they are not built",)
    with pytest.raises(BackendUnavailableError, match="they are not built"):
        choice(checkpoint, backend="native")


def test_a_type_that_the_c_kernels_cannot_read_is_named(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_network, "has_native_type", lambda name: name != "MXFP4")
    assert "MXFP4" in choice(checkpoint).notes[0]
    with pytest.raises(BackendUnavailableError, match="MXFP4"):
        choice(checkpoint, backend="native")


@pytest.mark.parametrize(
    ("ratio", "changes", "limit"),
    [
        (0, {"head_dim": 16400}, "at most 16384"),
        (4, {"head_dim": 4112}, "at most 4096"),
        (128, {"head_dim": 4112}, "at most 4096"),
        (4, {"index_dim": 2048}, "32..1024"),
        (4, {"index_dim": 16}, "32..1024"),
    ],
)
def test_a_shape_beyond_the_c_kernels_is_named(
    ratio: int, changes: dict[str, int], limit: str
) -> None:
    config = tiny_config(compress_ratios=(ratio,), num_hash_layers=0, **changes)
    assert limit in str(native_network.model_obstacle(config, ["F32"]))


@pytest.mark.parametrize(
    ("ratio", "changes"),
    [(0, {"head_dim": 16384}), (128, {"head_dim": 4096}), (4, {"index_dim": 1024})],
)
def test_the_largest_shapes_of_the_c_kernels_are_taken(ratio: int, changes: dict[str, int]) -> None:
    config = tiny_config(compress_ratios=(ratio,), num_hash_layers=0, **changes)
    assert native_network.model_obstacle(config, ["F32"]) is None


def test_weights_without_int8_products_are_named(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_network, "_PLAIN_FLOATS", ())
    assert "float32 activations" in choice(checkpoint).notes[0]
    assert choice(checkpoint, profile="exact").notes == ()


@pytest.mark.parametrize(("backend", "kind"), [("reference", Model), ("native", NativeModel)])
def test_the_choice_is_what_computes(
    checkpoint: Checkpoint, backend: str, kind: type[Model]
) -> None:
    options = EngineOptions(backend=backend)
    bound = bind_weights(checkpoint)
    found = choose_backend(bound, options, CPU)
    assert type(load_model(bound, options, CPU, found, 1)) is kind
    assert found.kernels() == dict.fromkeys(OPERATIONS, backend)
    assert (found.instruction_set is None) == (backend == "reference")
