"""The small tokenizer: its layout, its training, and the expert tables made from token counts."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
from pocket import tokenizer_build
from pocket.corpus import Corpus, Entry, Prose
from pocket.tasks.lexicon import CODE_WORDS, NAMES
from pocket.tokenizer_build import (
    FIRST_TOKENS,
    LAST_TOKENS,
    VOCAB_SIZE,
    count_tokens,
    hash_tables,
    sample_texts,
    spaced_digits,
    train_tokenizer,
)

from edgedsv4.errors import ConfigError
from edgedsv4.formats.gguf import read_gguf
from edgedsv4.formats.tokenizer_spec import tokenizer_spec_from_gguf
from edgedsv4.text.byte_alphabet import BYTE_OF_CHAR
from edgedsv4.text.special_tokens import ASSISTANT, BOS, DSML, EOS, PAD, USER
from edgedsv4.text.tokenizer import Tokenizer

DATA = Path(tokenizer_build.__file__).parent / "data"


@pytest.fixture(scope="module")
def committed() -> Tokenizer:
    return Tokenizer.from_json(DATA / "tokenizer.json")


def small_corpus() -> Corpus:
    paragraphs = [f"The {word} stood beside the {other}." for word in CODE_WORDS for other in NAMES]
    return Corpus(
        prose=[Prose("austen", "A novel", paragraphs[:400])],
        entries=[Entry("dog", "noun", 9, "a domestic animal", "", (), "animal")],
    )


def test_the_committed_vocabulary_has_4096_entries(committed: Tokenizer) -> None:
    assert committed.vocab_size == VOCAB_SIZE == 4096


def test_the_first_ids_are_bos_eos_and_pad(committed: Tokenizer) -> None:
    assert [committed.id_of(text) for text in (BOS, EOS, PAD)] == [0, 1, 2]
    assert (committed.bos_id, committed.eos_id, committed.pad_id) == (0, 1, 2)


def test_added_tokens_stand_at_the_end(committed: Tokenizer) -> None:
    ids = [committed.id_of(text) for text in LAST_TOKENS]
    assert ids == list(range(VOCAB_SIZE - len(LAST_TOKENS), VOCAB_SIZE))
    assert {USER, ASSISTANT, DSML} < set(LAST_TOKENS)


def test_bytes_follow_the_first_tokens() -> None:
    vocab = json.loads((DATA / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    first = len(FIRST_TOKENS)
    assert {text for text, i in vocab.items() if i < first + 256} == set(BYTE_OF_CHAR)


def test_no_token_holds_two_digits(committed: Tokenizer) -> None:
    for token in range(committed.vocab_size):
        assert sum(chr(byte).isdigit() for byte in committed.token_bytes(token)) < 2


def test_values_of_tier_one_and_names_are_single_tokens(committed: Tokenizer) -> None:
    assert {len(committed.encode(f" {word}")) for word in (*CODE_WORDS, *NAMES)} == {1}


def test_text_survives_the_tokenizer(committed: Tokenizer) -> None:
    text = 'Ünïcode 世界 \t{"a": [1, 23, 456]}\r\n\r\n  x<think>'
    assert committed.decode(committed.encode(text)) == text


def test_the_vocabulary_loads_from_gguf_metadata(committed: Tokenizer, tmp_path: Path) -> None:
    document = json.loads((DATA / "tokenizer.json").read_text("utf-8"))
    tokens = [""] * VOCAB_SIZE
    types = [1] * VOCAB_SIZE
    for text, i in document["model"]["vocab"].items():
        tokens[i] = text
    for added in document["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = 3 if added["special"] else 4
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in document["model"]["merges"]
    ]
    path = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "deepseek4")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("joyai-llm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_tensor("x", np.zeros(1, np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file,
                  writer.write_tensors_to_file, writer.close):  # fmt: skip
        write()
    with closing(read_gguf(path)) as file:
        spec = tokenizer_spec_from_gguf(file)
    assert spec is not None
    text = "Tell me 471 stories, please.\n\nThe end."
    assert Tokenizer.from_spec(spec).encode(text) == committed.encode(text)


def test_digits_are_spaced_out() -> None:
    assert spaced_digits("471 and 5, 1066.") == "4 7 1 and 5, 1 0 6 6."


def test_training_learns_no_merge_of_digits() -> None:
    texts = [spaced_digits(f"{word} {i * 37} {name}") for i, word in enumerate(CODE_WORDS)
             for name in NAMES[:40]]  # fmt: skip
    document = train_tokenizer(texts, vocab_size=512)
    model = document["model"]
    assert isinstance(model, dict)
    assert len(model["vocab"]) == 512 - len(FIRST_TOKENS) - len(LAST_TOKENS)
    assert not [text for text in model["vocab"] if sum(map(str.isdigit, text)) > 1]


def test_training_on_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="are needed"):
        train_tokenizer(["one two"], vocab_size=4096)


def test_sampled_text_is_that_of_all_tasks_at_hand() -> None:
    texts = list(sample_texts(small_corpus(), 40_000))
    joined = "\n".join(texts)
    assert "stood beside" in joined
    assert "a domestic animal" in joined
    assert "The code of" in joined or "password" in joined
    assert not [text for text in texts if spaced_digits(text) != text]


def test_sampling_is_seeded() -> None:
    assert list(sample_texts(Corpus(), 5_000)) == list(sample_texts(Corpus(), 5_000))


def test_counts_cover_the_vocabulary(committed: Tokenizer) -> None:
    counts = count_tokens(small_corpus(), committed, 5_000)
    assert counts.shape == (VOCAB_SIZE,)
    assert counts.sum() == 4 * 1024
    assert counts[0] > 0


def test_committed_counts_fit_the_committed_vocabulary() -> None:
    counts = json.loads((DATA / "token_counts.json").read_text("utf-8"))
    assert len(counts) == VOCAB_SIZE
    assert sum(counts) > 1_000_000


def test_hash_tables_balance_the_load_of_the_committed_counts() -> None:
    counts = np.array(json.loads((DATA / "token_counts.json").read_text("utf-8")))
    for table in hash_tables(counts, 8, 2, 3):
        load = np.zeros(8)
        np.add.at(load, table, np.broadcast_to(counts[:, None], table.shape))
        assert load.max() / load.mean() < 1.02


def test_hash_tables_use_every_pair_of_experts() -> None:
    counts = np.arange(2000)
    pairs = {tuple(sorted(row)) for row in hash_tables(counts, 8, 2, 1)[0].tolist()}
    assert len(pairs) == 28


def test_a_token_has_distinct_experts() -> None:
    tables = hash_tables([5, 0, 3, 1], 4, 3, 2)
    assert tables.shape == (2, 4, 3)
    assert all(len(set(row)) == 3 for table in tables.tolist() for row in table)


def test_hash_tables_differ_by_layer_and_repeat_by_seed() -> None:
    counts = np.arange(500)
    tables = hash_tables(counts, 8, 2, 2, seed=3)
    assert (tables[0] != tables[1]).any()
    np.testing.assert_array_equal(tables, hash_tables(counts, 8, 2, 2, seed=3))
    assert (tables != hash_tables(counts, 8, 2, 2, seed=4)).any()


@pytest.mark.parametrize("k", [0, 5])
def test_an_impossible_number_of_experts_is_refused(k: int) -> None:
    with pytest.raises(ConfigError, match=r"1\.\.4"):
        hash_tables([1, 2], 4, k, 1)
