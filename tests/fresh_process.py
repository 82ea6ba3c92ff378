"""Starting a program whose peak memory is its own.

The system's peak (`ru_maxrss`, which libFuzzer limits) is inherited from the process that starts a
program; a shell in between is small, whatever the tests hold by then.
"""

from __future__ import annotations

FRESH = ("/bin/sh", "-c", '"$@"; exit $?', "sh")
"""In front of a command."""
