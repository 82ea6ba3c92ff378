"""Coverage-guided fuzzing of the GGUF reader.

By hand, from the root of the repository (finds are kept in the first folder):
    python tests/fuzz/fuzz_gguf.py /tmp/gguf-work tests/fuzz/corpus/gguf -max_total_time=180
The seeds are written again by:
    python tests/fuzz/fuzz_gguf.py --write-corpus tests/fuzz/corpus/gguf
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check_one(content: bytes, folder: Path) -> bool:
    """Read `content` as a model file; anything but success or `FormatError` escapes.

    Returns:
        whether it was read.
    """
    # Imported here: `main` instruments the package first.
    from edgedsv4.errors import FormatError
    from edgedsv4.formats.gguf import read_gguf

    # Named as the first of two parts, with the second beside it: both ways through the reader are
    # open.
    path = folder / "model-00001-of-00002.gguf"
    path.write_bytes(content)
    second = folder / "model-00002-of-00002.gguf"
    if not second.exists():
        shutil.copy(ROOT / "tests" / "fuzz" / "corpus" / "gguf" / "second_part.gguf", second)
    try:
        opened = read_gguf(path)
    except FormatError as error:
        if error.path is None or (error.offset is not None and error.offset > len(content)):
            raise AssertionError(f"misplaced: {error}") from error
        return False
    with opened:
        for record in opened.tensors.values():
            if record.data().size != record.nbytes:
                raise AssertionError(f"{record.name} is not whole")
        for value in opened.metadata.values():
            if hasattr(value, "tobytes"):
                value.tobytes()
    return True


def write_corpus(folder: Path) -> None:
    """Write the seeds: small files that together visit every branch a valid file takes."""
    sys.path.insert(0, str(ROOT / "tests"))
    import gguf_bytes as gb

    def split(number: int, count: int, total: int) -> list[bytes]:
        return [
            gb.pair("split.no", gb.U16, number),
            gb.pair("split.count", gb.U16, count),
            gb.pair("split.tensors.count", gb.I32, total),
        ]

    one = [gb.tensor("a", (4,))]
    aligned = gb.pair("general.alignment", gb.U32, 8)
    nested = gb.array(gb.ARRAY, [gb.array(gb.ARRAY, [gb.array(gb.BOOL, [b"\1"])])])
    words = gb.array(gb.STRING, [gb.string(t) for t in ("", "a", "Ġthe", "漢", "🌕")])
    arch = gb.ARCHITECTURE
    seeds = {
        "every_type": gb.small(),
        "version_2": gb.Gguf(version=2),
        "one_tensor": gb.Gguf([arch], one, bytes(16)),
        "one_part": gb.Gguf([arch, *split(0, 1, 1)], one, bytes(16)),
        "first_part": gb.Gguf([arch, *split(0, 2, 2)], one, bytes(16)),
        "second_part": gb.Gguf(split(1, 2, 2), [gb.tensor("b", (4,))], bytes(16)),
        "alignment_8": gb.Gguf([arch, aligned], one, bytes(16), alignment=8),
        "nested": gb.Gguf([arch, gb.pair("k", gb.ARRAY, nested)]),
        "words": gb.Gguf([arch, gb.pair("k", gb.ARRAY, words)]),
        "trailing": gb.Gguf([arch], one, bytes(100)),
        "big_endian": gb.Gguf(version=3 << 24),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in seeds.items():
        made.write(folder / f"{name}.gguf")


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer's own options say stop."""
    import atheris
    from file_fuzzing import fuzz_files

    with atheris.instrument_imports(include=["edgedsv4.formats"]):
        import edgedsv4.formats.gguf
    assert edgedsv4.formats.gguf is not None
    fuzz_files(arguments, check_one, longest=4096)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--write-corpus"]:
        write_corpus(Path(sys.argv[2]))
    else:
        main(sys.argv)
