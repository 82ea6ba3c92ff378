"""A pack holds the experts of its source byte for byte, and says what it was made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from changed_files import GgufTensors, change_gguf, change_official
from pack_models import CONFIG, NO_MARGIN, mixed_types, write_model, write_official, write_pack

from edgedsv4.errors import ConfigError, FormatError, UnsupportedModelError
from edgedsv4.formats.expert_pack import ExpertPack, read_expert_pack
from edgedsv4.formats.expert_pack_header import ROLES, generation, model_identity
from edgedsv4.formats.expert_pack_index import field_text
from edgedsv4.formats.expert_pack_inventory import rows_sha256
from edgedsv4.formats.expert_pack_manifest import manifest_path, read_manifest
from edgedsv4.formats.gguf import read_gguf
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime.convert import ConvertOptions, QuantizeOptions, convert_model, quantize_model
from edgedsv4.runtime.pack_build import build_pack
from edgedsv4.runtime.pack_options import PackOptions
from edgedsv4.runtime.shipped_models import open_model


def payload(pack: ExpertPack, layer: int, expert: int, role: int) -> bytes:
    return pack.file.view(*pack.place(layer, expert, role)).tobytes()


def assert_payload_is_that_of(pack: ExpertPack, model: Path) -> None:
    """Every expert of the pack is the slice of the stacked tensor of a GGUF file."""
    with read_gguf(model) as file:
        for layer in range(CONFIG.num_layers):
            for role, name in enumerate(ROLES):
                stack = file.tensors[f"blk.{layer}.ffn_{name}_exps.weight"]
                slices = stack.data().reshape(CONFIG.num_experts, -1)
                for expert in range(CONFIG.num_experts):
                    assert payload(pack, layer, expert, role) == slices[expert].tobytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a.gguf` with MXFP4 experts and its pack `a.pack`."""
    directory = tmp_path_factory.mktemp("packs")
    write_pack(write_model(directory / "a.gguf"), directory / "a.pack")
    return directory


# ---- from a GGUF file


def test_pack_of_mxfp4_experts_is_version_1_and_holds_their_bytes(folder: Path) -> None:
    with read_expert_pack(folder / "a.pack") as pack:
        assert pack.header.version == 1
        assert pack.header.flags == 3
        assert_payload_is_that_of(pack, folder / "a.gguf")


def test_entries_say_where_in_the_source_each_matrix_lies(folder: Path) -> None:
    source = (folder / "a.gguf").read_bytes()
    with read_gguf(folder / "a.gguf") as file, read_expert_pack(folder / "a.pack") as pack:
        for entry in pack.entries:
            record = file.tensors[field_text(entry["tensor_name"])]
            assert entry["source_tensor_offset"] == record.offset
            assert entry["source_tensor_nbytes"] == record.nbytes
            assert hashlib.sha256(record.data()).digest() == entry["source_tensor_sha256"].tobytes()
            start, nbytes = int(entry["source_slice_offset"]), int(entry["source_slice_nbytes"])
            digest = hashlib.sha256(source[start : start + nbytes]).digest()
            assert digest == entry["source_slice_sha256"].tobytes()


def test_digests_follow_from_the_source(folder: Path) -> None:
    source = hashlib.sha256((folder / "a.gguf").read_bytes()).digest()
    with read_expert_pack(folder / "a.pack") as pack:
        assert pack.header.source_sha256 == source
        identity = model_identity(source, pack.header.config_sha256)
        assert pack.header.model_identity == identity
        for entry in pack.entries:
            expected = generation(identity, source, int(entry["layer"]), int(entry["expert"]))
            assert entry["generation"] == expected


def test_manifest_has_every_key_with_what_is_true(folder: Path) -> None:
    path = manifest_path(folder / "a.pack")
    text = path.read_text(encoding="utf-8")
    values = json.loads(text)
    assert text == json.dumps(values, indent=2, sort_keys=True) + "\n"
    content = (folder / "a.pack").read_bytes()
    source = (folder / "a.gguf").read_bytes()
    with read_gguf(folder / "a.gguf") as file:
        data_offset, names = file.data_offset, set(file.tensors)
        small = file.tensors["output_norm.weight"]
        small_digest = hashlib.sha256(small.data()).hexdigest()
    assert values["pack_size"] == len(content)
    assert values["pack_sha256"] == hashlib.sha256(content).hexdigest()
    index_end = 176 + 328 * values["index_count"]
    assert values["index_sha256"] == hashlib.sha256(content[176:index_end]).hexdigest()
    assert values["pack_path"] == str((folder / "a.pack").resolve())
    assert values["source"]["sha256"] == hashlib.sha256(source).hexdigest()
    header = hashlib.sha256(source[:data_offset]).hexdigest()
    assert values["source"]["gguf_metadata_sha256"] == header
    assert values["source"]["path"] == str((folder / "a.gguf").resolve())
    assert {tensor["name"] for tensor in values["tensors"]} == names
    norm = next(t for t in values["tensors"] if t["name"] == "output_norm.weight")
    assert norm["source_payload_sha256"] == small_digest
    assert (norm["category"], norm["mapping"]) == ("non_routed", "gguf_direct_identity")
    assert values["coverage"]["routed_tensor_count"] == 3 * CONFIG.num_layers
    assert set(values["model"]) == {
        *("ref", "model_identity_sha256", "config_sha256", "num_layers", "num_routed_experts"),
        *("top_k", "single_gpu"),
    }
    wanted = {
        *("format", "version", "complete", "created_at", "layout", "role_order", "alignment"),
        *("header_bytes", "index_entry_bytes", "index_count", "data_start", "pack_path"),
        *("pack_size", "pack_sha256", "index_sha256", "object_count", "object_payload_bytes"),
        *("object_stride", "role_bytes", "payload_bytes", "padding_bytes", "model", "source"),
        *("coverage", "transform", "builder", "tensors"),
    }
    assert set(values) == wanted


def test_inventory_has_a_line_for_each_tensor_and_its_digest(folder: Path) -> None:
    lines = (folder / "a.pack.inventory.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    with read_gguf(folder / "a.gguf") as file:
        assert [row["name"] for row in rows[1:-1]] == list(file.tensors)
        for row in rows[1:-1]:
            record = file.tensors[row["name"]]
            assert row["sha256"] == hashlib.sha256(record.data()).hexdigest()
            assert (row["offset"], row["nbytes"]) == (record.offset, record.nbytes)
    assert rows[-1]["inventory_sha256"] == rows_sha256(lines[1:-1])


def test_nothing_else_is_left_beside_the_pack(tmp_path: Path, folder: Path) -> None:
    write_pack(folder / "a.gguf", tmp_path / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "x",
        "x.inventory.jsonl",
        "x.manifest.json",
    ]


def test_other_types_make_version_2_with_their_bytes(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", mixed_types)
    report = write_pack(model, tmp_path / "m.pack")
    assert report.version == 2
    assert set(report.block_types) == {"Q8_0", "Q4_0", "Q5_0"}
    with read_expert_pack(tmp_path / "m.pack") as pack:
        assert pack.header.flags == 0b1111
        assert_payload_is_that_of(pack, model)
    assert read_manifest(manifest_path(tmp_path / "m.pack")).format == "EDGEDSV4-XPACK-2"


def test_uniform_type_other_than_mxfp4_makes_version_2(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", "f32")
    assert write_pack(model, tmp_path / "m.pack").version == 2
    with read_expert_pack(tmp_path / "m.pack") as pack:
        assert pack.header.flags == 3
        assert_payload_is_that_of(pack, model)


def test_split_set_is_packed_with_the_digests_of_all_parts(tmp_path: Path, folder: Path) -> None:
    split = quantize_model(
        folder / "a.gguf", tmp_path / "s.gguf", QuantizeOptions(split_max_bytes=200_000)
    )
    assert len(split.files) > 1
    write_pack(split.files[1], tmp_path / "s.pack")
    values = json.loads(manifest_path(tmp_path / "s.pack").read_text(encoding="utf-8"))
    lines = ""
    for part, path in zip(values["source"]["files"], split.files, strict=True):
        assert part["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        lines += f"{part['sha256']}  {path.name}\n"
    assert values["source"]["sha256"] == hashlib.sha256(lines.encode()).hexdigest()
    with read_expert_pack(tmp_path / "s.pack") as pack:
        assert_payload_is_that_of(pack, folder / "a.gguf")


def fuse_gate_and_up(tensors: GgufTensors) -> None:
    """One stack with the rows of both matrices, as some converters write it."""
    for layer in range(CONFIG.num_layers):
        (shape, kind, gate), (_, _, up) = (
            tensors.pop(f"blk.{layer}.ffn_{name}_exps.weight") for name in ("gate", "up")
        )
        count, rows, columns = shape
        parts = [half.reshape(count, -1) for half in (gate, up)]
        fused = np.ascontiguousarray(np.concatenate(parts, axis=1))
        name = f"blk.{layer}.ffn_gate_up_exps.weight"
        tensors[name] = (count, 2 * rows, columns), kind, fused


def test_matrices_stored_as_one_are_packed_apart(tmp_path: Path, folder: Path) -> None:
    model = change_gguf(folder / "a.gguf", tmp_path / "m.gguf", fuse_gate_and_up)
    write_pack(model, tmp_path / "x")
    with read_expert_pack(tmp_path / "x") as pack:
        assert_payload_is_that_of(pack, folder / "a.gguf")
        assert pack.entries["source_tensor_offset"][0] == 0
    with open_model(tmp_path / "x") as checkpoint:
        assert "blk.0.ffn_gate_up_exps.weight" not in checkpoint.tensors
        assert bind_weights(checkpoint).warnings == ()


def test_experts_of_an_mtp_block_stay_outside(tmp_path: Path) -> None:
    config = replace(CONFIG, num_draft_layers=1)
    model = write_model(tmp_path / "m.gguf", config=config)
    report = write_pack(model, tmp_path / "m.pack")
    assert report.layers == CONFIG.num_layers
    with open_model(tmp_path / "m.pack") as checkpoint:
        assert "mtp.0.ffn_gate_exps.weight" in checkpoint.tensors


def test_pack_replaces_an_older_one(tmp_path: Path, folder: Path) -> None:
    write_pack(write_model(tmp_path / "m.gguf", seed=9), tmp_path / "x")
    before = (tmp_path / "x").read_bytes()
    write_pack(folder / "a.gguf", tmp_path / "x")
    assert (tmp_path / "x").read_bytes() != before
    with open_model(tmp_path / "x") as checkpoint:
        assert checkpoint.warnings == ()


def test_alignment_is_kept(tmp_path: Path, folder: Path) -> None:
    write_pack(folder / "a.gguf", tmp_path / "x", alignment=1 << 16)
    with read_expert_pack(tmp_path / "x") as pack:
        assert all(layer.start % (1 << 16) == 0 for layer in pack.layout.layers)
        assert all(layer.stride % (1 << 16) == 0 for layer in pack.layout.layers)
        assert_payload_is_that_of(pack, folder / "a.gguf")


# ---- from an official checkpoint


def reference_blocks(codes: torch.Tensor, scales: torch.Tensor) -> bytes:
    """MXFP4 blocks of packed FP4, one group at a time, from the definition."""
    out = bytearray()
    packed, powers = codes.view(torch.uint8).tolist(), scales.view(torch.uint8).tolist()
    for row, exponents in zip(packed, powers, strict=True):
        elements = [nibble for byte in row for nibble in (byte & 15, byte >> 4)]
        for group, exponent in enumerate(exponents):
            own = elements[32 * group : 32 * group + 32]
            out.append(exponent)
            out += bytes(own[j] | own[j + 16] << 4 for j in range(16))
    return bytes(out)


def test_packed_fp4_becomes_mxfp4_bit_for_bit(tmp_path: Path) -> None:
    import safetensors.torch

    official = write_official(tmp_path / "official")
    assert write_pack(official, tmp_path / "x").version == 1
    stored = safetensors.torch.load_file(official / "model.safetensors")
    with read_expert_pack(tmp_path / "x") as pack:
        for layer, expert in ((0, 0), (1, 5), (2, 7)):
            for role, name in enumerate(("w1", "w3", "w2")):
                stem = f"layers.{layer}.ffn.experts.{expert}.{name}"
                expected = reference_blocks(stored[f"{stem}.weight"], stored[f"{stem}.scale"])
                assert payload(pack, layer, expert, role) == expected


def test_codes_in_order_make_the_golden_block(tmp_path: Path) -> None:
    stem = "layers.0.ffn.experts.0.w1"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        row = bytes.fromhex("1032547698badcfe1032547698badcfe")
        codes = tensors[f"{stem}.weight"].view(torch.uint8)
        codes[0, :16] = torch.tensor(list(row), dtype=torch.uint8)
        tensors[f"{stem}.scale"].view(torch.uint8)[0, 0] = 0x7F

    official = change_official(write_official(tmp_path / "a"), tmp_path / "b", edit)
    write_pack(official, tmp_path / "x")
    with read_expert_pack(tmp_path / "x") as pack:
        block = payload(pack, 0, 0, 0)[:17]
    assert block.hex() == "7f00112233445566778899aabbccddeeff"


def test_pack_of_an_official_checkpoint_is_that_of_its_conversion(tmp_path: Path) -> None:
    official = write_official(tmp_path / "official")
    convert_model(official, tmp_path / "m.gguf", ConvertOptions(mtp="none"))
    write_pack(official, tmp_path / "x")
    with read_expert_pack(tmp_path / "x") as pack:
        assert_payload_is_that_of(pack, tmp_path / "m.gguf")


def test_fields_without_a_source_tensor_count_from_0(tmp_path: Path) -> None:
    write_pack(write_official(tmp_path / "official"), tmp_path / "x")
    with read_expert_pack(tmp_path / "x") as pack:
        entry = pack.entries[3 * 4 + 1]
        assert entry["source_tensor_offset"] == 0
        assert entry["source_slice_offset"] == 4 * entry["source_slice_nbytes"]
        assert field_text(entry["tensor_name"]) == "blk.0.ffn_up_exps.weight"
        stack = b"".join(payload(pack, 0, expert, 1) for expert in range(CONFIG.num_experts))
        assert hashlib.sha256(stack).digest() == entry["source_tensor_sha256"].tobytes()


def test_companion_of_an_official_checkpoint_is_its_conversion_without_the_experts(
    tmp_path: Path,
) -> None:
    official = write_official(tmp_path / "official")
    convert_model(official, tmp_path / "m.gguf")
    report = write_pack(official, tmp_path / "x", dense_out=tmp_path / "dense.gguf")
    assert report.dense == tmp_path / "dense.gguf"
    with read_gguf(tmp_path / "m.gguf") as whole, read_gguf(tmp_path / "dense.gguf") as dense:
        kept = {name for name in whole.tensors if "_exps" not in name}
        assert set(dense.tensors) == kept
        for name in kept:
            assert dense.tensors[name].data().tobytes() == whole.tensors[name].data().tobytes()
        assert dense.metadata.keys() == whole.metadata.keys()
    digest = hashlib.sha256((tmp_path / "dense.gguf").read_bytes()).digest()
    with read_expert_pack(tmp_path / "x") as pack:
        assert pack.header.source_sha256 == digest


def test_companion_of_a_gguf_file_is_a_copy_without_the_experts(
    tmp_path: Path, folder: Path
) -> None:
    write_pack(folder / "a.gguf", tmp_path / "x", dense_out=tmp_path / "dense.gguf")
    with read_gguf(folder / "a.gguf") as whole, read_gguf(tmp_path / "dense.gguf") as dense:
        assert set(dense.tensors) == {name for name in whole.tensors if "_exps" not in name}
        for name, record in dense.tensors.items():
            assert record.data().tobytes() == whole.tensors[name].data().tobytes()
        for key, value in whole.metadata.items():
            assert np.array_equal(dense.metadata[key], value), key
            assert dense.value_types[key] == whole.value_types[key]
    with read_expert_pack(tmp_path / "x") as pack:
        whole_digest = hashlib.sha256((folder / "a.gguf").read_bytes()).digest()
        assert pack.header.source_sha256 == whole_digest


# ---- frequencies


def test_frequencies_are_put_into_version_2(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", mixed_types)
    counts = [[n + 8 * layer for n in range(8)] for layer in range(3)]
    table = tmp_path / "freq.json"
    table.write_text(json.dumps({"tokens": 50, "counts": counts, "corpus": "c"}))
    write_pack(model, tmp_path / "x", frequency=table)
    with read_expert_pack(tmp_path / "x") as pack:
        assert pack.frequency is not None
        assert pack.frequency.counts.tolist() == counts
    assert read_manifest(manifest_path(tmp_path / "x")).pack_size == (tmp_path / "x").stat().st_size


def test_frequencies_of_another_model_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m.gguf", mixed_types)
    table = tmp_path / "freq.json"
    table.write_text(json.dumps({"tokens": 50, "counts": [[1]]}))
    with pytest.raises(FormatError, match="counts of 3 layers"):
        write_pack(model, tmp_path / "x", frequency=table)


def test_frequencies_have_no_place_in_version_1(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="version 2 packs only"):
        write_pack(folder / "a.gguf", tmp_path / "x", frequency=tmp_path / "freq.json")


# ---- what is refused


def nan_scale(source: Path, target: Path) -> Path:
    """A copy whose layer 1, expert 2, up matrix, row 3 has an E8M0 scale of 255."""
    content = bytearray(source.read_bytes())
    with read_gguf(source) as file:
        record = file.tensors["blk.1.ffn_up_exps.weight"]
        per_expert = record.nbytes // CONFIG.num_experts
        row = record.block_type.row_bytes(record.shape[-1])
        content[record.offset + 2 * per_expert + 3 * row] = 0xFF
    target.write_bytes(content)
    return target


def test_scale_of_nan_in_a_gguf_file_is_refused(folder: Path, tmp_path: Path) -> None:
    model = nan_scale(folder / "a.gguf", tmp_path / "bad.gguf")
    rows = 2 * CONFIG.expert_width + 3
    with pytest.raises(FormatError, match=rf"blk.1.ffn_up_exps.weight, row {rows}, block 0.*NaN"):
        write_pack(model, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_scale_of_nan_in_an_official_checkpoint_is_refused(tmp_path: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.2.ffn.experts.1.w2.scale"].view(torch.uint8)[4, 1] = 0xFF

    official = change_official(write_official(tmp_path / "a"), tmp_path / "b", edit)
    with pytest.raises(FormatError, match=r"layers.2.ffn.experts.1.w2.weight, row 4.*NaN"):
        write_pack(official, tmp_path / "x")


def test_experts_that_gguf_has_no_type_for_are_refused(tmp_path: Path) -> None:
    official = write_official(tmp_path / "a")

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n and n.endswith(".weight")]:
            rows, columns = tensors[name].shape
            scale = name.replace(".weight", ".scale")
            tensors[name] = torch.zeros(rows, 2 * columns).to(torch.float8_e4m3fn)
            ones = torch.full((-(-rows // 128), -(-2 * columns // 128)), 127, dtype=torch.uint8)
            tensors[scale] = ones.view(torch.float8_e8m0fnu)

    change_official(official, tmp_path / "b", edit)
    with pytest.raises(UnsupportedModelError, match="FP8_E4M3 cannot be packed without rounding"):
        write_pack(tmp_path / "b", tmp_path / "x")


def test_pack_of_a_pack_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an expert pack already"):
        write_pack(folder / "a.pack", tmp_path / "x")


def test_target_that_is_the_source_is_refused(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes((folder / "a.gguf").read_bytes())
    with pytest.raises(ConfigError, match="the source itself"):
        build_pack(model, model, NO_MARGIN)
    assert model.read_bytes() == (folder / "a.gguf").read_bytes()


def test_target_in_no_directory_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        build_pack(folder / "a.gguf", tmp_path / "none" / "x", NO_MARGIN)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PackOptions(alignment=2048),
        lambda: PackOptions(alignment=6000),
        lambda: PackOptions(alignment=1 << 21),
        lambda: PackOptions(safety_margin_bytes=-1),
        lambda: PackOptions(fp8="Q4_0"),  # type: ignore[arg-type]
        lambda: PackOptions(mtp="both"),  # type: ignore[arg-type]
    ],
)
def test_option_out_of_range_is_refused(make: Callable[[], PackOptions]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        make()
