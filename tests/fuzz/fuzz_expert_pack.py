"""Coverage-guided fuzzing of the reader of expert packs: header, index, trailer and manifest.

By hand, from the root of the repository (finds are kept in the first folder):
    python tests/fuzz/fuzz_expert_pack.py /tmp/pack-work tests/fuzz/corpus/expert_pack \\
        -max_total_time=180
The seeds are written again by:
    python tests/fuzz/fuzz_expert_pack.py --write-corpus tests/fuzz/corpus/expert_pack
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def check_one(content: bytes, folder: Path) -> bool:
    """Read `content` as a manifest or as a pack; anything but success or `FormatError` escapes.

    Returns:
        whether it was read.
    """
    # Imported here: `main` instruments the package first.
    from edgedsv4.errors import FormatError
    from edgedsv4.formats.expert_pack import read_expert_pack
    from edgedsv4.formats.expert_pack_manifest import read_manifest

    path = folder / "x"
    path.write_bytes(content)
    try:
        if content[:1] == b"{":
            manifest = read_manifest(path)
            return len(manifest.index_sha256) == 64
        opened = read_expert_pack(path)
    except FormatError as error:
        if error.path is None or (error.offset is not None and error.offset > len(content)):
            raise AssertionError(f"misplaced: {error}") from error
        return False
    with opened:
        ends = [opened.header.data_start]
        for layer in range(opened.header.num_layers):
            for expert in range(opened.header.num_experts):
                for role in range(3):
                    offset, nbytes = opened.place(layer, expert, role)
                    if offset < ends[-1] or opened.file.view(offset, nbytes).size != nbytes:
                        raise AssertionError("a matrix is not whole, or overlaps another")
                    ends.append(offset + nbytes)
        if len(opened.index_sha256()) != 64:
            raise AssertionError("no digest")
    return True


def write_corpus(folder: Path) -> None:
    """Write the seeds: small files that together visit every branch a valid file takes."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "unit" / "formats")]
    import json

    import numpy as np
    from pack_files import MXFP4, SmallPack, set_entry, set_header
    from test_expert_pack_manifest import values_of

    from edgedsv4.formats.expert_pack_trailer import ExpertFrequency

    small = SmallPack(types=[MXFP4], experts=2, hidden=32, width=32, top_k=1, alignment=64)
    mixed = SmallPack(version=2, types=[("F32", "F32", "F16"), ("F16", "F16", "F16")])
    mixed.experts, mixed.alignment, mixed.hidden, mixed.width, mixed.top_k = 1, 64, 4, 2, 1
    counted = SmallPack(version=2, types=[("F16", "F16", "F16")], hidden=4, width=2, alignment=64)
    counted.frequency = ExpertFrequency(9, np.array([[1, 2, 3]], dtype=np.uint64))
    bad_header, bad_index = small.content(), small.content()
    set_header(bad_header, "alignment", 3)
    set_entry(bad_index, "generation", 1, 5)
    seeds: dict[str, bytes | bytearray] = {
        "version_1": small.content(),
        "version_2_mixed": mixed.content(),
        "version_2_frequency": counted.content(),
        "bad_header": bad_header,
        "bad_index": bad_index,
        "cut": small.content()[:-9],
        "manifest": json.dumps(values_of(small, Path("/x"))).encode(),
        "manifest_unfinished": json.dumps({"complete": False}).encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in seeds.items():
        (folder / f"{name}.bin").write_bytes(made)


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer's own options say stop."""
    import atheris
    from file_fuzzing import fuzz_files

    with atheris.instrument_imports(include=["edgedsv4.formats"]):
        import edgedsv4.formats.expert_pack
        import edgedsv4.formats.expert_pack_manifest
    assert edgedsv4.formats.expert_pack is not None
    fuzz_files(arguments, check_one, longest=8192)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--write-corpus"]:
        write_corpus(Path(sys.argv[2]))
    else:
        main(sys.argv)
