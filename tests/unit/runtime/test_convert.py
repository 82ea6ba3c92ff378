"""Conversion loses nothing that GGUF can hold, and leaves nothing behind when it fails."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.torch
import structure_data
import tiny_files
import torch
from tiny_model import random_tensors, tiny_config

from edgedsv4.errors import CancelledError, CapacityError, ConfigError, FormatError
from edgedsv4.formats import gguf_stream
from edgedsv4.formats.checkpoint import attach_draft, open_checkpoint
from edgedsv4.formats.gguf import read_gguf
from edgedsv4.formats.gguf_values import GgufType
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize
from edgedsv4.model.weight_table import weight_report
from edgedsv4.model.weights import load_weights
from edgedsv4.runtime.convert import (
    ConvertOptions,
    QuantizeOptions,
    convert_model,
)
from edgedsv4.runtime.shipped_models import RANDOM_TINY

CONFIG = tiny_config(num_draft_layers=1)


@pytest.fixture(scope="module")
def structure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stored reference model: `official/`, `mxfp4.gguf`, and what we convert, `ours.gguf`."""
    directory = structure_data.unpack(tmp_path_factory.mktemp("structure"))
    convert_model(directory / "official", directory / "ours.gguf")
    return directory


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An official checkpoint, quantised as released ones are, with an MTP block."""
    directory = tmp_path_factory.mktemp("drafted") / "official"
    tiny_files.write_official(directory, CONFIG, random_tensors(CONFIG, 5), quantised=True)
    return directory


def values_of(weights: Any) -> Any:
    """A weight record as nested tuples of float32 arrays."""
    if isinstance(weights, QuantMatrix):
        return dequantize(weights).numpy()
    if isinstance(weights, torch.Tensor):
        return weights.numpy()
    if is_dataclass(weights) and not isinstance(weights, type):
        return tuple(values_of(getattr(weights, f.name)) for f in fields(weights))
    if isinstance(weights, tuple):
        return tuple(values_of(w) for w in weights)
    return weights


def assert_same_values(ours: Any, theirs: Any, share: float = 0) -> None:
    """Equal; or with `share`, apart by at most this share of an array's largest value."""
    if isinstance(ours, tuple):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_same_values(a, b, share)
    elif isinstance(ours, np.ndarray):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=share * np.abs(theirs).max())
    else:
        assert ours == theirs


def types_of(path: Path) -> dict[str, str]:
    with read_gguf(path) as file:
        return {name: record.block_type.name for name, record in file.tensors.items()}


# ---- the conversion that llama.cpp makes


def test_tensors_are_those_of_llama_cpp_byte_for_byte(structure: Path) -> None:
    with (
        read_gguf(structure / "ours.gguf") as ours,
        read_gguf(structure / "mxfp4.gguf") as theirs,
    ):
        assert set(ours.tensors) == set(theirs.tensors)
        for name, expected in theirs.tensors.items():
            found = ours.tensors[name]
            assert (found.block_type, found.shape) == (expected.block_type, expected.shape), name
            assert found.data().tobytes() == expected.data().tobytes(), name


def test_metadata_are_those_of_llama_cpp(structure: Path) -> None:
    with (
        read_gguf(structure / "ours.gguf") as ours,
        read_gguf(structure / "mxfp4.gguf") as theirs,
    ):
        # Text for people, a template we do not write, and a name of the same pre-tokenizer.
        apart = {"general.name", "general.size_label", "tokenizer.chat_template"}
        apart.add("tokenizer.ggml.pre")
        for key in theirs.metadata.keys() - apart:
            assert np.array_equal(ours.metadata[key], theirs.metadata[key]), key
            assert ours.value_types[key] == theirs.value_types[key], key
        assert ours.metadata["tokenizer.ggml.pre"] == "joyai-llm"
        assert "tokenizer.chat_template" not in ours.metadata


def test_converted_model_has_the_values_of_the_checkpoint(structure: Path) -> None:
    with (
        open_checkpoint(structure / "official") as official,
        open_checkpoint(structure / "ours.gguf") as converted,
    ):
        before, after = load_weights(official), load_weights(converted)
        # Half a step of the integers, and the rounding of the scale to a half float.
        rounding = 1 / 254 + 1 / 2048
        assert_same_values(values_of(after[0]), values_of(before[0]), rounding)
        for layer in range(official.config.num_layers):
            for expert in range(official.config.num_experts):
                assert_same_values(
                    values_of(after[1].expert(layer, expert)),
                    values_of(before[1].expert(layer, expert)),
                )


def test_configuration_comes_back(structure: Path) -> None:
    with (
        open_checkpoint(structure / "official") as official,
        open_checkpoint(structure / "ours.gguf") as converted,
    ):
        stored = float(np.float32(1e-6))
        expected = replace(
            official.config, architecture="deepseek4", pad_id=2, hc_eps=stored, rms_norm_eps=stored
        )
        assert converted.config == expected
        assert converted.encoding_hint == official.encoding_hint
        assert converted.warnings == ()


def test_the_gguf_package_reads_the_file(structure: Path) -> None:
    reader = gguf.GGUFReader(structure / "ours.gguf")
    assert reader.fields["general.architecture"].contents() == "deepseek4"
    assert reader.fields["general.sampling.temp"].contents() == 1.0
    with read_gguf(structure / "ours.gguf") as ours:
        assert {t.name for t in reader.tensors} == set(ours.tensors)
        for tensor in reader.tensors:
            assert tensor.data.tobytes() == ours.tensors[tensor.name].data().tobytes()


@pytest.mark.parametrize("fp8", ["BF16", "F32"])
def test_fp8_is_kept_exactly_on_request(structure: Path, tmp_path: Path, fp8: Any) -> None:
    convert_model(structure / "official", tmp_path / "m.gguf", ConvertOptions(fp8=fp8))
    assert types_of(tmp_path / "m.gguf")["blk.1.attn_q_b.weight"] == fp8
    with (
        open_checkpoint(structure / "official") as official,
        open_checkpoint(tmp_path / "m.gguf") as converted,
    ):
        before, after = load_weights(official)[0], load_weights(converted)[0]
        assert_same_values(values_of(after), values_of(before))


def test_converting_a_gguf_file_changes_no_tensor(structure: Path, tmp_path: Path) -> None:
    convert_model(structure / "mxfp4.gguf", tmp_path / "again.gguf")
    with read_gguf(tmp_path / "again.gguf") as ours, read_gguf(structure / "mxfp4.gguf") as theirs:
        assert {n: t.data().tobytes() for n, t in ours.tensors.items()} == {
            n: t.data().tobytes() for n, t in theirs.tensors.items()
        }
        assert (
            ours.metadata["tokenizer.chat_template"] == theirs.metadata["tokenizer.chat_template"]
        )
        assert ours.metadata["general.size_label"] == "8x2.6M"


def test_converting_twice_gives_the_same_bytes(structure: Path, tmp_path: Path) -> None:
    convert_model(structure / "official", tmp_path / "a.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == (structure / "ours.gguf").read_bytes()


def test_shipped_model_can_be_converted(tmp_path: Path) -> None:
    report = convert_model(RANDOM_TINY, tmp_path / "m.gguf")
    assert report.files == (tmp_path / "m.gguf",)
    with open_checkpoint(tmp_path / "m.gguf") as converted:
        assert weight_report(converted)


# ---- the MTP block


def draft_values(main: Path, sidecar: Path | None) -> Any:
    with open_checkpoint(main) as opened:
        checkpoint = opened if sidecar is None else attach_draft(opened, sidecar)
        weights, experts = load_weights(checkpoint)
        last = checkpoint.config.num_layers
        own = [experts.expert(last, e) for e in range(checkpoint.config.num_experts)]
        return values_of(weights.draft), values_of(tuple(own))


def test_mtp_block_of_a_separate_file_reads_back_bit_identically(
    drafted: Path, tmp_path: Path
) -> None:
    exact = ConvertOptions(fp8="BF16")
    report = convert_model(drafted, tmp_path / "m.gguf", exact)
    assert report.files == (tmp_path / "m.gguf", tmp_path / "mtp-m.gguf")
    found = draft_values(tmp_path / "m.gguf", tmp_path / "mtp-m.gguf")
    assert_same_values(found, draft_values(drafted, None))


def test_mtp_block_inside_reads_back_bit_identically(drafted: Path, tmp_path: Path) -> None:
    report = convert_model(drafted, tmp_path / "m.gguf", ConvertOptions(fp8="BF16", mtp="inside"))
    assert report.files == (tmp_path / "m.gguf",)
    assert_same_values(draft_values(tmp_path / "m.gguf", None), draft_values(drafted, None))


def test_separate_and_inside_hold_the_same_rounded_block(drafted: Path, tmp_path: Path) -> None:
    convert_model(drafted, tmp_path / "a.gguf")
    convert_model(drafted, tmp_path / "b.gguf", ConvertOptions(mtp="inside"))
    assert_same_values(
        draft_values(tmp_path / "a.gguf", tmp_path / "mtp-a.gguf"),
        draft_values(tmp_path / "b.gguf", None),
    )


def test_mtp_block_can_be_left_out(drafted: Path, tmp_path: Path) -> None:
    report = convert_model(drafted, tmp_path / "m.gguf", ConvertOptions(mtp="none"))
    assert report.files == (tmp_path / "m.gguf",)
    assert not [name for name in types_of(tmp_path / "m.gguf") if "mtp" in name or "nextn" in name]


def test_main_file_holds_only_names_that_llama_cpp_knows(drafted: Path, tmp_path: Path) -> None:
    """llama.cpp refuses a file with a tensor that it does not ask for."""
    convert_model(drafted, tmp_path / "m.gguf")
    block = f"blk.{CONFIG.num_layers}."
    assert not [n for n in types_of(tmp_path / "m.gguf") if n.startswith(("mtp.", block))]


def test_sidecar_has_what_llama_cpp_asks_for(drafted: Path, tmp_path: Path) -> None:
    convert_model(drafted, tmp_path / "m.gguf")
    with read_gguf(tmp_path / "mtp-m.gguf") as file:
        layers = CONFIG.num_layers + 1
        assert file.metadata["deepseek4.block_count"] == layers
        assert file.metadata["deepseek4.nextn_predict_layers"] == 1
        for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp", "attention.compress_ratios"):
            assert len(file.metadata[f"deepseek4.{key}"]) == layers  # type: ignore[arg-type]
        block = f"blk.{CONFIG.num_layers}."
        outside = {name for name in file.tensors if not name.startswith(block)}
        assert outside == {
            "token_embd.weight",
            "output.weight",
            "output_norm.weight",
            "output_hc_base.weight",
            "output_hc_fn.weight",
            "output_hc_scale.weight",
        }
        joined = file.tensors[f"{block}nextn.eh_proj.weight"]
        assert joined.shape == (CONFIG.hidden_size, 2 * CONFIG.hidden_size)
        assert joined.block_type.name == "Q8_0"
        assert {n for n in file.tensors if ".nextn." in n} == {
            f"{block}nextn.{leaf}.weight"
            for leaf in ("eh_proj", "enorm", "hnorm", "shared_head_norm")
        }


# ---- other sources


def test_checkpoint_without_tokenizer_makes_a_file_without_one(
    drafted: Path, tmp_path: Path
) -> None:
    report = convert_model(drafted, tmp_path / "m.gguf")
    assert any("no tokenizer" in note for note in report.notes)
    with read_gguf(tmp_path / "m.gguf") as file:
        assert not [key for key in file.metadata if key.startswith("tokenizer.")]


def official_copy(structure: Path, target: Path) -> Path:
    target.mkdir()
    for path in (structure / "official").iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_later_release_is_recognised_after_conversion(structure: Path, tmp_path: Path) -> None:
    source = official_copy(structure, tmp_path / "flash")
    (source / "encoding").mkdir()
    (source / "encoding" / "encoding_dsv4.py").write_text("Beyond maximum", encoding="utf-8")
    convert_model(source, tmp_path / "m.gguf")
    with open_checkpoint(tmp_path / "m.gguf") as converted:
        assert (converted.encoding_hint, converted.name) == ("v4-0731", "flash-0731")


def test_own_template_and_sampling_are_taken_over(structure: Path, tmp_path: Path) -> None:
    source = official_copy(structure, tmp_path / "flash")
    (source / "chat_template.jinja").write_text("{{ 'é' }}", encoding="utf-8")
    (source / "generation_config.json").write_text('{"temperature": 0.5, "top_p": 0.75}')
    convert_model(source, tmp_path / "m.gguf")
    with read_gguf(tmp_path / "m.gguf") as file:
        assert file.metadata["tokenizer.chat_template"] == "{{ 'é' }}"
        assert file.metadata["general.sampling.temp"] == 0.5
        assert file.metadata["general.sampling.top_p"] == 0.75


def test_ids_that_the_tokenizer_leaves_out_become_unused_tokens(
    structure: Path, tmp_path: Path
) -> None:
    source = official_copy(structure, tmp_path / "flash")
    path = source / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    before = len(document["added_tokens"])
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] != "<think>"]
    assert len(document["added_tokens"]) == before - 1
    document["model"]["vocab"].pop("<think>", None)
    path.write_text(json.dumps(document), encoding="utf-8")
    convert_model(source, tmp_path / "m.gguf")
    with read_gguf(tmp_path / "m.gguf") as file:
        tokens, types = file.metadata["tokenizer.ggml.tokens"], file.value_types
        assert isinstance(tokens, list)
        assert tokens[5] == "[PAD5]"
        assert file.metadata["tokenizer.ggml.token_type"][5] == 5  # type: ignore[index]
        assert types["tokenizer.ggml.token_type"] is GgufType.I32


def change_official(structure: Path, target: Path, edit: Callable[[Any], None]) -> Path:
    source = official_copy(structure, target)
    stored = safetensors.torch.load_file(source / "model.safetensors")
    edit(stored)
    safetensors.torch.save_file(stored, source / "model.safetensors")
    return source


def test_nan_scale_of_an_expert_is_refused(structure: Path, tmp_path: Path) -> None:
    def edit(stored: Any) -> None:
        stored["layers.3.ffn.experts.6.w2.scale"].view(torch.uint8)[17, 2] = 0xFF

    source = change_official(structure, tmp_path / "bad", edit)
    with pytest.raises(
        FormatError, match=r"layers\.3\.ffn\.experts\.6\.w2\.weight, row 17, group 2"
    ):
        convert_model(source, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_nan_weight_is_refused_by_name(structure: Path, tmp_path: Path) -> None:
    def edit(stored: Any) -> None:
        stored["layers.2.attn.wq_a.weight"].view(torch.uint8)[3, 5] = 0x7F

    source = change_official(structure, tmp_path / "bad", edit)
    with pytest.raises(FormatError, match=r"layers\.2\.attn\.wq_a\.weight.* must be finite"):
        convert_model(source, tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_unknown_tensors_are_left_out_and_told(structure: Path, tmp_path: Path) -> None:
    source = change_official(
        structure, tmp_path / "more", lambda stored: stored.update({"aligner.x": torch.ones(3)})
    )
    report = convert_model(source, tmp_path / "m.gguf")
    assert any("aligner.x" in note for note in report.notes)
    assert report.tensors == 178


# ---- files, progress and failures


def test_split_set_reads_as_the_whole(structure: Path, tmp_path: Path) -> None:
    options = ConvertOptions(split_max_bytes=1 << 20)
    report = convert_model(structure / "official", tmp_path / "m.gguf", options)
    assert [path.name for path in report.files] == [f"m-{i:05d}-of-00005.gguf" for i in range(1, 6)]
    assert all(path.stat().st_size < 1.1 * (1 << 20) for path in report.files[1:])
    with read_gguf(report.files[3]) as parts, read_gguf(structure / "ours.gguf") as whole:
        assert list(parts.tensors) == list(whole.tensors)
        for name, record in whole.tensors.items():
            assert parts.tensors[name].data().tobytes() == record.data().tobytes()


def test_report_adds_up(structure: Path, tmp_path: Path) -> None:
    report = convert_model(structure / "official", tmp_path / "m.gguf")
    with read_gguf(tmp_path / "m.gguf") as file:
        assert report.tensors == len(file.tensors)
        assert report.nbytes == sum(record.nbytes for record in file.tensors.values())
    assert sum(report.block_types.values()) == report.nbytes
    assert json.loads(json.dumps(report.to_json()))["files"] == [str(tmp_path / "m.gguf")]


def test_progress_ends_at_the_total(structure: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    report = convert_model(
        structure / "official", tmp_path / "m.gguf", on_progress=lambda *step: seen.append(step)
    )
    assert seen[-1] == ("writing bytes", report.nbytes, report.nbytes)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_cancel_leaves_nothing_behind(structure: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"old")
    calls = iter([False] * 20 + [True])
    with pytest.raises(CancelledError, match="nothing was written"):
        convert_model(structure / "official", tmp_path / "m.gguf", should_stop=lambda: next(calls))
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
    assert (tmp_path / "m.gguf").read_bytes() == b"old"


def test_disk_that_is_too_small_is_refused_at_once(
    structure: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(gguf_stream.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CapacityError, match="not enough free space") as caught:
        convert_model(structure / "official", tmp_path / "m.gguf")
    assert caught.value.available_bytes == 1000
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_up_leaves_nothing_behind(
    drafted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:  # the MTP block's file, after the model is complete
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CapacityError, match="full, nothing was written"):
        convert_model(drafted, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_missing_directory_is_refused(structure: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        convert_model(structure / "official", tmp_path / "none" / "m.gguf")


def test_split_without_suffix_is_refused(structure: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ending in \.gguf"):
        convert_model(structure / "official", tmp_path / "m", ConvertOptions(split_max_bytes=1000))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("record", "choices", "message"),
    [
        (ConvertOptions, {"fp8": "Q4_K"}, "fp8 must be one of"),
        (ConvertOptions, {"mtp": "both"}, "mtp must be one of"),
        (ConvertOptions, {"split_max_bytes": 0}, "split_max_bytes must be >= 1"),
        (QuantizeOptions, {"experts": "IQ2_XXS"}, "experts must be one of"),
        (QuantizeOptions, {"mtp": ""}, "mtp must be one of"),
        (QuantizeOptions, {"split_max_bytes": -1}, "split_max_bytes must be >= 1"),
    ],
)
def test_options_out_of_range_are_refused(record: Any, choices: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        record(**choices)
