"""Report errors of the user's input: one sentence on stderr, exit status 2."""

from __future__ import annotations

import atexit
import difflib
import errno
import gc
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.core.system import name_unknown_user

# Errors of the storage that the user can mend. ENOENT is not here: commands first check whether a file exists.
_OF_STORAGE = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE}
    | {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
)


class UserError(ValueError):
    """An error in the user's input. The message is one sentence: what is wrong, where, and what to do."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """Return `; did you mean "x"?` for the valid word nearest to `word`, or a list of the valid words if none is near.

    Examples:
        >>> nearest("simclt", ["simclr", "viewmaker"])
        '; did you mean "simclr"?'
        >>> nearest("zzz", ["simclr", "viewmaker"])
        '; valid are: simclr, viewmaker'
    """
    words = sorted(valid)
    near = difflib.get_close_matches(word, words, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; valid are: {', '.join(words) or 'none'}"


def without_secrets(text: str) -> str:
    """Return `text` with `***` in place of what may be secret in its URLs: a password, or a query such as a signature.

    Examples:
        >>> without_secrets("cannot read https://me:key@host/birds, nor az://birds?sig=key")
        'cannot read https://***@host/birds, nor az://birds?***'
    """
    text = re.sub(r"((?<=http://)|(?<=https://)|(?<=://)[^/\s@]*:)[^/\s]*@", "***@", text)
    return re.sub(r"(\w://[^\s?]*\?)\S+", r"\1***", text)


@contextmanager
def filename_in_errors(path: Path) -> Iterator[None]:
    """Add `path` to an `OSError` without a file name; errors of write, flush and fsync have none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def printable(text: str) -> str:
    """Return `text` with Python's escapes in place of the characters that are not printable.

    Examples:
        >>> printable("runs/\\x1b[2Ja\\nb")
        'runs/\\\\x1b[2Ja\\\\nb'
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def log_to_terminal(packages: Iterable[str] = ()) -> None:
    """Log to stderr, only the message of each record: warnings, and records of level INFO of our code and `packages`.

    matplotlib, for example, says at level INFO that it has built its cache of fonts.
    """
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for package in ("configs", "data_pipeline", "launch", "trainer", "__main__", *packages):
        logging.getLogger(package).setLevel(logging.INFO)


def run_command(main: Callable[[], None]) -> None:
    """Run the `main` of a command; print an error of the user's input as one line, without a traceback.

    A `UserError`, an `OSError` of the storage such as a full disk, or another package with the name of one of ours
    becomes one line on stderr and exit status 2.
    Ctrl-C ends with exit status 130, and a pipe that nothing reads any more with 141, as in a shell.

    A `main` should parse its arguments before it imports heavy modules, so that --help answers at once.
    """
    name_unknown_user()
    atexit.register(gc.freeze)  # else Python searches all objects of torch for garbage at the end, for half a second
    try:
        main()
        print(end="", flush=True)  # not of `sys.stdout`, which is None if it was closed before the start
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except UserError as error:
        print(f"error: {without_secrets(printable(str(error)))}", file=sys.stderr)
        raise SystemExit(2) from None
    except ImportError as error:  # a package or file with the name of one of ours is found first
        name = (error.name or "").partition(".")[0]
        other, ours = getattr(sys.modules.get(name), "__file__", None), Path(__file__).resolve().parents[2] / name
        if other is None or not (ours / "__init__.py").is_file() or Path(other).resolve().is_relative_to(ours):
            raise
        print(f"error: Python finds {name} at {other}, which hides {ours}; remove or rename it", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # as in `launch/status.py RUNS | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python's last flush does not fail
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        if error.errno not in _OF_STORAGE:
            raise
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
