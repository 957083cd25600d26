"""Windows and symmetric memory on the GPU, which the ranks share: bits, behind busy streams."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pgasdl
from on_device import foreign, ranks
from on_device.findings import Tell

COUNT = 1 << 20  # elements of a window
PART = slice(COUNT // 4, COUNT // 4 + COUNT // 2)  # the part that is put
TURNS = 6


def run(tell: Tell, smoke: bool) -> None:
    """The part."""
    with tell.step("PyTorch"):
        foreign.require_torch()
        for program in ("windows", "symmetric", "refusals"):
            with tell.step(program):
                ranks.run(2, f"on_device.windows:{program}", tell, timeout=25)
                tell.check(program, True)


class Busy:
    """Gives the current stream some milliseconds of work."""

    def __init__(self) -> None:
        import torch

        self._big = torch.randn(4096, 4096, device="cuda") / 64

    def __call__(self) -> None:
        product = self._big
        for _ in range(6):
            product = product @ self._big


def bits(rank: int, number: int, count: int = COUNT // 2) -> Any:
    """Any bits, as float32, on the host."""
    import torch

    generator = torch.Generator().manual_seed(1000 * number + rank)
    drawn = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    return drawn.to(torch.int32).view(torch.float32)


def same(found: Any, wanted: Any, what: str) -> None:
    """Bit by bit, as the current stream finds it."""
    import torch

    one, other = found.cpu().view(torch.int32), wanted.cpu().view(torch.int32)
    assert one.equal(other), f"{what}: {int((one != other).sum())} of {other.numel()} differ"


def on_each_stream() -> Iterator[Any]:
    """The default stream and another one, each the current one."""
    import torch

    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            yield stream
    torch.cuda.synchronize()


def memory_of(ctx: Any, home: str) -> Any:
    """A window's tensor, whose numbers are there late; mixed: in a segment on rank 0 only."""
    import torch

    from pgasdl.torch import symmetric_memory

    if home != "plain":
        made = symmetric_memory.empty(COUNT, dtype=torch.float32, device="cuda", group=ctx)
        if home == "empty" or ctx.rank == 0:
            return made.normal_()
    return torch.randn(COUNT, device="cuda")


def windows(ctx: Any, tell: Tell) -> None:
    """Puts both ways at once, stores into views, memory of the host; on each stream."""
    import torch

    from pgasdl.torch import Window, WindowAccessType

    busy, peer, other = Busy(), 1 - ctx.rank, torch.cuda.Stream()
    for home in ("empty", "plain", "mixed"):
        for stream in on_each_stream():
            busy()
            memory = memory_of(ctx, home)
            before = memory.clone()
            window = Window(ctx, memory)
            assert window.get_attr(peer).access_type is WindowAccessType.UNIFIED
            assert window.map_remote_tensor(ctx.rank) is memory
            there = window.map_remote_tensor(peer)
            assert there.is_cuda and there.shape == memory.shape
            source, kept = torch.empty(COUNT // 2, device="cuda"), torch.empty_like(memory[PART])
            for number in range(TURNS):
                what = f"{home}, {stream}, turn {number}"
                given = bits(ctx.rank, number)
                numbers = given.cuda()
                busy()
                source.copy_(numbers)
                if number % 3 == 0:
                    window.put(source, peer, PART.start)
                elif number % 3 == 1:  # the signal has to wait for that stream, too
                    other.wait_stream(stream)
                    with torch.cuda.stream(other):
                        busy()
                        work = window.put(source, peer, PART.start, async_op=True)
                    if number > 1:
                        work.wait()
                else:
                    there[PART].copy_(source)
                if number != 1:
                    source.fill_(-1)
                window.signal(peer)
                window.wait_signal(peer)
                with torch.cuda.stream(other):
                    same(memory[PART], bits(peer, number), f"{what}, elsewhere")
                busy()
                kept.copy_(memory[PART])
                window.signal(peer)  # once that is read
                window.wait_signal(peer)
                same(kept, bits(peer, number), what)
            window.put(bits(ctx.rank, TURNS), peer, PART.start)  # from the host
            busy()
            window.put(source.fill_(ctx.rank), peer, 0)
            with torch.cuda.stream(other):
                window.put(torch.full((9,), ctx.rank + 5.0, device="cuda"), peer, COUNT - 9)
            window.tensor_deregister()
            same(
                memory[PART.start + PART.start :][: COUNT // 4],
                bits(peer, TURNS)[COUNT // 4 :],
                home,
            )
            assert memory[: COUNT // 2].eq(peer).all().item()
            assert memory[-9:].eq(peer + 5).all().item()
            same(memory[3 * COUNT // 4 : -9], before[3 * COUNT // 4 : -9], "what nobody wrote to")
    to_the_host(ctx, busy)
    tell.check("a window on the host, from the GPU", True)
    one_by_one(ctx)
    tell.check("two windows of one tensor", True)


def to_the_host(ctx: Any, busy: Busy) -> None:
    """A tensor of the GPU into a window of the host."""
    import torch

    from pgasdl.torch import Window, symmetric_memory

    peer, memory = 1 - ctx.rank, symmetric_memory.empty(COUNT // 2, group=ctx)
    window = Window(ctx, memory)
    source = bits(ctx.rank, 0).cuda()
    busy()
    source.copy_(bits(ctx.rank, 1).pin_memory(), non_blocking=True)
    window.put(source, peer, 0)
    source.fill_(-1)
    window.signal(peer)
    window.wait_signal(peer)
    same(memory, bits(peer, 1), "a window on the host")
    window.tensor_deregister()
    torch.cuda.synchronize()


def one_by_one(ctx: Any) -> None:
    """Two windows of one bound tensor, of which one ends first; then another one."""
    import torch

    from pgasdl.torch import Window

    peer, memory = 1 - ctx.rank, torch.randn(1000, device="cuda")
    first, second = Window(ctx, memory), Window(ctx, memory)
    first.tensor_deregister()
    for window in (second, Window(ctx, memory)):
        window.put(torch.full((1000,), ctx.rank + 3.0, device="cuda"), peer, 0)
        window.signal(peer)
        window.wait_signal(peer)
        assert memory.eq(peer + 3).all().item()
        memory.zero_()
        window.signal(peer)
        window.wait_signal(peer)
    second.tensor_deregister()
    window.tensor_deregister()


def symmetric(ctx: Any, tell: Tell) -> None:
    """put_signal, stores into buffers behind a barrier, memory that goes early."""
    import torch

    from pgasdl.torch import symmetric_memory as symm_mem

    assert symm_mem.get_backend("cuda") == "pgasdl"
    busy, peer = Busy(), 1 - ctx.rank
    for stream in on_each_stream():
        buffer = symm_mem.empty(COUNT // 2, dtype=torch.float32, device="cuda", group=ctx)
        assert buffer.is_cuda and not buffer.any().item() and symm_mem.is_symm_mem_tensor(buffer)
        busy()
        buffer.fill_(ctx.rank + 1)
        handle = symm_mem.rendezvous(buffer, ctx)
        assert symm_mem.rendezvous(buffer[5:], ctx) is handle
        assert handle.device == buffer.device
        assert handle.buffer_ptrs[ctx.rank] == buffer.data_ptr() and all(handle.buffer_ptrs)
        assert not handle.get_signal_pad(ctx.rank).is_cuda
        there = handle.get_remote_tensor(peer, (COUNT // 2,), torch.float32)
        assert there.eq(peer + 1).all().item()
        handle.barrier()
        source, kept = torch.empty_like(buffer), torch.empty_like(buffer)
        for number in range(TURNS):
            numbers = bits(ctx.rank, number).cuda()
            busy()
            source.copy_(numbers)
            symm_mem.put_signal(source, handle, peer)
            source.fill_(-1)
            symm_mem.wait_signal(handle, peer)
            busy()
            kept.copy_(buffer)
            handle.barrier()  # once that is read
            same(kept, bits(peer, number), f"put_signal on {stream}, turn {number}")
            numbers = bits(ctx.rank, TURNS + number, 1000).cuda()
            busy()
            handle.get_buffer(peer, (10, 100), torch.float32, 7).copy_(numbers.view(10, 100))
            handle.barrier(1)
            same(buffer[7:1007], bits(peer, TURNS + number, 1000), f"a barrier, turn {number}")
            handle.barrier(2)
            busy()
            handle.put_signal(peer, 3)
            handle.wait_signal(peer, 3)
        # Its last references go while a stream still has to read it.
        busy()
        kept.copy_(there)
        del buffer, handle, there
        gc.collect()
        same(kept[1007:], bits(ctx.rank, TURNS - 1)[1007:], "memory whose names are gone")
        ctx.barrier()


def refusals(ctx: Any, tell: Tell) -> None:
    """What cannot be, at once and on every rank."""
    import torch

    from pgasdl.torch import Window
    from pgasdl.torch import symmetric_memory as symm_mem

    peer, plain = 1 - ctx.rank, torch.zeros(8, device="cuda")
    memory = symm_mem.empty(8, dtype=torch.float32, device="cuda", group=ctx)
    window, handle = Window(ctx, memory), symm_mem.rendezvous(memory, ctx)
    with refused(pgasdl.BufferRefusedError, "not made by symmetric_memory"):
        symm_mem.rendezvous(plain, ctx)
    with refused(pgasdl.BufferRefusedError, "not contiguous"):
        window.put(plain[::2], peer, 0)
    with refused(pgasdl.BufferRefusedError, "float64 into the window"):
        window.put(plain.double(), peer, 0)
    with refused(pgasdl.SegmentError, "leaves the window"):
        window.put(plain, peer, 1)
    with refused(pgasdl.UnavailableError, "this process sees"):
        symm_mem.empty(8, device=f"cuda:{torch.cuda.device_count()}", group=ctx)
    with refused(pgasdl.MismatchError, "rank 0's is on cpu, rank 1's is on cuda"):
        Window(ctx, plain if ctx.rank else plain.cpu())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain.add_(1)
        for call in (
            lambda: window.put(plain, peer, 0),
            lambda: window.signal(peer),
            handle.barrier,
        ):
            with refused(pgasdl.UnavailableError, "captured into a CUDA graph"):
                call()
    graph.replay()
    assert plain.eq(1).all().item()
    window.put(plain, peer, 0)
    window.signal(peer)
    window.wait_signal(peer)
    assert memory.eq(1).all().item()
    window.tensor_deregister()
    with refused(pgasdl.ClosedError, "comes first"):
        window.put(plain, peer, 0)


@contextlib.contextmanager
def refused(kind: type[Exception], words: str) -> Iterator[None]:
    """A block that ends by this error."""
    try:
        yield
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")
