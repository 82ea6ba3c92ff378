"""`python -m edgedsv4`: the same command as `edgedsv4`."""

from __future__ import annotations

import sys

from edgedsv4.cli import main

if __name__ == "__main__":
    sys.exit(main())
