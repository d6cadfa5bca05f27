"""The command line: fp4kit recipes | formats | convert | inspect | compare | selftest | fuzz."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from fp4kit import __version__
from fp4kit.cli import checkpoint, fuzz, recipes, selftest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0 success, 1 a difference was found, 2 an error."""
    args = _parser().parse_args(argv)
    try:
        return int(args.func(args))
    except (ValueError, TypeError, OSError) as error:
        print(f"fp4kit {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp4kit", description="Bit-exact numerics of 4-bit floating point.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"fp4kit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in (recipes, checkpoint, selftest, fuzz):
        group.register(commands)
    return parser
