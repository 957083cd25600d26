"""Rank 1 hands over memory without seals, as a program other than ours might."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from rank_tools import report, say, until

import pgasdl
from pgasdl import PgasError, PgasTimeoutError

OFFER = struct.Struct("16siII")


def forge(token: bytes, segment: int) -> None:
    """Offer rank 0 an unsealed memfd as rank 1's copy; other jobs drop it, because they have
    another token."""
    memory = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(memory, 1 << 20)
    lines = Path("/proc/net/unix").read_text(encoding="ascii").splitlines()
    addresses = [line.split()[-1] for line in lines if "@pgasdl-" in line]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        for address in addresses:
            try:
                content = OFFER.pack(token, 1, segment, 0)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", memory))]
                sock.sendmsg([content], rights, 0, f"\0{address[1:]}")
            except ConnectionError:
                pass  # a job that has just ended


def main() -> None:
    with pgasdl.init() as ctx:
        before = ctx.segment(64)
        if ctx.rank == 1:
            try:
                ctx.segment(4096, timeout=0)
            except PgasTimeoutError:
                say("offered")
            forge(
                ctx._job.store.token, before.id + ctx.size + ctx.rank
            )  # the id of rank 1's next segment
            ctx.notify(0, before, 5)
        else:
            ctx.notify_waitsome(before, 5, 1)
        try:
            segment = ctx.segment(4096)
            say("made", segment=segment.id)
        except PgasError as error:
            report(ctx, error, "refused")
        if ctx.rank == 1:
            until(lambda: ctx.health()[0] != "healthy", 5)


if __name__ == "__main__":
    main()
