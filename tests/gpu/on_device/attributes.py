"""Attributes of the GPU, its driver and this machine."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import sys
import time

import ptx
from cuda_arrays import Device, Stream

from on_device import driver, ranks
from on_device.findings import Tell

# CUdevice_attribute.
ATTRIBUTES = {
    "clock kHz": 13, "multiprocessors": 16, "compute mode": 20, "concurrent kernels": 31,
    "memory clock kHz": 36, "memory bus bits": 37, "L2 bytes": 38, "copy engines": 40,
    "unified addresses": 41, "compute capability, major": 75, "compute capability, minor": 76,
    "stream priorities": 78, "compute preemption": 90, "registered host addresses": 91,
    "flush of remote writes": 98, "host registration": 99, "virtual memory": 102,
    "descriptors": 103, "VMM with RDMA": 110, "memory pools": 115, "GPUDirect RDMA": 116,
    "RDMA flush": 117, "RDMA ordering": 118, "64-bit stream words": 122, "wait NOR": 123,
    "dmabuf": 124, "IPC events": 125, "host NUMA node": 134,
}  # fmt: skip
PACKAGES = ("pgasdl", "numpy", "torch", "cupy-cuda13x", "cupy-cuda12x", "mpi4py", "triton")


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    tell("machine", f"{platform.machine()}, Linux {platform.release()}, {os.cpu_count()} cores")
    tell("Python", platform.python_version(), packages=dict(packages()))
    with Device():
        name = ctypes.create_string_buffer(100)
        driver.call("cuDeviceGetName", name, 100, 0)
        nbytes, version = ctypes.c_size_t(), ctypes.c_int()
        driver.call("cuDeviceTotalMem_v2", ctypes.byref(nbytes), 0)
        driver.call("cuDriverGetVersion", ctypes.byref(version))
        values = {key: driver.attribute(number) for key, number in ATTRIBUTES.items()}
        tell("GPU", name.value.decode(), bytes=nbytes.value, attributes=values)
        tell("newest CUDA of the driver", version.value)
        tell("multiprocessors", values["multiprocessors"])
        for key in ("virtual memory", "descriptors", "dmabuf", "RDMA ordering", "wait NOR"):
            tell(key, values[key])
        with tell.step("kernels loaded"):
            compiled(tell)
    with tell.step("nvidia-smi"):
        asked = "driver_version,mig.mode.current,compute_mode,persistence_mode,pci.bus_id,clocks.sm"
        told = ranks.finished(["nvidia-smi", f"--query-gpu={asked}", "--format=csv"], timeout=10)
        tell("nvidia-smi", told.strip().splitlines()[-1], asked=asked)
    with tell.step("nvcc"):
        tell("nvcc", ranks.finished(["nvcc", "--version"], timeout=10).strip().splitlines()[-1])
    for command in ("doctor", "topo"):
        with tell.step(command):
            words = [sys.executable, "-m", "pgasdl", command, "--json"]
            report = json.loads(ranks.finished(words, timeout=20, fails=True))
            if command == "topo":
                tell("pgasdl topo", len(report["gpus"]["gpus"]), "GPUs", report=report)
            else:
                wrong = [row["name"] for row in report if row["status"] == "FAIL"]
                tell("pgasdl doctor", f"FAIL {wrong}" if wrong else "no FAIL", report=report)


def compiled(tell: Tell) -> None:
    """How long the driver takes to compile pgasdl's kernels."""
    driver.Work().turns(Stream(), 0)
    began = time.perf_counter()
    driver.Kernel(ptx.read())
    tell("kernels compiled, or from the driver's cache", time.perf_counter() - began, "s")
    began = time.perf_counter()
    driver.Kernel(ptx.read())
    tell("kernels loaded again", time.perf_counter() - began, "s")


def packages() -> list[tuple[str, str]]:
    """Versions of what is installed."""
    found = []
    for name in PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            found.append((name, "not installed"))
    return found
