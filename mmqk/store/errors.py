"""User errors, and how commands print them: one sentence and an exit code, no traceback."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

FAILED_EXIT = 1
USER_ERROR_EXIT = 2
INTERRUPTED_EXIT = 130
# Exit code of a command whose output pipe was closed (128 + SIGPIPE).
BROKEN_PIPE_EXIT = 141
LONGEST_MESSAGE = 3000  # characters

_WITHOUT_DASHES = re.compile(r"([A-Za-z_][\w.-]*)=")

Main = Callable[[list[str] | None], int]


class UserError(Exception):
    """A user error. The message is one sentence that names the file, key or sample and says what to do."""


class OneSentenceParser(argparse.ArgumentParser):
    """An argument parser that raises a `UserError` naming ``--help`` where argparse would print its usage and exit.

    ``jobs=2`` is read as ``--jobs=2``. Help keeps the lines of description and epilog. If argcomplete is installed,
    the shell can complete flags.
    """

    program: str | None = None  # such as "mmqk train", if the command mmqk started the program

    def __init__(self, prog: str | None = None, **arguments: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=self.program or prog, formatter_class=raw, **arguments)

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        complete(self)
        return super().parse_args(args, namespace)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        return super().parse_known_args(with_dashes(self, sys.argv[1:] if args is None else args), namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see {self.prog} --help")


def complete(parser: argparse.ArgumentParser) -> None:
    """If the shell requests completions, print them and exit."""
    if "_ARGCOMPLETE" in os.environ:
        with contextlib.suppress(ImportError):
            import argcomplete

            argcomplete.autocomplete(parser)


def with_dashes(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Return the command line with ``name=value`` as ``--name=value``, if the parser has the option ``--name``. A
    name with dots, such as ``optim.lr``, needs only the option of its group (``--optim``).

    The value of an option, as in ``--config a=b.yaml``, is not changed.
    """
    options = parser._option_string_actions
    words: list[str] = []
    for word in argv:
        before = options.get(words[-1]) if words else None
        match = _WITHOUT_DASHES.match(word)
        if match and (before is None or before.nargs == 0):
            parts = match[1].split(".")
            if any(f"--{'.'.join(parts[:n])}" in options for n in range(1, len(parts) + 1)):
                word = f"--{word}"
        words.append(word)
    return words


def disk_sentence(error: OSError) -> str:
    """Return a sentence that names the file of a disk error, says what is wrong, and says what to do."""
    path = error.filename if isinstance(error.filename, str | os.PathLike) else "A file"
    # The message of an error in a loader worker ends with the original error.
    reason = error.strerror or (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return f"{path} cannot be read or written ({reason}): fix that and run the same command again."


def one_line(message: str) -> str:
    """Return a message as one line of printable characters, with its middle left out if it is long; a damaged file
    can put any text into a message."""
    line = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode()
        for c in " ".join(message.split())
    )
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:LONGEST_MESSAGE - 500]} … {line[-500:]}"


def cli_main(main: Main) -> Callable[..., int]:
    """Wrap a ``main(argv) -> exit code`` so that a user error or disk error is one sentence on stderr.

    Returns 2 for a `UserError`, 1 for an OSError, 130 for Ctrl-C, 141 for a closed output pipe. Any other exception
    is a bug in mmqk and keeps its traceback.
    """

    @functools.wraps(main)
    def guarded(argv: list[str] | None = None) -> int:
        try:
            code = main(argv)
            sys.stdout.flush()
            return code
        except UserError as error:
            print(f"mmqk: {one_line(str(error))}", file=sys.stderr)
            return USER_ERROR_EXIT
        except KeyboardInterrupt:
            print("mmqk: interrupted", file=sys.stderr)
            return INTERRUPTED_EXIT
        except BrokenPipeError:
            # The interpreter flushes stdout at exit: redirect it to /dev/null.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return BROKEN_PIPE_EXIT
        except OSError as error:
            with contextlib.suppress(OSError):  # stderr may be a file on the full disk
                print(f"mmqk: {one_line(disk_sentence(error))}", file=sys.stderr)
            return FAILED_EXIT

    return guarded


def run_main(main: Main) -> NoReturn:
    """Run `cli_main` and exit the process; call it under ``if __name__ == "__main__"``."""
    sys.exit(cli_main(main)(None))
