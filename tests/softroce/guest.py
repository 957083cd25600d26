"""Runs a command in a guest with a soft-RoCE device, or two commands in two guests on one cable.

    python tests/softroce/guest.py -- ibv_devinfo
    python tests/softroce/guest.py --mode veth --loss 1 -- 'ib_write_bw -d rxe1 & ...'
    python tests/softroce/guest.py --pair --loss 1 -- 'SERVER COMMAND' 'CLIENT COMMAND'

One word after ``--`` is a line for a shell, several are a program and its arguments; with
``--pair`` there are two words, a line for each guest. The exit status is the command's (of a pair,
the first that is not 0), 124 when time ran out, 125 when a guest ended by itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import rig

_MIB = 1 << 20


class Printer:
    """Passes output on as it comes; for a pair in whole lines, marked with the guest's number."""

    def __init__(self, *, pair: bool) -> None:
        self._pair = pair
        self._begun = {1: b"", 2: b""}

    def __call__(self, guest: int, data: bytes) -> None:
        if self._pair:
            *lines, self._begun[guest] = (self._begun[guest] + data).split(b"\n")
            data = b"".join(b"[%d] %s\n" % (guest, line) for line in lines)
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    def finish(self) -> None:
        """Print lines that never ended."""
        for guest, begun in self._begun.items():
            if begun:
                self(guest, b"\n")


def main() -> int:
    """Parse the command line, run, and say on standard error why a guest gave no status."""
    options = _parser().parse_args()
    if lacks := rig.missing():
        print(*lacks, sep="\n", file=sys.stderr)
        return rig.VANISHED
    # So that guests end and files are removed. SIGINT too: a background shell starts it ignored.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    results = _run(options)
    for result in results:
        name = f"guest {result.guest}"
        if result.status == rig.TIMED_OUT:
            print(f"{name} ended after {result.seconds:.0f} s: out of time", file=sys.stderr)
        if options.console or result.status == rig.VANISHED:
            text = result.console if options.console else result.last_words()
            print(f"--- console of {name}\n{text}", file=sys.stderr)
    return next((result.status for result in results if result.status != 0), 0)


def _run(options: argparse.Namespace) -> tuple[rig.Result, ...]:
    env = {}
    for setting in options.env:
        name, equals, value = setting.partition("=")
        env[name] = value if equals else os.environ.get(name, "")
    common = {
        "env": env,
        "writable": options.writable,
        "driver": options.driver,
        "loss": options.loss,
        "memory": options.memory * _MIB,
        "cpus": options.cpus,
        "timeout": options.timeout,
        "on_output": Printer(pair=options.pair),
    }
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        if options.pair:
            if len(words) != 2:
                sys.exit("--pair takes two commands, each one word")
            if options.hold:
                sys.exit("--hold is for a single guest")
            return rig.run_pair((words[0], words[1]), **common)
        if not words:
            sys.exit("no command")
        command = words[0] if len(words) == 1 else words
        return (rig.run(command, mode=options.mode, hold=options.hold, **common),)
    except ValueError as error:
        sys.exit(str(error))
    finally:
        common["on_output"].finish()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mode", choices=rig.MODES, default="dummy", help="devices of a single guest")
    add("--pair", action="store_true", help="two guests, guest1 and guest2, on a cable")
    add("--driver", choices=rig.DRIVERS, default="rxe")
    add("--loss", type=float, default=0.0, metavar="PERCENT", help="packets lost each way")
    add("-e", "--env", action="append", default=[], metavar="NAME[=VALUE]")
    add("-w", "--writable", action="append", default=[], metavar="FOLDER", help="for real")
    add("--memory", type=int, default=2048, metavar="MIB")
    add("--cpus", type=int, default=2)
    add("--hold", type=int, default=0, metavar="US", help="between two stores of a word (hold.c)")
    add("-t", "--timeout", type=float, default=600.0, metavar="SECONDS", help="default: 600")
    add("--console", action="store_true", help="show the kernel's messages afterwards")
    add("command", nargs=argparse.REMAINDER, help="-- COMMAND...")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
