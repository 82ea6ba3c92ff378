"""Themes: their names, and that everything can be read in them."""

from __future__ import annotations

import re

import pytest
from dialog_host import shown
from textual.color import Color
from textual.theme import Theme

from dsv4_chat.screens.confirm import ConfirmScreen
from dsv4_chat.settings import Settings
from dsv4_chat.themes import THEME_NAMES, THEMES, use_theme
from edgedsv4 import ConfigError

TEXTS = ("foreground", "primary", "secondary", "accent", "warning", "error", "success")
MUTED = ("text-muted",)
BACKGROUNDS = ("background", "surface", "panel")


def contrast(theme: Theme, text: str, background: str) -> float:
    """The ratio that WCAG 2 defines."""
    colors = theme.to_color_system().generate()
    behind = Color.parse(colors[background])
    front = Color.parse(colors[text])
    lights = sorted(luminance(color) for color in (front, behind))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def luminance(color: Color) -> float:
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in color.normalized
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def smallest(theme: Theme, texts: tuple[str, ...]) -> float:
    return min(contrast(theme, text, behind) for text in texts for behind in BACKGROUNDS)


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_text_can_be_read(theme: Theme) -> None:
    is_strong = theme.name == "contrast"
    assert smallest(theme, ("foreground",)) >= (14 if is_strong else 10)
    assert smallest(theme, TEXTS) >= (8 if is_strong else 5.5)
    assert smallest(theme, MUTED) >= (12 if is_strong else 4.5)
    marked = contrast(theme, "block-cursor-foreground", "block-cursor-background")
    assert marked >= (14 if is_strong else 6)


def test_setting_takes_the_themes_and_no_other() -> None:
    assert [Settings(theme=name).theme for name in THEME_NAMES] == list(THEME_NAMES)
    with pytest.raises(ConfigError, match=f"theme must be one of {', '.join(THEME_NAMES)}, found"):
        Settings(theme="pink")


async def test_every_theme_can_be_chosen_and_left() -> None:
    async with shown(ConfirmScreen("?")) as pilot:
        for name in (*THEME_NAMES, *THEME_NAMES):
            use_theme(pilot.app, name)
            await pilot.pause()
            assert pilot.app.current_theme.name == name


async def test_unknown_theme_is_refused() -> None:
    async with shown(ConfirmScreen("?")) as pilot:
        with pytest.raises(
            ConfigError, match="theme must be one of dark, light, contrast, found 'pink'"
        ):
            use_theme(pilot.app, "pink")
        assert pilot.app.current_theme.name == "dark"


async def test_no_color_leaves_shades_of_grey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with shown(ConfirmScreen("Which?")) as pilot:
        picture = pilot.app.export_screenshot()
    styles = picture.split("</style>")[0].split(".terminal-")[1:]
    drawn = picture.split("</style>")[1].split('clip-path="url(')[1:]
    colors = re.findall(r"#([0-9a-f]{6})", " ".join(rule for rule in styles if "-r" in rule))
    colors += re.findall(r'fill="#([0-9a-f]{6})"', " ".join(drawn))
    own = {"c5c8c6"}  # of text without a colour, in every picture
    mixed = {color for color in colors if len({color[:2], color[2:4], color[4:]}) > 1}
    assert len(set(colors)) > 2
    assert mixed <= own
