"""What libdsv4 imports: the functions of `dsv4.h`, and the start that hands their table over.

The functions stand in one module per group of the header; importing them registers them.
"""

from __future__ import annotations

import sys

from edgedsv4.capi import chat, model, sampling, session, state
from edgedsv4.capi.bridge import lib
from edgedsv4.capi.header import read_header

GROUPS = (model, chat, sampling, session, state)


def start(hooks: int, abi_version: int) -> int:
    """Take the library's functions and give the table of ours.

    Args:
        hooks: address of a `dsv4_hooks`.
        abi_version: DSV4_ABI_VERSION that the library was built with.

    Returns:
        Address of a `dsv4_table`.

    Raises:
        RuntimeError: the library was built from another header than the package.
    """
    expected = read_header().abi_version
    if abi_version != expected:
        raise RuntimeError(
            f"libdsv4 was built for interface {abi_version}, the package has {expected};"
            " build it again with `python -m edgedsv4.capi.build`"
        )
    if not sys.argv:
        # Embedded, there is none, and some packages look at its first entry.
        sys.argv = ["libdsv4"]
    model.silence_logs()
    return int(lib.entry_start(hooks))
