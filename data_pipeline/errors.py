"""The one way a command tells the user that the input was wrong: one sentence on stderr, exit status 2."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable


class UserError(ValueError):
    """The user's input was wrong. The message is one sentence: what was wrong, where, and what to do."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """`; did you mean "x"?` for the valid word nearest to `word`, or a list of the valid words if none is near.

    Examples:
        >>> nearest("simclt", ["simclr", "viewmaker"])
        '; did you mean "simclr"?'
        >>> nearest("zzz", ["simclr", "viewmaker"])
        '; valid are: simclr, viewmaker'
    """
    words = sorted(valid)
    near = difflib.get_close_matches(word, words, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; valid are: {', '.join(words)}"


def run_command(main: Callable[[], None]) -> None:
    """Run a command line's `main`; a `UserError` becomes one line on stderr and exit status 2.

    A full disk is the user's to mend as well, so `ENOSPC` is reported the same way. Ctrl-C ends without a traceback,
    with the exit status 130 that shells give it.
    """
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno != 28:  # ENOSPC
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        print(f"error: no space left on the disk{where}; free some or choose another directory", file=sys.stderr)
        raise SystemExit(2) from None
