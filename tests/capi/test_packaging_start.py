"""The start inside other programs: every way in that works, and what is said where none does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest
from capi.programs import GCC, HERE, STRICT, Library, Results, build_library, checks_in, run

from edgedsv4.capi.header import header_path

SOURCE, LOADER = HERE / "start.c", HERE / "loader.c"
CASES = ("thread", "crowd", "fork", "surroundings", "text")
POCKET_FILE = header_path().parents[1] / "edgedsv4/data/pocket-v4/pocket-v4.gguf"
LIMA = "The capital of Peru is Lima."
RUBBISH = {
    "PYTHONHOME": "/nonexistent",
    "PYTHONPATH": "/nonexistent",
    "PYTHONSTARTUP": "/nonexistent",
    "PYTHONOPTIMIZE": "2",
    "PYTHONWARNINGS": "error",
    "PYTHONVERBOSE": "1",
    "VIRTUAL_ENV": "/nonexistent",
    "LC_ALL": "xx_YY.nothing",
}


def start(library: Library, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Output of a case, which must print nothing on stderr."""
    program = library.program(SOURCE)
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, check=False, env=environment or {}
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def results(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Results:
    model = tmp_path_factory.mktemp("models") / os.fsdecode(b"m\xc3\xa4\xff.gguf")
    model.symlink_to(POCKET_FILE)
    return Results("".join(start(library, case, str(model)) for case in CASES))


@pytest.mark.parametrize("name", [name for name in checks_in(SOURCE) if name != "a reply"])
def test_start(results: Results, name: str) -> None:
    assert results[name] == "ok"


def test_the_environment_is_not_read(library: Library) -> None:
    assert Results(start(library, environment=RUBBISH))["a reply"] == "ok"


def test_another_python_on_the_path_is_not_taken(library: Library, tmp_path: Path) -> None:
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    other.chmod(0o755)
    output = start(library, environment={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    assert Results(output)["a reply"] == "ok"


def test_exit_while_sessions_work_ends_with_its_status(library: Library) -> None:
    program = library.program(SOURCE)
    for _ in range(3):
        done = subprocess.run([program, "exit"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


# Hosts that load the library while they run


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory, library: Library) -> Path:
    """Not linked with the library."""
    target = tmp_path_factory.mktemp("loader") / "loader"
    flags = ["-std=gnu11", *STRICT[:2], "-Werror", f"-I{library.prefix / 'include'}"]
    run([*GCC, *flags, str(LOADER), "-o", str(target), "-ldl"])
    return target


def test_a_host_may_load_it_for_itself_alone(loader: Path, library: Library) -> None:
    assert run([str(loader), "reply", str(library.prefix / "lib/libdsv4.so")]) == LIMA


def test_it_works_again_after_it_was_unloaded(loader: Path, library: Library) -> None:
    assert run([str(loader), "reopen", str(library.prefix / "lib/libdsv4.so")]) == LIMA


def test_a_second_copy_says_what_is_wrong(loader: Path, library: Library, tmp_path: Path) -> None:
    original, copy = library.prefix / "lib/libdsv4.so.1", tmp_path / "libdsv4.so.1"
    shutil.copyfile(original, copy)
    first, second, text = run([str(loader), "two", str(original), str(copy)]).split(" ", 2)
    assert (first, second) == ("0", "-18")
    assert "another copy of libdsv4" in text


# Installations that are broken


def refusals(library: Library, python: Path | str) -> str:
    """Why the start failed; later calls must give the same reason."""
    facts = Results(start(library, "init", str(python))).facts
    assert facts["first"] == facts["later"]
    status, _, text = facts["first"].partition(" ")
    assert status == "-18"
    return text


def own_packages() -> list[str]:
    """Lines of a path file that lend the packages of the Python that runs the tests."""
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    return [f"import site; site.addsitedir({folder!r})" for folder in folders]


def environment_of(folder: Path, *lines: str) -> Path:
    """A virtual environment with a path file of these lines; its Python."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    base = Path(sys.executable).resolve()
    python.symlink_to(base)
    (folder / "pyvenv.cfg").write_text(
        f"home = {base.parent}\ninclude-system-site-packages = false\n", encoding="utf-8"
    )
    site = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    site.mkdir(parents=True)
    (site / "own.pth").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return python


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ("/no/such/python", "No such file or directory"),
        ("/usr", "Is a directory"),
        ("/etc/passwd", "Permission denied"),
    ],
)
def test_a_python_that_cannot_be_run(library: Library, python: str, reason: str) -> None:
    text = refusals(library, python)
    assert f"{python}: {reason}" in text
    assert "python -m edgedsv4.capi.build" in text


def test_a_python_without_the_package(library: Library, tmp_path: Path) -> None:
    python = environment_of(tmp_path / "bare")
    text = refusals(library, python)
    assert f"({python})" in text
    assert "install it there" in text
    assert "No module named 'edgedsv4'" in text


def test_a_package_that_does_not_load(library: Library, tmp_path: Path) -> None:
    package = tmp_path / "packages" / "edgedsv4"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("print('x')\nraise OSError('gone')\n", encoding="utf-8")
    python = environment_of(tmp_path / "broken", str(package.parent))
    assert refusals(library, python).endswith("OSError: gone")


def test_a_package_of_another_interface(library: Library, tmp_path: Path) -> None:
    entry = tmp_path / "packages" / "edgedsv4" / "capi" / "entry.py"
    entry.parent.mkdir(parents=True)
    original = header_path().parents[1] / "edgedsv4/capi/entry.py"
    text = original.read_text(encoding="utf-8").replace(
        "expected = read_header().abi_version", "expected = 2000"
    )
    # The package itself, but for this one module.
    entry.with_name("__init__.py").write_text(
        f"__path__.append({str(original.parent)!r})\n", encoding="utf-8"
    )
    entry.parents[1].joinpath("__init__.py").write_text(
        f"exec(open({str(original.parents[1] / '__init__.py')!r}).read())\n"
        f"__path__.append({str(original.parents[1])!r})\n",
        encoding="utf-8",
    )
    entry.write_text(text, encoding="utf-8")
    lines = [str(entry.parents[2]), *own_packages()]
    reason = refusals(library, environment_of(tmp_path / "other", *lines))
    assert "built for interface 1000, the package has 2000; build it again" in reason


def test_a_virtual_environment_whose_python_is_gone(library: Library, tmp_path: Path) -> None:
    python = environment_of(tmp_path / "lost")
    config = tmp_path / "lost" / "pyvenv.cfg"
    config.write_text("home = /no/such/folder\n", encoding="utf-8")
    assert "No module named 'edgedsv4'" in refusals(library, python)


def test_a_library_for_a_python_that_was_removed(tmp_path: Path) -> None:
    python = environment_of(tmp_path / "env", *own_packages())
    removed = Library(build_library(tmp_path / "prefix", python), tmp_path)
    assert Results(start(removed))["a reply"] == "ok"
    shutil.rmtree(tmp_path / "env")
    program = removed.program(SOURCE)
    done = subprocess.run([program], capture_output=True, text=True, check=False, env={})
    assert done.returncode == 3
    assert re.search(rf"DSV4_ERR_INIT: .*{python}: No such file", done.stderr)


FAKE_LIBPYTHON = """
const char *Py_GetVersion(void) { return "3.0.0 (another)"; }
int Py_IsInitialized(void) { return 0; }
long _Py_NoneStruct[8];
"""


def test_a_libpython_of_another_version(library: Library, tmp_path: Path) -> None:
    (tmp_path / "fake.c").write_text(FAKE_LIBPYTHON, encoding="utf-8")
    name = str(sysconfig.get_config_var("INSTSONAME"))
    target = tmp_path / name
    run([*GCC, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(target), f"{tmp_path}/fake.c"])
    environment = {"LD_LIBRARY_PATH": str(tmp_path)}
    facts = Results(start(library, "init", "", environment=environment)).facts
    assert facts["first"] == facts["later"]
    assert f"expected {sys.version.split()[0]}, found: 3.0.0 (another)" in facts["first"]


# Programs that run Python already


@pytest.mark.parametrize("before", ["", "import torch", "import edgedsv4.capi.entry"])
def test_a_program_in_python_is_told_to_import_the_package(library: Library, before: str) -> None:
    code = f"""{before}
import ctypes
library = ctypes.CDLL({str(library.prefix / "lib/libdsv4.so")!r})
library.dsv4_last_error.restype = ctypes.c_char_p
for _ in range(2):
    status = library.dsv4_devices_json(None, 0, ctypes.byref(ctypes.c_size_t()))
    print(status, library.dsv4_last_error().decode())
"""
    lines = run([sys.executable, "-c", code]).splitlines()
    assert len(set(lines)) == 1
    assert lines[0].startswith("-18 this process already runs Python")
    assert "import the package edgedsv4" in lines[0]
