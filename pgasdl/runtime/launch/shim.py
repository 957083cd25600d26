"""Runs before a rank, in its process: ties it to the launcher, then becomes the program.

It is started as ``python -I -S shim.py LAUNCHER_PID PROGRAM ARGUMENTS...``. It is not a function
between fork and exec, because the launcher has threads. It imports nothing of pgasdl.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then exec."""
    launcher, program = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        sys.exit("pgasdl run: prctl(PR_SET_PDEATHSIG) is refused here")
    if os.getppid() != launcher:
        os._exit(137)  # it died before we were tied to it
    # The signal for a flight record must not kill the program before it has a handler.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv(program[0], program)  # noqa: S606 - no shell is the point


if __name__ == "__main__":
    main()
