"""A file shortened while open becomes a typed error; every other SIGBUS stays what it was."""

import importlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgedsv4.errors import BackendUnavailableError
from edgedsv4.formats import sigbus

ROOT = Path(__file__).resolve().parents[3]

PRELUDE = """
import mmap, os, signal, sys
from pathlib import Path
from edgedsv4.errors import FormatError
from edgedsv4.formats import sigbus
from edgedsv4.formats.mapped_file import MappedFile

page = mmap.PAGESIZE
path = Path(sys.argv[1]) / "weights.bin"
path.write_bytes(bytes([7]) * (8 * page))

def unguarded():
    other = Path(sys.argv[1]) / "other.bin"
    other.write_bytes(bytes(2 * page))
    with other.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    os.truncate(other, 0)
    return mapping
"""


def run(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    """Run `body` in a process of its own, which may die."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + body, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )


def test_shortened_file_reads_as_zeros_and_is_reported(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
sigbus.install_guard()
file = MappedFile.open(path)
view = file.view(0, file.size)
os.truncate(path, page)
print(int(view[0]), int(view[5 * page]), sigbus.tripped())
try:
    file.check_unchanged()
except FormatError as error:
    print(error)
""",
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "7 0 True"
    assert "changed while open" in second


def test_reading_a_whole_vanished_file_survives(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
sigbus.install_guard()
file = MappedFile.open(path)
os.truncate(path, 0)
print(int(file.view(0, file.size).sum()))
""",
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_trip_is_reported_when_size_and_time_were_put_back(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
sigbus.install_guard()
file = MappedFile.open(path)
before = path.stat()
os.truncate(path, page)
int(file.view(5 * page, 1)[0])
os.truncate(path, 8 * page)
os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
try:
    file.check_unchanged()
except FormatError as error:
    print(error)
""",
    )
    assert done.returncode == 0, done.stderr
    assert "zeros stood in for them" in done.stdout


def test_trip_of_one_file_leaves_another_usable(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
sigbus.install_guard()
whole = Path(sys.argv[1]) / "whole.bin"
whole.write_bytes(bytes(page))
file, other = MappedFile.open(path), MappedFile.open(whole)
os.truncate(path, page)
int(file.view(5 * page, 1)[0])
other.check_unchanged()
file.close()
del file
print(sigbus.tripped())
""",
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_view_that_outlives_its_file_stays_guarded(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
sigbus.install_guard()
file = MappedFile.open(path)
view = file.view(0, file.size)
file.close()
del file
os.truncate(path, 0)
print(int(view[3 * page]), sigbus.tripped())
""",
    )
    assert (done.returncode, done.stdout) == (0, "0 True\n"), done.stderr


def test_fault_in_another_thread_is_caught(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
import threading
sigbus.install_guard()
file = MappedFile.open(path)
os.truncate(path, 0)
seen = []
threads = [
    threading.Thread(target=lambda n=n: seen.append(int(file.view(n * page, page).sum())))
    for n in range(8)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(seen)
""",
    )
    assert (done.returncode, done.stdout) == (0, f"{[0] * 8}\n"), done.stderr


def test_fault_in_an_unregistered_mapping_still_kills(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
sigbus.install_guard()
file = MappedFile.open(path)
unguarded()[0]
print("survived")
""",
    )
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "")


def test_sent_signal_still_kills(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
sigbus.install_guard()
os.kill(os.getpid(), signal.SIGBUS)
print("survived")
""",
    )
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "")


def test_ignored_sent_signal_stays_ignored(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
signal.signal(signal.SIGBUS, signal.SIG_IGN)
sigbus.install_guard()
os.kill(os.getpid(), signal.SIGBUS)
print("survived")
""",
    )
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


def test_unrelated_signal_reaches_the_previous_handler(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
signal.signal(signal.SIGBUS, lambda number, frame: print("handled"))
sigbus.install_guard()
os.kill(os.getpid(), signal.SIGBUS)
""",
    )
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_fault_chains_to_faulthandler(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
import faulthandler
faulthandler.enable()
sigbus.install_guard()
unguarded()[0]
""",
    )
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr


def test_uninstall_restores_the_crash(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
sigbus.install_guard()
file = MappedFile.open(path)
sigbus.uninstall_guard()
os.truncate(path, 0)
file.view(page, 1)[0]
print("survived")
""",
    )
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "")


def test_uninstall_restores_the_previous_handler(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
sigbus.install_guard()
sigbus.install_guard()
sigbus.uninstall_guard()
signal.signal(signal.SIGBUS, lambda number, frame: print("handled"))
os.kill(os.getpid(), signal.SIGBUS)
""",
    )
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr


def test_uninstall_under_a_later_handler_only_passes_on(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
import faulthandler
sigbus.install_guard()
file = MappedFile.open(path)
faulthandler.enable()
sigbus.uninstall_guard()
os.truncate(path, 0)
file.view(page, 1)[0]
""",
    )
    assert done.returncode == -signal.SIGBUS


def test_guard_can_be_installed_again(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
sigbus.install_guard()
sigbus.uninstall_guard()
sigbus.install_guard()
file = MappedFile.open(path)
os.truncate(path, 0)
print(int(file.view(page, 1)[0]), sigbus.is_installed())
""",
    )
    assert (done.returncode, done.stdout) == (0, "0 True\n"), done.stderr


def test_slots_are_given_back(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
sigbus.install_guard()
for _ in range(3000):
    MappedFile.open(path).close()
print("done")
""",
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_full_table_is_a_typed_error(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        """
from edgedsv4.errors import BackendUnavailableError
sigbus.install_guard()
try:
    for n in range(1025):
        sigbus.register((n + 1) * page, page)
except BackendUnavailableError as error:
    print(n, error)
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1024 the SIGBUS guard holds at most 1,024 files")


def test_file_opened_without_a_guard_is_not_registered(tmp_path: Path) -> None:
    done = run(tmp_path, "MappedFile.open(path)\nprint(sigbus.tripped(), sigbus.register(1, 1))")
    assert (done.returncode, done.stdout) == (0, "False None\n"), done.stderr


def test_missing_extension_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(sigbus._State, "library", None)
    # A command that another test ran in this process may have installed it.
    monkeypatch.setattr(sigbus._State, "installed", False)
    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(BackendUnavailableError, match="pip install -e"):
        sigbus.install_guard()
    assert not sigbus.is_installed()


def test_without_the_guard_nothing_is_loaded(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "MappedFile.open(path).check_unchanged()\n"
        "print('edgedsv4.formats.native._sigbus' in sys.modules)",
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
