"""The command line: fp4kit recipes | formats | convert | inspect | compare | verify | identify | reconcile | selftest |
fuzz.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fp4kit import __version__, startup
from fp4kit.cli import compare, convert, fuzz, guard, identify, inspect, recipes, reconcile, selftest, verify
from fp4kit.cli.output import Output
from fp4kit.cli.parser import SHELLS, Parser, PrintCompletion, UsageError

_CODES = (
    "Exit codes: 0 done, 1 a difference was found, 2 an error; 129, 130, 143, 141 stopped by SIGHUP, SIGINT (Ctrl-C),"
    " SIGTERM, SIGPIPE (nobody reads the output)."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code, see fp4kit.cli.guard."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names are any bytes, and terminals of any encoding
    return guard.run(lambda task: _run(task, argv), startup.COMMAND)


def _run(task: guard.GuardedCommand, argv: Sequence[str] | None) -> int:
    """Parse the arguments and run what they ask for."""
    try:
        args = parser().parse_args(argv)
    except UsageError as error:
        task.name = error.prog.partition(" ")[2]
        raise
    except SystemExit as stop:  # of --help and --version
        return int(stop.code or 0)
    if args.command is None:
        raise ValueError("a command is needed, such as convert; see fp4kit --help")
    task.name = args.command
    task.destination = args.writes(args) if args.writes else None
    return int(
        args.func(args, Output(args.command, getattr(args, "json", False) is True, getattr(args, "quiet", False)))
    )


def parser() -> Parser:
    """Return the parser of all commands."""
    result = Parser(prog="fp4kit", description="Bit-exact numerics of 4-bit floating point.", epilog=_CODES)
    result.add_argument("--version", action="version", version=f"fp4kit {__version__}")
    result.add_argument(
        "--print-completion", action=PrintCompletion, choices=SHELLS, help="print what completes the command in a shell"
    )
    commands = result.add_subparsers(dest="command", metavar="COMMAND")
    for group in (recipes, convert, inspect, compare, verify, identify, reconcile, selftest, fuzz):
        group.register(commands)
    return result
