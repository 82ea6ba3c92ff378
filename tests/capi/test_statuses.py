"""Every status once, with its text and the details beside it."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import gguf
import pytest
from capi.programs import HERE, POCKET, Library, Results, checks_in

from edgedsv4.capi.bridge import lib, status_of
from edgedsv4.capi.header import header_path
from edgedsv4.errors import CapacityError

SOURCE = HERE / "statuses.c"
FAULTS = HERE / "faults.c"
DATA = header_path().parents[1] / "edgedsv4/data/pocket-v4/pocket-v4.gguf"


def python_prefix(folder: Path, statement: str) -> Path:
    """A Python with the packages of this one that runs a statement at its start.

    Returns:
        Its executable.
    """
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text(
        f"home = {Path(sys.executable).resolve().parent}\ninclude-system-site-packages = false\n",
        encoding="utf-8",
    )
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(packages)]
    (site / "own.pth").write_text("\n".join([*lines, statement, ""]), encoding="utf-8")
    return python


@pytest.fixture(scope="module")
def results(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("files")
    data = DATA.read_bytes()
    (folder / "cut.gguf").write_bytes(data[:5000])
    (folder / "short.gguf").write_bytes(data[: len(data) // 2])
    (folder / "page.gguf").write_bytes(b"<!doctype html>" + bytes(500))
    writer = gguf.GGUFWriter(folder / "llama.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    # `write` of the program has to be seen by the libraries under it.
    return library.results(SOURCE, POCKET, folder, flags=["-rdynamic"])


@pytest.mark.parametrize("name", checks_in(SOURCE))
def test_status(results: Results, name: str) -> None:
    assert results[name] == "ok"


@pytest.fixture(scope="module")
def faults(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("faults") / "python"
    statement = f"import sys; sys.path.append({str(HERE)!r}); import patched"
    return library.results(FAULTS, POCKET, python_prefix(folder, statement))


@pytest.mark.parametrize("name", checks_in(FAULTS))
def test_fault(faults: Results, name: str) -> None:
    assert faults[name] == "ok"


def test_every_status_is_provoked() -> None:
    text = header_path().read_text(encoding="utf-8")
    statuses = set(re.findall(r"^    DSV4_ERR_(\w+) = ", text, re.MULTILINE))
    provoked = {name.split(".")[0] for name in [*checks_in(SOURCE), *checks_in(FAULTS)]}
    # INIT means that nothing runs; it has tests of its own.
    assert statuses - {"INIT"} <= provoked


@pytest.mark.parametrize(
    ("is_on_device", "expected"), [(False, "OUT_OF_MEMORY"), (True, "DEVICE_MEMORY")]
)
def test_full_memory_of_a_device_is_told_apart(is_on_device: bool, expected: str) -> None:
    error = CapacityError("x", needed_bytes=2, available_bytes=1, is_on_device=is_on_device)
    assert status_of(error) == getattr(lib, f"DSV4_ERR_{expected}")
