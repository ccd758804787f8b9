"""Shared parts of the project's command lines: parser, bounds of numbers, errors.

A wrong argument is one line on stderr and exit status 2. Imports neither torch nor numpy, so a wrong argument
or a missing GPU is reported before they load.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

BILLION = 10**9
#: Bytes of a file that is read as a whole: the largest committed result has 0.3 MB.
MOST_BYTES = 2**28
#: Exit status after the reader of a pipe has gone: 128 + SIGPIPE, like a shell's.
PIPE_CLOSED = 141


class UsageError(ValueError):
    """A wrong argument, described in one line."""


class Parser(argparse.ArgumentParser):
    """Reports an error in one line, on the first rank, and ends with exit status 2.

    ``text``: a docstring; its first paragraph is the description, the rest the epilog.
    """

    def __init__(self, prog: str, text: str = "", *, add_help: bool = True) -> None:
        summary, _, rest = text.partition("\n\n")
        super().__init__(
            prog=prog,
            description=summary,
            epilog=rest,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=add_help,
        )

    def error(self, message: str) -> NoReturn:
        _tell(self.prog.split()[-1], message)
        raise SystemExit(2)


def _tell(name: str, message: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"{name}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def command(name: str) -> Callable[[Callable[[list[str]], int]], Callable[..., int]]:
    """Decorator: ``main(words=None) -> exit status`` from a program that may raise :class:`UsageError`.

    A reader of its output that goes early (``| head``) ends it quietly.
    """

    def wrap(body: Callable[[list[str]], int]) -> Callable[..., int]:
        @functools.wraps(body)
        def main(words: Sequence[str] | None = None) -> int:
            try:
                status = body(list(sys.argv[1:] if words is None else words))
                sys.stdout.flush()
            except UsageError as error:
                _tell(name, error)
                return 2
            except SystemExit as end:  # argparse's
                if not isinstance(end.code, int):
                    raise
                return end.code
            except BrokenPipeError:
                # Python flushes stdout once more when it ends.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return PIPE_CLOSED
            return status

        return main

    return wrap


# --- numbers ---------------------------------------------------------------------------------


def whole(least: int = 1, most: int = BILLION) -> Callable[[str], int]:
    """Type of an argument: a whole number from ``least`` to ``most``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {least} to {most}, got {text[:40]!r}"
            )
        return value

    return parse


def number(most: float = BILLION, *, above: bool = False) -> Callable[[str], float]:
    """Type of an argument: a finite number from 0 (``above``: greater than it) to ``most``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (value > 0 if above else value >= 0) or not value <= most:
            words = "above 0" if above else "of 0 or more"
            raise argparse.ArgumentTypeError(
                f"expected a number {words}, at most {most:g}, got {text[:40]!r}"
            )
        return value

    return parse


#: A time limit where none is given.
NO_LIMIT = math.inf
seconds = number(above=True)


# --- files -----------------------------------------------------------------------------------


def read_text(path: Path, most_bytes: int = MOST_BYTES, errors: str = "strict") -> str:
    """A file's text. Raises UsageError for devices, pipes, and files that are too large or not text.

    ``errors``: as of ``str.decode``, for bytes that are no UTF-8.
    """
    try:
        mode = path.stat()
        if not stat.S_ISREG(mode.st_mode):
            raise UsageError(f"{path} is no regular file")
        if mode.st_size > most_bytes:
            raise UsageError(f"{path} has {mode.st_size} bytes; at most {most_bytes} are read")
        return path.read_text(errors=errors)
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text file") from None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def writable_folder(path: Path) -> Path:
    """Check, before the work starts, that a folder can be made and written to; leaves nothing there.

    Raises UsageError.
    """
    there = path.absolute()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UsageError(f"cannot write to {path}: {error.strerror}") from None
    return path


def writable_file(path: Path) -> Path:
    """Like `writable_folder`, for a file."""
    if path.is_dir():
        raise UsageError(f"cannot write to {path}: it is a folder")
    writable_folder(path.parent)
    return path


# --- devices ---------------------------------------------------------------------------------


def num_gpus() -> int:
    """Number of GPUs by the driver, without torch, whose import takes seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def require_gpus(otherwise: str, count: int = 1) -> None:
    """Raise UsageError, with the advice ``otherwise``, if there are fewer GPUs."""
    found = num_gpus()
    if found < count:
        needed = "a GPU" if count == 1 else f"{count} GPUs"
        here = "there is none" if not found else f"here are {found}"
        raise UsageError(f"needs {needed}, {here}: {otherwise}")
