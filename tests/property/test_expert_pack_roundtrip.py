"""Whatever the layout, a pack says where each matrix is, and nothing overlaps or is displaced."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_files import HEADER_FIELDS, SmallPack, set_header

from edgedsv4.errors import FormatError
from edgedsv4.formats.expert_pack import read_expert_pack
from edgedsv4.formats.expert_pack_trailer import ExpertFrequency, parse_trailer, trailer_bytes

TYPES = ("MXFP4", "Q4_0", "Q8_0", "Q5_1", "F16", "F32", "NVFP4")


@st.composite
def packs(draw: st.DrawFn) -> SmallPack:
    layers = draw(st.integers(1, 3))
    version = draw(st.sampled_from((1, 2)))
    kinds = st.just("MXFP4") if version == 1 else st.sampled_from(TYPES)
    experts = draw(st.integers(1, 4))
    frequency = None
    if version == 2 and draw(st.booleans()):
        row = st.lists(st.integers(0, (1 << 53) - 1), min_size=experts, max_size=experts)
        counts = draw(st.lists(row, min_size=layers, max_size=layers))
        tokens = draw(st.integers(1, 1 << 40))
        frequency = ExpertFrequency(tokens, np.array(counts, dtype=np.uint64))
    return SmallPack(
        version=version,
        types=draw(st.lists(st.tuples(kinds, kinds, kinds), min_size=layers, max_size=layers)),
        experts=experts,
        hidden=64 * draw(st.integers(1, 2)),
        width=64 * draw(st.integers(1, 2)),
        top_k=draw(st.integers(1, experts)),
        alignment=1 << draw(st.integers(6, 13)),
        frequency=frequency,
    )


@settings(max_examples=60, deadline=None)
@given(made=packs())
def test_pack_comes_back(tmp_path_factory: pytest.TempPathFactory, made: SmallPack) -> None:
    content = made.content()
    path = tmp_path_factory.mktemp("x") / "x"
    path.write_bytes(content)
    with read_expert_pack(path) as pack:
        assert pack.header == made.header()
        assert pack.shape == made.shape
        assert pack.layout == made.layout()
        assert pack.header.encode() == content[:176]
        end = pack.header.index_end
        for layer in range(pack.header.num_layers):
            for expert in range(pack.header.num_experts):
                assert pack.place(layer, expert, 0)[0] % made.alignment == 0
                for role in range(3):
                    offset, nbytes = pack.place(layer, expert, role)
                    assert offset >= end
                    end = offset + nbytes
        assert end <= pack.layout.data_end
        assert (pack.frequency is None) == (made.frequency is None)
        if pack.frequency is not None and made.frequency is not None:
            assert pack.frequency.tokens == made.frequency.tokens
            np.testing.assert_array_equal(pack.frequency.counts, made.frequency.counts)


@settings(max_examples=60, deadline=None)
@given(
    made=packs(),
    name=st.sampled_from(sorted(set(HEADER_FIELDS) - {"top_k"})),
    value=st.one_of(st.integers(0, 16), st.integers(0, (1 << 32) - 1)),
)
def test_changed_number_of_the_header_is_refused(
    tmp_path_factory: pytest.TempPathFactory, made: SmallPack, name: str, value: int
) -> None:
    content = made.content()
    before = bytes(content)
    set_header(content, name, value)
    path = tmp_path_factory.mktemp("x") / "x"
    path.write_bytes(content)
    if bytes(content) == before:
        return
    if name == "alignment" and value and value & (value - 1) == 0:
        # A smaller alignment that gives the same places is another way to say the same.
        _read_or_refused(path, made)
        return
    with pytest.raises(FormatError):
        read_expert_pack(path)


def _read_or_refused(path: Path, made: SmallPack) -> None:
    try:
        with read_expert_pack(path) as pack:
            assert pack.layout == made.layout()
    except FormatError:
        pass


@given(
    counts=st.lists(
        st.lists(st.integers(0, (1 << 53) - 1), min_size=3, max_size=3), min_size=2, max_size=2
    ),
    tokens=st.integers(1, (1 << 53) - 1),
)
def test_frequencies_come_back(counts: list[list[int]], tokens: int) -> None:
    table = ExpertFrequency(tokens, np.array(counts, dtype=np.uint64))
    found = parse_trailer(trailer_bytes(table), 2, 3)
    assert found is not None
    assert (found.tokens, found.counts.tolist()) == (tokens, counts)
