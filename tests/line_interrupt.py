"""Ctrl+C at a chosen line of chosen files: a trace function that counts lines and raises at one."""

from __future__ import annotations

from types import FrameType
from typing import Any


class Interrupt:
    """Raises at one of the lines, and counts them.

    Args:
        files: ends of the names of the files whose lines count.
        at: number of the line, from 1; -1 for none.
    """

    def __init__(self, files: tuple[str, ...], at: int = -1) -> None:
        self.count = 0
        self._files = files
        self._at = at

    def __call__(self, frame: FrameType, _event: str, _value: Any) -> Any:
        return self._line if frame.f_code.co_filename.endswith(self._files) else None

    def _line(self, _frame: FrameType, event: str, _value: Any) -> Any:
        self.count += event == "line"
        if event == "line" and self.count == self._at:
            raise KeyboardInterrupt
        return self._line
