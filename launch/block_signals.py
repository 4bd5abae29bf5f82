"""Start a program with SIGTERM, SIGUSR1 and SIGUSR2 blocked, so that a signal waits until the program can handle it.

    python block_signals.py PROGRAM ARGUMENT...

A rank needs seconds to import its libraries. A signal in that time would kill it, and the job with it. `launch.job`
installs its handlers, then unblocks the signals.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
    os.execvp(sys.argv[1], sys.argv[1:])
