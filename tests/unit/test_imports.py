"""What importing the package costs and needs; each case in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import edgedsv4

ROOT = Path(__file__).resolve().parents[2]
ABSENT = "import sys; sys.modules.update(dict.fromkeys({names!r})); {code}"
TORCH_FREE = [
    "edgedsv4",
    "edgedsv4.cli",
    "edgedsv4.cli.docs",
    "edgedsv4.formats.checkpoint",
    "edgedsv4.formats.gguf_write",
    "edgedsv4.text.prompt",
    "edgedsv4.text.reply",
    "edgedsv4.text.tokenizer",
    "edgedsv4.model.layer_plan",
    "edgedsv4.model.weight_table",
    "edgedsv4.runtime.inspection",
    "edgedsv4.runtime.links",
    "edgedsv4.runtime.memory_plan",
    "edgedsv4.runtime.random_model",
    "edgedsv4.runtime.route_replay",
    "edgedsv4.runtime.scoring",
    "edgedsv4.runtime.shipped_models",
    "edgedsv4.runtime.tier_report",
]


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("module", TORCH_FREE)
def test_module_imports_without_torch(module: str) -> None:
    names = ["torch", "triton", "textual", "transformers", "gguf", "safetensors"]
    done = python(ABSENT.format(names=names, code=f"import {module}"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_engine_imports_without_triton_and_textual() -> None:
    names = ["triton", "textual", "transformers", "gguf", "safetensors"]
    done = python(ABSENT.format(names=names, code="from edgedsv4 import Engine"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_prints_nothing_and_reads_no_environment() -> None:
    code = (
        "import os, collections.abc\n"
        "class Watched(dict):\n"
        "    def get(self, *a): raise SystemExit(f'read {a}')\n"
        "    __getitem__ = __contains__ = get\n"
        "os.environ = Watched(); os.getenv = os.environ.get\n"
        "import edgedsv4, edgedsv4.config, edgedsv4.errors, edgedsv4.cli\n"
    )
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_package_and_command_load_neither_numpy_nor_tokenizers() -> None:
    code = (
        "import sys, edgedsv4.cli.commands\n"
        "edgedsv4.cli.commands.build_parser()\n"
        "print(sorted({'numpy', 'torch', 'tokenizers', 'cffi'} & set(sys.modules)))"
    )
    assert python(code).stdout == "[]\n"


@pytest.mark.parametrize("name", edgedsv4.__all__)
def test_public_name_exists(name: str) -> None:
    assert getattr(edgedsv4, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        edgedsv4.Motor  # noqa: B018


def test_public_names_are_listed_once() -> None:
    assert sorted(set(edgedsv4.__all__)) == sorted(edgedsv4.__all__)
    assert set(edgedsv4.__all__) <= set(dir(edgedsv4))
