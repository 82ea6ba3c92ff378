"""The files with the evaluated state of conversations, kept within a disk budget.

A file can go at any time, and a conversation is then evaluated anew; so files are removed without
asking, those used least recently first, and what is unknown is not trusted but removed.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

SUFFIX = ".dsv4s"
_STRAY_SECONDS = 3600.0
"""Age at which a file that no row names belongs to nobody; a younger one may be in the making."""


class SnapshotShelf:
    """The folder of the files; its rows are changed on the connection that each method is given.

    Args:
        folder: made when the first file is saved.
        budget_bytes: what all files may take; 0 keeps none.
        clock: seconds since 1970.
    """

    def __init__(self, folder: Path, budget_bytes: int, clock: Callable[[], float]) -> None:
        self.folder = folder
        self.budget_bytes = budget_bytes
        self._clock = clock

    def path_for(self, conversation_id: str) -> Path:
        """Where the file of a conversation is to be saved."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.folder / f"{conversation_id}{SUFFIX}"

    def find(self, connection: sqlite3.Connection, conversation_id: str) -> Path | None:
        """The file of a conversation, None without one; it counts as used now."""
        row = connection.execute(
            "SELECT file FROM snapshots WHERE conversation = ?", (conversation_id,)
        ).fetchone()
        if row is None:
            return None
        path = self.folder / Path(str(row[0])).name
        if not path.is_file():
            self.drop(connection, conversation_id)
            return None
        connection.execute(
            "UPDATE snapshots SET used = ? WHERE conversation = ?",
            (self._clock(), conversation_id),
        )
        return path

    def record(self, connection: sqlite3.Connection, conversation_id: str) -> list[Path]:
        """Count a file that was just saved; returns files that are too much, oldest used first."""
        path = self.path_for(conversation_id)
        connection.execute(
            "INSERT INTO snapshots (conversation, file, bytes, used) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (conversation) DO UPDATE SET"
            " file = excluded.file, bytes = excluded.bytes, used = excluded.used",
            (conversation_id, path.name, path.stat().st_size, self._clock()),
        )
        return self._drop_excess(connection)

    def drop(self, connection: sqlite3.Connection, conversation_id: str) -> list[Path]:
        """Forget the file of a conversation; returns what is to be removed."""
        connection.execute("DELETE FROM snapshots WHERE conversation = ?", (conversation_id,))
        return [self.folder / f"{conversation_id}{SUFFIX}"]

    def total_bytes(self, connection: sqlite3.Connection) -> int:
        """Bytes of all files."""
        return int(
            connection.execute("SELECT coalesce(sum(bytes), 0) FROM snapshots").fetchone()[0]
        )

    def strays(self, connection: sqlite3.Connection) -> list[Path]:
        """Old files that no row names: left by a crash, or of a conversation that is gone."""
        if not self.folder.is_dir():
            return []
        known = {str(row[0]) for row in connection.execute("SELECT file FROM snapshots")}
        limit = self._clock() - _STRAY_SECONDS
        return [
            path
            for path in self.folder.iterdir()
            if path.name not in known and self._is_ours(path) and path.lstat().st_mtime < limit
        ]

    def remove(self, paths: list[Path]) -> None:
        """Remove files; called after the rows are gone for good."""
        for path in paths:
            with suppress(FileNotFoundError):
                try:
                    path.unlink()
                except PermissionError as error:
                    logger.warning("cannot remove a saved state: %s", error.strerror)

    def _is_ours(self, path: Path) -> bool:
        name = path.name
        return path.is_file() and (
            name.endswith(SUFFIX) or (name.startswith(".") and name.endswith(".partial"))
        )

    def _drop_excess(self, connection: sqlite3.Connection) -> list[Path]:
        excess = self.total_bytes(connection) - self.budget_bytes
        rows = connection.execute(
            "SELECT conversation, bytes FROM snapshots ORDER BY used"
        ).fetchall()
        removed: list[Path] = []
        for conversation_id, size in rows:
            if excess <= 0:
                break
            removed += self.drop(connection, str(conversation_id))
            excess -= size
        return removed
