"""`edgedsv4 chat`: a conversation line by line, at a terminal or over a pipe.

The conversation is a list of messages; the session finds out by itself what of it was already
evaluated. So undoing, retrying or changing the system message is only an edit of that list.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4 import errors
from edgedsv4.cli.flags import engine_options, parse_think, prompt_options, sampling_options
from edgedsv4.cli.interrupt import cancel_on_interrupt
from edgedsv4.cli.lines import read_messages
from edgedsv4.cli.replies import ReplyStream, drafts_text, stats_line
from edgedsv4.cli.saved_chat import load_chat, save_chat
from edgedsv4.cli.sources import check_argument

if TYPE_CHECKING:
    from edgedsv4 import Engine, Message, PromptOptions, SamplingOptions, Session, ToolCall
    from edgedsv4.cli.terminal import Terminal

_RECOVERABLE = (
    errors.ConfigError,
    errors.ContextFullError,
    errors.CapacityError,
    errors.NumericError,
)


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Opens the model and talks until /exit, the end of the input or a second Ctrl+C."""
    sampling = sampling_options(args)
    options = engine_options(args)
    prompting = prompt_options(args)
    system = None if args.system is None else check_argument(args.system, "--system")
    model = args.model or edgedsv4.DEFAULT_MODEL
    with (
        edgedsv4.Engine.open(model, options, on_progress=terminal.progress) as engine,
        engine.new_session() as session,
    ):
        introduce(model, terminal)
        chat = Chat(engine, session, terminal, sampling, prompting)
        chat.system = system
        if args.load is not None:
            chat.take_saved(args.load)
        chat.talk(read_messages(terminal))
        if args.save is not None:
            chat.keep_saved(args.save)
    return 0


def introduce(model: str, terminal: Terminal) -> None:
    """Says what a shipped model is and what to try with it."""
    shipped = edgedsv4.SHIPPED_MODELS.get(model)
    if shipped is None:
        return
    terminal.line(shipped.note)
    if shipped.prompts:
        terminal.line(f"Try: {' | '.join(shipped.prompts)}")
        terminal.line("/reset before another topic: it is a small model. /help lists all commands.")


class Chat:
    """One conversation: the messages so far and what the next reply is made with."""

    def __init__(
        self,
        engine: Engine,
        session: Session,
        terminal: Terminal,
        sampling: SamplingOptions,
        prompting: PromptOptions,
    ) -> None:
        self.engine = engine
        self.session = session
        self.terminal = terminal
        self.sampling = sampling
        self.prompting = prompting
        self.system: str | None = None
        self.messages: list[Message] = []
        self._last_stats = "no reply yet"
        self._is_open = True

    def talk(self, inputs: Iterator[str]) -> None:
        """Answers each input until /exit or the end of the inputs."""
        while self._is_open:
            text = next(inputs, None)
            if text is None:
                return
            if text.startswith("/"):
                self.command(text)
            elif text.strip():
                self.messages.append(edgedsv4.Message("user", text))
                self.answer()

    def answer(self) -> None:
        """Streams a reply to the conversation; a stopped one stays in it as far as it came.

        When there can be no reply (context full, prompt refused) the message is taken back.
        """
        stream = ReplyStream(self.terminal.write, self.terminal.muted)
        conversation = list(self.messages)
        if self.system is not None:
            conversation.insert(0, edgedsv4.Message("system", self.system))
        try:
            with cancel_on_interrupt(self.session.cancel):
                done = stream.consume(
                    self.session.reply(
                        conversation,
                        self.sampling,
                        prompt=self.prompting,
                        on_progress=self.terminal.evaluated,
                    )
                )
        except errors.CancelledError:
            self._keep_partial(stream)
        except _RECOVERABLE as error:
            self._end_line(stream)
            self.messages.pop()
            self.terminal.note(f"{error} (the message was taken back)")
        else:
            self._end_line(stream)
            self._last_stats = stats_line(done.stats, done.report)
            self._keep(done.reply.text, done.reply.reasoning, done.reply.tool_calls)
            if done.finish_reason == "length":
                self.terminal.note("(stopped: token limit or context reached)")

    def _keep(self, text: str, thinking: str, tool_calls: tuple[ToolCall, ...] = ()) -> None:
        self.messages.append(
            edgedsv4.Message("assistant", text, reasoning=thinking, tool_calls=tool_calls)
        )

    def _keep_partial(self, stream: ReplyStream) -> None:
        if stream.done is not None:
            self._last_stats = stats_line(stream.done.stats, stream.done.report)
        if not stream.text and not stream.thinking:
            self.messages.pop()
            self.terminal.note("(stopped before the answer began; the message was taken back)")
            return
        self._end_line(stream)
        self._keep(stream.text, stream.thinking)
        self.terminal.note("(stopped; the answer so far is kept)")

    def _end_line(self, stream: ReplyStream) -> None:
        if stream.text or stream.thinking:
            self.terminal.line()

    def command(self, text: str) -> None:
        """Does one slash command; an unknown one is told."""
        name, _, argument = text.partition(" ")
        entry = COMMANDS.get(name)
        if entry is None:
            self.terminal.note(f"unknown command {name}; /help lists them")
            return
        entry.action(self, argument.strip())

    def leave(self, _argument: str) -> None:
        """Ends the conversation."""
        self._is_open = False

    def reset(self, _argument: str) -> None:
        """Forgets the conversation, keeps the system message."""
        self.messages.clear()
        self.terminal.line("(new conversation)")

    def undo(self, _argument: str) -> None:
        """Takes the last exchange back."""
        if not self._drop_reply():
            self.terminal.note("nothing to undo")
            return
        self.messages.pop()
        self.terminal.line("(the last exchange is gone)")

    def retry(self, _argument: str) -> None:
        """Asks for another reply to the last message."""
        if self._drop_reply():
            self.answer()
        else:
            self.terminal.note("nothing to retry")

    def _drop_reply(self) -> bool:
        """Removes messages after the last one of the user; False when there is none."""
        while self.messages and self.messages[-1].role != "user":
            self.messages.pop()
        return bool(self.messages)

    def think(self, argument: str) -> None:
        """Sets how much the model thinks from the next reply on."""
        try:
            mode = parse_think(argument)
        except argparse.ArgumentTypeError as error:
            self.terminal.note(f"/think: {error}")
            return
        self.prompting = dataclasses.replace(self.prompting, thinking=mode)
        self.terminal.line(f"(thinking: {mode})")

    def set_system(self, argument: str) -> None:
        """Sets the system message; without text it is removed."""
        self.system = argument or None
        self.terminal.line("(system message set)" if argument else "(no system message)")

    def save(self, argument: str) -> None:
        """Saves the conversation and what was evaluated of it."""
        self._with_file("/save", argument, self.keep_saved)

    def load(self, argument: str) -> None:
        """Goes on with a saved conversation."""
        self._with_file("/load", argument, self.take_saved)

    def keep_saved(self, path: str) -> None:
        """Saves to a file; raises what `save_chat` raises."""
        with cancel_on_interrupt(self.session.cancel):
            save_chat(self.session, path, self.system, self.messages)
        self.terminal.line(f"(saved {self.session.length:,} tokens to {path})")

    def take_saved(self, path: str) -> None:
        """Loads from a file; raises what `load_chat` raises."""
        with cancel_on_interrupt(self.session.cancel):
            system, self.messages = load_chat(self.session, path)
        # A system message of the command line counts where the file has none.
        self.system = self.system if system is None else system
        count = len(self.messages)
        self.terminal.line(f"({count} messages, {self.session.length:,} tokens from {path})")

    def _with_file(self, name: str, argument: str, work: Callable[[str], None]) -> None:
        """Does it to the named file; when that fails, the conversation goes on as it was."""
        if not argument:
            self.terminal.note(f"{name} needs the name of a file")
            return
        try:
            work(argument)
        except (*_RECOVERABLE, errors.SnapshotError, errors.StorageError) as error:
            self.terminal.note(f"{name}: {error}")
        except errors.CancelledError:
            self.terminal.note(f"{name}: stopped")

    def stats(self, _argument: str) -> None:
        """Figures of the last reply and of the session."""
        self.terminal.line(self._last_stats)
        self.terminal.line(
            f"context: {self.session.length:,} of {self.session.capacity:,} tokens,"
            f" {self.session.nbytes():,} bytes"
        )
        drafts = self.session.totals.drafts
        if drafts is not None:
            self.terminal.line(f"session: {drafts_text(drafts)}")

    def help(self, _argument: str) -> None:
        """Lists the commands."""
        for name, entry in COMMANDS.items():
            self.terminal.line(f"{name} {entry.argument}".ljust(16) + entry.help)
        self.terminal.line('A \\ at the end of a line continues it; """ opens and closes a block.')
        self.terminal.line("Ctrl+C stops a reply; at the prompt, Ctrl+C twice leaves.")


@dataclasses.dataclass(frozen=True, slots=True)
class SlashCommand:
    """What a slash command does and how it is explained."""

    action: Callable[[Chat, str], None]
    help: str
    argument: str = ""


COMMANDS = {
    "/help": SlashCommand(Chat.help, "this list"),
    "/exit": SlashCommand(Chat.leave, "leave"),
    "/reset": SlashCommand(Chat.reset, "forget the conversation"),
    "/retry": SlashCommand(Chat.retry, "another reply to the last message"),
    "/undo": SlashCommand(Chat.undo, "take the last exchange back"),
    "/think": SlashCommand(
        Chat.think, "how much it thinks: none, low, high, max or 1..100", "MODE"
    ),
    "/system": SlashCommand(
        Chat.set_system, "set the system message; without TEXT remove it", "TEXT"
    ),
    "/save": SlashCommand(Chat.save, "save the conversation to a file", "FILE"),
    "/load": SlashCommand(Chat.load, "go on with the conversation of a file", "FILE"),
    "/stats": SlashCommand(Chat.stats, "tokens, speed and memory"),
}
