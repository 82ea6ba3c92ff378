"""The colours of the app: a dark, a light and a high-contrast theme, named in the settings.

A test computes the contrast of every text with every background, as WCAG 2 does: at least 10 to 1
for plain text (14 in `contrast`), 5.5 for coloured text (8), 4.5 for muted text (12). With NO_COLOR
set Textual shows any of them in shades of grey.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from textual.theme import Theme

from edgedsv4 import ConfigError

if TYPE_CHECKING:
    from textual.app import App

THEMES: Final = (
    Theme(
        name="dark",
        dark=True,
        primary="#7aa2f7",
        secondary="#9aa5ce",
        accent="#7dcfff",
        warning="#e0af68",
        error="#ff8fa3",
        success="#9ece6a",
        foreground="#d5dbf0",
        background="#14161f",
        surface="#1b1e2b",
        panel="#242838",
        variables={
            "text-muted": "#99a1bd",
            "border": "#4a5274",
            "block-cursor-foreground": "#14161f",
            "block-cursor-background": "#7aa2f7",
            "footer-key-foreground": "#7dcfff",
            "input-selection-background": "#7aa2f7 35%",
            "scrollbar": "#3a4160",
        },
    ),
    Theme(
        name="light",
        dark=False,
        primary="#1f4fbf",
        secondary="#3f4a6b",
        accent="#005f80",
        warning="#7a4a00",
        error="#a3113a",
        success="#2a5f14",
        foreground="#1c2130",
        background="#fbfbfd",
        surface="#f1f2f7",
        panel="#e6e8f0",
        variables={
            "text-muted": "#565d74",
            "border": "#a9b0c6",
            "block-cursor-foreground": "#ffffff",
            "block-cursor-background": "#1f4fbf",
            "footer-key-foreground": "#005f80",
            "input-selection-background": "#1f4fbf 25%",
            "scrollbar": "#b9bfd2",
        },
    ),
    Theme(
        name="contrast",
        dark=True,
        primary="#ffff00",
        secondary="#ffffff",
        accent="#00ffff",
        warning="#ffd75f",
        error="#ffb3b3",
        success="#7fff7f",
        foreground="#ffffff",
        background="#000000",
        surface="#000000",
        panel="#1a1a1a",
        text_alpha=1.0,
        variables={
            "text": "#ffffff",
            "text-muted": "#e6e6e6",
            "border": "#ffffff",
            "block-cursor-foreground": "#000000",
            "block-cursor-background": "#ffff00",
            "footer-key-foreground": "#00ffff",
            "input-cursor-background": "#ffff00",
            "input-cursor-foreground": "#000000",
            "input-selection-background": "#0000ff",
            "scrollbar": "#ffffff",
            "scrollbar-background": "#333333",
        },
    ),
)
"""The app's own themes, the default first."""

THEME_NAMES: Final = tuple(theme.name for theme in THEMES)


def use_theme(app: App[None], name: str) -> None:
    """Show the app in the colours of a theme of `THEME_NAMES`.

    Raises:
        ConfigError: there is no such theme.
    """
    if name not in THEME_NAMES:
        raise ConfigError(
            f"theme must be one of {', '.join(THEME_NAMES)}, found {name!r}", name="theme"
        )
    for theme in THEMES:
        if theme.name not in app.available_themes:
            app.register_theme(theme)
    app.theme = name
