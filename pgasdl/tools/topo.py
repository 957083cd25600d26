"""``pgasdl topo``: the GPUs, and every address at which RDMA peers can reach this machine.

The native module chooses and says why. Where it cannot (it is not loaded, or built without verbs,
or libibverbs is missing), the list comes from sysfs, and from pyverbs if it is installed, with that
as the reason. Needs the standard library only.
"""

from __future__ import annotations

import ctypes
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from pgasdl import _load_native
from pgasdl.config import Config
from pgasdl.errors import PgasError
from pgasdl.tools import gpus
from pgasdl.tools.json_document import takes_stdout, write_json

LIBRARY = "libibverbs.so.1"
SYSFS = Path("/sys/class/infiniband")
NODES = Path("/dev/infiniband")
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
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
    source : str
        Source of the list: "libibverbs", "pyverbs" or "sysfs".
    stage : str
        What is missing first: "native", "build", "library", "device"; "" if nothing is.
    missing : str
        The same in words.
    fix : str
        How to fix it.
    """

    source: str
    addresses: tuple[RdmaAddress, ...]
    stage: str = ""
    missing: str = ""
    fix: str = ""

    @property
    def chosen(self) -> RdmaAddress | None:
        """The address that transport verbs uses."""
        return next((address for address in self.addresses if address.chosen), None)


def main(json_file: str | None = None) -> int:
    """Print the table; return 0 if transport verbs is available, else 1. Raises ConfigError."""
    config = Config.from_environment()
    found = survey(config)
    in_use = settings(config, found)
    gpus_found = gpus.survey()
    write_json({**asdict(found), "settings": in_use, "gpus": asdict(gpus_found)}, json_file)
    if not takes_stdout(json_file):
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
        return _without_native(config, "native", f"the native module cannot be imported: {error}")
    if left_out := native.transports()["verbs"]:
        return _without_native(config, "build", left_out)
    try:
        found = tuple(
            RdmaAddress(**{field.name: getattr(info, field.name) for field in fields(RdmaAddress)})
            for info in native.verbs_devices(native.VerbsOptions(**config.verbs_options()))
        )
    except (PgasError, OSError, RuntimeError) as error:
        return _without_native(config, "library" if library_error() else "device", str(error))
    if not found:
        return _unseen(config)
    if any(address.chosen for address in found):
        return Survey("libibverbs", found)
    reasons = dict.fromkeys(f"{address.device}: {address.refused}" for address in found)
    return Survey("libibverbs", found, "device", "; ".join(reasons), FIXES[_trouble(found, config)])


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


def _without_native(config: Config, stage: str, missing: str) -> Survey:
    source, found = _second_best(config, missing)
    fix = FIXES.get(stage) or FIXES["closed"]
    return Survey(source, found, stage, missing, fix)


def _unseen(config: Config) -> Survey:
    """Survey the kernel's devices where libibverbs lists none."""
    if not kernel_devices():
        return Survey("libibverbs", (), "device", "no RDMA device", FIXES["none"])
    if NODES.is_dir() and any(NODES.glob("uverbs*")):
        kind, missing = "provider", "libibverbs has no provider for the kernel's RDMA devices"
    else:
        kind, missing = "closed", f"the kernel has RDMA devices, but there is no {NODES}/uverbs*"
    source, found = _second_best(config, missing)
    return Survey(source, found, "device", missing, FIXES[kind])


def _trouble(found: Sequence[RdmaAddress], config: Config) -> str:
    """Return the key of the fix for a machine whose addresses are all refused."""
    if all(_unwanted(address, config) or "asked for" in address.refused for address in found):
        return "wish"
    if any("cannot be opened" in address.refused for address in found):
        return "closed"
    return "down"


def _second_best(config: Config, reason: str) -> tuple[str, tuple[RdmaAddress, ...]]:
    """Return the kernel's list; each entry has its own reason, or else ``reason``."""
    ask = _pyverbs()
    found = []
    for address in sysfs_addresses():
        mtu, closed = (0, "") if ask is None else _opened(ask, address)
        refused = _unwanted(address, config) or closed or address.refused or reason
        found.append(replace(address, mtu=mtu, refused=refused))
    return ("sysfs" if ask is None else "pyverbs"), tuple(found)


def _unwanted(address: RdmaAddress, config: Config) -> str:
    ports, gid = config.verbs_device, config.verbs_gid
    if ports is not None and not ports.allows(address.device, address.port):
        return f"device {ports} was asked for"
    if gid is not None and gid != address.gid_index:
        return f"GID index {gid} was asked for"
    return ""


def sysfs_addresses(root: Path = SYSFS) -> Iterator[RdmaAddress]:
    """Yield every address below ``root``, in the kernel's order, with refusals by sysfs alone."""
    for device in sorted(root.glob("*")):
        node = _line(device / "device" / "numa_node")
        numa_node = int(node) if _NUMBER.fullmatch(node) else -1
        iwarp = _line(device / "node_type").endswith("RNIC")
        bare = RdmaAddress(device.name, numa_node=numa_node)
        n_found = 0
        for port in _numbered(device / "ports"):
            state = _line(port / "state").rpartition(" ")[2].lower()
            refused = "" if state == "active" else f"the port is {state or 'in no known state'}"
            if iwarp:
                refused = "iWARP: it connects through rdma_cm only, and has no atomics"
            link = replace(
                bare,
                port=int(port.name),
                state=state,
                link_layer=_line(port / "link_layer"),
                refused=refused,
            )
            for address in _entries(port, link):
                n_found += 1
                yield address
        if n_found == 0:
            yield replace(bare, refused="no port of it has an address: is its network device up?")


def _entries(port: Path, link: RdmaAddress) -> Iterator[RdmaAddress]:
    for entry in _numbered(port / "gids"):
        words = _line(entry).replace(":", "")
        if not re.fullmatch(r"[0-9a-fA-F]{32}", words) or not int(words, 16):
            continue
        gid = bytes.fromhex(words)
        kind = _line(port / "gid_attrs" / "types" / entry.name)
        yield replace(
            link,
            gid_index=int(entry.name),
            gid=socket.inet_ntop(socket.AF_INET6, gid),
            type="RoCE v1" if kind == "IB/RoCE v1" else kind,
            net_device=_line(port / "gid_attrs" / "ndevs" / entry.name),
        )


def _numbered(folder: Path) -> list[Path]:
    """Return the entries whose names are numbers, in order."""
    entries = (path for path in folder.glob("*") if _NUMBER.fullmatch(path.name))
    return sorted(entries, key=lambda path: int(path.name))


def _line(path: Path) -> str:
    """Return the line of a file in sysfs; "" if it cannot be read, like an empty entry."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _pyverbs() -> Any | None:
    try:
        return import_module("pyverbs.device")
    except ImportError:
        return None


def _opened(device_module: Any, address: RdmaAddress) -> tuple[int, str]:
    """Return the port's MTU, which sysfs lacks, and why the device cannot be opened, or ""."""
    try:
        with device_module.Context(name=address.device) as context:
            mtu = context.query_port(address.port).active_mtu if address.port else 0
    except Exception as error:  # pyverbs has a family of its own
        return 0, f"it cannot be opened: {error}; {CONTAINER}"
    return (128 << mtu if mtu else 0), ""


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
    if found.source != "libibverbs":
        yield f"from {found.source}, since libibverbs could not be asked"
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
