"""What each slash command does in the chat.

The idea: one case per record of `commands`; most are the key's own action.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from dsv4_chat import commands
from dsv4_chat.export import write_export
from dsv4_chat.themes import use_theme
from edgedsv4 import Dsv4Error

if TYPE_CHECKING:
    from dsv4_chat.screens.chat import ChatScreen


async def run_command(chat: ChatScreen, command: commands.Command) -> None:
    """Do what a command says; what it cannot do is told."""
    try:
        if not await _change(chat, command):
            await _act(chat, command)
    except Dsv4Error as error:
        chat.tell(str(error), is_error=True)


async def _change(chat: ChatScreen, command: commands.Command) -> bool:
    """Commands with arguments; whether it was one."""
    conversation = chat.dialogue.conversation
    match command:
        case commands.OpenConversation(query):
            await chat.panels.conversations(query)
        case commands.RenameConversation(title):
            conversation.title = title
            chat.tell(f"Renamed to {title}")
        case commands.AttachFile(path):
            await chat.attach(path)
        case commands.SetSystem(text):
            conversation.system = text
            chat.tell("System message set." if text else "System message removed.")
        case commands.SetThinking(mode):
            await chat.set_thinking(mode)
        case commands.SetOption(key, text):
            conversation.sampling = command.apply(conversation.sampling)
            chat.tell(f"{key} is {text} now.")
        case commands.Export(export_format, path):
            written = await asyncio.to_thread(
                write_export, conversation, export_format, path, folder=chat.owner.folder
            )
            chat.tell(f"Written to {written}")
        case commands.SetTheme(name):
            use_theme(chat.owner, name)
        case commands.CopyCode(number):
            chat.action_copy_code(number)
        case _:
            return False
    await chat.owner.keeper.save_options()
    chat.refresh_status()
    return True


async def _act(chat: ChatScreen, command: commands.Command) -> None:
    """Commands without arguments."""
    dialogue, panels = chat.dialogue, chat.panels
    keys: dict[type, Callable[[], None]] = {
        commands.NewConversation: chat.action_new,
        commands.Fork: chat.action_fork,
        commands.Regenerate: chat.action_regenerate,
        commands.EditQuestion: chat.action_edit,
        commands.CopyAnswer: chat.action_copy_answer,
    }
    screens: dict[type, Callable[[], Awaitable[None]]] = {
        commands.ShowHelp: panels.help,
        commands.ShowDetails: panels.details,
        commands.DeleteConversation: panels.delete_current,
        commands.Quit: chat.owner.action_leave,
    }
    kind = type(command)
    if kind in keys:
        keys[kind]()
    elif kind in screens:
        await screens[kind]()
    elif not dialogue.stop():
        chat.tell("No reply is being written.")
