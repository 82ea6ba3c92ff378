"""Names of shipped models: where they lead, what comes with them, what is said of them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

import edgedsv4
from edgedsv4.config import EngineOptions
from edgedsv4.errors import ConfigError
from edgedsv4.runtime.engine import Engine
from edgedsv4.runtime.shipped_models import (
    DEFAULT_MODEL,
    POCKET_V4,
    RANDOM_TINY,
    SHIPPED_MODELS,
    model_path,
    open_model,
)

PACKAGE = Path(edgedsv4.__file__).parent


def test_trained_model_lies_in_the_package() -> None:
    with model_path(POCKET_V4) as path:
        assert path == PACKAGE / "data" / "pocket-v4" / "pocket-v4.gguf"
        assert path.stat().st_size < 18_000_000


def test_trained_model_is_the_default() -> None:
    assert DEFAULT_MODEL == POCKET_V4
    assert DEFAULT_MODEL in SHIPPED_MODELS


def test_trained_model_comes_with_its_draft_block() -> None:
    with model_path(POCKET_V4) as path, open_model(path) as alone, open_model(POCKET_V4) as both:
        assert (alone.config.num_draft_layers, both.config.num_draft_layers) == (0, 1)
        assert alone.identity_sha256 != both.identity_sha256


def test_files_of_a_shipped_model_are_closed_afterwards() -> None:
    with open_model(POCKET_V4) as checkpoint:
        record = checkpoint.tensors["blk.7.nextn.eh_proj.weight"]
        assert record.data().nbytes == record.nbytes
    with pytest.raises(ValueError, match="closed"):
        record.data()


def test_block_beside_a_file_of_the_user_is_not_taken(tmp_path: Path) -> None:
    with model_path(POCKET_V4) as path:
        for name in (path.name, f"mtp-{path.name}"):
            (tmp_path / name).symlink_to(path.with_name(name))
    with open_model(tmp_path / path.name) as checkpoint:
        assert checkpoint.config.num_draft_layers == 0


def test_engine_says_what_the_trained_model_is_and_what_is_left_out() -> None:
    with Engine.open(POCKET_V4, EngineOptions(threads=1, context=64)) as engine:
        notes = engine.describe()["notes"]
    expected = [
        SHIPPED_MODELS[POCKET_V4].note,
        "the MTP block is not used; draft (--draft N) makes it draft N tokens ahead",
    ]
    assert notes == expected


def test_random_model_is_built_in_a_private_place_and_removed() -> None:
    with model_path(RANDOM_TINY) as path:
        folder = path.parent
        assert path.is_file()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with model_path(RANDOM_TINY) as other:
            assert other.parent != folder
    assert not folder.exists()


def test_empty_name_is_not_the_working_directory() -> None:
    with pytest.raises(ConfigError, match="name is empty"), model_path(""):
        pass


def test_other_names_are_paths() -> None:
    with model_path("somewhere/model.gguf") as path:
        assert path == Path("somewhere/model.gguf")
