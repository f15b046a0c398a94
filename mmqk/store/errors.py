"""The user's mistakes, and how a front door says them: one sentence, an exit code, never a traceback."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import NoReturn

USER_ERROR_EXIT = 2
INTERRUPTED_EXIT = 130
# What a shell reports for a command whose reader went away (128 + SIGPIPE).
BROKEN_PIPE_EXIT = 141

Main = Callable[[list[str] | None], int]


class UserError(Exception):
    """A mistake of the user's. The message is one sentence that names the thing and says what to do."""


class OneSentenceParser(argparse.ArgumentParser):
    """A parser whose errors are a `UserError` that names ``--help``: no usage block, no exit of its own."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see {self.prog} --help")


def front_door(main: Main) -> Callable[..., int]:
    """Wrap a ``main(argv) -> exit code`` so that a user's mistake is one sentence on stderr.

    Returns 2 for a `UserError`, 130 for Ctrl-C, 141 when the reader of the output went away. Anything else
    is a defect of ours and keeps its traceback.
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

    return guarded


def run_main(main: Main) -> NoReturn:
    """What a module's ``if __name__ == "__main__"`` calls: the front door, then the process's exit."""
    sys.exit(front_door(main)(None))
