"""Settings from the file, the environment and the command line, each fault with its place.

Order: built-in < file < environment < command line. Everything unknown is an error, since a key
that is misspelled and passed over would be looked for a long time; all faults of a file are told at
once. Writing keeps what the user wrote, comments included.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import os
import re
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Final

import platformdirs
import tomlkit
from tomlkit.exceptions import ParseError, TOMLKitError

from dsv4_chat.settings import Settings
from edgedsv4 import ConfigError, StorageError

APP_NAME: Final = "dsv4-chat"
PREFIX: Final = "DSV4_CHAT_"
FILE_VARIABLE: Final = f"{PREFIX}SETTINGS"
"""Names another settings file; it is no key."""

DEFAULTS: Final[Mapping[str, object]] = {
    field.name: getattr(Settings(), field.name) for field in fields(Settings)
}
_KINDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
_SWITCHES = {"1": True, "true": True, "yes": True, "on": True} | {
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
_COMMENT_WIDTH = 98


def settings_path(environ: Mapping[str, str]) -> Path:
    """Where the settings file is: the one the environment names, else in the user's folder."""
    named = environ.get(FILE_VARIABLE)
    return Path(named) if named else Path(platformdirs.user_config_dir(APP_NAME)) / "settings.toml"


def data_folder(settings: Settings) -> Path:
    """Where conversations are kept."""
    named = settings.data_folder
    return Path(named).expanduser() if named else Path(platformdirs.user_data_dir(APP_NAME))


def load_settings(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Settings:
    """Settings of all sources.

    Args:
        path: the settings file; None takes `settings_path(environ)`. Without a file there are none.
        environ: variables; None for none. Those that start with `DSV4_CHAT_` count.
        overrides: keys and values of the command line.

    Raises:
        ConfigError: an unknown key, a wrong type or a value out of range; file or variable, key,
            what was expected and what was found are in the message.
        StorageError: the file cannot be read.
    """
    environ = environ or {}
    path = path or settings_path(environ)
    origins: dict[str, str] = {}
    values: dict[str, object] = {}
    for origin, found in (
        (str(path), _read_file(path)),
        ("environment", _read_environment(environ)),
        ("command line", dict(overrides or {})),
    ):
        values |= found
        origins |= dict.fromkeys(found, origin)
    try:
        return Settings(**values)  # type: ignore[arg-type]  # names and types were checked
    except ConfigError as error:
        origin = origins.get(error.name or "", "settings")
        if origin == "environment":
            origin = f"environment, {PREFIX}{(error.name or '').upper()}"
        raise ConfigError(f"{origin}: {error}", name=error.name) from None


def settings_text(document: str = "") -> str:
    """The text of a settings file: what `document` says, then every other key as a comment.

    Raises:
        ConfigError: `document` is no TOML.
    """
    known = tomlkit.parse(document) if document else tomlkit.document()
    blocks = [document.rstrip("\n") + "\n" if document else f"# Settings of {APP_NAME}.\n"]
    for key, value in DEFAULTS.items():
        # A key that is there, or stands there as the comment an earlier call wrote.
        if key in known or f"\n#{key} = " in f"\n{document}":
            continue
        comment = textwrap.fill(
            key_documentation(key), _COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# "
        )
        blocks.append(f"{comment}\n#{tomlkit.dumps({key: value})}")
    return "\n".join(blocks)


def write_settings_file(path: Path) -> None:
    """Write the commented file with every key; what is set in an older one stays as it is.

    Raises:
        ConfigError: the older file has faults.
        StorageError: it cannot be read or written.
    """
    _read_file(path)
    _write(path, settings_text(_text_of(path)))


def save_setting(path: Path, key: str, value: object) -> None:
    """Set one key in the file, which is made when it is missing; the rest stays as it is.

    Raises:
        ConfigError: an unknown key, a wrong type or range, or faults in the file.
        StorageError: it cannot be read or written.
    """
    document = _text_of(path)
    problem = _problem_of(key, value)
    if problem:
        raise ConfigError(f"{path}: {problem}", name=key)
    Settings(**{**_read_file(path), key: value})  # type: ignore[arg-type]  # just checked
    line = tomlkit.dumps({key: value})
    offered = re.search(rf"^#{key} = .*\n?", document, re.MULTILINE)
    parsed = tomlkit.parse(document)
    if key not in parsed and offered is not None:
        _write(path, document[: offered.start()] + line + document[offered.end() :])
        return
    parsed[key] = value
    _write(path, tomlkit.dumps(parsed))


def key_documentation(key: str) -> str:
    """What `Settings` says of a key, on one line; empty where Python has no source text."""
    return _documentation().get(key, "")


def _read_file(path: Path) -> dict[str, object]:
    text = _text_of(path)
    try:
        document = tomlkit.parse(text).unwrap()
    except ParseError as error:
        raise ConfigError(f"{path}: this is no TOML: {error}") from None
    except (TOMLKitError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None
    found = {key: _problem_of(key, value) for key, value in document.items()}
    problems = {key: problem for key, problem in found.items() if problem}
    if problems:
        raise ConfigError(f"{path}: {'; '.join(problems.values())}", name=next(iter(problems)))
    return {key: _plain(key, value) for key, value in document.items()}


def _read_environment(environ: Mapping[str, str]) -> dict[str, object]:
    values: dict[str, object] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE:
            continue
        key = variable.removeprefix(PREFIX).lower()
        if key not in DEFAULTS:
            raise ConfigError(f"environment: {_unknown(variable, key)}", name=key)
        kind = type(DEFAULTS[key])
        value = _parsed(text, kind)
        if value is None:
            raise ConfigError(
                f"environment, {variable}: expected {_KINDS[kind]}, found {text!r}", name=key
            )
        values[key] = value
    return values


def _parsed(text: str, kind: type) -> object:
    """The value of a variable; None for one that is none of its kind."""
    if kind is str:
        return text
    if kind is bool:
        return _SWITCHES.get(text.strip().lower())
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        return None


def _problem_of(key: str, value: object) -> str:
    """What is wrong with a key and the type of its value; empty for nothing."""
    if key not in DEFAULTS:
        return _unknown(key, key)
    kind = type(DEFAULTS[key])
    # A bool is an int for Python, and a whole number will do where any number is asked for.
    accepted = (int, float) if kind is float else (kind,)
    if isinstance(value, accepted) and isinstance(value, bool) == (kind is bool):
        return ""
    return f"{key}: expected {_KINDS[kind]}, found {_shown(value)}"


def _unknown(name: str, key: str) -> str:
    near = difflib.get_close_matches(key, DEFAULTS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(DEFAULTS)}"
    return f"{name}: unknown key; {hint}"


def _plain(key: str, value: object) -> object:
    is_float = isinstance(DEFAULTS[key], float)
    return float(value) if is_float and isinstance(value, int) else value


def _shown(value: object) -> str:
    text = f"a table of {len(value)} keys" if isinstance(value, dict) else repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _documentation() -> dict[str, str]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(Settings))).body[0]
    except OSError:
        return {}
    if not isinstance(body, ast.ClassDef):
        return {}
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            value = ast.literal_eval(text.value)
            found[ast.unparse(field.target)] = " ".join(str(value).split())
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise StorageError(error.strerror or str(error), path=path, errno=error.errno) from error


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path.resolve())
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StorageError(error.strerror or str(error), path=path, errno=error.errno) from error
