"""Python's search for garbage among all objects: a third of the time in which a command starts and ends."""

from __future__ import annotations

import atexit
import gc

_USUAL = gc.get_threshold()
_RARE = (*_USUAL[:2], 100 * _USUAL[2])


def search_modules_rarely() -> None:
    """Make Python search all objects for garbage a hundredth as often, and not at the end of this process.

    Importing torch makes half a million objects, which stay. Python searches all of them whenever their number has
    grown by a quarter, and once more when the process ends. Objects that are new are searched as often as before.
    """
    gc.set_threshold(*_RARE)
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)  # what is frozen is not searched


def search_as_usual() -> None:
    """Search old objects for garbage as often as before `search_modules_rarely`. Thresholds of the user stay.

    Call it before there is garbage that may hold large tensors.
    """
    if gc.get_threshold() == _RARE:
        gc.set_threshold(*_USUAL)
