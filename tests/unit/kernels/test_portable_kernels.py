"""Kernels keep to the part of Triton that every compiler has, Intel's included.

That compiler is not to be had here, so the source is read instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgedsv4.kernels.gpu
from edgedsv4.kernels.gpu.expert_scaled import has_scaled_products
from edgedsv4.kernels.gpu.nvidia import has_byte_products, overlap_options, overlaps

MODULES = sorted(Path(edgedsv4.kernels.gpu.__file__).parent.glob("*.py"))
REFUSED = {
    "dot_scaled": "no compiler has every form of it",
    "inline_asm_elementwise": "assembler is of one vendor, and the interpreter has none",
    "libdevice": "a library of one vendor, which the interpreter has not",
    "extra": "what one vendor has",
    "make_tensor_descriptor": "needs an allocator on the GPU",
    "load_tensor_descriptor": "needs an allocator on the GPU",
    "make_block_ptr": "goes from Triton",
    "sort": "takes seconds to compile; select by thresholds",
    "topk": "takes seconds to compile; select by thresholds",
    "autotune": "needs a GPU to decorate a function; tile sizes come from a table",
    "heuristics": "tile sizes come from a table",
    "device_print": "debugging",
    "static_print": "debugging",
}
VENDOR_MODULES = {"libdevice", "extra"}
VENDOR_KERNELS = {"nvidia": {"inline_asm_elementwise"}, "expert_scaled": {"dot_scaled"}}
"""Modules whose kernels only the launchers of one vendor's cards take, and what they may use."""
FLOAT8 = "float8"


def names_in(node: ast.AST) -> Iterator[str]:
    """Of attributes, as in `tl.sort`, and of modules that are used by their own name."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Name) and part.id in VENDOR_MODULES | {"jit"}:
            yield part.id


def kernels_of(text: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and "jit" in {
            name for decorator in node.decorator_list for name in names_in(decorator)
        }:
            yield node


def is_native_branch(node: ast.AST) -> bool:
    """Whether a statement is compiled only where a launcher asked for the hardware's own types."""
    return isinstance(node, ast.If) and any(
        isinstance(part, ast.Name) and part.id.startswith("NATIVE") for part in ast.walk(node.test)
    )


def float8_names(node: ast.AST) -> Iterator[str]:
    """Names of 8 bit floats outside of branches for hardware that has them."""
    if is_native_branch(node):
        for other in node.orelse:
            yield from float8_names(other)
        return
    name = getattr(node, "attr", None) or getattr(node, "id", None)
    if isinstance(name, str) and FLOAT8 in name:
        yield name
    for child in ast.iter_child_nodes(node):
        yield from float8_names(child)


def faults(text: str) -> list[str]:
    """What a module's kernels hold that not every compiler takes."""
    found = []
    for kernel in kernels_of(text):
        found += [f"{kernel.name}: {n}: {REFUSED[n]}" for n in names_in(kernel) if n in REFUSED]
        found += [f"{kernel.name}: {name}: pass bytes and decode" for name in float8_names(kernel)]
        for call in ast.walk(kernel):
            if isinstance(call, ast.Call):
                found += [f"{kernel.name}: {fault}" for fault in call_faults(kernel.name, call)]
    return found


def call_faults(kernel: str, call: ast.Call) -> Iterator[str]:
    """A load whose masked values are unknown; a product whose precision hangs on the hardware."""
    keywords = {keyword.arg for keyword in call.keywords}
    called = ast.unparse(call.func)
    if called == "tl.load" and "mask" in keywords and "other" not in keywords:
        yield "a masked load without `other`"
    if called == "tl.dot" and "input_precision" not in keywords and kernel != "dot_acc":
        yield "tl.dot without input_precision: say one, or use dot_acc for 16 bit operands"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_kernels_are_portable(path: Path) -> None:
    allowed = VENDOR_KERNELS.get(path.stem, set())
    found = faults(path.read_text(encoding="utf-8"))
    assert [fault for fault in found if fault.split(": ")[1] not in allowed] == []


def test_kernels_of_one_vendor_are_chosen_by_family() -> None:
    """AMD's and Intel's families get neither; that launchers ask is theirs to test."""
    others = ("gfx942", "gfx1151", "gfx1201", "xpu", "")
    assert not any(has_byte_products(family) or overlaps(family) for family in others)
    assert not any(has_scaled_products(family) for family in (*others, "sm_89", "sm_90"))
    assert [overlaps(family) for family in ("sm_89", "sm_90", "sm_120")] == [False, True, True]
    assert overlap_options(overlap=False) == {"OVERLAP": False}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_triton_is_imported_from_the_one_place(path: Path) -> None:
    imports = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and any("triton" in name.name for name in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton"))
    ]
    assert not imports


@pytest.mark.parametrize(
    "body",
    [
        "tl.dot_scaled(a, s, 'e4m3', b, s, 'e4m3')",
        "tl.extra.cuda.libdevice.tanh(a)",
        "tl.sort(a)",
        "a.to(tl.float8e4nv)",
        "tl.load(a, mask=b)",
        "tl.dot(a, b)",
    ],
)
def test_what_is_not_portable_is_found(body: str) -> None:
    assert faults(f"@triton.jit\ndef kernel(a, b, s):\n    {body}\n")


def test_hardware_types_are_allowed_where_a_launcher_asks_for_them() -> None:
    branch = (
        "    if NATIVE:\n        return a.to(tl.float8e4nv)\n    else:\n        return {other}\n"
    )
    head = "@triton.jit\ndef kernel(a, NATIVE: tl.constexpr):\n"
    assert faults(head + branch.format(other="a")) == []
    assert faults(head + branch.format(other="a.to(tl.float8e5)"))
