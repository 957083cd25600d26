// The waist: all that the layers above know about a way to move bytes.
//
// Layers above know nothing of shared memory, verbs or MPI; layers below nothing of collectives.
// The layer above has checked all arguments. Contract, tested by tests/contract on every transport:
//   - a flag never overtakes an earlier write on the same queue to the same peer;
//   - writes are unordered among each other;
//   - once complete(queue) has answered true, a source may change and a read's target is here;
//   - no call blocks, allocates, or takes a lock shared by several peers on the data path;
//   - any thread may call any member, except setup (endpoint .. retract), which the layer above
//     serialises.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "memory/device_region.hpp"
#include "memory/region.hpp"
#include "sys/clock.hpp"
#include "sys/error.hpp"
#include "sys/wake_word.hpp"

namespace pgasdl {

using Rank = std::int32_t;
using SegmentId = std::uint32_t;
using QueueId = std::uint32_t;
using FlagWord = std::atomic<std::uint32_t>;

// This rank's own copy of a segment: data, and the board of notification words.
struct LocalSegment {
  SegmentId id = 0;
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  FlagWord* board = nullptr;
  std::uint32_t notifications = 0;
  int device = kHost;        // where the data lie; the board is always on the host
  bool bound = false;        // the data are the caller's memory, not part of a region
  bool needs_flush = false;  // before the device sees an adapter's writes; set by the transport
  std::shared_ptr<Region> region;  // the board, and the data unless bound or on a device
  UniqueFd descriptor;             // of `region`; closed once every peer was offered it
  std::shared_ptr<DeviceRegion> device_region;  // the data, if on a device
  UniqueFd device_descriptor;                   // likewise; not every allocation has one
  std::shared_ptr<void> keep;                   // resources that the transport keeps for it
};

// A peer's copy of a segment, as its transport reaches it.
struct RemoteSegment {
  std::uint64_t bytes = 0;
  std::uint32_t notifications = 0;
  int device = kHost;              // the device of this process that reaches `data`; or kAway
  std::byte* data = nullptr;       // mapped here for direct loads and stores; else null
  FlagWord* board = nullptr;       // likewise
  std::uint64_t address = 0;       // the peer's own address of the data, if not mapped here
  std::shared_ptr<void> keep;      // resources that the transport keeps for it
  std::shared_ptr<Region> region;  // holds the board, if mapped here; for GPUs
};

struct Transfer {
  const LocalSegment* local;
  std::uint64_t local_offset;
  const RemoteSegment* remote;
  std::uint64_t remote_offset;
  std::uint64_t bytes;
};

// Sets one word of a board: at the peer (write) or here (read). At the peer, `add` adds `value`
// instead; no addition is lost, whichever ranks and transports add.
struct RemoteFlag {
  const RemoteSegment* remote;
  std::uint32_t notification;
  std::uint32_t value;
  bool add = false;
  bool again = false;  // a second or a late store does no harm
};
struct LocalFlag {
  const LocalSegment* local;
  std::uint32_t notification;
  std::uint32_t value;
};

// Changes one aligned 64-bit word at the peer; *old has the old value once the queue is complete.
struct Atomic {
  enum class Kind : std::uint8_t { kFetchAdd, kCompareSwap };
  Kind kind;
  const RemoteSegment* remote;
  std::uint64_t offset;
  std::uint64_t operand;  // what to add, or the new value
  std::uint64_t compare;
  std::uint64_t* old;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  // The name of the transport that carries bytes to `peer`.
  virtual std::string_view name_for(Rank /*peer*/) const { return name(); }

  // More state for a log; "" if there is none.
  virtual std::string describe() const { return ""; }

  // --- setup: every rank exchanges its endpoint(), then passes every other rank's to connect().
  virtual std::string endpoint() = 0;
  virtual void connect(Rank peer, const std::string& endpoint) = 0;
  // The word on which `peer` sleeps, mapped here: a transport wakes it after raising a flag.
  virtual void set_wake_word(Rank /*peer*/, WakeWord* /*wake_word*/) {}
  // Makes a segment reachable for `peers`; returns what they need for attach(). The transport may
  // move the segment's memory until all peers are attached.
  virtual std::string publish(LocalSegment& segment, std::span<const Rank> peers) = 0;
  // `device`: the device of this process that is to reach memory on a peer's device; kHost if this
  // rank's own copy is on the host.
  virtual RemoteSegment attach(Rank peer, const std::string& description, int device,
                               Deadline deadline) = 0;
  // Why segments may not lie on a device of this process; "" if they may. Then peers reach them
  // like host memory, and no call returns before the device has done its part.
  virtual std::string refuses_device(int /*device*/) const {
    return text("transport ", name(), " reaches host memory only");
  }
  // Completes a segment once all peers are attached; `remotes` holds their copies by member. A
  // transport does here what needs all members at once, and adds what is known only then. kTimeout:
  // call it again. A member that pauses between calls calls leave(), so that the others do not
  // count on it. Not for transports behind a Router.
  virtual Outcome settle(LocalSegment& /*own*/, std::span<const Rank> /*members*/,
                         std::span<RemoteSegment> /*remotes*/, Deadline /*deadline*/) {
    return Outcome::kDone;
  }
  virtual void leave(LocalSegment& /*own*/) {}
  virtual void retract(const LocalSegment& /*segment*/) {}
  // The service thread polls the descriptor for input and calls service(); -1: none. service()
  // returns true if there is more to do that the descriptor may not show: it handles a limited
  // amount per call, so that a flood of requests does not delay heartbeats.
  virtual int service_descriptor() const { return -1; }
  virtual bool service() { return false; }
  // The context is closed and the service thread has ended: peers hand over nothing from now on.
  // Other threads may still be leaving a call.
  virtual void end_service() {}

  // --- data path. False: the queue is full, and nothing was posted.
  virtual bool post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                          const RemoteFlag* flag) = 0;
  virtual bool post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                         const LocalFlag* flag) = 0;
  virtual bool post_atomic(QueueId queue, Rank peer, const Atomic& atomic) = 0;
  // True if everything posted on `queue` so far is locally complete.
  virtual bool complete(QueueId queue) = 0;
  // True if all sources of writes on `queue`, which has nothing else, may change.
  virtual bool sent(QueueId queue) { return complete(queue); }
  // A read or an atomic on `queue` to `peer` was lost since the last call: no wait may go on.
  virtual bool lost_answers(QueueId /*queue*/, Rank /*peer*/) { return false; }
  // mark() identifies the requests posted on `queue` to `peer` so far; reached() tells whether they
  // have completed or were lost.
  virtual std::uint64_t mark(QueueId /*queue*/, Rank /*peer*/) const { return 0; }
  virtual bool reached(QueueId /*queue*/, Rank /*peer*/, std::uint64_t /*mark*/) const {
    return true;
  }
  // The last post was refused only because the connection to `peer` is still being made.
  virtual bool connecting(QueueId /*queue*/, Rank /*peer*/) const { return false; }
  // The number of peers connected through `queue`, if a connection has a price (a queue pair).
  virtual std::size_t connections(QueueId /*queue*/) const { return 0; }
  // A queue on which `peer` can be written to without a new connection, preferably `queue`; none if
  // there is no connection, so that `peer` would not notice that this rank leaves.
  virtual std::optional<QueueId> connected(QueueId queue, Rank /*peer*/) const { return queue; }
  // Sends `peer` a nonzero word about this rank's end without connecting; it may get lost.
  // farewell() returns the word that `peer` sent, or 0.
  virtual void send_farewell(Rank /*peer*/, std::uint64_t /*word*/) {}
  virtual std::uint64_t farewell(Rank /*peer*/) const { return 0; }
  // Drops the connection to `peer` after a fault; the next operation connects anew.
  virtual void reconnect(Rank /*peer*/) {}
  // `peer` is gone, and requests to it will not complete.
  virtual void lost(Rank /*peer*/) {}
  // Go on without it. True: nothing that it wrote or writes lands in memory here any more, or its
  // process must stay all the same. False: that is certain only once its process has ended, for it
  // may have been stopped within a copy.
  virtual bool forget(Rank /*peer*/) { return false; }
  // Why there never was a connection with `peer`; "" if there was, or it is being made.
  virtual std::string unreached(Rank /*peer*/) const { return ""; }
  // From now on writes that were posted on `queue` need no source outside segments any more.
  virtual void take_over(QueueId /*queue*/) {}
  // Advances work that does not advance by itself; every wait calls it if needs_progress().
  virtual bool needs_progress() const { return false; }
  virtual void progress() {}
  // progress() also advances messages from peers, a few pieces of a long one in each call.
  virtual bool receives_in_progress() const { return false; }
};

}  // namespace pgasdl
