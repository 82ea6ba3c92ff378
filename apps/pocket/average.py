"""`python -m pocket.average`: shards whose experts lie between those of two runs.

A run that goes on from another one's weights moves along a path whose straight line back is mostly
good too: on it the model keeps what both know and loses some of what the later run learnt by heart.
Only the experts of the trunk are averaged. The rest is the later run's.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from edgedsv4.errors import ConfigError, Dsv4Error
from pocket.checkpoint import read_shards, write_shards
from pocket.configs import CONFIGS, named_config
from pocket.export import is_expert
from pocket.parameters import is_trained

logger = logging.getLogger(__name__)


def between(
    earlier: Mapping[str, Tensor], later: Mapping[str, Tensor], share: float
) -> dict[str, Tensor]:
    """The later weights, experts of the trunk moved towards the earlier ones.

    Args:
        earlier: weights of a network.
        later: of the same shapes.
        share: of the later run in the experts, 0..1.

    Raises:
        ConfigError: if the share is none.
    """
    if not 0 <= share <= 1:
        raise ConfigError(f"share must be 0..1, found {share}")
    found = dict(later)
    for name, weight in later.items():
        if is_expert(name) and is_trained(name) and not name.startswith("mtp."):
            found[name] = weight.float() * share + earlier[name].float() * (1 - share)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m pocket.average", description=__doc__)
    parser.add_argument("earlier", type=Path, help="directory of shards")
    parser.add_argument("later", type=Path, help="directory of shards")
    parser.add_argument("out", type=Path, help="directory to write shards to")
    parser.add_argument("--share", type=float, default=0.8, help="of the later run, 0..1")
    parser.add_argument("--config", choices=list(CONFIGS), default="pocket-v4")
    args = parser.parse_args(arguments)
    try:
        config = named_config(args.config)
        earlier, _ = read_shards(args.earlier, config)
        later, notes = read_shards(args.later, config)
        write_shards(args.out, between(earlier, later, args.share), notes)
    except Dsv4Error as error:
        logger.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
