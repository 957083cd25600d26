"""A store of a user's own, in which ranks meet."""

from __future__ import annotations

import os
import time
from datetime import timedelta


class FolderStore:
    """A file for each key."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def _file(self, key: str) -> str:
        return f"{self._folder}/{key.replace('/', '_')}"  # pathlib would keep the name for ever

    def set(self, key: str, value: str) -> None:
        new = self._file(f"{key}.{os.getpid()}")
        with open(new, "w", encoding="ascii") as file:
            file.write(value)
        os.rename(new, self._file(key))

    def get(self, key: str) -> bytes:
        with open(self._file(key), "rb") as file:
            return file.read()

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        while missing := [key for key in keys if not os.path.exists(self._file(key))]:
            if time.monotonic() > end:
                raise TimeoutError(f"no {missing[0]}")
            time.sleep(0.001)

    def add(self, key: str, amount: int) -> int:
        with open(self._file(key), "ab") as file:
            file.write(b"." * amount)
            return file.tell()

    def delete_key(self, key: str) -> None:
        os.unlink(self._file(key))
