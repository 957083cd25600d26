// One rank of a job: its transport, its queues, and the one-sided operations.
//
// Every argument is checked here, once, for all transports. Threads: every operation may be called
// from any thread; setup, close() and the destructor from one. Offsets and lengths are bytes.
//
// Errors of every operation: kClosed after close() and in a forked child, kRank for a rank that
// does not exist, kPeerLost for one that is gone, kQueue for a queue that does not exist, kSegment
// for a slice that leaves its segment or a segment that was deleted here, kNotification for an id
// beyond the board or a value outside 1 .. 2**32 - 1. Nothing was posted then.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memory/device_stream.hpp"
#include "pgas/counters.hpp"
#include "pgas/liveness.hpp"
#include "pgas/options.hpp"
#include "pgas/queued_streams.hpp"
#include "pgas/recorder.hpp"
#include "pgas/segment.hpp"
#include "pgas/stream_waits.hpp"
#include "pgas/waiter.hpp"

namespace pgasdl {

inline constexpr const char* kStreamWait = "a stream's wait for a notification";

class Group;

// A write copies from `local` to `remote`, a read from `remote` to `local`.
struct Pair {
  const Slice* local;
  const Slice* remote;
};

// Checks pairs and makes the transport's transfers; throws as operations do.
std::vector<Transfer> checked_list(std::span<const Pair> pairs, Rank peer, bool write);

class Context {
 public:
  Context(Rank rank, Rank size, std::unique_ptr<Transport> transport, const Options& options);
  ~Context();

  // --- setup (gaspi_proc_init, gaspi_proc_term): endpoint() of all ranks to connect(), then
  // open() of all ranks to join(). kMismatch: ranks of another version, or with other options.
  std::string endpoint();
  void connect(const std::vector<std::string>& endpoints);
  std::string open();
  void join(const std::vector<std::string>& descriptions, Deadline deadline);
  // The error that is about to end this rank, in few words: other ranks' errors quote it.
  void give_reason(std::string_view reason) {
    if (!inherited()) liveness_.give_reason(reason);
  }
  // Leaves the job; `failed` reports a failure to the other ranks. Idempotent.
  void close(bool failed);

  Rank rank() const { return rank_; }
  Rank size() const { return size_; }
  const Options& options() const { return options_; }
  // Why peers do not reach segments on a GPU of this process; "": they do, as if on the host.
  std::string why_unreached(int device) const {
    return options_.reach_devices ? transport_->refuses_device(device) : "PGASDL_GPU=staged";
  }
  // Kernels of this GPU see an adapter's writes only after a flush: from now on every wait flushes.
  void flush_before_kernels(int device) {
    flushed_devices_.fetch_or(std::uint64_t{1} << device, std::memory_order_relaxed);
  }
  // Inline: every wait ends with this call, before the program can launch a kernel.
  [[gnu::always_inline]] void flush_adapters_writes() const {
    if (flushed_devices_.load(std::memory_order_relaxed) != 0) [[unlikely]]
      flush_devices();
  }
  Transport& transport() { return *transport_; }
  Liveness& liveness() { return liveness_; }
  Recorder& recorder() { return recorder_; }
  Waiter& waiter() { return waiter_; }
  const std::shared_ptr<Group>& world() const { return world_; }
  bool closed() const { return closed_.load(std::memory_order_relaxed); }
  pid_t pid_of(Rank peer) const { return pids_[static_cast<std::size_t>(peer)]; }
  // One rank names each segment, and no two ranks use the same names: overlapping groups cannot
  // agree on a name when both create a segment at the same time.
  SegmentId next_segment_id() {
    return n_segments_.fetch_add(1, std::memory_order_relaxed) * static_cast<SegmentId>(size_) +
           static_cast<SegmentId>(rank_);
  }

  // --- posting. kFull: nothing was posted; kConnecting: likewise, while the connection to `peer`
  // is being made. A source may change, and a read's target is here, once wait(queue) is done.
  // Writes are unordered among each other; a notification never overtakes earlier requests of its
  // queue to its peer. gaspi_write, gaspi_write_list: at most kMaxListElements pairs of equal
  // lengths.
  Outcome write(std::span<const Pair> pairs, Rank peer, QueueId queue, Deadline deadline);
  // gaspi_read, gaspi_read_list.
  Outcome read(std::span<const Pair> pairs, Rank peer, QueueId queue, Deadline deadline);
  // gaspi_notify: the peer's word `notification` of `segment` becomes `value`.
  Outcome notify(Rank peer, const Segment& segment, std::uint64_t notification, std::uint64_t value,
                 QueueId queue, Deadline deadline);
  // gaspi_write_notify, gaspi_write_list_notify: the flag after the bytes, in one request.
  Outcome write_notify(std::span<const Pair> pairs, Rank peer, const Segment& segment,
                       std::uint64_t notification, std::uint64_t value, QueueId queue,
                       Deadline deadline);
  // A counted notification: adds `value` to the peer's word, which stops at kCountLost. No addition
  // is lost, whichever ranks add.
  Outcome write_notify_add(std::span<const Pair> pairs, Rank peer, const Segment& segment,
                           std::uint64_t notification, std::uint64_t value, QueueId queue,
                           Deadline deadline);
  // gaspi_read_notify, gaspi_read_list_notify: raises this rank's word when the bytes are here.
  Outcome read_notify(std::span<const Pair> pairs, Rank peer, const Segment& segment,
                      std::uint64_t notification, std::uint64_t value, QueueId queue,
                      Deadline deadline);

  // --- waiting: kDone or kTimeout. Throws kPeerLost if a loss is reported meanwhile, or if the
  // awaited event can no longer come. The transport's answer, except that it ignores faults of
  // ranks that left in peace and of losses that survivors() accepted.
  bool complete(QueueId queue);
  // Likewise: whether sources of writes may change.
  bool sent(QueueId queue);
  // gaspi_wait: everything posted on `queue` before is locally complete.
  Outcome wait(QueueId queue, Deadline deadline);
  // gaspi_notify_waitsome: finds a raised id of [first, first + count), round-robin.
  Outcome notify_waitsome(Segment& segment, std::uint64_t first, std::uint64_t count,
                          Deadline deadline, std::uint32_t& found);
  // Waits until the word is at least `count` and subtracts that; `left` is what remains. If several
  // threads wait, each takes its own count. kNotification if the count was lost.
  Outcome notify_wait_count(Segment& segment, std::uint64_t notification, std::uint64_t count,
                            Deadline deadline, std::uint32_t& left);
  // gaspi_notify_reset: returns the value and sets it to 0. Only one of several threads gets it.
  std::uint32_t notify_reset(Segment& segment, std::uint64_t notification);

  // --- ordered on a GPU's stream: enqueued there; the host does not wait. If an earlier stream's
  // wait was ended without its notification, the next stream operation throws kTimeout or kPeerLost
  // for it. Takes a place in its queue like every post, and keeps the queue's order. Null: a peer's
  // memory is not mapped here, and nothing was posted.
  std::optional<Outcome> write_notify_on(const StreamOrder& order, std::span<const Pair> pairs,
                                         Rank peer, const std::shared_ptr<Segment>& segment,
                                         std::uint64_t notification, std::uint64_t value,
                                         QueueId queue, Deadline deadline);
  // The stream continues when the notification is raised, to a value below 2**31.
  void notify_wait_on(const StreamOrder& order, const std::shared_ptr<Segment>& segment,
                      std::uint64_t notification, Deadline deadline);
  void notify_reset_on(const StreamOrder& order, const std::shared_ptr<Segment>& segment,
                       std::uint64_t notification);

  // --- atomics on 64-bit words (gaspi_atomic_fetch_add, gaspi_atomic_compare_swap); they return
  // when the old value is here. kAlignment unless the target is 8 bytes at a multiple of 8.
  // kTimeout: if the atomic was posted, it may still change the peer's memory.
  Outcome atomic(Atomic::Kind kind, const Slice& target, Rank peer, std::uint64_t operand,
                 std::uint64_t compare, Deadline deadline, std::uint64_t& old);

  // Accepts the losses so far (survivors()). What this rank's plans had posted to the others has
  // arrived then: their arrays are theirs again once all survivors have called this. Returns the
  // ranks whose processes it ended.
  std::vector<Rank> acknowledge();

  // --- queues 0 .. options.queues - 1 (gaspi_queue_create, gaspi_queue_delete, gaspi_queue_size);
  // Higher numbers are the library's own queues.
  QueueId queue_create();
  void queue_delete(QueueId queue);
  // Drops the connections to `peer` after a fault; operations make new ones when they need them.
  void reconnect(Rank peer);
  std::uint32_t queue_size(QueueId queue) const;
  static constexpr std::uint32_t kOwnQueues = 3;
  QueueId internal_queue() const { return options_.queues; }
  // The queue of atomics alone: the loss of a heartbeat by reconnect() is no error of an atomic.
  QueueId atomic_queue() const { return options_.queues + 1; }
  QueueId plan_queue() const { return options_.queues + 2; }

  // --- the price of this rank: bytes of the groups' own memory, and how many connections (such as
  // queue pairs) the queues [first, end) hold.
  std::uint64_t own_bytes() const { return own_bytes_.load(std::memory_order_relaxed); }
  void count_own_bytes(std::int64_t more) {
    own_bytes_.fetch_add(static_cast<std::uint64_t>(more), std::memory_order_relaxed);
  }
  std::size_t connections(QueueId first, QueueId end) const;
  // Traffic of operations and plans, not of the library (barriers, all-gathers, mail, heartbeats).
  Counters& counters() { return counters_; }
  // Transport::publish, counted as a registration.
  std::string publish(LocalSegment& segment, std::span<const Rank> peers);

  // This process is a forked child of the one that made the context, and has none of its threads.
  bool inherited() const { return forked_since(fork_depth_); }
  // Throws unless this process can use the context now.
  void require_usable() const {
    if (inherited() || closed()) [[unlikely]]
      refuse_use();
  }
  void require_peer(Rank peer, const char* operation) const {
    require_usable();
    if (peer < 0 || peer >= size_) [[unlikely]]
      refuse_rank(peer, operation);
    liveness_.require(peer, operation);
    liveness_.require(rank_, operation);
  }

 private:
  struct Queue {
    std::atomic<std::uint32_t> used{0};
    std::atomic<bool> exists{false};
  };
  // Waits until everything posted has arrived or never will.
  void drain(Deadline deadline);
  // Ends waits of streams that must not last; true if none of their work is left.
  bool look_after_streams(bool a_rank_is_lost);
  bool ask(QueueId queue, bool (Transport::*question)(QueueId));
  [[noreturn]] void refuse_use() const;
  void flush_devices() const;
  [[noreturn]] void refuse_rank(Rank peer, const char* operation) const;
  [[noreturn]] void refuse_queue(QueueId queue) const;
  Queue& queue_at(QueueId queue) {
    if (queue >= options_.queues || !queues_[queue].exists.load(std::memory_order_relaxed))
        [[unlikely]] {
      refuse_queue(queue);
    }
    return queues_[queue];
  }
  // Inline: it comes before every post.
  [[gnu::always_inline]] Outcome take_place(QueueId id, Queue& queue, Deadline deadline) {
    std::uint32_t used = queue.used.load(std::memory_order_relaxed);
    while (used < options_.queue_depth) [[likely]] {
      if (queue.used.compare_exchange_weak(used, used + 1, std::memory_order_relaxed)) [[likely]]
        return Outcome::kDone;
    }
    return take_place_later(id, queue, deadline);
  }
  // For a full queue.
  Outcome take_place_later(QueueId id, Queue& queue, Deadline deadline);
  static void give_back(Queue& queue, std::uint32_t places);
  // Counts `traffic` once if the request is posted.
  template <typename Post>
  Outcome post(QueueId queue, Rank peer, const Traffic& traffic, Deadline deadline,
               Post&& try_post);
  // For a first try that did not succeed.
  Outcome post_later(const std::function<bool()>& in_turn, Deadline deadline);
  // Precedes every flag of the program (board.hpp). False: the queue is full.
  [[gnu::always_inline]] bool mark_block(const Segment& segment, const RemoteFlag& flag, Rank peer,
                                         QueueId queue) {
    const RemoteSegment& there = *flag.remote;
    if (there.board == nullptr) return tell_block(segment, flag, peer, queue);
    set_marks(there.board, there.notifications, flag.notification);
    return true;
  }
  bool tell_block(const Segment& segment, const RemoteFlag& flag, Rank peer, QueueId queue);
  RemoteFlag checked_flag(const Segment& segment, Rank peer, std::uint64_t notification,
                          std::uint64_t value) const;
  static const FlagWord& own_word(const Segment& segment, std::uint64_t notification);

  const Rank rank_;
  const Rank size_;
  const Options options_;
  const std::uint64_t fork_depth_;
  std::unique_ptr<Transport> transport_;
  const bool progresses_;  // the transport needs calls to advance
  Recorder recorder_;
  Counters counters_;
  Liveness liveness_;
  Waiter waiter_;
  StreamWaits stream_waits_;
  QueuedStreams queued_streams_;
  std::vector<Queue> queues_;
  std::vector<pid_t> pids_;
  std::atomic<std::uint32_t> reconnections_{0};
  std::atomic<std::uint64_t> own_bytes_{0};
  std::shared_ptr<Group> world_;
  std::atomic<SegmentId> n_segments_{0};
  std::atomic<std::uint64_t> flushed_devices_{0};     // one bit for each device
  std::mutex queue_mutex_;                            // create, delete
  std::vector<std::unique_ptr<std::uint64_t>> late_;  // results of atomics that were given up
  std::atomic<bool> closed_{false};
};

}  // namespace pgasdl
