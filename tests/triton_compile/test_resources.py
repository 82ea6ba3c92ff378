"""Every launch of the cases is known to compile within the limits of every target.

The figures are stored (`make compile-kernels`), since compiling them all takes longer than the rest
of the suite. One variant of each kernel is compiled here, to see that the stored figures hold.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from recording import record, source_digest
from resource_table import COMMAND, ResourceTable, read_table, write_table
from resources import Resources, compile_launch, resources
from variants import MODULES, Variant, module_variants, variants

import edgedsv4.kernels.gpu
from edgedsv4.kernels.gpu.targets import TARGETS

KERNELS = Path(edgedsv4.kernels.gpu.__file__).parent
TABLE = read_table()
is_pinned_triton = pytest.mark.skipif(
    TABLE.triton != triton.__version__,
    reason=f"the stored figures are of Triton {TABLE.triton}, installed is {triton.__version__}",
)


@triton.jit
def _double(y_ptr, x_ptr, count, SIZE: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y_ptr + i, _twice(tl.load(x_ptr + i, mask=i < count, other=0.0)), mask=i < count)


@triton.jit
def _twice(x):
    return x * FACTOR


FACTOR = tl.constexpr(2.0)


def double(y: torch.Tensor, x: torch.Tensor) -> None:
    _double[(1,)](y, x, x.shape[0], SIZE=128, num_warps=2)


def meta(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def launched_kernels(path: Path) -> Iterator[str]:
    """Names, as those of launches, of what a module launches: `name_kernel[grid](...)`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    origins = {
        alias.asname or alias.name: (node.module or "").rsplit(".", 1)[-1]
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript):
            name = ast.unparse(call.func.value)
            if name.endswith("_kernel"):
                yield f"{origins.get(name, path.stem)}.{name}"


def name_and_cases(variant: Variant) -> str:
    return f"{variant.launch.name} ({', '.join(variant.cases)})"


def test_launch_is_recorded_as_triton_specialises_it() -> None:
    (launch,) = record("sm_90", lambda: double(meta(33)[1:], meta(32, torch.bfloat16)))
    assert launch.name == "test_resources._double"
    assert launch.signature == {
        "y_ptr": "*fp32",
        "x_ptr": "*bf16",
        "count": "i32",
        "SIZE": "constexpr",
    }
    assert launch.constants == {(3,): 128}
    # The result starts four bytes behind an aligned address; the others are multiples of 16.
    assert [path for path, value in launch.attributes.items() if value] == [(1,), (2,)]
    assert launch.options["num_warps"] == 2


def test_recorded_launch_compiles() -> None:
    (launch,) = record("gfx1151", lambda: double(meta(64), meta(64)))
    taken = resources(compile_launch(launch))
    assert taken.spilled == 0
    assert 1 < taken.registers < 64
    assert taken.faults("gfx1151") == []


def test_digest_follows_what_a_kernel_calls_and_what_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def digest() -> str:
        source_digest.cache_clear()
        return source_digest(_double)

    before = digest()
    monkeypatch.setitem(globals(), "FACTOR", tl.constexpr(3.0))
    assert digest() != before


def test_digest_follows_types_and_alignment() -> None:
    digests = {
        record("sm_90", lambda y=y, x=x: double(y, x))[0].digest
        for y, x in (
            (meta(64), meta(64)),
            (meta(64), meta(64, torch.float16)),
            (meta(65)[1:], meta(64)),
            (meta(64), meta(63)),
        )
    }
    assert len(digests) == 4


def test_too_much_is_a_fault() -> None:
    assert Resources(64 << 10, 100, 0).faults("gfx942") == []
    assert Resources((64 << 10) + 1, 100, 8).faults("gfx942") == [
        "65537 bytes of shared memory, 65536 are there",
        "8 bytes of registers are spilled",
    ]


def test_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = ResourceTable("3.7.1")
    table.put("sm_90", "aa", "one._kernel", Resources(1024, 32, 0))
    table.put("gfx942", "aa", "one._kernel", Resources(16, 24, 4))
    write_table(table, tmp_path / "table.tsv")
    assert read_table(tmp_path / "table.tsv") == table


def test_every_kernel_has_a_case() -> None:
    launched = {variant.launch.name for target in TARGETS for variant in variants(target).values()}
    kernels = {name for path in KERNELS.glob("*.py") for name in launched_kernels(path)}
    assert sorted(kernels - launched) == []


@is_pinned_triton
@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_is_in_the_table(target: str) -> None:
    missing = [
        name_and_cases(variant)
        for digest, variant in variants(target).items()
        if (target, digest) not in TABLE.figures
    ]
    assert not missing, f"new or changed kernels: run `{COMMAND}` and keep the table it writes"


@is_pinned_triton
@pytest.mark.parametrize("target", TARGETS)
def test_every_launch_fits(target: str) -> None:
    faults = {
        name_and_cases(variant): found
        for digest, variant in variants(target).items()
        if (taken := TABLE.figures.get((target, digest))) and (found := taken.faults(target))
    }
    assert not faults


@pytest.mark.parametrize("target", ["sm_120", "gfx942"])
@pytest.mark.parametrize("module", MODULES)
def test_first_launch_of_each_kernel_takes_what_is_stored(module: str, target: str) -> None:
    firsts: dict[str, str] = {}
    for digest, variant in module_variants(module, target).items():
        firsts.setdefault(variant.launch.name, digest)
    for digest in firsts.values():
        variant = module_variants(module, target)[digest]
        taken = resources(compile_launch(variant.launch))
        assert taken.faults(target) == [], name_and_cases(variant)
        if TABLE.triton == triton.__version__:
            assert taken == TABLE.figures.get((target, digest), taken), name_and_cases(variant)
