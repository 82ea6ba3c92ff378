"""Draw docs/images/*.svg: the app with the pocket model, as it is.

`python tests/tui/make_pictures.py`, again when the screens have changed. Same seed, same text.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from textual.pilot import Pilot

from dsv4_chat.app import ChatApp, Surroundings
from dsv4_chat.engine_model import EngineModel
from dsv4_chat.screens.conversations import ConversationsScreen
from dsv4_chat.screens.details import DetailsScreen
from dsv4_chat.settings import Settings
from dsv4_chat.store import Store
from dsv4_chat.themes import use_theme

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
SIZE = (100, 28)
EARLIER = (
    "What does river mean?",
    "Who are you?",
    "Tell me a story about an owl named Otto.",
    "What is 12 + 7?",
    "What is the opposite of cold?",
)
SHOWN = ("What is 23 * 4?", "Tell me a story about a fox named Mia.")


async def main() -> None:
    """Chat, and draw on the way."""
    settings = Settings(temperature=0.0, seed=1, snapshots="off", think="high")
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        model = EngineModel(settings.model, settings.engine_options())
        app = ChatApp(model, settings, Surroundings(store=store))
        async with app.run_test(size=SIZE) as pilot:
            await wait_until(pilot, lambda: app.facts is not None)
            for question in EARLIER:
                await ask(pilot, app, question)
                await pilot.press("ctrl+n")
                await pilot.pause()
            for question in SHOWN:
                await ask(pilot, app, question)
            await draw(pilot, "chat")
            use_theme(app, "light")
            await pilot.press("ctrl+o")
            await wait_until(pilot, lambda: isinstance(app.screen, ConversationsScreen))
            await pilot.press(*"sea")
            await draw(pilot, "conversations")
            await pilot.press("ctrl+c")
            use_theme(app, "dark")
            await pilot.press("f2")
            await wait_until(pilot, lambda: isinstance(app.screen, DetailsScreen))
            await draw(pilot, "details")
        app.thread.stop(seconds=5)
        store.close()


async def ask(pilot: Pilot[None], app: ChatApp, question: str) -> None:
    """Ask one thing and wait for the whole answer."""
    dialogue = app.chat.dialogue
    turns = len(dialogue.conversation.path()) + 2
    await pilot.press(*question, "enter")
    await wait_until(
        pilot, lambda: dialogue.run is None and len(dialogue.conversation.path()) == turns
    )


async def draw(pilot: Pilot[None], name: str) -> None:
    """Write what is on the screen, once it has settled."""
    await asyncio.sleep(1)
    await pilot.pause()
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.svg"
    path.write_text(pilot.app.export_screenshot(simplify=True), encoding="utf-8")
    print(f"{path}: {path.stat().st_size:,} bytes")


async def wait_until(pilot: Pilot[None], condition: object) -> None:
    """Give the app time until something holds."""
    while not condition():  # type: ignore[operator]  # a function without arguments
        await pilot.pause(0.02)


if __name__ == "__main__":
    asyncio.run(main())
