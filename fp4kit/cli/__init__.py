"""Provide the command line ``fp4kit``: the parser of all commands, and ``main``, which runs one command.

The module of a command is imported when the command is called. Its ``COMMANDS`` holds the command and its options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fp4kit import __all__, __version__, startup
from fp4kit.arguments import IN_COMMAND
from fp4kit.cli import command
from fp4kit.cli.output import Output

_EXIT_CODES = (
    "Exit codes: 0 done, 1 a difference was found, 2 an error; 129, 130, 143, 141 stopped by SIGHUP, SIGINT (Ctrl-C),"
    " SIGTERM, SIGPIPE (the reader of the output has ended)."
)
# heading in `fp4kit --help` -> {command: (module of this package that holds it, its line in the help)}
_GROUPS = {
    "convert and serve": {
        "convert": ("convert", "quantize a model, or change its format"),
        "reconcile": ("verify", "give q/k/v and gate/up one tensor scale"),
        "diff": ("identify", "write the changes between two versions to a patch"),
        "apply": ("identify", "write the new version of a model from a patch"),
    },
    "check and compare": {
        "verify": ("verify", "check the files, config and bytes of a checkpoint"),
        "compare": ("verify", "show where two checkpoints differ"),
        "parity": ("verify", "check that trainer and server compute with equal bits"),
        "contract": ("verify", "show what an engine or a checkpoint computes"),
    },
    "find out": {
        "inspect": ("identify", "list the tensors and layers of a checkpoint"),
        "identify": ("identify", "name the recipe that made a checkpoint"),
        "recipes": ("recipes", "list the recipes, or check them"),
        "formats": ("recipes", "list the number formats"),
    },
    "measure and prove": {
        "selftest": ("recipes", "check this GPU or CPU, bit for bit"),
        "fuzz": ("recipes", "compare random calls with the specification"),
    },
}
_EXAMPLES = {
    "fp4kit convert --demo minilm-nvfp4": "quantize a small model to this directory",
    "fp4kit convert Llama-3.1-8B Llama-NVFP4": "quantize a Hugging Face model directory",
    "fp4kit verify Llama-NVFP4 --source Llama-3.1-8B": "check the result against the original",
    "fp4kit recipes nvfp4": "list the recipes of a format",
}
# name that users may try although it is no command -> the end of the error message
_HINTS = {
    **{name: f"; in Python, help(fp4kit.{name}) describes it" for name in __all__ if name.islower()},
    "help": "; did you mean --help?",
    "version": "; did you mean --version?",
    "quantize": "; did you mean convert?",
    **dict.fromkeys(("list", "recipe"), "; did you mean recipes?"),
    "info": "; did you mean inspect?",
    "show": "; did you mean inspect?",
    "check": "; did you mean verify?",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if hasattr(sys.stdout, "reconfigure"):
        # Escape characters that stdout's encoding lacks, because names of files and tensors may contain any bytes.
        sys.stdout.reconfigure(errors="backslashreplace")
    return command.run_guarded(lambda task: _run(task, argv), startup.COMMAND)


def _run(task: command.GuardedCommand, argv: Sequence[str] | None) -> int:
    """Parse the arguments, run the command that they name, and return its exit code; 0 after --help and --version."""
    try:
        arguments = sys.argv[1:] if argv is None else argv
        args = parser(arguments).parse_args(arguments)
    except command.UsageError as error:
        task.name = error.prog.partition(" ")[2]
        raise
    except SystemExit as stop:  # raised by argparse after --help and --version
        return int(stop.code or 0)
    if args.command is None:
        parser(arguments).print_help()
        return 0
    task.name = args.command
    task.destination = args.writes(args) if args.writes else None
    out = Output(args.command, getattr(args, "json", False) is True, getattr(args, "quiet", False))
    before = IN_COMMAND.set(True)
    try:
        return int(args.func(args, out))
    finally:
        IN_COMMAND.reset(before)


def parser(arguments: Sequence[str] | None = None) -> command.Parser:
    """Return a new parser of the command line, which lists all commands."""
    if arguments is not None and any(text.startswith("--print-completion") for text in arguments):
        arguments = None
    result = command.Parser(
        prog="fp4kit",
        description="Quantize models to 4-bit floating point, bit for bit as other libraries do."
        " `fp4kit COMMAND --help` lists a command's options.",
        epilog=_EXIT_CODES,
        formatter_class=command.GroupedHelp,
    )
    result.examples, result.hints = _EXAMPLES, _HINTS
    result.add_argument("--version", action="version", version=f"fp4kit {__version__}")
    result.add_argument(
        "--print-completion",
        action=command.PrintCompletion,
        choices=command.SHELLS,
        help="print the shell's completion script",
    )
    commands: Any = result.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    commands.headings = {}  # first command of a group -> its heading, for GroupedHelp
    for heading, listed in _GROUPS.items():
        commands.headings[next(iter(listed))] = heading
        for name, (module, commands.help) in listed.items():
            if arguments is None or name in arguments:
                command.add_command(commands, name, import_module(f"fp4kit.cli.{module}").COMMANDS[name])
            else:
                commands.add_parser(name, help=commands.help)
    return result
