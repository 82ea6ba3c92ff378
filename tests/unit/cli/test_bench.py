"""`edgedsv4 bench` on the random tiny model: what it prints, never how fast that was."""

from __future__ import annotations

import argparse
import json
import re

import pytest

from edgedsv4.cli import main
from edgedsv4.cli.flags import parse_numbers

QUICK = ["--prompt", "4", "--generate", "2", "--repeat", "2", "--threads", "1"]


def test_table_has_a_row_per_work_and_depth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "random-tiny", *QUICK, "--depth", "0,3"]) == 0
    rows = re.findall(r"^(prefill|decode) +(\d+) +(\d+) +(\d+) ", capsys.readouterr().out, re.M)
    assert rows == [
        ("prefill", "0", "4", "2"),
        ("decode", "0", "2", "2"),
        ("prefill", "3", "4", "2"),
        ("decode", "3", "2", "2"),
    ]


def test_json_holds_what_is_needed_to_judge_a_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "random-tiny", *QUICK, "--backend", "reference", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["engine"]["threads"] == 1
    assert set(found["engine"]["kernels"].values()) == {"reference"}
    assert set(found["machine"]) == {"processor", "cores", "instructions", "system"}
    assert set(found["versions"]) == {"edgedsv4", "python", "torch"}
    assert set(found["weights_per_token"]) == {"dense_weights", "expert_weights"}
    assert set(found["stream"]) == {"bytes_per_second", "bytes"}
    decode = found["results"][1]
    assert decode["work"] == "decode"
    assert decode["share_of_stream"] > 0
    assert len(decode["seconds"]) == decode["n"] == 2
    assert decode["best_tokens_per_second"] >= decode["median_tokens_per_second"] > 0


def test_context_follows_the_depths(capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", "random-tiny", *QUICK, "--depth", "5", "--json"])
    assert json.loads(capsys.readouterr().out)["engine"]["context"] == 9


def test_context_that_is_too_small_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "random-tiny", *QUICK, "--depth", "50", "--ctx", "20"]) == 2
    assert "context" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "1,", "-1", "x", "1e3"])
def test_depths_are_plain_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_numbers(text)
