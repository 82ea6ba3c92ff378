"""A saved session goes on as if nothing had happened: bit for bit, on every backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from snapshot_sessions import (
    CONFIG,
    GREEDY,
    SAMPLED,
    TEXT,
    continued,
    options,
    session_of,
    state,
    write_model,
)

import edgedsv4
from edgedsv4.config import SamplingOptions
from edgedsv4.errors import BusyError, ConfigError, Dsv4Error
from edgedsv4.formats.snapshot_file import inspect_snapshot
from edgedsv4.runtime.engine import Engine
from edgedsv4.runtime.memory_plan import StateLayout
from edgedsv4.runtime.snapshot import STORED_CHECKPOINTS

if TYPE_CHECKING:
    from edgedsv4.runtime.session import Session

WAYS: dict[str, dict[str, Any]] = {
    "native": {"backend": "native"},
    "native, two threads": {"backend": "native", "threads": 2},
    "native, drafts": {"backend": "native", "draft": 3},
    "native, exact": {"backend": "native", "profile": "exact"},
    "native, exact, drafts": {"backend": "native", "profile": "exact", "draft": 2},
    "reference": {"backend": "reference"},
    "reference, drafts": {"backend": "reference", "draft": 2, "dtype": "f64", "profile": "exact"},
    "reference, bf16": {"backend": "reference", "dtype": "bf16", "profile": "exact"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture
def session(model: Path) -> Any:
    with session_of(model) as session:
        yield session


def assert_same_state(left: Session, right: Session) -> None:
    a, b = state(left), state(right)
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
    assert left.token_ids == right.token_ids
    assert left.turn_positions[-STORED_CHECKPOINTS:] == right.turn_positions


@pytest.mark.parametrize(
    ("way", "length"),
    [
        *(("native", length) for length in (1, 3, 4, 32, 33, 130, 601)),
        *((way, 270) for way in WAYS),
    ],
)
def test_restored_session_continues_bit_identically(model: Path, way: str, length: int) -> None:
    for sampling in (GREEDY, SAMPLED):
        with Engine.open(model, options(**WAYS[way])) as engine:
            live = engine.new_session()
            live.sync(TEXT[:length])
            restored = engine.load_session(live.save_bytes())
            assert_same_state(live, restored)
            ids, logits = continued(live, sampling)
            again, logits_again = continued(restored, sampling)
            assert again == ids
            if "draft" not in WAYS[way] or "native" in way:
                np.testing.assert_array_equal(logits_again, logits)


@pytest.mark.parametrize("way", ["native, drafts", "reference, drafts"])
def test_session_saved_after_drafts_continues_with_and_without_them(model: Path, way: str) -> None:
    with Engine.open(model, options(**WAYS[way])) as engine:
        live = engine.new_session()
        live.sync(TEXT[:90])
        list(live.generate(SamplingOptions(seed=2, max_tokens=40)))
        saved = live.save_bytes()
        assert inspect_snapshot(saved).header.streams_first is not None
        ids, _ = continued(live, SAMPLED)
        assert continued(engine.load_session(saved), SAMPLED)[0] == ids
    plain = {**WAYS[way], "draft": 0}
    with Engine.open(model, options(**plain)) as engine:
        assert continued(engine.load_session(saved), SAMPLED)[0] == ids


def test_drafts_that_nobody_sampled_are_not_saved(model: Path) -> None:
    with Engine.open(model, options(draft=3)) as engine:
        live = engine.new_session()
        live.sync(TEXT[:90])
        tokens = live.generate(replace(SAMPLED, max_tokens=200))
        ids = [next(tokens) for _ in range(60)]
        tokens.close()  # type: ignore[attr-defined]
        restored = engine.load_session(live.save_bytes())
        assert restored.token_ids == (*TEXT[:90], *ids)
        assert_same_state(live, restored)
        assert continued(restored, SAMPLED)[0] == continued(live, SAMPLED)[0]


def test_session_saved_without_drafts_continues_with_them(model: Path) -> None:
    with session_of(model) as live:
        live.sync(TEXT[:90])
        saved = live.save_bytes()
        ids, _ = continued(live, SAMPLED)
    with Engine.open(model, options(draft=3)) as engine:
        restored = engine.load_session(saved)
        assert continued(restored, SAMPLED)[0] == ids
        drafts = restored.totals.drafts
        assert drafts is not None
        assert drafts.drafted_steps > 0


def test_drafts_begin_at_once_after_a_restore(model: Path) -> None:
    with Engine.open(model, options(draft=3)) as engine:
        live = engine.new_session()
        live.sync(TEXT[:300])
        restored = engine.load_session(live.save_bytes())
        held = [s._live.speculation.held_streams(300) for s in (live, restored)]
        assert held[0][0] == held[1][0]
        assert torch.equal(held[0][1], held[1][1])


@pytest.mark.parametrize(("writer", "reader"), [("native", "reference"), ("reference", "native")])
def test_state_of_one_backend_is_taken_by_the_other(model: Path, writer: str, reader: str) -> None:
    with session_of(model, backend=writer) as live:
        live.sync(TEXT[:400])
        saved = live.save_bytes()
        before = {name: rows.clone() for name, rows in state(live).items()}
    with Engine.open(model, options(backend=reader)) as engine:
        restored = engine.load_session(saved)
        after = state(restored)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        here = engine.new_session()
        here.load(saved)
        assert continued(here, SAMPLED)[0] == continued(restored, SAMPLED)[0]
        assert inspect_snapshot(saved).header.backend == writer


def test_saving_changes_nothing(session: Session, model: Path) -> None:
    with session_of(model) as other:
        for each in (session, other):
            each.sync(TEXT[:200])
            list(each.generate(GREEDY))
        first = session.save_bytes()
        assert session.save_bytes() == first
        assert continued(session, SAMPLED)[0] == continued(other, SAMPLED)[0]


def test_a_restored_session_saves_the_same_bytes(session: Session, model: Path) -> None:
    session.sync(TEXT[:500])
    session.rewind(40)
    list(session.generate(SAMPLED))
    saved = session.save_bytes()
    with Engine.open(model, options()) as engine:
        assert engine.load_session(saved).save_bytes() == saved


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_same_tokens_make_the_same_bytes(model: Path, backend: str) -> None:
    """So nothing that was never written, which could be anything, gets into a file."""
    saved = []
    for filler in (0x00, 0xAB):
        spoilt = [torch.full((1 << size,), filler, dtype=torch.uint8) for size in range(6, 22)]
        del spoilt
        with session_of(model, backend=backend, draft=2) as session:
            session.sync(TEXT[:300])
            saved.append(session.save_bytes())
    assert saved[0] == saved[1]


def test_file_memory_and_stream_hold_the_same(session: Session, tmp_path: Path) -> None:
    session.sync(TEXT[:100])
    session.save(tmp_path / "talk.dsv4s")
    with (tmp_path / "stream").open("wb") as file:
        session.write_snapshot(file)
    saved = session.save_bytes()
    assert (tmp_path / "talk.dsv4s").read_bytes() == saved
    assert (tmp_path / "stream").read_bytes() == saved
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_empty_session_is_saved_and_restored(model: Path) -> None:
    with Engine.open(model, options()) as engine:
        empty = engine.new_session()
        restored = engine.load_session(empty.save_bytes())
        assert (restored.length, restored.turn_positions) == (0, ())
        assert restored.sync(TEXT[:50]).evaluated == 50


def test_session_at_its_last_token_is_restored_full(model: Path) -> None:
    with Engine.open(model, options(context=64)) as engine:
        live = engine.new_session()
        live.sync(TEXT[:64])
        restored = engine.load_session(live.save_bytes())
        assert restored.length == restored.capacity == 64
        np.testing.assert_array_equal(restored.logits(), live.logits())


def test_another_capacity_takes_what_fits(model: Path) -> None:
    with Engine.open(model, options()) as engine:
        live = engine.new_session()
        live.sync(TEXT[:300])
        saved = live.save_bytes()
        ids, _ = continued(live, GREEDY)
        for context in (330, 301 + 40, 2000):
            restored = engine.load_session(saved, context=context)
            assert restored.capacity == context
            assert continued(restored, GREEDY)[0] == ids


def test_sync_after_a_restore_reuses_the_prefix(session: Session, model: Path) -> None:
    session.sync(TEXT[:500])
    with Engine.open(model, options()) as engine:
        restored = engine.load_session(session.save_bytes())
        report = restored.sync(TEXT[:530])
        assert (report.reused, report.evaluated, report.rebuilt) == (500, 30, 0)
        report = restored.sync([*TEXT[:450], 7, 8])
        assert (report.reused, report.evaluated, report.rebuilt) == (450, 2, 0)
        with engine.new_session() as fresh:
            fresh.sync([*TEXT[:450], 7, 8])
            np.testing.assert_allclose(restored.logits(), fresh.logits(), atol=2e-2)


def test_rewind_within_the_rings_evaluates_nothing(session: Session, model: Path) -> None:
    session.sync(TEXT[:500])
    with Engine.open(model, options()) as engine:
        restored = engine.load_session(session.save_bytes())
        for each in (session, restored):
            assert each.rewind(128).rebuilt == 0
        assert_same_state(session, restored)
        assert continued(session, SAMPLED)[0] == continued(restored, SAMPLED)[0]


def test_rewind_to_a_saved_checkpoint_evaluates_nothing(session: Session, model: Path) -> None:
    session.sync(TEXT[:100])
    session.sync(TEXT[:500])
    with Engine.open(model, options()) as engine:
        restored = engine.load_session(session.save_bytes())
        assert restored.turn_positions == (100, 500)
        for each in (session, restored):
            report = each.rewind(400)
            assert (report.reused, report.rebuilt) == (100, 0)
        np.testing.assert_array_equal(session.logits(), restored.logits())
        assert continued(session, SAMPLED)[0] == continued(restored, SAMPLED)[0]


def test_only_the_newest_checkpoints_are_saved(session: Session, model: Path) -> None:
    for length in range(100, 700, 100):
        session.sync(TEXT[:length])
    with Engine.open(model, options()) as engine:
        restored = engine.load_session(session.save_bytes())
        assert restored.turn_positions == (300, 400, 500, 600)
        report = restored.rewind(450)
        assert (report.reused, report.rebuilt) == (0, 150)
        np.testing.assert_array_equal(restored.logits(), _fresh_logits(engine, TEXT[:150]))


def _fresh_logits(engine: Engine, ids: list[int]) -> np.ndarray:
    with engine.new_session() as fresh:
        fresh.sync(ids)
        return fresh.logits()


def test_checkpoints_beyond_the_budget_are_given_up_on_load(model: Path) -> None:
    with session_of(model) as live:
        live.sync(TEXT[:100])
        live.sync(TEXT[:300])
        saved = live.save_bytes()
    with Engine.open(model, options(checkpoint_bytes=0)) as engine:
        restored = engine.load_session(saved)
        assert restored.turn_positions == ()
        assert restored.length == 300


def test_logits_that_were_not_known_are_computed_after_the_restore(
    session: Session, model: Path
) -> None:
    session.sync(TEXT[:300])
    session.rewind(50)
    saved = session.save_bytes()
    assert not inspect_snapshot(saved).header.has_logits
    with Engine.open(model, options()) as engine:
        restored = engine.load_session(saved)
        np.testing.assert_array_equal(restored.logits(), session.logits())
        assert restored.totals.rebuilt == session.totals.rebuilt == 1


def test_totals_go_on(session: Session, model: Path) -> None:
    session.sync(TEXT[:60])
    list(session.generate(GREEDY))
    with Engine.open(model, options(draft=2)) as engine:
        restored = engine.load_session(session.save_bytes())
        found = replace(restored.totals, drafts=None)
        assert found == session.totals
        assert (found.evaluated, found.generated) == (84, 24)


def test_loading_replaces_what_a_session_held(session: Session, model: Path) -> None:
    session.sync(TEXT[:80])
    saved = session.save_bytes()
    with Engine.open(model, options()) as engine, engine.new_session() as other:
        other.sync(TEXT[300:700])
        other.load(saved)
        assert_same_state(session, other)
        assert continued(session, SAMPLED)[0] == continued(other, SAMPLED)[0]


@pytest.mark.parametrize("profile", ["default", "exact"])
def test_file_is_as_large_as_the_state_it_holds(model: Path, profile: Any) -> None:
    with session_of(model, profile=profile, checkpoint_bytes=0) as live:
        live.sync(TEXT[:640])
        sizes = {s.name: s.nbytes for s in inspect_snapshot(live.save_bytes()).sections}
    layout = StateLayout(CONFIG, profile)
    assert sizes["compressed_rows"] == layout.compressed_row_bytes(640)
    assert sizes["index_keys"] == layout.index_bytes(640)
    assert sizes["compressed_rows"] + sizes["index_keys"] == 640 * layout.bytes_per_token
    assert sizes["window_rows"] == layout.ring_bytes
    assert sizes["partial_windows"] == layout.partial_window_bytes
    assert sizes["token_ids"] == 4 * 640
    assert sizes["logits"] == 4 * CONFIG.vocab_size
    assert (sizes["draft_streams"], sizes["checkpoints"], sizes["turns"]) == (0, 0, 4)


def test_busy_and_closed_sessions_refuse(session: Session, tmp_path: Path) -> None:
    session.sync(TEXT[:20])
    saved = session.save_bytes()
    tokens = session.generate(GREEDY)
    next(tokens)
    for work in (session.save_bytes, lambda: session.load(saved)):
        with pytest.raises(BusyError):
            work()
    with pytest.raises(BusyError):
        session.save(tmp_path / "talk.dsv4s")
    assert list(tmp_path.iterdir()) == []
    tokens.close()  # type: ignore[attr-defined]
    session.close()
    with pytest.raises(Dsv4Error, match="closed"):
        session.save_bytes()
    with pytest.raises(Dsv4Error, match="closed"):
        session.load(saved)


def test_load_session_checks_its_context(model: Path) -> None:
    with Engine.open(model, options()) as engine:
        saved = engine.new_session().save_bytes()
        with pytest.raises(ConfigError, match="context must be"):
            engine.load_session(saved, context=0)


def test_inspection_is_public(session: Session, tmp_path: Path) -> None:
    session.sync(TEXT[:30])
    session.save(tmp_path / "talk.dsv4s")
    info = edgedsv4.inspect_snapshot(tmp_path / "talk.dsv4s")
    assert isinstance(info, edgedsv4.SnapshotInfo)
    assert (info.length, info.capacity, info.turn_positions) == (30, 800, (30,))
    assert info.nbytes == (tmp_path / "talk.dsv4s").stat().st_size
