// Docstrings of the one-sided operations.
#pragma once

// Parts of them.
#define PARAMETERS "\n\nParameters\n----------\n"
#define RAISES "\n\nRaises\n------\n"
#define RETURNS_INT "\n\nReturns\n-------\nint\n    "
#define NOTES "\n\nNotes\n-----\n"
#define GASPI(call) NOTES "GASPI: gaspi_" call "."
#define STREAM                                                                                   \
  "stream : object\n"                                                                            \
  "    Of PyTorch or CuPy, or with ``__cuda_stream__``, or a handle; None: PyTorch's or CuPy's " \
  "current\n    one.\n"
#define PEER "peer : int\n    Rank, 0 <= peer < size.\n"
#define HERE "segment : Segment\n    Whose board on this rank is meant.\n"
#define AT_PEER "notification : int\n    0 <= notification < segment.notifications at ``peer``.\n"
#define AS_WRITE "\nqueue, timeout\n    As for ``write``."
#define PLACE                                                                             \
  "queue : int, default 0\n    Order holds inside one queue only.\n"                      \
  "timeout : float, optional\n    Seconds to wait for a free place; None: the context's " \
  "default, 0: one try."
#define TIMEOUT "timeout : float, optional\n    Seconds; None: the context's default, 0: one try.\n"
#define STREAM_LOST                                                                      \
  "PgasTimeoutError, PeerLostError\n    An earlier stream's wait was ended without its " \
  "notification, which did not come in time,\n    or by the loss of a rank."

namespace pgasdl::docs {

inline constexpr const char* kWrite = R"(Write ``source`` into ``peer``'s memory.

Local memory comes first, then the peer, then the peer's memory: so in all calls that move bytes.
Returns once posted: leave ``source`` unchanged until ``wait(queue)`` returns. Writes are unordered
among each other; raise a notification after them on the same queue to say that they are there.)" PARAMETERS
                                      R"(source : Slice
    n bytes of a local segment, ``seg[0:4096]``; n = 0 does nothing.
)" PEER R"(target : Slice
    n bytes of a segment of ``peer``.
)" PLACE RAISES R"(QueueFullError
    Nothing was posted; ``wait(queue)`` and repeat.
PeerLostError
    ``peer`` is gone.
RankError, SegmentError, QueueError
    No such rank, slice or queue; nothing was posted.)" GASPI("write");

inline constexpr const char* kRead =
    R"(Read ``source`` from ``peer``'s memory into ``target``.

Local memory comes first: here it is the target. The bytes are here once ``wait(queue)`` returns.)" PARAMETERS
    R"(target : Slice
    n bytes of a local segment.
peer : int
    Rank.
source : Slice
    n bytes of a segment of ``peer``.)" AS_WRITE RAISES
    R"(QueueFullError, PeerLostError, RankError, SegmentError, QueueError
    As for ``write``.)" GASPI("read");

inline constexpr const char* kWriteList =
    R"(Write several slices to one peer with one request.)" PARAMETERS
    R"(pairs : Sequence[tuple[Slice, Slice]]
    Sequence of (source, target) slices, at most 65536.
peer, queue, timeout
    As for ``write``.)" RAISES R"(QueueFullError, PeerLostError, RankError, SegmentError, QueueError
    As for ``write``; nothing is posted if any pair is refused.)" GASPI("write_list");

inline constexpr const char* kReadList =
    R"(Read several slices from one peer with one request.)" PARAMETERS
    R"(pairs : Sequence[tuple[Slice, Slice]]
    Sequence of (target, source) slices, at most 65536.
peer, queue, timeout
    As for ``read``.)" RAISES R"(QueueFullError, PeerLostError, RankError, SegmentError, QueueError
    As for ``read``; nothing is posted if any pair is refused.)" GASPI("read_list");

inline constexpr const char* kNotify = R"(Raise one notification at ``peer``.

It never overtakes an earlier write on the same queue to the same peer.)" PARAMETERS R"(peer : int
    Rank.
segment : Segment
    Whose board at ``peer`` is meant.
)" AT_PEER R"(value : int, default 1
    1 <= value < 2**32; a second one before the reset overwrites the first.)" AS_WRITE RAISES
                                       R"(NotificationError
    Id or value out of range.
QueueFullError, PeerLostError, RankError, SegmentError, QueueError
    As for ``write``.)" GASPI("notify");

inline constexpr const char* kWriteNotify =
    R"(Write ``source`` into ``peer``'s memory, then raise one notification there.

Whoever sees the notification sees every byte, and every byte of earlier writes on the same queue
to the same peer. Returns once posted: leave ``source`` unchanged until ``wait(queue)`` returns.)" PARAMETERS
    R"(source : Slice
    n bytes of a local segment, ``seg[0:4096]``; n = 0 raises the notification alone.
)" PEER R"(target : Slice
    n bytes of a segment of ``peer``, which also holds the notification.
)" AT_PEER R"(value : int, default 1
    1 <= value < 2**32; 0 means "not raised" and is refused.
)" PLACE RAISES R"(QueueFullError
    Nothing was posted; ``wait(queue)`` and repeat.
PeerLostError
    ``peer`` is gone.
NotificationError, RankError, SegmentError, QueueError
    Out of range; nothing was posted.)" NOTES
    R"(shm: a copy, then one store-release. GASPI: gaspi_write_notify.)";

inline constexpr const char* kWriteListNotify =
    R"(Write several slices to one peer, then raise one notification there.)" PARAMETERS
    R"(pairs : Sequence[tuple[Slice, Slice]]
    Sequence of (source, target) slices, at most 65536; may be empty.
peer : int
    Rank.
segment, notification, value
    The notification, as for ``notify``.)" AS_WRITE RAISES
    R"(NotificationError, QueueFullError, PeerLostError, RankError, SegmentError, QueueError
    As for ``write_notify``; nothing is posted if any pair is refused.)" GASPI("write_list_notify");

inline constexpr const char* kReadNotify =
    R"(Read from ``peer``, then raise one notification here.

The notification, on the board of ``target``'s segment on this rank, is raised when the bytes are in
local memory.)" PARAMETERS R"(target : Slice
    n bytes of a local segment; n = 0 raises the notification alone.
peer : int
    Rank.
source : Slice
    n bytes of a segment of ``peer``.
notification, value, queue, timeout
    As for ``write_notify``.)" RAISES
    R"(NotificationError, QueueFullError, PeerLostError, RankError, SegmentError, QueueError
    As for ``write_notify``.)" GASPI("read_notify");

inline constexpr const char* kReadListNotify =
    R"(Read several slices from one peer, then raise one notification here.)" PARAMETERS
    R"(pairs : Sequence[tuple[Slice, Slice]]
    Sequence of (target, source) slices, at most 65536; may be empty.
peer : int
    Rank.
segment, notification, value
    The notification on this rank's board of ``segment``.)" AS_WRITE RAISES
    R"(NotificationError, QueueFullError, PeerLostError, RankError, SegmentError, QueueError
    As for ``write_notify``; nothing is posted if any pair is refused.)" GASPI("read_list_notify");

inline constexpr const char* kNotifyAdd =
    R"(Add to one notification at ``peer``, which counts.

No addition is lost, whichever ranks and threads make them, also while the owner takes what is
there. It never overtakes an earlier write on the same queue to the same peer.)" PARAMETERS
    R"(peer : int
    Rank.
segment : Segment
    Whose board at ``peer`` is meant.
)" AT_PEER R"(value : int, default 1
    1 <= value < 2**32, by which the notification grows.)" AS_WRITE RAISES R"(NotificationError
    Id or value out of range.
QueueFullError, PeerLostError, RankError, SegmentError, QueueError
    As for ``write``.)" NOTES
    R"(Its owner waits with ``notify_wait_count``; ``notify_waitsome`` and ``notify_reset`` see the count
as a value. The count stops at 2**32 - 1, and what comes then is lost: ``notify_wait_count`` raises
NotificationError. ``notify`` on the same id overwrites the count: an id is set or counted, and may
change only once its owner has taken all that was under way. Over verbs the peer's processor adds,
in its waits or heartbeats: 128 additions to a peer that does neither make the next one wait.)";

inline constexpr const char* kWriteNotifyAdd =
    R"(Write ``source`` into ``peer``'s memory, then add to one notification there.

Whoever sees a count that includes it sees every byte, and every byte of earlier writes on the same
queue to the same peer: a target that waits for n writes, in any order, needs one notification.
Returns once posted: leave ``source`` unchanged until ``wait(queue)`` returns.)" PARAMETERS
    R"(source : Slice
    n bytes of a local segment, ``seg[0:4096]``; n = 0 adds to the notification alone.
)" PEER R"(target : Slice
    n bytes of a segment of ``peer``, which also holds the notification.
notification, value
    As for ``notify_add``.
queue, timeout
    As for ``write_notify``.)" RAISES
    R"(NotificationError, QueueFullError, PeerLostError, RankError, SegmentError, QueueError
    As for ``write_notify``; nothing was posted.)" NOTES
    R"(See ``notify_add``. From or to memory of a GPU it first waits for PyTorch's or CuPy's current
stream.)";

inline constexpr const char* kWriteListNotifyAdd =
    R"(Write several slices to one peer, then add to one notification there.)" PARAMETERS
    R"(pairs : Sequence[tuple[Slice, Slice]]
    Sequence of (source, target) slices, at most 65536; may be empty.
peer : int
    Rank.
segment, notification, value
    The notification, as for ``notify_add``.)" AS_WRITE RAISES
    R"(NotificationError, QueueFullError, PeerLostError, RankError, SegmentError, QueueError
    As for ``write_notify_add``; nothing is posted if any pair is refused.)";

inline constexpr const char* kWait =
    R"(Wait until everything posted on ``queue`` is locally complete.

Sources may then change and what was read is here. It says nothing about the peers having seen it:
that is what notifications are for.)" PARAMETERS R"(queue : int, default 0
    A queue's id.
)" TIMEOUT R"(
Raises
------
PgasTimeoutError
    Requests are still under way; call again.
PeerLostError
    A rank was lost meanwhile.
QueueError
    No such queue.)" GASPI("wait");

inline constexpr const char* kNotifyWaitsome =
    R"(Wait until one of a range of notifications is raised here.)" PARAMETERS HERE
    R"(first : int, default 0
    First id of the range.
count : int, optional
    How many ids from ``first`` on: ``notify_waitsome(segment, 7, 1)`` waits for 7 alone.
)" TIMEOUT R"(
Returns
-------
int
    An id that is raised. It stays raised until ``notify_reset``; repeated calls go round the range,
    so that no id starves.)" RAISES R"(PgasTimeoutError
    None is raised; names the range.
PeerLostError
    A rank was lost, or all others have left.
NotificationError
    The range leaves the board.)" NOTES
    R"(A wait spins briefly, then yields, then sleeps; the GIL is not held. GASPI: gaspi_notify_waitsome.)";

inline constexpr const char* kNotifyWaitCount =
    R"(Wait until a notification here has counted to ``count``, and take that much off it.

What was written with the additions that it takes, and with all others up to then, is here. What
counted beyond stays for the next wait.)" PARAMETERS HERE R"(notification : int
    Id.
count : int
    1 <= count < 2**32 - 1.
)" TIMEOUT R"(
Returns
-------
int
    What is left of the count. Several threads may wait for one notification: each takes its own.)" RAISES
    R"(PgasTimeoutError
    Not so much yet; names what is there, and nothing was taken.
PeerLostError
    A rank was lost, or all others have left.
NotificationError
    Id or count out of range; or the notification has counted beyond 2**32 - 2, so that additions
    were lost, until ``notify_reset``.)" NOTES
    R"(It waits as ``notify_waitsome`` does. Peers count by ``notify_add`` and ``write_notify_add``.)";

inline constexpr const char* kNotifyReset =
    R"(Take a notification's value and set it to "not raised", as one atomic operation.)" PARAMETERS HERE
    R"(notification : int
    Id.)" RETURNS_INT
    R"(The value, 0 if it was not raised. Of several threads exactly one gets each value. Of a count
    what there was; what is added from then on counts from 0.)" RAISES R"(NotificationError
    Id out of range.)" GASPI("notify_reset");

inline constexpr const char* kNotifyOn =
    R"(Raise a notification at ``peer`` when a stream of a GPU comes to it; see ``write_notify_on``.)" PARAMETERS STREAM
    R"(peer : int
    Rank.
segment : Segment
    On a GPU; whose board at ``peer`` is meant.
notification, value, queue, timeout
    As for ``notify``.)";

inline constexpr const char* kWriteNotifyOn =
    R"(Write ``source`` into ``peer``'s memory, then raise one notification there, all by a stream.

What the stream did before is in ``source``; what it does later comes after. The host waits for
nothing, if ``peer``'s memory is mapped here; else it waits for the stream, then posts. Without a
stream's name: ``write_notify`` on memory of a GPU follows PyTorch's or CuPy's current stream.)" PARAMETERS STREAM
    R"(source : Slice
    Source or target, or both, are on a GPU.
peer, target, notification, value, queue, timeout
    As for ``write_notify``.)" RAISES R"(UnavailableError
    Nothing of it is on a GPU.
)" STREAM_LOST R"(
QueueFullError, PeerLostError, NotificationError, RankError, SegmentError, QueueError
    As for ``write_notify``.)" NOTES R"(It can be captured into a CUDA graph.)";

inline constexpr const char* kWriteListNotifyOn =
    R"(Write several slices, then raise one notification, all by a stream of a GPU.)" PARAMETERS STREAM
    R"(pairs, peer, segment, notification, value, queue, timeout
    As for ``write_list_notify``. See ``write_notify_on``.)";

inline constexpr const char* kNotifyWaitOn =
    R"(Let a stream of a GPU wait until a notification is raised here; the host goes on.)" PARAMETERS STREAM
    R"(segment : Segment
    On a GPU; whose board on this rank is meant.
notification : int
    Id. It stays raised: see ``notify_reset_on``. Values are below 2**31.
timeout : float, optional
    Seconds; None: the context's default.)" RAISES R"(NotificationError
    Id out of range.
UnavailableError
    The segment is not on a GPU, or the stream is recording a CUDA graph.
)" STREAM_LOST NOTES
    R"(Where an adapter carries notifications (verbs), the processor has to raise them: the call itself
waits, and the stream finds it raised.

If it does not come in time, or a rank is lost, this rank raises it itself, so that the stream goes
on; the next call that names a stream raises PgasTimeoutError or PeerLostError with the reason.)";

inline constexpr const char* kNotifyResetOn =
    R"(Set a notification to "not raised" when a stream of a GPU comes to it.)" PARAMETERS STREAM
    R"(segment : Segment
    On a GPU; whose board on this rank is meant.
notification : int
    Id.)" RAISES R"(NotificationError
    Id out of range.
UnavailableError
    The segment is not on a GPU.
)" STREAM_LOST;

inline constexpr const char* kFetchAdd =
    R"(Add to a 64-bit word of ``peer``'s memory and return its old value.)" PARAMETERS
    R"(target : Slice
    8 bytes of a segment of ``peer``, at a multiple of 8.
peer : int
    Rank.
value : int
    -2**63 <= value < 2**63; the sum wraps.
timeout : float, optional
    Seconds; None: the context's default.)" RETURNS_INT R"(The old value, unsigned.)" RAISES
    R"(AlignmentError
    Not 8 bytes at a multiple of 8.
UnavailableError
    The peer's memory was bound, not created (shm).
PeerLostError, RankError, SegmentError
    As for ``write``.)" GASPI("atomic_fetch_add");

inline constexpr const char* kCompareSwap =
    R"(Replace a 64-bit word of ``peer``'s memory if it has the expected value.)" PARAMETERS
    R"(target : Slice
    8 bytes of a segment of ``peer``, at a multiple of 8.
peer : int
    Rank.
compare : int
    The expected value, -2**63 <= compare < 2**63.
swap : int
    The new value.
timeout : float, optional
    Seconds; None: the context's default.)" RETURNS_INT
    R"(The old value; the exchange took place if it equals ``compare``.)" RAISES
    R"(AlignmentError, UnavailableError, PeerLostError, RankError, SegmentError
    As for ``atomic_fetch_add``.)" GASPI("atomic_compare_swap");

}  // namespace pgasdl::docs

#undef PARAMETERS
#undef RAISES
#undef RETURNS_INT
#undef NOTES
#undef PEER
#undef HERE
#undef AT_PEER
#undef AS_WRITE
#undef PLACE
#undef GASPI
#undef STREAM
#undef TIMEOUT
#undef STREAM_LOST
