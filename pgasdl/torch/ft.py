"""A process group of torchft that loses ranks, and takes them back, over pgasdl."""

from __future__ import annotations

from typing import Any

from torchft import process_group  # type: ignore[import-not-found, import-untyped, unused-ignore]

from pgasdl.torch.backend.group import ProcessGroup
from pgasdl.torch.backend.meet import meet_apart
from pgasdl.torch.work import torch_errors


class ProcessGroupPgasdl(process_group.ProcessGroupWrapper):  # type: ignore[misc]
    """torchft's process group over pgasdl, in place of its ``ProcessGroupGloo``.

    Each quorum makes a new context among its ranks; that of the quorum before ends first, at once,
    whatever waits in it. ``torchft.Manager(pg=ProcessGroupPgasdl(timeout), ...)`` takes it.

    Parameters
    ----------
    timeout : timedelta
        For meeting, and the default of every call. A call that exceeds it, or loses a rank, raises
        what the backend "pgasdl" raises there.
    """

    _pg: ProcessGroup | None

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
        with torch_errors():
            shared = meet_apart(store, rank, world_size, self._timeout)
            return ProcessGroup(shared, range(world_size), rank, self._timeout)

    def abort(self, errored: bool = True) -> None:
        """End the calls that are under way, and the context; the other ranks hear of it."""
        group = self._pg
        super().abort(errored)
        if group is not None:
            group.context.close(failed=True)
            group.shutdown()

    def shutdown(self) -> None:
        """End the context in peace."""
        group, self._pg = self._pg, None
        if group is not None:
            group.shutdown()

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name that torchft shows."""
        return "torchft-pgasdl"
