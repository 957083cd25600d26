"""A failing rank leaves two things: its flight record, and the reason for its launcher."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import tempfile
import time

from pgasdl.trust import open_plain


def dump(
    operations: str, reason: str, folder: str | None, name: str, *, to_file: bool = False
) -> None:
    """Append the last operations to a file in ``PGASDL_TRACE``, and print its path.

    Without that variable they go to standard error; ``to_file``: to the temporary folder.
    """
    record = f"flight record, {reason}\n{operations}"
    if folder is None and to_file:
        folder = tempfile.gettempdir()
    if folder is not None:
        path = os.path.join(folder, name)
        try:
            with open(path, "a", encoding="utf-8", opener=_own) as file:
                file.write(record)
            record = f"flight record: {path}\n"
        except OSError as error:
            # This error must not hide the one that led here.
            record = f"{path} cannot be written: {error}\n{record}"
    sys.stderr.write(record)


def _own(path: str, flags: int) -> int:
    """Open a file of this user's; never follow, or wait for, what somebody else put there."""
    descriptor = open_plain(path, flags)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise FileExistsError(errno.EEXIST, "another user's file lies there", path)
    return descriptor


def report_to_elastic(error: BaseException) -> None:
    """Write an error to the file in which torchrun looks for the reason of a failure."""
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
