// The one-sided operations of a context: they check arguments, then post to the transport.
#include <algorithm>

#include "pgas/context.hpp"
#include "transport/raise_flag.hpp"

namespace pgasdl {
namespace {

// Texts are made out of line, since every operation has these checks inline.
[[noreturn, gnu::noinline]] void refuse_notification(const Segment& segment, std::uint64_t limit,
                                                     std::uint64_t notification) {
  throw Error(ErrorKind::kNotification, text("notification ", notification, " of segment ",
                                             segment.id(), ": ids run from 0 to ", limit, " - 1"));
}

void check_notification(const Segment& segment, std::uint64_t limit, std::uint64_t notification) {
  if (notification >= limit) [[unlikely]]
    refuse_notification(segment, limit, notification);
}

[[noreturn, gnu::noinline]] void refuse_value(std::uint64_t value) {
  throw Error(ErrorKind::kNotification,
              text("notification value ", value, ": 1 to 2**32 - 1; 0 means \"not raised\""));
}

void check_value(std::uint64_t value) {
  if (value == 0 || value > UINT32_MAX) [[unlikely]]
    refuse_value(value);
}

[[noreturn, gnu::noinline]] void refuse_lost_count(const Segment& segment,
                                                   std::uint64_t notification) {
  throw Error(ErrorKind::kNotification,
              text("notification ", notification, " of segment ", segment.id(),
                   " has counted beyond 2**32 - 2, and what came then is lost: notify_reset() it, "
                   "and take counts more often"));
}

[[noreturn, gnu::noinline]] void refuse_absent(const Segment& segment, Rank peer) {
  throw Error(ErrorKind::kRank,
              text("rank ", peer, " has no copy of segment ", segment.id(), ": not in its group"));
}

const RemoteSegment& remote_of(const Segment& segment, Rank peer) {
  const RemoteSegment* remote = segment.remote(peer);
  if (remote == nullptr) [[unlikely]]
    refuse_absent(segment, peer);
  return *remote;
}

[[noreturn, gnu::noinline]] void refuse_deleted(const Segment& segment) {
  throw Error(ErrorKind::kSegment, text("segment ", segment.id(), " was deleted on this rank"));
}

void require_present(const Segment& segment) {
  if (segment.deleted()) [[unlikely]]
    refuse_deleted(segment);
}

// `peer`: the rank whose copy it is; kHere: this one's.
constexpr Rank kHere = -1;

[[noreturn, gnu::noinline]] void refuse_bounds(const char* side, const Slice& slice,
                                               std::uint64_t limit, Rank peer) {
  const std::string whose = peer == kHere ? "this rank" : text("rank ", peer);
  throw Error(
      ErrorKind::kSegment,
      text(side, " slice [", slice.offset, ":", slice.offset + slice.bytes, "] leaves segment ",
           slice.segment->id(), ", which has ", limit, " bytes on ", whose));
}

void check_bounds(const char* side, const Slice& slice, std::uint64_t limit, Rank peer) {
  if (slice.offset > limit || slice.bytes > limit - slice.offset) [[unlikely]]
    refuse_bounds(side, slice, limit, peer);
}

[[noreturn, gnu::noinline]] void refuse_lengths(std::uint64_t local, std::uint64_t remote,
                                                bool write) {
  throw Error(ErrorKind::kSegment,
              text(write ? "source" : "target", " slice has ", local, " bytes, ",
                   write ? "target" : "source", " slice ", remote));
}

[[noreturn, gnu::noinline]] void refuse_unreached(const Segment& segment, Rank peer) {
  throw Error(ErrorKind::kUnavailable,
              text("memory of segment ", segment.id(), " on a GPU is not written to or read from ",
                   "here (peer: rank ", peer, "), as the transport reaches host memory only or ",
                   "PGASDL_GPU=staged: its arrays take part in collectives, and its ",
                   "notifications work; copy other data through a segment of the host"));
}

Transfer checked_pair(const Pair& pair, Rank peer, bool write) {
  const Slice& local = *pair.local;
  const Slice& remote = *pair.remote;
  require_present(*local.segment);
  const RemoteSegment& there = remote_of(*remote.segment, peer);
  if (local.bytes != remote.bytes) [[unlikely]]
    refuse_lengths(local.bytes, remote.bytes, write);
  check_bounds(write ? "source" : "target", local, local.segment->bytes(), kHere);
  check_bounds(write ? "target" : "source", remote, there.bytes, peer);
  if (!local.segment->reached()) [[unlikely]]
    refuse_unreached(*local.segment, peer);
  if (there.device == kUnreached) [[unlikely]]
    refuse_unreached(*remote.segment, peer);
  return {&local.segment->local(), local.offset, &there, remote.offset, local.bytes};
}

// Inline: every flag needs it.
[[gnu::always_inline]] inline RemoteFlag flag_of(const Segment& segment, Rank peer,
                                                 std::uint64_t notification, std::uint64_t value,
                                                 bool add) {
  const RemoteSegment& there = remote_of(segment, peer);
  check_notification(segment, there.notifications, notification);
  check_value(value);
  return {&there, static_cast<std::uint32_t>(notification), static_cast<std::uint32_t>(value), add};
}

// The transfers of checked pairs; a single one needs no allocation.
class Transfers {
 public:
  Transfers(std::span<const Pair> pairs, Rank peer, bool write) {
    if (pairs.size() == 1) [[likely]] {
      single_ = checked_pair(pairs[0], peer, write);
      transfers_ = {&single_, 1};
    } else if (!pairs.empty()) {
      list_ = checked_list(pairs, peer, write);
      transfers_ = list_;
    }
  }
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;
  std::span<const Transfer> get() const { return transfers_; }

 private:
  Transfer single_;
  std::vector<Transfer> list_;
  std::span<const Transfer> transfers_;
};

// Records the operation when its call ends: reading ticks before the post would delay its flag.
class Recording {
 public:
  Recording(Recorder& recorder, Operation operation, Rank peer, SegmentId segment,
            std::uint64_t detail, std::span<const Pair> pairs)
      : recorder_(recorder),
        operation_(operation),
        peer_(peer),
        segment_(segment),
        detail_(detail),
        bytes_(pairs.empty() ? 0 : pairs[0].local->bytes) {}
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  ~Recording() { recorder_.record(operation_, peer_, segment_, detail_, bytes_); }

 private:
  Recorder& recorder_;
  const Operation operation_;
  const Rank peer_;
  const SegmentId segment_;
  const std::uint64_t detail_;
  const std::uint64_t bytes_;
};

}  // namespace

std::vector<Transfer> checked_list(std::span<const Pair> pairs, Rank peer, bool write) {
  if (pairs.size() > kMaxListElements) {
    throw Error(ErrorKind::kSegment,
                text("a list of ", pairs.size(), " transfers: at most ", kMaxListElements));
  }
  std::vector<Transfer> list;
  list.reserve(pairs.size());
  for (const Pair& pair : pairs) list.push_back(checked_pair(pair, peer, write));
  return list;
}

Outcome Context::take_place_later(QueueId id, Queue& queue, Deadline deadline) {
  std::uint32_t used = queue.used.load(std::memory_order_relaxed);
  for (;;) {
    if (used >= options_.queue_depth) {
      if (deadline.one_try() || wait(id, deadline) != Outcome::kDone) return Outcome::kFull;
      used = queue.used.load(std::memory_order_relaxed);
    } else if (queue.used.compare_exchange_weak(used, used + 1, std::memory_order_relaxed)) {
      return Outcome::kDone;
    }
  }
}

// Never goes below zero: a place is taken before the request is posted, and a wait in another
// thread may already have returned it.
void Context::give_back(Queue& queue, std::uint32_t places) {
  std::uint32_t used = queue.used.load(std::memory_order_relaxed);
  while (!queue.used.compare_exchange_weak(used, used - std::min(used, places),
                                           std::memory_order_relaxed)) {
  }
}

template <typename Post>
Outcome Context::post(QueueId id, Rank peer, const Traffic& traffic, Deadline deadline,
                      Post&& try_post) {
  Queue& queue = queue_at(id);
  if (take_place(id, queue, deadline) != Outcome::kDone) return Outcome::kFull;
  // Before the post: after it, the addition would wait until the flag has left this processor.
  counters_.add(peer, traffic);
  const auto in_turn = [&] { return queued_streams_.passed(id) && try_post(); };
  try {
    if (in_turn()) [[likely]]
      return Outcome::kDone;
    if (post_later(in_turn, deadline) == Outcome::kDone) return Outcome::kDone;
  } catch (const Error& error) {
    counters_.take_back(peer, traffic);
    give_back(queue, 1);
    if (closed()) refuse_use();  // by another thread
    // The transport may notice first that the peer has left.
    if (error.kind() == ErrorKind::kPeerLost && error.rank() == peer) {
      liveness_.note_end(peer);
      liveness_.require(peer, "posting");
    } else {
      liveness_.hear(peer);
    }
    throw;
  }
  counters_.take_back(peer, traffic);
  give_back(queue, 1);
  return transport_->connecting(id, peer) ? Outcome::kConnecting : Outcome::kFull;
}

Outcome Context::post_later(const std::function<bool()>& in_turn, Deadline deadline) {
  const Waiter::Expectation expectation(&waiter_);
  return waiter_.until(
      [&] {
        if (progresses_) transport_->progress();
        return in_turn();
      },
      deadline, WaitCause::kQueueFull, "posting");
}

// Sends marks on the same queue, ahead of the flag that needs them.
bool Context::tell_block(const Segment& segment, const RemoteFlag& flag, Rank peer, QueueId queue) {
  const std::uint32_t notifications = flag.remote->notifications;
  const std::uint32_t connection = reconnections_.load(std::memory_order_acquire);
  const std::uint32_t first = region_mark(notifications, 0);
  const std::uint32_t n_marks = regions_of(notifications) + blocks_of(notifications);
  const std::uint32_t block = block_mark(notifications, flag.notification);
  ToldMarks& told = *segment.told_marks();
  if (told.knows(peer, queue, connection, block - first)) return true;
  for (const std::uint32_t mark : {region_mark(notifications, flag.notification), block}) {
    // Sends each mark once, even if the queue takes one request at a time.
    if (told.knows(peer, queue, connection, mark - first)) continue;
    const RemoteFlag there{flag.remote, mark, 1, false, true};  // `again`: a mark is never reset
    if (!transport_->post_write(queue, peer, {}, &there)) return false;
    told.note(peer, queue, connection, mark - first, n_marks);
  }
  return true;
}

Outcome Context::write(std::span<const Pair> pairs, Rank peer, QueueId queue, Deadline deadline) {
  require_peer(peer, "write");
  const Transfers transfers(pairs, peer, true);
  const Recording recording(recorder_, Operation::kWrite, peer,
                            pairs.empty() ? 0 : pairs[0].remote->segment->id(), 0, pairs);
  return post(queue, peer, traffic_written(transfers.get(), false), deadline,
              [&] { return transport_->post_write(queue, peer, transfers.get(), nullptr); });
}

Outcome Context::read(std::span<const Pair> pairs, Rank peer, QueueId queue, Deadline deadline) {
  require_peer(peer, "read");
  const Transfers transfers(pairs, peer, false);
  const Recording recording(recorder_, Operation::kRead, peer,
                            pairs.empty() ? 0 : pairs[0].remote->segment->id(), 0, pairs);
  return post(queue, peer, traffic_read(transfers.get()), deadline,
              [&] { return transport_->post_read(queue, peer, transfers.get(), nullptr); });
}

Outcome Context::notify(Rank peer, const Segment& segment, std::uint64_t notification,
                        std::uint64_t value, QueueId queue, Deadline deadline) {
  return write_notify({}, peer, segment, notification, value, queue, deadline);
}

RemoteFlag Context::checked_flag(const Segment& segment, Rank peer, std::uint64_t notification,
                                 std::uint64_t value) const {
  return flag_of(segment, peer, notification, value, false);
}

const FlagWord& Context::own_word(const Segment& segment, std::uint64_t notification) {
  require_present(segment);
  check_notification(segment, segment.notifications(), notification);
  return segment.local().board[notification];
}

Outcome Context::write_notify(std::span<const Pair> pairs, Rank peer, const Segment& segment,
                              std::uint64_t notification, std::uint64_t value, QueueId queue,
                              Deadline deadline) {
  require_peer(peer, "write_notify");
  const Transfers transfers(pairs, peer, true);
  const RemoteFlag flag = flag_of(segment, peer, notification, value, false);
  const Recording recording(recorder_, pairs.empty() ? Operation::kNotify : Operation::kWriteNotify,
                            peer, segment.id(), notification, pairs);
  return post(queue, peer, traffic_written(transfers.get(), true), deadline, [&] {
    return mark_block(segment, flag, peer, queue) &&
           transport_->post_write(queue, peer, transfers.get(), &flag);
  });
}

Outcome Context::write_notify_add(std::span<const Pair> pairs, Rank peer, const Segment& segment,
                                  std::uint64_t notification, std::uint64_t value, QueueId queue,
                                  Deadline deadline) {
  require_peer(peer, "write_notify_add");
  const Transfers transfers(pairs, peer, true);
  const RemoteFlag flag = flag_of(segment, peer, notification, value, true);
  const Recording recording(recorder_,
                            pairs.empty() ? Operation::kNotifyAdd : Operation::kWriteNotifyAdd,
                            peer, segment.id(), notification, pairs);
  return post(queue, peer, traffic_written(transfers.get(), true), deadline, [&] {
    return mark_block(segment, flag, peer, queue) &&
           transport_->post_write(queue, peer, transfers.get(), &flag);
  });
}

Outcome Context::read_notify(std::span<const Pair> pairs, Rank peer, const Segment& segment,
                             std::uint64_t notification, std::uint64_t value, QueueId queue,
                             Deadline deadline) {
  require_peer(peer, "read_notify");
  const Transfers transfers(pairs, peer, false);
  require_present(segment);
  check_notification(segment, segment.notifications(), notification);
  check_value(value);
  const LocalFlag flag{&segment.local(), static_cast<std::uint32_t>(notification),
                       static_cast<std::uint32_t>(value)};
  set_marks(segment.local().board, segment.notifications(), flag.notification);
  const Recording recording(recorder_, Operation::kReadNotify, peer, segment.id(), notification,
                            pairs);
  return post(queue, peer, traffic_read(transfers.get()), deadline,
              [&] { return transport_->post_read(queue, peer, transfers.get(), &flag); });
}

bool Context::complete(QueueId id) { return ask(id, &Transport::complete); }
bool Context::sent(QueueId id) { return ask(id, &Transport::sent); }

bool Context::ask(QueueId id, bool (Transport::*question)(QueueId)) {
  try {
    return (*transport_.*question)(id);
  } catch (const Error& error) {
    // A plan's late write to a rank that has given it up.
    if (error.kind() == ErrorKind::kSegment && id == plan_queue()) return false;
    if (error.kind() != ErrorKind::kPeerLost || error.rank() < 0) throw;
    if (closed()) refuse_use();
    liveness_.note_end(error.rank());
    liveness_.require(rank(), "wait(queue)");  // peers end connections with one that was stopped
    // A rank that left in peace or whose loss was accepted is no reason to fail a wait.
    const Health health = liveness_.health(error.rank());
    const bool harmless = health == Health::kClosed || liveness_.accepted(error.rank());
    if (harmless && !transport_->lost_answers(id, error.rank())) return false;
    throw;
  }
}

Outcome Context::wait(QueueId id, Deadline deadline) {
  require_usable();
  Queue& queue = queue_at(id);
  const std::uint32_t posted = queue.used.load(std::memory_order_relaxed);
  // If another thread has waited, this thread's requests may be counted no longer and still be
  // under way: the transport knows.
  const bool streamed = !queued_streams_.passed(id);
  if (posted == 0 && !progresses_ && !streamed) return Outcome::kDone;
  recorder_.record(Operation::kWaitQueue, -1, 0, id, 0);
  const Waiter::Expectation expectation(streamed ? &waiter_ : nullptr);
  const Outcome outcome = waiter_.until(
      [&] {
        if (progresses_) transport_->progress();
        return queued_streams_.passed(id) && complete(id);
      },
      deadline, WaitCause::kQueue, "wait(queue)");
  if (outcome == Outcome::kDone) {
    give_back(queue, posted);
    flush_adapters_writes();
  }
  return outcome;
}

Outcome Context::notify_waitsome(Segment& segment, std::uint64_t first, std::uint64_t count,
                                 Deadline deadline, std::uint32_t& found) {
  require_usable();
  require_present(segment);
  const std::uint64_t limit = segment.notifications();
  if (first > limit || count > limit - first) [[unlikely]] {
    throw Error(ErrorKind::kNotification,
                text("notifications [", first, ", ", first, " + ", count, ") of segment ",
                     segment.id(), ": ids run from 0 to ", limit, " - 1"));
  }
  const std::uint64_t began = ticks();  // before the wait, to delay nothing after it
  FlagWord* const board = segment.local().board;
  const auto begin = static_cast<std::uint32_t>(first);
  const auto end = static_cast<std::uint32_t>(first + count);
  const auto find = [&](std::uint32_t from, std::uint32_t to) {
    return find_raised(board, segment.notifications(), from, to, found);
  };
  const auto ready = [&] {
    if (progresses_) transport_->progress();
    if (count == 1) {
      found = begin;
      return board[begin].load(std::memory_order_acquire) != 0;
    }
    const std::uint32_t last = segment.scan_from.load(std::memory_order_relaxed);
    const std::uint32_t from = last >= begin && last < end ? last : begin;
    if (!find(from, end) && !find(begin, from)) return false;
    segment.scan_from.store(found + 1, std::memory_order_relaxed);
    return true;
  };
  const auto name = [&] {
    return text("notify_waitsome on notifications [", first, ", ", first + count, ") of segment ",
                segment.id());
  };
  bool noted = deadline.one_try();
  const auto slow = [&] {
    mark_raised(board, segment.notifications(), begin, end);
    if (!std::exchange(noted, true)) liveness_.note_wait(name(), deadline.since());
    if (liveness_.everybody_left()) {
      throw Error(ErrorKind::kPeerLost, name() + ": every other rank has left");
    }
  };
  // A stream may raise it, which wakes no thread.
  const Waiter::Expectation expectation(segment.device() != kHost ? &waiter_ : nullptr);
  const Outcome outcome =
      waiter_.until(ready, slow, deadline, WaitCause::kNotification, "notify_waitsome");
  if (outcome == Outcome::kDone) {
    recorder_.record(Operation::kWaitsome, -1, segment.id(), found, 0, began);
    flush_adapters_writes();
  }
  return outcome;
}

Outcome Context::notify_wait_count(Segment& segment, std::uint64_t notification,
                                   std::uint64_t count, Deadline deadline, std::uint32_t& left) {
  require_usable();
  require_present(segment);
  check_notification(segment, segment.notifications(), notification);
  if (count == 0 || count >= kCountLost) [[unlikely]] {
    throw Error(ErrorKind::kNotification,
                text("a wait for a count of ", count, ": 1 to 2**32 - 2"));
  }
  const std::uint64_t began = ticks();
  FlagWord& word = segment.local().board[notification];
  const auto wanted = static_cast<std::uint32_t>(count);
  const auto ready = [&] {
    if (progresses_) transport_->progress();
    std::uint32_t there = word.load(std::memory_order_relaxed);
    while (there >= wanted) {
      if (there == kCountLost) [[unlikely]]
        refuse_lost_count(segment, notification);
      if (word.compare_exchange_weak(there, there - wanted, std::memory_order_acq_rel,
                                     std::memory_order_relaxed)) {
        left = there - wanted;
        return true;
      }
    }
    left = there;
    return false;
  };
  const auto name = [&] {
    return text("notify_wait_count on notification ", notification, " of segment ", segment.id(),
                ", which stands at ", left, " of ", count);
  };
  bool noted = deadline.one_try();
  const auto slow = [&] {
    if (!std::exchange(noted, true)) liveness_.note_wait(name(), deadline.since());
    if (liveness_.everybody_left()) {
      throw Error(ErrorKind::kPeerLost, name() + ": every other rank has left");
    }
  };
  const Outcome outcome =
      waiter_.until(ready, slow, deadline, WaitCause::kNotification, "notify_wait_count");
  if (outcome == Outcome::kDone) {
    recorder_.record(Operation::kWaitCount, -1, segment.id(), notification, 0, began);
    flush_adapters_writes();
  }
  return outcome;
}

std::uint32_t Context::notify_reset(Segment& segment, std::uint64_t notification) {
  require_usable();
  require_present(segment);
  check_notification(segment, segment.notifications(), notification);
  FlagWord& word = segment.local().board[notification];
  // If it is 0, leave the cache line with the processor that is about to write it.
  if (word.load(std::memory_order_relaxed) == 0) {
    if (!progresses_) return 0;
    transport_->progress();  // a thread may wait by polling this call only
    if (word.load(std::memory_order_relaxed) == 0) return 0;
  }
  const std::uint32_t value = word.exchange(0, std::memory_order_acq_rel);
  if (value != 0) flush_adapters_writes();  // a flag may be found without a wait
  return value;
}

void Context::flush_devices() const {
  // CUflushGPUDirectRDMAWritesTarget: the current context; the scope is its own GPU.
  constexpr int kCurrentContext = 0;
  constexpr int kToOwner = 100;
  const std::uint64_t devices = flushed_devices_.load(std::memory_order_relaxed);
  for (int device = 0; device < 64; ++device) {
    if ((devices >> device & 1) == 0) continue;
    const cuda::Current current(device);
    cuda::check(cuda::driver().flush_gpu_direct_rdma_writes(kCurrentContext, kToOwner),
                text("letting GPU ", device, " see what an adapter has written"));
  }
}

Outcome Context::atomic(Atomic::Kind kind, const Slice& target, Rank peer, std::uint64_t operand,
                        std::uint64_t compare, Deadline deadline, std::uint64_t& old) {
  require_peer(peer, "atomic");
  const RemoteSegment& there = remote_of(*target.segment, peer);
  if (target.bytes != 8 || target.offset % 8 != 0) {
    throw Error(ErrorKind::kAlignment,
                text("an atomic's target is 8 bytes at a multiple of 8, not ", target.bytes,
                     " bytes at ", target.offset));
  }
  check_bounds("target", target, there.bytes, peer);
  if (there.device != kHost) {
    throw Error(ErrorKind::kUnavailable,
                text("atomics on rank ", peer, "'s memory of a GPU (segment ", target.segment->id(),
                     "): keep the words in a segment of the host"));
  }
  recorder_.record(Operation::kAtomic, peer, target.segment->id(), target.offset, 8);
  // The result may arrive after this call gave up, so it needs memory that outlives the call.
  struct Late {
    explicit Late(Context& owner) : context(owner) {}
    ~Late() {
      if (!posted || done) return;
      const std::lock_guard lock(context.queue_mutex_);
      context.late_.push_back(std::move(old));
    }
    Context& context;
    std::unique_ptr<std::uint64_t> old;
    bool posted = false;
    bool done = false;
  } late(*this);
  if (progresses_) late.old = std::make_unique<std::uint64_t>();
  const Atomic request{kind,    &there,  target.offset,
                       operand, compare, progresses_ ? late.old.get() : &old};
  const Outcome outcome = waiter_.until(
      [&] {
        if (!late.posted && transport_->post_atomic(atomic_queue(), peer, request)) {
          late.posted = true;
          counters_.add(peer, {.messages_written = 1});
        }
        if (progresses_) transport_->progress();
        return late.posted && complete(atomic_queue());
      },
      // A posted atomic will change the peer's memory, so a single try must not give up at once.
      deadline.one_try() ? Deadline::in(options_.timeout) : deadline, WaitCause::kAtomic,
      "an atomic");
  late.done = outcome == Outcome::kDone;
  if (late.done && progresses_) old = *late.old;
  return outcome;
}

}  // namespace pgasdl
