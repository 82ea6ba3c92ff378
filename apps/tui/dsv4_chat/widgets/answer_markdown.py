"""Markdown as a model writes it, growing piece by piece.

The idea: Textual's widget with a parser that loses nothing: HTML is shown as text, and a line break
in the source is a line break on the screen.
"""

from __future__ import annotations

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from textual.widgets import Markdown

from dsv4_chat.messages import LinkWanted
from dsv4_chat.plain_text import drawable


def answer_parser() -> MarkdownIt:
    """GitHub's Markdown without HTML, with every line break kept."""
    parser = MarkdownIt("gfm-like", {"html": False})
    parser.core.ruler.push("keep_breaks", _keep_breaks)
    return parser


def _keep_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


class AnswerMarkdown(Markdown):
    """One answer.

    Args:
        text: what there is of it already.
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(drawable(text), parser_factory=answer_parser, open_links=False)

    async def grow(self, text: str) -> None:
        """Append more of the answer, and wait until it is in place."""
        await self.append(drawable(text))

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """A link is copied: opening it would start a program, maybe on another machine."""
        event.stop()
        self.post_message(LinkWanted(event.href))
