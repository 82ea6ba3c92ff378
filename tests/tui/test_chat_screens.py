"""The chat as it looks, at three sizes and in every theme."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from chat_pilot import Chat, chatting
from scripted_model import Call, Prefill, ScriptedModel, Step, Thinking, Wait
from stored_screens import CompareScreen
from textual import events

from dsv4_chat.conversation import Conversation
from dsv4_chat.settings import Settings
from dsv4_chat.widgets.turn import Turn
from edgedsv4 import ContextFullError, FormatError

ANSWER = """\
## Rivers

A **river** is water that flows to the sea, 川 in Japanese 🎉:

1. a *spring*
2. a bed, with `banks`

| river | length in km |
|-------|-------------:|
| Nile  |         6650 |
| 長江  |         6300 |

```python
def length(river: str) -> int:
    return {"Nile": 6650}.get(river, 0)
```

> All rivers run into the sea; see [the source](https://example.org)."""
THOUGHT = "They ask for the meaning of a word.\nI should give a short definition and a table."
SIZES = {"80": (80, 24), "120": (120, 40), "200": (200, 60)}
NEVER = threading.Event()


async def ask(chat: Chat, text: str) -> None:
    """Send, and wait for what is on the screen while the script waits."""
    await chat.type(text)
    await chat.press("enter")
    await chat.until(lambda: chat.screen.dialogue.run is not None)


def model(*steps: list[Step]) -> ScriptedModel:
    return ScriptedModel(script=list(steps), clock=lambda: 100.0)


@pytest.mark.parametrize(("size", "theme"), [("80", "dark"), ("120", "light")])
async def test_welcome(compare_screen: CompareScreen, size: str, theme: str) -> None:
    async with chatting(settings=Settings(theme=theme), size=SIZES[size]) as chat:
        await compare_screen(chat.pilot, f"welcome-{size}-{theme}")


async def test_loading(compare_screen: CompareScreen) -> None:
    loading = ScriptedModel(opening=[Prefill(3 << 30, 4 << 30), Wait(NEVER)])
    async with chatting(loading, is_open=False) as chat:
        await chat.until(lambda: "3.0 GiB" in chat.shown)
        await compare_screen(chat.pilot, "loading-80-dark")
        chat.model.cancel()


@pytest.mark.parametrize(
    ("size", "theme"),
    [("80", "dark"), ("80", "contrast"), ("120", "light"), ("200", "dark"), ("200", "light")],
)
async def test_answer(compare_screen: CompareScreen, size: str, theme: str) -> None:
    script = model([Thinking(THOUGHT), ANSWER])
    async with chatting(script, Settings(theme=theme), size=SIZES[size]) as chat:
        await chat.ask("What does river mean?")
        await compare_screen(chat.pilot, f"answer-{size}-{theme}")


async def test_thinking_while_it_streams(compare_screen: CompareScreen) -> None:
    async with chatting(model([Thinking(THOUGHT), Wait(NEVER)])) as chat:
        await ask(chat, "What does river mean?")
        await chat.until(lambda: "short definition" in chat.shown)
        await compare_screen(chat.pilot, "thinking-80-dark")
        await chat.press("escape")


async def test_reading_a_long_prompt(compare_screen: CompareScreen) -> None:
    def later() -> None:
        chat.app.clock.now += 6  # type: ignore[attr-defined]

    script = model([later, Prefill(2048, 8192), Wait(NEVER)])
    async with chatting(script, size=SIZES["120"]) as chat:
        await ask(chat, "Sum up this book.")
        await chat.until(lambda: "18 s left" in chat.shown)
        await compare_screen(chat.pilot, "reading-120-dark")
        await chat.press("escape")


async def test_tool_calls(compare_screen: CompareScreen) -> None:
    arguments = '{"query": "river length", "limit": 3, "langs": ["en", "日本語"]}'
    script = model(["I will look it up.", Call("web_search", arguments)])
    async with chatting(script, Settings(theme="light")) as chat:
        await chat.ask("How long is the Nile?")
        await compare_screen(chat.pilot, "tool-call-80-light")


async def test_stopped_second_version(compare_screen: CompareScreen) -> None:
    script = model(["A river is water."], ["A river is", Wait(NEVER)])
    async with chatting(script) as chat:
        await chat.ask("What does river mean?")
        await chat.press("ctrl+r")
        await chat.until(lambda: chat.said[-1:] == ["A river is"])
        await chat.press("escape")
        await chat.idle()
        await compare_screen(chat.pilot, "stopped-80-dark")


@pytest.mark.parametrize(("size", "theme"), [("80", "dark"), ("120", "light")])
async def test_full_context(compare_screen: CompareScreen, size: str, theme: str) -> None:
    script = model(["A spring."], ["The sea."], [ContextFullError(1200, 1000)])
    async with chatting(script, Settings(theme=theme), size=SIZES[size]) as chat:
        for question in ("Where does a river begin?", "Where does it end?", "And then?"):
            await chat.ask(question)
        await compare_screen(chat.pilot, f"context-full-{size}-{theme}")


async def test_model_that_cannot_be_opened(compare_screen: CompareScreen) -> None:
    error = FormatError("no such file", path="models/flash.gguf")
    settings = Settings(model="models/flash.gguf")
    async with chatting(ScriptedModel(opening=[error]), settings, is_open=False) as chat:
        await chat.until(lambda: chat.cards)
        await compare_screen(chat.pilot, "not-opened-80-dark")


async def test_completion(compare_screen: CompareScreen) -> None:
    async with chatting() as chat:
        await chat.press(*"/e", "down")
        await compare_screen(chat.pilot, "completion-80-dark")
        chat.prompt.put("/set ")
        await chat.pilot.pause()
        await compare_screen(chat.pilot, "completion-set-80-dark")


async def test_prompt_of_several_lines(compare_screen: CompareScreen, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("# Notes\n", encoding="utf-8")
    async with chatting(settings=Settings(theme="light"), folder=tmp_path) as chat:
        await chat.ask("hello")
        await chat.command("/attach notes.md")
        chat.prompt.post_message(events.Paste("line\n" * 120))
        await chat.pilot.pause()
        await chat.press("ctrl+j", *"What do these say?")
        await compare_screen(chat.pilot, "prompt-80-light")


async def test_editing_an_earlier_question(compare_screen: CompareScreen) -> None:
    async with chatting(model(["A spring."], ["The sea."]), size=SIZES["120"]) as chat:
        await chat.ask("Where does a river begin?")
        await chat.ask("Where does it end?")
        chat.screen.query(Turn).first().focus()
        await chat.press("ctrl+e")
        await chat.idle()
        await compare_screen(chat.pilot, "editing-120-dark")


async def test_focused_turn_between_hidden_ones(compare_screen: CompareScreen) -> None:
    conversation = Conversation(clock=lambda: 1.0, title="A long talk")
    for number in range(30):
        conversation.append("user", f"Question {number}")
        conversation.append("assistant", f"Answer {number}.\n\n" + "Many words follow here. " * 30)
    conversation.drop_oldest_turns(25)
    async with chatting() as chat:
        chat.app.keeper.use(conversation)
        await chat.screen.dialogue.show()
        await chat.pilot.pause()
        await chat.press("ctrl+home")
        await chat.pilot.pause()
        chat.screen.query(Turn).first().focus()
        await chat.press("down")
        await compare_screen(chat.pilot, "focused-80-dark")
