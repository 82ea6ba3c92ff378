"""A text that grows looks like the same text at once, at any width and however it is cut."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from textual.app import App, ComposeResult

from dsv4_chat.themes import use_theme
from dsv4_chat.widgets.answer_text import AnswerText, PlainText

if TYPE_CHECKING:
    from dsv4_chat.widgets.streamed_text import StreamedText


ANSWER = """\
# Title

A paragraph with **bold**, `code` and a [link](https://example.org).
The next line.

1. one
   - inner

     more of it
2. two 日本語 🎉

| name | width |
|------|------:|
| 狐   |     2 |

```python
def fox():

    return "```"
```

> quoted
> twice

    indented

---
<div>html</div> and ~~struck~~
Setext
======
last
"""
THOUGHT = "First line\n\n  indented\nlast line without end"


class Host(App[None]):
    def __init__(self, widget: StreamedText) -> None:
        super().__init__()
        self._shown_widget = widget

    def on_mount(self) -> None:
        use_theme(self, "dark")

    def compose(self) -> ComposeResult:
        self._shown_widget.styles.height = "auto"
        yield self._shown_widget


def lines_of(widget: StreamedText) -> list[str]:
    return [widget.render_line(y).text.rstrip() for y in range(widget.size.height)]


@pytest.mark.parametrize("width", [12, 40, 100])
@pytest.mark.parametrize(("kind", "text"), [(AnswerText, ANSWER), (PlainText, THOUGHT)])
async def test_pieces_look_like_the_whole(kind: type[StreamedText], text: str, width: int) -> None:
    async with Host(kind(text)).run_test(size=(width, 200)) as pilot:
        expected = lines_of(pilot.app.query_one(kind))
    chance = random.Random(width)
    growing = kind("")
    async with Host(growing).run_test(size=(width, 200)) as pilot:
        place = 0
        while place < len(text):
            end = place + chance.randint(1, 9)
            growing.grow(text[place:end])
            place = end
            if chance.random() < 0.2:
                await pilot.pause()
        await pilot.pause()
        assert growing.text == text
        assert lines_of(growing) == expected


async def test_everything_that_is_said_is_shown() -> None:
    async with Host(AnswerText(ANSWER)).run_test(size=(100, 200)) as pilot:
        shown = "\n".join(lines_of(pilot.app.query_one(AnswerText)))
        for piece in (
            "Title", "bold", "code", "https://example.org", "The next line.", "inner",
            "more of it", "日本語 🎉", "狐", "def fox():", '    return "```"', "quoted", "indented",
            "<div>html</div>", "struck", "Setext", "last",
        ):  # fmt: skip
            assert piece in shown
        assert "**" not in shown


async def test_wide_characters_take_two_columns() -> None:
    async with Host(AnswerText("狐" * 10)).run_test(size=(10, 20)) as pilot:
        widget = pilot.app.query_one(AnswerText)
        assert lines_of(widget) == ["狐" * 5, "狐" * 5]
        assert {widget.render_line(y).cell_length for y in range(2)} == {10}


async def test_other_theme_and_width_draw_anew() -> None:
    async with Host(AnswerText(ANSWER)).run_test(size=(40, 200)) as pilot:
        widget = pilot.app.query_one(AnswerText)
        before = [list(widget.render_line(y)) for y in range(widget.size.height)]
        use_theme(pilot.app, "light")
        await pilot.pause()
        after = [list(widget.render_line(y)) for y in range(widget.size.height)]
        assert [[s.text for s in line] for line in before] == [
            [s.text for s in line] for line in after
        ]
        assert before != after
        narrow = widget.size.height
        await pilot.resize_terminal(80, 200)
        await pilot.pause()
        assert widget.size.height < narrow


@pytest.mark.parametrize(
    "text",
    [
        ">" * 3000,
        "[" * 3000,
        "- " * 2000,
        "*" * 3001 + "a",
        "|" * 500 + "\n" + "|-" * 500,
        "```" * 700,
        "![x](y)" * 300,
        "a\x0bb\x0cc\x85d\u2028e",
        "\ud800 lone surrogate",
        "\u202eright to left",
    ],
    ids=lambda text: ascii(text[:8]),
)
async def test_hostile_text_is_drawn(text: str) -> None:
    async with Host(AnswerText("")).run_test(size=(40, 20)) as pilot:
        widget = pilot.app.query_one(AnswerText)
        for place in range(0, len(text), 500):
            widget.grow(text[place : place + 500])
            await pilot.pause()
        widget.finish()
        await pilot.pause()
        assert widget.size.height > 0
