"""The table of GPUs: what the driver says, what sysfs adds, and every reason to have none."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pgasdl.errors import UnavailableError
from pgasdl.tools import cli, doctor, gpus, rdma

Patch = pytest.MonkeyPatch
HOST = "devices/pci0000:3a"


class Native(types.ModuleType):
    """Answers in place of the native module: two GPUs, or why there is none."""

    def __init__(self, missing: str = "", **changes: object) -> None:
        super().__init__("pgasdl._native")
        self._missing, self._changes = missing, changes

    def transports(self) -> dict[str, str]:
        return {"verbs": "left out"}

    def tcp_place(self, interface: str) -> str:
        return ""

    def cuda_missing(self) -> str:
        return self._missing

    def cuda_version(self) -> str:
        return "12.4"

    def cuda_devices(self) -> list[Any]:
        if self._changes.get("broken"):
            raise UnavailableError("the driver fails")
        common = {
            "compute_capability": "9.0", "memory_bytes": 80 << 30, "multiprocessors": 132,
            "virtual_memory": True, "posix_handles": True, "gpudirect": True, "dmabuf": True,
            "flushes_writes": True, "writes_ordering": 100, "numa_node": -1,
        }  # fmt: skip
        return [
            types.SimpleNamespace(
                ordinal=i, name="H100", uuid=f"GPU-{i}", pci_address=f"0000:{bus}:00.0",
                peers=[1 - i], **common | self._changes,
            )
            for i, bus in enumerate(("3d", "9b"))
        ]  # fmt: skip


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def device(root: Path, place: str, numa_node: int) -> Path:
    folder = root / place
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{numa_node}\n")
    return folder


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: Patch) -> Path:
    """GPU 0 shares a switch with mlx5_2, a host bridge with mlx5_1; GPU 1 a node with mlx5_0."""
    root = tmp_path / "sys"
    switch = f"{HOST}/0000:3a:00.0/0000:3b:00.0"
    places = {
        "bus/pci/devices/0000:3d:00.0": (f"{switch}/0000:3c:00.0/0000:3d:00.0", 0),
        "bus/pci/devices/0000:9b:00.0": ("devices/pci0000:9a/0000:9a:00.0/0000:9b:00.0", 1),
        "class/infiniband/mlx5_0/device": ("devices/pci0000:b0/0000:b0:00.0/0000:b1:00.0", 1),
        "class/infiniband/mlx5_1/device": (f"{HOST}/0000:3a:02.0/0000:40:00.0", 0),
        "class/infiniband/mlx5_2/device": (f"{switch}/0000:3c:01.0/0000:3e:00.0", 0),
    }
    for path, (place, numa_node) in places.items():
        link(root / path, device(root, place, numa_node))
    (root / "class/infiniband/rxe0").mkdir()
    monkeypatch.setattr(gpus, "SYS", root)
    monkeypatch.setattr(rdma, "SYSFS", root / "class/infiniband")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "mps"))
    return root


def answer(monkeypatch: Patch, missing: str = "", **changes: object) -> None:
    monkeypatch.setitem(sys.modules, "pgasdl._native", Native(missing, **changes))


def add(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_nearest_rdma_device(sysfs: Path, monkeypatch: Patch) -> None:
    answer(monkeypatch)
    first, second = gpus.survey().gpus
    assert (first.nearest, first.distance, first.numa_node) == ("mlx5_2", "PCI switch", 0)
    assert (second.nearest, second.distance, second.numa_node) == ("mlx5_0", "NUMA node", 1)
    (sysfs / "class/infiniband/mlx5_2/device").unlink()
    (sysfs / "class/infiniband/mlx5_0/device").unlink()
    first, second = gpus.survey().gpus
    assert (first.nearest, first.distance) == ("mlx5_1", "host bridge")
    assert (second.nearest, second.distance) == ("mlx5_1", "machine")
    (sysfs / "class/infiniband/mlx5_1/device").unlink()
    assert {(gpu.nearest, gpu.distance) for gpu in gpus.survey().gpus} == {("", "")}


def test_what_all_have_in_common(sysfs: Path, monkeypatch: Patch, tmp_path: Path) -> None:
    answer(monkeypatch)
    found = gpus.survey()
    assert (found.driver, found.cuda, found.peer_memory, found.mps) == ("", "12.4", False, "")
    assert next(gpus.common(found)) == "driver of unknown version, CUDA 12.4"
    add(sysfs / "module/nvidia/version", "550.54\n")
    add(sysfs / "module/nvidia_peermem/version", "550.54\n")
    add(tmp_path / "mps/control")
    found = gpus.survey()
    assert list(gpus.common(found)) == [
        "driver 550.54, CUDA 12.4", "nvidia-peermem is loaded",
        f"MPS listens at {tmp_path}/mps/control",
    ]  # fmt: skip


def test_the_table(sysfs: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    answer(monkeypatch)
    cli.main(["topo"])
    lines = capsys.readouterr().out.splitlines()
    row = next(line for line in lines if line.startswith("cuda:0"))
    assert row.split() == [
        "cuda:0", "H100", "80.0", "GiB", "9.0", "0000:3d:00.0", "0", "1", "descriptor", "dmabuf",
        "mlx5_2", "(same", "PCI", "switch)",
    ]  # fmt: skip
    assert any(line.endswith("no MPS: ranks on one GPU take turns") for line in lines)
    cli.main(["topo", "--json"])
    report = json.loads(capsys.readouterr().out)["gpus"]
    assert set(report["gpus"][1]) == set(gpus.Gpu.__dataclass_fields__)
    assert (report["gpus"][1]["uuid"], report["cuda"]) == ("GPU-1", "12.4")


def test_older_gpus(sysfs: Path, monkeypatch: Patch) -> None:
    answer(monkeypatch, virtual_memory=False, dmabuf=False)
    found = gpus.survey()
    assert found.gpus[0].sharing == "legacy IPC"
    assert gpus.rdma_by(found.gpus[0], found) == ""
    finding = doctor._gpus("x")
    assert finding.status == "WARN" and "passes through the host's" in finding.detail
    assert "nvidia-peermem" in finding.fix
    add(sysfs / "kernel/mm/memory_peers/nv_mem/version")
    found = gpus.survey()
    assert gpus.rdma_by(found.gpus[0], found) == "peermem"
    assert doctor._gpus("x").status == "OK"


@pytest.mark.usefixtures("sysfs")
def test_doctor_names_each(monkeypatch: Patch) -> None:
    answer(monkeypatch)
    finding = doctor._gpus("x")
    assert finding.status == "OK"
    assert finding.detail.startswith(
        "cuda:0 H100, 80.0 GiB, compute capability 9.0, shared by descriptor, RDMA by dmabuf, "
        "mlx5_2 at the same PCI switch; cuda:1 H100"
    )


def test_none(sysfs: Path, monkeypatch: Patch) -> None:
    answer(monkeypatch, "no driver here")
    assert list(gpus.report(gpus.survey())) == ["no GPU: no driver here"]
    finding = doctor._gpus("x")
    assert (finding.status, finding.detail.partition(" (")[0]) == ("OK", "no GPU: no driver here")
    add(sysfs / "module/nvidia/version", "550.54\n")  # there is one, but it does not work
    assert doctor._gpus("x").status == "WARN"


def test_none_that_can_be_asked(monkeypatch: Patch) -> None:
    answer(monkeypatch, broken=True)
    assert gpus.survey().missing == "the driver fails"
    monkeypatch.setitem(sys.modules, "pgasdl._native", None)
    assert gpus.survey().missing.startswith("the native module cannot be imported")
