"""The thread pool: every task once, stopping, forks, sharing, and no work while idle.

Tasks are Python functions here, called back from C; cffi takes the lock of the interpreter for
each, so workers take turns, but they are the pool's own threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgedsv4.errors import CancelledError
from edgedsv4.kernels.native.library import NativeRun, library

lib, ffi = library()


@pytest.fixture(autouse=True)
def empty_pool() -> Iterator[None]:
    lib.dk_pool_stop()
    yield
    lib.dk_pool_stop()


def parallel(run: NativeRun, tasks: int, body: Callable[[int], None]) -> int:
    @ffi.callback("void(void *, int64_t)")
    def call(_data: Any, task: int) -> None:
        body(task)

    status: int = lib.dk_parallel(run.cdata, tasks, call, ffi.NULL)
    return status


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tasks", [0, 1, 2, 7, 400])
def test_every_task_runs_once(threads: int, tasks: int) -> None:
    seen: Counter[int] = Counter()
    for _ in range(3):
        seen.clear()
        assert parallel(NativeRun(threads), tasks, lambda task: seen.update([task])) == 0
        assert seen == Counter(range(tasks))


def test_the_pool_grows_to_one_thread_less_than_asked_for() -> None:
    parallel(NativeRun(2), 8, lambda _: None)
    assert lib.dk_pool_size() == 1
    parallel(NativeRun(4), 8, lambda _: None)
    assert lib.dk_pool_size() == 3
    parallel(NativeRun(2), 8, lambda _: None)
    assert lib.dk_pool_size() == 3


def test_one_task_or_one_thread_starts_no_worker() -> None:
    parallel(NativeRun(4), 1, lambda _: None)
    parallel(NativeRun(1), 9, lambda _: None)
    assert lib.dk_pool_size() == 0


def test_workers_take_part() -> None:
    """Two tasks that wait for each other can only end when two threads run them."""
    both = threading.Barrier(2, timeout=60)
    threads = set()

    def body(_task: int) -> None:
        both.wait()
        threads.add(threading.get_ident())

    assert parallel(NativeRun(2), 2, body) == 0
    assert len(threads) == 2


def test_no_more_threads_work_than_the_run_allows() -> None:
    parallel(NativeRun(5), 8, lambda _: None)
    threads = set()
    parallel(NativeRun(2), 300, lambda _: threads.add(threading.get_ident()))
    assert len(threads) <= 2


def test_a_pool_that_was_stopped_starts_again() -> None:
    parallel(NativeRun(3), 8, lambda _: None)
    lib.dk_pool_stop()
    assert lib.dk_pool_size() == 0
    seen = []
    parallel(NativeRun(3), 5, seen.append)
    assert sorted(seen) == list(range(5))


def test_a_pinned_run_does_all_its_tasks() -> None:
    seen = []
    assert parallel(NativeRun(3, is_pinned=True), 20, seen.append) == 0
    assert parallel(NativeRun(3), 20, seen.append) == 0
    assert Counter(seen) == Counter([*range(20)] * 2)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_stop_ends_the_call_before_its_tasks_are_done(threads: int) -> None:
    run = NativeRun(threads, should_stop=lambda: True)
    seen = []

    def body(task: int) -> None:
        seen.append(task)
        time.sleep(0.005)

    status = parallel(run, 5000, body)
    assert status == 1
    assert len(seen) < 5000
    with pytest.raises(CancelledError):
        run.check(status)


def test_a_stopped_run_does_nothing_until_it_was_checked() -> None:
    run = NativeRun(2)
    run.cdata.stop = 1
    seen = []
    assert parallel(run, 5, seen.append) == 1
    assert not seen
    with pytest.raises(CancelledError):
        run.check(1)
    assert parallel(run, 5, seen.append) == 0
    assert len(seen) == 5


def test_what_a_poll_raises_comes_out_of_check() -> None:
    def interrupt() -> bool:
        raise KeyboardInterrupt

    run = NativeRun(2, should_stop=interrupt)
    status = parallel(run, 5000, lambda _: time.sleep(0.005))
    with pytest.raises(KeyboardInterrupt):
        run.check(status)
    run.should_stop = None
    run.check(parallel(run, 5, lambda _: None))


def test_the_poll_is_asked_by_the_calling_thread_alone() -> None:
    askers = set()

    def ask() -> bool:
        askers.add(threading.get_ident())
        return False

    parallel(NativeRun(3, should_stop=ask), 60, lambda _: time.sleep(0.005))
    assert askers == {threading.get_ident()}


def test_a_nested_call_runs_in_the_thread_of_its_task() -> None:
    wrong = []

    def body(_task: int) -> None:
        own, inner = threading.get_ident(), []
        parallel(NativeRun(3), 6, lambda task: inner.append((task, threading.get_ident())))
        if inner != [(task, own) for task in range(6)]:
            wrong.append(inner)

    assert parallel(NativeRun(3), 12, body) == 0
    assert not wrong


def test_two_callers_at_once_both_get_their_tasks_done() -> None:
    counts: dict[int, Counter[int]] = {0: Counter(), 1: Counter()}

    def call(me: int) -> None:
        run = NativeRun(3)
        for _ in range(40):
            parallel(run, 25, lambda task: counts[me].update([task]))

    callers = [threading.Thread(target=call, args=(me,)) for me in (0, 1)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert counts == {0: Counter([*range(25)] * 40), 1: Counter([*range(25)] * 40)}


IDLE = """
import time
from edgedsv4.kernels.native.library import NativeRun, library
lib, ffi = library()
call = ffi.callback("void(void *, int64_t)", lambda data, task: None)
run = NativeRun(4)
lib.dk_parallel(run.cdata, 50, call, ffi.NULL)
assert lib.dk_pool_size() == 3
time.sleep(0.2)
before = time.process_time()
time.sleep(1)
print(time.process_time() - before)
"""

FORK = """
import os
from edgedsv4.kernels.native.library import NativeRun, library
lib, ffi = library()
seen = []
call = ffi.callback("void(void *, int64_t)", lambda data, task: seen.append(task))
run = NativeRun(3)
lib.dk_parallel(run.cdata, 9, call, ffi.NULL)
child = os.fork()
if child == 0:
    seen.clear()
    is_right = lib.dk_pool_size() == 0
    is_right &= lib.dk_parallel(run.cdata, 9, call, ffi.NULL) == 0
    is_right &= lib.dk_pool_size() == 2 and sorted(seen) == list(range(9))
    os._exit(0 if is_right else 1)
_, status = os.waitpid(child, 0)
seen.clear()
lib.dk_parallel(run.cdata, 9, call, ffi.NULL)
assert sorted(seen) == list(range(9))
print(os.waitstatus_to_exitcode(status))
"""

ENDING = """
from edgedsv4.kernels.native.library import NativeRun, library
lib, ffi = library()
call = ffi.callback("void(void *, int64_t)", lambda data, task: None)
lib.dk_parallel(NativeRun(4).cdata, 50, call, ffi.NULL)
print("ended")
"""

FAULT = """
import os, tempfile, threading
from edgedsv4.formats.mapped_file import MappedFile
from edgedsv4.formats.sigbus import install_guard
from edgedsv4.kernels.native.library import NativeRun, library
lib, ffi = library()
install_guard()
with tempfile.NamedTemporaryFile() as weights:
    weights.write(bytes([7]) * 65536)
    weights.flush()
    view = MappedFile.open(weights.name).view(0, 65536)
    os.truncate(weights.name, 0)
    both = threading.Barrier(2)
    def read(_data, task):
        both.wait(60)  # so that one task is a worker's
        found.append(int(view[32768 * task]))
    found = []
    call = ffi.callback("void(void *, int64_t)", read)
    lib.dk_parallel(NativeRun(2).cdata, 2, call, ffi.NULL)
    print(found)
"""


def output_of(program: str) -> str:
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    return done.stdout.strip()


def test_idle_workers_use_no_processor_time() -> None:
    assert float(output_of(IDLE)) < 0.3


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    assert output_of(FORK) == "0"


def test_a_program_ends_while_workers_sleep() -> None:
    assert output_of(ENDING) == "ended"


def test_a_fault_in_a_worker_reaches_the_guard() -> None:
    assert output_of(FAULT) == "[0, 0]"
