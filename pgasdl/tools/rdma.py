"""Every address at which RDMA peers can reach this machine.

The native module chooses and says why. Where it cannot (it is not loaded, or built without verbs,
or libibverbs is missing), the survey has that reason and its fix instead of a list. Needs the
standard library only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pgasdl import _load_native, numa
from pgasdl.config import Config
from pgasdl.errors import PgasError

LIBRARY = "libibverbs.so.1"
SYSFS = Path("/sys/class/infiniband")
NODES = Path("/dev/infiniband")
CONTAINER = "in docker --device=/dev/infiniband --ulimit memlock=-1"

GET_ONE = (
    "an RDMA adapter, or soft-RoCE on a network device: apt-get install rdma-core iproute2; "
    f"modprobe rdma_rxe; rdma link add rxe0 type rxe netdev eth0; {CONTAINER}"
)

FIXES = {
    "native": "pip install . (needs g++ with C++20), for this very Python",
    "build": "apt-get install libibverbs-dev, then build again: pip install --force-reinstall .",
    "library": "apt-get install libibverbs1 ibverbs-providers rdma-core",
    "provider": "apt-get install ibverbs-providers",
    "none": GET_ONE,
    "closed": f"{CONTAINER}; elsewhere rights to read and write {NODES}/uverbs*",
    "wish": "unset PGASDL_VERBS_DEVICE, PGASDL_VERBS_GID, PGASDL_VERBS_PKEY and PGASDL_VERBS_MTU, "
    "or name what `pgasdl topo` lists",
    "down": "ip link set NETDEVICE up, and an IP address on it; InfiniBand: a subnet manager",
}


@dataclass(frozen=True, slots=True)
class RdmaAddress:
    """One entry of a port's table of addresses; -1, 0 or "" for unknown values."""

    device: str
    port: int = 0
    gid_index: int = -1
    state: str = ""
    link_layer: str = ""
    type: str = ""
    mtu: int = 0  # MTU of the active port, in bytes
    gid: str = ""
    net_device: str = ""
    numa_node: int = -1
    chosen: bool = False  # transport verbs uses this address
    refused: str = ""  # why it does not use it, unless chosen
    gigabits: float = 0.0  # speed of the link each way, in Gbit/s: width times the speed of a lane
    path_mtu: int = 0  # bytes of a packet at most, by ``PGASDL_VERBS_MTU`` or the port
    pkey: int = 0  # P_Key of connections from here
    ack_timeout: int = 0  # time for an acknowledgement: 4.096 us times 2 to this power
    # Writes of a connection are placed in order, by ``PGASDL_VERBS_ORDER`` or the device.
    keeps_order: bool = False
    lid: int = 0  # local identifier, of a port of InfiniBand
    # The rank, of those that run where this process does, that would choose it: the first (0), the
    # second ...; -1: none.
    turn: int = -1


@dataclass(frozen=True, slots=True)
class Survey:
    """The addresses, best first, and the part that is missing, if any."""

    addresses: tuple[RdmaAddress, ...]
    # The part that is missing first: "native", "build", "library", "device"; "" if nothing is.
    stage: str = ""
    missing: str = ""  # the same in words
    fix: str = ""  # how to fix it
    # Bytes of a request that the chosen device takes from the processor; 0: it would not say.
    inline_bytes: int = 0

    @property
    def chosen(self) -> RdmaAddress | None:
        """The address that transport verbs uses."""
        return next((address for address in self.addresses if address.chosen), None)


def survey(config: Config) -> Survey:
    """List the addresses from the best source; opens and closes every device."""
    try:
        native = _load_native()
    except ImportError as error:
        return _without("native", f"the native module cannot be imported: {error}")
    if left_out := native.transports()["verbs"]:
        return _without("build", left_out)
    options = native.VerbsOptions(**config.verbs_options(), distances=numa.distances())
    try:
        found = tuple(
            RdmaAddress(**{field.name: getattr(info, field.name) for field in fields(RdmaAddress)})
            for info in native.verbs_devices(options)
        )
    except (PgasError, OSError, RuntimeError) as error:
        return _without("library" if library_error() else "device", str(error))
    if not found:
        return _unseen()
    if any(address.chosen for address in found):
        return Survey(found, inline_bytes=_inline_bytes(native, options))
    reasons = dict.fromkeys(f"{address.device}: {address.refused}" for address in found)
    return Survey(found, "device", "; ".join(reasons), FIXES[_trouble(found, config)])


def _inline_bytes(native: Any, options: Any) -> int:
    try:
        return int(native.verbs_inline_bytes(options))
    except (PgasError, OSError):  # not allowed to make connections: `pgasdl doctor` says so
        return 0


def library_error() -> str:
    """Return why libibverbs cannot be loaded; "" if it can."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        return str(error)
    return ""


def kernel_devices() -> list[str]:
    """Return the names of all devices of the kernel, usable from here or not."""
    return sorted(path.name for path in SYSFS.glob("*")) if SYSFS.is_dir() else []


def _without(stage: str, missing: str) -> Survey:
    return Survey((), stage, missing, FIXES.get(stage) or FIXES["closed"])


def _unseen() -> Survey:
    """Say why libibverbs lists none of the kernel's devices."""
    names = ", ".join(kernel_devices())
    if not names:
        return Survey((), "device", "no RDMA device", FIXES["none"])
    if NODES.is_dir() and any(NODES.glob("uverbs*")):
        missing = f"libibverbs has no provider for the kernel's RDMA devices ({names})"
        return Survey((), "device", missing, FIXES["provider"])
    missing = f"the kernel has RDMA devices ({names}), but there is no {NODES}/uverbs*"
    return Survey((), "device", missing, FIXES["closed"])


def _trouble(found: Sequence[RdmaAddress], config: Config) -> str:
    """Return the key of the fix for a machine whose addresses are all refused."""
    if all(_unwanted(address, config) or "asked for" in address.refused for address in found):
        return "wish"
    if any("cannot be opened" in address.refused for address in found):
        return "closed"
    return "down"


def _unwanted(address: RdmaAddress, config: Config) -> str:
    ports, gid = config.verbs_device, config.verbs_gid
    if ports is not None and not ports.allows(address.device, address.port):
        return f"device {ports} was asked for"
    if gid is not None and gid != address.gid_index:
        return f"GID index {gid} was asked for"
    return ""
