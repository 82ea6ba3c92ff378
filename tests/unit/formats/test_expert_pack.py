"""Valid packs are read; bytes and places are those of the format, to the bit."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import numpy as np
import pytest
from pack_files import SOURCE, SmallPack, mixed_pack

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.expert_pack import read_expert_pack
from edgedsv4.formats.expert_pack_header import (
    ENTRY_BYTES,
    HEADER_BYTES,
    PackHeader,
    generation,
    is_pack,
    model_identity,
    parse_header,
)
from edgedsv4.formats.expert_pack_index import ENTRY, index_types, make_entry
from edgedsv4.formats.expert_pack_layout import lay_out, least_data_start
from edgedsv4.formats.faults import FaultList

FLASH = PackHeader(
    data_start=10_833_920,
    num_layers=43,
    num_experts=256,
    top_k=6,
    model_identity=bytes(32),
    source_sha256=bytes(32),
    config_sha256=bytes(32),
)


def sha(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


# ---- the bytes that SGLang writes, by their digests


def test_header_has_the_golden_bytes() -> None:
    header = PackHeader(
        data_start=4096,
        num_layers=1,
        num_experts=2,
        top_k=1,
        model_identity=sha(b"model"),
        source_sha256=sha(b"source"),
        config_sha256=sha(b"config"),
    )
    golden = "cff9a233c91c2b0fd1727a14fd860adafe2cf55f20a318a16e7b520e9696cd79"
    assert hashlib.sha256(header.encode()).hexdigest() == golden
    assert len(header.encode()) == HEADER_BYTES


def test_generation_is_the_golden_number() -> None:
    assert generation(sha(b"model"), sha(b"source"), 0, 1) == 17170575877756995336


def test_entry_has_the_golden_bytes() -> None:
    entry = make_entry(
        (0, 1, 2),
        BLOCK_TYPES["MXFP4"],
        (128, 64),
        ("blk.0.ffn_down_exps.weight", "identity-v1"),
        {
            "source_tensor_offset": 4096,
            "source_tensor_nbytes": 8704,
            "source_slice_offset": 8448,
            "source_slice_nbytes": 4352,
            "pack_offset": 29184,
            "pack_nbytes": 4352,
            "generation": 17170575877756995336,
        },
        {
            "source_tensor_sha256": sha(b"t"),
            "source_slice_sha256": sha(b"s"),
            "checksum": sha(b"s"),
        },
    )
    golden = "d96b8cc6110bf3aa68dd86b8370a5ca5058e0de87b4c9a430b27087b984cba7d"
    assert hashlib.sha256(entry.tobytes()).hexdigest() == golden
    assert ENTRY.itemsize == ENTRY_BYTES


def test_model_identity_is_the_digest_of_two_hex_digests() -> None:
    text = f"sglang-deepseek-expert-pack-v1:{SOURCE.hex()}:{sha(b'c').hex()}"
    assert model_identity(SOURCE, sha(b"c")) == sha(text.encode())


@pytest.mark.parametrize(
    ("dims", "role_bytes", "stride", "data_start", "size"),
    [
        ((43, 256, 4096, 2048), 4_456_448, 13_369_344, 10_833_920, 147_180_572_672),
        ((61, 384, 7168, 3072), 11_698_176, 35_094_528, 23_052_288, 822_077_276_160),
        ((40, 384, 5120, 2304), 6_266_880, 18_800_640, 15_118_336, 288_792_948_736),
    ],
    ids=["V4-Flash", "V4-Pro", "V4.1-Flash"],
)
def test_layout_of_released_models(
    dims: tuple[int, ...], role_bytes: int, stride: int, data_start: int, size: int
) -> None:
    layers, experts, hidden, width = dims
    assert width * BLOCK_TYPES["MXFP4"].row_bytes(hidden) == role_bytes
    start = least_data_start(layers, experts, 4096)
    sizes = [(role_bytes, role_bytes, role_bytes)] * layers
    layout = lay_out(sizes, experts, version=1, data_start=start, alignment=4096)
    assert (start, layout.layers[0].stride, layout.data_end) == (data_start, stride, size)
    assert layout.padding_bytes == 0


# ---- reading


def test_header_comes_back() -> None:
    header = SmallPack().header()
    faults = FaultList(Path("x"))
    assert parse_header(header.encode(), 1 << 20, faults) == header
    assert len(faults) == 0


def test_every_matrix_is_where_the_formula_says(tmp_path: Path) -> None:
    made = SmallPack()
    content = made.content()
    with read_expert_pack(made.write(tmp_path / "p")) as pack:
        nbytes = 32 * 34
        stride = -(-3 * nbytes // 512) * 512
        for entry in pack.entries:
            layer, expert, role = (int(entry[name]) for name in ("layer", "expert", "role"))
            offset = pack.header.data_start + (layer * 3 + expert) * stride + role * nbytes
            assert pack.place(layer, expert, role) == (offset, nbytes)
            digest = hashlib.sha256(content[offset : offset + nbytes]).digest()
            assert digest == entry["checksum"].tobytes()
        assert pack.shape.dims(0) == (32, 64)
        assert pack.shape.dims(2) == (64, 32)
        assert pack.frequency is None


def test_version_2_begins_each_matrix_at_64_bytes_and_each_expert_at_the_alignment(
    tmp_path: Path,
) -> None:
    made = SmallPack(version=2, types=[("Q4_0", "MXFP4", "Q8_0"), MIXED_ROW], hidden=32, width=96)
    with read_expert_pack(made.write(tmp_path / "p")) as pack:
        for layer in range(2):
            for expert in range(3):
                places = [pack.place(layer, expert, role) for role in range(3)]
                assert [offset % 64 for offset, _ in places] == [0, 0, 0]
                assert places[0][0] % 512 == 0
                ends = [offset + nbytes for offset, nbytes in places]
                assert ends[0] <= places[1][0]
                assert ends[1] <= places[2][0]
        assert pack.header.flags == 0b1111


MIXED_ROW = ("F32", "F32", "F32")


def test_version_2_holds_mixed_types_and_frequencies(tmp_path: Path) -> None:
    made = mixed_pack()
    with read_expert_pack(made.write(tmp_path / "p")) as pack:
        assert index_types(pack.shape) == ["IQ2_XXS", "Q2_K", "Q4_K"]
        assert pack.frequency is not None
        assert pack.frequency.tokens == 100
        np.testing.assert_array_equal(pack.frequency.counts, [[0, 1, 2], [3, 4, 5]])
        assert [layer.stride for layer in pack.layout.layers] == [
            -(-layer.payload_bytes // 512) * 512 for layer in pack.layout.layers
        ]


def test_version_2_without_differences_has_no_flags_for_them(tmp_path: Path) -> None:
    made = SmallPack(version=2, types=[("Q8_0", "Q8_0", "Q8_0")] * 2)
    with read_expert_pack(made.write(tmp_path / "p")) as pack:
        assert pack.header.flags == 3


@pytest.mark.parametrize("version", [1, 2])
def test_magic_is_known(version: int) -> None:
    assert is_pack(bytes(SmallPack(version=version).content()[:64]))
    assert not is_pack(b"GGUF" + bytes(60))


def test_index_of_v4_flash_is_checked_in_less_than_300_ms(tmp_path: Path) -> None:
    path = tmp_path / "flash"
    write_hollow(path, FLASH)
    best = min(timed_open(path) for _ in range(3))
    assert best < 0.3


def timed_open(path: Path) -> float:
    started = time.perf_counter()
    with read_expert_pack(path) as pack:
        assert len(pack.entries) == 33_024
    return time.perf_counter() - started


def write_hollow(path: Path, header: PackHeader) -> None:
    """A pack with a whole index and nothing but zeros for experts, which take no room on a disk."""
    mxfp4 = BLOCK_TYPES["MXFP4"]
    sizes = [(4_456_448,) * 3] * header.num_layers
    layout = lay_out(
        sizes, header.num_experts, version=1, data_start=header.data_start, alignment=4096
    )
    first = make_entry(
        (0, 0, 0),
        mxfp4,
        (2048, 4096),
        ("blk.0.ffn_gate_exps.weight", "identity-v1"),
        {"source_tensor_nbytes": 4_456_448 * 256, "generation": 7},
        {},
    )
    entries = np.repeat(first, header.index_count)
    number = np.arange(header.index_count)
    role, expert, layer = number % 3, number // 3 % 256, number // 768
    entries["layer"], entries["expert"], entries["role"] = layer, expert, role
    entries["shape"][role == 2, :2] = 2048, 4096
    entries["source_slice_nbytes"] = entries["pack_nbytes"] = 4_456_448
    entries["source_slice_offset"] = expert * 4_456_448
    entries["pack_offset"] = header.data_start + number // 3 * 13_369_344 + role * 4_456_448
    with path.open("wb") as file:
        file.write(header.encode() + entries.tobytes())
        file.truncate(layout.data_end)
