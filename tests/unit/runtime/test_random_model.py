"""The seeded random model: an ordinary file, the same bytes each time, in a private place."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.formats.tokenizer_spec import TokenizerSpec
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime.random_model import (
    build_random_model,
    random_config,
)
from edgedsv4.text.messages import Message
from edgedsv4.text.prompt import PromptOptions, render_prompt
from edgedsv4.text.tokenizer import Tokenizer

PINNED_DIGEST = "aa7907faf3421f66"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("random") / "tiny.gguf"
    build_random_model(path)
    return path


def test_same_seed_gives_the_same_bytes(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.gguf"
    build_random_model(again)
    assert again.read_bytes() == path.read_bytes()


def test_bytes_are_pinned(path: Path) -> None:
    # A change here changes what everybody's first conversation says; it must be meant.
    assert hashlib.sha256(path.read_bytes()).hexdigest()[:16] == PINNED_DIGEST


def test_another_seed_gives_other_weights(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    build_random_model(other, seed=1)
    assert other.read_bytes() != path.read_bytes()


def test_file_is_below_eight_megabytes(path: Path) -> None:
    assert path.stat().st_size < 8_000_000


def test_file_opens_without_a_warning_and_with_its_shape(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.warnings == ()
        assert bind_weights(checkpoint).warnings == ()
        found = checkpoint.config
    for name in ("vocab_size", "compress_ratios", "num_hash_layers", "head_dim", "max_context"):
        assert getattr(found, name) == getattr(random_config(), name)


def test_it_has_every_kind_of_layer() -> None:
    config = random_config()
    assert set(config.compress_ratios) == {0, 4, 128}
    assert 0 < config.num_hash_layers < config.num_layers


@pytest.mark.parametrize("variant", ["v4", "v4-0731"])
def test_tokenizer_knows_every_token_of_the_chat(path: Path, variant: str) -> None:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {}}}]
    messages = [
        Message("system", "Be brief."),
        Message("latest_reminder", "today"),
        Message("user", "Grüße", task="title"),
        Message("assistant", "a title"),
        Message("user", "go on"),
    ]
    prompt = render_prompt(
        messages, variant=variant, options=PromptOptions(thinking="high", tools=tools)
    )
    with open_checkpoint(path) as checkpoint:
        assert isinstance(checkpoint.tokenizer, TokenizerSpec)
        tokenizer = Tokenizer.from_spec(checkpoint.tokenizer)
    ids = tokenizer.encode_pieces(prompt.pieces)
    assert tokenizer.decode(ids, show_control=True) == prompt.text


def test_matrices_are_rounded_to_nearest_even(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        words = checkpoint.tensors["token_embd.weight"].data().view("<u2").astype(np.uint32)
    values = (words << 16).view(np.float32)
    assert np.isfinite(values).all()
    assert abs(float(values.std()) - 1.0) < 0.01
