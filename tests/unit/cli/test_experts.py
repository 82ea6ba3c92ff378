"""`profile` and `replay`: from a text to the figures of cache policies."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from edgedsv4 import read_expert_frequency, read_route_trace
from edgedsv4.cli import DONE, REFUSED, main
from edgedsv4.cli.expert_commands import parse_policies, parse_resident

STORED = Path(__file__).parents[2] / "data" / "routes" / "pocket-v4.routes"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, its frequency file and its trace."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "text.txt").write_text("The river runs to the sea. " * 12)
    arguments = ["profile", "pocket-v4", folder / "text.txt", "--threads", "1", "--ctx", "64"]
    arguments += ["--out", folder / "freq.json", "--trace", folder / "a.routes", "--pairs", "4"]
    assert main([str(argument) for argument in arguments]) == DONE
    return folder


def test_profile_writes_what_replay_reads(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frequency = read_expert_frequency(made / "freq.json")
    assert frequency.corpus == "text.txt"
    assert len(read_route_trace(made / "a.routes").ids) == frequency.tokens
    arguments = ["replay", made / "a.routes", "--resident", "25%,25%+25%", "--policy", "aged,lru"]
    arguments += ["--expert-freq", made / "freq.json", "--expert-bytes", "1K", "--json"]
    assert main([str(argument) for argument in arguments]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == frequency.tokens
    rows = found["replays"]
    assert [(row["policy"], row["slots"]) for row in rows] == [
        ("aged", [14]),
        ("lru", [14]),
        ("aged", [14, 14]),
        ("lru", [14, 14]),
    ]
    for row in rows:
        assert row["bytes_per_token"] == pytest.approx(1024 * row["reads_per_token"], abs=1)


def test_replay_prints_a_row_per_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(STORED), "--resident", "50%", "--policy", "lru,belady"]) == DONE
    heading, names, *rows = capsys.readouterr().out.splitlines()
    assert heading.startswith("4,341 tokens, 7 layers of 8 experts, 2 used")
    assert names.split()[:4] == ["resident", "slots", "policy", "hits"]
    assert [row.split()[:3] for row in rows] == [["50%", "28", "lru"], ["50%", "28", "belady"]]


@pytest.mark.parametrize("extra", [[], ["--pairs"]])
def test_replay_judges_guesses(
    made: Path, capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    call = ["replay", str(made / "a.routes"), "--resident", "25%", "--policy", "aged"]
    call += ["--expert-freq", str(made / "freq.json"), *extra]
    assert main([*call, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)["replays"][0]["guesses"]
    assert sorted(found["recall"]) == found["recall"]
    assert found["recall"][-1] > 0.9
    assert sorted(found["recall_by_layer"]) == [str(n) for n in range(1 if extra else 3, 7)]
    assert main(call) == DONE
    line = capsys.readouterr().out.splitlines()[-1]
    assert "misses that were guessed: top-1 " in line
    assert f"top-4 {found['recall'][3]:.0%}" in line


def test_pairs_that_are_not_there_are_refused(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(made / "a.routes"), "--pairs"]) == REFUSED
    assert "--pairs needs --expert-freq" in capsys.readouterr().err


def test_keeping_everything_is_another_replay(capsys: pytest.CaptureFixture[str]) -> None:
    rates = []
    for extra in ([], ["--keep"]):
        call = ["replay", str(STORED), "--resident", "15%", "--policy", "aged", "--json", *extra]
        assert main(call) == DONE
        rates.append(json.loads(capsys.readouterr().out)["replays"][0]["hit_rate"])
    assert rates[0] > rates[1]


def test_frequencies_of_another_model_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads((made / "freq.json").read_text())
    document["model_identity_sha256"] = "ab" * 32
    (tmp_path / "freq.json").write_text(json.dumps(document))
    call = ["replay", str(made / "a.routes"), "--expert-freq", str(tmp_path / "freq.json")]
    assert main(call) == REFUSED
    assert "belongs to model abab" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("resident", "message"),
    [
        ("60%+50%", "more than 100 %"),
        ("0%", "resident share must be more than 0 %"),
        ("120%", "more than 100 %"),
        ("1%+1%+1%", "one or two numbers"),
    ],
)
def test_shares_that_cannot_be_are_refused(
    resident: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(STORED), "--resident", resident]) == REFUSED
    assert message in capsys.readouterr().err


def test_damaged_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(STORED.read_bytes()[:-1])
    assert main(["replay", str(tmp_path / "a")]) == REFUSED
    assert "expected for 4,341 tokens" in capsys.readouterr().err


def test_shares_are_read() -> None:
    assert parse_resident("15%,10%+40%") == ((0.15,), (0.1, 0.4))
    assert parse_policies("lru,aged") == ("lru", "aged")


@pytest.mark.parametrize("text", ["", "15", "%", "x%", "15%,", "1%++2%"])
def test_other_shares_are_wrong_use(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected shares such as"):
        parse_resident(text)


@pytest.mark.parametrize("text", ["", "mru", "lru,", "lru,x"])
def test_other_policies_are_wrong_use(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected some of aged, lru"):
        parse_policies(text)
