// Docstrings of the one-sided operations.
#pragma once

namespace pgasdl::docs {

inline constexpr const char* kWrite = R"(Write ``source`` into ``peer``'s memory.

Returns once posted: leave ``source`` unchanged until ``wait(queue)`` returns. Writes are unordered
among each other; raise a notification after them on the same queue to say that they are there.

Parameters
----------
source : n bytes of a local segment, ``seg[0:4096]``; n = 0 does nothing
peer : rank, 0 <= peer < size
target : n bytes of a segment of ``peer``
queue : order holds inside one queue only
timeout : seconds to wait for a free place; None: the context's default, 0: one try

Raises
------
QueueFull : nothing was posted; ``wait(queue)`` and repeat
PeerLost : ``peer`` is gone
RankError, SegmentError, QueueError : no such rank, slice or queue; nothing was posted

Notes
-----
GASPI: gaspi_write.)";

inline constexpr const char* kRead = R"(Read ``source`` from ``peer``'s memory into ``target``.

The bytes are here once ``wait(queue)`` returns.

Parameters
----------
target : n bytes of a local segment
peer : rank
source : n bytes of a segment of ``peer``
queue, timeout : as for ``write``

Raises
------
QueueFull, PeerLost, RankError, SegmentError, QueueError : as for ``write``

Notes
-----
GASPI: gaspi_read.)";

inline constexpr const char* kWriteList = R"(Write several slices to one peer with one request.

Parameters
----------
pairs : sequence of (source, target) slices, at most 65536
peer, queue, timeout : as for ``write``

Raises
------
as ``write``; nothing is posted if any pair is refused

Notes
-----
GASPI: gaspi_write_list.)";

inline constexpr const char* kReadList = R"(Read several slices from one peer with one request.

Parameters
----------
pairs : sequence of (target, source) slices, at most 65536
peer, queue, timeout : as for ``read``

Raises
------
as ``read``; nothing is posted if any pair is refused

Notes
-----
GASPI: gaspi_read_list.)";

inline constexpr const char* kNotify = R"(Raise one notification at ``peer``.

It never overtakes an earlier write on the same queue to the same peer.

Parameters
----------
peer : rank
segment : whose board at ``peer`` is meant
notification : 0 <= notification < segment.notifications at ``peer``
value : 1 <= value < 2**32; a second one before the reset overwrites the first
queue, timeout : as for ``write``

Raises
------
NotificationError : id or value out of range
QueueFull, PeerLost, RankError, SegmentError, QueueError : as for ``write``

Notes
-----
GASPI: gaspi_notify.)";

inline constexpr const char* kWriteNotify =
    R"(Write ``source`` into ``peer``'s memory, then raise one notification there.

Whoever sees the notification sees every byte, and every byte of earlier writes on the same queue
to the same peer. Returns once posted: leave ``source`` unchanged until ``wait(queue)`` returns.

Parameters
----------
source : n bytes of a local segment, ``seg[0:4096]``; n = 0 raises the notification alone
peer : rank, 0 <= peer < size
target : n bytes of a segment of ``peer``, which also holds the notification
notification : 0 <= notification < segment.notifications at ``peer``
value : 1 <= value < 2**32; 0 means "not raised" and is refused
queue : order holds inside one queue only
timeout : seconds to wait for a free place; None: the context's default, 0: one try

Raises
------
QueueFull : nothing was posted; ``wait(queue)`` and repeat
PeerLost : ``peer`` is gone
NotificationError, RankError, SegmentError, QueueError : out of range; nothing was posted

Notes
-----
shm: a copy, then one store-release. GASPI: gaspi_write_notify.)";

inline constexpr const char* kWriteListNotify =
    R"(Write several slices to one peer, then raise one notification there.

Parameters
----------
pairs : sequence of (source, target) slices, at most 65536; may be empty
peer : rank
segment, notification, value : the notification, as for ``notify``
queue, timeout : as for ``write``

Raises
------
as ``write_notify``; nothing is posted if any pair is refused

Notes
-----
GASPI: gaspi_write_list_notify.)";

inline constexpr const char* kReadNotify = R"(Read from ``peer``, then raise one notification here.

The notification, on the board of ``target``'s segment on this rank, is raised when the bytes are in
local memory.

Parameters
----------
target : n bytes of a local segment; n = 0 raises the notification alone
peer : rank
source : n bytes of a segment of ``peer``
notification, value, queue, timeout : as for ``write_notify``

Raises
------
as ``write_notify``

Notes
-----
GASPI: gaspi_read_notify.)";

inline constexpr const char* kReadListNotify =
    R"(Read several slices from one peer, then raise one notification here.

Parameters
----------
pairs : sequence of (target, source) slices, at most 65536; may be empty
peer : rank
segment, notification, value : the notification on this rank's board of ``segment``
queue, timeout : as for ``write``

Raises
------
as ``write_notify``; nothing is posted if any pair is refused

Notes
-----
GASPI: gaspi_read_list_notify.)";

inline constexpr const char* kWait =
    R"(Wait until everything posted on ``queue`` is locally complete.

Sources may then change and what was read is here. It says nothing about the peers having seen it:
that is what notifications are for.

Parameters
----------
queue : a queue's id
timeout : seconds; None: the context's default, 0: one try

Raises
------
Timeout : requests are still under way; call again
PeerLost : a rank was lost meanwhile
QueueError : no such queue

Notes
-----
GASPI: gaspi_wait.)";

inline constexpr const char* kNotifyWaitsome =
    R"(Wait until one of a range of notifications is raised here.

Parameters
----------
segment : whose board on this rank is meant
first : first id of the range
count : how many ids; None: all from ``first`` on; 0 returns None at once
timeout : seconds; None: the context's default, 0: one try

Returns
-------
int : an id that is raised. It stays raised until ``notify_reset``; repeated calls go round the
    range, so that no id starves.

Raises
------
Timeout : none is raised; names the range
PeerLost : a rank was lost, or all others have left
NotificationError : the range leaves the board

Notes
-----
A wait spins briefly, then yields, then sleeps; the GIL is not held. GASPI: gaspi_notify_waitsome.)";

inline constexpr const char* kNotifyReset =
    R"(Take a notification's value and set it to "not raised", as one atomic operation.

Parameters
----------
segment : whose board on this rank is meant
notification : id

Returns
-------
int : the value, 0 if it was not raised. Of several threads exactly one gets each value.

Raises
------
NotificationError : id out of range

Notes
-----
GASPI: gaspi_notify_reset.)";

inline constexpr const char* kFetchAdd =
    R"(Add to a 64-bit word of ``peer``'s memory and return its old value.

Parameters
----------
target : 8 bytes of a segment of ``peer``, at a multiple of 8
peer : rank
value : -2**63 <= value < 2**63; the sum wraps
timeout : seconds; None: the context's default

Returns
-------
int : the old value, unsigned

Raises
------
AlignmentError : not 8 bytes at a multiple of 8
UnavailableError : the peer's memory was bound, not created (shm)
PeerLost, RankError, SegmentError : as for ``write``

Notes
-----
GASPI: gaspi_atomic_fetch_add.)";

inline constexpr const char* kCompareSwap =
    R"(Replace a 64-bit word of ``peer``'s memory if it has the expected value.

Parameters
----------
target : 8 bytes of a segment of ``peer``, at a multiple of 8
peer : rank
compare : the expected value, 0 <= compare < 2**64
swap : the new value
timeout : seconds; None: the context's default

Returns
-------
int : the old value; the exchange took place if it equals ``compare``

Raises
------
as ``atomic_fetch_add``

Notes
-----
GASPI: gaspi_atomic_compare_swap.)";

}  // namespace pgasdl::docs
