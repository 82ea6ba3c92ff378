"""Opening a model: both kinds, their names, warnings and identity, and what is refused."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from changed_files import change_gguf, change_official
from tiny_model import random_tensors, tiny_config, write_gguf, write_official

from edgedsv4.errors import FormatError, UnsupportedModelError
from edgedsv4.formats.checkpoint import attach_draft, open_checkpoint
from edgedsv4.formats.gguf import GgufType, read_gguf
from edgedsv4.formats.gguf_write import GgufWriter
from edgedsv4.formats.metadata import TokenizerSpec

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

CONFIG = tiny_config(compress_ratios=(0, 4), num_hash_layers=1)
DRAFTED = dataclasses.replace(CONFIG, num_draft_layers=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one model in every form."""
    directory = tmp_path_factory.mktemp("models")
    tensors = random_tensors(DRAFTED, seed=5)
    plain = {name: array for name, array in tensors.items() if not name.startswith("mtp.")}
    write_gguf(directory / "plain.gguf", CONFIG, plain, tokenizer=True)
    write_gguf(directory / "drafted.gguf", DRAFTED, tensors)
    write_official(directory / "official", CONFIG, plain, quantised=True)
    write_official(directory / "drafted", DRAFTED, tensors, quantised=True)
    return directory


def shape_of(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(
        config,
        architecture="",
        hc_eps=1.0,
        rms_norm_eps=1.0,
        bos_id=None,
        eos_id=None,
        pad_id=None,
    )


def test_both_kinds_of_the_same_model_have_the_same_configuration(models: Path):
    with open_checkpoint(models / "plain.gguf") as gguf, open_checkpoint(models / "official") as d:
        assert (gguf.kind, d.kind) == ("gguf", "official")
        assert shape_of(gguf.config) == shape_of(d.config) == shape_of(CONFIG)


def test_gguf_takes_name_and_tokenizer_from_its_metadata(models: Path):
    with open_checkpoint(models / "plain.gguf") as checkpoint:
        assert checkpoint.name == "tiny"
        assert isinstance(checkpoint.tokenizer, TokenizerSpec)
        assert checkpoint.warnings == ()


def test_directory_takes_its_own_name_and_tokenizer_file(models: Path, tmp_path: Path):
    target = change_official(models / "official", tmp_path / "Some-Model")
    (target / "tokenizer.json").write_text("{}")
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.name == "Some-Model"
        assert checkpoint.tokenizer == target / "tokenizer.json"


@pytest.mark.parametrize("name", ["drafted.gguf", "official"])
def test_a_model_without_tokenizer_opens_with_a_warning(models: Path, name: str):
    with open_checkpoint(models / name) as checkpoint:
        assert checkpoint.tokenizer is None
        assert "no tokenizer inside: only token ids can be used" in checkpoint.warnings


def test_a_missing_pre_tokenizer_is_announced(models: Path, tmp_path: Path):
    target = tmp_path / "m.gguf"
    change_gguf(models / "plain.gguf", target, metadata={"tokenizer.ggml.pre": None})
    with open_checkpoint(target) as checkpoint:
        assert any("tokenizer.ggml.pre is missing" in text for text in checkpoint.warnings)


@pytest.mark.parametrize("name", ["drafted.gguf", "drafted"])
def test_an_mtp_block_inside_is_counted(models: Path, name: str):
    with open_checkpoint(models / name) as checkpoint:
        assert checkpoint.config.num_draft_layers == 1


def test_an_mtp_block_that_is_only_claimed_is_not_counted(models: Path, tmp_path: Path):
    claims = {"num_nextn_predict_layers": 1}
    target = change_official(models / "official", tmp_path / "m", config=claims)
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.config.num_draft_layers == 0


def test_a_dspark_drafter_is_announced_and_left_out(models: Path, tmp_path: Path):
    def add_stages(tensors):
        for stage in range(3):
            tensors[f"mtp.{stage}.norm.weight"] = tensors["norm.weight"].clone()

    config = {
        "num_nextn_predict_layers": 3,
        "dspark_block_size": 5,
        "compress_ratios": [0, 4, 0, 0, 0],
    }
    target = change_official(models / "drafted", tmp_path / "m", add_stages, config)
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.config.num_draft_layers == 0
        assert any("DSpark drafter" in text and "3 stages" in text for text in checkpoint.warnings)


def test_any_part_of_a_split_set_opens_the_whole(models: Path, tmp_path: Path):
    writer = GgufWriter(tmp_path / "m.gguf", max_tensors=40)
    with read_gguf(models / "plain.gguf") as file:
        for key, value in file.metadata.items():
            writer.add_metadata(key, value, file.value_types[key])
        for name, record in file.tensors.items():
            writer.add_tensor(name, record.shape, record.block_type, record.data())
        names = list(file.tensors)
        parts = writer.write()
    for part in parts:
        with open_checkpoint(part) as checkpoint:
            assert sorted(checkpoint.tensors) == sorted(names)


@pytest.mark.parametrize("name", ["plain.gguf", "official"])
def test_a_copy_has_the_same_identity(models: Path, tmp_path: Path, name: str):
    copy = tmp_path / name
    (shutil.copytree if (models / name).is_dir() else shutil.copy)(models / name, copy)
    with open_checkpoint(models / name) as first, open_checkpoint(copy) as second:
        assert first.identity_sha256 == second.identity_sha256


def test_other_metadata_give_another_identity(models: Path, tmp_path: Path):
    changed = {"deepseek4.expert_weights_scale": (2.5, GgufType.F32)}
    target = change_gguf(models / "plain.gguf", tmp_path / "m.gguf", metadata=changed)
    with open_checkpoint(models / "plain.gguf") as first, open_checkpoint(target) as second:
        assert first.identity_sha256 != second.identity_sha256


def test_other_configuration_gives_another_identity(models: Path, tmp_path: Path):
    changed = {"routed_scaling_factor": 2.5}
    target = change_official(models / "official", tmp_path / "m", config=changed)
    with open_checkpoint(models / "official") as first, open_checkpoint(target) as second:
        assert first.identity_sha256 != second.identity_sha256


@pytest.mark.parametrize(
    ("file_name", "metadata"),
    [
        ("Flash-0731.gguf", {}),
        ("m.gguf", {"general.name": ("DeepSeek V4 Flash 0731", GgufType.STRING)}),
        ("m.gguf", {"tokenizer.chat_template": ("Beyond maximum", GgufType.STRING)}),
        ("m.gguf", {"tokenizer.chat_template": ("for 0731", GgufType.STRING)}),
    ],
    ids=["file-name", "general-name", "template-effort", "template-date"],
)
def test_signs_of_the_0731_release_choose_its_encoding(
    models: Path, tmp_path: Path, file_name: str, metadata: dict[str, tuple[str, GgufType]]
):
    target = change_gguf(models / "plain.gguf", tmp_path / file_name, metadata=metadata)
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.encoding_hint == "v4-0731"


def test_without_such_signs_the_first_encoding_is_chosen(models: Path):
    with open_checkpoint(models / "plain.gguf") as gguf, open_checkpoint(models / "official") as d:
        assert (gguf.encoding_hint, d.encoding_hint) == ("v4", "v4")


def test_template_files_of_a_directory_choose_the_encoding(models: Path, tmp_path: Path):
    target = change_official(models / "official", tmp_path / "m")
    (target / "chat_template.jinja").write_text("{{ 'Beyond maximum' }}")
    with open_checkpoint(target) as checkpoint:
        assert checkpoint.encoding_hint == "v4-0731"


def test_a_sidecar_alone_is_no_model(models: Path, tmp_path: Path):
    def keep_draft(tensors):
        for name in list(tensors):
            if not name.startswith("mtp."):
                del tensors[name]

    target = change_gguf(models / "drafted.gguf", tmp_path / "mtp.gguf", keep_draft)
    with pytest.raises(UnsupportedModelError, match="holds only an MTP block"):
        open_checkpoint(target)


def test_a_ds4_sidecar_can_be_attached(models: Path):
    with (
        open_checkpoint(models / "plain.gguf") as main,
        attach_draft(main, models / "drafted.gguf") as both,
    ):
        assert both.config.num_draft_layers == 1
        assert "mtp.0.e_proj.weight" in both.tensors
        assert both.identity_sha256 != main.identity_sha256


def test_head_mix_of_a_llamacpp_sidecar_does_not_replace_the_models(models: Path, tmp_path: Path):
    sidecar = change_gguf(models / "drafted.gguf", tmp_path / "mtp.gguf", llamacpp_sidecar)
    with open_checkpoint(models / "plain.gguf") as main, attach_draft(main, sidecar) as both:
        own = both.tensors["output_hc_base.weight"]
        draft = both.tensors["blk.2.nextn.hc_head_base.weight"]
        assert own == main.tensors["output_hc_base.weight"]
        assert not np.array_equal(own.data(), draft.data())


def llamacpp_sidecar(tensors) -> None:
    """Keep only the MTP block, under the names that llama.cpp gives it."""
    kept = {}
    for name, tensor in tensors.items():
        if name.startswith("mtp.0.hc_head"):
            kept[name.replace("mtp.0.hc_head", "output_hc")] = tensor
        elif name.startswith("mtp.0."):
            kept[name.replace("mtp.0.", "blk.2.")] = tensor
    (shape, kind, e_proj), (_, _, h_proj) = (
        kept.pop("blk.2.e_proj.weight"),
        kept.pop("blk.2.h_proj.weight"),
    )
    rows, columns = shape
    joined = np.concatenate([p.reshape(rows, -1) for p in (e_proj, h_proj)], axis=1)
    kept["blk.2.nextn.eh_proj.weight"] = ((rows, 2 * columns), kind, np.ascontiguousarray(joined))
    for name in ("enorm", "hnorm"):
        kept[f"blk.2.nextn.{name}.weight"] = kept.pop(f"blk.2.{name}.weight")
    kept["blk.2.nextn.shared_head_norm.weight"] = kept.pop("blk.2.norm.weight")
    tensors.clear()
    tensors.update(kept)


def test_a_model_cannot_serve_as_sidecar(models: Path):
    with (
        open_checkpoint(models / "plain.gguf") as main,
        pytest.raises(FormatError, match="holds no MTP block for a model of 2 layers"),
    ):
        attach_draft(main, models / "plain.gguf")


def test_a_second_mtp_block_is_refused(models: Path):
    with (
        open_checkpoint(models / "drafted.gguf") as main,
        pytest.raises(UnsupportedModelError, match="that has none"),
    ):
        attach_draft(main, models / "drafted.gguf")


def test_a_changed_file_is_noticed(models: Path, tmp_path: Path):
    copy = tmp_path / "m.gguf"
    shutil.copy(models / "plain.gguf", copy)
    with open_checkpoint(copy) as checkpoint:
        os.truncate(copy, 1000)
        with pytest.raises(FormatError, match="changed while open"):
            checkpoint.check_unchanged()


def test_name_that_the_system_refuses(tmp_path: Path):
    with pytest.raises(FormatError, match="cannot be opened: File name too long"):
        open_checkpoint(tmp_path / ("x" * 300))


def test_directory_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(FormatError, match="cannot be opened: Permission denied"):
        open_checkpoint(tmp_path)


def test_missing_path(tmp_path: Path):
    with pytest.raises(FormatError, match="no such file"):
        open_checkpoint(tmp_path / "absent.gguf")


def test_directory_without_configuration(tmp_path: Path):
    with pytest.raises(FormatError, match=r"a directory without config\.json"):
        open_checkpoint(tmp_path)


def test_directory_of_gguf_files_points_at_one(models: Path, tmp_path: Path):
    shutil.copy(models / "plain.gguf", tmp_path / "plain.gguf")
    with pytest.raises(FormatError, match=r"it holds plain\.gguf: name that file"):
        open_checkpoint(tmp_path)


def test_directory_without_weights(models: Path, tmp_path: Path):
    shutil.copy(models / "official" / "config.json", tmp_path / "config.json")
    with pytest.raises(FormatError):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"hello world", b"\0" * 100, b"GGU", b"PK\x03\x04"])
def test_file_of_another_format(tmp_path: Path, content: bytes):
    (tmp_path / "m.bin").write_bytes(content)
    with pytest.raises(FormatError, match="is not a model: expected a GGUF file"):
        open_checkpoint(tmp_path / "m.bin")


def test_empty_file(tmp_path: Path):
    (tmp_path / "m.gguf").touch()
    with pytest.raises(FormatError, match="empty"):
        open_checkpoint(tmp_path / "m.gguf")


def test_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path):
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(FormatError, match="pipe"):
        open_checkpoint(tmp_path / "m.gguf")


def test_single_files_of_an_official_checkpoint_point_at_the_directory(models: Path):
    for name in ("config.json", "model.safetensors"):
        with pytest.raises(FormatError, match="name its directory instead"):
            open_checkpoint(models / "official" / name)


def test_expert_pack_without_its_manifest_is_unfinished(tmp_path: Path):
    (tmp_path / "m.pack").write_bytes(b"SGLANG-EXPERTPACK-v1\0\0\0\0" + bytes(4096))
    with pytest.raises(FormatError, match=r"m.pack.manifest.json: no such file.*unfinished"):
        open_checkpoint(tmp_path / "m.pack")


def test_vocabulary_of_another_size_than_the_embedding(models: Path, tmp_path: Path):
    changed = {"deepseek4.vocab_size": (CONFIG.vocab_size + 1, GgufType.U32)}
    target = change_gguf(models / "plain.gguf", tmp_path / "m.gguf", metadata=changed)
    with pytest.raises(FormatError, match="tokens has 384 entries, the embedding has 385 rows"):
        open_checkpoint(target)
