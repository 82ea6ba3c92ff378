"""What the program does before its screen: the store, a damaged one, and the log."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsv4_chat import __main__ as program
from dsv4_chat.conversation import Conversation
from dsv4_chat.settings import Settings
from dsv4_chat.store import DATABASE_NAME, Store


@pytest.fixture
def damaged(tmp_path: Path) -> Settings:
    """Settings whose database is none."""
    (tmp_path / DATABASE_NAME).write_bytes(b"SQLite format 3\0" + b"\xff" * 4096)
    return Settings(data_folder=str(tmp_path))


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger()
    before, level = list(logger.handlers), logger.level
    yield logger
    for handler in set(logger.handlers) - set(before):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(level)


def answer(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_store_is_opened_where_the_settings_say(tmp_path: Path) -> None:
    store, notices = program._open_store(Settings(data_folder=str(tmp_path / "new")))
    assert notices == ()
    assert store is not None
    assert store.path.parent == tmp_path / "new"


def test_damaged_store_is_set_aside_with_consent_only(
    damaged: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(damaged.data_folder)
    before = (folder / DATABASE_NAME).read_bytes()
    for refusal in ("", "\n", "n\n"):
        answer(monkeypatch, refusal)
        store, notices = program._open_store(damaged)
        assert store is None
        assert "not kept in this run" in notices[0]
        assert (folder / DATABASE_NAME).read_bytes() == before
    assert str(folder / DATABASE_NAME) in capsys.readouterr().err
    answer(monkeypatch, "y\n")
    store, notices = program._open_store(damaged)
    assert store is not None
    store.save_whole(Conversation())
    (kept,) = folder.glob("*.damaged-*.db")
    assert kept.read_bytes() == before
    assert str(kept) in notices[0]


def test_store_that_cannot_be_made_does_not_keep_the_chat_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    store, notices = program._open_store(Settings(data_folder=str(tmp_path / "file" / "inside")))
    assert store is None
    assert str(tmp_path / "file") in notices[0]


def test_log_goes_to_the_file_and_nowhere_else(
    tmp_path: Path, root_logger: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    program._log_to(str(tmp_path / "chat.log"))
    logging.getLogger("dsv4_chat.test").warning("something %d", 7)
    assert "WARNING dsv4_chat.test: something 7" in (tmp_path / "chat.log").read_text("utf-8")
    assert capsys.readouterr() == ("", "")
    assert root_logger.level == logging.INFO


@pytest.mark.usefixtures("root_logger")
def test_log_that_cannot_be_written_is_told() -> None:
    (notice,) = program._log_to("/no/such/folder/chat.log")
    assert "/no/such/folder/chat.log" in notice


def test_stores_of_two_runs_are_one(tmp_path: Path) -> None:
    settings = Settings(data_folder=str(tmp_path))
    first, _ = program._open_store(settings)
    assert first is not None
    conversation = Conversation(title="kept")
    first.save_whole(conversation)
    first.close()
    assert Store(tmp_path).load(conversation.id).title == "kept"
