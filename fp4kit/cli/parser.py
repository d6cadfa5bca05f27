"""Parse the command line strictly: no abbreviations, one-line errors that suggest the nearest valid name."""

from __future__ import annotations

import argparse
import difflib
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fp4kit.cli.output import Output, write
from fp4kit.storage.files import shown

Command = Callable[[argparse.Namespace, Output], int]
Writes = Callable[[argparse.Namespace], Path | None]
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # argparse's own pattern of a negative number
SHELLS = ("bash", "zsh")  # shtab also supports tcsh, but does not complete the options of subcommands there


class UsageError(ValueError):
    """The error that is raised for arguments that a command does not accept.

    prog: the command as it was called, such as "fp4kit convert".
    message: what is wrong. A reference to --help is appended, unless the message ends with a question mark.
    """

    def __init__(self, prog: str, message: str) -> None:
        super().__init__(message if message.endswith("?") else f"{message}; see {prog} --help")
        self.prog = prog


class Parser(argparse.ArgumentParser):
    """Parse arguments as argparse does, but strictly: reject abbreviations, and raise UsageError instead of exiting.

    For an unknown option or value, the error message suggests the nearest valid name. Options may stand between
    positional arguments.

    Args:
        examples: (command line, what it does) pairs, which the help shows after the usage.

    Attributes:
        hints: {option that users may try although it does not exist: end of the error message}. This text replaces the
            suggestion. The key "" is for a superfluous positional argument, which replaces {} in the text. An argument
            with choices may have an attribute `hints` for its values.
    """

    def __init__(self, *args: Any, examples: Sequence[tuple[str, str]] = (), **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})
        self._mixing = False
        self.examples = examples
        self.hints: dict[str, str] = {}

    def format_help(self) -> str:
        """Return the text of --help: the usage, the examples, the rest. Without examples, it is argparse's text."""
        text = super().format_help()
        if not self.examples:
            return text
        usage, _, rest = text.partition("\n\n")
        lines = "".join(f"  {command}\n      {meaning}\n" for command, meaning in self.examples)
        return f"{usage}\n\nexamples:\n{lines}\n{rest}"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments, and return (namespace, list of unknown positional arguments)."""
        # The list is usually empty, because an unknown argument raises UsageError.
        arguments = list(sys.argv[1:] if args is None else args)
        if self._mixing:
            return super().parse_known_args(arguments, namespace)
        self._check_flags(arguments)
        # If the arguments contain the separator "--", do not call parse_known_intermixed_args, which would drop it.
        if self._subparsers is not None or "--" in arguments:
            return super().parse_known_args(arguments, namespace)
        self._mixing = True
        try:
            found, unknown = self.parse_known_intermixed_args(arguments, namespace)
        finally:
            self._mixing = False
        if unknown:
            hint = self.hints.get("", "").format(shown(unknown[0]))
            raise UsageError(self.prog, f"unrecognized argument {shown(unknown[0])}{hint}")
        return found, []

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with argparse's message. Without this method, argparse would print the message and exit."""
        raise UsageError(self.prog, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the help or the version on stdout with ``write``, because argparse would ignore errors of stdout."""
        write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ArgumentError, with a suggestion, for a value that is not in ``action.choices``."""
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            hint = getattr(action, "hints", {}).get(value) or suggestion(str(value), names)
            hint = hint or f"; needs one of {', '.join(names)}"
            raise argparse.ArgumentError(action, f"there is no {str(value)!r}{hint}")

    def _check_flags(self, arguments: Sequence[str]) -> None:
        """Raise UsageError with a suggestion for the first option that does not exist."""
        # Call this before argparse, which would report only that arguments are missing.
        for text in arguments:
            is_flag = len(text) > 1 and text[0] == "-" and " " not in text and not _NUMBER.fullmatch(text)
            if text == "--" or (self._subparsers is not None and not is_flag):
                return
            name = text.partition("=")[0]
            if is_flag and name not in self._option_string_actions:
                hint = self.hints.get(name) or suggestion(name, self._option_string_actions)
                raise UsageError(self.prog, f"unrecognized argument {shown(name)}{hint}")


class GroupedHelp(argparse.HelpFormatter):
    """Format the help so that commands are listed in groups under headings.

    The subparsers action must have an attribute ``headings``, a dict: first command of a group -> heading.
    """

    def _format_action(self, action: argparse.Action) -> str:
        headings = getattr(action, "headings", None)
        if headings is None:
            return super()._format_action(action)
        lines = []
        for command in self._iter_indented_subactions(action):
            if command.dest in headings:
                lines.append(f"\n{'':{self._current_indent - 2}}{headings[command.dest]}:\n")
            lines.append(super()._format_action(command))
        return "".join(lines)


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X?`` with the name X in ``known`` that is closest to ``name``, or "" if none is close."""
    closest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {closest[0]}?" if closest else ""


class PrintCompletion(argparse.Action):
    """Define the option --print-completion, which prints a completion script for a shell and exits.

    The optional package shtab generates the script.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Print the completion script and exit."""
        try:
            shtab = importlib.import_module("shtab")
        except ImportError:
            raise OSError('--print-completion: shtab is missing; run pip install "fp4kit[completion]"') from None
        write(shtab.complete(parser, shell=values) + "\n")
        parser.exit()


def add_command(
    subparsers: Any, name: str, command: Command, *, writes: Writes | None = None, **options: Any
) -> argparse.ArgumentParser:
    """Add a command with the options --json and --quiet, and return its parser, to which options can be added."""
    help = subparsers.helps[name]
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=help, **{"description": help, **options})
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--quiet", action="store_true", help="print no text, notes or progress; only set the exit code")
    parser.set_defaults(func=command, writes=writes)
    return parser


def add_ignore(parser: Any) -> None:
    """Add the option --ignore GLOB to a parser or a group."""
    text = (
        "leave out tensors, config keys and metadata entries that match and that fp4kit does not know, instead of"
        " stopping. Decoded values may then be wrong; repeatable"
    )
    parser.add_argument("--ignore", action="append", default=[], metavar="GLOB", help=text)


def add_path(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    """Add a positional argument that a shell's completion treats as a path."""
    parser.add_argument(name, **options).complete = {"bash": "_shtab_compgen_files", "zsh": "_files"}  # type: ignore[attr-defined]
