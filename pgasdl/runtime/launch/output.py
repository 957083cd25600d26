"""The output of all ranks on one screen or in one file: whole lines that begin with the rank.

A terminal gets one live line at the bottom: the latest line that a rank has not ended, such as a
prompt, or a progress bar that redraws itself with carriage returns. A file or pipe gets whole lines
only, and the last state of a progress bar. Nothing here blocks: output that the reader does not
take is kept, and the launcher stops reading from the ranks while it keeps much.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
from dataclasses import dataclass, field

MAX_LINE = 1 << 20  # a longer one is cut
MAX_KEPT = 1 << 20
_ERASE = b"\r\x1b[K"
_PREFIX_OF_TORCH = re.compile(rb"^\[rank\d+\]: ?")
_PIECE = 4096  # PIPE_BUF: a pipe that polls writable takes so much without blocking


class Sink:
    """One of the launcher's own outputs, and the bytes that it has not taken yet."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_terminal = _is_terminal(descriptor)
        self.kept = bytearray()
        self.error: OSError | None = None  # from then on nothing is written
        self._live = b""

    def line(self, text: bytes) -> None:
        """Print a whole line; the live line stays below it."""
        if self._live:
            self._write(_ERASE + text + b"\n" + self._live)
        else:
            self._write(text + b"\n")

    def live(self, text: bytes) -> None:
        """Show ``text`` as the live line, or none; terminals only."""
        if text != self._live:
            self._live = text[: shutil.get_terminal_size().columns - 1]
            self._write(_ERASE + self._live)

    def _write(self, data: bytes) -> None:
        if self.error is None:
            self.kept += data

    def flush_some(self) -> None:
        """Write as much as does not block."""
        poller = select.poll()
        poller.register(self.descriptor, select.POLLOUT)
        while self.kept and self.error is None and poller.poll(0):
            try:
                del self.kept[: os.write(self.descriptor, self.kept[:_PIECE])]
            except BlockingIOError:
                return
            except OSError as error:
                self.error = error
                self.kept.clear()


@dataclass(eq=False)
class Stream:
    """Standard output or error of one rank, and the last exception in its tracebacks there."""

    prefix: bytes
    sink: Sink
    partial: bytearray = field(default_factory=bytearray)
    raised: bytes = b""
    _in_traceback: bool = False

    def note(self, line: bytes) -> None:
        """Take note of a whole line."""
        line = _PREFIX_OF_TORCH.sub(b"", line)
        if line.startswith(b'  File "'):
            self._in_traceback = True
        elif self._in_traceback and line[:1].strip():
            self._in_traceback, self.raised = False, line


class Multiplexer:
    """Puts the streams of all ranks into the launcher's two outputs."""

    def __init__(self) -> None:
        self.out = Sink(1)
        error = Sink(2)
        # On one terminal both share a live line.
        self.err = self.out if self.out.is_terminal and error.is_terminal else error
        self.sinks = [self.out] if self.err is self.out else [self.out, self.err]
        self._partial: dict[int, list[Stream]] = {}  # by descriptor of the sink; the newest is last

    def stream(self, rank: int, size: int, *, error: bool) -> Stream:
        """Make a new stream; prefixes are as wide as the largest rank's."""
        width = len(str(size - 1))
        return Stream(f"[{rank:>{width}}] ".encode(), self.err if error else self.out)

    def feed(self, stream: Stream, data: bytes) -> None:
        """Add bytes from a rank."""
        sink = stream.sink
        *lines, rest = data.split(b"\n")
        for line in lines:
            stream.partial += line
            self._end_line(stream)
        stream.partial += rest
        if len(stream.partial) > MAX_LINE:
            text = visible(stream.partial)
            stream.partial[:] = text[:MAX_LINE]
            if rest := text[MAX_LINE:]:
                self._end_line(stream)
                stream.partial += rest
        if sink.is_terminal and stream.partial:
            partial = self._partial.setdefault(sink.descriptor, [])
            if stream in partial:
                partial.remove(stream)
            partial.append(stream)
            self._show_live(sink)

    def end(self, stream: Stream) -> None:
        """Print the rest: the rank closed the stream."""
        if stream.partial:
            self._end_line(stream)

    def message(self, text: str) -> None:
        """Print a line of the launcher's own."""
        self.err.line(text.encode(errors="replace"))

    def _end_line(self, stream: Stream) -> None:
        text = visible(stream.partial)
        stream.partial.clear()
        stream.note(text)
        partial = self._partial.get(stream.sink.descriptor, [])
        if stream in partial:
            partial.remove(stream)
            self._show_live(stream.sink)
        stream.sink.line(stream.prefix + text)

    def _show_live(self, sink: Sink) -> None:
        """Show the newest line that a rank has not ended."""
        partial = self._partial[sink.descriptor]
        sink.live(partial[-1].prefix + visible(partial[-1].partial) if partial else b"")

    @property
    def congested(self) -> bool:
        """Whether the reader of our output is so slow that the ranks have to wait."""
        return any(len(sink.kept) > MAX_KEPT for sink in self.sinks)


def visible(line: bytes | bytearray) -> bytes:
    """Return the last state of a line with carriage returns, as a terminal shows it."""
    parts = bytes(line).rstrip(b"\r").rsplit(b"\r", 1)
    return parts[-1]


def _is_terminal(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        return os.isatty(descriptor)
    return False
