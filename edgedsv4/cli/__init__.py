"""The `edgedsv4` command: arguments in, text out, no logic of its own.

`main` owns what every command shares: the exit status, the one line that tells of a failure, and a
reader that went away. A command is a function in one of the modules beside this one; `commands.py`
lists them.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from edgedsv4 import errors
from edgedsv4.cli.commands import parse_arguments
from edgedsv4.cli.interrupt import INTERRUPTED, Terminated, ending_by_signals
from edgedsv4.cli.terminal import Terminal, abandon, open_terminal

DONE, FAILED, REFUSED = 0, 1, 2

_REFUSALS = (
    errors.ConfigError,
    errors.FormatError,
    errors.BackendUnavailableError,
    errors.CapacityError,
    errors.ContextFullError,
)
_TRACEBACK_VARIABLE = "EDGEDSV4_TRACEBACK"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Args:
        argv: arguments without the program's name; None takes those of the process.

    Returns:
        0 done, 1 run-time failure, 2 wrong use or something refused, 130 interrupted; 128 + the
        signal's number when the process was asked to end.
    """
    terminal = open_terminal()
    _show_warnings(terminal)

    def work() -> int:
        args = parse_arguments(argv)
        status: int = args.handler(args, terminal)
        return status

    with ending_by_signals():
        return _flushed(terminal, _exit_status(work, terminal))


def _flushed(terminal: Terminal, status: int) -> int:
    """Empties stdout while a failure can still be told; the interpreter's own flush is too late."""
    try:
        terminal.out.flush()
    except OSError as error:
        abandon(terminal.out)
        if status == DONE and not isinstance(error, BrokenPipeError):
            _tell(terminal, error)
        return status or FAILED
    return status


def _exit_status(work: Callable[[], int], terminal: Terminal) -> int:
    """Turns every way a command can end into a status and at most one line on stderr."""
    try:
        return work()
    except SystemExit as leaving:  # argparse: --help, --version or wrong use, already told
        return leaving.code if isinstance(leaving.code, int) else REFUSED
    except (KeyboardInterrupt, errors.CancelledError):
        return INTERRUPTED
    except Terminated as ending:
        return ending.status
    except BrokenPipeError:  # the reader has seen enough
        return FAILED
    except Exception as error:  # noqa: BLE001  # the outer edge: a user must never see a traceback
        if os.environ.get(_TRACEBACK_VARIABLE):
            traceback.print_exc(file=sys.stderr)
        _tell(terminal, error)
        return REFUSED if isinstance(error, _REFUSALS) else FAILED


def _tell(terminal: Terminal, error: Exception) -> None:
    """Says why the command failed; where stderr is gone too, the exit status has to do."""
    try:
        terminal.note(f"edgedsv4: {_explain(error)}")
    except OSError:
        abandon(terminal.err)


def _explain(error: Exception) -> str:
    """The line that tells of a failure."""
    if isinstance(error, errors.Dsv4Error):
        return str(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    if isinstance(error, MemoryError):
        return "out of memory; lower --ctx or --chunk, or free memory"
    return f"internal error: {type(error).__name__}: {error}"


def _show_warnings(terminal: Terminal) -> None:
    """Prints what the library announces, such as a slower path, as one line each."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            terminal.note(f"edgedsv4: {record.levelname.lower()}: {record.getMessage()}")

    logger = logging.getLogger("edgedsv4")
    logger.handlers = [Handler(level=logging.WARNING)]
    logger.propagate = False


__all__ = ["DONE", "FAILED", "INTERRUPTED", "REFUSED", "main"]
