"""What kind of fault an error about a file names, for callers that react to it."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import gguf_bytes as gb
import numpy as np
import pytest
from gguf_refusal import refusal, with_tensors
from safetensors.numpy import save_file
from tiny_files import write_gguf
from tiny_model import random_tensors, tiny_config

from edgedsv4.errors import FormatError
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.formats.gguf import read_gguf
from edgedsv4.formats.logit_file import read_logits
from edgedsv4.formats.mapped_file import MappedFile
from edgedsv4.formats.safetensors import read_safetensors, read_safetensors_index


def fault_of(read: Callable[[Path], object], path: Path) -> str:
    """The kind of the fault that reading raises."""
    with pytest.raises(FormatError) as caught:
        read(path)
    return caught.value.fault


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    config = tiny_config()
    write_gguf(path, config, random_tensors(config, seed=1))
    return path


@pytest.mark.parametrize("read", [MappedFile.open, open_checkpoint, read_gguf, read_safetensors])
def test_a_file_that_is_not_there_is_missing(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    assert fault_of(read, tmp_path / "none") == "missing"


def test_a_directory_without_weights_is_missing_them(tmp_path: Path) -> None:
    assert fault_of(read_safetensors_index, tmp_path) == "missing"


def test_a_checkpoint_without_its_configuration_misses_it(tmp_path: Path) -> None:
    save_file({"x": np.zeros(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    assert fault_of(open_checkpoint, tmp_path) == "missing"


def test_a_shard_that_is_not_there_is_missing(tmp_path: Path) -> None:
    index = '{"weight_map": {"x": "model-00001-of-00001.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    assert fault_of(read_safetensors_index, tmp_path) == "missing"


def test_saved_logits_that_are_not_there_are_missing(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        with read_logits(path):
            pass

    assert fault_of(read, tmp_path / "none") == "missing"


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.01, 0.1, 0.5, 0.999])
def test_a_model_file_that_ends_early_is_truncated(
    model: Path, tmp_path: Path, share: float
) -> None:
    path = tmp_path / "cut.gguf"
    data = model.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert fault_of(open_checkpoint, path) == "truncated"


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_safetensors_file_that_ends_early_is_truncated(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"x": np.zeros(64, dtype=np.float32)}, path)
    os.truncate(path, kept if kept >= 0 else path.stat().st_size - 1)
    assert fault_of(read_safetensors, path) == "truncated"


def test_a_tensor_past_the_end_that_overlaps_another_is_of_the_wrong_format(
    tmp_path: Path,
) -> None:
    tensors = with_tensors(gb.tensor("a", [8], 0, 0), gb.tensor("b", [1 << 20], 0, 0))
    assert refusal(tmp_path, tensors).fault == "format"


def test_a_file_of_another_kind_is_of_the_wrong_format(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"P" * 100)
    assert fault_of(open_checkpoint, path) == "format"


def test_a_wrong_checksum_of_saved_logits_is_told(tmp_path: Path) -> None:
    def read(path: Path) -> None:
        with read_logits(path):
            pass

    path = tmp_path / "logits.npz"
    np.savez(path, header=np.zeros(4, dtype="<i8"), token_ids=np.zeros(1), log_probs=np.zeros(1))
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo("header.npy").header_offset
    data = bytearray(path.read_bytes())
    data[data.index(b"NUMPY", start) + 127] ^= 1
    path.write_bytes(data)
    assert fault_of(read, path) == "checksum"
