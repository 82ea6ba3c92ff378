"""Verification finds every changed byte; a sample finds what it read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pack_models import CONFIG, mixed_types, write_model, write_pack

from edgedsv4.errors import CancelledError, FormatError
from edgedsv4.formats.expert_pack import read_expert_pack
from edgedsv4.formats.expert_pack_manifest import manifest_path
from edgedsv4.formats.gguf import read_gguf
from edgedsv4.runtime.pack_verify import inspect_pack, verify_pack

MATRICES = 3 * CONFIG.num_layers * CONFIG.num_experts


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made")
    write_pack(
        write_model(directory / "m.gguf"), directory / "x", dense_out=directory / "dense.gguf"
    )
    return directory


@pytest.fixture
def pack(made: Path, tmp_path: Path) -> Path:
    """A pack of its own that may be damaged, with the source beside it."""
    for name in ("x", "x.manifest.json", "m.gguf", "dense.gguf"):
        shutil.copy(made / name, tmp_path / name)
    path = manifest_path(tmp_path / "x")
    values = json.loads(path.read_text())
    values["pack_path"] = str(tmp_path / "x")
    values["source"]["path"] = str(tmp_path / "m.gguf")
    path.write_text(json.dumps(values))
    return tmp_path / "x"


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_undamaged_pack_passes(pack: Path) -> None:
    report = verify_pack(pack)
    assert report.checked["matrices"] == MATRICES
    assert report.checked["tensors of the rest"] > 50
    assert report.warnings == ()
    assert report.to_json()["problems"] == []


def test_manifest_may_be_named(pack: Path) -> None:
    assert verify_pack(manifest_path(pack)).checked["matrices"] == MATRICES


def test_companion_passes_as_the_rest(pack: Path) -> None:
    dense = pack.with_name("dense.gguf")
    assert verify_pack(pack, dense=dense).checked == verify_pack(pack).checked


def test_version_2_passes(tmp_path: Path) -> None:
    write_pack(write_model(tmp_path / "m.gguf", mixed_types), tmp_path / "x")
    assert verify_pack(tmp_path / "x").checked["matrices"] == MATRICES


@pytest.mark.parametrize(("layer", "expert", "role"), [(0, 0, 0), (1, 4, 2), (2, 7, 1)])
def test_changed_byte_of_an_expert_is_named(pack: Path, layer: int, expert: int, role: int) -> None:
    with read_expert_pack(pack) as opened:
        offset, nbytes = opened.place(layer, expert, role)
    flip(pack, offset + nbytes // 2)
    name = ("gate", "up", "down")[role]
    with pytest.raises(FormatError, match=f"layer {layer}, expert {expert}, {name}") as caught:
        verify_pack(pack)
    assert caught.value.fault == "checksum"
    assert len(caught.value.problems) == 2  # the matrix, and the whole file


def test_changed_padding_is_found_by_the_digest_of_the_file(pack: Path) -> None:
    with read_expert_pack(pack) as opened:
        layer = opened.layout.layers[0]
        padding = layer.start + layer.payload_bytes
        assert layer.stride > layer.payload_bytes
    flip(pack, padding)
    with pytest.raises(FormatError, match="the file has the SHA-256"):
        verify_pack(pack)


def test_bytes_before_the_experts_are_told(pack: Path) -> None:
    with read_expert_pack(pack) as opened:
        assert opened.header.index_end < opened.header.data_start
        end = opened.header.index_end
    flip(pack, end)
    with pytest.raises(FormatError, match="the file has the SHA-256"):
        verify_pack(pack)


@pytest.mark.parametrize("sampled", [False, True])
def test_changed_index_is_refused(pack: Path, sampled: bool) -> None:
    flip(pack, 176 + 152)  # the digest of a source tensor, which nothing else tells
    with pytest.raises(FormatError, match="index_sha256") as caught:
        verify_pack(pack, sampled=sampled)
    assert caught.value.fault == "mismatch"


def test_changed_tensor_of_the_other_file_is_named(pack: Path) -> None:
    model = pack.with_name("m.gguf")
    with read_gguf(model) as file:
        record = max(
            (r for name, r in file.tensors.items() if "_exps" not in name), key=lambda r: r.nbytes
        )
    flip(model, record.offset + record.nbytes - 3)
    with pytest.raises(FormatError, match=f"tensor {record.name} of .* other bytes"):
        verify_pack(pack)


def test_sample_reads_96_matrices_and_finds_all_changed(pack: Path) -> None:
    with read_expert_pack(pack) as opened:
        start, end = opened.layout.data_start, opened.layout.data_end
    content = np.fromfile(pack, dtype=np.uint8)
    content[start:end] ^= 1
    content.tofile(pack)
    with pytest.raises(FormatError) as caught:
        verify_pack(pack, sampled=True)
    assert len(caught.value.problems) == 64  # the rest is not listed


def test_sample_of_a_small_pack_is_all_of_it(pack: Path) -> None:
    assert verify_pack(pack, sampled=True).checked["matrices"] == MATRICES


def test_progress_reaches_its_totals_and_stop_is_obeyed(pack: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}
    verify_pack(pack, on_progress=lambda what, done, total: seen.update({what: (done, total)}))
    assert set(seen) == {"checking the pack", "checking the rest"}
    assert all(done == total for done, total in seen.values())
    with pytest.raises(CancelledError):
        verify_pack(pack, should_stop=lambda: True)


def test_generation_by_another_rule_is_a_warning(pack: Path) -> None:
    content = bytearray(pack.read_bytes())
    for role in range(3):
        content[176 + role * 328 + 320] ^= 1
    pack.write_bytes(content)
    values = json.loads(manifest_path(pack).read_text())
    with read_expert_pack(pack) as opened:
        values["index_sha256"] = opened.index_sha256()
    manifest_path(pack).write_text(json.dumps(values))
    report = verify_pack(pack, sampled=True)
    assert [w for w in report.warnings if "generation of layer 0, expert 0" in w]


# ---- info


def test_info_says_what_a_token_reads(pack: Path) -> None:
    report = inspect_pack(pack)
    per_expert = 3 * CONFIG.expert_width * CONFIG.hidden_size // 32 * 17
    assert report.bytes_per_expert == per_expert
    assert report.bytes_per_token == per_expert * CONFIG.num_layers * CONFIG.experts_per_token
    assert (report.layers, report.experts, report.top_k) == (3, 8, 3)
    assert report.block_types == ("MXFP4",)
    assert report.dense == pack.with_name("m.gguf")
    assert report.warnings == ()


def test_info_of_a_pack_without_the_rest_says_so(pack: Path) -> None:
    pack.with_name("m.gguf").unlink()
    pack.with_name("dense.gguf").unlink()
    values: dict[str, Any] = json.loads(manifest_path(pack).read_text())
    values["dense"]["path"] = "/nowhere/dense.gguf"
    manifest_path(pack).write_text(json.dumps(values))
    report = inspect_pack(pack)
    assert report.dense is None
    assert report.facts()["rest of the model"] == "not found"
    assert [w for w in report.warnings if "routed experts only" in w]
