"""Conversations on disk: every turn is written when it changes, so that a crash loses little.

One SQLite database holds the text; the evaluated state of a conversation (its KV cache) is a file
beside it, which may vanish at any time: it saves waiting, nothing else. Every method is one short
transaction in the caller's thread, and any thread may call.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4_chat.store_errors import StoreConflictError, StoreDamagedError, StoreError, translated
from dsv4_chat.store_rows import (
    CONVERSATION_COLUMNS,
    NODE_COLUMNS,
    Row,
    conversation_from_row,
    conversation_row,
    node_from_row,
    node_row,
    storable,
)
from dsv4_chat.store_schema import can_index, prepare
from dsv4_chat.store_search import excerpt, like_pattern, match_clause
from dsv4_chat.store_snapshots import SnapshotShelf

if TYPE_CHECKING:
    from dsv4_chat.conversation import Conversation, Node

DATABASE_NAME = "conversations.db"
SNAPSHOT_FOLDER = "snapshots"
DEFAULT_SNAPSHOT_BYTES = 2 << 30
_CHECKED_BYTES = 16 << 20
"""A database up to this size is checked whole when it is opened, in some milliseconds."""
_SIDE_FILES = ("", "-wal", "-shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationSummary:
    """A conversation in a list."""

    id: str
    title: str
    updated: float
    """Seconds since 1970."""
    turns: int
    """Turns of all its paths."""
    excerpt: str = ""
    """Where a search found it, on one line; empty without a search or when the title matched."""
    has_snapshot: bool = False
    """Whether it goes on without evaluating anything."""


def set_aside(path: Path, *, clock: Callable[[], float] = time.time) -> Path:
    """Rename a damaged database, so that a new one can take its place; only with consent.

    Returns:
        Its new name; the files that SQLite keeps beside it are renamed as well.

    Raises:
        StoreError: it cannot be renamed.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(clock()))
    target = path.with_name(f"{path.stem}.damaged-{stamp}{path.suffix}")
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{path.stem}.damaged-{stamp}-{number}{path.suffix}")
    with translated(path):
        for side in _SIDE_FILES:
            with suppress(FileNotFoundError):
                path.with_name(path.name + side).rename(target.with_name(target.name + side))
    return target


class Store:
    """The conversations of one folder.

    Args:
        folder: made when it is missing, for this user alone.
        snapshot_bytes: disk that saved states may take; 0 keeps none.
        clock: seconds since 1970.

    Raises:
        StoreDamagedError: the database cannot be read; see `set_aside`.
        StoreVersionError: it was made by a newer program.
        StoreError: the folder cannot be made or written.
    """

    def __init__(
        self,
        folder: Path,
        *,
        snapshot_bytes: int = DEFAULT_SNAPSHOT_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = folder / DATABASE_NAME
        self._shelf = SnapshotShelf(folder / SNAPSHOT_FOLDER, snapshot_bytes, clock)
        self._lock = threading.RLock()
        with translated(self.path):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Made here, since SQLite would let others read it.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            self._connection = _connect(self.path)
            try:
                self.can_search_quickly = can_index(self._connection)
                prepare(self._connection, has_index=self.can_search_quickly)
            except BaseException:
                self._connection.close()
                raise
        with self._transaction() as connection:
            strays = self._shelf.strays(connection)
        self._shelf.remove(strays)

    def save_conversation(self, conversation: Conversation) -> None:
        """Write everything but the turns: title, options, and which path is shown."""
        with self._transaction() as connection:
            _write_conversation(connection, conversation)

    def save_node(self, conversation: Conversation, node: Node) -> None:
        """Write one turn, and the conversation it belongs to; the turns before it are written.

        Raises:
            StoreConflictError: another program wrote a different turn in its place, or deleted the
                conversation.
        """
        with self._transaction() as connection:
            _write_conversation(connection, conversation)
            _write_nodes(connection, self.path, conversation.id, (node,))

    def save_whole(self, conversation: Conversation) -> None:
        """Write a conversation with all its turns, such as a new fork.

        Raises:
            StoreConflictError: as `save_node`.
        """
        with self._transaction() as connection:
            _write_conversation(connection, conversation)
            nodes = sorted(conversation.nodes.values(), key=lambda node: node.id)
            _write_nodes(connection, self.path, conversation.id, nodes)

    def list(self, query: str = "", limit: int = 200) -> tuple[ConversationSummary, ...]:
        """Conversations, the one changed last first.

        Args:
            query: words that must all be in the title, or all in one turn; upper and lower case
                are the same.
            limit: conversations at most.
        """
        words = storable(query).split()
        if not words:
            with self._reading() as connection:
                rows = connection.execute(_LIST.format(where="1"), (limit,)).fetchall()
            return tuple(_summary(row) for row in rows)
        clause, arguments = match_clause(words, has_index=self.can_search_quickly)
        titles = " AND ".join(["c.title LIKE ? ESCAPE '\\'"] * len(words))
        patterns = [like_pattern(word) for word in words]
        found = f"SELECT n.conversation, min(n.key) FROM nodes n WHERE {clause} GROUP BY 1"
        with self._reading() as connection:
            hits = dict(connection.execute(found, arguments).fetchall())
            rows = connection.execute(
                _LIST.format(where=f"({titles}) OR c.id IN (SELECT value FROM json_each(?))"),
                (*patterns, json.dumps(list(hits)), limit),
            ).fetchall()
            texts = {
                str(row[0]): str(
                    connection.execute(
                        "SELECT content FROM nodes WHERE key = ?", (hits[row[0]],)
                    ).fetchone()[0]
                )
                for row in rows
                if row[0] in hits
            }
        return tuple(_summary(row, excerpt(texts.get(str(row[0]), ""), words)) for row in rows)

    def latest(self) -> str | None:
        """Id of the conversation changed last; None when there is none."""
        newest = self.list(limit=1)
        return newest[0].id if newest else None

    def load(self, conversation_id: str) -> Conversation:
        """A conversation with all its turns; a reply that a crash cut off counts as stopped.

        Raises:
            StoreError: there is none of that id.
            StoreDamagedError: its rows make no conversation.
        """
        columns = ", ".join(CONVERSATION_COLUMNS)
        with self._transaction() as connection:
            row = connection.execute(
                f"SELECT {columns} FROM conversations WHERE id = ?", (conversation_id,)
            ).fetchone()
            if row is None:
                raise StoreError(
                    f"{self.path}: there is no conversation {conversation_id} any more"
                )
            connection.execute(
                "UPDATE nodes SET state = 'stopped' WHERE conversation = ? AND state = 'streaming'",
                (conversation_id,),
            )
            nodes = connection.execute(
                f"SELECT {', '.join(NODE_COLUMNS)} FROM nodes WHERE conversation = ? ORDER BY id",
                (conversation_id,),
            ).fetchall()
        return self._conversation(row, nodes)

    def rename(self, conversation_id: str, title: str) -> None:
        """Give a conversation another title; it keeps its place in the list."""
        with self._transaction() as connection:
            connection.execute(
                "UPDATE conversations SET title = ? WHERE id = ?",
                (storable(title), conversation_id),
            )

    def delete(self, conversation_id: str) -> None:
        """Remove a conversation, its turns and its saved state; without one, nothing."""
        with self._transaction() as connection:
            files = self._shelf.drop(connection, conversation_id)
            connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
        self._shelf.remove(files)

    def prompts(self, limit: int = 500) -> tuple[str, ...]:
        """What was asked in all conversations, the newest last, each text once."""
        with self._reading() as connection:
            rows = connection.execute(
                "SELECT content FROM nodes WHERE role = 'user' ORDER BY created DESC LIMIT ?",
                (limit,),
            ).fetchall()
        return tuple(dict.fromkeys(str(row[0]) for row in rows))[::-1]

    def snapshot_path(self, conversation_id: str) -> Path:
        """Where to save the state of a conversation; `snapshot_saved` then counts it."""
        with translated(self.path):
            return self._shelf.path_for(conversation_id)

    def snapshot_saved(self, conversation_id: str) -> bool:
        """Count the state that was just saved; beyond the budget those used first are removed.

        Returns:
            False when that one was removed, because it alone is too large.

        Raises:
            StoreConflictError: the conversation was never saved, or is deleted.
        """
        path = self.snapshot_path(conversation_id)
        with self._transaction() as connection:
            removed = self._shelf.record(connection, conversation_id)
        self._shelf.remove(removed)
        return path not in removed

    def find_snapshot(self, conversation_id: str) -> Path | None:
        """The saved state of a conversation, None without one; it counts as used now."""
        with self._transaction() as connection:
            return self._shelf.find(connection, conversation_id)

    def drop_snapshot(self, conversation_id: str) -> None:
        """Remove the saved state of a conversation, such as one that cannot be loaded."""
        with self._transaction() as connection:
            files = self._shelf.drop(connection, conversation_id)
        self._shelf.remove(files)

    def snapshot_bytes(self) -> int:
        """Disk that saved states take."""
        with self._reading() as connection:
            return self._shelf.total_bytes(connection)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        with self._lock, translated(self.path):
            self._connection.close()

    def _conversation(self, row: Row, rows: Sequence[Row]) -> Conversation:
        try:
            nodes = [node_from_row(node) for node in rows]
            conversation = conversation_from_row(row, {node.id: node for node in nodes})
        except (ValueError, TypeError, KeyError) as error:
            raise StoreDamagedError(self.path, f"conversation {row[0]}: {error}") from error
        for node in nodes:
            # Growing ids also mean that no path goes in a circle.
            if node.parent is not None and not (
                node.parent < node.id and node.parent in conversation.nodes
            ):
                raise StoreDamagedError(self.path, f"turn {node.id} follows {node.parent}")
        if conversation.active is not None and conversation.active not in conversation.nodes:
            conversation.active = max(conversation.nodes, default=None)
        return conversation

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, translated(self.path):
            yield self._connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, translated(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


_LIST = (
    "SELECT c.id, c.title, c.updated,"
    " (SELECT count(*) FROM nodes n WHERE n.conversation = c.id),"
    " EXISTS (SELECT 1 FROM snapshots s WHERE s.conversation = c.id)"
    " FROM conversations c WHERE {where} ORDER BY c.updated DESC, c.id LIMIT ?"
)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
    try:
        # With the write-ahead log a killed program loses nothing that was committed.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA secure_delete = ON")
        if path.stat().st_size <= _CHECKED_BYTES:
            verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise StoreDamagedError(path, str(verdict).splitlines()[0])
    except BaseException:
        connection.close()
        raise
    return connection


def _write_conversation(connection: sqlite3.Connection, conversation: Conversation) -> None:
    places = ", ".join("?" * len(CONVERSATION_COLUMNS))
    updates = ", ".join(f"{name} = excluded.{name}" for name in CONVERSATION_COLUMNS[1:])
    connection.execute(
        f"INSERT INTO conversations ({', '.join(CONVERSATION_COLUMNS)}) VALUES ({places})"
        f" ON CONFLICT (id) DO UPDATE SET {updates}",
        conversation_row(conversation),
    )


def _write_nodes(
    connection: sqlite3.Connection, path: Path, conversation_id: str, nodes: Sequence[Node]
) -> None:
    places = ", ".join("?" * (1 + len(NODE_COLUMNS)))
    changing = ("content", "reasoning", "tool_calls", "tool_call_id", "state", "outcome")
    updates = ", ".join(f"{name} = excluded.{name}" for name in changing)
    statement = (
        f"INSERT INTO nodes (conversation, {', '.join(NODE_COLUMNS)}) VALUES ({places})"
        f" ON CONFLICT (conversation, id) DO UPDATE SET {updates}"
        " WHERE created = excluded.created AND role = excluded.role AND parent IS excluded.parent"
    )
    for node in nodes:
        if connection.execute(statement, (conversation_id, *node_row(node))).rowcount != 1:
            raise StoreConflictError(
                f"{path}: another dsv4-chat has gone on with this conversation; fork it to keep"
                " what you see, or open it again"
            )


def _summary(row: Row, text: str = "") -> ConversationSummary:
    return ConversationSummary(
        id=str(row[0]),
        title=str(row[1]),
        updated=float(row[2]),
        turns=int(row[3]),
        excerpt=text,
        has_snapshot=bool(row[4]),
    )
