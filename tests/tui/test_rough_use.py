"""What rough users and broken surroundings do to the app: nothing said is lost by it."""

from __future__ import annotations

import os
import pty
import signal
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chat_pilot import Ticks, chatting
from scripted_model import ScriptedModel, Step, Wait
from textual.app import App, ComposeResult
from textual.message import Message

from dsv4_chat import __main__ as program
from dsv4_chat.app import ChatApp
from dsv4_chat.dialogue import PARTIAL_SECONDS
from dsv4_chat.settings import Settings
from dsv4_chat.store import Store
from dsv4_chat.store_errors import StoreError
from dsv4_chat.terminal import LastingFile, TerminalDriver
from dsv4_chat.widgets.answer_text import AnswerText

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dsv4_chat.widgets.streamed_text import Look


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_signal_saves_the_reply_that_is_written(tmp_path: Path, number: int) -> None:
    store = Store(tmp_path)
    model = ScriptedModel(script=[["Half a ", "story", Wait(threading.Event())]])
    async with chatting(model, store=store) as chat:
        await chat.type("tell me")
        await chat.press("enter")
        await chat.until(lambda: chat.said[-1:] == ["Half a story"])
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # a terminal that is closed says so more than once
        await chat.until(lambda: not chat.app.is_running)
        assert chat.app.return_code == 128 + number
    newest = store.latest()
    assert newest is not None
    assert [node.content for node in store.load(newest).path()] == ["tell me", "Half a story"]
    assert len(model.saved) == 1
    store.close()


def test_driver_is_ours() -> None:
    assert ChatApp(ScriptedModel(), Settings()).driver_class is TerminalDriver


class Listener(App[None]):
    """Notes what a driver says."""

    def __init__(self) -> None:
        super().__init__(driver_class=TerminalDriver)
        self.statuses: list[int] = []

    def end(self, status: int) -> None:
        self.statuses.append(status)


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a pseudo-terminal."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    for descriptor in (ours, theirs):
        try:
            os.close(descriptor)
        except OSError:
            continue


async def read_keys(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Message], Listener]:
    """A driver whose input thread reads from a descriptor, run in this thread until its end."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGCONT)}
    app = Listener()
    driver = TerminalDriver(app)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    driver.fileno = descriptor
    said: list[Message] = []
    monkeypatch.setattr(driver, "process_message", said.append)
    monkeypatch.setattr(
        app, "call_later", lambda callback, *arguments: callback(*arguments) or True
    )
    driver.run_input_thread()
    return said, app


async def test_bytes_that_are_no_text_do_not_end_the_program(
    terminal: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = terminal
    tty.setraw(theirs)
    os.write(ours, b"a\xff\x9b\xe9tb")
    threading.Timer(0.3, os.close, (ours,)).start()
    said, app = await read_keys(theirs, monkeypatch)
    typed = "".join(getattr(message, "character", None) or "" for message in said)
    assert typed == "a\ufffd\ufffd\ufffdtb"
    assert app.statuses == [128 + signal.SIGHUP]


async def test_drawing_on_a_terminal_that_is_gone_is_no_error(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    with os.fdopen(os.dup(theirs), "w", encoding="utf-8") as file:
        lasting = LastingFile(file)
        lasting.write("x\ud800y")
        lasting.flush()
        assert os.read(ours, 100) == b"x?y"
        os.close(ours)
        for _ in range(3):
            assert lasting.write("gone" * 5000) == 20000
            lasting.flush()
        assert lasting.fileno() == file.fileno()


class FullDisk:
    """Makes the writes of a store fail while it is full."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = True
        for name in ("save_node", "save_whole", "save_conversation"):
            monkeypatch.setattr(store, name, self._guarded(getattr(store, name)))

    def _guarded(self, write: Callable[..., None]) -> Callable[..., None]:
        def guarded(*arguments: object) -> None:
            if self.is_full:
                raise StoreError("the disk is full")
            write(*arguments)

        return guarded


async def test_turns_that_could_not_be_saved_are_saved_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    disk = FullDisk(store, monkeypatch)
    async with chatting(ScriptedModel(script=[["a"], ["b"]]), store=store) as chat:
        await chat.ask("first")
        assert store.latest() is None
        assert any("the disk is full" in toast for toast in chat.toasts)
        disk.is_full = False
        await chat.ask("second")
        newest = store.load(store.latest() or "")
        assert [node.content for node in newest.path()] == ["first", "a", "second", "b"]
        await chat.press("ctrl+n")
        await chat.idle()
        assert chat.said == []
    store.close()


@pytest.mark.parametrize("key", ["ctrl+n", "ctrl+q"])
async def test_conversation_that_is_not_saved_is_left_on_the_second_press_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    store = Store(tmp_path)
    FullDisk(store, monkeypatch)
    async with chatting(ScriptedModel(script=[["a"]]), store=store) as chat:
        await chat.ask("first")
        await chat.press(key)
        await chat.until(lambda: any("would be lost" in toast for toast in chat.toasts))
        await chat.idle()
        assert chat.said == ["first", "a"]
        await chat.press(key)
        await chat.until(lambda: not chat.app.is_running or chat.said == [])
    store.close()


async def test_long_reply_is_saved_while_it_is_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    clock = Ticks()
    release = threading.Event()

    def wait_long() -> None:
        clock.now += PARTIAL_SECONDS + 1

    script: list[Step] = ["Half ", wait_long, "a story", Wait(release), ", and its end"]
    async with chatting(ScriptedModel(script=[script]), store=store) as chat:
        chat.app.clock = clock
        await chat.type("tell me")
        await chat.press("enter")
        await chat.until(lambda: chat.said[-1:] == ["Half a story"])

        def written() -> list[str]:
            with store._reading() as connection:
                return [row[0] for row in connection.execute("SELECT content FROM nodes")]

        await chat.until(lambda: written() == ["tell me", "Half a story"])
        release.set()
        await chat.idle()
        assert chat.said[-1] == "Half a story, and its end"
        assert chat.path[-1].state == "complete"
    store.close()


async def test_editor_that_cannot_be_started_gives_the_screen_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with chatting(editor="/nonexistent/editor") as chat:
        steps = []

        @contextmanager
        def suspend() -> Iterator[None]:
            steps.append("away")
            yield
            steps.append("back")  # as in Textual, an error would pass this by

        monkeypatch.setattr(chat.app, "suspend", suspend)
        await chat.type("kept")
        await chat.press("ctrl+x")
        assert steps == ["away", "back"]
        assert chat.prompt.text == "kept"
        assert any("/nonexistent/editor" in toast for toast in chat.toasts)


def test_interrupt_before_the_screen_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "_chat", interrupt)
    settings = tmp_path / "settings.toml"
    settings.touch()
    assert program.main(["--settings", str(settings)]) == 130


class Counting(AnswerText):
    """Counts the characters that are drawn."""

    drawn_characters = 0

    def renderable(self, chunk: str, look: Look) -> RenderableType:
        self.drawn_characters += len(chunk)
        return super().renderable(chunk, look)


class CountingApp(App[None]):
    def compose(self) -> ComposeResult:
        yield Counting()


@pytest.mark.parametrize("before", ["", "A text.\n\n"])
async def test_long_code_block_is_not_drawn_again_with_every_token(before: str) -> None:
    lines = [f"x = {n}" if n % 7 else "" for n in range(400)]
    code = "```python\n" + "\n".join(lines) + "\nend\n```\n"
    async with CountingApp().run_test() as pilot:
        answer = pilot.app.query_one(Counting)
        answer.grow(before)
        for place in range(0, len(code), 20):
            answer.grow(code[place : place + 20])
            answer.get_content_height(answer.size, answer.size, 70)
        growing = [strip.text for strip in answer._draw(70).strips + answer._draw(70).rest]
        assert answer.drawn_characters < 60 * len(code)
        answer.finish()
        drawn = answer._draw(70)
        assert growing == [strip.text for strip in drawn.strips]
        shown = [strip.text.strip() for strip in drawn.strips]
        assert shown[-400:] == [*lines[1:], "end"]


async def test_opening_the_shown_conversation_does_not_stop_its_reply(tmp_path: Path) -> None:
    store = Store(tmp_path)
    release = threading.Event()
    script: list[Step] = ["Half ", Wait(release), "and the rest"]
    async with chatting(ScriptedModel(script=[script]), store=store) as chat:
        await chat.type("tell me")
        await chat.press("enter")
        await chat.until(lambda: chat.said[-1:] == ["Half "])
        dialogue = chat.screen.dialogue
        await dialogue.open(dialogue.conversation.id)
        assert dialogue.run is not None
        release.set()
        await chat.idle()
        assert chat.said[-1] == "Half and the rest"
        assert chat.path[-1].state == "complete"
    store.close()


async def test_new_chat_does_not_count_the_context_of_the_one_before() -> None:
    async with chatting() as chat:
        await chat.ask("some words of a question")
        assert "ctx 0/1,000" not in chat.shown
        await chat.press("ctrl+n")
        await chat.idle()
        assert "ctx 0/1,000" in chat.shown


async def test_very_low_terminal_shows_answer_prompt_and_status() -> None:
    async with chatting(ScriptedModel(script=[["the answer"]]), size=(20, 5)) as chat:
        await chat.ask("hello")
        await chat.type("next")
        lines = chat.shown.split("\n")
        assert "next" in lines[-2]
        assert "ready" in lines[-1]
        assert "2 tokens" in chat.shown or "the answer" in chat.shown
        assert chat.screen.max_scroll_y == 0
        await chat.pilot.resize_terminal(80, 24)
        await chat.pilot.pause()
        assert "hello" in chat.shown.split("\n")[0]
