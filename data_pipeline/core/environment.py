"""Read environment variables; an empty variable counts as unset.

Many scripts unset a variable by `NAME= command` or `export NAME=`. CUDA_VISIBLE_DEVICES is not read here, because to
CUDA an empty value means "no GPU".
"""

from __future__ import annotations

import getpass
import os


def variable(name: str) -> str | None:
    """Return the value of a variable of this process; None if it is unset."""
    return os.environ.get(name) or None


def unset_empty_variables(prefix: str) -> None:
    """Unset the empty variables of this process that begin with `prefix`, for a library that cannot read them."""
    for name, value in list(os.environ.items()):
        if name.startswith(prefix) and not value:
            del os.environ[name]


def name_unknown_user() -> None:
    """Set LOGNAME if nothing names the user, as in a container that runs under a user id without an account.

    The import of torchvision needs a name, because torch calls a directory after the user.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"
