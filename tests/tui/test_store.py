"""Conversations on disk: what is written, found, listed and removed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_samples import Clock, saved, talk

from dsv4_chat import store as store_module
from dsv4_chat.chat_model import ReplyOutcome
from dsv4_chat.conversation import Conversation
from dsv4_chat.store import Store
from dsv4_chat.store_errors import StoreConflictError, StoreError, StoreVersionError
from edgedsv4 import SamplingOptions, ToolCall


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    store = Store(tmp_path / "data", clock=clock)
    yield store
    store.close()


def titles(store: Store, query: str = "") -> list[str]:
    return [summary.title for summary in store.list(query)]


def test_everything_of_a_conversation_comes_back(store: Store, clock: Clock) -> None:
    conversation = Conversation(
        clock=clock,
        title="rivers",
        system="be brief",
        sampling=SamplingOptions(
            temperature=0.25, seed=7, logit_bias={5: float("-inf"), 9: 1.5}, max_tokens=100
        ),
        thinking=75,
    )
    conversation.append("user", "What does river mean? 河 🦊\0")
    reply = conversation.append(
        "assistant",
        "a stream",
        reasoning="water",
        tool_calls=(ToolCall(id="call_0", name="look_up", arguments='{"word": "river"}'),),
    )
    reply.outcome = ReplyOutcome(finish_reason="tool_calls", generated_tokens=12, drafts="2.1")
    conversation.append_result("call_0", "large water")
    conversation.edit(1, "What does lake mean?")
    conversation.context_start = 4
    store.save_whole(conversation)
    assert store.load(conversation.id) == conversation


def test_turn_is_on_disk_as_soon_as_it_is_saved(store: Store, clock: Clock, tmp_path: Path) -> None:
    conversation = Conversation(clock=clock)
    node = conversation.append("user", "hello")
    store.save_node(conversation, node)
    other = Store(tmp_path / "data")
    assert other.load(conversation.id).path()[0].content == "hello"
    other.close()


def test_growing_reply_replaces_its_row(store: Store, clock: Clock) -> None:
    conversation = saved(store, talk(clock, "hello"))
    reply = conversation.append("assistant", "a", state="streaming")
    store.save_node(conversation, reply)
    reply.content, reply.state = "all of it", "complete"
    store.save_node(conversation, reply)
    assert [node.content for node in store.load(conversation.id).path()] == ["hello", "all of it"]


def test_reply_that_was_cut_off_counts_as_stopped(store: Store, clock: Clock) -> None:
    conversation = saved(store, talk(clock, "hello"))
    store.save_node(conversation, conversation.append("assistant", "half a", state="streaming"))
    loaded = store.load(conversation.id).path()[-1]
    assert (loaded.content, loaded.state) == ("half a", "stopped")
    assert titles(store, "half a") == ["hello"]


def test_lone_surrogate_is_replaced(store: Store, clock: Clock) -> None:
    conversation = saved(store, talk(clock, "a \ud800 b"))
    assert store.load(conversation.id).path()[0].content == "a ? b"


def test_list_has_the_newest_first(store: Store, clock: Clock) -> None:
    older, newer = saved(store, talk(clock, "older")), saved(store, talk(clock, "newer"))
    assert titles(store) == ["newer", "older"]
    store.save_node(older, older.append("assistant", "yes"))
    assert titles(store) == ["older", "newer"]
    assert store.latest() == older.id != newer.id


def test_list_counts_turns_and_keeps_to_the_limit(store: Store, clock: Clock) -> None:
    saved(store, talk(clock, "one", "two", "three"))
    saved(store, talk(clock, "more"))
    assert [summary.turns for summary in store.list()] == [1, 3]
    assert len(store.list(limit=1)) == 1


def test_empty_store_has_no_latest(store: Store) -> None:
    assert (store.latest(), store.list()) == (None, ())


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("river", ["water"]),
        ("RIVER mean", ["water"]),
        ("stre", ["water"]),
        ("stream fox", []),
        ("河川", ["water"]),
        ("100%", ["sums"]),
        ("00_", []),
        ("12", ["sums"]),
        ('"quoted" (x)', ["sums"]),
        ("water", ["water"]),
        ("sums wat", []),
        ("NOT", []),
        ("*", []),
        ("it's", ["sums"]),
    ],
)
def test_search_finds_words_in_titles_and_turns(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    has_index: bool,
    query: str,
    expected: list[str],
) -> None:
    if not has_index:
        monkeypatch.setattr(store_module, "can_index", lambda _connection: False)
    store = Store(tmp_path / "search", clock=clock)
    assert store.can_search_quickly is has_index
    saved(store, talk(clock, "What does river mean?", "a large stream, 河川", title="water"))
    saved(store, talk(clock, "12 + 7 at 100%", 'it\'s "quoted" (x)', title="sums"))
    assert titles(store, query) == expected
    store.close()


def test_search_shows_where_it_found_the_words(store: Store, clock: Clock) -> None:
    saved(store, talk(clock, "x " * 100 + "the river\nflows " + "y " * 100, title="water"))
    summary = store.list("river")[0]
    assert "the river flows" in summary.excerpt
    assert summary.excerpt.startswith("…")
    assert summary.excerpt.endswith("…")
    assert len(summary.excerpt) < 110


def test_search_forgets_what_was_changed_and_deleted(store: Store, clock: Clock) -> None:
    conversation = saved(store, talk(clock, "the first wording"))
    conversation.nodes[1].content = "another text"
    store.save_node(conversation, conversation.nodes[1])
    conversation.title = ""
    store.save_conversation(conversation)
    assert store.list("wording") == ()
    assert len(store.list("another text")) == 1
    store.delete(conversation.id)
    assert store.list("another") == ()


def test_index_is_made_for_a_file_without_one(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "can_index", lambda _connection: False)
        plain = Store(tmp_path, clock=clock)
        saved(plain, talk(clock, "a river", title="t"))
        plain.close()
    indexed = Store(tmp_path, clock=clock)
    saved(indexed, talk(clock, "another river", title="u"))
    assert titles(indexed, "river") == ["u", "t"]
    indexed.close()
    with monkeypatch.context() as patch:
        patch.setattr(store_module, "can_index", lambda _connection: False)
        again = Store(tmp_path, clock=clock)
        saved(again, talk(clock, "third river", title="v"))
        assert titles(again, "river") == ["v", "u", "t"]
        again.close()


def test_rename_keeps_the_place_in_the_list(store: Store, clock: Clock) -> None:
    older = saved(store, talk(clock, "older"))
    saved(store, talk(clock, "newer"))
    store.rename(older.id, "renamed")
    assert titles(store) == ["newer", "renamed"]


def test_delete_removes_turns_and_snapshot(store: Store, clock: Clock, tmp_path: Path) -> None:
    conversation = saved(store, talk(clock, "secret", "answer"))
    store.snapshot_path(conversation.id).write_bytes(b"x" * 10)
    store.snapshot_saved(conversation.id)
    store.delete(conversation.id)
    assert list((tmp_path / "data" / "snapshots").iterdir()) == []
    store.close()
    with sqlite3.connect(tmp_path / "data" / "conversations.db") as database:
        assert database.execute("SELECT count(*) FROM nodes").fetchone() == (0,)
    database.close()


def test_delete_of_nothing_is_fine(store: Store) -> None:
    store.delete("nobody")


def test_load_of_nothing_is_an_error(store: Store) -> None:
    with pytest.raises(StoreError, match="there is no conversation nobody"):
        store.load("nobody")


def test_prompts_are_listed_once_the_newest_last(store: Store, clock: Clock) -> None:
    saved(store, talk(clock, "one", "x", "two", "y", "one"))
    saved(store, talk(clock, "three"))
    assert store.prompts() == ("two", "one", "three")
    assert store.prompts(limit=1) == ("three",)


def test_two_programs_do_not_overwrite_each_other(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    first = saved(store, talk(clock, "hello"))
    other = Store(tmp_path / "data", clock=clock)
    second = other.load(first.id)
    second.clock = clock
    store.save_node(first, first.append("assistant", "from the first"))
    with pytest.raises(StoreConflictError, match="gone on with this conversation; fork it"):
        other.save_node(second, second.append("assistant", "from the second"))
    other.close()
    assert store.load(first.id).path()[-1].content == "from the first"


def test_conversation_deleted_elsewhere_is_a_conflict(
    store: Store, clock: Clock, tmp_path: Path
) -> None:
    conversation = saved(store, talk(clock, "hello"))
    other = Store(tmp_path / "data")
    other.delete(conversation.id)
    other.close()
    with pytest.raises(StoreConflictError, match="deleted or changed"):
        store.save_node(conversation, conversation.append("assistant", "hi"))
    assert store.list() == ()


def test_folder_and_files_are_for_this_user_alone(store: Store, clock: Clock) -> None:
    saved(store, talk(clock, "private"))
    store.snapshot_path("x")
    for path in (store.path.parent, store.path, store.path.parent / "snapshots"):
        assert path.stat().st_mode & 0o077 == 0


def test_file_of_a_newer_program_is_refused_and_kept(tmp_path: Path) -> None:
    Store(tmp_path).close()
    path = tmp_path / "conversations.db"
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(StoreVersionError, match="version 99, this program knows up to 1"):
        Store(tmp_path)
    assert path.exists()


def test_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(StoreError, match=r"file.*Not a directory"):
        Store(tmp_path / "file" / "data")
