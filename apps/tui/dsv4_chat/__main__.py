"""`dsv4-chat`: check what can be checked, show the screen, then load the model behind it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4_chat.launch import (
    LaunchOptions,
    editor_of,
    parse_arguments,
    plain_reason,
    run_plain,
)
from dsv4_chat.settings_file import data_folder, load_settings, write_settings_file
from dsv4_chat.store import Store, set_aside
from dsv4_chat.store_errors import StoreDamagedError
from edgedsv4 import ConfigError, Dsv4Error

if TYPE_CHECKING:
    from dsv4_chat.settings import Settings

CLOSING_SECONDS = 1.0
"""How long the end of the program waits for the model's thread."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns its exit status."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments, os.environ)
    try:
        if options.writes_settings:
            write_settings_file(options.settings_file)
            sys.stdout.write(f"{options.settings_file}\n")
            return 0
        if options.has_named_file and not options.settings_file.exists():
            raise ConfigError(
                f"{options.settings_file}: no such settings file; --write-settings writes one there"
            )
        settings = load_settings(options.settings_file, os.environ, options.overrides)
        return _chat(options, settings)
    except Dsv4Error as error:
        sys.stderr.write(f"dsv4-chat: {error}\n")
        return 2
    except KeyboardInterrupt:  # before the screen is there
        sys.stderr.write("\n")
        return 130


def start() -> None:
    """Entry point of the installed command."""
    sys.exit(main())


def _chat(options: LaunchOptions, settings: Settings) -> int:
    if options.is_plain:
        return run_plain(settings)
    reason = plain_reason(
        os.environ,
        is_terminal=sys.stdin.isatty() and sys.stdout.isatty(),
        encoding=sys.stdout.encoding,
    )
    if reason is not None:
        sys.stderr.write(f"dsv4-chat: {reason}; going on line by line\n")
        return run_plain(settings)
    # Textual is loaded here, so that --help and refusals do not wait for it.
    from dsv4_chat.app import ChatApp, Surroundings
    from dsv4_chat.engine_model import EngineModel

    unlogged = _log_to(settings.log_file)
    store, notices = _open_store(settings)
    model = EngineModel(settings.model, settings.engine_options())
    surroundings = Surroundings(
        store=store,
        editor=editor_of(settings, os.environ),
        notices=unlogged + notices,
    )
    app = ChatApp(model, settings, surroundings)
    app.run(mouse=settings.mouse)
    if store is not None:
        store.close()
    status = app.return_code or 0
    if not app.thread.stop(seconds=CLOSING_SECONDS):
        # The thread is inside a step that cannot be stopped; ending under it could crash.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _open_store(settings: Settings) -> tuple[Store | None, tuple[str, ...]]:
    """The store; a damaged one is replaced only when the user says so."""
    folder = data_folder(settings)
    snapshot_bytes = int(settings.snapshot_gigabytes * (1 << 30))
    try:
        return Store(folder, snapshot_bytes=snapshot_bytes), ()
    except StoreDamagedError as error:
        sys.stderr.write(f"dsv4-chat: {error}\n")
        sys.stderr.write("Set it aside under another name and begin a new one? [y/N] ")
        sys.stderr.flush()
        answer = sys.stdin.readline().strip().lower()
        if answer not in ("y", "yes"):
            return None, ("Conversations are not kept in this run: the database is damaged.",)
        kept = set_aside(error.path)
        return Store(folder, snapshot_bytes=snapshot_bytes), (f"The old file is kept: {kept}",)
    except Dsv4Error as error:
        return None, (f"Conversations are not kept in this run: {error}",)


def _log_to(path: str) -> tuple[str, ...]:
    """Write the log to a file, or nowhere: the screen belongs to the app.

    Returns:
        Why there is none although one was named; empty otherwise.
    """
    logger = logging.getLogger()
    logger.addHandler(logging.NullHandler())
    if not path:
        return ()
    try:
        handler = logging.FileHandler(Path(path).expanduser(), encoding="utf-8")
    except OSError as error:
        return (f"No log is written: {path}: {error.strerror}",)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return ()


if __name__ == "__main__":
    start()
