"""The first program: every rank writes to its right neighbour and raises one flag there.

Start it with ``pgasdl run -n 4 apps/hello_notify.py``.
"""

import pgasdl

TEXT = 64  # bytes
GREETING = 0  # number of a notification


def main() -> None:
    """Send a greeting round the ring."""
    with pgasdl.init(log="warning") as ctx:
        left, right = (ctx.rank - 1) % ctx.size, (ctx.rank + 1) % ctx.size
        segment = ctx.segment(2 * TEXT, notifications=1)  # mine to send, then my left neighbour's
        words = f"hello from rank {ctx.rank}".encode()
        segment.numpy()[: len(words)] = bytearray(words)

        # The flag arrives after every byte. Its value is the application's: here, a length.
        ctx.write_notify(segment[:TEXT], right, segment[TEXT:], GREETING, len(words))
        ctx.notify_waitsome(segment, GREETING, 1)
        length = ctx.notify_reset(segment, GREETING)

        heard = segment.numpy()[TEXT : TEXT + length].tobytes().decode()
        print(f"rank {ctx.rank} of {ctx.size} heard from rank {left}: {heard}")
        ctx.wait()  # only now may the first half be overwritten


if __name__ == "__main__":
    main()
