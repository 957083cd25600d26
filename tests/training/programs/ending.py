"""How programs end that used gloo."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def end_at_once() -> NoReturn:
    """End this process successfully, without Python's own end.

    Where DistributedDataParallel or a device mesh used the default group, gloo's threads outlive
    destroy_process_group(). One that is late, on a busy machine, frees a tensor that has a Python
    object when Python has ended; it does not get the interpreter's lock, and PyTorch 2.13 ends the
    process by abort(): "terminate called without an active exception".
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
