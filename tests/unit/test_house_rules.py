"""The rules of CONTRIBUTING.md that a linter does not know.

An exception needs a marker with its reason: `# house-rule: long file, because …` anywhere in the
file, or `# house-rule: long function, because …` in the function.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "edgedsv4"
APP = ROOT / "apps" / "tui" / "dsv4_chat"
MODULES = sorted({*PACKAGE.rglob("*.py"), *APP.rglob("*.py")})
C_SOURCES = sorted(
    {
        *PACKAGE.rglob("*.[ch]"),
        *(path for end in ("[ch]", "cc") for path in (ROOT / "tests").rglob(f"*.{end}")),
        *(path for end in ("c", "cpp") for path in (ROOT / "examples").glob(f"*.{end}")),
        # dsv4.h has a test of its own.
        ROOT / "include" / "dsv4.hpp",
    }
)
SOURCES = sorted({*MODULES, *(ROOT / "tests").rglob("*.py"), *C_SOURCES})
BANNED_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "manager"}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES, MAX_ARGUMENTS = 500, 60, 120, 6
MAX_C_COLUMNS = 120

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def has_exception(text: str, rule: str) -> bool:
    return re.search(rf"house-rule: {rule}, because \S", text) is not None


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_of(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def source_of(path: Path, node: Function) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[node.lineno - 1 : node.end_lineno])


def code_lines(node: Function) -> int:
    """Lines of a function without its docstring."""
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node) is None:
        return length
    doc = node.body[0]
    return length - ((doc.end_lineno or doc.lineno) - doc.lineno + 1)


def is_triton_kernel(node: Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def is_overload(node: Function) -> bool:
    return any("overload" in ast.unparse(decorator) for decorator in node.decorator_list)


def every(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=name_of)


@every(SOURCES)
def test_file_is_not_too_long(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert has_exception(text, "long file") or len(text.splitlines()) <= MAX_FILE_LINES


@every(SOURCES)
def test_module_has_a_telling_name(path: Path) -> None:
    assert path.stem not in BANNED_NAMES


@every([path for path in SOURCES if path.suffix == ".py"])
def test_functions_are_not_too_long(path: Path) -> None:
    long = {
        node.name: code_lines(node)
        for node in functions_of(path)
        if code_lines(node) > (MAX_KERNEL_LINES if is_triton_kernel(node) else MAX_FUNCTION_LINES)
        and not has_exception(source_of(path, node), "long function")
    }
    assert not long


def c_functions_of(text: str) -> Iterator[tuple[str, str]]:
    """Signature and text of each function: its braces stand alone, the closing one in column 0."""
    for match in re.finditer(r"^(\w[^\n;{}]*\((?:[^;{}]*)\))\s*\{.*?^\}", text, re.M | re.S):
        yield " ".join(match[1].split()), match[0]


@every(C_SOURCES)
def test_c_functions_are_not_too_long(path: Path) -> None:
    long = {
        signature: body.count("\n") + 1
        for signature, body in c_functions_of(path.read_text(encoding="utf-8"))
        if body.count("\n") + 1 > MAX_FUNCTION_LINES and not has_exception(body, "long function")
    }
    assert not long


def test_c_functions_are_found() -> None:
    text = "int one(void) { return 1; }\n\nstatic int two(int a,\n    int b)\n{\n    return 2;\n}\n"
    names = [signature for signature, _ in c_functions_of(text.replace("; }\n", ";\n}\n"))]
    assert names == ["int one(void)", "static int two(int a, int b)"]


@every(C_SOURCES)
def test_c_lines_are_not_too_wide(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not [number for number, line in enumerate(lines, 1) if len(line) > MAX_C_COLUMNS]


@every(C_SOURCES)
def test_c_file_says_what_it_is_for(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("/* ")


@every(MODULES)
def test_functions_take_few_arguments(path: Path) -> None:
    in_kernels = path.is_relative_to(PACKAGE / "kernels")
    in_capi = path.is_relative_to(PACKAGE / "capi")
    crowded = {}
    for node in functions_of(path):
        if in_capi and node.name.startswith("dsv4_"):
            continue  # its arguments are those of the C function it stands for
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        if not in_kernels:
            names += [arg.arg for arg in node.args.kwonlyargs]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_ARGUMENTS and not is_triton_kernel(node):
            crowded[node.name] = count
    assert not crowded


@every(MODULES)
def test_module_says_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


@every(MODULES)
def test_public_names_are_documented(path: Path) -> None:
    bare = [name for name, node in public_definitions(tree_of(path)) if not ast.get_docstring(node)]
    assert not bare


def public_definitions(
    parent: ast.Module | ast.ClassDef,
) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    for node in parent.body:
        if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
            continue
        if isinstance(node, Function) and is_overload(node):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{name}", inner) for name, inner in public_definitions(node))


@every([path for path in sorted(PACKAGE.rglob("*.py")) if not path.is_relative_to(PACKAGE / "cli")])
def test_library_reads_no_environment_and_prints_nothing(path: Path) -> None:
    found = [
        ast.unparse(node)
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"))
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "print")
    ]
    assert not found


@every(sorted((PACKAGE / "kernels").rglob("*.py")))
def test_public_kernel_functions_are_fully_annotated(path: Path) -> None:
    bare = []
    for node in tree_of(path).body:
        if not isinstance(node, Function) or node.name.startswith("_") or is_triton_kernel(node):
            continue
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if node.returns is None or any(argument.annotation is None for argument in arguments):
            bare.append(node.name)
    assert not bare
