"""Saved states: their disk budget, and files that nobody knows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from store_samples import Clock, saved, talk

from dsv4_chat.store import Store
from dsv4_chat.store_errors import StoreConflictError

if TYPE_CHECKING:
    from dsv4_chat.conversation import Conversation


def put(store: Store, conversation: Conversation, size: int) -> bool:
    store.snapshot_path(conversation.id).write_bytes(b"x" * size)
    return store.snapshot_saved(conversation.id)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_snapshot_is_found_again(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path, clock=clock)
    conversation = saved(store, talk(clock, "hello"))
    assert store.find_snapshot(conversation.id) is None
    assert put(store, conversation, 10)
    assert store.find_snapshot(conversation.id) == store.snapshot_path(conversation.id)
    assert store.list()[0].has_snapshot
    store.close()


def test_least_recently_used_goes_first(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path, snapshot_bytes=100, clock=clock)
    first, second, third = (saved(store, talk(clock, text)) for text in ("a", "b", "c"))
    put(store, first, 40)
    put(store, second, 40)
    store.find_snapshot(first.id)
    put(store, third, 40)
    found = [store.find_snapshot(each.id) is not None for each in (first, second, third)]
    assert found == [True, False, True]
    assert store.snapshot_bytes() == 80
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == sorted(
        f"{each.id}.dsv4s" for each in (first, third)
    )
    store.close()


def test_files_never_take_more_than_the_budget(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path, snapshot_bytes=1000, clock=clock)
    for size in (300, 700, 10, 999, 1000, 1, 500, 500, 400):
        put(store, saved(store, talk(clock, str(size))), size)
        on_disk = sum(path.stat().st_size for path in (tmp_path / "snapshots").iterdir())
        assert on_disk == store.snapshot_bytes() <= 1000
    store.close()


def test_state_beyond_the_whole_budget_is_not_kept(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path, snapshot_bytes=100, clock=clock)
    conversation = saved(store, talk(clock, "a"))
    assert not put(store, conversation, 101)
    assert store.find_snapshot(conversation.id) is None
    assert list((tmp_path / "snapshots").iterdir()) == []
    store.close()


def test_saving_again_counts_once(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path, clock=clock)
    conversation = saved(store, talk(clock, "a"))
    put(store, conversation, 40)
    put(store, conversation, 50)
    assert store.snapshot_bytes() == 50
    store.close()


def test_file_removed_by_hand_is_forgotten(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path, clock=clock)
    conversation = saved(store, talk(clock, "a"))
    put(store, conversation, 40)
    store.snapshot_path(conversation.id).unlink()
    assert store.find_snapshot(conversation.id) is None
    assert store.snapshot_bytes() == 0
    store.close()


def test_dropped_state_is_gone(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path, clock=clock)
    conversation = saved(store, talk(clock, "a"))
    put(store, conversation, 40)
    store.drop_snapshot(conversation.id)
    assert list((tmp_path / "snapshots").iterdir()) == []
    assert not store.list()[0].has_snapshot
    store.close()


def test_state_of_an_unsaved_conversation_is_refused(tmp_path: Path, clock: Clock) -> None:
    store = Store(tmp_path, clock=clock)
    with pytest.raises(StoreConflictError):
        put(store, talk(clock, "a"), 10)
    store.close()


def test_old_strays_are_removed_and_young_or_foreign_files_kept(
    tmp_path: Path, clock: Clock
) -> None:
    folder = tmp_path / "snapshots"
    folder.mkdir()
    for name in ("old.dsv4s", ".old.dsv4s.abc.partial", "young.dsv4s", "notes.txt"):
        path = folder / name
        path.write_bytes(b"x")
        age = 10 if name.startswith("young") else 7200
        os.utime(path, (clock.now - age, clock.now - age))
    Store(tmp_path, clock=clock).close()
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "young.dsv4s"]
