"""Manifests: which one goes with a pack, and what is wrong with one that does not."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pack_files import SmallPack, mixed_pack

from edgedsv4.errors import FormatError
from edgedsv4.formats.expert_pack import read_expert_pack
from edgedsv4.formats.expert_pack_header import FORMATS
from edgedsv4.formats.expert_pack_manifest import (
    MAX_MANIFEST_BYTES,
    check_manifest,
    header_numbers,
    manifest_path,
    read_manifest,
)
from edgedsv4.formats.expert_pack_model import locate_pack

Edit = Callable[[dict[str, Any]], None]
DIGEST = "ab" * 32


def values_of(made: SmallPack, path: Path) -> dict[str, Any]:
    """The manifest of a pack, in the words of the format's description."""
    header, content = made.header(), made.content()
    numbers = header_numbers(header)
    model = {name: numbers.pop(name) for name in ("num_layers", "num_routed_experts", "top_k")}
    tensor = {
        "name": "output_norm.weight",
        "shape": [64],
        "type": "F32",
        "type_id": 0,
        "source_offset": 4096,
        "source_nbytes": 256,
        "source_payload_sha256": DIGEST,
        "category": "non_routed",
        "mapping": "gguf_direct_identity",
        "scale_storage": "tensor_native",
    }
    return numbers | {
        "format": FORMATS[header.version],
        "complete": True,
        "role_order": ["gate", "up", "down"],
        "pack_path": str(path.resolve()),
        "pack_size": len(content),
        "pack_sha256": hashlib.sha256(content).hexdigest(),
        "index_sha256": hashlib.sha256(content[176 : header.index_end]).hexdigest(),
        "payload_bytes": made.layout().payload_bytes,
        "model": model
        | {
            "ref": "m",
            "model_identity_sha256": header.model_identity.hex(),
            "config_sha256": header.config_sha256.hex(),
            "single_gpu": True,
        },
        "source": {
            "path": "/models/m.gguf",
            "size": 12345,
            "sha256": header.source_sha256.hex(),
        },
        "tensors": [tensor],
    }


def written(path: Path, made: SmallPack, edit: Edit | None = None) -> Path:
    """A pack and its manifest."""
    made.write(path)
    values = values_of(made, path)
    if edit is not None:
        edit(values)
    manifest_path(path).write_text(json.dumps(values), encoding="utf-8")
    return path


def checked(path: Path) -> tuple[str, ...]:
    place, manifest = locate_pack(path)
    with read_expert_pack(place) as pack:
        return check_manifest(manifest, pack)


@pytest.mark.parametrize("make", [SmallPack, mixed_pack])
def test_manifest_that_goes_with_its_pack_is_accepted(
    tmp_path: Path, make: Callable[[], SmallPack]
) -> None:
    assert checked(written(tmp_path / "x", make())) == ()


def test_tensors_of_the_other_file_are_read(tmp_path: Path) -> None:
    path = written(
        tmp_path / "x",
        SmallPack(),
        lambda v: v["tensors"].append(
            {**v["tensors"][0], "name": "blk.0.ffn_up_exps.weight", "category": "routed_expert"}
        ),
    )
    (tensor,) = read_manifest(manifest_path(path)).tensors
    assert (tensor.name, tensor.shape, tensor.nbytes) == ("output_norm.weight", (64,), 256)


def test_early_manifest_without_an_identity_is_accepted(tmp_path: Path) -> None:
    def edit(values: dict[str, Any]) -> None:
        del values["model"]["model_identity_sha256"]
        values["model"]["ollama_manifest_sha256"] = DIGEST

    assert checked(written(tmp_path / "x", SmallPack(), edit)) == ()


def test_moved_pack_is_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path / "x", SmallPack(), lambda v: v.update(pack_path="/elsewhere/x"))
    assert checked(path) == ("x.manifest.json names /elsewhere/x: the expert pack was moved",)


def test_absent_manifest_is_told(tmp_path: Path) -> None:
    SmallPack().write(tmp_path / "x")
    with pytest.raises(FormatError, match=r"x\.manifest\.json: no such file") as caught:
        checked(tmp_path / "x")
    assert caught.value.fault == "missing"


def test_manifest_whose_pack_is_gone_is_told(tmp_path: Path) -> None:
    path = written(tmp_path / "x", SmallPack())
    path.unlink()
    with pytest.raises(FormatError, match="its expert pack is not there") as caught:
        checked(manifest_path(path))
    assert caught.value.fault == "missing"


MISMATCHES: dict[str, tuple[Edit, str]] = {
    "size": (lambda v: v.update(pack_size=1), "size is .*its manifest says 1"),
    "index digest": (lambda v: v.update(index_sha256=DIGEST), f"index_sha256 is .*{DIGEST}"),
    "layers": (lambda v: v["model"].update(num_layers=3), "num_layers is 2"),
    "experts": (lambda v: v["model"].update(num_routed_experts=4), "num_routed_experts is 3"),
    "top_k": (lambda v: v["model"].update(top_k=1), "top_k is 2"),
    "alignment": (lambda v: v.update(alignment=4096), "alignment is 512"),
    "data_start": (lambda v: v.update(data_start=4096), "data_start is 6144"),
    "index count": (lambda v: v.update(index_count=1), "index_count is 18"),
    "payload": (lambda v: v.update(payload_bytes=1), "payload_bytes is"),
    "format": (lambda v: v.update(format="EDGEDSV4-XPACK-2"), "format is SGLANG"),
    "identity": (
        lambda v: v["model"].update(model_identity_sha256=DIGEST),
        "model_identity_sha256 is",
    ),
    "source": (lambda v: v["source"].update(sha256=DIGEST), "source_sha256 is"),
    "configuration": (lambda v: v["model"].update(config_sha256=DIGEST), "config_sha256 is"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_manifest_of_another_pack_is_refused(tmp_path: Path, name: str) -> None:
    edit, words = MISMATCHES[name]
    path = written(tmp_path / "x", SmallPack(), edit)
    with pytest.raises(FormatError, match=words) as caught:
        checked(path)
    assert caught.value.fault == "mismatch"


def test_all_differences_are_listed(tmp_path: Path) -> None:
    path = written(tmp_path / "x", SmallPack(), lambda v: v.update(pack_size=1, alignment=1))
    with pytest.raises(FormatError) as caught:
        checked(path)
    assert len(caught.value.problems) == 2


DAMAGES: dict[str, tuple[Edit, str]] = {
    "unfinished": (lambda v: v.update(complete=False), "the build of the expert pack did not end"),
    "unknown format": (lambda v: v.update(format="x"), "format is 'x', expected SGLANG"),
    "order of roles": (lambda v: v.update(role_order=["up", "gate", "down"]), "role_order is"),
    "size as text": (lambda v: v.update(pack_size="1"), "pack_size must be an integer"),
    "size as bool": (lambda v: v.update(pack_size=True), "pack_size must be an integer"),
    "size 2^64": (lambda v: v.update(pack_size=1 << 64), "pack_size must be an integer"),
    "negative size": (lambda v: v.update(pack_size=-1), "pack_size must be an integer"),
    "digest too short": (lambda v: v.update(pack_sha256="ab"), "pack_sha256 must be a SHA-256"),
    "digest not hex": (lambda v: v.update(index_sha256="x" * 64), "must be a SHA-256 in hex"),
    "model as list": (lambda v: v.update(model=[]), "model must be an object"),
    "source missing": (lambda v: v.pop("source"), "source must be an object"),
    "source path empty": (lambda v: v["source"].update(path=""), "path must be a text"),
    "path with NUL": (lambda v: v.update(pack_path="a\0b"), "pack_path must be a text"),
    "no tensors": (lambda v: v.pop("tensors"), "tensors must be a list"),
    "tensor as text": (lambda v: v.update(tensors=["x"]), r"tensors\[0\] is no object"),
    "tensor without name": (lambda v: v["tensors"][0].pop("name"), "name must be a text"),
    "tensor of unknown type": (
        lambda v: v["tensors"][0].update(type="Q9"),
        "unknown type 'Q9'",
    ),
    "tensor with a bad shape": (
        lambda v: v["tensors"][0].update(shape=["64"]),
        r"has the shape \['64'\]",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_manifest_is_refused(tmp_path: Path, name: str) -> None:
    edit, words = DAMAGES[name]
    path = written(tmp_path / "x", SmallPack(), edit)
    with pytest.raises(FormatError, match=words) as caught:
        checked(path)
    assert caught.value.path == manifest_path(path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100_000, "\udcff", '{"a": 1e999}'],
    ids=["empty", "cut", "list", "number", "twice", "NaN", "deep", "not UTF-8", "infinite"],
)
def test_manifest_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    path = SmallPack().write(tmp_path / "x")
    manifest_path(path).write_bytes(text.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(FormatError):
        checked(path)


def test_manifest_of_many_small_values_takes_no_memory(tmp_path: Path) -> None:
    path = SmallPack().write(tmp_path / "x")
    manifest_path(path).write_bytes(b'{"a": [' + b"[]," * 1_300_000 + b"[]]}")
    size = manifest_path(path).stat().st_size
    assert size < MAX_MANIFEST_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="more than 262,144 values"):
            read_manifest(manifest_path(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size + (64 << 20)


def test_largest_manifest_that_is_parsed_stays_in_bounds(tmp_path: Path) -> None:
    path = SmallPack().write(tmp_path / "x")
    text = '{"\U0001f315": [' + ",".join(["{}"] * 131_000) + "]}"
    manifest_path(path).write_text(text + " " * 3_000_000, encoding="utf-8")
    size = manifest_path(path).stat().st_size
    assert 3_000_000 < size < MAX_MANIFEST_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match="faults"):
            read_manifest(manifest_path(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size + (64 << 20)


def test_huge_manifest_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = SmallPack().write(tmp_path / "x")
    with manifest_path(path).open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    with pytest.raises(FormatError, match="expected at most"):
        checked(path)
