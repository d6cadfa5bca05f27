"""Parse the command line strictly: no abbreviations, one-line errors that suggest the nearest valid name. Run a command
so that signals, closed pipes and errors end it with an exit code and one line on stderr, which is called the last line.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from fp4kit.arguments import Flag, flag, suggestion
from fp4kit.cli.output import Output, OutputError, Stopped, say, write
from fp4kit.storage.files import shown

DONE, DIFFERENT, ERROR = 0, 1, 2
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}
_WORDS[signal.SIGPIPE] = "standard output was closed"
# A second signal within this many seconds is ignored, because a terminal and a parent process may each send a signal
# for a single Ctrl-C.
_REPEAT_WINDOW = 0.5
FEW = 5  # the examples that --help shows if --help-all shows all


class GuardedCommand:
    """The name and destination of a running command, for the last line on stderr if the command fails.

    name: the name of the command; None before the arguments are parsed.
    destination: the directory or file that the command will create; None if it creates none.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.destination: Path | None = None

    def write_last_line(self, text: str) -> None:
        """Write the last line to stderr: "fp4kit", the command's name if it is known, and ``text``."""
        prefix = f"fp4kit {self.name}" if self.name else "fp4kit"
        say(f"{prefix}: {shown(' '.join(text.split()))}")

    def outcome(self, stopped: bool) -> str:
        """Return a clause for the last line that says what became of the destination of a command that ended early."""
        if self.destination is None:
            return ""
        from fp4kit.checkpoint import staging  # imported already by every command that has a destination

        if staging.is_published(self.destination):
            return f"; {self.destination} is complete"
        partial = staging.partial_of(self.destination)
        is_left = staging.is_partial(partial) and not staging.is_live(partial)
        remainder = f"; {partial} is left, {staging.recovery_advice(self.destination)}" if is_left else ""
        return f"; nothing was written as {self.destination}{remainder}" if stopped else remainder


class _Signals:
    """Handle SIGINT, SIGTERM and SIGHUP: raise Stopped if one of them arrives while a command runs.

    `install` begins to handle signals, and `fix_exit_code` marks the end of the command.

    keep_handling: True if the process ends with the command. A later signal then ends it with the command's exit code.
        False to restore the old handlers after the command.
    """

    def __init__(self, keep_handling: bool) -> None:
        self._keep_handling, self._process = keep_handling, os.getpid()
        self._before: dict[int, Any] = {}
        self._hook = sys.unraisablehook
        self._since = 0.0
        self._ignoring = False  # True while the last line on stderr is written
        self.number: int | None = None  # the first signal received
        self.code: int | None = None  # the exit code, once the command has ended

    def install(self) -> None:
        """Start to handle SIGINT, SIGTERM and SIGHUP, except those that the parent process ignores (as nohup does)."""
        if threading.current_thread() is not threading.main_thread():
            return
        sys.unraisablehook = self._unraisable
        for number in _SIGNALS:
            before = signal.getsignal(number)
            if before not in (signal.SIG_IGN, None):
                self._before[number] = before
                signal.signal(number, self._handle)

    def stop_listening(self, number: int) -> int:
        """Ignore signals from now on, so that the last line can be written."""
        self._ignoring = True
        return self.number or number

    def fix_exit_code(self, code: int) -> None:
        """Store the exit code of the command."""
        self.code = code
        if not self._keep_handling:
            sys.unraisablehook = self._hook
            for number, before in self._before.items():
                signal.signal(number, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal ``number``: raise Stopped while the command runs."""
        if os.getpid() != self._process:  # in a forked worker: die as without this handler
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.code is not None:
            os._exit(self.code)
        now = time.monotonic()
        if not self._ignoring and (self.number is None or now - self._since > _REPEAT_WINDOW):
            self.number, self._since = self.number or number, now
            raise Stopped(number)

    def _unraisable(self, unraisable: Any) -> None:
        """Handle an exception that Python drops, such as an exception raised in a destructor."""
        # If the exception is Stopped, send the signal again, so that it is not lost.
        if isinstance(unraisable.exc_value, Stopped):
            self._since = -math.inf
            threading.Timer(0.01, os.kill, (self._process, unraisable.exc_value.number)).start()
        else:
            self._hook(unraisable)


def run_guarded(command: Callable[[GuardedCommand], int], process: bool) -> int:
    """Run ``command`` and return its exit code: 2 after an error, 128 + N after signal N, otherwise the command's
    own.
    """
    task, signals = GuardedCommand(), _Signals(process)
    try:
        signals.install()
        code = _run_command(command, task, signals)
        signals.fix_exit_code(code)
    except Stopped as stop:  # the signal came before or after the command, or while an error was being reported
        code = _stopped(task, signals, stop.number)
        signals.fix_exit_code(code)
    return code


def _run_command(command: Callable[[GuardedCommand], int], task: GuardedCommand, signals: _Signals) -> int:
    """Run the command and return its exit code."""
    try:
        code = command(task)
        write()  # flush what the command's libraries have printed
        return code
    except (Stopped, KeyboardInterrupt) as stop:
        return _stopped(task, signals, getattr(stop, "number", signal.SIGINT))
    except Exception as error:
        if signals.number is not None:  # the error is a consequence of the signal
            return _stopped(task, signals, signals.number)
        return _failed(task, signals, error)


def _stopped(task: GuardedCommand, signals: _Signals, number: int) -> int:
    """Write the last line about the signal that stopped a command, and return 128 + the number of the signal."""
    number = signals.stop_listening(number)
    if number == signal.SIGPIPE:
        _drop_stdout()
    if number != signal.SIGPIPE or task.destination is not None:
        task.write_last_line(_WORDS[signal.Signals(number)] + task.outcome(stopped=True))
    return 128 + number


def _failed(task: GuardedCommand, signals: _Signals, error: Exception) -> int:
    """Write the last line about the error that ended a command, and return 2, the exit code for errors."""
    signals.stop_listening(0)
    if isinstance(error, OutputError):
        _drop_stdout()
    if not isinstance(error, (OSError, ValueError, TypeError, MemoryError)):
        traceback.print_exception(error)
    message = _described(error)
    if type(error) in (TypeError, ValueError) and task.name:  # the API names its function, which the last line repeats
        message = message.removeprefix(f"{task.name}: ").removeprefix(f"{task.name.removesuffix('s')}: ")
    # Do not append outcome() to a message that recommends --remove-stale: outcome() would recommend --resume, which may
    # be what failed.
    has_advice = "--remove-stale" in message
    task.write_last_line(message if has_advice else message + task.outcome(stopped=False))
    return ERROR


def _described(error: Exception) -> str:
    """Return a sentence about an exception for the last line on stderr."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    if isinstance(error, MemoryError):
        return f"out of memory; {error}".removesuffix("; ")
    if isinstance(error, (OSError, ValueError, TypeError)):
        return str(error)
    return f"a defect of fp4kit, please report it: {type(error).__name__}: {error}"


def _drop_stdout() -> None:
    """Redirect stdout to the null device after writing to it has failed."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


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

    examples: {command line: what it does}, which the help shows after the usage.
    hints: {option, "option value" or command that users may try although it does not exist: end of the error message}.
        This text replaces the suggestion. The key "" is for a superfluous positional argument, which replaces {}.
    usual: the options that --help shows, followed by FEW examples; --help-all shows all. If empty, --help shows all.
    """

    examples: Mapping[str, str] = {}
    hints: Mapping[str, str] = {}
    usual: Collection[str] = ()
    _mixing = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})

    def format_help(self) -> str:
        """Return the text of --help: the usage, the examples, the rest. Without examples, it is argparse's text."""
        helps = {one: one.help for one in self._actions if self.usual and one.option_strings}
        rare = [one for one in helps if not {"-h", "--help-all", *self.usual} & {*one.option_strings}]
        for one in rare:
            one.help = argparse.SUPPRESS
        text = super().format_help()
        for one in rare:
            one.help = helps[one]
        if not self.examples:
            return text
        usage, _, rest = text.partition("\n\n")
        examples = list(self.examples.items())[: FEW if self.usual else None]
        lines = "examples:\n" + "".join(f"  {command}\n      {meaning}\n" for command, meaning in examples)
        return f"{text}\n{lines}" if self.usual else f"{usage}\n\n{lines}\n{rest}"

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
            hint = self.hints.get(" ".join([*action.option_strings[:1], str(value)])) or suggestion(str(value), names)
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


class HelpAll(argparse.Action):
    """Define the option --help-all, which prints the help with all options and exits."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Print the help and exit."""
        parser.usual = ()
        parser.print_help()
        parser.exit()


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


class Command(NamedTuple):
    """A command of fp4kit.

    run: the function that runs it and returns its exit code.
    writes: the function from the arguments to what it will create; None if it creates nothing.
    parser: further arguments of the parser, such as its usage.
    usual: the options that --help shows, if --help-all shows the rest.
    """

    run: Callable[[argparse.Namespace, Output], int]
    description: str
    examples: Mapping[str, str]
    options: Sequence[Flag]
    writes: Callable[[argparse.Namespace], Path | None] | None = None
    hints: Mapping[str, str] = {}
    parser: Mapping[str, Any] = {}
    usual: Collection[str] = ()


EXCLUSIVE = "exclusive"  # the section of options of which at most one may be given
_COMMON = (
    flag("--json", "print one JSON document instead of text", action="store_true"),
    flag("--quiet", "print no text, notes or progress; only set the exit code", action="store_true"),
)


def path_flag(name: str, metavar: str, help: str, **how: Any) -> Flag:
    """Return a positional argument that a shell's completion treats as a path."""
    return flag(name, help, metavar=metavar, complete={"bash": "_shtab_compgen_files", "zsh": "_files"}, **how)


def add_command(subparsers: Any, name: str, command: Command) -> None:
    """Add a command with its options, --json and --quiet."""
    description = command.description
    parser: Any = subparsers.add_parser(name, help=subparsers.help, description=description, **command.parser)
    parser.set_defaults(func=command.run, writes=command.writes)
    parser.examples, parser.hints, parser.usual = command.examples, command.hints, command.usual
    if command.usual:
        everything = f"show all {len(command.options)} options and {len(command.examples)} examples"
        parser.add_argument("--help-all", action=HelpAll, nargs=0, default=argparse.SUPPRESS, help=everything)
    groups = {"": parser}
    for one in (*_COMMON, *command.options):
        if one.section not in groups:
            exclusive = one.section == EXCLUSIVE
            groups[one.section] = (
                parser.add_mutually_exclusive_group() if exclusive else parser.add_argument_group(one.section)
            )
        how = {**one.how}
        names, complete = (*how.pop("short", ()), one.name), how.pop("complete", None)
        argument = groups[one.section].add_argument(*names, help=one.help, **how)
        if complete:
            argument.complete = complete
