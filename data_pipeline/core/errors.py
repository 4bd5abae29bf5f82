"""Report errors of the user's input: one sentence on stderr, exit status 2."""

from __future__ import annotations

import difflib
import errno
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Errors by which a storage refuses a path. ENOENT is not among them: commands check first whether a file is there.
_REFUSED = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE}
    | {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
)


class UserError(ValueError):
    """The user's input was wrong. The message is one sentence: what was wrong, where, and what to do."""


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
    return f'; did you mean "{near[0]}"?' if near else f"; valid are: {', '.join(words)}"


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Add `path` to an `OSError` raised inside if it names no file. Errors of write, flush and fsync name none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def storage_problem(error: OSError) -> str | None:
    """Return one sentence for an error of the storage that the user can mend; None for any other, which may be a bug.

    A full disk can always be mended. A refusal can, if the error names the file that was refused.

    Examples:
        >>> storage_problem(OSError(errno.EROFS, "Read-only file system", "/archive/run/report.html"))
        '/archive/run/report.html: read-only file system; mend that, or choose another place for what is written'
        >>> storage_problem(OSError(errno.EINVAL, "Invalid argument", "report.html")) is None
        True
    """
    reason = (error.strerror or "").lower()
    if error.errno in _NO_ROOM:
        where = f" for {error.filename}" if error.filename else ""
        return f"no room on the disk{where} ({reason}); free some, or choose another place for what is written"
    if error.errno in _REFUSED and error.filename:
        return f"{error.filename}: {reason}; mend that, or choose another place for what is written"
    return None


def printable(text: str) -> str:
    """Return `text` with every character that is not printable escaped as Python does.

    Examples:
        >>> printable("runs/\\x1b[2Ja\\nb")
        'runs/\\\\x1b[2Ja\\\\nb'
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


class PrintableFormatter(logging.Formatter):
    """Writes log records as `printable` text, line by line: a name in a message may come from a stranger's file."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(printable(line) for line in super().format(record).split("\n"))


def log_to_terminal() -> None:
    """Write log records from INFO on to stderr, as their message alone."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def run_command(main: Callable[[], None]) -> None:
    """Run the `main` of a command; a `UserError` becomes one line on stderr and exit status 2.

    A `main` parses its arguments first, and imports what is heavy after that, so that --help answers at once.

    So does an `OSError` that `storage_problem` has a sentence for. Ctrl-C ends without a traceback, with the exit
    status 130 that shells give it.
    """
    if logging.lastResort is not None:  # which prints warnings if a command has set up no log
        logging.lastResort.setFormatter(PrintableFormatter())
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except UserError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        problem = storage_problem(error)
        if problem is None:
            raise
        print(f"error: {printable(problem)}", file=sys.stderr)
        raise SystemExit(2) from None
