"""Settings: sources and their order, faults with their place, and the file that is written."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

import edgedsv4
from dsv4_chat.settings import Settings
from dsv4_chat.settings_file import (
    DEFAULTS,
    data_folder,
    key_documentation,
    load_settings,
    save_setting,
    settings_path,
    settings_text,
    write_settings_file,
)
from edgedsv4 import ConfigError, EngineOptions, SamplingOptions, StorageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "settings.toml"


def test_built_in_settings_are_the_library_defaults() -> None:
    settings = Settings()
    assert settings.model == edgedsv4.DEFAULT_MODEL
    assert settings.engine_options() == EngineOptions()
    assert settings.sampling_options() == SamplingOptions()


def test_missing_file_gives_the_built_in_settings(path: Path) -> None:
    assert load_settings(path) == Settings()


def test_later_sources_win(path: Path) -> None:
    path.write_text("temperature = 0.1\ntop_k = 1\ndraft = 1\n", encoding="utf-8")
    environ = {"DSV4_CHAT_TOP_K": "2", "DSV4_CHAT_DRAFT": "2", "HOME": "/nowhere"}
    settings = load_settings(path, environ, {"draft": 3})
    assert (settings.temperature, settings.top_k, settings.draft) == (0.1, 2, 3)


def test_whole_number_is_a_number(path: Path) -> None:
    path.write_text("temperature = 2\n", encoding="utf-8")
    assert load_settings(path).temperature == 2.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("temprature = 1.0", "temprature: unknown key; did you mean temperature?"),
        ("zzz = 1", "zzz: unknown key; the keys are model, device"),
        ('temperature = "hot"', "temperature: expected a number, found 'hot'"),
        ("top_k = 1.5", "top_k: expected a whole number, found 1.5"),
        ("top_k = true", "top_k: expected a whole number, found True"),
        ("mouse = 1", "mouse: expected true or false, found 1"),
        ("theme = 3", "theme: expected a text, found 3"),
        ("[model]\nname = 1", "model: expected a text, found a table of 1 keys"),
        ("temperature = 300.0", "temperature must be 0..100, found 300.0"),
        ("context = -1", r"context must be 0..2\^24, found -1"),
        ("paste_lines = 0", "paste_lines must be 1 or more, found 0"),
        ('profile = "fast"', "profile must be one of default, exact, found 'fast'"),
        ('think = "hgh"', "think must be none, minimal, .* or 1..100, found 'hgh'"),
        ('think = "101"', "think must be none, minimal, .* or 1..100, found '101'"),
        ('model = ""', "model must be a path or a name"),
        ("temperature = nan", "temperature must be 0..100, found nan"),
        ("snapshot_gigabytes = nan", r"snapshot_gigabytes must be 0..2\^20, found nan"),
        ("a = = b", "this is no TOML: .*line 1"),
        ("top_k = 1\ntop_k = 2", 'Key "top_k" already exists'),
    ],
)
def test_fault_of_the_file_is_told_with_its_place(path: Path, text: str, expected: str) -> None:
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"settings.toml: .*{expected}"):
        load_settings(path)


def test_all_faults_are_told_at_once(path: Path) -> None:
    path.write_text("mous = true\ntop_k = 'x'\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"mous: .*top_k: "):
        load_settings(path)


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("DSV4_CHAT_TOPK", "1", "DSV4_CHAT_TOPK: unknown key; did you mean top_k"),
        ("DSV4_CHAT_TOP_K", "many", "DSV4_CHAT_TOP_K: expected a whole number, found 'many'"),
        ("DSV4_CHAT_MOUSE", "maybe", "DSV4_CHAT_MOUSE: expected true or false, found 'maybe'"),
        ("DSV4_CHAT_TOP_P", "7", "environment, DSV4_CHAT_TOP_P: top_p must be above 0..1"),
    ],
)
def test_fault_of_the_environment_is_told(
    path: Path, variable: str, text: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_settings(path, {variable: text})


@pytest.mark.parametrize(("text", "value"), [("0", False), ("Off", False), ("yes", True)])
def test_switch_is_read_from_the_environment(path: Path, text: str, value: bool) -> None:
    assert load_settings(path, {"DSV4_CHAT_MOUSE": text}).mouse is value


def test_fault_of_the_command_line_is_told(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"command line: draft must be 0\.\.8, found 9"):
        load_settings(path, {}, {"draft": 9})


def test_file_that_is_not_utf8_is_told(path: Path) -> None:
    path.write_bytes(b'theme = "\xff"')
    with pytest.raises(ConfigError, match="not UTF-8 at byte 9"):
        load_settings(path)


def test_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Is a directory"):
        load_settings(tmp_path)


def test_environment_names_another_file(tmp_path: Path) -> None:
    named = tmp_path / "mine.toml"
    named.write_text("draft = 2\n", encoding="utf-8")
    assert load_settings(None, {"DSV4_CHAT_SETTINGS": str(named)}).draft == 2
    assert settings_path({}).name == "settings.toml"


def test_every_key_is_documented() -> None:
    assert [key for key in DEFAULTS if not key_documentation(key)] == []
    assert list(DEFAULTS) == [field.name for field in fields(Settings)]


def test_written_file_names_every_key_and_changes_nothing(path: Path) -> None:
    write_settings_file(path)
    text = path.read_text(encoding="utf-8")
    assert [key for key in DEFAULTS if f"\n#{key} = " not in text] == []
    assert load_settings(path) == Settings()
    assert max(len(line) for line in text.splitlines()) <= 100


def test_written_file_is_valid_with_every_key_uncommented(path: Path) -> None:
    lines = settings_text().splitlines()
    path.write_text("\n".join(line.removeprefix("#") for line in lines if line[1:2] != " "))
    assert load_settings(path) == Settings()


def test_writing_again_keeps_what_the_user_wrote(path: Path) -> None:
    path.write_text("# my own remark\ntemperature = 0.5  # cool\n", encoding="utf-8")
    write_settings_file(path)
    once = path.read_text(encoding="utf-8")
    write_settings_file(path)
    assert path.read_text(encoding="utf-8") == once
    assert once.startswith("# my own remark\ntemperature = 0.5  # cool\n")
    assert once.count("temperature = ") == 1
    assert load_settings(path).temperature == 0.5


def test_writing_over_a_faulty_file_is_refused(path: Path) -> None:
    path.write_text("mous = true\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="did you mean mouse"):
        write_settings_file(path)
    assert path.read_text(encoding="utf-8") == "mous = true\n"


def test_one_setting_is_saved_and_the_rest_kept(path: Path) -> None:
    path.write_text("# mine\ndraft = 1\n", encoding="utf-8")
    save_setting(path, "theme", "light")
    assert path.read_text(encoding="utf-8").startswith("# mine\ndraft = 1\n")
    assert load_settings(path) == Settings(draft=1, theme="light")
    assert [file.name for file in path.parent.iterdir()] == ["settings.toml"]


def test_saved_setting_takes_the_place_of_its_comment(path: Path) -> None:
    write_settings_file(path)
    before = path.read_text(encoding="utf-8")
    save_setting(path, "theme", "light")
    after = path.read_text(encoding="utf-8")
    assert after == before.replace('#theme = "dark"', 'theme = "light"')
    assert load_settings(path) == Settings(theme="light")


def test_setting_of_a_wrong_kind_is_not_saved(path: Path) -> None:
    with pytest.raises(ConfigError, match="theme: expected a text"):
        save_setting(path, "theme", 3)
    with pytest.raises(ConfigError, match=r"draft must be 0\.\.8"):
        save_setting(path, "draft", 9)
    assert not path.exists()


def test_thinking_effort_may_be_a_number() -> None:
    assert (Settings(think="75").thinking, Settings(think="high").thinking) == (75, "high")


def test_data_folder_is_the_named_or_the_users(tmp_path: Path) -> None:
    assert data_folder(Settings(data_folder=str(tmp_path))) == tmp_path
    assert data_folder(Settings()).name == "dsv4-chat"
