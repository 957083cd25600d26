"""What a rank leaves behind when it fails: its flight record, and a word to its launcher."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgasdl.context import Context


def dump(context: Context, reason: str) -> None:
    """Write the last operations to a file in ``PGASDL_TRACE``, or to standard error."""
    record = f"flight record, {reason}\n{context.flight_record()}"
    folder = context.config.trace
    if folder is not None:
        name = f"pgasdl-{context.launch.job_id}-rank-{context.rank}.txt"
        try:
            with open(os.path.join(folder, name), "a", encoding="utf-8") as file:
                file.write(record)
            return
        except OSError as error:
            # This must not take the place of the error that led here.
            record = f"PGASDL_TRACE cannot be written: {error}\n{record}"
    sys.stderr.write(record)


def tell_elastic(error: BaseException) -> None:
    """torchrun shows what a rank wrote to this file as the reason of its failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {
            "message": {
                "message": f"{type(error).__name__}: {error}",
                "extraInfo": {"timestamp": str(int(time.time()))},
            }
        }
        with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump(message, file)
