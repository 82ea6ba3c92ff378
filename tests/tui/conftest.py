"""What every test of the terminal app shares: a terminal without surprises, and stored screens."""

from __future__ import annotations

import pytest
import stored_screens
import textual.constants
from stored_screens import CompareScreen


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the terminal of whoever runs the tests nor an animation changes a picture."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(textual.constants, "TEXTUAL_ANIMATIONS", "none")


@pytest.fixture
def compare_screen() -> CompareScreen:
    """`await compare_screen(pilot, "name")`, see `stored_screens`."""
    return stored_screens.compare
