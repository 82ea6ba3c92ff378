"""Where an engine finds the MTP block, what it says without one, and what drafts take."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import random_tensors, tiny_config, write_gguf

from edgedsv4.config import EngineOptions, SamplingOptions
from edgedsv4.errors import ConfigError, FormatError, UnsupportedModelError
from edgedsv4.runtime.engine import Engine
from edgedsv4.runtime.inspection import plan_model
from edgedsv4.runtime.memory_plan import StateLayout

CONFIG = tiny_config(num_draft_layers=1, compress_ratios=(0, 4), num_hash_layers=1)
GREEDY = SamplingOptions(temperature=0, max_tokens=24)


def options(draft: int = 2, **more: object) -> EngineOptions:
    return EngineOptions(threads=1, context=200, draft=draft, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tensors = random_tensors(CONFIG, seed=6)
    plain = {name: array for name, array in tensors.items() if not name.startswith("mtp.")}
    write_gguf(folder / "inside.gguf", CONFIG, tensors)
    write_gguf(folder / "plain.gguf", tiny_config(compress_ratios=(0, 4), num_hash_layers=1), plain)
    (folder / "mtp-plain.gguf").symlink_to(folder / "inside.gguf")
    return folder


def drafted_steps(engine: Engine) -> int:
    with engine.new_session() as session:
        session.sync(range(40))
        assert len(list(session.generate(GREEDY))) == 24
        drafts = session.totals.drafts
        assert drafts is not None
        return drafts.drafted_steps


def test_block_inside_the_file_drafts(models: Path) -> None:
    with Engine.open(models / "inside.gguf", options()) as engine:
        assert drafted_steps(engine) > 0
        assert engine.describe()["draft"] == 2
        assert "the MTP block drafts up to 2 tokens ahead" in str(engine.describe()["notes"])


def test_block_of_a_file_that_was_named_drafts(models: Path) -> None:
    named = options(draft_model=str(models / "mtp-plain.gguf"))
    with Engine.open(models / "plain.gguf", named) as engine:
        assert drafted_steps(engine) > 0


def test_missing_block_is_told_with_the_file_beside_it(models: Path) -> None:
    message = r"draft is 2, but .*plain\.gguf holds no MTP block \(mtp-plain\.gguf lies beside it\)"
    with pytest.raises(ConfigError, match=message):
        Engine.open(models / "plain.gguf", options())
    with pytest.raises(ConfigError, match="holds no MTP block; name the file"):
        Engine.open("random-tiny", options())
    with pytest.raises(ConfigError, match="holds no MTP block"):
        plan_model(models / "plain.gguf", options())


def test_file_without_a_block_is_refused(models: Path) -> None:
    with pytest.raises(FormatError, match="holds no MTP block"):
        Engine.open(models / "plain.gguf", options(draft_model=models / "plain.gguf"))


def test_second_block_is_refused(models: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="that has none"):
        Engine.open(models / "inside.gguf", options(draft_model=models / "mtp-plain.gguf"))


def test_draft_file_without_drafts_is_refused() -> None:
    with pytest.raises(ConfigError, match="draft_model must be left out while draft is 0"):
        options(draft=0, draft_model="mtp.gguf")


def test_block_that_nobody_asked_for_takes_no_memory(models: Path) -> None:
    with Engine.open(models / "inside.gguf", options(draft=0)) as engine:
        with engine.new_session() as session:
            assert session.totals.drafts is None
            assert engine.memory()["kv_allocated"] == StateLayout(CONFIG).state_bytes(200)
        assert "not used" in str(engine.describe()["notes"])


def test_drafts_are_in_the_plan_and_in_the_engine_s_account(models: Path) -> None:
    path = models / "inside.gguf"
    layout = StateLayout(CONFIG, draft=2)
    items = {item.name: item.nbytes for item in plan_model(path, options()).items}
    assert items["drafts"] == layout.draft_bytes > 0
    assert "drafts" not in {item.name for item in plan_model(path, options(draft=0)).items}
    with Engine.open(path, options()) as engine, engine.new_session():
        assert engine.memory()["kv_allocated"] == layout.state_bytes(200)
