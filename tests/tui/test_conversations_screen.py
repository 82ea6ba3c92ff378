"""The list of conversations, over a real store in a folder of the test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dialog_host import result_after, results_of, settled, shown, told_to
from stored_screens import CompareScreen
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from dsv4_chat.conversation import Conversation
from dsv4_chat.screens.conversations import ConversationsScreen, when_text
from dsv4_chat.store import Store
from dsv4_chat.store_errors import StoreError

NOW = 1_796_000_400.0
"""Monday, 2026-11-30 01:00 UTC."""
DAY = 86_400
TURNS = [
    ("river", "What does river mean?", "A large stream of water.", NOW - 1800),
    ("fox", "Tell me a story about a fox named Mia", "Once there was a river.", NOW - 2 * DAY),
    (
        "cjk",
        "河流是什么意思请用一句话来回答这个问题谢谢您然后再说一次再说一次吧",
        "水",
        NOW - 40 * DAY,
    ),
    ("sum", "What is 12 + 7?", "19", NOW - 400 * DAY),
]


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path, clock=lambda: NOW)
    for name, question, answer, moment in TURNS:
        conversation = Conversation(id=name, clock=lambda moment=moment: moment)
        conversation.append("user", question)
        conversation.append("assistant", answer)
        store.save_whole(conversation)
    yield store
    store.close()


def listed(store: Store, **options: str) -> ConversationsScreen:
    return ConversationsScreen(store, clock=lambda: NOW, **options)  # type: ignore[arg-type]  # texts


def lines(pilot: Pilot[None]) -> list[str]:
    """First words of the lines that are listed."""
    options = pilot.app.screen.query_one(OptionList).options
    return [" ".join(str(option.prompt).split()[:3]) for option in options]


def said(pilot: Pilot[None]) -> str:
    return str(pilot.app.screen.query_one("#says", Static).content)


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await settled(pilot)


async def test_newest_conversation_comes_first(store: Store) -> None:
    async with shown(listed(store, current="fox")) as pilot:
        assert lines(pilot)[:2] == ["What does river", "* Tell me"]
        assert lines(pilot)[3] == "What is 12"
        assert said(pilot) == "4 conversations; * is the one on the screen"


async def test_keys_open_or_close(store: Store) -> None:
    cases: list[tuple[list[str], str | None]] = [
        (["enter"], "river"),
        (["down", "enter"], "fox"),
        (["down", "down", "up", "enter"], "fox"),
        (["up", "enter"], "river"),
        (["pagedown", "enter"], "sum"),
        (["pagedown", "pageup", "enter"], "river"),
        (["escape"], None),
        (["ctrl+c"], None),
        (["ctrl+o"], None),
    ]
    async with shown(listed(store)) as pilot:
        given = [await result_after(pilot, listed(store), keys) for keys, _ in cases]
    assert given == [opened for _, opened in cases]


async def test_current_conversation_is_marked_at_first(store: Store) -> None:
    async with shown(listed(store, current="fox")) as pilot:
        await press(pilot, "enter")
        assert results_of(pilot) == ["fox"]


async def test_click_opens(store: Store) -> None:
    async with shown(listed(store)) as pilot:
        await pilot.click(OptionList, offset=(5, 1))
        await pilot.pause()
        assert results_of(pilot) == ["fox"]


async def test_typing_searches_titles_and_texts(store: Store) -> None:
    async with shown(listed(store)) as pilot:
        await press(pilot, *"river")
        assert lines(pilot) == ["What does river", "Tell me a"]
        await press(pilot, "space", *"once")
        assert lines(pilot) == ["Tell me a"]
        await press(pilot, "x")
        assert (lines(pilot), said(pilot)) == ([], "Nothing holds all of these words.")
        await press(pilot, "enter")
        assert results_of(pilot) == []


async def test_escape_empties_the_search_before_it_closes(store: Store) -> None:
    async with shown(listed(store, query="river")) as pilot:
        assert len(lines(pilot)) == 2
        await press(pilot, "escape")
        assert (len(lines(pilot)), results_of(pilot)) == (4, [])
        await press(pilot, "escape")
        assert results_of(pilot) == [None]


@pytest.mark.parametrize("key", ["ctrl+r", "f2"])
async def test_conversation_is_renamed(store: Store, key: str) -> None:
    async with shown(listed(store)) as pilot:
        await press(pilot, "down", key)
        await press(pilot, *"Mia", "enter")
        assert lines(pilot)[1].startswith("Mia")
        (event,) = told_to(pilot)
        assert isinstance(event, ConversationsScreen.Renamed)
        assert (event.conversation_id, event.title, store.load("fox").title) == (
            "fox",
            "Mia",
            "Mia",
        )


@pytest.mark.parametrize("key", ["ctrl+d", "f8"])
async def test_conversation_is_deleted_after_a_question(store: Store, key: str) -> None:
    async with shown(listed(store)) as pilot:
        await press(pilot, "down", key)
        assert store.load("fox")
        await press(pilot, "d")
        assert [summary.id for summary in store.list()] == ["river", "cjk", "sum"]
        (event,) = told_to(pilot)
        assert isinstance(event, ConversationsScreen.Deleted)
        assert event.conversation_id == "fox"
        await press(pilot, "enter")
        assert results_of(pilot) == ["cjk"]


async def test_deletion_is_told_when_the_list_is_closed_meanwhile(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    delete = Store.delete

    def slow(self: Store, conversation_id: str) -> None:
        begun.set()
        goes_on.wait(20)
        delete(self, conversation_id)

    monkeypatch.setattr(Store, "delete", slow)
    async with shown(listed(store)) as pilot:
        await press(pilot, "ctrl+d")
        await pilot.press("d")
        assert await asyncio.to_thread(begun.wait, 20)
        await press(pilot, "escape")
        assert results_of(pilot) == [None]
        goes_on.set()
        while not told_to(pilot):
            await pilot.pause(0.01)
        assert isinstance(told_to(pilot)[0], ConversationsScreen.Deleted)


@pytest.mark.parametrize("keys", [["enter"], ["escape"], ["k"]])
async def test_conversation_is_kept_unless_deleting_is_chosen(
    store: Store, keys: list[str]
) -> None:
    async with shown(listed(store)) as pilot:
        await press(pilot, "ctrl+d")
        await press(pilot, *keys)
        assert (len(store.list()), told_to(pilot), results_of(pilot)) == (4, [], [])


async def test_conversation_with_a_reply_in_progress_is_not_deleted(store: Store) -> None:
    async with shown(listed(store, busy="river")) as pilot:
        await press(pilot, "ctrl+d")
        assert said(pilot) == "A reply is being written there; stop it first."
        assert len(store.list()) == 4


async def test_last_one_can_be_deleted(store: Store) -> None:
    async with shown(listed(store)) as pilot:
        for _ in TURNS:
            await press(pilot, "ctrl+d")
            await press(pilot, "d")
        assert said(pilot) == "No conversations yet."
        await press(pilot, "enter", "ctrl+r", "ctrl+d", "ctrl+e", "down", "up")
        assert results_of(pilot) == []


@pytest.mark.parametrize(("key", "name"), [("m", "md"), ("j", "json")])
async def test_export_is_asked_for(store: Store, key: str, name: str) -> None:
    async with shown(listed(store)) as pilot:
        await press(pilot, "ctrl+e")
        await press(pilot, key)
        (event,) = told_to(pilot)
        assert isinstance(event, ConversationsScreen.ExportWanted)
        assert (event.conversation_id, event.format) == ("river", name)


async def test_failing_store_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise StoreError("conversations.db: the disk failed")

    async with shown(listed(store)) as pilot:
        monkeypatch.setattr(Store, "rename", fail)
        await press(pilot, "ctrl+r")
        await press(pilot, "x", "enter")
        assert said(pilot) == "conversations.db: the disk failed"
        monkeypatch.setattr(Store, "list", fail)
        await press(pilot, "x")
        assert (lines(pilot), said(pilot)) == ([], "conversations.db: the disk failed")
        assert told_to(pilot) == []


async def test_search_line_keeps_the_focus(store: Store) -> None:
    async with shown(listed(store)) as pilot:
        await press(pilot, "tab", "down", "tab")
        assert isinstance(pilot.app.focused, Input)


async def test_lines_fit_after_a_resize(store: Store, compare_screen: CompareScreen) -> None:
    async with shown(listed(store, current="fox"), (120, 40)) as pilot:
        await pilot.resize_terminal(80, 24)
        await settled(pilot)
        await compare_screen(pilot, "conversations-80-dark")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "01:00"),
        (3600, "00:00"),
        (2 * 3600, "Sun 23:00"),
        (5 * DAY, "Wed 01:00"),
        (6 * DAY, "24 Nov"),
        (333 * DAY, "01 Jan"),
        (400 * DAY, "2025-10-26"),
    ],
)
def test_date_is_as_short_as_it_can_be(seconds: int, text: str) -> None:
    assert when_text(NOW - seconds, NOW) == text


def test_moment_that_is_still_to_come_is_a_date() -> None:
    assert when_text(NOW + 3 * DAY, NOW) == "03 Dec"


@pytest.mark.parametrize(
    ("size", "theme"), [((80, 24), "dark"), ((120, 40), "light"), ((200, 60), "contrast")]
)
async def test_list_looks_as_stored(
    store: Store, size: tuple[int, int], theme: str, compare_screen: CompareScreen
) -> None:
    async with shown(listed(store, current="fox"), size, theme) as pilot:
        await compare_screen(pilot, f"conversations-{size[0]}-{theme}")


async def test_search_looks_as_stored(store: Store, compare_screen: CompareScreen) -> None:
    async with shown(listed(store), theme="light") as pilot:
        await press(pilot, *"river", "down")
        await compare_screen(pilot, "conversations-search")
