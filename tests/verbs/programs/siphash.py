"""SipHash-2-4, written once more for a rank that shares no code with the transport under test."""

from __future__ import annotations

_WORD = 2**64 - 1


def siphash(key: bytes, message: bytes) -> int:
    """The code of a message; the key has 16 bytes."""
    low, high = (int.from_bytes(key[at : at + 8], "little") for at in (0, 8))
    v = [low ^ 0x736F6D6570736575, high ^ 0x646F72616E646F6D,
         low ^ 0x6C7967656E657261, high ^ 0x7465646279746573]  # fmt: skip
    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) % 256])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        _rounds(v, 2)
        v[0] ^= word
    v[2] ^= 0xFF
    _rounds(v, 4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def _rounds(v: list[int], n: int) -> None:
    def half(a: int, b: int, c: int, d: int, left: int, right: int) -> None:
        v[a] = v[a] + v[b] & _WORD
        v[c] = v[c] + v[d] & _WORD
        v[b] = _turned(v[b], left) ^ v[a]
        v[d] = _turned(v[d], right) ^ v[c]
        v[a] = _turned(v[a], 32)

    for _ in range(n):
        half(0, 1, 2, 3, 13, 16)
        half(2, 1, 0, 3, 17, 21)


def _turned(word: int, by: int) -> int:
    return (word << by | word >> 64 - by) & _WORD
