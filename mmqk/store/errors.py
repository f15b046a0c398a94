"""The user's mistakes, and how a front door says them: one sentence, an exit code, never a traceback."""

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
# What a shell reports for a command whose reader went away (128 + SIGPIPE).
BROKEN_PIPE_EXIT = 141

_WITHOUT_DASHES = re.compile(r"([A-Za-z_][\w.-]*)=")

Main = Callable[[list[str] | None], int]


class UserError(Exception):
    """A mistake of the user's. The message is one sentence that names the thing and says what to do."""


class OneSentenceParser(argparse.ArgumentParser):
    """A parser whose errors are a `UserError` that names ``--help``: no usage block, no exit of its own.

    ``jobs=2`` is read as ``--jobs=2``.
    """

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        return super().parse_known_args(with_dashes(self, sys.argv[1:] if args is None else args), namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see {self.prog} --help")


def with_dashes(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The command line with ``name=value`` as ``--name=value``, where the parser has such an option or its group.

    The value of an option, as in ``--config a=b.yaml``, stays as it is.
    """
    options = parser._option_string_actions
    given: list[str] = []
    for word in argv:
        before = options.get(given[-1]) if given else None
        found = _WITHOUT_DASHES.match(word)
        if found and (before is None or before.nargs == 0):
            parts = found[1].split(".")
            if any(f"--{'.'.join(parts[:n])}" in options for n in range(1, len(parts) + 1)):
                word = f"--{word}"
        given.append(word)
    return given


def disk_sentence(error: OSError) -> str:
    """The file, what is wrong with it, and what to do."""
    path = error.filename if isinstance(error.filename, str | os.PathLike) else "A file"
    # The message of a loader worker's error ends with the error itself.
    what = error.strerror or (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return f"{path} cannot be read or written ({what}): fix that and run the same command again."


def cli_main(main: Main) -> Callable[..., int]:
    """Wrap a ``main(argv) -> exit code`` so that a user's mistake is one sentence on stderr.

    So is an error of the disk. Returns 2 for a `UserError`, 1 for an OSError, 130 for Ctrl-C, 141 when the reader of
    the output went away. Anything else is a defect of ours and keeps its traceback.
    """

    @functools.wraps(main)
    def guarded(argv: list[str] | None = None) -> int:
        try:
            code = main(argv)
            sys.stdout.flush()
            return code
        except UserError as error:
            print(f"mmqk: {' '.join(str(error).split())}", file=sys.stderr)
            return USER_ERROR_EXIT
        except KeyboardInterrupt:
            print("mmqk: interrupted", file=sys.stderr)
            return INTERRUPTED_EXIT
        except BrokenPipeError:
            # The interpreter flushes stdout once more on its way out: give it somewhere to write to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return BROKEN_PIPE_EXIT
        except OSError as error:
            with contextlib.suppress(OSError):  # the output may be a file on that disk
                print(f"mmqk: {disk_sentence(error)}", file=sys.stderr)
            return FAILED_EXIT

    return guarded


def run_main(main: Main) -> NoReturn:
    """What a module's ``if __name__ == "__main__"`` calls: the front door, then the process's exit."""
    sys.exit(cli_main(main)(None))
