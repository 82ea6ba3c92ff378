"""Collect every fault of one file, then raise one error.

A user with a broken file wants the whole list at once; a message with thousands of lines helps
nobody, so the error names the first few and carries all of them in `FormatError.problems`.
"""

from __future__ import annotations

from pathlib import Path

from edgedsv4.errors import Fault, FormatError, UnsupportedModelError

NAMED_FAULTS = 8
MAX_QUOTED = 80


def quoted(value: object) -> str:
    """`repr` of a value from a file, cut so that a hostile value cannot fill the message."""
    if isinstance(value, str | bytes) and len(value) > MAX_QUOTED:
        value = value[:MAX_QUOTED]
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MAX_QUOTED else text[:MAX_QUOTED] + "..."


class FaultList:
    """The faults of one file, in the order they were found."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._faults: list[str] = []
        self._is_malformed = False

    def __len__(self) -> int:
        return len(self._faults)

    def add(self, fault: str) -> None:
        """Record something that contradicts the format, or itself."""
        self._faults.append(fault)
        self._is_malformed = True

    def unsupported(self, fault: str) -> None:
        """Record something well-formed that this version does not run."""
        self._faults.append(fault)

    def raise_if_any(self, heading: str, fault: Fault = "format") -> None:
        """Raise one error for all faults; do nothing when there are none.

        Args:
            heading: what is wrong as a whole, used when there are several faults.
            fault: what kind of fault all of them are.

        Raises:
            UnsupportedModelError: every fault is of the unsupported kind.
            FormatError: at least one fault is not.
        """
        if not self._faults:
            return
        kind = FormatError if self._is_malformed else UnsupportedModelError
        raise kind(
            self._message(heading), path=self.path, problems=tuple(self._faults), fault=fault
        )

    def _message(self, heading: str) -> str:
        if len(self._faults) == 1:
            return self._faults[0]
        lines = [f"{heading}, {len(self._faults)} faults:", *self._faults[:NAMED_FAULTS]]
        rest = len(self._faults) - NAMED_FAULTS
        if rest > 0:
            lines.append(f"... and {rest} more")
        return "\n  ".join(lines)
