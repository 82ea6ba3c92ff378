"""How tests check that a broken GGUF file is refused: the one error, its place and its message."""

import re
from pathlib import Path

import gguf_bytes as gb
import pytest

from edgedsv4.errors import FormatError
from edgedsv4.formats.gguf import read_gguf

U64_MAX = (1 << 64) - 1
INVALID_UTF8 = [
    pytest.param(b"ab\xff", 2, id="stray_byte"),
    pytest.param(b"a\xc3", 1, id="cut_character"),
    pytest.param(b"\xc0\x80", 0, id="overlong_nul"),
    pytest.param(b"x\xed\xa0\x80", 1, id="surrogate"),
    pytest.param(b"\xf4\x90\x80\x80", 0, id="past_unicode"),
]


def refusal(path: Path, content: bytes | gb.Gguf) -> FormatError:
    """The error that reading `content` raises; any other exception fails the test."""
    path = path / "model.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.to_bytes())
    with pytest.raises(FormatError) as caught:
        read_gguf(path)
    assert caught.value.path == path
    assert str(path) in str(caught.value)
    return caught.value


def check(path: Path, content: bytes | gb.Gguf, message: str, offset: int | None) -> None:
    error = refusal(path, content)
    assert re.search(message, str(error)), error
    assert error.offset == offset


def with_pair(*pairs: bytes) -> gb.Gguf:
    return gb.Gguf(pairs=[gb.ARCHITECTURE, *pairs])


def with_tensors(*tensors: bytes, data: int = 64) -> gb.Gguf:
    return gb.Gguf(tensors=list(tensors), data=bytes(data))


# Where the second key begins, and (without a second key) the first tensor.
SECOND = 24 + len(gb.ARCHITECTURE)
