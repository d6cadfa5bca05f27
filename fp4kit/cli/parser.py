"""The parser of the command line: strict, no abbreviations, errors of one line that suggest what was meant."""

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
from fp4kit.storage.errors import shown

Command = Callable[[argparse.Namespace, Output], int]
Writes = Callable[[argparse.Namespace], Path | None]
_NUMBER = re.compile(r"-\d+|-\d*\.\d+")  # as argparse has it
SHELLS = ("bash", "zsh")  # shtab knows tcsh too, but not the options of commands there


class UsageError(ValueError):
    """Arguments that a command does not take; ``prog`` is the command as it was called."""

    def __init__(self, prog: str, message: str) -> None:
        super().__init__(message if message.endswith("?") else f"{message}; see {prog} --help")
        self.prog = prog


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, with suggestions; raises UsageError. Options may stand among the paths."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})
        self._mixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; what is not known is an error."""
        arguments = list(sys.argv[1:] if args is None else args)
        if self._mixing:
            return super().parse_known_args(arguments, namespace)
        self._check_flags(arguments)
        if self._subparsers is not None or "--" in arguments:  # argparse loses the sign when it mixes
            return super().parse_known_args(arguments, namespace)
        self._mixing = True
        try:
            found, unknown = self.parse_known_intermixed_args(arguments, namespace)
        finally:
            self._mixing = False
        if unknown:
            raise UsageError(self.prog, f"unrecognized argument {shown(unknown[0])}")
        return found, []

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(self.prog, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the help or the version; argparse would pass over an error."""
        write(message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is none of ``action.choices``, with a suggestion."""
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            hint = suggestion(str(value), names) or f"; needs one of {', '.join(names)}"
            raise argparse.ArgumentError(action, f"there is no {str(value)!r}{hint}")

    def _check_flags(self, arguments: Sequence[str]) -> None:
        """Raise UsageError for an option that there is not, before argparse finds what else is missing."""
        for text in arguments:
            is_flag = len(text) > 1 and text[0] == "-" and " " not in text and not _NUMBER.fullmatch(text)
            if text == "--" or (self._subparsers is not None and not is_flag):
                return
            name = text.partition("=")[0]
            if is_flag and name not in self._option_string_actions:
                raise UsageError(
                    self.prog, f"unrecognized argument {shown(name)}{suggestion(name, self._option_string_actions)}"
                )


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X?`` for what of ``known`` is most like ``name``, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


class PrintCompletion(argparse.Action):
    """Print what makes a shell complete the command, which the optional package shtab writes, and exit."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        """Print and exit."""
        try:
            shtab = importlib.import_module("shtab")
        except ImportError:
            raise OSError('--print-completion: shtab is missing; run pip install "fp4kit[completion]"') from None
        write(shtab.complete(parser, shell=values) + "\n")
        parser.exit()


def add_command(
    subparsers: Any, name: str, command: Command, help: str, *, writes: Writes | None = None, **options: Any
) -> argparse.ArgumentParser:
    """Add a command with --json and --quiet; returns its parser, for its own arguments.

    command: called with the arguments and an Output; returns the exit code. It prints through the Output only.
    help: one line. options: of ArgumentParser: description, usage, epilog.
    writes: from the arguments, the directory that the command makes through staging.staged_directory: the last word is
    about it.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=help, **{"description": help, **options})
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument(
        "--quiet", action="store_true", help="print no text, no notes and no progress; the exit code tells"
    )
    parser.set_defaults(func=command, writes=writes)
    return parser


def add_path(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    """Add a positional path, which shells complete as such."""
    parser.add_argument(name, **options).complete = {"bash": "_shtab_compgen_files", "zsh": "_files"}  # type: ignore[attr-defined]
