"""Markdown as a model writes it, and plain text, growing piece by piece.

The idea: nothing the model says is lost. HTML is shown as text, a line break in the source is one
on the screen, and the address of a link stands behind it, to be read before it is opened.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Final

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from dsv4_chat.widgets.streamed_text import Look, StreamedText

if TYPE_CHECKING:
    from markdown_it.rules_core import StateCore
    from markdown_it.token import Token

logger = logging.getLogger(__name__)


def answer_parser() -> MarkdownIt:
    """CommonMark with tables and struck text, without HTML, with every line break kept."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    parser.core.ruler.push("keep_breaks", _keep_breaks)
    return parser


def _keep_breaks(state: StateCore) -> None:
    for token in state.tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"


_PARSER = answer_parser()
_FENCE = re.compile(r" {0,3}(`{3,}[^`]*|~{3,}.*)")
PIECE_LINES: Final = 40
"""Lines of a code block that is being written that are drawn at once."""


class AnswerText(StreamedText):
    """One answer."""

    gap = 1

    def split(self, text: str) -> tuple[list[str], str]:
        """Every block but the last, which more text may continue."""
        tokens = _PARSER.parse(text)
        starts = [token.map[0] for token in tokens if token.level == 0 and token.map is not None]
        if len(starts) < 2:
            return [], text
        lines = text.split("\n")
        edges = [0, *starts[1:]]
        blocks = ["\n".join(lines[start:end]) for start, end in pairwise(edges)]
        return blocks, "\n".join(lines[edges[-1] :])

    def pieces(self, rest: str) -> list[str]:
        """A long code block by its lines, so that its beginning is not coloured again and again."""
        head, *lines = rest.split("\n")
        if len(lines) < 2 * PIECE_LINES or not _FENCE.fullmatch(head):
            return [rest]
        pieces, start = [], 0
        # Empty lines at an edge would not be drawn.
        for end in range(1, len(lines)):
            if end - start >= PIECE_LINES and lines[end - 1].strip() and lines[end].strip():
                pieces.append("\n".join((head, *lines[start:end])))
                start = end
        return [*pieces, "\n".join((head, *lines[start:]))]

    def renderable(self, chunk: str, look: Look) -> RenderableType:
        """Markdown; what cannot be drawn as such is plain text."""
        try:
            return _Blocks(_PARSER.parse(chunk), look)
        except RecursionError:
            logger.warning("an answer is nested too deeply to be drawn as Markdown")
            return Text(chunk)

    def look(self, width: int) -> Look:
        """The colours of the theme."""
        return themed_look(self, width)


class PlainText(StreamedText):
    """Plain text, line by line."""

    def split(self, text: str) -> tuple[list[str], str]:
        """Every line but the last."""
        *lines, rest = text.split("\n")
        return [line or " " for line in lines], rest

    def renderable(self, chunk: str, look: Look) -> RenderableType:  # noqa: ARG002
        """The line as it is."""
        return Text(chunk)

    def look(self, width: int) -> Look:
        """The colours of the theme."""
        return themed_look(self, width)


def themed_look(widget: StreamedText, width: int) -> Look:
    """Colours of the app's theme for a widget."""
    variables = widget.app.theme_variables
    names = ("primary", "accent", "text-muted", "border")
    colours = [_colour(variables.get(name, "")) for name in names]
    own = widget.rich_style
    is_dark = widget.app.current_theme.dark
    return Look(
        width=width,
        style=Style(color=own.color, bold=own.bold, italic=own.italic, dim=own.dim),
        theme=_theme(*colours),
        code_theme="github-dark" if is_dark else "xcode",
        code_background=_colour(variables.get("panel", "")),
    )


def _colour(text: str) -> str:
    """A colour that Rich knows; `default` for any other."""
    return text if text.startswith("#") and len(text) == 7 else "default"


@lru_cache(maxsize=8)
def _theme(primary: str, accent: str, muted: str, border: str) -> Theme:
    plain = Style(color=accent)
    return Theme(
        {
            "markdown.code": plain,
            "markdown.code_block": plain,
            "markdown.block_quote": Style(color=muted, italic=True),
            "markdown.list": Style(),
            "markdown.item.bullet": Style(color=primary, bold=True),
            "markdown.item.number": Style(color=primary),
            "markdown.hr": Style(color=border),
            "markdown.h1": Style(color=primary, bold=True, underline=True),
            "markdown.h2": Style(color=primary, bold=True),
            "markdown.h3": Style(color=primary, bold=True),
            "markdown.h4": Style(color=primary),
            "markdown.h5": Style(color=primary, italic=True),
            "markdown.h6": Style(color=muted),
            "markdown.link": Style(color=accent, underline=True),
            "markdown.link_url": Style(color=muted),
            "markdown.table.border": Style(color=border),
            "markdown.table.header": Style(color=primary, bold=True),
        }
    )


class _Code(CodeBlock):
    """A code block on the theme's surface."""

    background = "default"

    @classmethod
    def create(cls, markdown: Markdown, token: Token) -> _Code:
        element = cls((token.info or "").partition(" ")[0] or "text", markdown.code_theme)
        if isinstance(markdown, _Blocks):
            element.background = markdown.code_background
        return element

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(
            str(self.text).rstrip("\n"),
            self.lexer_name,
            theme=self.theme,
            word_wrap=True,
            padding=(0, 1),
            background_color=self.background,
        )


class _Title(Heading):
    """A heading at the left edge."""

    LEVEL_ALIGN: ClassVar = {}


class _Blocks(Markdown):
    """Markdown that was parsed already."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "heading_open": _Title,
    }

    def __init__(self, tokens: Sequence[Token], look: Look) -> None:
        super().__init__("", code_theme=look.code_theme, hyperlinks=False)
        self.parsed = list(tokens)
        self.code_background = look.code_background
