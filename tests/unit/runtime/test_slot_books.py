"""The books of an expert store: claims keep, failures leave nothing, staging is given back."""

from __future__ import annotations

import pytest

from edgedsv4.runtime.cache_policies import LeastRecentlyUsed
from edgedsv4.runtime.slot_books import SlotBooks


def nobody(_layer: int, _expert: int) -> bool:
    return False


def everybody(_layer: int, _expert: int) -> bool:
    return True


@pytest.fixture
def books() -> SlotBooks:
    """Two slots of the cache and one for staging."""
    return SlotBooks(range(3), 2, LeastRecentlyUsed())


def fill(books: SlotBooks, *experts: int) -> None:
    for expert in experts:
        assert books.begin((0, expert), nobody) is not None
        books.publish((0, expert))


def test_nothing_is_found_before_its_bytes_are_in(books: SlotBooks) -> None:
    reading = books.begin((0, 1), nobody)
    assert reading is not None
    assert books.find((0, 1)) is None
    books.publish((0, 1))
    assert books.find((0, 1)) == reading.slot


def test_a_failed_read_leaves_an_empty_slot(books: SlotBooks) -> None:
    books.begin((0, 1), nobody)
    books.give_up((0, 1))
    assert books.find((0, 1)) is None
    assert books.cache.empty == 2


def test_what_is_claimed_stays(books: SlotBooks) -> None:
    fill(books, 1, 2)
    books.claim((0, 1))
    books.claim((0, 2))
    reading = books.begin((0, 3), nobody)
    assert reading is not None
    assert reading.is_staged
    assert books.begin((0, 4), nobody) is None
    books.release((0, 1))
    after = books.begin((0, 4), nobody)
    assert after is not None
    assert not after.is_staged
    assert books.find((0, 1)) is None
    assert books.find((0, 2)) is not None


def test_two_claims_need_two_releases(books: SlotBooks) -> None:
    fill(books, 1, 2)
    for expert in (1, 1, 2):
        books.claim((0, expert))
    books.release((0, 1))
    reading = books.begin((0, 3), nobody)
    assert reading is not None
    assert reading.is_staged


def test_a_claim_on_a_read_holds_once_it_is_in(books: SlotBooks) -> None:
    books.begin((0, 1), nobody)
    books.claim((0, 1))
    books.publish((0, 1))
    fill(books, 2)
    assert books.begin((0, 3), nobody) is not None
    assert books.find((0, 1)) is not None
    assert books.find((0, 2)) is None


def test_a_staged_expert_goes_with_its_last_claim(books: SlotBooks) -> None:
    fill(books, 1, 2)
    books.begin((0, 3), everybody)
    books.claim((0, 3))
    books.publish((0, 3))
    assert books.find((0, 3)) == 2
    assert books.free_staging == 0
    books.release((0, 3))
    assert books.find((0, 3)) is None
    assert books.free_staging == 1


def test_a_staged_read_that_nobody_wants_any_more_is_dropped(books: SlotBooks) -> None:
    fill(books, 1, 2)
    books.begin((0, 3), everybody)
    books.claim((0, 3))
    books.release((0, 3))
    books.publish((0, 3))
    assert books.find((0, 3)) is None
    assert books.free_staging == 1


def test_reading_ahead_in_vain_is_counted_where_it_was_evicted(books: SlotBooks) -> None:
    books.begin((0, 1), nobody, is_prefetch=True)
    books.publish((0, 1))
    fill(books, 2, 3)
    assert books.prefetch_wasted == 1
    assert not books.unused_prefetch


def test_reading_ahead_in_vain_is_counted_where_it_was_staged(books: SlotBooks) -> None:
    fill(books, 1, 2)
    books.begin((1, 5), everybody, is_prefetch=True)
    books.publish((1, 5))
    books.drop_staged(lambda layer, _expert: layer == 1)
    assert books.find((1, 5)) is not None
    books.drop_staged(nobody)
    assert books.find((1, 5)) is None
    assert books.prefetch_wasted == 1
    assert books.free_staging == 1


def test_what_was_read_ahead_and_claimed_is_no_waste(books: SlotBooks) -> None:
    books.begin((0, 1), nobody, is_prefetch=True)
    books.publish((0, 1))
    books.claim((0, 1))
    books.release((0, 1))
    fill(books, 2, 3)
    assert books.prefetch_wasted == 0
