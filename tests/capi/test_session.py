"""Timelines in the hands of a C program, saved states, and the documents about models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from capi.programs import HERE, POCKET, Library, Results, checks_in

from edgedsv4 import (
    Engine,
    EngineOptions,
    devices,
    inspect_model,
    inspect_snapshot,
    plan_model,
)

SOURCE = HERE / "session.c"


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("session") / "talk.dsv4s"


@pytest.fixture(scope="module")
def results(library: Library, state: Path) -> Results:
    return library.results(SOURCE, POCKET, state)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(POCKET, EngineOptions(context=4096)) as opened:
        yield opened


@pytest.mark.parametrize("name", checks_in(SOURCE))
def test_session(results: Results, name: str) -> None:
    assert results[name] == "ok"


def plain(value: object) -> Any:
    """What is left of a value in JSON."""
    return json.loads(json.dumps(value))


def test_the_inspection_is_that_of_python(results: Results) -> None:
    assert json.loads(results.facts["inspect"]) == plain(inspect_model(POCKET).to_json())


def test_the_plan_is_that_of_python(results: Results) -> None:
    found = json.loads(results.facts["plan"])
    expected = plain(plan_model(POCKET, EngineOptions(context=512)).to_json())
    # What the machine has free moves.
    moving = {name for name in found if "available" in name or "largest" in name}
    assert found.keys() == expected.keys()
    assert {n: found[n] for n in found.keys() - moving} == {
        n: expected[n] for n in found.keys() - moving
    }


def test_the_devices_are_those_of_python(results: Results) -> None:
    assert json.loads(results.facts["devices"]) == plain(list(map(dataclasses.asdict, devices())))


def test_the_description_is_that_of_python(results: Results, engine: Engine) -> None:
    assert json.loads(results.facts["describe"]) == plain(engine.describe())


def test_the_memory_has_the_items_of_python(results: Results, engine: Engine) -> None:
    found = json.loads(results.facts["memory"])
    assert found.keys() == engine.memory().keys()
    assert found["sessions"] == 1
    assert found["kv_used"] > 0


def test_the_snapshot_is_described_as_by_python(results: Results, state: Path) -> None:
    assert json.loads(results.facts["snapshot"]) == plain(inspect_snapshot(state).to_json())


def test_the_facts_of_an_engine_are_those_of_python(results: Results, engine: Engine) -> None:
    tokenizer, config, memory = engine.tokenizer, engine.config, engine.memory()
    ids = (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    assert json.loads(results.facts["info"]) == [
        *(config.vocab_size, 4096, config.max_context, config.num_layers),
        *(-1 if token_id is None else token_id for token_id in ids),
        *(1, engine.describe()["identity_sha256"], engine.variant),
        memory["mapped_weights"] + memory["mapped_experts"],
    ]


def test_a_state_that_c_saved_is_loaded_by_python(
    results: Results, engine: Engine, state: Path
) -> None:
    assert results["load.length"] == "ok"
    with engine.new_session() as session:
        session.load(state)
        assert session.length == 300
