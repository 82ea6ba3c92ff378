"""`edgedsv4 plan`: tables, where figures come from, and what is said when there are none."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from link_samples import DRIVE, expert_rate, links

import edgedsv4
from edgedsv4.cli import main
from edgedsv4.cli.commands import build_parser
from edgedsv4.cli.flags import engine_options
from edgedsv4.runtime.links import Links, MachineFacts, mount_of
from edgedsv4.runtime.shipped_models import open_model

BUDGET = ["--ctx", "500", "--ram", "1G"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "edgedsv4" / "links.json"


def measured(**changes: Any) -> Links:
    """Figures of this machine, with what random-tiny needs."""
    with open_model("random-tiny") as checkpoint:
        mount = mount_of(checkpoint.path)
    sample: dict[str, Any] = {
        "machine": MachineFacts.of(),
        "experts": (expert_rate("BF16", 2, 1, 5e9), expert_rate("BF16", 2, 16, 4e9)),
        "drives": (dataclasses.replace(DRIVE, mount=mount),),
        "card": None,
        "overlap": None,
    }
    return links(**(sample | changes))


def kept(cache: Path, **changes: Any) -> None:
    cache.parent.mkdir(exist_ok=True)
    measured(**changes).write(cache)


def test_without_figures_memory_is_planned_and_the_way_to_them_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "random-tiny", *BUDGET]) == 0
    found = capsys.readouterr()
    assert "fits; routed experts: they all stay in memory" in found.out
    assert "no speed is predicted" in found.out
    assert "bench links" in found.err


def test_kept_figures_predict_speed(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept(cache)
    assert main(["plan", "random-tiny", *BUDGET]) == 0
    found = capsys.readouterr()
    assert found.err == ""
    lines = [" ".join(line.split()) for line in found.out.splitlines()]
    assert "in memory 1,572,864 32 8 100.0%" in lines
    assert "one token uses 393,216" in lines
    assert any(line.startswith("decode ") and "the limit is" in line for line in lines)
    assert any(line.startswith("prefill ") and "chunks of 256" in line for line in lines)


def test_card_and_advice_are_shown(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept(cache, card=links().card)
    assert main(["plan", "random-tiny", *BUDGET, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["placement"]["tiers"][0]["share"] == 1
    assert found["available_bytes"] == 31 << 30
    assert found["prediction"]["decode"]["limit"] == "launches"
    assert main(["plan", "random-tiny", *BUDGET, "--device", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["available_bytes"] == 1 << 30


def test_text_names_what_would_make_it_faster(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(cache)
    original = edgedsv4.plan_tiers

    def planned(*args: Any, **kwargs: Any) -> Any:
        return dataclasses.replace(original(*args, **kwargs), advice=("--ram 2G: more",))

    monkeypatch.setattr(edgedsv4, "plan_tiers", planned, raising=False)
    main(["plan", "random-tiny", *BUDGET])
    assert "faster: --ram 2G: more" in capsys.readouterr().out


def test_figures_of_another_machine_are_not_used_unless_named(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = dataclasses.replace(MachineFacts.of(), cores=999)
    kept(cache, machine=other)
    main(["plan", "random-tiny", *BUDGET, "--json"])
    found = capsys.readouterr()
    assert json.loads(found.out)["prediction"] is None
    assert "another machine" in found.err
    path = tmp_path / "other.json"
    measured(machine=other).write(path)
    main(["plan", "random-tiny", *BUDGET, "--json", "--links", str(path)])
    assert json.loads(capsys.readouterr().out)["prediction"]["decode"]["tokens_per_second"] > 0


def test_damaged_figures_are_told_and_the_plan_goes_on(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.parent.mkdir()
    cache.write_text("{")
    assert main(["plan", "random-tiny", *BUDGET]) == 0
    assert "expected JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--links", "/absent"], "/absent"),
        (["--links", "x", "--refresh"], "exclude each other"),
        (["--vram", "0"], "vram_bytes"),
        (["--ram", "0"], "ram_bytes"),
        (["--device", "cuda"], "--vram"),
        (["--chunk", "0"], "prefill_chunk"),
    ],
)
def test_wrong_use_is_refused_in_one_line(
    arguments: list[str], told: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(cache)
    assert main(["plan", "random-tiny", *arguments]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


def test_refresh_measures_the_models_types_and_keeps_them(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measure(options: Any, on_progress: Any) -> Links:
        assert on_progress is not None
        asked.append(options)
        return measured()

    monkeypatch.setattr(edgedsv4, "measure_links", measure, raising=False)
    assert main(["plan", "random-tiny", *BUDGET, "--refresh", "--json", "--device", "cpu"]) == 0
    assert asked == [edgedsv4.LinkOptions(types=("BF16",), device="cpu")]
    assert json.loads(capsys.readouterr().out)["prediction"] is not None
    assert Links.read(cache) == measured()


def test_experts_on_every_tier_have_a_line(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept(cache, card=links().card)
    main(["plan", "random-tiny", *BUDGET, "--chunk", "1", "--json"])
    needed = json.loads(capsys.readouterr().out)["needed_bytes"]
    expert = 3 * 128 * 64 * 2
    vram, ram = needed + 12 * expert, (1 << 30) + 12 * expert
    main(["plan", "random-tiny", *BUDGET[:2], "--chunk=1", f"--vram={vram}", f"--ram={ram}"])
    out = capsys.readouterr().out
    for place in ("on the card", "in memory", "on the drive", "staging, card", "staging, memory"):
        assert f"\n{place}" in out
    assert "some are read from disk" in out
    assert f"\nmemory, all{ram:>39,}  of {ram:,}\n" in out


def test_memory_for_less_than_a_token_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "random-tiny", "--ctx", "500", "--ram", "1M"])
    assert "too little memory to keep the experts of even one token" in capsys.readouterr().out


def test_a_reply_is_held_against_what_was_expected(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_model("pocket-v4") as checkpoint:
        drive = dataclasses.replace(DRIVE, mount=mount_of(checkpoint.path))
    rates = (expert_rate("MXFP4", 2, 1, 5e9), expert_rate("MXFP4", 2, 16, 4e9))
    kept(cache, experts=rates, drives=(drive,))
    reply = ["run", "pocket-v4", "-p", "Hi", "-n", "4", "--temp", "0", "--ctx", "500"]
    assert main([*reply, "--stats"]) == 0
    err = capsys.readouterr().err
    assert "expected: decode " in err
    assert "limited by" in err
    assert "decode tokens/s " in err
    assert ", predicted " in err
    assert "prefill" not in err  # one token says nothing of 512
    assert main(reply) == 0
    assert "expected" not in capsys.readouterr().err
    kept(cache, experts=rates, drives=(drive,), card=links().card)
    assert main([*reply, "--stats", "--backend", "native"]) == 0  # no card takes part
    assert expected_decode(capsys.readouterr().err) == expected_decode(err)
    few = ["--expert-place", "stored", "--expert-ram", "2M"]
    slow = dataclasses.replace(
        drive, readings=tuple(dataclasses.replace(r, runs=(1e6,)) for r in drive.readings)
    )
    kept(cache, experts=rates, drives=(slow,))
    assert main([*reply, "--stats", *few]) == 0
    assert "limited by the drive" in capsys.readouterr().err


def expected_decode(err: str) -> str:
    found = re.search(r"expected: decode ([\d,.]+)", err)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("options", "told"),
    [([], "experts on the CPU"), (["--backend", "reference"], "torch's operations")],
)
def test_what_prevents_a_prediction_prevents_no_reply(
    options: list[str], told: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(cache)  # of types that the model has not
    reply = ["run", "pocket-v4", "-p", "Hi", "-n", "1", "--temp", "0", "--ctx", "500", "--stats"]
    assert main([*reply, *options]) == 0
    assert f"no speed is predicted without figures of: {told}" in capsys.readouterr().err


# ---- the store's own lines ----


@pytest.mark.parametrize(
    "options",
    [
        ["--expert-place", "stored", "--ram", "1G"],
        ["--expert-place", "stored", "--ram", "1G", "--expert-ram", "3M"],
        ["--ram", "228M"],
        ["--ram", "1G"],
        ["--ram", "228M", "--expert-place", "mapped"],
    ],
    ids=" ".join,
)
def test_plan_has_the_store_that_opening_makes(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "pocket-v4", "--ctx", "500", "--device", "cpu", *options]
    assert main([*arguments, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    given = plan_options(arguments)
    with edgedsv4.Engine.open("pocket-v4", given) as engine:
        facts, opened = engine.describe()["experts"], engine._live
    assert isinstance(facts, dict)
    names = ("slots", "staging_slots", "slot_bytes", "experts")
    store = planned["store"]
    assert (store is None) == (facts["place"] == "mapped")
    assert [i for i in planned["items"] if "expert" in i["name"]] == [
        {"name": item.name, "bytes": item.nbytes, "required": item.is_required}
        for item in opened.plan.items
        if "expert" in item.name
    ]
    assert planned["needed_bytes"] == opened.plan.needed_bytes
    if store is not None:
        assert [store[name] for name in names] == [facts[name] for name in names]
        assert (store["io"], store["io_depth"], store["prefetch"]) == ("auto", 32, "hash")
        tiers = {tier["name"]: tier["experts"] for tier in planned["placement"]["tiers"]}
        # The MTP block's experts are counted by the store, and not used without drafts.
        assert tiers["ram"] == min(store["slots"], sum(tiers.values()))
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert ("slot of the store" in out) == (store is not None)
    if store is not None:
        assert f"{store['slots']:,} that stay" in out
        assert "the others are read as they are needed: io auto, up to 32 reads" in out


def plan_options(arguments: list[str]) -> edgedsv4.EngineOptions:
    """The options that the command makes of its arguments."""
    return engine_options(build_parser().parse_args(arguments))
