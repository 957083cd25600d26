"""What the tests of failures share."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from support import launcher
from support.forking import quiet

PROGRAMS = Path(__file__).with_name("programs")
# The timeout of jobs whose subject is not a time-out; longer than any that a test sees.
TIMEOUT = "60"


def launched(
    *arguments: str, **variables: str
) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Run the real launcher; afterwards end it and all it started. Output is on one pipe."""
    return launcher.running(*arguments, stderr=subprocess.STDOUT, **quiet(**variables))
