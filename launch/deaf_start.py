"""Start a program that a warning does not end before it listens: what is sent meanwhile waits for it.

    python deaf_start.py PROGRAM ARGUMENT...

A rank needs seconds to import what it computes with, and a signal that came then would kill it, and the job with it.
`launch.job` listens, and lifts the block.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
    os.execv(sys.argv[1], sys.argv[1:])
