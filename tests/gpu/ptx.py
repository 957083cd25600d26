"""Compiles ``native/reduce/device_kernels.cu`` to PTX, into an archive in the folder ``generated``.

``python tests/gpu/ptx.py`` writes it anew, ``python tests/gpu/ptx.py show`` prints what it has
compiled. The compiler is NVRTC, from PyPI in the version that the extra ``test`` names: another one
may write the same kernels differently. Its PTX says which it was.
"""

from __future__ import annotations

import ctypes
import io
import re
import sys
import tarfile
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
SOURCE = NATIVE / "reduce" / "device_kernels.cu"
ARCHIVE = SOURCE.parent / "generated" / "device_kernels.tar.xz"
MEMBER = "device_kernels.ptx"
HEADERS = ("reduce/device_kernels.hpp", "reduce/types.hpp")

PACKAGE = "nvidia-cuda-nvrtc-cu12"
LIBRARY = "libnvrtc.so.12"

# No contraction: a fused multiply-add rounds once where the processor rounds twice.
OPTIONS = ("--gpu-architecture=compute_80", "--std=c++17", "--fmad=false")

# The first PTX for compute capability 8.0, since no newer feature is used: older drivers take it.
VERSION = "7.0"

# NVRTC has no standard library; the headers include these two for names of integers.
INTEGERS = {
    "uint8_t": "unsigned char",
    "uint16_t": "unsigned short",
    "uint32_t": "unsigned int",
    "uint64_t": "unsigned long",
    "int32_t": "int",
    "int64_t": "long",
    "size_t": "unsigned long",
}


class MissingCompilerError(Exception):
    """NVRTC is not installed in the version that is wanted."""


def wanted_version() -> str:
    """The version of NVRTC that pyproject.toml names."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]["test"]
    (version,) = (
        found[1] for extra in extras if (found := re.match(rf"{PACKAGE}==([\d.]+)", extra))
    )
    return str(version)


def find_library() -> Path:
    """Where NVRTC lies; raises MissingCompilerError."""
    wanted = wanted_version()
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise MissingCompilerError(f"needs {PACKAGE}=={wanted}, which is not installed") from None
    if package.version != wanted:
        raise MissingCompilerError(f"needs {PACKAGE}=={wanted}, installed is {package.version}")
    (library,) = (file for file in package.files or () if file.name == LIBRARY)
    return Path(str(package.locate_file(library)))


def strings(texts: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    """An array of C strings."""
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def output(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> str:
    """The program's ``PTX``, or ``ProgramLog``."""
    size = ctypes.c_size_t()
    assert nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert nvrtc[f"nvrtcGet{what}"](program, text) == 0
    return text.value.decode()


def compile_kernels() -> str:
    """The kernels' PTX; raises MissingCompilerError, or RuntimeError with the compiler's words."""
    nvrtc = ctypes.CDLL(str(find_library()))
    names = "".join(f" using {name} = {type_};" for name, type_ in INTEGERS.items())
    headers = {name: (NATIVE / name).read_text() for name in HEADERS}
    headers |= {"cstdint": f"#pragma once\nnamespace std {{{names} }}\n", "cstddef": ""}
    program = ctypes.c_void_p()
    assert (
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program),
            SOURCE.read_text().encode(),
            SOURCE.name.encode(),
            len(headers),
            strings(list(headers.values())),
            strings(list(headers)),
        )
        == 0
    )
    failed = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), strings(list(OPTIONS)))
    if failed:
        raise RuntimeError(output(nvrtc, "ProgramLog", program))
    return finish(output(nvrtc, "PTX", program))


def finish(ptx: str) -> str:
    """The part of the compiler's output that is committed."""
    ptx, n_versions = re.subn(r"^\.version .*$", f".version {VERSION}", ptx, flags=re.MULTILINE)
    assert n_versions == 1
    # NVRTC's own constants, which no kernel uses.
    ptx = re.sub(r"^\.global .*\n", "", ptx, flags=re.MULTILINE)
    return f"// Made by tests/gpu/ptx.py from {SOURCE.name}: {' '.join(OPTIONS)}\n{ptx.rstrip()}\n"


def read() -> str:
    """The committed PTX."""
    with tarfile.open(ARCHIVE) as archive:
        member = archive.extractfile(MEMBER)
        assert member is not None
        return member.read().decode()


def write(ptx: str) -> None:
    """Replace it, by the same bytes for the same text."""
    text = ptx.encode()
    member = tarfile.TarInfo(MEMBER)
    member.size = len(text)
    with tarfile.open(ARCHIVE, "w:xz") as archive:
        archive.addfile(member, io.BytesIO(text))


if __name__ == "__main__":
    try:
        made = compile_kernels()
    except MissingCompilerError as missing:
        sys.exit(f"ptx: {missing}")
    if sys.argv[1:] == ["show"]:
        sys.stdout.write(made)
    else:
        write(made)
        print(f"{ARCHIVE}: {len(made)} bytes, {ARCHIVE.stat().st_size} in the archive")
