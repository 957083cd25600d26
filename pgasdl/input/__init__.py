"""Parallel input: every rank reads its own part of every mini-batch, from striped files.

::

    files = StripedFiles("images.json")
    batches = Batches(len(files), 256, rank=ctx.rank, size=ctx.size)
    with Prefetcher(files, batches.iterations(done, total)) as prefetcher:
        for batch in prefetcher:
            images = torch.from_numpy(batch["image"])

PyTorch's DataLoader takes the same files and batches. It is the right reader where records must
be decoded or augmented, which its workers do in other processes::

    DataLoader(files, sampler=batches.iterations(done, total), batch_size=None, num_workers=2)
"""

from pgasdl.input.batches import Batches, Iterations
from pgasdl.input.prefetcher import Prefetcher
from pgasdl.input.reader import StripedFiles
from pgasdl.input.writer import StripedWriter

__all__ = ["Batches", "Iterations", "Prefetcher", "StripedFiles", "StripedWriter"]
