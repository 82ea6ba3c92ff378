"""Building the library: what it says when something is missing, and what it leaves as it was."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from capi.programs import GCC, ROOT

from edgedsv4.capi import build
from edgedsv4.capi.build import BuildError, BuildOptions

FAILING_CC = f"{shlex.quote(sys.executable)} -c 'import sys; sys.exit(\"broken compiler\")'"


def options(folder: Path, python: str = sys.executable, compiler: str = GCC[0]) -> BuildOptions:
    return BuildOptions(folder / "prefix", Path(python), (compiler,))


def refused(chosen: BuildOptions) -> str:
    with pytest.raises(BuildError) as caught:
        build.build(chosen)
    assert not list(chosen.out.rglob("*.so*"))
    return str(caught.value)


def set_variables(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    """Let this Python look like one that was built in another way."""
    variables = {**sysconfig.get_config_vars(), **values}
    monkeypatch.setattr(sysconfig, "get_config_vars", lambda: variables)


def test_a_python_without_a_shared_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_variables(monkeypatch, Py_ENABLE_SHARED=0)
    said = refused(options(tmp_path))
    assert "without a shared libpython" in said
    assert "--enable-shared" in said


def test_a_python_without_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    assert "Python.h is missing; install the headers of Python" in refused(options(tmp_path))


def test_a_python_whose_library_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_variables(monkeypatch, LIBDIR=str(tmp_path), LIBPL=None, INSTSONAME="libpython.so.1")
    assert f"libpython.so.1 is in none of {tmp_path}" in refused(options(tmp_path))


def test_no_compiler(tmp_path: Path) -> None:
    said = refused(options(tmp_path, compiler="no-such-compiler"))
    assert said.startswith("no C compiler 'no-such-compiler' found: install gcc or clang")


def test_a_compiler_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = build.main(["--out", str(tmp_path / "prefix"), "--cc", FAILING_CC])
    said = capsys.readouterr()
    assert (status, said.out) == (1, "")
    assert said.err.endswith("failed:\nbroken compiler\n")


def test_a_python_that_is_not_there(tmp_path: Path) -> None:
    said = refused(options(tmp_path, python="/no/such/python"))
    assert said == "/no/such/python cannot be run: No such file or directory"


def test_a_python_that_does_not_have_the_package(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    said = refused(options(tmp_path, python=str(tmp_path / "bare/bin/python")))
    assert "does not find edgedsv4 by itself (ModuleNotFoundError: " in said
    assert "install it there with pip" in said


def test_a_python_of_another_version(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho '3.99.0 (another)'\n", encoding="utf-8")
    other.chmod(0o755)
    assert f"{other} is Python 3.99.0, the build runs in 3." in refused(
        options(tmp_path, python=str(other))
    )


def test_a_prefix_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prefix").write_text("a file", encoding="utf-8")
    status = build.main(["--out", str(tmp_path / "prefix")])
    assert status == 1
    assert str(tmp_path / "prefix") in capsys.readouterr().err


def test_a_failed_build_leaves_the_earlier_one(tmp_path: Path) -> None:
    library = build.build(options(tmp_path))
    before = {path: path.stat().st_ino for path in sorted((tmp_path / "prefix").rglob("*"))}
    with pytest.raises(BuildError):
        build.build(options(tmp_path, compiler="false"))
    assert {path: path.stat().st_ino for path in sorted((tmp_path / "prefix").rglob("*"))} == before
    assert library == tmp_path / "prefix/lib/libdsv4.so.1"


def test_a_prefix_may_have_an_awkward_name(tmp_path: Path) -> None:
    folder = tmp_path / 'a "b" \\ c, d'
    folder.mkdir()
    library = build.build(options(folder))
    assert library.is_file()


def test_an_installed_package_builds_the_library(tmp_path: Path) -> None:
    # What an installation copies; the compiled part comes from here.
    packages = tmp_path / "packages"
    setup = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(packages)]
    subprocess.run(setup, cwd=ROOT, check=True, capture_output=True)
    for library in (ROOT / "edgedsv4/capi").glob("_entry*.so"):
        shutil.copy(library, packages / "edgedsv4/capi")
    assert not (packages / "include").exists()
    installed = packages / "edgedsv4/capi"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    site = tmp_path / "env/lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    own = "".join(f"{path}\n" for path in sys.path if path.endswith("site-packages"))
    (site / "own.pth").write_text(f"{packages}\n{own}", encoding="utf-8")
    command = [tmp_path / "env/bin/python", "-m", "edgedsv4.capi.build", "--out", tmp_path / "out"]
    environment = {"PATH": os.defpath}
    done = subprocess.run(
        command, cwd=site, capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("dsv4.h", "dsv4.hpp"):
        assert (tmp_path / "out/include" / name).read_bytes() == (
            installed / "include" / name
        ).read_bytes()
