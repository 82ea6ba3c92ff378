"""The library and a program under the sanitizers: no stray byte, no undefined step, no race."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from capi.programs import GCC, HERE, POCKET, STRICT, Library, Results, checks_in, run

from edgedsv4.capi.build import BuildOptions, build, library_source
from edgedsv4.capi.header import header_path, read_header

EVERYTHING = HERE / "everything.c"
RACE = HERE / "cancel_race.c"
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
# What an interpreter and torch keep until the end are no leaks of ours.
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1"}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("sanitized")
    # The compiler's arguments reach the library through the same build that users run.
    compiler = (*GCC, *SANITIZE, "-fno-omit-frame-pointer")
    build(BuildOptions(out=folder, python=Path(sys.executable), compiler=compiler))
    library = Library(folder, folder)
    program = library.program(EVERYTHING, *SANITIZE)
    return Results(run([str(program), POCKET, str(folder / "talk.dsv4s")], environment=OPTIONS))


@pytest.mark.parametrize("name", checks_in(EVERYTHING))
def test_the_whole_interface_runs_clean(everything: Results, name: str) -> None:
    assert everything[name] == "ok"


def test_the_program_calls_every_function() -> None:
    text = EVERYTHING.read_text(encoding="utf-8") + (HERE / "check.h").read_text(encoding="utf-8")
    # Special tokens and the self test take and give nothing that the others do not.
    left_out = {"dsv4_special_token", "dsv4_selftest"}
    names = {function.name for function in read_header().functions}
    assert {name for name in names if name not in text} == left_out


@pytest.fixture(scope="module")
def race(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("race")
    source = folder / "libdsv4.c"
    source.write_text(library_source(read_header()), encoding="utf-8")
    program = folder / "race"
    includes = [header_path().parent, HERE, HERE.parents[1] / "edgedsv4/capi"]
    libpython = f"{sysconfig.get_config_var('LIBDIR')}/{sysconfig.get_config_var('INSTSONAME')}"
    run(
        [
            *(*GCC, "-std=gnu11", "-g", "-O1", "-fsanitize=thread", *STRICT[:2]),
            *('-DDSV4_DEFAULT_PYTHON=""', '-DDSV4_PACKAGE_VERSION="0"'),
            *(f"-I{folder}" for folder in includes),
            f"-I{sysconfig.get_path('include')}",
            *(str(RACE), str(source), "-o", str(program)),
            *(
                libpython,
                f"-Wl,-rpath,{sysconfig.get_config_var('LIBDIR')}",
                "-lpthread",
                "-ldl",
                "-lm",
            ),
        ]
    )
    tried = subprocess.run([str(program)], capture_output=True, text=True, check=False, env={})
    # Where the system places memory at addresses that the race checker cannot map.
    fixed = ["setarch", "-R"] if "unexpected memory mapping" in tried.stderr else []
    return Results(run([*fixed, str(program)]))


@pytest.mark.parametrize("name", checks_in(RACE))
def test_cancel_objects_have_no_race(race: Results, name: str) -> None:
    assert race[name] == "ok"
