"""Figures of `edgedsv4 bench links`, kept in the user's cache for `edgedsv4 plan`.

They are `links.json` in `$XDG_CACHE_HOME/edgedsv4`, `~/.cache/edgedsv4` if that is not set, with
the facts of the machine that they belong to. Figures of another machine or version are not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.errors import Dsv4Error, FormatError

if TYPE_CHECKING:
    from pathlib import Path

    from edgedsv4 import Links
    from edgedsv4.cli.terminal import Terminal

AGAIN = "`edgedsv4 bench links` measures them"


def links_path(terminal: Terminal) -> Path:
    """The file, whether it exists or not."""
    return terminal.cache_folder / "links.json"


def stored_links(terminal: Terminal) -> tuple[Links | None, str]:
    """Figures of this machine; without any, why there are none, for the user."""
    path = links_path(terminal)
    try:
        found = edgedsv4.Links.read(path)
    except FormatError as error:
        if error.fault == "missing":
            return None, f"the links of this machine were not measured yet; {AGAIN}"
        return None, str(error)
    if found.machine != edgedsv4.MachineFacts.of():
        return None, f"{path} is of another machine or version; {AGAIN} again"
    return found, ""


def store_links(links: Links, terminal: Terminal) -> None:
    """Keeps figures, with what was measured earlier and not now; a failure is only told."""
    path = links_path(terminal)
    try:
        earlier = edgedsv4.Links.read(path)
    except FormatError:
        earlier = None  # nothing that could be kept
    if earlier is not None and earlier.machine == links.machine:
        links = links.with_rest_of(earlier)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        links.write(path)
    except (OSError, Dsv4Error) as error:
        terminal.note(f"edgedsv4: the figures could not be kept: {error}")
    else:
        terminal.note(f"edgedsv4: kept for `edgedsv4 plan` in {path}")
