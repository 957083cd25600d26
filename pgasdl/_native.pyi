"""Native core of pgasdl."""

from collections.abc import Mapping, Sequence, Set
import enum
from typing import Annotated, Any, overload

import numpy
from numpy.typing import NDArray


isa: str

class Slice:
    """
    n bytes of a segment: of this rank's copy as a source, of a peer's as a target. Made by ``segment[start:stop]``; checked when it is used.
    """

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def segment_id(self) -> int: ...

    def __repr__(self) -> str: ...

class SegmentCore:
    """Memory that every rank of a group can write to; see pgasdl.Segment."""

    def __init__(self, group: GroupCore, nbytes: int, notifications: int, bound: int, timeout: float | None, device: int = -1) -> None: ...

    @property
    def id(self) -> int:
        """Number of the segment, the same on every member."""

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's copy."""

    @property
    def notifications(self) -> int:
        """Number of notifications of this rank's copy."""

    @property
    def bound(self) -> bool:
        """Whether the memory was allocated elsewhere (:meth:`Context.bind`)."""

    @property
    def device_number(self) -> int:
        """The GPU that the memory lies on; -1: none, it is the host's."""

    @property
    def deleted(self) -> bool:
        """Whether this rank's copy was given up."""

    @property
    def address(self) -> int:
        """Where this rank's copy begins in its memory."""

    def nbytes_of(self, peer: int) -> int:
        """Return the bytes of ``peer``'s copy."""

    def address_of(self, peer: int) -> int:
        """
        Where ``peer``'s copy begins in this process's memory; 0 if it is not mapped here.
        """

    def prefault(self) -> None:
        """
        Make the pages of all copies that are mapped here present now; changes nothing.
        """

    def pin(self) -> bool:
        """
        Register this rank's copy, on the host, with the GPU's driver: copies between it and a GPU are then faster, and streams make them without the host. It lasts as long as the memory. False, and nothing is done: the memory is not the library's own (bound, a GPU's, MPI's). UnavailableError without a GPU. CaffeGPI, gaspi_segment_use of pinned memory.
        """

    def __getitem__(self, slice: slice) -> Slice: ...

    def delete(self) -> None:
        """
        Give this rank's copy up. Peers' copies stay reachable; views keep their memory.
        """

    def __buffer__(self, flags: int, /) -> memoryview: ...

def local_memory(context: ContextCore, address: int, nbytes: int, device: int = -1) -> SegmentCore:
    """
    Memory of this rank alone, as a plan's private buffer; the caller keeps it alive.
    """

def device_copy(to: int, source: int, nbytes: int, device: int, stream: int) -> None:
    """Copy between addresses of host and GPUs on a stream, and wait for it."""

class LoopbackWorld:
    """What ranks that are threads of one process share."""

    def __init__(self, size: int, seed: int = 0, delay: int = 0, reorder: bool = False, late_source: bool = False, refuse: int = 0, fail_rank: int = -1, fail_at: int = 0, mapped: bool = True, any_order: bool = False, completion_first: bool = False) -> None: ...

    @property
    def size(self) -> int: ...

class CudaDeviceInfo:
    """What the CUDA driver says of a GPU."""

    @property
    def ordinal(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def uuid(self) -> str: ...

    @property
    def pci_address(self) -> str: ...

    @property
    def compute_capability(self) -> str: ...

    @property
    def memory_bytes(self) -> int: ...

    @property
    def multiprocessors(self) -> int: ...

    @property
    def virtual_memory(self) -> bool: ...

    @property
    def posix_handles(self) -> bool: ...

    @property
    def gpudirect(self) -> bool: ...

    @property
    def dmabuf(self) -> bool: ...

    @property
    def flushes_writes(self) -> bool: ...

    @property
    def writes_ordering(self) -> int: ...

    @property
    def numa_node(self) -> int: ...

    @property
    def peers(self) -> list[int]: ...

def cuda_missing() -> str:
    """Why there is no CUDA device here; empty if there is."""

def cuda_device_count() -> int:
    """The number of GPUs that this process sees; 0 without a driver."""

def cuda_devices() -> list[CudaDeviceInfo]:
    """Every GPU that this process sees, by ordinal."""

def cuda_version() -> str:
    """The newest CUDA that the driver runs."""

def cuda_device_of(address: int) -> int:
    """The GPU whose memory lies at an address."""

def refuse_capture(device: int, stream: int) -> None:
    """UnavailableError if the stream is recording a graph."""

def device_capsule(owner: object, address: int, nbytes: int, device: int) -> object:
    """Bytes of a GPU as a DLPack capsule, which keeps their owner."""

class DlpackMemory:
    """Memory taken by DLPack, which it keeps."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def contiguous(self) -> bool: ...

    @property
    def type_code(self) -> int: ...

    @property
    def type_bits(self) -> int: ...

    @property
    def type_lanes(self) -> int: ...

    @property
    def device(self) -> int: ...

def dlpack_memory(exporter: object, writable: bool) -> DlpackMemory:
    """Take the memory of an object by DLPack."""

class MpiWorld:
    """A communicator of mpi4py's MPI, and windows over segments' memory."""

    @staticmethod
    def make(file: str, handles_are_pointers: bool, handles: Mapping[str, int], numbers: Mapping[str, int], threads: str, rank: int, size: int, near: Set[int], messages_near: bool) -> MpiWorld: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def near(self) -> set[int]:
        """
        Ranks whose windows of MPI's own memory are mapped here, this one among them.
        """

    def finish(self, seconds: float) -> None:
        """Frees all windows, if every rank comes here in time."""

class VerbsOptions:
    """What `pgasdl env` calls PGASDL_VERBS_*; without arguments: the best."""

    @overload
    def __init__(self, *, ports: Sequence[tuple[str, int]], excluded: bool, gid: int | None, pkey: int | None, mtu: int | None, service_level: int, traffic_class: int, global_routes: bool, retry_count: int, rnr_retry_count: int, ack_timeout: int | None, inline_bytes: int, order: str, rails: int, stripe: int, warns: bool, stopped_after: float) -> None: ...

    @overload
    def __init__(self) -> None: ...

class VerbsDeviceInfo:
    """An address by which RDMA peers reach this machine."""

    @property
    def device(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def gid_index(self) -> int: ...

    @property
    def state(self) -> str: ...

    @property
    def link_layer(self) -> str: ...

    @property
    def mtu(self) -> int: ...

    @property
    def path_mtu(self) -> int: ...

    @property
    def pkey(self) -> int: ...

    @property
    def ack_timeout(self) -> int: ...

    @property
    def keeps_order(self) -> bool: ...

    @property
    def gigabits(self) -> float: ...

    @property
    def gid(self) -> str: ...

    @property
    def type(self) -> str: ...

    @property
    def net_device(self) -> str: ...

    @property
    def numa_node(self) -> int: ...

    @property
    def chosen(self) -> bool: ...

    @property
    def refused(self) -> str: ...

def verbs_devices(options: VerbsOptions) -> list[VerbsDeviceInfo]:
    """
    Every address, best first, each with the reason why it is not used if not.
    """

def verbs_missing(options: VerbsOptions) -> str:
    """Why there is no verbs transport here; empty if there is."""

def transports() -> dict[str, str]:
    """
    The table of transports: each one's name, and why it was left out of this build if it was.
    """

def common_ancestor(pids: Sequence[int]) -> int:
    """
    The nearest process that each of these is or descends from, 0 if there is none.
    """

def host_identity() -> str:
    """Equal for processes that can map each other's memory."""

class ContextCore:
    """One rank of a job; see pgasdl.Context."""

    def __init__(self, rank: int, size: int, transports: Sequence[str], token: bytes, world: LoopbackWorld | None, *, timeout: float, queue_depth: int, queues: int, passive_bytes: int, spin_us: float, yield_us: float, heartbeat_ms: int, stopped_after: float, verbs: VerbsOptions, mpi: MpiWorld | None = None, mpi_created: bool = False, maps_devices: bool = True) -> None: ...

    def _endpoint(self) -> bytes: ...

    def _connect(self, endpoints: list[bytes], /) -> None: ...

    def _open(self) -> bytes: ...

    def _join(self, descriptions: list[bytes], timeout: float, /) -> None: ...

    def _world(self) -> GroupCore: ...

    def _seconds(self, timeout: float | None) -> float:
        """A timeout, checked, or the default."""

    def _close(self, arg: bool, /) -> None: ...

    def _record(self) -> str: ...

    def _pid_of(self, arg: int, /) -> int: ...

    def _transport_state(self) -> str: ...

    def _admit_readers(self) -> None: ...

    def _try_read(self, arg0: int, arg1: int, arg2: int, /) -> tuple[bytes, str]: ...

    def _require_usable(self) -> None: ...

    def _require_peer(self, arg0: int, arg1: str, /) -> None: ...

    def _health(self) -> list[str]: ...

    def _acknowledge(self) -> None: ...

    @property
    def rank(self) -> int:
        """This rank's number, 0 <= rank < size."""

    @property
    def size(self) -> int:
        """Number of ranks in the job."""

    @property
    def closed(self) -> bool:
        """Whether the context was closed."""

    @property
    def _takes_devices(self) -> bool:
        """Whether the transport to every rank reaches memory of a GPU."""

    @property
    def _own_bytes(self) -> int:
        """Bytes of the groups' own memory on this rank."""

    def _connections(self) -> tuple[int, int, int]: ...

    @property
    def timeout(self) -> float:
        """Seconds that a call waits at most when it names no timeout."""

    def write(self, source: Slice, peer: int, target: Slice, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Write ``source`` into ``peer``'s memory.

        Returns once posted: leave ``source`` unchanged until ``wait(queue)`` returns. Writes are unordered
        among each other; raise a notification after them on the same queue to say that they are there.

        Parameters
        ----------
        source : Slice
            n bytes of a local segment, ``seg[0:4096]``; n = 0 does nothing.
        peer : int
            Rank, 0 <= peer < size.
        target : Slice
            n bytes of a segment of ``peer``.
        queue : int, default 0
            Order holds inside one queue only.
        timeout : float, optional
            Seconds to wait for a free place; None: the context's default, 0: one try.

        Raises
        ------
        QueueFull
            Nothing was posted; ``wait(queue)`` and repeat.
        PeerLost
            ``peer`` is gone.
        RankError, SegmentError, QueueError
            No such rank, slice or queue; nothing was posted.

        Notes
        -----
        GASPI: gaspi_write.
        """

    def read(self, target: Slice, peer: int, source: Slice, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Read ``source`` from ``peer``'s memory into ``target``.

        The bytes are here once ``wait(queue)`` returns.

        Parameters
        ----------
        target : Slice
            n bytes of a local segment.
        peer : int
            Rank.
        source : Slice
            n bytes of a segment of ``peer``.
        queue, timeout
            As for ``write``.

        Raises
        ------
        QueueFull, PeerLost, RankError, SegmentError, QueueError
            As for ``write``.

        Notes
        -----
        GASPI: gaspi_read.
        """

    def write_list(self, pairs: Sequence[tuple[Slice, Slice]], peer: int, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Write several slices to one peer with one request.

        Parameters
        ----------
        pairs : Sequence[tuple[Slice, Slice]]
            Sequence of (source, target) slices, at most 65536.
        peer, queue, timeout
            As for ``write``.

        Raises
        ------
        QueueFull, PeerLost, RankError, SegmentError, QueueError
            As for ``write``; nothing is posted if any pair is refused.

        Notes
        -----
        GASPI: gaspi_write_list.
        """

    def read_list(self, pairs: Sequence[tuple[Slice, Slice]], peer: int, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Read several slices from one peer with one request.

        Parameters
        ----------
        pairs : Sequence[tuple[Slice, Slice]]
            Sequence of (target, source) slices, at most 65536.
        peer, queue, timeout
            As for ``read``.

        Raises
        ------
        QueueFull, PeerLost, RankError, SegmentError, QueueError
            As for ``read``; nothing is posted if any pair is refused.

        Notes
        -----
        GASPI: gaspi_read_list.
        """

    def notify(self, peer: int, segment: SegmentCore, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Raise one notification at ``peer``.

        It never overtakes an earlier write on the same queue to the same peer.

        Parameters
        ----------
        peer : int
            Rank.
        segment : Segment
            Whose board at ``peer`` is meant.
        notification : int
            0 <= notification < segment.notifications at ``peer``.
        value : int, default 1
            1 <= value < 2**32; a second one before the reset overwrites the first.
        queue, timeout
            As for ``write``.

        Raises
        ------
        NotificationError
            Id or value out of range.
        QueueFull, PeerLost, RankError, SegmentError, QueueError
            As for ``write``.

        Notes
        -----
        GASPI: gaspi_notify.
        """

    def write_notify(self, source: Slice, peer: int, target: Slice, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Write ``source`` into ``peer``'s memory, then raise one notification there.

        Whoever sees the notification sees every byte, and every byte of earlier writes on the same queue
        to the same peer. Returns once posted: leave ``source`` unchanged until ``wait(queue)`` returns.

        Parameters
        ----------
        source : Slice
            n bytes of a local segment, ``seg[0:4096]``; n = 0 raises the notification alone.
        peer : int
            Rank, 0 <= peer < size.
        target : Slice
            n bytes of a segment of ``peer``, which also holds the notification.
        notification : int
            0 <= notification < segment.notifications at ``peer``.
        value : int, default 1
            1 <= value < 2**32; 0 means "not raised" and is refused.
        queue : int, default 0
            Order holds inside one queue only.
        timeout : float, optional
            Seconds to wait for a free place; None: the context's default, 0: one try.

        Raises
        ------
        QueueFull
            Nothing was posted; ``wait(queue)`` and repeat.
        PeerLost
            ``peer`` is gone.
        NotificationError, RankError, SegmentError, QueueError
            Out of range; nothing was posted.

        Notes
        -----
        shm: a copy, then one store-release. GASPI: gaspi_write_notify.
        """

    def write_list_notify(self, pairs: Sequence[tuple[Slice, Slice]], peer: int, segment: SegmentCore, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Write several slices to one peer, then raise one notification there.

        Parameters
        ----------
        pairs : Sequence[tuple[Slice, Slice]]
            Sequence of (source, target) slices, at most 65536; may be empty.
        peer : int
            Rank.
        segment, notification, value
            The notification, as for ``notify``.
        queue, timeout
            As for ``write``.

        Raises
        ------
        NotificationError, QueueFull, PeerLost, RankError, SegmentError, QueueError
            As for ``write_notify``; nothing is posted if any pair is refused.

        Notes
        -----
        GASPI: gaspi_write_list_notify.
        """

    def read_notify(self, target: Slice, peer: int, source: Slice, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Read from ``peer``, then raise one notification here.

        The notification, on the board of ``target``'s segment on this rank, is raised when the bytes are in
        local memory.

        Parameters
        ----------
        target : Slice
            n bytes of a local segment; n = 0 raises the notification alone.
        peer : int
            Rank.
        source : Slice
            n bytes of a segment of ``peer``.
        notification, value, queue, timeout
            As for ``write_notify``.

        Raises
        ------
        NotificationError, QueueFull, PeerLost, RankError, SegmentError, QueueError
            As for ``write_notify``.

        Notes
        -----
        GASPI: gaspi_read_notify.
        """

    def read_list_notify(self, pairs: Sequence[tuple[Slice, Slice]], peer: int, segment: SegmentCore, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Read several slices from one peer, then raise one notification here.

        Parameters
        ----------
        pairs : Sequence[tuple[Slice, Slice]]
            Sequence of (target, source) slices, at most 65536; may be empty.
        peer : int
            Rank.
        segment, notification, value
            The notification on this rank's board of ``segment``.
        queue, timeout
            As for ``write``.

        Raises
        ------
        NotificationError, QueueFull, PeerLost, RankError, SegmentError, QueueError
            As for ``write_notify``; nothing is posted if any pair is refused.

        Notes
        -----
        GASPI: gaspi_read_list_notify.
        """

    def notify_add(self, peer: int, segment: SegmentCore, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Add to one notification at ``peer``, which counts.

        No addition is lost, whichever ranks and threads make them, also while the owner takes what is
        there. It never overtakes an earlier write on the same queue to the same peer.

        Parameters
        ----------
        peer : int
            Rank.
        segment : Segment
            Whose board at ``peer`` is meant.
        notification : int
            0 <= notification < segment.notifications at ``peer``.
        value : int, default 1
            1 <= value < 2**32, by which the notification grows.
        queue, timeout
            As for ``write``.

        Raises
        ------
        NotificationError
            Id or value out of range.
        QueueFull, PeerLost, RankError, SegmentError, QueueError
            As for ``write``.

        Notes
        -----
        Its owner waits with ``notify_wait_count``; ``notify_waitsome`` and ``notify_reset`` see the count
        as a value. The count stops at 2**32 - 1, and what comes then is lost: ``notify_wait_count`` raises
        NotificationError. ``notify`` on the same id overwrites the count: an id is set or counted, and may
        change only once its owner has taken all that was under way. Over verbs the peer's processor adds,
        in its waits or heartbeats: 128 additions to a peer that does neither make the next one wait.
        """

    def write_notify_add(self, source: Slice, peer: int, target: Slice, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Write ``source`` into ``peer``'s memory, then add to one notification there.

        Whoever sees a count that includes it sees every byte, and every byte of earlier writes on the same
        queue to the same peer: a target that waits for n writes, in any order, needs one notification.
        Returns once posted: leave ``source`` unchanged until ``wait(queue)`` returns.

        Parameters
        ----------
        source : Slice
            n bytes of a local segment, ``seg[0:4096]``; n = 0 adds to the notification alone.
        peer : int
            Rank, 0 <= peer < size.
        target : Slice
            n bytes of a segment of ``peer``, which also holds the notification.
        notification, value
            As for ``notify_add``.
        queue, timeout
            As for ``write_notify``.

        Raises
        ------
        NotificationError, QueueFull, PeerLost, RankError, SegmentError, QueueError
            As for ``write_notify``; nothing was posted.

        Notes
        -----
        See ``notify_add``. From or to memory of a GPU it first waits for PyTorch's or CuPy's current
        stream.
        """

    def write_list_notify_add(self, pairs: Sequence[tuple[Slice, Slice]], peer: int, segment: SegmentCore, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Write several slices to one peer, then add to one notification there.

        Parameters
        ----------
        pairs : Sequence[tuple[Slice, Slice]]
            Sequence of (source, target) slices, at most 65536; may be empty.
        peer : int
            Rank.
        segment, notification, value
            The notification, as for ``notify_add``.
        queue, timeout
            As for ``write``.

        Raises
        ------
        NotificationError, QueueFull, PeerLost, RankError, SegmentError, QueueError
            As for ``write_notify_add``; nothing is posted if any pair is refused.
        """

    def wait(self, queue: int = 0, *, timeout: float | None = None) -> None:
        """
        Wait until everything posted on ``queue`` is locally complete.

        Sources may then change and what was read is here. It says nothing about the peers having seen it:
        that is what notifications are for.

        Parameters
        ----------
        queue : int, default 0
            A queue's id.
        timeout : float, optional
            Seconds; None: the context's default, 0: one try.

        Raises
        ------
        Timeout
            Requests are still under way; call again.
        PeerLost
            A rank was lost meanwhile.
        QueueError
            No such queue.

        Notes
        -----
        GASPI: gaspi_wait.
        """

    def notify_waitsome(self, segment: SegmentCore, first: int = 0, count: int | None = None, *, timeout: float | None = None) -> int | None:
        """
        Wait until one of a range of notifications is raised here.

        Parameters
        ----------
        segment : Segment
            Whose board on this rank is meant.
        first : int, default 0
            First id of the range.
        count : int, optional
            How many ids; None: all from ``first`` on; 0 returns None at once.
        timeout : float, optional
            Seconds; None: the context's default, 0: one try.

        Returns
        -------
        int
            An id that is raised. It stays raised until ``notify_reset``; repeated calls go round the range,
            so that no id starves.

        Raises
        ------
        Timeout
            None is raised; names the range.
        PeerLost
            A rank was lost, or all others have left.
        NotificationError
            The range leaves the board.

        Notes
        -----
        A wait spins briefly, then yields, then sleeps; the GIL is not held. GASPI: gaspi_notify_waitsome.
        """

    def notify_wait_count(self, segment: SegmentCore, notification: int, count: int, *, timeout: float | None = None) -> int:
        """
        Wait until a notification here has counted to ``count``, and take that much off it.

        What was written with the additions that it takes, and with all others up to then, is here. What
        counted beyond stays for the next wait.

        Parameters
        ----------
        segment : Segment
            Whose board on this rank is meant.
        notification : int
            Id.
        count : int
            1 <= count < 2**32 - 1.
        timeout : float, optional
            Seconds; None: the context's default, 0: one try.

        Returns
        -------
        int
            What is left of the count. Several threads may wait for one notification: each takes its own.

        Raises
        ------
        Timeout
            Not so much yet; names what is there, and nothing was taken.
        PeerLost
            A rank was lost, or all others have left.
        NotificationError
            Id or count out of range; or the notification has counted beyond 2**32 - 2, so that additions
            were lost, until ``notify_reset``.

        Notes
        -----
        It waits as ``notify_waitsome`` does. Peers count by ``notify_add`` and ``write_notify_add``.
        """

    def notify_reset(self, segment: SegmentCore, notification: int) -> int:
        """
        Take a notification's value and set it to "not raised", as one atomic operation.

        Parameters
        ----------
        segment : Segment
            Whose board on this rank is meant.
        notification : int
            Id.

        Returns
        -------
        int
            The value, 0 if it was not raised. Of several threads exactly one gets each value. Of a count
            what there was; what is added from then on counts from 0.

        Raises
        ------
        NotificationError
            Id out of range.

        Notes
        -----
        GASPI: gaspi_notify_reset.
        """

    def notify_on(self, stream: object | None, peer: int, segment: SegmentCore, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Raise a notification at ``peer`` when a stream of a GPU comes to it; see ``write_notify_on``.

        Parameters
        ----------
        stream : object
            Of PyTorch or CuPy, or with ``__cuda_stream__``, or a handle; None: PyTorch's or CuPy's current
            one.
        peer : int
            Rank.
        segment : Segment
            On a GPU; whose board at ``peer`` is meant.
        notification, value, queue, timeout
            As for ``notify``.
        """

    def write_notify_on(self, stream: object | None, source: Slice, peer: int, target: Slice, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Write ``source`` into ``peer``'s memory, then raise one notification there, all by a stream.

        What the stream did before is in ``source``; what it does later comes after. The host waits for
        nothing, if ``peer``'s memory is mapped here; else it waits for the stream, then posts. Without a
        stream's name: ``write_notify`` on memory of a GPU follows PyTorch's or CuPy's current stream.

        Parameters
        ----------
        stream : object
            Of PyTorch or CuPy, or with ``__cuda_stream__``, or a handle; None: PyTorch's or CuPy's current
            one.
        source : Slice
            Source or target, or both, are on a GPU.
        peer, target, notification, value, queue, timeout
            As for ``write_notify``.

        Raises
        ------
        UnavailableError
            Nothing of it is on a GPU.
        Timeout, PeerLost
            An earlier stream's wait was ended without its notification, which did not come in time, or by
            the loss of a rank.
        QueueFull, PeerLost, NotificationError, RankError, SegmentError, QueueError
            As for ``write_notify``.

        Notes
        -----
        It can be captured into a CUDA graph.
        """

    def write_list_notify_on(self, stream: object | None, pairs: Sequence[tuple[Slice, Slice]], peer: int, segment: SegmentCore, notification: int, value: int = 1, *, queue: int = 0, timeout: float | None = None) -> None:
        """
        Write several slices, then raise one notification, all by a stream of a GPU.

        Parameters
        ----------
        stream : object
            Of PyTorch or CuPy, or with ``__cuda_stream__``, or a handle; None: PyTorch's or CuPy's current
            one.
        pairs, peer, segment, notification, value, queue, timeout
            As for ``write_list_notify``. See ``write_notify_on``.
        """

    def notify_wait_on(self, stream: object | None, segment: SegmentCore, notification: int, *, timeout: float | None = None) -> None:
        """
        Let a stream of a GPU wait until a notification is raised here; the host goes on.

        Parameters
        ----------
        stream : object
            Of PyTorch or CuPy, or with ``__cuda_stream__``, or a handle; None: PyTorch's or CuPy's current
            one.
        segment : Segment
            On a GPU; whose board on this rank is meant.
        notification : int
            Id. It stays raised: see ``notify_reset_on``. Values are below 2**31.
        timeout : float, optional
            Seconds; None: the context's default.

        Raises
        ------
        NotificationError
            Id out of range.
        UnavailableError
            The segment is not on a GPU, or the stream is recording a CUDA graph.
        Timeout, PeerLost
            An earlier stream's wait was ended without its notification, which did not come in time, or by
            the loss of a rank.

        Notes
        -----
        If it does not come in time, or a rank is lost, this rank raises it itself, so that the stream goes
        on; the next call that names a stream raises Timeout or PeerLost with the reason.
        """

    def notify_reset_on(self, stream: object | None, segment: SegmentCore, notification: int) -> None:
        """
        Set a notification to "not raised" when a stream of a GPU comes to it.

        Parameters
        ----------
        stream : object
            Of PyTorch or CuPy, or with ``__cuda_stream__``, or a handle; None: PyTorch's or CuPy's current
            one.
        segment : Segment
            On a GPU; whose board on this rank is meant.
        notification : int
            Id.

        Raises
        ------
        NotificationError
            Id out of range.
        UnavailableError
            The segment is not on a GPU.
        Timeout, PeerLost
            An earlier stream's wait was ended without its notification, which did not come in time, or by
            the loss of a rank.
        """

    def atomic_fetch_add(self, target: Slice, peer: int, value: int, *, timeout: float | None = None) -> int:
        """
        Add to a 64-bit word of ``peer``'s memory and return its old value.

        Parameters
        ----------
        target : Slice
            8 bytes of a segment of ``peer``, at a multiple of 8.
        peer : int
            Rank.
        value : int
            -2**63 <= value < 2**63; the sum wraps.
        timeout : float, optional
            Seconds; None: the context's default.

        Returns
        -------
        int
            The old value, unsigned.

        Raises
        ------
        AlignmentError
            Not 8 bytes at a multiple of 8.
        UnavailableError
            The peer's memory was bound, not created (shm).
        PeerLost, RankError, SegmentError
            As for ``write``.

        Notes
        -----
        GASPI: gaspi_atomic_fetch_add.
        """

    def atomic_compare_swap(self, target: Slice, peer: int, compare: int, swap: int, *, timeout: float | None = None) -> int:
        """
        Replace a 64-bit word of ``peer``'s memory if it has the expected value.

        Parameters
        ----------
        target : Slice
            8 bytes of a segment of ``peer``, at a multiple of 8.
        peer : int
            Rank.
        compare : int
            The expected value, 0 <= compare < 2**64.
        swap : int
            The new value.
        timeout : float, optional
            Seconds; None: the context's default.

        Returns
        -------
        int
            The old value; the exchange took place if it equals ``compare``.

        Raises
        ------
        AlignmentError, UnavailableError, PeerLost, RankError, SegmentError
            As for ``atomic_fetch_add``.

        Notes
        -----
        GASPI: gaspi_atomic_compare_swap.
        """

    def queue_size(self, queue: int = 0) -> int:
        """Return the requests posted on ``queue`` since it was last waited for."""

    def queue_create(self) -> int:
        """
        Make a queue and return its id; QueueError when ``limits.queues`` exist.
        """

    def _reconnect(self, arg: int, /) -> None: ...

    def queue_delete(self, queue: int) -> None:
        """Free a queue's id; wait for it first."""

def group_memory(members: int, world: bool, passive_bytes: int) -> dict[str, int]:
    """
    Bytes that a group of so many ranks takes of each for the library, by what they are for; world: the group of all ranks of a job.
    """

def heartbeat_distances(n_ranks: int) -> list[int]:
    """
    How far ahead those are, modulo the number of ranks, to which a rank sends heartbeats if all are machines of their own.
    """

def group_distances(members: int, barrier: bool) -> list[int]:
    """
    How far ahead are those to which a member sends in a barrier, or in an all-gather; it gets from those as far behind.
    """

class GroupCore:
    """Ranks that act together; see pgasdl.Group."""

    def __init__(self, context: ContextCore, ranks: Sequence[int]) -> None: ...

    def describe(self) -> bytes: ...

    def attach(self, descriptions: list[bytes], timeout: float, /) -> None: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int: ...

    @property
    def index(self) -> int: ...

    def barrier(self, timeout: float | None = None) -> None: ...

    def allgather(self, reduction: bool, what: str, fingerprint: int, mine: bytes, timeout: float | None = None) -> list[bytes]: ...

    @property
    def half_bound(self) -> int:
        """Address of memory whose binding ended half way, or 0."""

    def passive_send(self, data: object, peer: int, timeout: float | None = None) -> None: ...

    def passive_receive(self, timeout: float | None = None) -> tuple[int, bytes]: ...

    def remove(self) -> None: ...

class BufferAccess(enum.Enum):
    """How a plan gets at the caller's array."""

    IN_PLACE = 0
    """It lies where the plan works."""

    REBASED = 1
    """The plan is told where it lies."""

    COPIED = 2
    """To where the plan works, and back."""

class Numbering:
    """Numbers executions that share notifications of a board."""

    def __init__(self, board: SegmentCore, first: int, count: int, exclusive: bool = False) -> None: ...

    @property
    def under_way(self) -> bool:
        """An exclusive one has begun, and its result was not taken."""

    @property
    def failed(self) -> bool:
        """Of an exclusive one: nothing can follow."""

    def enter(self, what: str) -> None:
        """MismatchError if another thread is inside."""

    def leave(self) -> None: ...

class Directory:
    """Where each rank's array lies, told anew in every execution."""

    def __init__(self, entries: SegmentCore, offset: int, homes: Sequence[SegmentCore]) -> None:
        """
        Entries of 8 bytes in a segment; the segments that arrays may lie in, or none: anywhere.
        """

class Execution:
    """A collective bound to memory, which runs any number of times."""

    def __init__(self, context: ContextCore, phases: Sequence[tuple[str, int, int, int, Sequence[tuple[str, int]], Sequence[Sequence[tuple[str, Sequence[tuple[int, int, int]], Sequence[tuple[int, int, int]], int, int, int, float, str]]]]], bindings: Sequence[tuple[SegmentCore, int, str, Sequence[tuple[SegmentCore, int]], Directory | None]], ranks: Sequence[int], numbering: Numbering, first_notification: int, fingerprint: int, access: BufferAccess = BufferAccess.IN_PLACE, source: int = 0, target: int = 0, nbytes: int = 0, device: int = -1, pieces: Sequence[Sequence[tuple[int, int]]] = []) -> None:
        """
        `pieces`, of each phase: (elements, lanes) of an array on a GPU that is copied.
        """

    def start(self) -> None:
        """
        Begin the next execution; as many steps as go through at once are taken.
        """

    def wait(self, *, timeout: float | None = None) -> None:
        """Until its result is there; returns at once if none is under way."""

    def start_after(self, stream: int) -> None:
        """
        start() as soon as a stream of the GPU has done what is enqueued on it.
        """

    def run_after(self, stream: int, owner: object | None, address: int = 0, nbytes: int = 0, *, timeout: float | None = None) -> bool:
        """
        run() after what is enqueued on a stream of the GPU, and before what will be; on other memory than the handle's, if it is given. True: the stream makes it, and nobody waits.
        """

    def run(self, *, timeout: float | None = None) -> None:
        """start() and wait(); what a run() that did not end has begun goes on."""

    def run_on(self, owner: object, address: int, nbytes: int, *, timeout: float | None = None) -> None:
        """run() on memory of `owner`; the caller has entered the numbering."""

    def close(self) -> None:
        """
        Nothing of it moves any more, once streams have what they wait for; idempotent.
        """

    @property
    def name(self) -> str: ...

    @property
    def declined(self) -> bool:
        """
        The last one did nothing: some rank's array lies in no segment of the directory.
        """

    @property
    def under_way(self) -> bool:
        """It has begun, and its result was not taken."""

    @property
    def idle(self) -> bool:
        """
        It can begin: nothing is under way, it did not fail and was not closed.
        """

    @property
    def times(self) -> tuple[float, float]:
        """
        When the last execution began and ended, in time.monotonic()'s seconds.
        """

    def missing(self) -> str: ...

class Call:
    """A step that waits for the program's answer."""

    @property
    def hook(self) -> str: ...

    @property
    def offset(self) -> int: ...

    @property
    def count(self) -> int: ...

def serve_with(context: ContextCore, serve: object) -> None:
    """Whom waits call when a Call waits for an answer."""

def take_call(context: ContextCore) -> Call | None: ...

def answer(context: ContextCore, call: Call) -> None: ...

def progress_thread(context: ContextCore, run: bool) -> None: ...

def reduce(destinations: Sequence[tuple[int, str]], sources: Sequence[tuple[int, str]], count: int, scale: float, op: str) -> None:
    """
    The kernel the executor uses, on (address, dtype) pairs; nothing is checked.
    """

class AllreduceCalls:
    """Which execution each call of ctx.allreduce made before runs."""

    def __init__(self, numbering: Numbering) -> None: ...

    @property
    def number(self) -> int:
        """Executions that have begun."""

    @number.setter
    def number(self, arg: int, /) -> None: ...

    @property
    def last(self) -> tuple[Any, ...]:
        """What remember() was told of the last call."""

    def serve(self, context: ContextCore) -> None:
        """
        From now on calls of ``context.allreduce`` of all ranks are looked for here first.
        """

    def remember(self, array: object, nbytes: int, op: object, plan: object | None, execution: object, description: tuple[Any, ...]) -> None: ...

    def forget(self) -> None: ...

    def take_interrupted(self) -> bool:
        """Whether run() left the call `last` under way; tells it once."""

    def take_declined(self) -> bool:
        """Whether run() has ended an execution that did nothing; tells it once."""

    def run(self, array: object | None, op: object | None, plan: object | None, timeout: float | None) -> bool:
        """
        False: not made before, the last one did not end, or this one was declined.
        """

def repeated(function: object) -> object:
    """Context.allreduce, by way of AllreduceCalls or else of this function."""

class LayerSchedule:
    """Which layers are ready, and how far each bucket's exchange is."""

    def __init__(self, context: ContextCore, buckets: Sequence[Sequence[int]]) -> None: ...

    def bind(self, bucket: int, executions: Sequence[Execution]) -> None: ...

    def require(self, layer: int) -> None:
        """PlanError, ClosedError, or nothing."""

    def ready(self, layer: int) -> None:
        """Begin its exchange, and make progress."""

    def ready_after(self, layer: int, stream: int, device: int) -> None:
        """
        Begin its exchange as soon as a stream of a GPU has done what is enqueued on it.
        """

    def progress(self) -> None: ...

    def wait(self, layer: int, *, timeout: float | None = None) -> None:
        """Until its exchange is over."""

    def finish(self, bucket: int, *, timeout: float) -> None:
        """wait() for a whole bucket."""

    def executions(self, layer: int) -> int:
        """How often the exchange of the layer's bucket is over."""

    def iterations(self) -> int:
        """How often that of every bucket is."""

    def timing(self, layer: int) -> tuple[float, float, float, float, float]:
        """(waiting, ready, began, ended, waited), in seconds."""

    def bucket_of(self, call: Call) -> int:
        """-1: none of these."""

    def end(self, why: str) -> None:
        """From now on ready and wait raise ClosedError."""

    def close(self) -> None:
        """Nothing of it moves any more."""

    @property
    def idle(self) -> bool:
        """Nothing is under way, and nothing failed."""

    @property
    def ended(self) -> str | None: ...

class Floor:
    """
    Raw exchanges over mapped memory: what the machine itself needs. Collective; used by pgasdl bench.
    """

    def __init__(self, context: ContextCore, segment: SegmentCore, oversubscribed: bool) -> None: ...

    @staticmethod
    def bytes(size: int, payload: int) -> int:
        """What the segment must hold to exchange ``payload`` bytes."""

    def sync(self) -> None:
        """A barrier of raw flags: all ranks return within one latency."""

    def line(self, batches: int, rounds: int) -> list[float]:
        """A bounced cache line, nanoseconds one way, per batch."""

    def put(self, bytes: int, copy: str, batches: int, rounds: int) -> list[float]:
        """A copy and a flag, nanoseconds one way, per batch."""

    def in_place(self, count: int, prefetch: bool, calls: int, paced: bool) -> tuple[list[int], list[int]]:
        """
        Means of float32 in the segments: when each call began and ended, nanoseconds.
        """

    def private_arrays(self, count: int, piece: int, copy: str, calls: int, paced: bool) -> tuple[list[int], list[int]]:
        """Means of float32 in arrays outside the segments."""

    def private_blocks(self, count: int, piece: int, calls: int, paced: bool) -> tuple[list[int], list[int]]:
        """The same, each block reduced by its owner."""

    def read_arrays(self, count: int, piece: int, calls: int, paced: bool) -> tuple[list[int], list[int]]:
        """The same, copied from peers' arrays where they lie."""

    def layers(self, counts: Sequence[int], prefetch: bool, calls: int, paced: bool) -> tuple[list[int], list[int]]:
        """A model's tensors, one after the other, each in place."""

def notified_writes(context: ContextCore, segment: SegmentCore, bytes: int, target: int, batches: int, rounds: int) -> list[float]:
    """
    write_notify to notify_waitsome in the core, nanoseconds one way, per batch.
    """

def streamed_writes(context: ContextCore, segment: SegmentCore, bytes: int, target: int, count: int) -> float:
    """
    Writes to rank 1 in a row in the core, nanoseconds each, until the queue is complete.
    """

def clock_cost() -> float:
    """
    The nanoseconds that reading the clock twice adds to what lies between.
    """

class Program:
    """A plan of all ranks as arrays of steps, to be simulated."""

    def __init__(self, ops: Annotated[NDArray[numpy.int64], dict(order='C', device='cpu', writable=False)], ranges: Annotated[NDArray[numpy.int64], dict(order='C', device='cpu', writable=False)], table: Annotated[NDArray[numpy.int64], dict(order='C', device='cpu', writable=False)], ranks: int, notifications: int) -> None: ...

def traffic(programs: Sequence[Program], jobs: Sequence[int], ranks: int) -> tuple[int, int]:
    """
    Messages that a rank sends, and ranks that it sends to or gets from: the most.
    """

def simulate(levels: Sequence[tuple[Sequence[int], Sequence[int], float, bool, float, float, float]], costs: tuple[float, float, float, float, bool], programs: Sequence[Program], jobs: Sequence[int], application: Sequence[tuple[int, int, float]], begin: Sequence[float], slow: Sequence[float]) -> tuple[Annotated[NDArray[numpy.float64], dict(shape=(None,))], Annotated[NDArray[numpy.float64], dict(shape=(None,))], list[float], list[float], int, str]:
    """
    Runs plans on a modelled machine; pgasdl.simulate says what it takes and gives.
    """
