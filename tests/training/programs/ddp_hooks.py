"""Hooks that users write for DistributedDataParallel: the same training over whatever averages.

Over gloo, over the backend "pgasdl", and with ``pgasdl.torch.ddp_hook``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from ending import end_at_once
from torch import Tensor, distributed, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import pgasdl.torch  # noqa: F401  # the backend
from pgasdl.torch import DDPState, ddp_hook

Means = Callable[[Any], "Future[Tensor]"]  # begins to average a bucket
BUCKET_MB = 0.002  # several buckets
STEPS = 3


class Way:
    """One way to train."""

    options: ClassVar[dict[str, Any]] = {}  # of DistributedDataParallel

    def __init__(self, means: Means) -> None:
        self.means = means
        self.futures: list[Future[Tensor]] = []  # of this step

    def hook(self, bucket: Any) -> Future[Tensor]:
        """Do what DistributedDataParallel asks for each bucket."""
        return self.means(bucket)

    def step(self, ddp: DistributedDataParallel, x: Tensor) -> None:
        """Make one forward and backward."""
        self.futures.clear()
        ddp(x).square().mean().backward()


class Compressed(Way):
    def hook(self, bucket: Any) -> Future[Tensor]:
        whole = bucket.buffer()
        bucket.set_buffer(whole.half().to(whole.dtype))
        return super().hook(bucket).then(lambda done: done.value().half().to(whole.dtype))


class Twice(Way):
    """A chain of callbacks."""

    def hook(self, bucket: Any) -> Future[Tensor]:
        first = super().hook(bucket).then(lambda done: done.value() * 3)
        return first.then(lambda done: done.value().div_(3))


class WaitsInside(Way):
    def hook(self, bucket: Any) -> Future[Tensor]:
        done: Future[Tensor] = Future()
        done.set_result(super().hook(bucket).wait())
        return done


class WaitsForTheFirst(Way):
    """A callback waits for the future of an earlier bucket."""

    def hook(self, bucket: Any) -> Future[Tensor]:
        self.futures.append(super().hook(bucket))
        first = self.futures[0]

        def behind(done: Future[Tensor]) -> Tensor:
            first.wait()
            return done.value()

        return self.futures[-1].then(behind)


class WaitsForTheNext(Way):
    """A callback waits for the bucket that is averaged after its own; the last one begins all."""

    def __init__(self, means: Means) -> None:
        super().__init__(means)
        self.buckets: list[Any] = []
        self.results: list[Future[Tensor]] = []

    def hook(self, bucket: Any) -> Future[Tensor]:
        self.buckets.append(bucket)
        self.results.append(Future())
        if bucket.is_last():
            begun = [self.means(each) for each in self.buckets]
            for number, each in enumerate(begun):
                following = begun[(number + 1) % len(begun)]
                each.then(self.ends(self.results[number - len(begun)], following))
            self.buckets = []
        return self.results[-1]

    @staticmethod
    def ends(result: Future[Tensor], following: Future[Tensor]) -> Callable[[Any], None]:
        def behind(done: Future[Tensor]) -> None:
            following.wait()
            result.set_result(done.value())

        return behind


class NoSync(Way):
    def step(self, ddp: DistributedDataParallel, x: Tensor) -> None:
        with ddp.no_sync():
            super().step(ddp, x + 1)
        super().step(ddp, x)


class StaticGraph(Way):
    options: ClassVar = {"static_graph": True}


class Unused(Way):
    options: ClassVar = {"find_unused_parameters": True}


class UnusedBehindOthers(WaitsForTheFirst):
    options: ClassVar = {"find_unused_parameters": True, "gradient_as_bucket_view": True}


class ReturnsAnother(Way):
    """Every bucket gets the first one's mean, as far as that goes."""

    def hook(self, bucket: Any) -> Future[Tensor]:
        self.futures.append(super().hook(bucket))
        return self.futures[0]


WAYS = (
    Way, Compressed, Twice, WaitsInside, WaitsForTheFirst, WaitsForTheNext, NoSync, StaticGraph,
    Unused, UnusedBehindOthers, ReturnsAnother,
)  # fmt: skip


class Raises(Way):
    def hook(self, bucket: Any) -> Future[Tensor]:
        raise ValueError("the hook's own")


class RaisesLater(Way):
    def hook(self, bucket: Any) -> Future[Tensor]:
        def fails(_: Any) -> Tensor:
            raise ValueError("the hook's own")

        return super().hook(bucket).then(fails)


class ReturnsNone(Way):
    def hook(self, bucket: Any) -> Future[Tensor]:
        return super().hook(bucket).then(lambda done: None)


WRONG = (Raises, RaisesLater, ReturnsNone)


def of_group(group: Any) -> Means:
    """Average as PyTorch's own hook does."""

    def begin(bucket: Any) -> Future[Tensor]:
        tensor = bucket.buffer().div_(2)
        work = distributed.all_reduce(tensor, group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    return begin


class Net(nn.Sequential):
    """Every rank leaves out a layer of its own in some steps."""

    skips = False
    n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        for number, each in enumerate(self):
            if self.skips and number == 2 and (self.n + distributed.get_rank()) % 2:
                continue
            x = each(x)
        return x


def trained(way: Way) -> Tensor:
    """Train a model; return its weights."""
    torch.manual_seed(0)
    net = Net(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()
    net.skips = "find_unused_parameters" in way.options
    ddp = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB, **way.options)

    def hook(state: Way, bucket: distributed.GradBucket) -> Future[Tensor]:
        return state.hook(bucket)

    hook.__annotations__.update({"bucket": distributed.GradBucket, "return": Future[Tensor]})
    ddp.register_comm_hook(way, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(distributed.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        way.step(ddp, torch.randn(4, 8, generator=generator, dtype=torch.float64))
        optimizer.step()
    return torch.cat([each.detach().flatten() for each in net.parameters()])


def outcome(way: Way) -> str:
    """Return how a training ends that cannot be right."""
    try:
        trained(way)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "no error"


def main() -> None:
    """Compare; one line for each way."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    group: Any = distributed.new_group(backend="pgasdl")
    state = DDPState(group.context)
    averages = (of_group(None), of_group(group), lambda bucket: ddp_hook(state, bucket))
    for kind in WAYS:
        gloo, *ours = (trained(kind(average)) for average in averages)
        for each in ours:
            torch.testing.assert_close(each, gloo, rtol=1e-10, atol=1e-12)
        tell(kind.__name__, "is right")
    for kind in WRONG:
        gloo, *ours = (outcome(kind(average)) for average in averages)
        assert ours == [gloo] * 2, (kind, gloo, ours)
        tell(kind.__name__, "is refused:", gloo)
    state.close()
    distributed.destroy_process_group()
    end_at_once()


def tell(*words: str) -> None:
    if distributed.get_rank() == 0:
        print(*words, flush=True)


main()
