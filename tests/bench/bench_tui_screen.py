"""The chat screen with a conversation of 50,000 tokens, and while an answer streams into it.

What a person waits for: from a key to the painted screen. The model is scripted: 300 tokens per
second in its own thread, as words; answers hold headings, lists, tables and code. Without a
terminal, so that writing to one is not counted.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import harness
from harness import Figure
from scripted_model import ScriptedModel, stream
from textual.pilot import Pilot

from dsv4_chat.app import ChatApp
from dsv4_chat.conversation import Conversation
from dsv4_chat.settings import Settings

TOKENS, TOKENS_PER_SECOND, CHARACTERS_PER_TOKEN = 50_000, 300, 4.2
WORDS = ("fox", "river", "川", "**bold**", "`code`", "the", "a", "quickly", "house")


def answer(seed: int) -> str:
    """About 370 tokens of every kind of Markdown."""
    drawn = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(drawn.choice(WORDS) for _ in range(count))

    code = "\n".join(f"x{line} = {line} * 2" for line in range(12))
    return (
        f"## Answer {seed}\n\n{words(100)}\n\n- {words(20)}\n- {words(20)}\n\n"
        f"```python\n{code}\n```\n\n| a | b |\n|---|---|\n| {seed} | 2 |\n\n{words(200)}\n"
    )


def conversation_of(tokens: int) -> Conversation:
    """Questions and answers of this length together."""
    conversation, length = Conversation(), 0.0
    while length < tokens:
        seed = len(conversation.nodes)
        conversation.append("user", f"Question {seed}")
        text = answer(seed)
        conversation.append("assistant", text)
        length += len(text) / CHARACTERS_PER_TOKEN
    return conversation


def memory_mb() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


async def key_ms(app: ChatApp, pilot: Pilot[None], work: Callable[[], Awaitable[None]]) -> float:
    """From an action in the event loop to the painted screen."""
    start = time.perf_counter()
    await work()
    await app.chat.painted()
    took = time.perf_counter() - start
    await pilot.pause()
    return 1e3 * took


async def run(repeats: int) -> list[Figure]:
    """Everything in one app."""
    longer = "\n\n".join(answer(1000 + number) for number in range(4 if repeats > 1 else 1))
    model = ScriptedModel(script=[stream(longer, seconds=1 / TOKENS_PER_SECOND)])
    app = ChatApp(model, Settings())
    async with app.run_test(size=(120, 40)) as pilot:
        while app.facts is None:
            await pilot.pause(0.01)
        before = memory_mb()
        app.keeper.use(conversation_of(TOKENS))
        start = time.perf_counter()
        await app.chat.dialogue.show()
        await app.chat.painted()
        shown = 1e3 * (time.perf_counter() - start)

        async def letter() -> None:
            app.chat.prompt.insert_at_cursor("x")

        async def up() -> None:
            app.chat.action_page(-1)

        typed = [await key_ms(app, pilot, letter) for _ in range(20 * repeats)]
        scrolled = [await key_ms(app, pilot, up) for _ in range(20 * repeats)]
        grown = memory_mb() - before
        await app.chat.transcript.go_to_end()
        app.chat.dialogue.perform(app.chat.dialogue.send("go", "go"))
        while app.chat.dialogue.run is None:
            await pilot.pause(0.01)
        streamed = []
        while app.chat.dialogue.run is not None:
            streamed.append(await key_ms(app, pilot, letter))
            await asyncio.sleep(0.05)
        if app.keeper.current.path()[-1].content != longer:
            raise RuntimeError("the answer is not what the model said")
    return [
        Figure("tui screen", "show 50,000 tokens", shown, "ms", 1),
        *_figures("type", typed),
        *_figures("scroll a page", scrolled),
        *_figures("type while 300 tokens/s stream", streamed),
        Figure("tui screen", "memory of the conversation on the screen", grown, "MB", 1),
    ]


def _figures(name: str, taken: list[float]) -> list[Figure]:
    n = len(taken)
    return [
        Figure("tui screen", name, statistics.median(taken), "ms", n),
        Figure("tui screen", f"{name}, 95th percentile", sorted(taken)[n * 95 // 100], "ms", n),
    ]


def measure(repeats: int) -> list[Figure]:
    """Milliseconds from a key to the screen."""
    return asyncio.run(run(repeats))


if __name__ == "__main__":
    harness.main(measure)
