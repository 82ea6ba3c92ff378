"""Reading a token store."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from pocket.store import (
    TARGET_BIT,
    BatchLoader,
    Position,
    TargetRule,
    TokenReader,
    make_batch,
    token_counts,
)

from edgedsv4.errors import FormatError

RULE = TargetRule(prompt_weight=0.25)


def write_part(store: Path, number: int, codes: list[int]) -> None:
    store.mkdir(exist_ok=True)
    partial = store / f"part-{number:05d}.tmp"
    np.array(codes, dtype="<u2").tofile(partial)
    partial.rename(store / f"part-{number:05d}.bin")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    directory = tmp_path / "store-A"
    write_part(directory, 0, [1, 2, 3])
    write_part(directory, 1, [4, 5, 6, 7])
    (directory / "DONE").touch()
    return directory


def test_parts_are_one_stream(store: Path) -> None:
    reader = TokenReader(store)
    assert reader.read(2).tolist() == [1, 2]
    assert reader.read(4).tolist() == [3, 4, 5, 6]


def test_look_ahead_stays_unread(store: Path) -> None:
    reader = TokenReader(store)
    assert reader.read(2, 3).tolist() == [1, 2, 3, 4, 5]
    assert reader.read(1).tolist() == [3]


def test_stream_begins_again_behind_its_end(store: Path) -> None:
    reader = TokenReader(store)
    assert reader.read(9).tolist() == [1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert reader.position == Position(0, 2, 1)


def test_reader_goes_on_at_a_position(store: Path) -> None:
    first = TokenReader(store)
    first.read(5)
    assert TokenReader(store, first.position).read(3).tolist() == first.read(3).tolist()


def test_reader_waits_for_a_part_that_is_being_written(store: Path) -> None:
    (store / "DONE").unlink()

    def write() -> None:
        time.sleep(0.3)
        write_part(store, 2, [8, 9])

    writer = threading.Thread(target=write)
    writer.start()
    assert TokenReader(store).read(9).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    writer.join()


def test_complete_store_without_tokens_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "DONE").touch()
    with pytest.raises(FormatError, match="no tokens"):
        TokenReader(tmp_path).read(1)


def test_half_a_code_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "part-00000.bin").write_bytes(b"abc")
    with pytest.raises(FormatError, match="whole"):
        TokenReader(tmp_path).read(1)


def test_targets_have_full_weight_and_the_rest_the_prompts() -> None:
    codes = np.array([0, 5, 6 | TARGET_BIT, 7 | TARGET_BIT, 8, 9, 10], dtype=np.uint16)
    batch = make_batch(codes, (1, 4), RULE, Position())
    assert batch.tokens.tolist() == [[0, 5, 6, 7, 8, 9, 10]]
    assert batch.weights[0].tolist() == [[0.25, 1.0, 1.0, 0.25]]
    assert batch.totals[0] == 2.5


def test_targets_never_lie_in_another_document() -> None:
    codes = np.array([5, 6, 7, 0, 8, 9, 10], dtype=np.uint16) | TARGET_BIT
    batch = make_batch(codes, (1, 4), RULE, Position())
    assert batch.weights[0].tolist() == [[1, 1, 0, 1]]
    assert batch.weights[1].tolist() == [[1, 0, 0, 1]]
    assert batch.weights[2].tolist() == [[0, 0, 0, 1]]


def test_sequences_follow_each_other() -> None:
    batch = make_batch(np.arange(3, 14, dtype=np.uint16), (2, 4), RULE, Position())
    assert batch.tokens.tolist() == [[3, 4, 5, 6, 7, 8, 9], [7, 8, 9, 10, 11, 12, 13]]


def test_loader_hands_out_batches_with_the_position_behind_them(store: Path) -> None:
    (store / "meta.json").write_text('{"long_parts_every": 2}', encoding="utf-8")
    loader = BatchLoader(store, Position(), lambda is_long: (2 if is_long else 1, 2), RULE)
    batches = loader.batches()
    assert next(batches).tokens[:, :2].tolist() == [[1, 2]]
    assert next(batches).tokens[:, :2].tolist() == [[3, 4]]
    third = next(batches)
    assert third.tokens[:, :2].tolist() == [[5, 6], [7, 1]]  # part 1 has long rows
    assert third.position == Position(0, 1, 1)
    loader.close()


def test_loader_hands_on_the_readers_error(tmp_path: Path) -> None:
    (tmp_path / "DONE").touch()
    loader = BatchLoader(tmp_path, Position(), lambda _: (1, 2), RULE)
    with pytest.raises(FormatError):
        next(loader.batches())
    loader.close()


def test_waiting_for_a_store_ends_when_asked(tmp_path: Path) -> None:
    loader = BatchLoader(tmp_path, Position(), lambda _: (1, 2), RULE)
    assert not list(loader.batches(lambda: True))
    loader.close()


def test_loader_that_waits_can_be_closed(tmp_path: Path) -> None:
    loader = BatchLoader(tmp_path, Position(), lambda _: (1, 2), RULE)
    loader.close()
    assert not loader._thread.is_alive()


def test_tokens_are_counted_without_their_target_bit(store: Path) -> None:
    write_part(store, 0, [3, 3 | TARGET_BIT, 5])
    assert token_counts(store, 6).tolist() == [0, 0, 0, 2, 0, 1]
