"""What a session does not take, and that it is then as it was before."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from snapshot_samples import edited, header_of, offsets, section_of, with_section
from snapshot_sessions import GREEDY, TEXT, everything, options, session_of, write_model

from edgedsv4.errors import (
    CancelledError,
    CapacityError,
    ContextFullError,
    FormatError,
    SnapshotError,
)
from edgedsv4.formats.snapshot_header import SECTIONS
from edgedsv4.runtime.engine import Engine
from edgedsv4.runtime.inspection import plan_model

if TYPE_CHECKING:
    from edgedsv4.runtime.session import Session

SMALL = {"compress_ratios": (0, 4), "num_hash_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "model.gguf", **SMALL)
    write_model(folder / "other.gguf", seed=9, **SMALL)
    write_model(folder / "wider.gguf", **{**SMALL, "hidden_size": 128})
    return folder


@pytest.fixture(scope="module")
def saved(folder: Path) -> bytes:
    with session_of(folder / "model.gguf", draft=1) as session:
        session.sync(TEXT[:40])
        session.sync(TEXT[:170])
        session.note = b"mine"
        return session.save_bytes()


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Session]:
    """A session with something in it, which no test here may change."""
    with session_of(folder / "model.gguf", draft=1) as session:
        session.sync(TEXT[200:260])
        list(session.generate(GREEDY))
        yield session


def refused(live: Session, data: Any, kind: type[Exception] = SnapshotError) -> Exception:
    """The error of loading it, after the session was compared with what it was."""
    before = everything(live)
    with pytest.raises(kind) as caught:
        live.load(data)
    assert everything(live) == before
    return caught.value


def test_model_with_other_weights_of_the_same_form_is_refused(folder: Path, saved: bytes) -> None:
    with Engine.open(folder / "other.gguf", options()) as engine:
        with pytest.raises(SnapshotError, match="belongs to another model") as caught:
            engine.load_session(saved)
        assert caught.value.fault == "mismatch"
        assert engine.describe()["identity_sha256"] == header_of(saved)["model"]["identity_sha256"]


def test_model_of_another_form_is_refused(folder: Path, saved: bytes) -> None:
    with (
        Engine.open(folder / "wider.gguf", options()) as engine,
        pytest.raises(SnapshotError, match="belongs to another model"),
    ):
        engine.load_session(saved)


def test_another_quantization_of_the_model_is_refused(saved: bytes, tmp_path: Path) -> None:
    write_model(tmp_path / "ds4.gguf", types="b", **SMALL)
    with (
        Engine.open(tmp_path / "ds4.gguf", options()) as engine,
        pytest.raises(SnapshotError, match="belongs to another model"),
    ):
        engine.load_session(saved)


def test_copy_of_the_model_under_another_name_is_welcome(
    folder: Path, saved: bytes, tmp_path: Path
) -> None:
    shutil.copy(folder / "model.gguf", tmp_path / "copy.gguf")
    with Engine.open(tmp_path / "copy.gguf", options()) as engine:
        assert engine.load_session(saved).length == 170


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profile": "exact"}, "profile is 'default', this session has 'exact'"),
        ({"dtype": "bf16"}, "dtype is 'f32', this session has 'bf16'"),
        ({"dtype": "f64"}, "dtype is 'f32', this session has 'f64'"),
    ],
)
def test_other_precision_is_refused(
    folder: Path, saved: bytes, changes: dict[str, Any], message: str
) -> None:
    with (
        Engine.open(folder / "model.gguf", options(backend="reference", **changes)) as engine,
        pytest.raises(SnapshotError, match=message) as caught,
    ):
        engine.load_session(saved)
    assert caught.value.fault == "mismatch"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokenizer_sha256", "0" * 64, "belongs to another tokenizer: '0000"),
        ("tokenizer_sha256", None, "belongs to another tokenizer: None"),
        ("variant", "v4-0731", "belongs to another prompt encoding: 'v4-0731', this model has 'v4"),
        ("identity_sha256", "0" * 64, "belongs to another model"),
        ("weights_sha256", "0" * 64, "belongs to another model"),
    ],
)
def test_other_owner_is_refused(
    live: Session, saved: bytes, name: str, value: Any, message: str
) -> None:
    data = edited(saved, lambda header: header["model"].__setitem__(name, value))
    assert message in str(refused(live, data))


def test_hostile_name_of_a_model_is_cut_in_the_message(live: Session, saved: bytes) -> None:
    def edit(header: dict[str, Any]) -> None:
        header["model"] |= {"name": "\n" * 100_000, "identity_sha256": "0" * 64}

    assert len(str(refused(live, edited(saved, edit)))) < 500


def test_other_layout_is_refused(live: Session, saved: bytes) -> None:
    def widen(header: dict[str, Any]) -> None:
        header["layout"]["stream_bytes"] *= 2
        header |= {"streams_first": None, "checkpoints": []}

    emptied = with_section(with_section(saved, "draft_streams", b""), "checkpoints", b"")
    data = edited(emptied, widen)
    assert "stream_bytes is 3072, this session has 1536" in str(refused(live, data))


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != "turns"])
def test_damage_of_any_section_changes_nothing(live: Session, saved: bytes, name: str) -> None:
    place = offsets(saved)[name] + len(section_of(saved, name)) - 1
    damaged = saved[:place] + bytes([saved[place] ^ 1]) + saved[place + 1 :]
    assert f"section {name} is damaged" in str(refused(live, damaged))


def test_damage_of_the_last_byte_changes_nothing(live: Session, saved: bytes) -> None:
    assert "section note is damaged" in str(refused(live, saved[:-1] + b"\1"))


@pytest.mark.parametrize("name", SECTIONS)
def test_cut_at_any_section_changes_nothing(live: Session, saved: bytes, name: str) -> None:
    assert "present: truncated" in str(refused(live, saved[: offsets(saved)[name]]))


@pytest.mark.parametrize("token_id", [384, -1, 2**31 - 1])
def test_token_beyond_the_vocabulary_is_refused(live: Session, saved: bytes, token_id: int) -> None:
    ids = bytearray(section_of(saved, "token_ids"))
    struct.pack_into("<i", ids, 4 * 7, token_id)
    data = with_section(saved, "token_ids", bytes(ids))
    error = refused(live, data)
    assert f"section token_ids: id {token_id} at position 7, expected 0..383" in str(error)
    assert isinstance(error, FormatError)
    assert error.offset == offsets(data)["token_ids"] + 28


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(live: Session, saved: bytes, value: float) -> None:
    logits = np.frombuffer(section_of(saved, "logits"), dtype="<f4").copy()
    logits[3] = value
    error = refused(live, with_section(saved, "logits", logits.tobytes()))
    assert f"section logits: the logit of token 3 is {value}" in str(error)


def test_logits_of_a_checkpoint_are_checked_too(live: Session, saved: bytes) -> None:
    rows = np.frombuffer(section_of(saved, "checkpoints"), dtype=np.uint8).copy()
    streams = header_of(saved)["layout"]["stream_bytes"]
    end = len(rows) - streams
    rows[end - 4 : end] = np.frombuffer(np.float32(np.nan).tobytes(), dtype=np.uint8)
    error = refused(live, with_section(saved, "checkpoints", rows.tobytes()))
    assert "section checkpoints: the logit of token 383 is nan" in str(error)


def test_broken_turns_are_refused_behind_everything_else(live: Session, saved: bytes) -> None:
    error = refused(live, with_section(saved, "turns", b"\1\0\0\0"))
    assert "section turns: turns must be at most 0" in str(error)


def test_more_tokens_than_the_context_name_both(folder: Path, live: Session, saved: bytes) -> None:
    with Engine.open(folder / "model.gguf", options()) as engine:
        with pytest.raises(ContextFullError) as caught:
            engine.load_session(saved, context=169)
        assert (caught.value.needed, caught.value.capacity) == (170, 169)
        with engine.new_session(context=100) as small:
            small.sync(TEXT[:50])
            error = refused(small, saved, ContextFullError)
        assert "170 tokens asked for, the session holds 100" in str(error)
        assert engine.memory()["sessions"] == 0
    assert live.length


def test_no_memory_for_both_is_a_capacity_error(folder: Path, saved: bytes) -> None:
    path = folder / "model.gguf"
    wanted = options(checkpoint_bytes=0)
    needed = plan_model(path, wanted).needed_bytes
    with Engine.open(path, replace(wanted, ram_bytes=needed + 1000)) as engine:
        session = engine.new_session()
        session.load(saved)  # empty before, so nothing is held twice
        refused(session, saved, CapacityError)
        session.close()
        assert engine.load_session(saved).length == 170


@pytest.mark.parametrize("moment", range(0, 100, 17))
def test_cancelled_load_changes_nothing(live: Session, saved: bytes, moment: int) -> None:
    seen: list[tuple[int, int]] = []

    def cancel(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) > moment % len(SECTIONS):
            live.cancel()

    before = everything(live)
    with pytest.raises(CancelledError):
        live.load(saved, on_progress=cancel)
    assert everything(live) == before
    assert seen


def test_progress_of_a_load_ends_at_the_total(folder: Path, saved: bytes) -> None:
    seen: list[tuple[int, int]] = []
    with Engine.open(folder / "model.gguf", options()) as engine:
        engine.load_session(saved, on_progress=lambda *step: seen.append(step))
    total = sum(entry[1] for entry in header_of(saved)["sections"])
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


def test_error_of_the_callback_ends_the_load(live: Session, saved: bytes) -> None:
    def fail(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    before = everything(live)
    with pytest.raises(KeyboardInterrupt):
        live.load(saved, on_progress=fail)
    assert everything(live) == before


def test_changed_model_file_takes_no_snapshot(folder: Path, saved: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    shutil.copy(folder / "model.gguf", path)
    with Engine.open(path, options()) as engine, engine.new_session() as session:
        path.touch()
        with pytest.raises(FormatError, match="changed while open"):
            session.load(saved)


def test_session_works_after_everything_it_refused(live: Session, saved: bytes) -> None:
    edits: list[Callable[[dict[str, Any]], object]] = [
        lambda header: header.pop("rings"),
        lambda header: header.update(tokens=3),
    ]
    for edit in edits:
        refused(live, edited(saved, edit))
    with live._working() as timeline:
        assert timeline.length == live.length
    assert json.loads(json.dumps(live.token_ids)) == list(live.token_ids)
