"""`edgedsv4 bench --synthetic`: options, tables and errors; what is measured is a sample."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from link_samples import CARD, expert_rate, links
from synthetic_samples import report

import edgedsv4
from edgedsv4.cli import INTERRUPTED, main
from edgedsv4.cli.bench_synthetic import FLAGS
from edgedsv4.runtime.synthetic_network import EXPERT_TYPES, SyntheticName, synthetic_config
from edgedsv4.runtime.synthetic_prediction import Expectation, synthetic_plan
from edgedsv4.runtime.synthetic_report import HostShare

if TYPE_CHECKING:
    from edgedsv4.runtime.links import ExpertRate


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Options that the command hands on; the last entry, if it is an error, is raised."""
    found: list[Any] = []

    def measure(options: Any, on_progress: Any, **_: Any) -> Any:
        found.append(options)
        on_progress("decode at 0", 1, 2)
        return report()

    monkeypatch.setattr(edgedsv4, "measure_synthetic", measure, raising=False)
    return found


def test_options_are_those_of_the_record_unless_given(asked: list[Any]) -> None:
    assert main(["bench", "--synthetic", "flash"]) == 0
    assert asked == [edgedsv4.SyntheticOptions()]


def test_given_options_are_handed_on(asked: list[Any]) -> None:
    options = ["--experts", "mxfp4", "--layers", "9", "--prompts", "0,64,128", "--generate", "7"]
    options += ["--depth", "0,5", "--repeat", "2", "--device", "cuda:1", "--vram", "3G"]
    assert main(["bench", "--synthetic", "pro", *options, "--kernels"]) == 0
    assert asked == [
        edgedsv4.SyntheticOptions(
            name="pro",
            experts="mxfp4",
            layers=9,
            prompts=(64, 128),
            generate=7,
            depths=(0, 5),
            repeat=2,
            device="cuda:1",
            vram_bytes=3 << 30,
            kernels=True,
        )
    ]


def test_experts_in_main_memory_are_asked_for(asked: list[Any]) -> None:
    options = ["--cpu-experts", "auto", "--expert-threads", "5", "--vram", "32G"]
    assert main(["bench", "--synthetic", "flash", *options]) == 0
    assert asked == [
        edgedsv4.SyntheticOptions(cpu_experts="auto", expert_threads=5, vram_bytes=32 << 30)
    ]


def test_what_the_cpu_computed_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"cpu_experts": "on", "threads": 16, "read_rate": 100e9}
    facts |= {"experts_on_card": 300, "experts": 11_008}
    decoded = replace(
        report().readings[0], bytes_per_token=None, kernels=(), host=HostShare(258.0, 0.02, 2e9)
    )
    made = replace(report(), host=facts, readings=(decoded,))
    monkeypatch.setattr(edgedsv4, "measure_synthetic", lambda _o, **_: made, raising=False)
    assert main(["bench", "--synthetic", "flash"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "main memory reads 100.0 GB/s" in lines
    assert "experts cpu_experts on, 16 threads; 300 of 11,008 on the card" in lines
    rate = f"{decoded.rate * 2e9 / 100e9:.1%}"
    assert lines[-1].endswith(f"2,000,000,000 {rate} of main memory's, 20.00 ms by the CPU")
    assert main(["bench", "--synthetic", "flash", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["results"][0]["host_bytes_per_token"] == 2e9
    assert found["host"]["experts"] == 11_008


@pytest.mark.usefixtures("asked")
def test_table_holds_speeds_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--synthetic", "flash"]) == 0
    found = capsys.readouterr().out
    assert [" ".join(line.split()) for line in found.splitlines()] == [
        "model random weights of the shape flash, 43 layers, experts IQ2_XXS and Q2_K",
        "device cuda:0, NVIDIA H200, sm_90",
        "versions edgedsv4 0.1, python 3.12.1, torch 2.11.0, triton 3.6.0",
        "weights 86,620,000,000 bytes, made in 0.3 s",
        "memory reads 0.0 GB/s",
        "capture 0.75 s for a new timeline; the first token of all took 12.50 s, with compiling",
        "",
        "work depth tokens n tokens/s median ms p99 ms bytes/token share of the reads",
        "decode 16,384 2 2 1.0 1,000.000 1,000.000 500 50.0%",
        "prefill 0 512 3 1,024.0 500.000 750.000 25.6 TFLOP/s of products with weights",
        "",
        "decode at 16,384: 8 launches, 800.000 ms of kernels that overlap, the device busy for"
        " 700.000 of 1,000.000 ms",
        "kernel launches us/launch us/token time GB GB/s share of the reads",
        "_matvec_kernel 7 85,714.29 600,000.00 75.0% 0.0000 0.0 11.0%",
        "_new_kernel 1 200,000.00 200,000.00 25.0%",
        "_old_kernel none 0.0020",
    ]


def expected() -> Expectation:
    """Decode at twice the speed of the sample, prefill at half of it."""
    config = synthetic_config("flash", 4)
    options = edgedsv4.SyntheticOptions(layers=4, prompts=(512,), depths=(16_384,))
    plan = synthetic_plan(config, options, None)
    found = Expectation.of(plan, options, links(experts=rates(), card=CARD))
    ((depth, decode),) = found.decode
    decode = replace(decode, decode=replace(decode.decode, tokens_per_second=2.0))
    (prefill,) = found.prefill.prefill
    prefill = replace(prefill, tokens_per_second=2048.0)
    return replace(
        found, decode=((depth, decode),), prefill=replace(found.prefill, prefill=(prefill,))
    )


def rates() -> tuple[ExpertRate, ...]:
    return tuple(expert_rate(name, 8, 1, 50e9) for name in ("IQ2_XXS", "Q2_K"))


def test_prediction_is_told_before_and_held_against_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given: list[Any] = []

    def measure(options: Any, *, on_expectation: Any, links: Any, **_: Any) -> Any:
        given.append((options.predict, links))
        on_expectation(expected())
        print("measured")
        return report(expectation=expected())

    monkeypatch.setattr(edgedsv4, "measure_synthetic", measure, raising=False)
    links().write(tmp_path / "links.json")
    file = ["--links", str(tmp_path / "links.json")]
    assert main(["bench", "--synthetic", "flash", *file]) == 0
    found = capsys.readouterr()
    assert "expected: decode at 16,384 2.0 tokens/s, the limit is" in found.err
    assert "expected: prefill of 512 2,048 tokens/s, the limit is" in found.err
    assert "decode at 16,384: decode tokens/s 1, predicted 2 (50%)" in found.out
    prefill = "prefill tokens/s (predicted for 512 tokens) 1,024, predicted 2,048 (50%)"
    assert f"prefill of 512: {prefill}" in found.out
    assert main(["bench", "--synthetic", "flash", "--predict", "--json"]) == 0
    out = capsys.readouterr().out.removeprefix("measured\n")
    document = json.loads(out)
    assert [r["found_of_expected"] for r in document["results"]] == [0.5, 0.5]
    assert document["expected"]["decode"][0]["depth"] == 16_384
    assert given == [(False, links()), (True, None)]


@pytest.mark.usefixtures("asked")
def test_json_holds_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--synthetic", "flash", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report().to_json()


def test_speed_that_cannot_be_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = report(read_rate=1.0)
    monkeypatch.setattr(edgedsv4, "measure_synthetic", lambda *_, **__: found, raising=False)
    assert main(["bench", "--synthetic", "flash"]) == 1
    assert "the measurement is wrong" in capsys.readouterr().err


def test_interrupt_is_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(edgedsv4, "measure_synthetic", interrupt, raising=False)
    assert main(["bench", "--synthetic", "flash"]) == INTERRUPTED
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "name a MODEL, or links, or --synthetic flash|pro"),
        (["x.gguf", "--synthetic", "flash"], "MODEL and --synthetic exclude each other"),
        (["x.gguf", "--layers", "3"], "--layers goes with --synthetic"),
        (["x.gguf", "--kernels"], "--kernels goes with --synthetic"),
        (["--synthetic", "flash", "--prompt", "3"], "--prompt goes with a MODEL"),
        (["--synthetic", "flash", "--threads", "3"], "--threads goes with a MODEL"),
        (["--synthetic", "flash", "--layers", "44"], "layers must be 1..43 for flash, found 44"),
        (["--synthetic", "flash", "--prompts", "0", "--generate", "0"], "nothing to measure"),
        (["--synthetic", "flash", "--depth", "1048576"], "depths must be 0..1,048,476"),
        (["--synthetic", "flash", "--device", "cpu"], "need a GPU"),
    ],
)
def test_wrong_use_is_refused_in_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--synthetic", "nano"], ["--experts", "q3"]])
def test_unknown_names_are_refused(arguments: list[str]) -> None:
    assert main(["bench", *arguments]) == 2


def test_choices_are_those_of_the_library() -> None:
    names, experts = (
        next(f for f in FLAGS if f.names[0] == n) for n in ("--synthetic", "--experts")
    )
    assert experts.choices == tuple(EXPERT_TYPES)
    assert names.choices == SyntheticName.__args__
    assert all(synthetic_config(name) for name in names.choices or ())
