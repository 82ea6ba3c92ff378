"""A killed program, a damaged file, a full or forbidden disk: what is lost, and what is said."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from store_samples import Clock, saved, talk

from dsv4_chat import store as store_module
from dsv4_chat.store import Store, set_aside
from dsv4_chat.store_errors import StoreDamagedError, StoreError
from edgedsv4 import Dsv4Error

if TYPE_CHECKING:
    from dsv4_chat.conversation import Conversation

WRITER = Path(__file__).with_name("store_writer.py")


def write_until_killed(folder: Path, lines: int) -> list[tuple[str, int]]:
    """The questions that a killed program said it had saved."""
    with subprocess.Popen(
        [sys.executable, str(WRITER), str(folder)], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        said = [program.stdout.readline() for _ in range(lines)]
        program.kill()
        said += program.stdout.readlines()
    questions = [line.split() for line in said if line.endswith("\n")]
    return [(conversation_id, int(node_id)) for conversation_id, node_id in questions]


def test_killed_program_loses_at_most_the_reply_it_was_making(tmp_path: Path) -> None:
    drawn = random.Random(7)
    promised: list[tuple[str, int]] = []
    for _ in range(4):
        promised += write_until_killed(tmp_path, drawn.randrange(1, 60))
    store = Store(tmp_path)
    conversations: dict[str, Conversation] = {}
    for conversation_id, node_id in promised:
        if conversation_id not in conversations:
            conversations[conversation_id] = store.load(conversation_id)
        question = conversations[conversation_id].node(node_id)
        assert question.content.startswith(f"question {node_id // 2} ")
    for conversation in conversations.values():
        states = [node.state for node in conversation.path()]
        assert set(states[:-1]) <= {"complete"}
        assert states[-1] in ("complete", "stopped")
        assert len(states) >= max(i for name, i in promised if name == conversation.id)
    store.close()


def test_program_can_go_on_in_what_a_killed_one_left(tmp_path: Path) -> None:
    conversation_id, _ = write_until_killed(tmp_path, 5)[-1]
    store = Store(tmp_path)
    conversation = store.load(conversation_id)
    store.save_node(conversation, conversation.append("user", "going on"))
    assert store.load(conversation_id) == conversation
    assert store.list("going on")[0].id == conversation_id
    store.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def filled(tmp_path: Path, clock: Clock) -> Path:
    """A closed database with some pages."""
    store = Store(tmp_path, clock=clock)
    for number in range(20):
        saved(store, talk(clock, f"question {number}", "answer " * 200, title=f"t{number}"))
    store.close()
    return store.path


def overwrite(path: Path, first: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(first)
        file.write(data)


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 + 100)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "text": lambda path: overwrite(path, 0, b"not a database at all, just text " * 100),
    "magic": lambda path: overwrite(path, 0, b"X"),
    "cut": truncate,
    "page": lambda path: overwrite(path, 4096 * 3, b"\xff" * 4096),
    "schema": lambda path: overwrite(path, 100, b"\xff" * 3900),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_told_with_its_place_and_kept(filled: Path, damage: str) -> None:
    DAMAGES[damage](filled)
    before = filled.read_bytes()
    with pytest.raises(StoreDamagedError, match="conversations cannot be read") as caught:
        Store(filled.parent)
    assert caught.value.path == filled
    assert str(filled) in str(caught.value)
    assert filled.read_bytes() == before


def test_file_set_aside_is_kept_and_makes_room(filled: Path, clock: Clock) -> None:
    DAMAGES["page"](filled)
    before = filled.read_bytes()
    kept = set_aside(filled, clock=lambda: 1_700_000_000.0)
    assert kept.read_bytes() == before
    assert kept.name.startswith("conversations.damaged-2023111")
    store = Store(filled.parent, clock=clock)
    assert store.list() == ()
    saved(store, talk(clock, "new"))
    store.close()


def test_file_set_aside_never_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "conversations.db"
    names = []
    for text in ("first", "second"):
        path.write_text(text, encoding="utf-8")
        names.append(set_aside(path, clock=lambda: 1_700_000_000.0))
    assert [name.read_text(encoding="utf-8") for name in names] == ["first", "second"]


def test_damage_of_a_file_too_large_to_check_is_told_when_it_is_met(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_CHECKED_BYTES", 0)
    pages = filled.stat().st_size // 4096
    overwrite(filled, 4096 * (pages // 2), b"\xff" * (4096 * (pages - pages // 2)))
    store = Store(filled.parent)
    with pytest.raises(StoreDamagedError, match="start with a new file"):
        load_everything(store)
    store.close()


def load_everything(store: Store) -> None:
    for summary in store.list():
        store.load(summary.id)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("UPDATE conversations SET sampling = '{'", "conversation"),
        ("UPDATE conversations SET sampling = '{}'", "logit_bias"),
        ("UPDATE nodes SET tool_calls = '[3]'", "conversation"),
        ("UPDATE nodes SET outcome = '{\"x\": 1}'", "unexpected keyword"),
        ("PRAGMA foreign_keys = OFF; UPDATE nodes SET parent = 9 WHERE id = 1", "follows 9"),
        ("PRAGMA foreign_keys = OFF; UPDATE nodes SET parent = 2 WHERE id = 2", "follows 2"),
    ],
)
def test_rows_that_make_no_conversation_are_damage(
    filled: Path, change: str, expected: str
) -> None:
    with sqlite3.connect(filled) as database:
        database.executescript(change)
    database.close()
    store = Store(filled.parent)
    with pytest.raises(StoreDamagedError, match=expected):
        store.load(store.list()[0].id)
    store.close()


def test_missing_active_turn_falls_back_to_the_newest(filled: Path) -> None:
    with sqlite3.connect(filled) as database:
        database.execute("UPDATE conversations SET active = 77")
    database.close()
    store = Store(filled.parent)
    assert store.load(store.list()[0].id).active == 2
    store.close()


def test_full_disk_is_told_and_nothing_is_half_written(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path, clock=clock)
    conversation = saved(store, talk(clock, "hello"))
    store._connection.execute("PRAGMA max_page_count = 1")
    node = conversation.append("assistant", "x" * 500_000)
    with pytest.raises(StoreError, match="the disk is full; free some space"):
        store.save_node(conversation, node)
    store._connection.execute("PRAGMA max_page_count = 1000000")
    assert len(store.load(conversation.id).nodes) == 1
    store.save_node(conversation, node)
    assert len(store.load(conversation.id).nodes) == 2
    store.close()


def test_file_in_use_by_another_is_told(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path, clock=clock)
    store._connection.execute("PRAGMA busy_timeout = 1")
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another program is writing to it"):
        saved(store, talk(clock, "hello"))
    other.execute("ROLLBACK")
    other.close()
    saved(store, talk(clock, "hello"))
    store.close()


def test_every_fault_is_one_the_app_shows() -> None:
    assert issubclass(StoreError, Dsv4Error)
