"""Questions: every way to answer one, or not to."""

from __future__ import annotations

import pytest
from dialog_host import OPEN, result_after, results_of, shown
from stored_screens import CompareScreen

from dsv4_chat.screens.ask_text import AskTextScreen
from dsv4_chat.screens.confirm import YES_NO, Answer, ConfirmScreen

FULL = (
    Answer(id="drop", key="d", label="Leave out the oldest turns", help="they stay readable"),
    Answer(id="new", key="n", label="New chat"),
    Answer(id="keep", key="k", label="Back to the prompt"),
)


def question() -> ConfirmScreen:
    return ConfirmScreen(
        "The context is full", FULL, detail="1,024 tokens are needed, the context holds 1,000."
    )


ANSWERS: list[tuple[list[str], str | None]] = [
    (["enter"], "drop"),
    (["down", "enter"], "new"),
    (["tab", "tab", "enter"], "keep"),
    (["right", "enter"], "new"),
    (["shift+tab", "enter"], "keep"),
    (["left", "left", "enter"], "new"),
    (["down", "up", "enter"], "drop"),
    (["n"], "new"),
    (["k"], "keep"),
    (["escape"], None),
    (["ctrl+c"], None),
    (["x", "7", "f5"], OPEN),
]
LINES: list[tuple[list[str], str | None]] = [
    (["enter"], "Old title"),
    (["n", "e", "w", "enter"], "new"),
    (["end", "space", "2", "space", "enter"], "Old title 2"),
    (["backspace", "space", "enter"], OPEN),
    (["escape"], None),
    (["ctrl+c"], None),
]


async def test_question_is_answered_by_keys() -> None:
    async with shown(question()) as pilot:
        given = [await result_after(pilot, question(), keys) for keys, _ in ANSWERS]
    assert given == [answer for _, answer in ANSWERS]


async def test_question_is_answered_by_a_click() -> None:
    async with shown(question()) as pilot:
        await pilot.click("OptionList", offset=(5, 1))
        await pilot.pause()
        assert results_of(pilot) == ["new"]


async def test_enter_takes_the_answer_that_is_marked_at_first() -> None:
    async with shown(ConfirmScreen("Delete it?", YES_NO, marked="no")) as pilot:
        await pilot.press("enter")
        await pilot.pause()
        assert results_of(pilot) == ["no"]


@pytest.mark.parametrize("theme", ["dark", "light", "contrast"])
async def test_question_looks_as_stored(theme: str, compare_screen: CompareScreen) -> None:
    async with shown(question(), theme=theme) as pilot:
        await compare_screen(pilot, f"confirm-{theme}")


async def test_line_is_asked_for() -> None:
    async with shown(question()) as pilot:
        given = [
            await result_after(pilot, AskTextScreen("New title", "Old title"), keys)
            for keys, _ in LINES
        ]
    assert given == [line for _, line in LINES]
