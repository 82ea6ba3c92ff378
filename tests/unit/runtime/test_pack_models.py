"""A model opened by its pack is the model that the pack was made from, or an error says why not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changed_files import change_gguf, f32
from pack_models import CONFIG, mixed_types, write_model, write_official, write_pack
from tiny_model import tiny_config

from edgedsv4 import DoneEvent, Engine, EngineOptions, Message, SamplingOptions
from edgedsv4.errors import ConfigError, FormatError
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.formats.expert_pack_manifest import manifest_path
from edgedsv4.formats.gguf import read_gguf
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize
from edgedsv4.model.weight_table import bind_weights, weight_report
from edgedsv4.model.weights import load_weights
from edgedsv4.runtime.convert import ConvertOptions, convert_model
from edgedsv4.runtime.inspection import inspect_model, plan_model
from edgedsv4.runtime.shipped_models import POCKET_V4, open_model

PROMPT = [3, 77, 140, 9, 301, 52, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a.gguf`, its pack `a.pack` and the companion `dense.gguf`."""
    directory = tmp_path_factory.mktemp("models")
    model = write_model(directory / "a.gguf")
    write_pack(model, directory / "a.pack", dense_out=directory / "dense.gguf")
    return directory


def moved(folder: Path, target: Path, *names: str) -> Path:
    """Copies of some files in another directory."""
    for name in names:
        shutil.copy(folder / name, target / name)
    return target


def edit_manifest(pack: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = manifest_path(pack)
    values = json.loads(path.read_text(encoding="utf-8"))
    edit(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def logits(model: Path, **options: Any) -> np.ndarray:
    chosen = EngineOptions(device="cpu", context=64, **options)
    with Engine.open(model, chosen) as engine, engine.new_session() as session:
        found = session.evaluate(PROMPT, logits="all")
        assert found is not None
        return found


def greedy_ids(model: Path, **options: Any) -> list[int]:
    chosen = EngineOptions(device="cpu", context=96, **options)
    with Engine.open(model, chosen) as engine, engine.new_session() as session:
        session.evaluate(PROMPT)
        return list(session.generate(SamplingOptions(temperature=0, max_tokens=40)))


def values_of(weights: Any) -> Any:
    if isinstance(weights, QuantMatrix):
        return dequantize(weights).numpy().tobytes()
    if isinstance(weights, torch.Tensor):
        return weights.numpy().tobytes()
    if is_dataclass(weights) and not isinstance(weights, type):
        return tuple(values_of(getattr(weights, f.name)) for f in fields(weights))
    return tuple(values_of(w) for w in weights) if isinstance(weights, tuple) else weights


# ---- the same model


def test_every_weight_is_that_of_the_gguf_file(folder: Path) -> None:
    with open_checkpoint(folder / "a.gguf") as plain, open_checkpoint(folder / "a.pack") as packed:
        assert packed.warnings == ()
        assert packed.config == plain.config
        (one, own), (two, theirs) = load_weights(plain), load_weights(packed)
        assert values_of(one) == values_of(two)
        for layer in range(CONFIG.num_layers):
            for expert in range(CONFIG.num_experts):
                assert values_of(own.expert(layer, expert)) == values_of(
                    theirs.expert(layer, expert)
                )


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_logits_are_those_of_the_gguf_file(folder: Path, backend: Any) -> None:
    plain = logits(folder / "a.gguf", backend=backend)
    np.testing.assert_array_equal(logits(folder / "a.pack", backend=backend), plain)


def test_engine_says_where_the_parts_come_from(folder: Path) -> None:
    with Engine.open(folder / "a.pack", EngineOptions(device="cpu", context=64)) as engine:
        notes = engine.describe()["notes"]
    assert f"experts come from {folder / 'a.pack'}, everything else from" in str(notes)


def test_greedy_tokens_are_those_of_the_gguf_file(folder: Path) -> None:
    assert greedy_ids(folder / "a.pack") == greedy_ids(folder / "a.gguf")


def test_version_2_gives_the_tokens_of_its_gguf_file(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", mixed_types)
    write_pack(model, tmp_path / "m.pack")
    assert greedy_ids(tmp_path / "m.pack") == greedy_ids(model)
    np.testing.assert_array_equal(logits(tmp_path / "m.pack"), logits(model))


def test_text_of_the_shipped_model_is_the_same_from_its_pack(tmp_path: Path) -> None:
    write_pack(Path(POCKET_V4), tmp_path / "pocket.pack")
    texts = []
    for model in (POCKET_V4, tmp_path / "pocket.pack"):
        options = EngineOptions(device="cpu", context=512)
        with Engine.open(model, options) as engine, engine.new_session() as session:
            *_, done = session.reply(
                [Message("user", "Tell me a story about a fox named Mia.")],
                SamplingOptions(temperature=0, max_tokens=60),
            )
            assert isinstance(done, DoneEvent)
            texts.append((done.reply, session.token_ids))
    assert texts[0] == texts[1]
    assert len(texts[0][1]) > 60


def test_official_directory_serves_as_the_rest(tmp_path: Path) -> None:
    official = write_official(tmp_path / "official")
    write_pack(official, tmp_path / "x")
    with open_checkpoint(tmp_path / "x") as checkpoint:
        assert checkpoint.kind == "official"
        assert checkpoint.dense_path == official
        assert bind_weights(checkpoint).warnings == ()
    # Exactly, because FP4 and MXFP4 are the same numbers, but products of MXFP4 may use int8.
    np.testing.assert_array_equal(
        logits(tmp_path / "x", profile="exact", backend="reference"),
        logits(official, profile="exact", backend="reference"),
    )


def test_companion_of_an_official_checkpoint_gives_the_tokens_of_its_conversion(
    tmp_path: Path,
) -> None:
    official = write_official(tmp_path / "official")
    convert_model(official, tmp_path / "m.gguf", ConvertOptions(mtp="none"))
    write_pack(official, tmp_path / "x", dense_out=tmp_path / "dense.gguf")
    shutil.rmtree(official)
    assert greedy_ids(tmp_path / "x") == greedy_ids(tmp_path / "m.gguf")


def test_file_without_the_experts_serves_as_the_rest(folder: Path) -> None:
    with open_checkpoint(folder / "a.pack", dense=folder / "dense.gguf") as checkpoint:
        assert checkpoint.dense_path == folder / "dense.gguf"
    plain = logits(folder / "a.gguf")
    found = logits(folder / "a.pack", dense_model=folder / "dense.gguf")
    np.testing.assert_array_equal(found, plain)


def test_mtp_block_inside_the_other_file_is_used(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", config=replace(CONFIG, num_draft_layers=1))
    write_pack(model, tmp_path / "m.pack")
    with open_model(tmp_path / "m.pack", EngineOptions(draft=2)) as checkpoint:
        assert checkpoint.config.num_draft_layers == 1
    assert greedy_ids(tmp_path / "m.pack", draft=3) == greedy_ids(model)


def nvfp4_experts(tensors: dict[str, Any]) -> None:
    """A factor of its own for every expert of every stack."""
    for name in [name for name in tensors if name.endswith("_exps.weight")]:
        factors = np.arange(1, CONFIG.num_experts + 1, dtype=np.float32) / 4
        tensors[name.replace(".weight", ".scale")] = f32(factors)


def test_factors_of_experts_stay_with_them(folder: Path, tmp_path: Path) -> None:
    model = change_gguf(folder / "a.gguf", tmp_path / "f.gguf", nvfp4_experts)
    write_pack(model, tmp_path / "f.pack", dense_out=tmp_path / "dense.gguf")
    plain = logits(model)
    assert not np.array_equal(plain, logits(folder / "a.gguf"))
    np.testing.assert_array_equal(logits(tmp_path / "f.pack"), plain)
    found = logits(tmp_path / "f.pack", dense_model=tmp_path / "dense.gguf")
    np.testing.assert_array_equal(found, plain)


def test_model_can_be_converted_from_its_pack(folder: Path, tmp_path: Path) -> None:
    convert_model(folder / "a.pack", tmp_path / "out.gguf")
    convert_model(folder / "a.gguf", tmp_path / "expected.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "expected.gguf").read_bytes()


def test_inspect_and_plan_see_what_they_see_of_the_gguf_file(folder: Path) -> None:
    plain, packed = inspect_model(folder / "a.gguf"), inspect_model(folder / "a.pack")
    assert packed.problems == ()
    assert packed.roles == plain.roles
    assert packed.config == plain.config
    assert packed.facts()["rest of the model"] == folder / "a.gguf"
    assert packed.to_json()["dense_path"] == str(folder / "a.gguf")
    options = EngineOptions(device="cpu", context=64)
    ours, theirs = plan_model(folder / "a.pack", options), plan_model(folder / "a.gguf", options)
    assert ours.items == theirs.items


def test_identity_is_that_of_both_files(folder: Path, tmp_path: Path) -> None:
    with open_checkpoint(folder / "a.pack") as packed, open_checkpoint(folder / "a.gguf") as plain:
        assert packed.identity_sha256 != plain.identity_sha256
        first = packed.identity_sha256
    moved(folder, tmp_path, "a.pack", "a.pack.manifest.json", "a.gguf")
    with open_checkpoint(tmp_path / "a.pack", dense=tmp_path / "a.gguf") as packed:
        assert packed.identity_sha256 == first


def test_stack_with_gaps_says_what_its_bytes_are(folder: Path) -> None:
    with open_checkpoint(folder / "a.pack") as packed, read_gguf(folder / "a.gguf") as plain:
        record = packed.tensors["blk.1.ffn_down_exps.weight"]
        assert record.stride > record.nbytes // CONFIG.num_experts
        assert record.data().tobytes() == plain.tensors[record.name].data().tobytes()
        assert record.part(3).name == "blk.1.ffn_down_exps.weight[3]"
        assert {line.name for line in weight_report(packed)} >= {record.name}


# ---- names and places


def test_manifest_may_be_named_in_place_of_the_pack(folder: Path) -> None:
    with open_checkpoint(folder / "a.pack.manifest.json") as checkpoint:
        assert checkpoint.pack is not None
        assert checkpoint.path == folder / "a.pack.manifest.json"


def test_manifest_elsewhere_finds_its_pack(folder: Path, tmp_path: Path) -> None:
    moved(folder, tmp_path, "a.pack.manifest.json")
    with open_checkpoint(tmp_path / "a.pack.manifest.json") as checkpoint:
        assert checkpoint.pack is not None
        assert checkpoint.pack.path == folder / "a.pack"


def test_pack_that_was_moved_is_opened_with_a_warning(folder: Path, tmp_path: Path) -> None:
    moved(folder, tmp_path, "a.pack", "a.pack.manifest.json")
    with open_checkpoint(tmp_path / "a.pack") as checkpoint:
        assert [w for w in checkpoint.warnings if "the expert pack was moved" in w]


def without_source(folder: Path, target: Path) -> Path:
    """The pack in another directory, with a manifest whose paths lead nowhere."""
    moved(folder, target, "a.pack", "a.pack.manifest.json")

    def edit(values: dict[str, Any]) -> None:
        values["source"]["path"] = "/nowhere/a.gguf"
        values["dense"]["path"] = "/nowhere/dense.gguf"

    edit_manifest(target / "a.pack", edit)
    return target / "a.pack"


@pytest.mark.parametrize("name", ["a.gguf", "dense.gguf", "renamed.gguf"])
def test_rest_of_the_model_is_found_beside_the_pack(
    folder: Path, tmp_path: Path, name: str
) -> None:
    pack = without_source(folder, tmp_path)
    source = "dense.gguf" if name == "renamed.gguf" else name
    shutil.copy(folder / source, tmp_path / name)
    with open_checkpoint(pack) as checkpoint:
        assert checkpoint.dense_path == tmp_path / name


def test_rest_of_the_model_that_is_nowhere_is_told(folder: Path, tmp_path: Path) -> None:
    pack = without_source(folder, tmp_path)
    with pytest.raises(
        FormatError, match=r"routed experts only.*/nowhere/a.gguf.*--dense"
    ) as found:
        open_checkpoint(pack)
    assert found.value.fault == "missing"


def test_one_of_several_files_beside_the_pack_is_not_guessed(folder: Path, tmp_path: Path) -> None:
    pack = without_source(folder, tmp_path)
    for name in ("one.gguf", "two.gguf"):
        shutil.copy(folder / "dense.gguf", tmp_path / name)
    with pytest.raises(FormatError, match="a single GGUF file beside"):
        open_checkpoint(pack)


def test_rest_that_is_given_must_be_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="no such file"):
        open_checkpoint(folder / "a.pack", dense=tmp_path / "none.gguf")


def test_rest_that_is_a_pack_is_refused(folder: Path) -> None:
    with pytest.raises(FormatError, match="is an expert pack too"):
        open_checkpoint(folder / "a.pack", dense=folder / "a.pack")
    with pytest.raises(FormatError, match="is an expert pack too"):
        open_checkpoint(folder / "a.pack", dense=folder / "a.pack.manifest.json")


def test_rest_of_a_model_that_is_no_pack_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="dense_model goes with an expert pack"):
        open_checkpoint(folder / "a.gguf", dense=folder / "dense.gguf")


def test_file_without_the_experts_is_no_model_by_itself(folder: Path) -> None:
    report = inspect_model(folder / "dense.gguf")
    assert any("ffn_gate_exps" in problem for problem in report.problems)


# ---- what does not belong together


def test_pack_of_another_model_of_the_same_shape_is_refused(folder: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", seed=6)
    with pytest.raises(FormatError, match="of another model") as caught:
        open_checkpoint(folder / "a.pack", dense=other)
    assert caught.value.fault == "mismatch"
    assert len(caught.value.problems) > 1


def test_pack_of_a_model_of_another_shape_is_refused(folder: Path, tmp_path: Path) -> None:
    config = tiny_config(compress_ratios=(0, 4), num_experts=4, experts_per_token=2)
    other = write_model(tmp_path / "other.gguf", config=config)
    with pytest.raises(FormatError, match="layers: 3 in the expert pack, 2 in") as caught:
        open_checkpoint(folder / "a.pack", dense=other)
    assert caught.value.fault == "mismatch"


def test_same_model_with_other_types_is_refused(folder: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other.gguf", "b")
    with pytest.raises(FormatError, match="the manifest says"):
        open_checkpoint(folder / "a.pack", dense=other)


def test_whole_source_of_another_size_is_refused(folder: Path, tmp_path: Path) -> None:
    longer = tmp_path / "a.gguf"
    longer.write_bytes((folder / "a.gguf").read_bytes() + bytes(64))
    with pytest.raises(FormatError, match="that the expert pack was made from had"):
        open_checkpoint(folder / "a.pack", dense=longer)


def test_source_that_was_replaced_by_another_model_is_noticed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf")
    write_pack(model, tmp_path / "m.pack")
    write_model(model, seed=6)
    with pytest.raises(FormatError, match="other values than the model"):
        open_checkpoint(tmp_path / "m.pack")


def test_changed_pack_is_noticed_while_open(folder: Path, tmp_path: Path) -> None:
    moved(folder, tmp_path, "a.pack", "a.pack.manifest.json")
    with open_checkpoint(tmp_path / "a.pack") as checkpoint:
        os.utime(tmp_path / "a.pack", ns=(1, 1))
        with pytest.raises(FormatError, match="changed while open"):
            checkpoint.check_unchanged()
