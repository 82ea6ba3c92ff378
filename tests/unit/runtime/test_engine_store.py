"""An engine whose experts do not all fit: the same text, bounded memory, and it says so."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from expert_store_samples import greedy, stored_model
from pack_models import write_pack
from tiny_model import random_tensors, random_tokens, tiny_config, write_gguf

from edgedsv4 import (
    BackendUnavailableError,
    CancelledError,
    CapacityError,
    ConfigError,
    DoneEvent,
    Engine,
    EngineOptions,
    ExpertFrequency,
    Message,
    SamplingOptions,
    plan_model,
    write_expert_frequency,
)
from edgedsv4.cli.replies import stats_line
from edgedsv4.errors import ExpertReadError
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.formats.expert_pack import read_expert_pack
from edgedsv4.model.hooks import ForwardHooks
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime import opening
from edgedsv4.runtime.backends import BackendChoice
from edgedsv4.runtime.memory_plan import EXPERTS
from edgedsv4.runtime.store_plan import BANK, STAGING

POCKET = Path(__file__).resolve().parents[3] / "apps/pocket/models/pocket-v4-e16.gguf"
CONFIG = tiny_config(num_experts=16, num_draft_layers=1)
GREEDY = SamplingOptions(temperature=0, max_tokens=24)
SLOT = 122_880
"""Bytes of a slot of the pocket model."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "tiny.gguf"
    write_gguf(path, CONFIG, random_tensors(CONFIG, seed=3), types="a")
    return path


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_tokens(CONFIG, 70, seed=1).tolist()


@pytest.fixture(scope="module")
def expected(path: Path, prompt: list[int]) -> dict[tuple[str, int], list[int]]:
    """Out of the mapping, by profile and chunk: int8 products depend on it above 16 tokens."""
    found = {}
    for profile in ("default", "exact"):
        with stored_model(path, 0, profile=profile) as (model, _, _):
            for chunk in (9, 23, 70):
                found[profile, chunk] = greedy(model, prompt, 16, chunk)
    return found


def options(**changes: object) -> EngineOptions:
    chosen = {"context": 1024, "threads": 1, "expert_place": "stored", **changes}
    return EngineOptions(**chosen)  # type: ignore[arg-type]  # fields by name


def answer(engine: Engine) -> tuple[tuple[int, ...], DoneEvent]:
    with engine.new_session() as session:
        message = Message(role="user", content="What is 12 + 30?")
        *_, done = session.reply([message], GREEDY)
        assert isinstance(done, DoneEvent)
        return session.token_ids, done


@pytest.fixture(scope="module")
def mapped() -> tuple[int, ...]:
    with Engine.open(POCKET, options(expert_place="mapped")) as engine:
        tokens, done = answer(engine)
        assert done.stats.experts is None
        return tokens


@pytest.mark.parametrize("slots", [3, 5, 16, 40, 96])
@pytest.mark.parametrize("prefetch", ["off", "hash", "gate"])
@pytest.mark.parametrize("profile", ["default", "exact"])
@pytest.mark.parametrize("chunk", [9, 70])
def test_text_does_not_depend_on_the_store(
    path: Path,
    prompt: list[int],
    expected: dict[tuple[str, int], list[int]],
    slots: int,
    prefetch: str,
    profile: str,
    chunk: int,
) -> None:
    with stored_model(path, slots, profile=profile, prefetch=prefetch) as found:
        model, store, _ = found
        cold = greedy(model, prompt, 16, chunk)
        warm = greedy(model, prompt, 16, chunk)
        assert cold == warm == expected[profile, chunk]
        assert store.resident() <= slots


def test_reference_streams_too(
    path: Path, prompt: list[int], expected: dict[tuple[str, int], list[int]]
) -> None:
    with stored_model(path, 4, backend="reference", profile="exact") as (model, _, _):
        assert greedy(model, prompt, 4) == expected["exact", 70][:4]


def test_draft_block_takes_its_experts_from_the_store(path: Path) -> None:
    logits = []
    for slots in (0, 3):
        with stored_model(path, slots) as (model, _, _):
            cache, draft = model.new_cache(16), model.new_draft_cache(16)
            first = model.forward(torch.arange(5, 10), cache)
            found = model.forward_draft(first.streams, torch.arange(6, 11), draft)
            assert found.logits is not None
            logits.append(found.logits)
    assert torch.equal(*logits)


def test_two_threads_get_the_text_of_one(
    path: Path, prompt: list[int], expected: dict[tuple[str, int], list[int]]
) -> None:
    found: list[list[int]] = []
    with stored_model(path, 6) as (model, _, _):
        threads = [
            threading.Thread(target=lambda: found.append(greedy(model, prompt, 16, 23)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [expected["default", 23]] * 2


def test_cancel_in_the_middle_of_a_read_leaves_the_timeline_and_the_store(
    path: Path, prompt: list[int], expected: dict[tuple[str, int], list[int]]
) -> None:
    with stored_model(path, 4) as (model, store, _):
        store.reader.disturb(times=10_000, nbytes=1 << 30, delay_ms=5)
        cache, asked = model.new_cache(100), iter(range(1000))
        hooks = ForwardHooks(should_stop=lambda: next(asked) > 12)
        with pytest.raises(CancelledError):
            model.forward(torch.tensor(prompt), cache, hooks=hooks)
        assert cache.length == 0
        store.reader.disturb(times=0)
        assert greedy(model, prompt, 16) == expected["default", 70]


@pytest.mark.parametrize("slots", [8, 30, 200])
def test_engine_answers_the_same_from_a_store(slots: int, mapped: tuple[int, ...]) -> None:
    with Engine.open(POCKET, options(expert_ram_bytes=slots * SLOT)) as engine:
        tokens, done = answer(engine)
        assert tokens == mapped
        assert done.stats.experts is not None
        assert done.stats.experts.asked > 0
        facts = engine.describe()["experts"]
        assert isinstance(facts, dict)
        assert facts["place"] == "stored"
        assert facts["slots"] + facts["staging_slots"] == min(slots, 112 + 2)
        assert engine.memory()["expert_bank"] == min(slots, 114) * SLOT


def test_drafts_with_a_store_give_the_same_text() -> None:
    texts = []
    for place in ("mapped", "stored"):
        chosen = options(expert_place=place, draft=2, profile="exact")
        if place == "stored":
            chosen = options(draft=2, profile="exact", expert_ram_bytes=90 << 20)
        with Engine.open("pocket-v4", chosen) as engine:
            texts.append(answer(engine)[0])
    assert texts[0] == texts[1]


def test_auto_stores_what_does_not_fit_and_only_then(mapped: tuple[int, ...]) -> None:
    plan = plan_model(POCKET, options(expert_place="mapped"))
    roomy, tight = plan.needed_bytes + (64 << 20), plan.needed_bytes + (9 << 20)
    with Engine.open(POCKET, options(expert_place="auto", ram_bytes=roomy)) as engine:
        assert engine.describe()["experts"] == {"place": "mapped"}
    with Engine.open(POCKET, options(expert_place="auto", ram_bytes=tight)) as engine:
        assert engine.describe()["experts"]["place"] == "stored"  # type: ignore[index]  # a dict
        assert answer(engine)[0] == mapped
        assert any("experts stay in memory" in note for note in engine.describe()["notes"])  # type: ignore[attr-defined]


def test_auto_maps_what_has_no_room_for_a_store(mapped: tuple[int, ...]) -> None:
    budget = plan_model(POCKET, options(expert_place="mapped")).needed_bytes + 1000
    with Engine.open(POCKET, options(expert_place="auto", ram_bytes=budget)) as engine:
        assert engine.describe()["experts"] == {"place": "mapped"}
        assert answer(engine)[0] == mapped
        assert any("stay mapped" in note for note in engine.describe()["notes"])  # type: ignore[attr-defined]
    plan = plan_model(POCKET, options(expert_place="auto", ram_bytes=budget))
    assert plan.fits
    assert BANK not in [item.name for item in plan.items]
    with pytest.raises(CapacityError, match="the experts of one token"):
        Engine.open(POCKET, options(expert_place="stored", ram_bytes=budget))


def test_memory_for_experts_that_are_mapped_is_announced() -> None:
    chosen = options(expert_place="mapped", expert_ram_bytes=20 * SLOT)
    with Engine.open(POCKET, chosen) as engine:
        notes = engine.describe()["notes"]
        assert any("expert_ram_bytes has no effect" in note for note in notes)  # type: ignore[attr-defined]


def test_frequencies_decide_what_stays_at_first(tmp_path: Path) -> None:
    with Engine.open(POCKET, options(expert_place="mapped")) as engine:
        layers, experts = engine.config.num_layers, engine.config.num_experts
        identity = str(engine.describe()["identity_sha256"])
    counts = np.zeros((layers, experts), dtype=np.uint64)
    counts[:, 3:5] = 50
    file = tmp_path / "freq.json"
    frequency = ExpertFrequency(identity, "corpus", "0" * 64, 50, 2, counts)
    write_expert_frequency(file, frequency)
    chosen = options(expert_freq=file, expert_ram_bytes=20 * SLOT)
    with Engine.open(POCKET, chosen) as engine:
        store = engine._opened.choice.store  # type: ignore[union-attr]
        assert store is not None
        assert store.prior is not None
        assert store.prior.tolist() == frequency.rates().tolist()
        answer(engine)
    write_expert_frequency(file, replace(frequency, identity_sha256="1" * 64))
    with pytest.raises(ConfigError, match="belongs to model"):
        Engine.open(POCKET, chosen)


def test_store_is_refused_where_torch_computes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "engine_device", lambda _options: torch.device("cuda"))
    monkeypatch.setattr(opening, "choose_backend", lambda *_: BackendChoice("reference", ()))
    with open_checkpoint(POCKET) as checkpoint:
        bound = bind_weights(checkpoint)
        with pytest.raises(BackendUnavailableError, match="expert_place 'stored' needs"):
            opening.place(checkpoint, bound, options())


def test_stats_line_tells_about_the_store() -> None:
    with Engine.open(POCKET, options(expert_ram_bytes=20 * SLOT)) as engine:
        line = stats_line(answer(engine)[1].stats)
    assert re.search(r"experts [\d,]+ from memory \(\d+%\), [\d,]+ read ahead", line)
    assert re.search(r"\d\.\d\d GB read.*\d s of waiting$", line)


def test_a_store_leaves_room_for_a_second_session() -> None:
    plan = plan_model(POCKET, options(expert_place="mapped"))
    budget = plan.needed_bytes + (9 << 20)
    with (
        Engine.open(POCKET, options(ram_bytes=budget)) as engine,
        engine.new_session(),
        engine.new_session(),
    ):
        pass


def test_plan_has_lines_for_the_store_within_the_budget() -> None:
    budget = plan_model(POCKET, options(expert_place="mapped")).needed_bytes + (9 << 20)
    plan = plan_model(POCKET, options(ram_bytes=budget))
    lines = {item.name: item for item in plan.items}
    assert plan.fits
    assert lines[BANK].is_required
    assert lines[BANK].nbytes % SLOT == lines[STAGING].nbytes % SLOT == 0
    assert not lines[EXPERTS].is_required


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_ram_bytes": SLOT}, "expert_ram_bytes must hold"),
        ({"expert_ram_bytes": 1 << 50}, "do not fit beside the rest"),
        ({"ram_bytes": 1 << 20}, "does not fit"),
    ],
)
def test_budget_that_is_too_small_is_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        Engine.open(POCKET, options(**changes))


def test_memory_stays_flat_over_2000_tokens(path: Path) -> None:
    with stored_model(path, 8) as (model, _, _):
        cache = model.new_cache(2200)
        model.forward(torch.arange(200), cache)
        before = _rss()
        for token in range(2000):
            model.forward(torch.tensor([token % CONFIG.vocab_size]), cache)
        assert _rss() - before < 6 << 20


def test_pages_of_mapped_experts_are_never_touched(tmp_path: Path) -> None:
    # A copy that is not in the system's cache: what is there may be mapped in large pieces.
    model = tmp_path / POCKET.name
    with model.open("wb") as copy:
        copy.write(POCKET.read_bytes())
        copy.flush()
        os.fsync(copy.fileno())
        os.posix_fadvise(copy.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    chosen = options(expert_ram_bytes=20 * SLOT)
    with Engine.open(model, chosen) as engine, engine.new_session() as session:
        session.evaluate(range(300, 400))
        for token in range(300, 340):
            session.evaluate([token])
        # Beside the weights only the header, and pages that hold the end of one and an expert.
        assert _mapped_rss(model) < engine.memory()["mapped_weights"] + (3 << 20)


def test_experts_of_a_pack_are_compared_with_its_checksums(tmp_path: Path) -> None:
    pack = tmp_path / "experts.pack"
    write_pack(POCKET, pack)
    chosen = options(expert_ram_bytes=20 * SLOT, expert_verify="full", dense_model=str(POCKET))
    with Engine.open(POCKET, options()) as engine, engine.new_session() as session:
        session.evaluate(range(300, 340))
        expected = session.logits()
    with Engine.open(pack, chosen) as engine, engine.new_session() as session:
        session.evaluate(range(300, 340))
        assert np.array_equal(session.logits(), expected)
        assert not any("expert_verify" in note for note in engine.describe()["notes"])
    with read_expert_pack(pack) as opened:
        first, nbytes = opened.place(0, 3, 1)
    with pack.open("r+b") as damaged:
        damaged.seek(first + nbytes // 2)
        byte = damaged.read(1)
        damaged.seek(first + nbytes // 2)
        damaged.write(bytes([byte[0] ^ 1]))
    with Engine.open(pack, chosen) as engine, engine.new_session() as session:
        with pytest.raises(ExpertReadError, match=r"expert 3 of layer 0.*the file is damaged"):
            session.evaluate(range(300, 340))
        assert session.token_ids == ()


def test_options_of_a_store_that_is_not_there_are_announced() -> None:
    chosen = options(expert_place="mapped", io="direct", io_depth=7, prefetch="off")
    with Engine.open(POCKET, chosen) as engine:
        notes = " ".join(engine.describe()["notes"])  # type: ignore[arg-type]
    for name in ("io", "io_depth", "prefetch"):
        assert f" {name} has no effect" in f" {notes}"


def test_a_block_without_checksums_is_announced(tmp_path: Path) -> None:
    pack = tmp_path / "experts.pack"
    shipped = resources.files("edgedsv4") / "data" / "pocket-v4"
    model, block = (str(shipped / name) for name in ("pocket-v4.gguf", "mtp-pocket-v4.gguf"))
    write_pack(Path(model), pack)
    chosen = options(
        expert_place="stored", expert_verify="full", dense_model=model, draft_model=block, draft=2
    )
    with Engine.open(pack, chosen) as engine:
        notes = engine.describe()["notes"]
        assert any("MTP block's experts are not in the pack" in note for note in notes)  # type: ignore[attr-defined]


def test_too_little_memory_for_experts_is_an_error_at_any_budget() -> None:
    needed = plan_model(POCKET, options(expert_place="mapped")).needed_bytes
    for more in (1000, 9 << 20):
        chosen = options(expert_place="auto", ram_bytes=needed + more, expert_ram_bytes=1000)
        for ask in (Engine.open, plan_model):
            with pytest.raises(CapacityError, match="expert_ram_bytes must hold"):
                ask(POCKET, chosen)


def test_a_session_tells_where_experts_came_from() -> None:
    chosen = options(expert_ram_bytes=20 * SLOT)
    with Engine.open(POCKET, chosen) as engine, engine.new_session() as session:
        before = session.totals.experts
        session.evaluate(range(300, 310))
        after = session.totals.experts
    assert before is not None
    assert after is not None
    assert after.since(before).asked > 0
    chosen = options(expert_place="mapped")
    with Engine.open(POCKET, chosen) as engine, engine.new_session() as session:
        assert session.totals.experts is None


def test_checksums_without_a_pack_have_no_effect_and_are_said_to() -> None:
    with Engine.open(POCKET, options(expert_verify="sampled")) as engine:
        assert any("expert_verify has no effect" in note for note in engine.describe()["notes"])


def _rss() -> int:
    """Bytes of the process that are in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def _mapped_rss(path: Path) -> int:
    """Bytes of a file's mappings that are in memory."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_ours = words[-1] == str(path)
        elif is_ours and words[0] == "Rss:":
            total += int(words[1]) << 10
    return total
