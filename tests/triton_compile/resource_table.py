"""What compiled kernels take, as it is kept in `tests/data/triton_resources.tsv`.

A line has the kernel, the digest of the variant, then `target:shared/registers/spilled` of every
target that launches it. The first line names the Triton that made the figures.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import astuple, dataclass, field
from pathlib import Path

from resources import Resources

FILE = Path(__file__).parents[1] / "data" / "triton_resources.tsv"
COMMAND = "make compile-kernels"


@dataclass
class ResourceTable:
    """Figures by target and digest."""

    triton: str
    """Version that compiled them."""
    figures: dict[tuple[str, str], Resources] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    """Kernel by digest."""

    def put(self, target: str, digest: str, name: str, taken: Resources) -> None:
        """Add one variant."""
        self.figures[target, digest] = taken
        self.names[digest] = name


def read_table(path: Path = FILE) -> ResourceTable:
    """The stored table, an empty one of no version if there is none."""
    if not path.exists():
        return ResourceTable("none")
    first, *lines = path.read_text(encoding="ascii").splitlines()
    table = ResourceTable(first.removeprefix("# triton "))
    for line in lines:
        name, digest, *cells = line.split("\t")
        for cell in cells:
            target, _, numbers = cell.partition(":")
            table.put(target, digest, name, Resources(*map(int, numbers.split("/"))))
    return table


def write_table(table: ResourceTable, path: Path = FILE) -> None:
    """Replace the stored table."""
    cells = defaultdict(list)
    for (target, digest), taken in table.figures.items():
        cells[table.names[digest], digest].append(f"{target}:{'/'.join(map(str, astuple(taken)))}")
    lines = ["\t".join([*key, *sorted(row)]) for key, row in sorted(cells.items())]
    text = "\n".join([f"# triton {table.triton}", *lines, ""])
    path.write_text(text, encoding="ascii")
