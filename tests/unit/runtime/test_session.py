"""One user at a time, cancel, close and generation of a session."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
from runtime_fakes import FakeModel, expected_logits, fake_parts

from edgedsv4.config import SamplingOptions
from edgedsv4.errors import BusyError, CancelledError, ConfigError, Dsv4Error, NumericError
from edgedsv4.runtime.sampler import Sampler
from edgedsv4.runtime.session import Session
from edgedsv4.runtime.stats import SyncReport

GREEDY = SamplingOptions(temperature=0)
IDS = [i % 11 for i in range(200)]


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def session(model: FakeModel) -> Session:
    return Session(fake_parts(model, prefill_chunk=50), capacity=300)


class Blocker:
    """Holds a call of another thread inside the model."""

    def __init__(self, model: FakeModel, call: Callable[[], object]) -> None:
        self.inside = threading.Event()
        self.release = threading.Event()
        self.error: BaseException | None = None
        model.before_forward = self.wait
        self.thread = threading.Thread(target=self.run, args=(call,))

    def wait(self, _position: int) -> None:
        self.inside.set()
        self.release.wait()

    def run(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Dsv4Error as error:
            self.error = error

    def __enter__(self) -> Blocker:
        self.thread.start()
        self.inside.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self.thread.join()


def greedy_text(start: list[int], count: int) -> list[int]:
    ids = list(start)
    for _ in range(count):
        ids.append(int(np.argmax(expected_logits(ids))))
    return ids[len(start) :]


def test_sync_and_logits(session: Session) -> None:
    assert session.sync(IDS[:70]) == SyncReport(reused=0, evaluated=70, rebuilt=0)
    assert session.token_ids == tuple(IDS[:70])
    np.testing.assert_array_equal(session.logits(), expected_logits(IDS[:70]))


def test_numpy_ids_are_welcome(session: Session) -> None:
    session.sync(np.array(IDS[:5], dtype=np.int32))  # type: ignore[arg-type]
    assert session.token_ids == tuple(IDS[:5])
    assert all(type(token_id) is int for token_id in session.token_ids)


def test_ids_that_are_no_integers_are_refused(session: Session) -> None:
    with pytest.raises(ConfigError, match="integers"):
        session.sync([1.5])  # type: ignore[list-item]


@pytest.mark.parametrize("arguments", [{"logits": "some"}, {"chunk": 0}])
def test_wrong_evaluate_options_are_refused(session: Session, arguments: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        session.evaluate([1], **arguments)  # type: ignore[arg-type]


def test_second_caller_is_told_busy(session: Session, model: FakeModel) -> None:
    with Blocker(model, lambda: session.sync(IDS)):
        calls = (
            lambda: session.sync([1]),
            lambda: session.evaluate([1]),
            lambda: session.rewind(0),
            session.logits,
            session.mark_turn,
            lambda: next(iter(session.generate(GREEDY))),
        )
        for call in calls:
            with pytest.raises(BusyError, match="in use"):
                call()
    assert session.token_ids == tuple(IDS)


def test_readings_are_allowed_while_busy(session: Session, model: FakeModel) -> None:
    with Blocker(model, lambda: session.sync(IDS)):
        assert session.length == 0
        assert session.token_ids == ()
        assert session.nbytes() == 1000


def test_open_iterator_keeps_its_own_thread_out(session: Session) -> None:
    session.sync(IDS[:3])
    tokens = session.generate(GREEDY)
    next(tokens)
    with pytest.raises(BusyError):
        session.sync([1])
    with pytest.raises(BusyError):
        next(session.generate(GREEDY))
    next(tokens)


def test_iterator_that_was_never_started_keeps_nobody_out(session: Session) -> None:
    session.sync(IDS[:3])
    unused = session.generate(GREEDY)
    session.sync(IDS[:4])
    assert next(unused) == greedy_text(IDS[:4], 1)[0]


def test_closing_an_iterator_frees_the_session(session: Session) -> None:
    session.sync(IDS[:3])
    tokens = session.generate(GREEDY)
    first = next(tokens)
    tokens.close()  # type: ignore[attr-defined]
    assert session.token_ids == (*IDS[:3], first)
    session.sync([1])


def test_abandoned_iterator_frees_the_session(session: Session) -> None:
    session.sync(IDS[:3])
    for _ in session.generate(GREEDY):
        break
    gc.collect()
    session.sync([1])


def test_cancel_from_another_thread_stops_at_a_complete_token(
    session: Session, model: FakeModel
) -> None:
    session.sync(IDS[:50])
    with Blocker(model, lambda: session.sync(IDS)) as blocker:
        session.cancel()
    assert isinstance(blocker.error, CancelledError)
    assert session.token_ids == tuple(IDS[:50])
    model.before_forward = lambda _position: None
    assert session.sync(IDS).reused == 50


def test_cancel_without_work_does_nothing(session: Session) -> None:
    session.cancel()
    session.sync(IDS[:5])
    assert session.length == 5


def test_cancelled_generate_keeps_its_tokens(session: Session) -> None:
    session.sync(IDS[:3])
    tokens = session.generate(GREEDY)
    made = [next(tokens), next(tokens)]
    session.cancel()
    with pytest.raises(CancelledError):
        next(tokens)
    assert session.token_ids == (*IDS[:3], *made)
    session.sync([1])


def test_generate_is_greedy_at_temperature_zero(session: Session) -> None:
    session.sync(IDS[:3])
    options = SamplingOptions(temperature=0, max_tokens=20)
    assert list(session.generate(options)) == greedy_text(IDS[:3], 20)
    assert session.length == 23
    assert session.totals.generated == 20


def test_generate_ends_before_a_stop_token_that_joins_the_timeline(
    session: Session, model: FakeModel
) -> None:
    model.script = {3: 5, 4: 6, 5: 1}
    session.sync(IDS[:3])
    assert list(session.generate(GREEDY, stop_ids=[1])) == [5, 6]
    assert session.token_ids == (*IDS[:3], 5, 6, 1)


def test_generate_ends_when_the_context_is_full(model: FakeModel) -> None:
    session = Session(fake_parts(model), capacity=10)
    session.sync(IDS[:4])
    assert len(list(session.generate(GREEDY))) == 6
    assert session.length == 10
    assert list(session.generate(GREEDY)) == []


def test_same_seed_generates_the_same_tokens(session: Session) -> None:
    def run(seed: int) -> list[int]:
        session.sync(IDS[:3])
        return list(session.generate(SamplingOptions(seed=seed, max_tokens=30)))

    assert run(5) == run(5) != run(6)


def test_repetition_penalty_sees_the_prompt(session: Session, model: FakeModel) -> None:
    model.script = {3: IDS[0]}
    session.sync(IDS[:3])
    options = SamplingOptions(temperature=0, repetition_penalty=100, max_tokens=1)
    (chosen,) = session.generate(options)
    # The scripted token stays the likeliest, so only a penalty below 0 can move it.
    assert chosen == IDS[0]
    model.script = {}
    session.sync(IDS[:5])
    logits = expected_logits(IDS[:5]).astype(float)
    seen = sorted(set(IDS[:5]))
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / 100, logits[seen] * 100)
    (chosen,) = session.generate(options)
    assert chosen == int(np.argmax(logits))


@pytest.mark.parametrize("stop", [-1, 11])
def test_unknown_stop_token_is_refused_at_once(session: Session, stop: int) -> None:
    with pytest.raises(ConfigError, match="token ids"):
        session.generate(GREEDY, stop_ids=[stop])


def test_generate_without_a_token_is_refused(session: Session) -> None:
    with pytest.raises(ConfigError, match="no token yet"):
        next(session.generate(GREEDY))
    session.sync([1])


def test_numeric_error_while_generating_keeps_the_session_usable(
    session: Session, model: FakeModel
) -> None:
    session.sync(IDS[:3])
    model.broken_position = 4
    tokens = session.generate(GREEDY)
    first = next(tokens)
    with pytest.raises(NumericError):
        next(tokens)
    assert session.token_ids == (*IDS[:3], first)
    model.broken_position = None
    session.sync([1])


def test_sample_changes_neither_session_nor_sampler(session: Session) -> None:
    session.sync(IDS[:3])
    sampler = Sampler(SamplingOptions(seed=3), 11)
    assert session.sample(sampler) == session.sample(sampler)
    assert session.length == 3


def test_closing_twice_is_fine(session: Session) -> None:
    session.close()
    session.close()
    assert session.is_closed
    assert session.nbytes() == 0


def test_use_after_close_says_so(session: Session) -> None:
    session.close()
    calls = (
        lambda: session.sync([1]),
        session.logits,
        lambda: session.generate(GREEDY, stop_ids=[1]),
        lambda: session.length,
    )
    for call in calls:
        with pytest.raises(Dsv4Error, match="session is closed"):
            call()


def test_close_ends_an_open_iterator(session: Session) -> None:
    session.sync(IDS[:3])
    tokens = session.generate(GREEDY)
    next(tokens)
    session.close()
    assert list(tokens) == []


def test_close_while_another_thread_works_is_refused(session: Session, model: FakeModel) -> None:
    with Blocker(model, lambda: session.sync(IDS)), pytest.raises(BusyError):
        session.close()
    session.close()


def test_close_while_another_thread_generates_is_refused(
    session: Session, model: FakeModel
) -> None:
    session.sync(IDS[:3])
    options = SamplingOptions(temperature=0, max_tokens=2)
    tokens = session.generate(options)
    with Blocker(model, lambda: list(tokens)), pytest.raises(BusyError):
        session.close()


def test_error_in_a_with_block_is_not_replaced_by_busy(session: Session) -> None:
    def consume() -> None:
        with session:
            session.sync(IDS[:3])
            for _ in session.generate(GREEDY):
                raise KeyError("the caller's own")

    with pytest.raises(KeyError, match="the caller's own"):
        consume()
    assert session.is_closed


def test_abandoned_session_is_freed_without_the_cycle_collector(model: FakeModel) -> None:
    import weakref

    gc.disable()
    try:
        session = Session(fake_parts(model), capacity=10)
        session.sync([1, 2])
        watcher = weakref.ref(session)
        del session
        assert watcher() is None
    finally:
        gc.enable()
