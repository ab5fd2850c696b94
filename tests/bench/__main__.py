"""`python -m tests.bench chaos [--kills 100] [--seed 0]`: measurements that are too long for the test suite.

Run it from the repository's folder. What was measured so far is in the docstrings of the benches.
"""

from __future__ import annotations

import argparse

from tests.bench import kills


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    benches = parser.add_subparsers(required=True)
    chaos = benches.add_parser("chaos", help="kill a study many times and compare it with one left alone")
    chaos.add_argument("--kills", type=int, default=100)
    chaos.add_argument("--seed", type=int, default=0)
    chaos.set_defaults(run=lambda arguments: kills.run(arguments.kills, arguments.seed))
    arguments = parser.parse_args()
    return arguments.run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
