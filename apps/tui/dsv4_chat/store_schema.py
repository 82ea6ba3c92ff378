"""The tables of the conversation database, how an older file becomes a newer one, and the index.

`user_version` counts the migrations that were applied. The text index is a convenience on top: it
is made and rebuilt here when this SQLite has FTS5, and taken away when it has not, so that a file
may move between machines.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from dsv4_chat.store_errors import StoreVersionError

MIGRATIONS: Final = (
    """
    CREATE TABLE conversations (
        id TEXT PRIMARY KEY,
        title TEXT NOT NULL,
        created REAL NOT NULL,
        updated REAL NOT NULL,
        system TEXT NOT NULL,
        sampling TEXT NOT NULL,
        thinking TEXT NOT NULL,
        active INTEGER,
        context_start INTEGER
    );
    CREATE INDEX conversations_by_update ON conversations (updated DESC);
    CREATE TABLE nodes (
        key INTEGER PRIMARY KEY,
        conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        id INTEGER NOT NULL,
        parent INTEGER,
        role TEXT NOT NULL,
        content TEXT NOT NULL,
        reasoning TEXT NOT NULL,
        tool_calls TEXT NOT NULL,
        tool_call_id TEXT,
        state TEXT NOT NULL,
        outcome TEXT,
        created REAL NOT NULL,
        UNIQUE (conversation, id),
        FOREIGN KEY (conversation, parent) REFERENCES nodes (conversation, id)
    );
    CREATE INDEX nodes_by_parent ON nodes (conversation, parent);
    CREATE INDEX nodes_by_role ON nodes (role, created DESC);
    CREATE TABLE snapshots (
        conversation TEXT PRIMARY KEY REFERENCES conversations (id) ON DELETE CASCADE,
        file TEXT NOT NULL,
        bytes INTEGER NOT NULL,
        used REAL NOT NULL
    );
    """,
)
"""What brings a file from version n to n + 1."""

_INDEX = """
    CREATE VIEW finished_nodes AS SELECT key, content FROM nodes WHERE state <> 'streaming';
    CREATE VIRTUAL TABLE node_text USING fts5 (
        content, content = 'finished_nodes', content_rowid = 'key', tokenize = 'trigram'
    );
    CREATE TRIGGER node_text_added AFTER INSERT ON nodes WHEN new.state <> 'streaming' BEGIN
        INSERT INTO node_text (rowid, content) VALUES (new.key, new.content);
    END;
    CREATE TRIGGER node_text_removed AFTER DELETE ON nodes WHEN old.state <> 'streaming' BEGIN
        INSERT INTO node_text (node_text, rowid, content) VALUES ('delete', old.key, old.content);
    END;
    CREATE TRIGGER node_text_changed AFTER UPDATE ON nodes BEGIN
        INSERT INTO node_text (node_text, rowid, content)
            SELECT 'delete', old.key, old.content WHERE old.state <> 'streaming';
        INSERT INTO node_text (rowid, content)
            SELECT new.key, new.content WHERE new.state <> 'streaming';
    END;
    INSERT INTO node_text (node_text) VALUES ('rebuild');
"""
_TRIGGERS = ("node_text_added", "node_text_removed", "node_text_changed")


def prepare(connection: sqlite3.Connection, *, has_index: bool) -> None:
    """Bring a database to the newest version; either all of it or nothing is done.

    Args:
        connection: in autocommit mode.
        has_index: whether this SQLite can index text, see `can_index`.

    Raises:
        StoreVersionError: the file was made by a newer program.
        sqlite3.Error: damaged, full, or not writable.
    """
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise StoreVersionError(version, len(MIGRATIONS))
    if version == len(MIGRATIONS) and _is_indexed(connection) == has_index:
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have done it since.
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        for migration in MIGRATIONS[version:]:
            _run(connection, migration)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        if _is_indexed(connection) != has_index:
            _set_index(connection, has_index=has_index)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def can_index(connection: sqlite3.Connection) -> bool:
    """Whether this SQLite has FTS5 with the trigram tokenizer."""
    try:
        connection.execute("CREATE VIRTUAL TABLE temp.probe USING fts5 (x, tokenize = 'trigram')")
    except sqlite3.OperationalError:
        return False
    connection.execute("DROP TABLE temp.probe")
    return True


def _is_indexed(connection: sqlite3.Connection) -> bool:
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'node_text%'"
    return bool(connection.execute(query).fetchone()[0])


def _set_index(connection: sqlite3.Connection, *, has_index: bool) -> None:
    for name in _TRIGGERS:
        connection.execute(f"DROP TRIGGER IF EXISTS {name}")
    if has_index:
        # Left over from a program that could not drop it.
        connection.execute("DROP TABLE IF EXISTS node_text")
        connection.execute("DROP VIEW IF EXISTS finished_nodes")
        _run(connection, _INDEX)


def _run(connection: sqlite3.Connection, script: str) -> None:
    """Run statements inside the open transaction, which `executescript` would commit."""
    statement = ""
    for part in script.split(";"):
        statement += part + ";"
        if sqlite3.complete_statement(statement) and statement.strip(" ;\n"):
            connection.execute(statement)
            statement = ""
