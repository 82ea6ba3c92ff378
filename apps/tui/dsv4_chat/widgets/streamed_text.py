"""A long text that grows, in one widget whatever its length.

The idea: the text is cut into chunks that no later text can change. A chunk is drawn once for a
width; only the unfinished rest is drawn again when text comes, and only visible lines are painted.
A widget for each paragraph, as in Textual's own Markdown, makes every update of a long answer lay
all of them out again: with 8,000 tokens a key press waited for seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.style import Style
from rich.text import Text
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from dsv4_chat.plain_text import drawable

if TYPE_CHECKING:
    from rich.theme import Theme


@dataclass(frozen=True, slots=True)
class Look:
    """What a chunk is drawn with."""

    width: int
    style: Style
    """Colour of the text; the background is put under it by the widget."""
    theme: Theme
    code_theme: str
    """Name of a Pygments style."""
    code_background: str


@dataclass(slots=True)
class _Drawn:
    look: Look
    strips: list[Strip] = field(default_factory=list)
    chunks: int = 0
    """Chunks that the strips hold; the rest stands behind them."""
    rest: list[Strip] = field(default_factory=list)
    pieces: list[list[Strip]] = field(default_factory=list)
    """Of the rest, those that no later text changes."""


class StreamedText(Widget):
    """Draws chunks; what a chunk is, and how it looks, is said by the kind of text.

    Args:
        text: what there is of it already.
    """

    gap = 0
    """Empty lines between chunks."""

    def __init__(self, text: str = "", *, classes: str = "") -> None:
        super().__init__(classes=classes)
        self.text = ""
        """Everything it shows."""
        self._chunks: list[str] = []
        self._rest = ""
        self._drawn: _Drawn | None = None
        self._background = Style()
        self._take(text)

    def split(self, text: str) -> tuple[list[str], str]:
        """Chunks that are finished, and the rest that may still change."""
        raise NotImplementedError

    def pieces(self, rest: str) -> list[str]:
        """The rest in pieces that look as one; more text changes only the last of them."""
        return [rest]

    def renderable(self, chunk: str, look: Look) -> RenderableType:
        """How a chunk looks."""
        raise NotImplementedError

    def look(self, width: int) -> Look:
        """What to draw with at a width; another one draws everything again."""
        raise NotImplementedError

    def grow(self, text: str) -> None:
        """Append more text."""
        if text:
            self._take(text)
            if self._drawn is not None:
                self._drawn.rest = []
            self.refresh(layout=True)

    def finish(self) -> None:
        """No more comes: the rest is a chunk as well."""
        if self._rest.strip():
            self._chunks.append(self._rest)
        self._rest = ""
        if self._drawn is not None:
            self._drawn.rest = []
        self.refresh(layout=True)

    def get_content_width(self, container: Size, viewport: Size) -> int:  # noqa: ARG002
        """As wide as there is room."""
        return container.width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        """Lines at a width."""
        drawn = self._draw(width)
        return len(drawn.strips) + len(drawn.rest)

    def render_lines(self, crop: Region) -> list[Strip]:
        """The visible lines, on the background as it is now: a focused turn has another one."""
        self._background = Style(bgcolor=self.background_colors[1].rich_color)
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """One line."""
        drawn = self._draw(self.size.width)
        place = y - len(drawn.strips)
        if place < 0:
            strip = drawn.strips[y]
        elif place < len(drawn.rest):
            strip = drawn.rest[place]
        else:
            strip = Strip.blank(self.size.width)
        return strip.apply_style(self._background)

    def on_mount(self) -> None:
        """Draw again when the theme changes."""
        self.app.theme_changed_signal.subscribe(self, lambda _theme: self._redraw())

    def notify_style_update(self) -> None:
        """Colours have changed."""
        self._drawn = None
        super().notify_style_update()

    def _redraw(self) -> None:
        self._drawn = None
        self.refresh(layout=True)

    def _take(self, text: str) -> None:
        text = drawable(text)
        self.text += text
        finished, self._rest = self.split(self._rest + text)
        self._chunks += finished

    def _draw(self, width: int) -> _Drawn:
        drawn = self._drawn
        if drawn is None or drawn.look.width != width:
            self._drawn = drawn = _Drawn(self.look(max(width, 1)))
        look = drawn.look
        for chunk in self._chunks[drawn.chunks :]:
            drawn.rest, drawn.pieces = [], []
            drawn.strips += self._strips(chunk, look, is_first=not drawn.strips)
        drawn.chunks = len(self._chunks)
        if not drawn.rest and self._rest.strip():
            drawn.rest = self._rest_strips(drawn)
        return drawn

    def _rest_strips(self, drawn: _Drawn) -> list[Strip]:
        *still, moving = self.pieces(self._rest)
        for piece in (*still[len(drawn.pieces) :], moving):
            is_first = bool(drawn.pieces) or not drawn.strips
            strips = self._strips(piece, drawn.look, is_first=is_first, is_rest=True)
            drawn.pieces.append(strips)
        rest = [strip for strips in drawn.pieces for strip in strips]
        drawn.pieces.pop()  # the one that more text changes
        return rest

    def _strips(
        self, chunk: str, look: Look, *, is_first: bool, is_rest: bool = False
    ) -> list[Strip]:
        console: Console = self.app.console
        strips = _without_blank_ends(_render(console, self.renderable(chunk, look), look))
        if not strips and not is_rest:
            # Markdown that draws nothing, such as the address of a link used elsewhere.
            strips = _without_blank_ends(_render(console, Text(chunk), look))
        blank = [] if is_first else [Strip.blank(look.width, look.style)] * self.gap
        return [*blank, *strips] if strips else []


def _render(console: Console, renderable: RenderableType, look: Look) -> list[Strip]:
    options = console.options.update(width=look.width, height=None, highlight=False)
    with console.use_theme(look.theme):
        lines = console.render_lines(renderable, options, style=look.style, pad=True)
    return [Strip(line, look.width) for line in lines]


def _without_blank_ends(strips: list[Strip]) -> list[Strip]:
    drawn = [place for place, strip in enumerate(strips) if strip.text.strip()]
    return strips[drawn[0] : drawn[-1] + 1] if drawn else []
