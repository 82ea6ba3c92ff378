"""What is made of the times of a random network."""

from __future__ import annotations

import json

import pytest
from synthetic_samples import reading, report

from edgedsv4.runtime.synthetic_report import KernelTime, merged, short_name, with_traffic
from edgedsv4.runtime.synthetic_traffic import Traffic

NAMES = {
    "_gate_up_kernel": "_gate_up_kernel",
    "Memcpy DtoD (Device -> Device)": "Memcpy DtoD (Device -> Device)",
    "nvjet_sm90_tss_128x64_64x8_1x2_h_bz_TNT": "nvjet_sm90_tss_128x64_64x8_1x2_h_bz_TNT",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float>(int)": "splitKreduce_kernel",
    "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float,"
    " float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int)": (
        "torch vectorized_elementwise AUnaryFunctor"
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::cos_kernel_cuda(at::"
    "TensorIteratorBase&)::{lambda()#2}>(int)": ("torch vectorized_elementwise cos"),
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>(int)": (
        "torch elementwise direct_copy"
    ),
    "void at::native::(anonymous namespace)::gatherTopK<float, unsigned int>(int)": (
        "torch gatherTopK"
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_name_is_shortened(name: str) -> None:
    assert short_name(name) == NAMES[name]


def test_kernels_of_one_short_name_are_one() -> None:
    found = merged(
        [
            KernelTime(name="void f<1>(int)", launches=2, seconds=1.0),
            KernelTime(name="g", launches=1, seconds=2.5),
            KernelTime(name="void f<2>(int)", launches=3, seconds=2.0),
        ]
    )
    assert found == (
        KernelTime(name="f", launches=5, seconds=3.0),
        KernelTime(name="g", launches=1, seconds=2.5),
    )


def test_bytes_without_a_kernel_are_left_over() -> None:
    kernels = (KernelTime(name="a", launches=1, seconds=2.0),)
    known, unseen = with_traffic(kernels, {"a": Traffic(weights=6), "b": Traffic(rows=3)})
    assert known[0].read_rate == 3.0
    assert unseen == {"b": Traffic(rows=3)}


def test_speed_is_that_of_all_decoded_tokens_and_of_the_median_prefill() -> None:
    decode = reading("decode", tokens=4, seconds=(0.1, 0.1, 0.1, 0.5), bytes_per_token=50)
    assert (decode.rate, decode.median_seconds) == (pytest.approx(5.0), 0.1)
    assert decode.share(1000.0) == pytest.approx(0.25)
    prefill = reading("prefill", tokens=40, seconds=(2.0, 1.0, 9.0))
    assert (prefill.rate, prefill.share(1.0)) == (20.0, None)


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1), (2, 2), (100, 99), (101, 100), (1000, 990)]
)
def test_99_of_100_tokens_take_no_longer_than_p99(count: int, expected: int) -> None:
    seconds = tuple(float(n) for n in range(count, 0, -1))
    assert reading("decode", tokens=count, seconds=seconds).p99_seconds == expected


def test_more_than_memory_gives_is_a_problem() -> None:
    honest = report(read_rate=1000.0)
    assert honest.problems() == ()
    (problem,) = report(read_rate=1.0).problems()
    assert problem.startswith("decode at 16,384 would read")
    assert report(read_rate=1.0).to_json()["problems"] == [problem]


def test_report_is_json() -> None:
    found = json.loads(json.dumps(report().to_json(), allow_nan=False))
    decode, prefill = found["results"]
    assert (decode["work"], decode["depth"], decode["n"]) == ("decode", 16_384, 2)
    assert decode["kernels"][0]["weight_bytes"] == 60
    assert "weight_bytes" not in decode["kernels"][1]
    assert "kernels" not in prefill
    assert prefill["bytes_per_token"] is None
