"""Flags stand for the fields of the option records, and values are read strictly."""

from __future__ import annotations

import argparse
import dataclasses
import math

import pytest

from edgedsv4.cli.commands import COMMANDS, build_parser
from edgedsv4.cli.flags import (
    CLI_ENGINE_CHOICES,
    ENGINE_FLAGS,
    SAMPLING_FLAGS,
    engine_options,
    parse_bias,
    parse_size,
    parse_think,
    sampling_options,
)
from edgedsv4.config import EngineOptions, SamplingOptions
from edgedsv4.errors import ConfigError


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["run", "model.gguf", *arguments])


def test_every_engine_option_has_one_flag() -> None:
    fields = [field.name for field in dataclasses.fields(EngineOptions)]
    flags = [flag.field for flag in ENGINE_FLAGS]
    assert sorted([*flags, *CLI_ENGINE_CHOICES]) == sorted(fields)


def test_every_sampling_option_has_one_flag() -> None:
    fields = [field.name for field in dataclasses.fields(SamplingOptions)]
    assert sorted(flag.field or "" for flag in SAMPLING_FLAGS) == sorted(fields)


def test_engine_defaults_are_those_of_the_record() -> None:
    chosen = dataclasses.replace(engine_options(parse()), sigbus_guard=False)
    assert chosen == EngineOptions()


def test_sampling_defaults_are_those_of_the_record() -> None:
    assert sampling_options(parse()) == SamplingOptions()


def test_help_shows_the_default_of_the_record() -> None:
    shown = build_parser().format_help
    assert shown  # the parser builds
    text = next(a for a in _actions("run") if "--dtype" in a.option_strings).help
    assert text is not None
    assert text.endswith("(default f32)")


def _actions(command: str) -> list[argparse.Action]:
    parser: argparse.ArgumentParser = build_parser()
    for word in command.split(" "):
        (subparsers,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
        parser = subparsers.choices[word]
    return list(parser._actions)


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_no_flag_has_a_default_of_its_own(command: str) -> None:
    defaults = {a.dest: a.default for a in _actions(command) if a.dest != "help"}
    assert set(defaults.values()) == {None}


def test_given_flags_reach_the_records() -> None:
    args = parse("--temp", "0", "-n", "5", "--ctx", "64", "--ram", "2G", "--logit-bias", "3=-inf")
    assert sampling_options(args) == SamplingOptions(
        temperature=0.0, max_tokens=5, logit_bias={3: -math.inf}
    )
    options = engine_options(args)
    assert (options.context, options.ram_bytes) == (64, 2 << 30)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("123", 123),
        ("64K", 65536),
        ("64kb", 65536),
        ("1.5G", 3 << 29),
        ("32GiB", 32 << 30),
        ("2T", 2 << 40),
        ("7 M", 7 << 20),
    ],
)
def test_size_is_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "nan", "inf", "1X", "1GG", "0x10", "9" * 400])
def test_bad_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as 32G"):
        parse_size(text)


@pytest.mark.parametrize(("text", "mode"), [("none", "none"), ("max", "max"), ("1", 1), ("99", 99)])
def test_thinking_mode_is_read(text: str, mode: str | int) -> None:
    assert parse_think(text) == mode


@pytest.mark.parametrize("text", ["", "0", "101", "-5", "1.5", "LOW", "²", "9" * 5000])
def test_bad_thinking_mode_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"none, low, high, max or 1\.\.100"):
        parse_think(text)


@pytest.mark.parametrize("text", ["", "=1", "5", "5=", "5=x", "a=1", "5=1=2"])
def test_bad_bias_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="ID=V"):
        parse_bias(text)


def test_token_with_two_biases_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        sampling_options(parse("--logit-bias", "3=1", "--logit-bias", "3=2"))
