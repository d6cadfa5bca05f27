"""Provide the command line ``fp4kit``: the parser of all commands, and ``main``, which runs one command.

Each command has a module in this package. The module's function ``register`` adds the command and its options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from fp4kit import __version__, startup
from fp4kit.cli import (
    compare,
    convert,
    delta,
    fuzz,
    guard,
    identify,
    inspect,
    parity,
    recipes,
    reconcile,
    selftest,
    verify,
)
from fp4kit.cli.output import Output
from fp4kit.cli.parser import SHELLS, GroupedHelp, Parser, PrintCompletion, UsageError

_EXIT_CODES = (
    "Exit codes: 0 done, 1 a difference was found, 2 an error; 129, 130, 143, 141 stopped by SIGHUP, SIGINT (Ctrl-C),"
    " SIGTERM, SIGPIPE (nobody reads the output)."
)
# heading in `fp4kit --help` -> the modules whose commands are listed under it
_GROUPS = {
    "convert and serve": (convert, reconcile, delta),
    "check and compare": (verify, compare, parity),
    "find out": (inspect, identify, recipes),
    "measure and prove": (selftest, fuzz),
}
# name that users may try although it is no command -> the end of the error message
_HINTS = {
    "help": "; did you mean --help?",
    "version": "; did you mean --version?",
    "quantize": "; did you mean convert?",
    "list": "; did you mean recipes?",
    "info": "; did you mean inspect?",
    "show": "; did you mean inspect?",
    "check": "; did you mean verify?",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    The exit code is 0 for done, 1 if a difference was found, 2 after an error, and 128 + N after the signal N. Errors
    are not raised; a line on stderr says what is wrong. stdout is set to escape characters that its encoding lacks.

    argv: the arguments after ``fp4kit``; None for those of the process.
    """
    if hasattr(sys.stdout, "reconfigure"):
        # Escape characters that stdout's encoding lacks, because names of files and tensors may contain any bytes.
        sys.stdout.reconfigure(errors="backslashreplace")
    return guard.run(lambda task: _run(task, argv), startup.COMMAND)


def _run(task: guard.GuardedCommand, argv: Sequence[str] | None) -> int:
    """Parse the arguments, run the command that they name, and return its exit code.

    Raise UsageError for arguments that the command does not accept, and ValueError if there is no command.

    task: its ``name`` and ``destination`` are set here, for the last line that guard.run writes to stderr.
    """
    try:
        args = parser().parse_args(argv)
    except UsageError as error:
        task.name = error.prog.partition(" ")[2]
        raise
    except SystemExit as stop:  # raised by argparse after --help and --version
        return int(stop.code or 0)
    if args.command is None:
        raise ValueError("got no command; a command is needed, such as convert; see fp4kit --help")
    task.name = args.command
    task.destination = args.writes(args) if args.writes else None
    return int(
        args.func(args, Output(args.command, getattr(args, "json", False) is True, getattr(args, "quiet", False)))
    )


def parser() -> Parser:
    """Return a new parser of the command line, with all commands and their options."""
    result = Parser(
        prog="fp4kit",
        description="Bit-exact numerics of 4-bit floating point. `fp4kit COMMAND --help` lists a command's options.",
        epilog=_EXIT_CODES,
        formatter_class=GroupedHelp,
        examples=(
            ("fp4kit convert --demo tiny", "quantize a small model, to see how it works"),
            ("fp4kit convert Llama-3.1-8B Llama-NVFP4", "quantize a Hugging Face model directory"),
            ("fp4kit verify Llama-NVFP4 --source Llama-3.1-8B", "check the result against the original"),
            ("fp4kit recipes nvfp4", "list the recipes of a format"),
        ),
    )
    result.add_argument("--version", action="version", version=f"fp4kit {__version__}")
    result.add_argument(
        "--print-completion", action=PrintCompletion, choices=SHELLS, help="print the shell's completion script"
    )
    commands: Any = result.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands.hints = _HINTS
    commands.headings = {}  # first command of a group -> its heading, for GroupedHelp
    for heading, modules in _GROUPS.items():
        registered = len(commands.choices)
        for module in modules:
            module.register(commands)
        commands.headings[list(commands.choices)[registered]] = heading
    return result
