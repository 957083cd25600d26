"""A rank that says its process's number, and ends when and as the file "end" of the job says.

``held.py stubborn``: it does not end by SIGTERM; ``held.py graceful``: it says so first.
"""

import os
import signal
import sys
import time
from pathlib import Path

end = Path(os.environ["PGASDL_JOB_FOLDER"], "end")
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "graceful" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saves", flush=True)))
print("process", os.getpid(), flush=True)
deadline = time.monotonic() + 100
while not end.exists():
    if time.monotonic() > deadline:
        sys.exit("nobody ended it")
    time.sleep(0.01)
sys.exit(int(end.read_text()))
