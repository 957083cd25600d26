"""The bytes of a block on the disk: chunks, their checksums, and a trailer."""

from __future__ import annotations

import math
import struct
import zlib
from dataclasses import dataclass

from pgasdl.errors import DataError
from pgasdl.input.descriptors import Descriptor

_CHUNK = 64 << 10  # bytes that have a checksum
_TRAILER = struct.Struct("<4sIQ")  # a name, the CRC-32 of the checksums, the block's bytes
_NAME = b"pgb2"


def ending(data: memoryview) -> bytes:
    """Return the bytes that follow a block in its file."""
    crcs = [zlib.crc32(data[at : at + _CHUNK]) for at in range(0, data.nbytes, _CHUNK)]
    table = struct.pack(f"<{len(crcs)}I", *crcs)
    return table + _TRAILER.pack(_NAME, zlib.crc32(table), data.nbytes)


@dataclass(slots=True)
class Seen:
    """A block that was read: its file, its bytes, the time of the touch, and its sound chunks."""

    inode: int
    nbytes: int
    touched: float = -math.inf
    sound: int = 0  # a bit for each


def checksums(descriptor: Descriptor) -> tuple[int, tuple[int, ...]]:
    """Return a block's bytes and the checksums of its chunks; DataError: its end is none."""
    end = descriptor.nbytes - _TRAILER.size
    trailer = memoryview(bytearray(_TRAILER.size))
    if end < 0 or not descriptor.fill(end, trailer):
        raise DataError(f"it has {end + _TRAILER.size} bytes")
    name, crc, nbytes = _TRAILER.unpack(trailer)
    count = -(-nbytes // _CHUNK)
    if name != _NAME or nbytes + 4 * count != end:
        raise DataError("it has no end")
    table = memoryview(bytearray(4 * count))
    if (count and not descriptor.fill(nbytes, table)) or zlib.crc32(table) != crc:
        raise DataError("it does not have the checksums that were written")
    return nbytes, struct.unpack(f"<{count}I", table)


def fill(descriptor: Descriptor, seen: Seen, offset: int, out: memoryview) -> None:
    """Read a part of a block, and compare chunks that were not read before."""
    first, last = offset // _CHUNK, (offset + len(out) - 1) // _CHUNK
    wanted = (1 << last + 1) - (1 << first)
    whole, begin = out, offset
    if unknown := wanted & ~seen.sound:
        begin, end = first * _CHUNK, min((last + 1) * _CHUNK, seen.nbytes)
        if end - begin > len(out):
            whole = memoryview(bytearray(end - begin))
    if not descriptor.fill(begin, whole):
        raise DataError("it ends too early")
    if unknown:
        crcs = checksums(descriptor)[1][first : last + 1]
        for at, crc in zip(range(0, len(whole), _CHUNK), crcs, strict=True):
            if zlib.crc32(whole[at : at + _CHUNK]) != crc:
                raise DataError("it does not have the bytes that were written")
        seen.sound |= wanted
    if whole is not out:
        out[:] = whole[offset - begin :][: len(out)]
