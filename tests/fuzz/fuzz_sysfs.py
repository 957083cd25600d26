"""The kernel's files about this machine's RDMA devices, as topo and doctor read them."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fuzz_drive import Input

from pgasdl.tools.topo import sysfs_addresses

_PLACES = (
    "d/device/numa_node",
    "d/node_type",
    "d/ports/1/state",
    "d/ports/1/link_layer",
    "d/ports/1/gids/0",
    "d/ports/1/gids/1",
    "d/ports/1/gids/x",
    "d/ports/1/gid_attrs/types/0",
    "d/ports/1/gid_attrs/ndevs/0",
    "d/ports/x/state",
    "e/ports/1/gids/0",
)


def one(data: bytes) -> None:
    """Every file may be missing, or hold anything: the rest is reported, and nothing is raised."""
    given = Input(data)
    with tempfile.TemporaryDirectory(prefix="sysfs-", dir="/dev/shm") as folder:
        root = Path(folder)
        while given:
            path = root / _PLACES[given.byte() % len(_PLACES)]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(given.bytes(given.byte()))
        for address in sysfs_addresses(root):
            assert address.device in ("d", "e")
            assert address.port in (0, 1)
            assert address.gid_index in (-1, 0, 1)
