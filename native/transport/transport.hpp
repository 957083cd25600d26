// The waist: all that the layers above know of a way to move bytes.
//
// Above it nothing knows shared memory, verbs or MPI; below it nothing knows collectives. Arguments
// were checked by the layer above. Contract, tested by tests/contract on every transport:
//   - a flag never overtakes an earlier write on the same queue to the same peer;
//   - writes are unordered among each other;
//   - a source may change, and a read's target is here, once complete(queue) answered true;
//   - no call blocks, allocates, or takes a lock shared by several peers on the data path;
//   - every member may be called from any thread, but for setup (endpoint .. retract), which the
//     layer above serialises.
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
  int device = kHost;              // where data lies; the board is always the host's
  bool bound = false;              // data is the caller's memory, not part of a region
  bool needs_flush = false;        // what an adapter has written there; the transport says so
  std::shared_ptr<Region> region;  // the board, and the data unless bound or on a device
  UniqueFd descriptor;             // of `region`; closed once every peer was offered it
  std::shared_ptr<DeviceRegion> device_region;  // of what lies on a device
  UniqueFd device_descriptor;                   // likewise; not every allocation has one
  std::shared_ptr<void> keep;                   // what the transport holds for it
};

// A peer's copy of a segment, as its transport reaches it.
struct RemoteSegment {
  std::uint64_t bytes = 0;
  std::uint32_t notifications = 0;
  int device = kHost;              // of this process, through which `data` is reached; kAway
  std::byte* data = nullptr;       // mapped here, for direct loads and stores; else nullptr
  FlagWord* board = nullptr;       // likewise
  std::uint64_t address = 0;       // the peer's own address of the data, where not mapped
  std::shared_ptr<void> keep;      // what the transport holds for it
  std::shared_ptr<Region> region;  // of the board, where it is mapped here; for GPUs
};

struct Transfer {
  const LocalSegment* local;
  std::uint64_t local_offset;
  const RemoteSegment* remote;
  std::uint64_t remote_offset;
  std::uint64_t bytes;
};

// One word of a board to be set: at the peer (write) or here (read). At the peer `value` may be
// added instead: no addition is ever lost, whoever adds by whichever transport.
struct RemoteFlag {
  const RemoteSegment* remote;
  std::uint32_t notification;
  std::uint32_t value;
  bool add = false;
  bool again = false;  // it may be stored twice, and late
};
struct LocalFlag {
  const LocalSegment* local;
  std::uint32_t notification;
  std::uint32_t value;
};

// On one aligned 64-bit word at the peer; the old value goes to *old by the time of completion.
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

  // More of its state, for a log; "" if there is nothing to say.
  virtual std::string describe() const { return ""; }

  // --- setup: endpoint() of every rank is exchanged, then connect()ed by every other.
  virtual std::string endpoint() = 0;
  virtual void connect(Rank peer, const std::string& endpoint) = 0;
  // Where `peer` sleeps, if its wake word is mapped here: wake it after raising a flag.
  virtual void set_wake_word(Rank /*peer*/, WakeWord* /*wake_word*/) {}
  // Makes a segment reachable for `peers`; the answer is what they need for attach(). The transport
  // may give it other memory until the last of them was attached.
  virtual std::string publish(LocalSegment& segment, std::span<const Rank> peers) = 0;
  // `device`: of this process, which reaches a copy on a peer's; kHost: this rank's is on the host.
  virtual RemoteSegment attach(Rank peer, const std::string& description, int device,
                               Deadline deadline) = 0;
  // Why segments may not lie on a device of this process; "": they may. Peers reach them as if they
  // were host memory, and no call returns before the device has done its part.
  virtual std::string refuses_device(int /*device*/) const {
    return text("transport ", name(), " reaches host memory only");
  }
  // All peers of a segment were attached, and `remotes` is theirs, by member: what can only be done
  // where all members are there at once, and adds what is known only then. kTimeout: they were not;
  // it is to be called again. Whoever does not, for a while, leaves, so that the others do not
  // count on it. Not for transports behind a Router.
  virtual Outcome settle(LocalSegment& /*own*/, std::span<const Rank> /*members*/,
                         std::span<RemoteSegment> /*remotes*/, Deadline /*deadline*/) {
    return Outcome::kDone;
  }
  virtual void leave(LocalSegment& /*own*/) {}
  virtual void retract(const LocalSegment& /*segment*/) {}
  // Peers may read this process's memory wherever it lies, as far as that is up to this process.
  virtual void admit_readers() {}
  // Reads from an address of `peer`'s process; "" or why that cannot be done. From then on, if it
  // could, post_read takes a `remote` that has but an address, and any memory of the host as
  // `local`.
  virtual std::string try_read(Rank /*peer*/, std::uint64_t /*address*/,
                               std::span<std::byte> /*to*/) {
    return text("transport ", name(), " reads segments only");
  }
  virtual bool reads_anywhere(Rank /*peer*/) const { return false; }
  // A descriptor that a service thread should poll for input, and what it does then; -1: none.
  // True: there is more to do, which the descriptor may not tell; whoever asks much at once must
  // not keep the thread from its heartbeats.
  virtual int service_descriptor() const { return -1; }
  virtual bool service() { return false; }
  // The context is closed, and the service thread gone: no peer hands over anything any more. Other
  // threads may still be on their way out of a call.
  virtual void end_service() {}

  // --- data path. False: the queue is full, nothing was posted.
  virtual bool post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                          const RemoteFlag* flag) = 0;
  virtual bool post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                         const LocalFlag* flag) = 0;
  virtual bool post_atomic(QueueId queue, Rank peer, const Atomic& atomic) = 0;
  // Everything posted on `queue` so far is locally complete.
  virtual bool complete(QueueId queue) = 0;
  // A mark of the requests posted on `queue` to `peer` so far, and whether those are complete, or
  // were lost.
  virtual std::uint64_t mark(QueueId /*queue*/, Rank /*peer*/) const { return 0; }
  virtual bool reached(QueueId /*queue*/, Rank /*peer*/, std::uint64_t /*mark*/) const {
    return true;
  }
  // The last post was refused only because the way to `peer` is still being made.
  virtual bool connecting(QueueId /*queue*/, Rank /*peer*/) const { return false; }
  // How many peers `queue` is connected with, where that takes something of each (a queue pair).
  virtual std::size_t connections(QueueId /*queue*/) const { return 0; }
  // The queue by which `peer` is written to without connecting anew, `queue` if it can be; none
  // where we are not connected, and nobody notices that we leave.
  virtual std::optional<QueueId> connected(QueueId queue, Rank /*peer*/) const { return queue; }
  // Tells `peer` a word of this rank's end, not 0, without connecting; it may be lost. And what
  // came of that from `peer`; 0: nothing.
  virtual void send_farewell(Rank /*peer*/, std::uint64_t /*word*/) {}
  virtual std::uint64_t farewell(Rank /*peer*/) const { return 0; }
  // Gives up what connects us with `peer`, after a fault; the next operation connects anew.
  virtual void reconnect(Rank /*peer*/) {}
  // `peer` is no more: nothing that waits for it will end. And: this rank goes on without it.
  virtual void lost(Rank /*peer*/) {}
  virtual void forget(Rank /*peer*/) {}
  // Moves on what cannot move by itself; called by every wait if needs_progress().
  virtual bool needs_progress() const { return false; }
  virtual void progress() {}
  // Messages from peers move on in progress() too, a few pieces of a long one at each call.
  virtual bool receives_in_progress() const { return false; }
};

}  // namespace pgasdl
