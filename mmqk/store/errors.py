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

Main = Callable[[list[str] | None], int]


class UserError(Exception):
    """A user error. The message is one sentence that names the file, key or sample and says what to do."""


class OneSentenceParser(argparse.ArgumentParser):
    """An argument parser that raises a `UserError` naming ``--help`` where argparse would print its usage and exit.

    ``jobs=2`` is read as ``--jobs=2``. Help keeps the lines of description and epilog.
    """

    def __init__(self, prog: str | None = None, **arguments: Any) -> None:
        super().__init__(prog=prog, formatter_class=argparse.RawDescriptionHelpFormatter, **arguments)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            before = self._option_string_actions.get(words[-1]) if words else None
            is_value = before is not None and before.nargs != 0
            is_option = "=" in word and f"--{word.partition('=')[0]}" in self._option_string_actions
            words.append(f"--{word}" if is_option and not is_value else word)
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}: see {self.prog} --help")


def named_value(text: str) -> tuple[str, str]:
    """Return the name and the value of an argument ``NAME=VALUE``, as texts."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, as in model.qk_norm.kind=rms or loss=train/ce")
    return name, value


def slice_of(text: str) -> tuple[int, int]:
    """Return (K, N) of the argument ``--slice K/N``."""
    match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with K from 1 to N, as in 2/8")
    return int(match[1]), int(match[2])


def reason_of(error: BaseException) -> str:
    """Return the first sentence of an error in one line, without its end; its type if it has no text."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text.partition(". ")[0][:160].rstrip(".:") or type(error).__name__


def disk_sentence(error: OSError) -> str:
    """Return a sentence that names the file of a disk error, says what is wrong, and says what to do."""
    path = error.filename if isinstance(error.filename, str | os.PathLike) else "A file"
    # The message of an error in a loader worker ends with the original error.
    reason = error.strerror or (str(error).strip().splitlines() or [type(error).__name__])[-1]
    return f"{path} cannot be read or written ({reason}): fix that and run the same command again."


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
            print(f"mmqk: {' '.join(str(error).split())}", file=sys.stderr)
            return USER_ERROR_EXIT
        except KeyboardInterrupt:
            print("mmqk: interrupted", file=sys.stderr)
            return 130  # 128 + SIGINT
        except BrokenPipeError:
            # The interpreter flushes stdout at exit: redirect it to /dev/null.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return 141  # 128 + SIGPIPE
        except OSError as error:
            with contextlib.suppress(OSError):  # stderr may be a file on the full disk
                print(f"mmqk: {disk_sentence(error)}", file=sys.stderr)
            return FAILED_EXIT

    return guarded


def run_main(main: Main) -> NoReturn:
    """Run `cli_main` and exit the process; call it under ``if __name__ == "__main__"``."""
    sys.exit(cli_main(main)(None))
