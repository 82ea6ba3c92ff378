"""The bytes that a decode step reads, against the file they are read from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgedsv4.config import EngineOptions
from edgedsv4.errors import ConfigError
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.runtime.engine import Engine
from edgedsv4.runtime.memory_plan import StateLayout
from edgedsv4.runtime.random_model import build_random_model
from edgedsv4.runtime.token_bytes import cache_read_bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    build_random_model(path)
    return path


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with Engine.open(path, EngineOptions(threads=1)) as engine:
        yield engine


def test_weights_are_those_of_the_file_less_what_a_token_leaves_out(
    engine: Engine, path: Path
) -> None:
    found = engine.bytes_per_token()
    config = engine.config
    by_token = 0
    with open_checkpoint(path) as checkpoint:
        sizes = {name: record.nbytes for name, record in checkpoint.tensors.items()}
    for name, nbytes in sizes.items():
        if name.startswith("token_embd") or "tid2eid" in name:
            by_token += nbytes - nbytes // config.vocab_size
    experts = sum(nbytes for name, nbytes in sizes.items() if "_exps" in name)
    assert found["expert_weights"] == experts * config.experts_per_token // config.num_experts
    assert found["dense_weights"] == sum(sizes.values()) - experts - by_token


def test_first_token_reads_its_own_window_row_in_each_layer(engine: Engine) -> None:
    layout = StateLayout(engine.config)
    assert engine.bytes_per_token()["kv"] == engine.config.num_layers * layout.row_bytes


def test_reads_of_compressed_rows_end_at_the_selection(engine: Engine) -> None:
    layout = StateLayout(engine.config)
    config = engine.config
    indexed = config.compress_ratios.count(4)
    step = 128 * config.index_topk
    growth = cache_read_bytes(layout, 3 * step) - cache_read_bytes(layout, 2 * step)
    keys = indexed * step // 4 * layout.index_key_bytes
    rows = config.compress_ratios.count(128) * step // 128 * layout.row_bytes
    assert growth == keys + rows


def test_negative_depth_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="depth"):
        engine.bytes_per_token(-1)
