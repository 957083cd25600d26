"""The GPUs of this machine: properties from the CUDA driver, and the RDMA devices near them.

Needs the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from pgasdl import _load_native
from pgasdl.errors import PgasError
from pgasdl.kernel import read_line
from pgasdl.tools.text import aligned

SYS = Path("/sys")
_PEER_MEMORY = (
    "module/nvidia_peermem/version",
    "kernel/mm/memory_peers/nv_mem/version",
    "kernel/mm/memory_peers/nv_mem_nc/version",
)
# The parts of a machine that a GPU and an RDMA device have in common, nearest first.
_DISTANCES = ("PCI switch", "host bridge", "NUMA node", "machine")
_GIB = 1 << 30
_HEADINGS = ("GPU", "NAME", "MEMORY", "CC", "PCI", "NUMA", "PEERS", "SHARED BY", "RDMA BY", "NIC")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that this process sees."""

    ordinal: int  # its number in this process: "cuda:0" is 0
    name: str
    uuid: str
    pci_address: str
    compute_capability: str
    memory_bytes: int
    multiprocessors: int
    # It has virtual memory, and hands it to other processes as descriptors.
    virtual_memory: bool
    posix_handles: bool
    # RDMA devices may reach such memory; they get it as a dmabuf.
    gpudirect: bool
    dmabuf: bool
    flushes_writes: bool  # the host can make it flush the writes of RDMA devices
    # The devices that see RDMA writes without a flush: 0 none, 100 this GPU, 200 all.
    writes_ordering: int
    numa_node: int  # the host's node; -1: unknown
    peers: list[int]  # ordinals of GPUs whose memory it can reach
    nearest: str = ""  # the nearest RDMA device; "": none
    # The part that they have in common: "PCI switch", "host bridge", "NUMA node" or "machine".
    distance: str = ""

    @property
    def sharing(self) -> str:
        """How other processes reach its memory."""
        return "descriptor" if self.virtual_memory and self.posix_handles else "legacy IPC"


@dataclass(frozen=True, slots=True)
class GpuSurvey:
    """The GPUs, and what they share."""

    gpus: tuple[Gpu, ...]
    missing: str = ""  # why there is none
    driver: str = ""  # NVIDIA's version of the driver; "": unknown
    cuda: str = ""  # the newest CUDA that it runs
    peer_memory: bool = False  # nvidia-peermem, or its predecessor, is loaded
    mps: str = ""  # where the control daemon of MPS listens; "": it does not run


def survey() -> GpuSurvey:
    """Ask the driver, and sysfs for the rest."""
    try:
        native = _load_native()
    except ImportError as error:
        return GpuSurvey((), f"the native module cannot be imported: {error}")
    if missing := native.cuda_missing():
        return GpuSurvey((), missing)
    try:
        found = tuple(_gpu(info) for info in native.cuda_devices())
        cuda = native.cuda_version()
    except (PgasError, OSError) as error:
        return GpuSurvey((), str(error))
    return GpuSurvey(found, "", driver_version() or "", cuda, peer_memory(), mps())


def driver_version() -> str | None:
    """Return the version of NVIDIA's kernel module; None: it is not loaded."""
    return read_line(str(SYS / "module/nvidia/version"))


def peer_memory() -> bool:
    """Whether the kernel lets RDMA devices register the memory of GPUs by its address."""
    return any((SYS / path).exists() for path in _PEER_MEMORY)


def mps() -> str:
    """Return where the control daemon of MPS listens; "": nowhere."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"  # noqa: S108
    control = Path(pipes) / "control"
    return str(control) if control.exists() else ""


def report(found: GpuSurvey) -> Iterator[str]:
    """Yield the lines of a table."""
    if not found.gpus:
        yield f"no GPU: {found.missing}"
        return
    yield from aligned([_HEADINGS, *(_cells(gpu, found) for gpu in found.gpus)])
    yield ""
    yield "; ".join(common(found))


def line(gpu: Gpu, found: GpuSurvey) -> str:
    """Return a line that describes a GPU."""
    parts = [
        f"cuda:{gpu.ordinal} {gpu.name}",
        f"{gpu.memory_bytes / _GIB:.1f} GiB",
        f"compute capability {gpu.compute_capability}",
        f"shared by {gpu.sharing}",
    ]
    if how := rdma_by(gpu, found):
        parts.append(f"RDMA by {how}")
    if gpu.nearest:
        parts.append(f"{gpu.nearest} at the same {gpu.distance}")
    return ", ".join(parts)


def common(found: GpuSurvey) -> Iterator[str]:
    """Yield lines about all GPUs together."""
    yield f"driver {found.driver or 'of unknown version'}, CUDA {found.cuda}"
    yield f"nvidia-peermem is {'' if found.peer_memory else 'not '}loaded"
    if found.mps:
        yield f"MPS listens at {found.mps}"
    else:
        yield "no MPS: ranks on one GPU take turns"


def rdma_by(gpu: Gpu, found: GpuSurvey) -> str:
    """Return how RDMA devices reach a GPU's memory; "": not at all."""
    if gpu.dmabuf:
        return "dmabuf"
    return "peermem" if found.peer_memory else ""


def _gpu(info: Any) -> Gpu:
    known = {
        each.name: getattr(info, each.name) for each in fields(Gpu) if hasattr(info, each.name)
    }
    place = SYS / "bus/pci/devices" / known["pci_address"]
    node = read_line(str(place / "numa_node"))
    if node is not None and node.isdecimal():
        known["numa_node"] = int(node)
    near = sorted((_distance(place, known["numa_node"], nic), nic.name) for nic in _rdma_devices())
    if near:
        level, known["nearest"] = near[0]
        known["distance"] = _DISTANCES[level]
    return Gpu(**known)


def _rdma_devices() -> list[Path]:
    """Return the RDMA devices that lie on a PCI bus."""
    return [nic for nic in (SYS / "class/infiniband").glob("*") if _bridges(nic / "device")]


def _distance(gpu: Path, numa_node: int, nic: Path) -> int:
    """Return the index in ``_DISTANCES`` of the nearest part that both share."""
    pairs = zip(_bridges(gpu), _bridges(nic / "device"), strict=False)
    shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if shared:
        return 0 if shared > 1 else 1
    node = read_line(str(nic / "device/numa_node"))
    return 2 if numa_node >= 0 and node == str(numa_node) else 3


def _bridges(device: Path) -> Sequence[str]:
    """Return the names of a PCI device's host bridge and of each bridge below it; [] if none."""
    parts = device.resolve().parent.parts
    first = next((k for k, part in enumerate(parts) if part.startswith("pci")), len(parts))
    return parts[first:]


def _cells(gpu: Gpu, found: GpuSurvey) -> tuple[str, ...]:
    return (
        f"cuda:{gpu.ordinal}",
        gpu.name,
        f"{gpu.memory_bytes / _GIB:.1f} GiB",
        gpu.compute_capability,
        gpu.pci_address,
        "-" if gpu.numa_node < 0 else str(gpu.numa_node),
        ",".join(map(str, gpu.peers)) or "-",
        gpu.sharing,
        rdma_by(gpu, found) or "-",
        f"{gpu.nearest} (same {gpu.distance})" if gpu.nearest else "-",
    )
