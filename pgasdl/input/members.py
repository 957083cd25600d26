"""The ranks that read a data set together: what one of them, or each, finds out, all get."""

from __future__ import annotations

from collections.abc import Callable

from pgasdl.errors import DataError, PgasError
from pgasdl.group import Group


class Members:
    """The ranks of a group, or (``group`` is None) this process alone. Calls are collective."""

    def __init__(self, group: Group | None, timeout: float) -> None:
        self.group = group if group is not None and group.size > 1 else None
        self.rank, self.size = (group.rank, group.size) if group is not None else (0, 1)
        self._timeout = timeout

    def from_first(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Return what the first rank makes; if it fails, all ranks get its error."""
        return self.from_all(what, make if self.rank == 0 else None)[0]

    def from_all(
        self, what: str, make: Callable[[], bytes] | None, more: float = 0.0
    ) -> list[bytes]:
        """Return what each rank makes; if one fails, all fail.

        ``more``: seconds to wait beyond the time-out. ``what`` has to be the same on all ranks.
        """
        if self.group is None:
            return [make() if make else b""]
        try:
            blob, error = b"+" + (make() if make else b""), None
        except (PgasError, OSError, ValueError, ImportError) as caught:
            blob, error = b"-" + str(caught).encode(), caught
        blobs = self.group.allgather(what, blob, self._timeout + more)
        if error is not None:
            raise error
        for rank, each in enumerate(blobs):
            if each.startswith(b"-"):
                raise DataError(f"rank {self.group.ranks[rank]}: {each[1:].decode()}")
        return [each[1:] for each in blobs]
