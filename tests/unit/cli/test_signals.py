"""Signals and missing streams: the process ends with the right status, silently, leaving nothing.

Each case is a process of its own, since handlers and streams belong to the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "edgedsv4"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
# A module whose import is interrupted and which catches everything, as optional imports do.
GREEDY_MODULE = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(100): pass
except BaseException:
    pass
"""
WHILE_IMPORTING = """
from edgedsv4.cli.interrupt import ending_by_signals
with ending_by_signals():
    import greedy
print("the interrupt was lost")
"""
WHILE_STARTING = """
import os, signal, sys
import edgedsv4.__main__
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "edgedsv4.cli":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
edgedsv4.__main__.start()
"""
SIGNALLED = """
import os, signal
from edgedsv4.cli.interrupt import Terminated, ending_by_signals
signal.signal({number}, signal.{before})
try:
    with ending_by_signals():
        os.kill(os.getpid(), {number})
        print("went on")
except Terminated as ending:
    print(ending.status)
print(signal.getsignal({number}) == signal.{before})
"""


def python(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *paths)))},
    )


def test_interrupt_is_not_lost_in_an_import_that_catches_everything(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY_MODULE)
    done = python(WHILE_IMPORTING, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_interrupt_while_the_command_starts_is_silent() -> None:
    done = python(WHILE_STARTING)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_ending_signal_is_an_exception_and_the_handler_comes_back(number: signal.Signals) -> None:
    done = python(SIGNALLED.format(number=int(number), before="SIG_DFL"))
    assert done.stdout.split() == [str(128 + number), "True"], done.stderr


def test_ignored_hangup_stays_ignored() -> None:
    done = python(SIGNALLED.format(number=int(signal.SIGHUP), before="SIG_IGN"))
    assert done.stdout == "went on\nTrue\n"


def test_terminated_run_removes_its_model(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "run", "random-tiny", "-p", "Hi", "--logit-bias", "1=-inf", "--think", "none"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        assert list(tmp_path.glob("edgedsv4-*"))
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"Traceback" not in err
    assert not list(tmp_path.glob("edgedsv4-*"))


@pytest.mark.parametrize(
    ("closed", "arguments", "expected"),
    [
        (">&-", "inspect random-tiny", (0, "")),
        (">&-", "inspect absent", (2, "edgedsv4: absent: no such file\n")),
        ("2>&-", "inspect absent", (2, "")),
        ("2>/dev/full", "inspect absent", (2, "")),
        ("<&- >&- 2>&-", "inspect absent", (2, "")),
        (">&- 2>&-", "--help", (0, "")),
        ("<&-", "tokenize random-tiny -", (0, "")),
    ],
)
def test_missing_stream_changes_no_status(
    closed: str, arguments: str, expected: tuple[int, str]
) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -m edgedsv4 {arguments} {closed}', sys.executable],
        capture_output=True,
        check=False,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == expected
