"""``python denied.py ERRNO CALL... -- program``: runs it with these system calls refused.

Container runtimes and sandboxes refuse calls in this way; ENOSYS looks like an older kernel.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

NUMBERS = {
    "x86_64": {
        "pidfd_open": 434,
        "memfd_create": 319,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "membarrier": 324,
    },
    "aarch64": {
        "pidfd_open": 434,
        "memfd_create": 279,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "membarrier": 283,
    },
}
CALLS = tuple(NUMBERS["x86_64"])
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def refuse(error: int, calls: list[str]) -> None:
    """Make ``calls`` fail with ``error``, in this process and in all that it will start."""
    numbers = NUMBERS[platform.machine()]
    code = [(_LOAD_NUMBER, 0, 0, 0)]
    for call in calls:
        code += [(_JUMP_IF_EQUAL, 0, 1, numbers[call]), (_RETURN, 0, 0, _ERRNO | error)]
    code.append((_RETURN, 0, 0, _ALLOW))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *c) for c in code))
    program = struct.pack("HP", len(code), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.c_char_p(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


if __name__ == "__main__":
    split = sys.argv.index("--")
    refuse(getattr(errno, sys.argv[1]), sys.argv[2:split])
    os.execvp(sys.argv[split + 1], sys.argv[split + 1 :])
