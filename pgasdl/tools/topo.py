"""``pgasdl topo``: the GPUs, and every address at which RDMA peers can reach this machine.

The native module chooses and says why. Where it cannot (it is not loaded, or built without verbs,
or libibverbs is missing), there is no list, but that reason and how to mend it. Needs the standard
library only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pgasdl import _load_native
from pgasdl.config import Config
from pgasdl.errors import PgasError
from pgasdl.tools import gpus
from pgasdl.tools.json_document import write_json

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
_HEADINGS = (
    "", "DEVICE", "PORT", "GID", "STATE", "LINK", "TYPE", "GBIT/S", "MTU", "ADDRESS", "NET", "NUMA",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RdmaAddress:
    """One entry of a port's table of addresses; -1, 0 or "" for unknown values.

    Attributes
    ----------
    mtu : int
        MTU of the active port, in bytes.
    chosen : bool
        Transport verbs uses this address.
    refused : str
        Why it does not use it, unless chosen.
    gigabits : float
        Speed of the link each way, in Gbit/s: width times the speed of a lane.
    path_mtu : int
        Bytes of a packet at most, by ``PGASDL_VERBS_MTU`` or the port.
    pkey : int
        P_Key of connections from here.
    ack_timeout : int
        Time for an acknowledgement: 4.096 us times 2 to this power.
    keeps_order : bool
        Writes of a connection are placed in order, by ``PGASDL_VERBS_ORDER`` or the device.
    """

    device: str
    port: int = 0
    gid_index: int = -1
    state: str = ""
    link_layer: str = ""
    type: str = ""
    mtu: int = 0
    gid: str = ""
    net_device: str = ""
    numa_node: int = -1
    chosen: bool = False
    refused: str = ""
    gigabits: float = 0.0
    path_mtu: int = 0
    pkey: int = 0
    ack_timeout: int = 0
    keeps_order: bool = False


@dataclass(frozen=True, slots=True)
class Survey:
    """The addresses, best first, and what is missing.

    Attributes
    ----------
    stage : str
        The part that is missing first: "native", "build", "library", "device"; "" if nothing is.
    missing : str
        The same in words.
    fix : str
        How to fix it.
    """

    addresses: tuple[RdmaAddress, ...]
    stage: str = ""
    missing: str = ""
    fix: str = ""

    @property
    def chosen(self) -> RdmaAddress | None:
        """The address that transport verbs uses."""
        return next((address for address in self.addresses if address.chosen), None)


def main(as_json: bool = False) -> int:
    """Print the table; return 0 if transport verbs is available, else 1. Raises ConfigError."""
    config = Config.from_environment()
    found = survey(config)
    in_use = settings(config, found)
    gpus_found = gpus.survey()
    if as_json:
        write_json({**asdict(found), "settings": in_use, "gpus": asdict(gpus_found)})
    else:
        print("\n".join([*_report(found, in_use), "", *gpus.report(gpus_found)]))
    return 0 if found.chosen else 1


def settings(config: Config, found: Survey) -> dict[str, str]:
    """Return how transport verbs connects: variables, and the values in effect."""
    chosen = found.chosen
    if chosen is None:
        return {}
    microseconds = 4.096 * 2**chosen.ack_timeout
    return {
        "PGASDL_VERBS_PKEY": f"0x{chosen.pkey:04x}",
        "PGASDL_VERBS_MTU": str(chosen.path_mtu),
        "PGASDL_VERBS_SL": str(config.verbs_sl),
        "PGASDL_VERBS_TC": str(config.verbs_tc),
        "PGASDL_VERBS_GRH": config.verbs_grh,
        "PGASDL_VERBS_RETRY_COUNT": str(config.verbs_retry_count),
        "PGASDL_VERBS_RNR_RETRY_COUNT": str(config.verbs_rnr_retry_count),
        "PGASDL_VERBS_ACK_TIMEOUT": f"{chosen.ack_timeout} ({microseconds / 1e3:.3g} ms)",
        "PGASDL_VERBS_INLINE": str(config.verbs_inline),
        "PGASDL_VERBS_ORDER": "kept" if chosen.keeps_order else "completion",
        "PGASDL_VERBS_RAILS": _rails(config, found),
        "PGASDL_VERBS_STRIPE": str(config.verbs_stripe),
    }


def _rails(config: Config, found: Survey) -> str:
    ports = [f"{each.device}:{each.port}" for each in found.addresses if each.chosen]
    if len(ports) == config.verbs_rails:
        return f"{len(ports)} ({', '.join(ports)})"
    return f"{len(ports)} of {config.verbs_rails} ({', '.join(ports)}); no other port can be used"


def survey(config: Config) -> Survey:
    """List the addresses from the best source; opens and closes every device."""
    try:
        native = _load_native()
    except ImportError as error:
        return _without("native", f"the native module cannot be imported: {error}")
    if left_out := native.transports()["verbs"]:
        return _without("build", left_out)
    try:
        found = tuple(
            RdmaAddress(**{field.name: getattr(info, field.name) for field in fields(RdmaAddress)})
            for info in native.verbs_devices(native.VerbsOptions(**config.verbs_options()))
        )
    except (PgasError, OSError, RuntimeError) as error:
        return _without("library" if library_error() else "device", str(error))
    if not found:
        return _unseen()
    if any(address.chosen for address in found):
        return Survey(found)
    reasons = dict.fromkeys(f"{address.device}: {address.refused}" for address in found)
    return Survey(found, "device", "; ".join(reasons), FIXES[_trouble(found, config)])


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
    """Tell why libibverbs lists none of the kernel's devices."""
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


def _report(found: Survey, in_use: dict[str, str]) -> Iterator[str]:
    if found.addresses:
        yield from _table(found.addresses)
        yield ""
    if found.chosen:
        yield "* used by transport verbs; PGASDL_VERBS_DEVICE and PGASDL_VERBS_GID choose another"
        yield ""
        yield "its settings, which `pgasdl env` explains:"
        width = max(map(len, in_use))
        yield from (f"{name:<{width}}  {value}" for name, value in in_use.items())
        return
    yield f"no transport verbs: {found.missing}"
    yield f"fix: {found.fix}"


def _table(addresses: Sequence[RdmaAddress]) -> Iterator[str]:
    rows = [_HEADINGS, *(_cells(address) for address in addresses)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    notes = ["", *("chosen" if address.chosen else address.refused for address in addresses)]
    for row, note in zip(rows, notes, strict=True):
        cells = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        yield f"{cells}  {note}".rstrip()


def _cells(address: RdmaAddress) -> tuple[str, ...]:
    return (
        "*" if address.chosen else "",
        address.device,
        str(address.port or "-"),
        "-" if address.gid_index < 0 else str(address.gid_index),
        address.state or "-",
        address.link_layer or "-",
        address.type or "-",
        f"{address.gigabits:g}" if address.gigabits else "-",
        str(address.mtu or "-"),
        address.gid or "-",
        address.net_device or "-",
        "-" if address.numa_node < 0 else str(address.numa_node),
    )
