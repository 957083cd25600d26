"""Whether ranks may read each other's memory wherever it lies: tried once for each group.

Then plans can copy from peers' arrays as they are. On one machine it takes process_vm_readv(2),
which containers, user namespaces and Yama may refuse.
"""

from __future__ import annotations

import ctypes
import logging
import os

from pgasdl.collectives.state import Steps
from pgasdl.group import Group

log = logging.getLogger("pgasdl")
_PROOF_BYTES, _LONGEST = 16, 500


def agree_on_reading(group: Group, steps: Steps) -> None:
    """Try every pair of members, and set :attr:`Group.unreadable` on all alike. Collective.

    Members read a random number of each other's: a process that has a peer's number in another
    container is not taken for the peer.
    """
    # A step, too: a call that goes on repeats the steps that it has made, and no others.
    if steps(lambda: group.unreadable) is not None:
        return
    if not group.mapped:
        group.unreadable = "their directory of arrays is not mapped"
        return
    proof = steps(lambda: ctypes.create_string_buffer(os.urandom(_PROOF_BYTES), _PROOF_BYTES))
    group.context._admit_readers()
    words = f"{ctypes.addressof(proof)} {proof.raw.hex()}".encode()
    told = steps(lambda: group.allgather("reading memory", words, steps.left))
    why = steps(lambda: _refusal(group, told))
    # Nobody reads the proof any more once all have said how it went.
    verdicts = steps(
        lambda: group.allgather("reading memory, verdict", why.encode()[:_LONGEST], steps.left)
    )
    group.unreadable = min((word.decode(errors="replace") for word in verdicts if word), default="")
    if group.unreadable and set(group.topology.routes.names) == {"shm"}:
        log.info("arrays outside segments are staged: %s", group.unreadable)


def _refusal(group: Group, told: list[bytes]) -> str:
    """Return why this rank cannot read some member's memory, or ""."""
    for member, words in enumerate(told):
        if member == group.rank:
            continue
        address, proof = words.decode().split()
        peer = group.ranks[member]
        found, why = group.context._try_read(peer, int(address), _PROOF_BYTES)
        if not why and found.hex() != proof:
            why = f"rank {peer} has another process number here"
        if why:
            return why
    return ""
