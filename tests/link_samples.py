"""Measured links that nobody measured: round numbers for tests of what is made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgedsv4.runtime.links import (
    CallRate,
    CardRate,
    DramRate,
    DriveRate,
    DriveReading,
    ExpertRate,
    Links,
    MachineFacts,
    OverlapRate,
)

CARD = CardRate(
    name="cuda:0",
    description="Card",
    memory_bytes=32 << 30,
    free_bytes=31 << 30,
    to_card=(51e9, 52e9, 60e9),
    from_card=(50e9,),
    copy=(1300e9,),
    read=(1400e9,),
    products=(1e14,),
    exchange_seconds=(45e-6,),
    launch_seconds=(3e-6,),
    overlapped_launch_seconds=(2e-6,),
    experts=(
        ExpertRate(block_type="MXFP4", threads=1, tokens=1, bytes_per_weight=0.5, runs=(2000e9,)),
        ExpertRate(block_type="MXFP4", threads=1, tokens=100, bytes_per_weight=0.5, runs=(800e9,)),
    ),
)
DRIVE = DriveRate(
    mount="/",
    access="direct",
    readings=(
        DriveReading(request_bytes=1 << 20, depth=1, runs=(3e9,)),
        DriveReading(request_bytes=1 << 20, depth=16, runs=(12e9, 11e9, 13e9)),
        DriveReading(request_bytes=4 << 20, depth=16, runs=(12e9,)),
    ),
)


def expert_rate(block_type: str, threads: int, tokens: int, rate: float) -> ExpertRate:
    return ExpertRate(
        block_type=block_type, threads=threads, tokens=tokens, bytes_per_weight=0.5, runs=(rate,)
    )


def links(**changes: Any) -> Links:
    """A desktop with one card; `changes` replace fields."""
    sample = Links(
        machine=MachineFacts(
            processor="Processor",
            cores=8,
            ram_bytes=64 << 30,
            adapters=("10de:2b85",),
            version="0.1",
        ),
        instructions="avx512",
        dram=(DramRate(threads=1, runs=(30e9,)), DramRate(threads=8, runs=(60e9, 70e9, 80e9))),
        experts=(
            expert_rate("MXFP4", 1, 1, 20e9),
            expert_rate("MXFP4", 8, 4, 100e9),
            expert_rate("MXFP4", 8, 1, 120e9),
            expert_rate("MXFP4", 8, 16, 50e9),
        ),
        calls=tuple(
            CallRate(
                block_type="MXFP4",
                threads=8,
                experts=experts,
                expert_weights=1_000_000,
                runs=(20e-6 + experts * 10e-6,),
            )
            for experts in (6, 1)
        ),
        drives=(DRIVE,),
        card=CARD,
        overlap=OverlapRate(
            block_type="MXFP4",
            bytes_per_weight=0.5,
            expert_runs=(80e9,),
            to_card_runs=(25e9,),
        ),
        notes=("no drive was named (path)",),
    )
    return dataclasses.replace(sample, **changes)
