"""Parallel input: every rank reads its own part of every mini-batch, in the order of a seed.

Data sets in well-known formats, from a disk or from storage, through levels that the ranks of a
job share (:class:`Records`); what decodes a record is a function of yours::

    def decode(record, random):  # called by threads, or by processes
        image = np.asarray(Image.open(io.BytesIO(record["jpg"])).resize((224, 224)))
        return {"image": image, "label": int(record["cls"])}

    records = Records("https://host/train-{0000..0146}.tar", local="/ssd", group=ctx.world)
    with records, Loader(records, 256, decode=decode, group=ctx.world, workers=2) as loader:
        for epoch in range(90):
            for batch in loader:
                images = torch.from_numpy(batch["image"])

Records of one size lie in NumPy's files, in as many folders as there are disks, and are read into
their places::

    np.save("/disk0/images.npy", array)  # with named fields, or without
    records = Records(["/disk0/images.npy", "/disk1/images.npy"])
    batches = Batches(len(records), 256, rank=ctx.rank, size=ctx.size)
    with Prefetcher(records, batches.iterations(done, total)) as prefetcher:
        for batch in prefetcher:
            images = torch.from_numpy(batch["image"])

PyTorch's DataLoader takes the same records and batches::

    DataLoader(records, sampler=batches.iterations(done, total), batch_size=None, num_workers=2)
"""

from pgasdl.input.batches import Batches, Iterations
from pgasdl.input.loader import Loader
from pgasdl.input.prefetcher import Prefetcher
from pgasdl.input.records import Records

__all__ = [
    "Batches",
    "Iterations",
    "Loader",
    "Prefetcher",
    "Records",
]
