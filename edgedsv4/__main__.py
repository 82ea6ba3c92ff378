"""The command, as `edgedsv4` and as `python -m edgedsv4`: Ctrl+C before and behind `cli`."""

from __future__ import annotations

import signal
import sys


def start() -> int:
    """Runs the command and returns its exit status.

    Ctrl+C is silent from here on: it ends the process while modules load, `main` deals with it, and
    once the status is known it no longer counts.
    """
    is_interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_interruptible:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from edgedsv4.cli import main  # here, because it takes a noticeable time to load

    if is_interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


if __name__ == "__main__":
    sys.exit(start())
