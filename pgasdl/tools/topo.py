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
    "wish": "unset PGASDL_VERBS_DEVICE, PGASDL_VERBS_PORT and PGASDL_VERBS_GID, or name what "
    "`pgasdl topo` lists",
    "down": "ip link set NETDEVICE up, and an IP address on it; InfiniBand: a subnet manager",
}
_HEADINGS = (
    "", "DEVICE", "PORT", "GID", "STATE", "LINK", "TYPE", "GBIT/S", "MTU", "ADDRESS", "NET", "NUMA",
)  # fmt: skip

Wish = tuple[str | None, int | None, int | None]


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
    found = survey(config.verbs_device, config.verbs_port, config.verbs_gid)
    gpus_found = gpus.survey()
    write_json({**asdict(found), "gpus": asdict(gpus_found)}, json_file)
    if not takes_stdout(json_file):
        print("\n".join([*_report(found), "", *gpus.report(gpus_found)]))
    return 0 if found.chosen else 1


def survey(device: str | None = None, port: int | None = None, gid: int | None = None) -> Survey:
    """List the addresses from the best source; opens and closes every device."""
    wish = device, port, gid
    try:
        native = _load_native()
    except ImportError as error:
        return _without_native(wish, "native", f"the native module cannot be imported: {error}")
    if left_out := native.transports()["verbs"]:
        return _without_native(wish, "build", left_out)
    try:
        found = tuple(
            RdmaAddress(**{field.name: getattr(info, field.name) for field in fields(RdmaAddress)})
            for info in native.verbs_devices(*wish)
        )
    except (PgasError, OSError, RuntimeError) as error:
        return _without_native(wish, "library" if library_error() else "device", str(error))
    if not found:
        return _unseen(wish)
    if any(address.chosen for address in found):
        return Survey("libibverbs", found)
    reasons = dict.fromkeys(f"{address.device}: {address.refused}" for address in found)
    return Survey("libibverbs", found, "device", "; ".join(reasons), FIXES[_trouble(found, wish)])


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


def _without_native(wish: Wish, stage: str, missing: str) -> Survey:
    source, found = _second_best(wish, missing)
    fix = FIXES.get(stage) or FIXES["closed"]
    return Survey(source, found, stage, missing, fix)


def _unseen(wish: Wish) -> Survey:
    """Survey the kernel's devices where libibverbs lists none."""
    if not kernel_devices():
        return Survey("libibverbs", (), "device", "no RDMA device", FIXES["none"])
    if NODES.is_dir() and any(NODES.glob("uverbs*")):
        kind, missing = "provider", "libibverbs has no provider for the kernel's RDMA devices"
    else:
        kind, missing = "closed", f"the kernel has RDMA devices, but there is no {NODES}/uverbs*"
    source, found = _second_best(wish, missing)
    return Survey(source, found, "device", missing, FIXES[kind])


def _trouble(found: Sequence[RdmaAddress], wish: Wish) -> str:
    """Return the key of the fix for a machine whose addresses are all refused."""
    if wish != (None, None, None) and not any(_unwanted(address, wish) == "" for address in found):
        return "wish"
    if any("cannot be opened" in address.refused for address in found):
        return "closed"
    return "down"


def _second_best(wish: Wish, reason: str) -> tuple[str, tuple[RdmaAddress, ...]]:
    """Return the kernel's list; each entry has its own reason, or else ``reason``."""
    ask = _pyverbs()
    found = []
    for address in sysfs_addresses():
        mtu, closed = (0, "") if ask is None else _opened(ask, address)
        refused = _unwanted(address, wish) or closed or address.refused or reason
        found.append(replace(address, mtu=mtu, refused=refused))
    return ("sysfs" if ask is None else "pyverbs"), tuple(found)


def _unwanted(address: RdmaAddress, wish: Wish) -> str:
    names = ("device", "port", "GID index")
    for name, asked, here in zip(
        names, wish, (address.device, address.port, address.gid_index), strict=True
    ):
        if asked is not None and asked != here:
            return f"{name} {asked} was asked for"
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


def _report(found: Survey) -> Iterator[str]:
    if found.addresses:
        yield from _table(found.addresses)
        yield ""
    if found.chosen:
        yield "* used by transport verbs; PGASDL_VERBS_DEVICE, _PORT and _GID choose another"
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
