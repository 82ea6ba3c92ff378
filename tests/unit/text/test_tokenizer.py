"""Token ids against the `tokenizers` library and published ids; what plain text may become."""

# ruff: noqa: RUF001, RUF005 (texts of many scripts, one kind per line)

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hostile_text import hostile_strings

from edgedsv4.errors import ConfigError, FormatError, UnsupportedModelError
from edgedsv4.formats.gguf import read_gguf
from edgedsv4.formats.gguf_values import GgufType
from edgedsv4.formats.gguf_write import GgufWriter
from edgedsv4.formats.metadata import tokenizer_spec_from_gguf
from edgedsv4.text import long_text
from edgedsv4.text.byte_alphabet import CHAR_OF_BYTE
from edgedsv4.text.messages import Piece
from edgedsv4.text.special_tokens import BOS, DSML, EOS, LATEST_REMINDER, PAD, THINK, USER
from edgedsv4.text.tokenizer import Tokenizer

PUBLISHED = [
    ("Hello, world!", [19923, 14, 2058, 3]),
    (
        "In 2027 we paid 48,310.55 euros",
        [1124, 223, 939, 25, 579, 9118, 223, 2170, 14, 14666, 16, 2315, 50856],
    ),
    (
        "for (i=0;i<10;++i) {\n    sum+=a[i]>>2;\n}\n",
        [2251, 343, 75, 31, 18, 11844, 30, 553, 102529, 75, 11, 875, 361]
        + [2595, 26634, 67, 3166, 63, 5957, 20, 510, 1778],
    ),
    ("深度求索的模型 V4 发布了", [17180, 1645, 4568, 301, 8842, 721, 22, 223, 53961]),
    (
        "カタカナ と ひらがな",
        [15961, 11767, 15961, 27071, 223, 2495, 223, 40259, 4970, 2936, 2942],
    ),
    ("Überraschung: naïve café", [52526, 581, 5171, 348, 1617, 28, 112752, 57664]),
    ("cafe\u0301 e\u0301 \u0301", [69, 15702, 17793, 312, 17793, 223, 17793]),
    ("tab\there\r\n\r\n   end  ", [14278, 200, 1036, 204, 201, 204, 201, 262, 1522, 262]),
    (
        "👩\u200d🚀 auf dem Mond 🌕",
        [25730, 105, 46088, 74287, 225, 7567, 2131, 50947, 73369, 246],
    ),
    ("x<think>y</think>", [90, 30, 37947, 32, 91, 1718, 37947, 32]),
    (
        '<｜DSML｜invoke name="f">',
        [30, 28217, 10525, 7398, 28217, 40148, 5406, 2329, 1281, 72, 3320],
    ),
]
SMALL_PUBLISHED = [
    (
        "Hello world, def f(x): return x+1",
        [46, 75, 82, 339, 324, 277, 82, 74, 18, 346, 290, 14, 94, 15, 32, 329, 227, 94, 17, 23],
    ),
    ("a  b\n\n c", [71, 227, 305, 205, 205, 291]),
    (
        "héllo 漢字 12345 ｜",
        [78, 134, 109, 82, 339, 227, 169, 127, 102, 168, 262, 252]
        + [227, 23, 24, 25, 26, 27, 227, 178, 128, 257],
    ),
]
HOSTILE = hostile_strings(2500, seed=20261130)


@dataclass(frozen=True)
class Spec:
    """A byte-level vocabulary without merges, as GGUF metadata would give it."""

    tokens: list[str] = field(
        default_factory=lambda: [BOS, EOS, PAD, THINK, *CHAR_OF_BYTE.values(), "ab"]
    )
    token_types: list[int] = field(default_factory=lambda: [3] * 4 + [1] * 257)
    merges: list[str] = field(default_factory=lambda: ["a b"])
    pre: str = "joyai-llm"
    bos_id: int | None = 0
    eos_id: int | None = 1
    pad_id: int | None = 2


@pytest.fixture(scope="module")
def library(real_json: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(real_json))


@pytest.fixture(scope="module")
def library_plain(real_json: Path) -> tokenizers.Tokenizer:
    document = json.loads(real_json.read_text(encoding="utf-8"))
    document["added_tokens"] = []
    document["post_processor"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(document))


@pytest.fixture(scope="module")
def from_gguf(real_json: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The real tokenizer, written to a GGUF file and read back."""
    document = json.loads(real_json.read_text(encoding="utf-8"))
    added = {entry["content"]: entry for entry in document["added_tokens"]}
    ids = {**document["model"]["vocab"], **{text: e["id"] for text, e in added.items()}}
    tokens = sorted(ids, key=lambda text: ids[text])
    assert [ids[text] for text in tokens] == list(range(len(tokens)))
    kinds = [1 if t not in added else 3 if added[t]["special"] else 4 for t in tokens]
    path = tmp_path_factory.mktemp("gguf") / "vocabulary.gguf"
    writer = GgufWriter(path)
    merges = [m if isinstance(m, str) else " ".join(m) for m in document["model"]["merges"]]
    prefix = "tokenizer.ggml"
    writer.add_metadata("general.architecture", "deepseek4", GgufType.STRING)
    writer.add_metadata(f"{prefix}.model", "gpt2", GgufType.STRING)
    writer.add_metadata(f"{prefix}.pre", "joyai-llm", GgufType.STRING)
    writer.add_metadata(f"{prefix}.tokens", tokens, GgufType.STRING)
    writer.add_metadata(f"{prefix}.token_type", np.array(kinds, dtype="<i4"), GgufType.I32)
    writer.add_metadata(f"{prefix}.merges", merges, GgufType.STRING)
    for name, token_id in (("bos", 0), ("eos", 1), ("padding", 2)):
        writer.add_metadata(f"{prefix}.{name}_token_id", token_id, GgufType.U32)
    writer.write()
    with read_gguf(path) as file:
        spec = tokenizer_spec_from_gguf(file)
    assert spec is not None
    return Tokenizer.from_spec(spec)


@pytest.mark.parametrize(("text", "ids"), PUBLISHED)
def test_published_ids_of_the_real_vocabulary(real: Tokenizer, text: str, ids: list[int]) -> None:
    assert real.encode(text) == ids


@pytest.mark.parametrize(("text", "ids"), SMALL_PUBLISHED)
def test_published_ids_of_the_small_vocabulary(small: Tokenizer, text: str, ids: list[int]) -> None:
    assert small.encode(text) == ids


def test_gguf_ids_equal_the_library_on_hostile_text(
    from_gguf: Tokenizer, library: tokenizers.Tokenizer
) -> None:
    wrong = [
        text
        for text in HOSTILE
        if from_gguf.encode(text, match_added=True)
        != library.encode(text, add_special_tokens=False).ids
    ]
    assert wrong == []


def test_plain_ids_equal_the_library_without_added_tokens(
    from_gguf: Tokenizer, library_plain: tokenizers.Tokenizer
) -> None:
    wrong = [
        text
        for text in HOSTILE
        if from_gguf.encode(text) != library_plain.encode(text, add_special_tokens=False).ids
    ]
    assert wrong == []


def test_both_sources_give_the_same_ids(from_gguf: Tokenizer, real: Tokenizer) -> None:
    assert [from_gguf.encode(t) for t in HOSTILE[:300]] == [real.encode(t) for t in HOSTILE[:300]]
    assert (from_gguf.bos_id, from_gguf.eos_id, from_gguf.pad_id) == (0, 1, 2)
    assert from_gguf.vocab_size == real.vocab_size == 129280


def test_plain_text_never_becomes_an_added_token(real: Tokenizer) -> None:
    added = {token_id for text in (BOS, EOS, PAD) if (token_id := real.id_of(text)) is not None}
    for text in HOSTILE:
        assert all(token_id < 128000 and token_id not in added for token_id in real.encode(text))


def test_decoding_the_ids_gives_the_text_back(real: Tokenizer) -> None:
    assert all(real.decode(real.encode(text)) == text for text in HOSTILE)


def test_matched_markers_become_their_tokens(real: Tokenizer) -> None:
    assert real.encode("x<think>y</think>", match_added=True) == [90, 128821, 91, 128822]
    markup = '<｜DSML｜invoke name="f">'
    expected = [30, 128825, 40148, 5406, 2329, 1281, 72, 3320]
    assert real.encode(markup, match_added=True) == expected


def test_the_longest_added_token_wins() -> None:
    spec = Spec(tokens=[*Spec().tokens, "<a", "<a>b"], token_types=[*Spec().token_types, 4, 4])
    tokenizer = Tokenizer.from_spec(spec)
    found = tokenizer.encode("<a><a>b<ab", match_added=True)
    expected = [tokenizer.id_of("<a"), *tokenizer.encode(">"), tokenizer.id_of("<a>b")]
    assert found == [*expected, tokenizer.id_of("<a"), *tokenizer.encode("b")]


def test_special_pieces_become_single_tokens(real: Tokenizer) -> None:
    pieces = [Piece(BOS, True), Piece(USER, True), Piece("x<think>"), Piece(THINK, True)]
    assert real.encode_pieces(pieces) == [0, 128803, 90, 30, 37947, 32, 128821]


def test_neighbouring_plain_pieces_are_one_string(real: Tokenizer) -> None:
    assert real.encode_pieces([Piece("Hel"), Piece("lo, wor"), Piece("ld!")]) == PUBLISHED[0][1]


def test_every_missing_special_token_is_named(small: Tokenizer) -> None:
    pieces = [Piece(DSML, True), Piece("x"), Piece(LATEST_REMINDER, True)]
    with pytest.raises(ConfigError, match="｜DSML｜, <｜latest_reminder｜>"):
        small.encode_pieces(pieces)


def test_the_small_vocabulary_has_what_plain_chat_needs(small: Tokenizer) -> None:
    texts = (BOS, EOS, PAD, USER, "<｜Assistant｜>", THINK, "</think>")
    assert [small.id_of(text) for text in texts] == [0, 1, 2, 3, 4, 5, 6]


def test_an_ordinary_token_is_no_added_token(real: Tokenizer) -> None:
    assert real.id_of("the") is None


@pytest.mark.parametrize("text", ["\ud800", "ok\udfff!", "\udc80" * 3])
def test_a_lone_surrogate_is_a_config_error(small: Tokenizer, text: str) -> None:
    with pytest.raises(ConfigError, match="lone surrogate"):
        small.encode(text)


def test_nul_is_a_character(real: Tokenizer) -> None:
    assert real.decode(real.encode("a\x00b")) == "a\x00b"


def test_empty_text_has_no_ids(real: Tokenizer) -> None:
    assert real.encode("") == []
    assert real.encode_pieces([]) == []


@pytest.mark.parametrize("token_id", [-1, 129280])
def test_an_id_outside_the_vocabulary_is_a_config_error(real: Tokenizer, token_id: int) -> None:
    with pytest.raises(ConfigError, match=r"token id must be 0\.\.129279"):
        real.decode([token_id])


def test_decoding_leaves_control_tokens_out(real: Tokenizer) -> None:
    ids = real.encode_pieces([Piece(BOS, True), Piece(USER, True), Piece("Hi"), Piece(EOS, True)])
    assert real.decode(ids) == "Hi"
    assert real.decode(ids, show_control=True) == f"{BOS}{USER}Hi{EOS}"


def test_decoding_shows_the_markup_of_replies(real: Tokenizer, small: Tokenizer) -> None:
    assert real.decode([128821, 128822, 128825]) == "<think></think>｜DSML｜"
    assert small.decode([5, 6]) == "<think></think>"


def test_is_control_follows_the_role_of_a_token(real: Tokenizer) -> None:
    assert [real.is_control(i) for i in (0, 1, 2, 128803, 128000, 128821, 19923)] == [
        True, True, True, True, True, False, False,
    ]  # fmt: skip


def test_a_streamed_character_is_never_printed_in_halves(real: Tokenizer) -> None:
    text = "👩\u200d🚀 漢 𠮷"
    stream = real.stream()
    pieces = [stream.push(token_id) for token_id in real.encode(text)]
    assert "".join(pieces) + stream.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_reads_as_replacement_at_the_end(small: Tokenizer) -> None:
    stream = small.stream()
    assert [stream.push(i) for i in small.encode("漢")[:2]] == ["", ""]
    assert stream.finish() == "\ufffd"


def test_a_missing_pre_tokenizer_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Tokenizer.from_spec(Spec(pre=""))
    assert "no pre-tokenizer" in caplog.text


@pytest.mark.parametrize("pre", ["deepseek-llm", "default", "gpt-2"])
def test_another_pre_tokenizer_is_refused(pre: str) -> None:
    with pytest.raises(UnsupportedModelError, match=pre):
        Tokenizer.from_spec(Spec(pre=pre))


BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("byte missing", {"tokens": [*Spec().tokens[:-2], "ab", "zz"]}, "of 256 bytes"),
    ("types too short", {"token_types": [1]}, "1 token types for 261"),
    ("duplicate", {"tokens": [*Spec().tokens[:-1], "a"], "merges": []}, "same text"),
    ("no text", {"tokens": [*Spec().tokens[:-1], ""], "merges": []}, "has no text"),
    ("merge of three", {"merges": ["a b c"]}, "merge 0"),
    ("merge of one", {"merges": ["ab"]}, "merge 0"),
    ("merge without result", {"merges": ["a b", "a c"]}, "merge 1 needs 'ac'"),
    ("eos out of range", {"eos_id": 261}, "eos_id must be below 261"),
]


@pytest.mark.parametrize(("change", "message"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_contradicting_vocabulary_is_a_format_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Tokenizer.from_spec(replace(Spec(), **change))


def test_all_faults_of_a_vocabulary_are_listed() -> None:
    with pytest.raises(FormatError) as caught:
        Tokenizer.from_spec(replace(Spec(), merges=["a c", "a d"], bos_id=999))
    assert len(caught.value.problems) == 3


@pytest.fixture
def small_document(request: pytest.FixtureRequest) -> dict[str, Any]:
    path = Path(request.path).parents[2] / "data" / "structure" / "official" / "tokenizer.json"
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def written(document: object, folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_padding_to_the_models_vocabulary(small_document: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_json(written(small_document, tmp_path), vocab_size=600)
    assert tokenizer.vocab_size == 600
    assert tokenizer.token_bytes(599) == b""


def test_more_tokens_than_the_model_is_a_format_error(
    small_document: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(FormatError, match="the model has 500"):
        Tokenizer.from_json(written(small_document, tmp_path), vocab_size=500)


def test_merges_may_be_written_as_text(small_document: dict[str, Any], tmp_path: Path) -> None:
    model = small_document["model"]
    model["merges"] = [" ".join(pair) for pair in model["merges"]]
    tokenizer = Tokenizer.from_json(written(small_document, tmp_path))
    assert tokenizer.encode(SMALL_PUBLISHED[0][0]) == SMALL_PUBLISHED[0][1]


UNSUPPORTED: list[tuple[tuple[str | int, ...], object]] = [
    (("model", "type"), "WordPiece"),
    (("model", "ignore_merges"), True),
    (("model", "byte_fallback"), True),
    (("normalizer",), {"type": "NFC"}),
    (("pre_tokenizer",), {"type": "ByteLevel"}),
    (("pre_tokenizer",), None),
    (("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"), r"\p{N}"),
    (("pre_tokenizer", "pretokenizers", 1, "behavior"), "Removed"),
    (("pre_tokenizer", "pretokenizers", 3, "use_regex"), True),
    (("added_tokens", 3, "lstrip"), True),
]
MALFORMED: list[tuple[tuple[str | int, ...], object]] = [
    (("model", "vocab"), []),
    (("model", "vocab", "!"), -1),
    (("model", "vocab", "!"), 1 << 40),
    (("model", "vocab", "!"), "7"),
    (("model", "vocab", "!"), 8),
    (("model", "merges"), None),
    (("model", "merges", 0), ["a"]),
    (("model", "merges", 0), "a b c"),
    (("added_tokens",), {}),
    (("added_tokens", 0), 5),
    (("added_tokens", 0, "content"), None),
    (("added_tokens", 0, "id"), True),
    (("added_tokens", 0, "id"), 1),
]


def changed(document: Any, place: tuple[str | int, ...], value: object) -> Any:
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return document


@pytest.mark.parametrize(("place", "value"), UNSUPPORTED, ids=str)
def test_another_kind_of_tokenizer_json_is_unsupported(
    small_document: dict[str, Any], tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    with pytest.raises(UnsupportedModelError):
        Tokenizer.from_json(written(changed(small_document, place, value), tmp_path))


@pytest.mark.parametrize(("place", "value"), MALFORMED, ids=str)
def test_a_malformed_tokenizer_json_is_a_format_error(
    small_document: dict[str, Any], tmp_path: Path, place: tuple[str | int, ...], value: object
) -> None:
    with pytest.raises(FormatError):
        Tokenizer.from_json(written(changed(small_document, place, value), tmp_path))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"null"])
def test_a_file_that_is_no_json_object_is_a_format_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        Tokenizer.from_json(path)


CHARACTERS = ["a", " ", "\n", "\x00", "\u0301", "。", "漢", "1", "!", "é", "🌕", "\t", "ア", "२"]


@pytest.mark.parametrize("char", CHARACTERS, ids=ascii)
@pytest.mark.parametrize("frame", ["{}", "x{}y", " !{}\n\u0301", "1{} z", "漢{}é"])
def test_long_runs_give_the_ids_of_one_piece(
    real: Tokenizer, library_plain: tokenizers.Tokenizer, char: str, frame: str
) -> None:
    text = frame.format(char * (long_text.WINDOW + long_text.LONG_RUN + 1))
    assert real.encode(text) == library_plain.encode(text, add_special_tokens=False).ids


def test_long_text_is_cut_without_changing_ids(
    real: Tokenizer, library_plain: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A window this small puts a cut, where one is allowed, into every few characters.
    monkeypatch.setattr(long_text, "WINDOW", 12)
    monkeypatch.setattr("edgedsv4.text.tokenizer.WINDOW", 12)
    wrong = [
        text
        for text in HOSTILE[:1500]
        if real.encode(text) != library_plain.encode(text, add_special_tokens=False).ids
    ]
    assert wrong == []


def test_ten_megabytes_of_spaces_are_encoded(real: Tokenizer) -> None:
    ids = real.encode(" " * 10_000_000)
    assert len(ids) == 10_000_000 // 128
    assert set(map(real.token_bytes, ids)) == {b" " * 128}


def test_ten_megabytes_of_mixed_white_space_are_a_config_error(real: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="white-space characters in a row"):
        real.encode(" \t" * 5_000_000)
