#include "pgas/context.hpp"

#include <algorithm>
#include <cstring>

#include "pgas/group.hpp"

namespace pgasdl {
namespace {

// What a rank says of itself before anything is mapped.
struct Introduction {
  std::uint64_t host;
  std::int32_t pid;
  std::uint32_t queue_depth;
  std::uint64_t passive_bytes;
};

void check_notification(const Segment& segment, std::uint64_t limit, std::uint64_t notification) {
  if (notification >= limit) [[unlikely]] {
    throw Error(ErrorKind::kNotification,
                text("notification ", notification, " of segment ", segment.id(),
                     ": ids run from 0 to ", limit, " - 1"));
  }
}

void check_value(std::uint64_t value) {
  if (value == 0 || value > UINT32_MAX) [[unlikely]] {
    throw Error(ErrorKind::kNotification,
                text("notification value ", value, ": 1 to 2**32 - 1; 0 means \"not raised\""));
  }
}

const RemoteSegment& remote_of(const Segment& segment, Rank peer) {
  const RemoteSegment* remote = segment.remote(peer);
  if (remote == nullptr) [[unlikely]] {
    throw Error(ErrorKind::kRank, text("rank ", peer, " has no copy of segment ", segment.id(),
                                       ": not in its group"));
  }
  return *remote;
}

void require_present(const Segment& segment) {
  if (segment.deleted()) [[unlikely]] {
    throw Error(ErrorKind::kSegment, text("segment ", segment.id(), " was deleted on this rank"));
  }
}

void check_bounds(const char* side, const Slice& slice, std::uint64_t limit) {
  if (slice.offset > limit || slice.bytes > limit - slice.offset) [[unlikely]] {
    throw Error(ErrorKind::kSegment, text(side, " slice [", slice.offset, ":", slice.offset, "+",
                                          slice.bytes, "] leaves segment ", slice.segment->id(),
                                          ", which has ", limit, " bytes there"));
  }
}

std::uint64_t host() { return std::hash<std::string>{}(host_identity()); }

}  // namespace

Context::Context(Rank rank, Rank size, std::unique_ptr<Transport> transport, const Options& options)
    : rank_(rank),
      size_(size),
      options_(options),
      fork_depth_(fork_depth()),
      transport_(std::move(transport)),
      progresses_(transport_->needs_progress()),
      liveness_(rank, size, options),
      waiter_(liveness_, options),
      queues_(options.queues + kOwnQueues),
      pids_(static_cast<std::size_t>(size)) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw Error(ErrorKind::kRank, text("rank ", rank, " of ", size, " ranks"));
  }
  waiter_.set_polls(progresses_);
  queues_[0].exists = true;
  queues_[internal_queue()].exists = true;
  queues_[plan_queue()].exists = true;
  liveness_.start(transport_.get());
}

Context::~Context() {
  try {
    close(true);
  } catch (const std::exception&) {
    // A destructor has nobody to tell; close() reports when it is called by name.
  }
}

std::string Context::endpoint() {
  const Introduction introduction{host(), getpid(), options_.queue_depth, options_.passive_bytes};
  return std::string(reinterpret_cast<const char*>(&introduction), sizeof introduction) +
         transport_->endpoint();
}

void Context::connect(const std::vector<std::string>& endpoints) {
  for (Rank peer = 0; peer < size_; ++peer) {
    const std::string& endpoint = endpoints.at(static_cast<std::size_t>(peer));
    Introduction introduction;
    if (endpoint.size() < sizeof introduction) {
      throw Error(ErrorKind::kMismatch, text("malformed endpoint from rank ", peer));
    }
    std::memcpy(&introduction, endpoint.data(), sizeof introduction);
    if (introduction.passive_bytes != options_.passive_bytes) {
      throw Error(ErrorKind::kMismatch, text("rank ", peer, " was started with passive_bytes ",
                                             introduction.passive_bytes, ", rank ", rank_, " with ",
                                             options_.passive_bytes, ": all ranks need the same"));
    }
    pids_[static_cast<std::size_t>(peer)] = introduction.host == host() ? introduction.pid : 0;
    transport_->connect(peer, endpoint.substr(sizeof introduction));
  }
}

std::string Context::open() {
  std::vector<Rank> everybody(static_cast<std::size_t>(size_));
  for (Rank peer = 0; peer < size_; ++peer) everybody[static_cast<std::size_t>(peer)] = peer;
  world_ = std::make_shared<Group>(*this, std::move(everybody), true);
  return world_->describe();
}

void Context::join(const std::vector<std::string>& descriptions, Deadline deadline) {
  world_->attach(descriptions, deadline);
  std::vector<ControlBlock*> blocks;
  std::vector<pid_t> watched;
  std::vector<Rank> unmapped;
  for (Rank peer = 0; peer < size_; ++peer) {
    auto* block = reinterpret_cast<ControlBlock*>(world_->control().remote(peer)->data);
    blocks.push_back(block);
    if (block == nullptr) unmapped.push_back(peer);
    if (block != nullptr) transport_->set_doorbell(peer, &block->doorbell);
    const pid_t pid = pids_[static_cast<std::size_t>(peer)];
    watched.push_back(pid == getpid() ? 0 : pid);
  }
  std::unique_ptr<Gossip> gossip;
  if (!unmapped.empty()) {
    gossip = std::make_unique<Gossip>(*transport_, internal_queue(), rank_, size_,
                                      world_->control(), world_->gossip_offset(), unmapped);
  }
  liveness_.watch(std::move(blocks), watched, std::move(gossip));
}

void Context::close(bool failed) {
  if (closed_.exchange(true)) return;
  if (!inherited()) {
    // What was posted still arrives, unless it cannot.
    const Deadline deadline = Deadline::in(failed ? 0.2 : 5);
    drain(deadline);
    liveness_.pass_on();
    liveness_.report(rank_, failed ? Health::kFailed : Health::kClosed);
    liveness_.take_leave(deadline);
    drain(deadline);
    liveness_.stop();
  }
  // The world's group, its segment and the transport stay until the last reference to the context
  // goes: other threads may still be on their way out of a call.
}

void Context::drain(Deadline deadline) {
  const auto over = [&](QueueId queue) {
    try {
      return transport_->complete(queue);
    } catch (const Error&) {
      return false;  // a peer is gone, and what was for it; each is told of once
    }
  };
  for (QueueId queue = 0; queue < queues_.size(); ++queue) {
    while (!over(queue) && !deadline.passed()) {
      transport_->progress();
      std::this_thread::yield();
    }
  }
}

void Context::require_usable() const {
  if (inherited()) [[unlikely]] {
    throw Error(ErrorKind::kClosed,
                text("rank ", rank_,
                     "'s context belongs to the parent process: a forked child "
                     "cannot use it (start workers with spawn, or keep pgasdl out of them)"));
  }
  if (closed()) [[unlikely]] {
    throw Error(ErrorKind::kClosed, text("rank ", rank_, "'s context is closed"));
  }
}

void Context::require_peer(Rank peer, const char* operation) const {
  require_usable();
  if (peer < 0 || peer >= size_) [[unlikely]] {
    throw Error(ErrorKind::kRank,
                text(operation, " to rank ", peer, ": ranks are 0 to ", size_ - 1));
  }
  liveness_.require(peer, operation);
  if (liveness_.health(rank_) != Health::kHealthy) [[unlikely]] {
    liveness_.require(rank_, operation);
  }
}

Context::Queue& Context::queue_at(QueueId queue) {
  if (queue >= options_.queues || !queues_[queue].exists.load(std::memory_order_relaxed)) {
    throw Error(ErrorKind::kQueue, text("queue ", queue,
                                        " does not exist (queue_create() makes "
                                        "one, at most ",
                                        options_.queues, ")"));
  }
  return queues_[queue];
}

Outcome Context::take_place(QueueId id, Queue& queue, Deadline deadline) {
  while (queue.used.fetch_add(1, std::memory_order_relaxed) >= options_.queue_depth) [[unlikely]] {
    queue.used.fetch_sub(1, std::memory_order_relaxed);
    if (deadline.one_try() || wait(id, deadline) != Outcome::kDone) return Outcome::kFull;
  }
  return Outcome::kDone;
}

template <typename Post>
Outcome Context::post(QueueId id, Rank peer, Deadline deadline, Post&& try_post) {
  Queue& queue = queue_at(id);
  if (take_place(id, queue, deadline) != Outcome::kDone) return Outcome::kFull;
  if (try_post()) [[likely]]
    return Outcome::kDone;
  const Outcome outcome = waiter_.until(
      [&] {
        if (progresses_) transport_->progress();
        return try_post();
      },
      deadline, "posting");
  if (outcome == Outcome::kDone) return outcome;
  queue.used.fetch_sub(1, std::memory_order_relaxed);
  return transport_->connecting(id, peer) ? Outcome::kConnecting : Outcome::kFull;
}

std::span<const Transfer> Context::checked(std::span<const Pair> pairs, Rank peer, bool write,
                                           std::vector<Transfer>& list, Transfer& single) const {
  if (pairs.size() > kMaxListElements) {
    throw Error(ErrorKind::kSegment,
                text("a list of ", pairs.size(), " transfers: at most ", kMaxListElements));
  }
  if (pairs.size() > 1) list.reserve(pairs.size());
  for (const Pair& pair : pairs) {
    const Slice& local = *pair.local;
    const Slice& remote = *pair.remote;
    require_present(*local.segment);
    const RemoteSegment& there = remote_of(*remote.segment, peer);
    if (local.bytes != remote.bytes) [[unlikely]] {
      throw Error(ErrorKind::kSegment,
                  text(write ? "source" : "target", " slice has ", local.bytes, " bytes, ",
                       write ? "target" : "source", " slice ", remote.bytes));
    }
    check_bounds(write ? "source" : "target", local, local.segment->bytes());
    check_bounds(write ? "target" : "source", remote, there.bytes);
    const Transfer transfer{&local.segment->local(), local.offset, &there, remote.offset,
                            local.bytes};
    if (pairs.size() == 1) {
      single = transfer;
    } else {
      list.push_back(transfer);
    }
  }
  return pairs.size() == 1 ? std::span<const Transfer>(&single, 1)
                           : std::span<const Transfer>(list);
}

Outcome Context::write(std::span<const Pair> pairs, Rank peer, QueueId queue, Deadline deadline) {
  require_peer(peer, "write");
  std::vector<Transfer> list;
  Transfer single;
  const auto transfers = checked(pairs, peer, true, list, single);
  recorder_.record(Operation::kWrite, peer, pairs.empty() ? 0 : pairs[0].remote->segment->id(), 0,
                   pairs.empty() ? 0 : pairs[0].local->bytes);
  return post(queue, peer, deadline,
              [&] { return transport_->post_write(queue, peer, transfers, nullptr); });
}

Outcome Context::read(std::span<const Pair> pairs, Rank peer, QueueId queue, Deadline deadline) {
  require_peer(peer, "read");
  std::vector<Transfer> list;
  Transfer single;
  const auto transfers = checked(pairs, peer, false, list, single);
  recorder_.record(Operation::kRead, peer, pairs.empty() ? 0 : pairs[0].remote->segment->id(), 0,
                   pairs.empty() ? 0 : pairs[0].local->bytes);
  return post(queue, peer, deadline,
              [&] { return transport_->post_read(queue, peer, transfers, nullptr); });
}

Outcome Context::notify(Rank peer, const Segment& segment, std::uint64_t notification,
                        std::uint64_t value, QueueId queue, Deadline deadline) {
  return write_notify({}, peer, segment, notification, value, queue, deadline);
}

Outcome Context::write_notify(std::span<const Pair> pairs, Rank peer, const Segment& segment,
                              std::uint64_t notification, std::uint64_t value, QueueId queue,
                              Deadline deadline) {
  require_peer(peer, "write_notify");
  std::vector<Transfer> list;
  Transfer single;
  const auto transfers = checked(pairs, peer, true, list, single);
  const RemoteSegment& there = remote_of(segment, peer);
  check_notification(segment, there.notifications, notification);
  check_value(value);
  const RemoteFlag flag{&there, static_cast<std::uint32_t>(notification),
                        static_cast<std::uint32_t>(value)};
  recorder_.record(pairs.empty() ? Operation::kNotify : Operation::kWriteNotify, peer, segment.id(),
                   notification, pairs.empty() ? 0 : pairs[0].local->bytes);
  return post(queue, peer, deadline,
              [&] { return transport_->post_write(queue, peer, transfers, &flag); });
}

Outcome Context::read_notify(std::span<const Pair> pairs, Rank peer, const Segment& segment,
                             std::uint64_t notification, std::uint64_t value, QueueId queue,
                             Deadline deadline) {
  require_peer(peer, "read_notify");
  std::vector<Transfer> list;
  Transfer single;
  const auto transfers = checked(pairs, peer, false, list, single);
  require_present(segment);
  check_notification(segment, segment.notifications(), notification);
  check_value(value);
  const LocalFlag flag{&segment.local(), static_cast<std::uint32_t>(notification),
                       static_cast<std::uint32_t>(value)};
  recorder_.record(Operation::kReadNotify, peer, segment.id(), notification,
                   pairs.empty() ? 0 : pairs[0].local->bytes);
  return post(queue, peer, deadline,
              [&] { return transport_->post_read(queue, peer, transfers, &flag); });
}

bool Context::complete(QueueId id) {
  try {
    return transport_->complete(id);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kPeerLost || error.rank() < 0) throw;
    // Of a rank that left in peace, or whose loss was accepted, nobody waits for anything.
    const Health health = liveness_.health(error.rank());
    if (health == Health::kClosed || liveness_.accepted(error.rank())) return false;
    if (health == Health::kHealthy) liveness_.report(error.rank(), Health::kDied);
    throw;
  }
}

Outcome Context::wait(QueueId id, Deadline deadline) {
  require_usable();
  Queue& queue = queue_at(id);
  const std::uint32_t posted = queue.used.load(std::memory_order_relaxed);
  if (posted == 0) return Outcome::kDone;
  recorder_.record(Operation::kWaitQueue, -1, 0, id, 0);
  const Outcome outcome = waiter_.until(
      [&] {
        if (progresses_) transport_->progress();
        return complete(id);
      },
      deadline, "wait(queue)");
  // Two threads may complete the same requests: never below zero.
  if (outcome == Outcome::kDone) {
    std::uint32_t used = queue.used.load(std::memory_order_relaxed);
    while (!queue.used.compare_exchange_weak(used, used - std::min(used, posted),
                                             std::memory_order_relaxed)) {
    }
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
  const FlagWord* board = segment.local().board;
  const auto begin = static_cast<std::uint32_t>(first);
  const auto end = static_cast<std::uint32_t>(first + count);
  const auto scan = [&](std::uint32_t from, std::uint32_t to) {
    for (std::uint32_t id = from; id < to; ++id) {
      // Only the one that is found is acquired: by a second load, which sanitizers understand and
      // a fence they do not.
      if (board[id].load(std::memory_order_relaxed) != 0 &&
          board[id].load(std::memory_order_acquire) != 0) {
        found = id;
        return true;
      }
    }
    return false;
  };
  const auto ready = [&] {
    if (progresses_) transport_->progress();
    if (count == 1) return scan(begin, end);
    const std::uint32_t last = segment.scan_from.load(std::memory_order_relaxed);
    const std::uint32_t from = last >= begin && last < end ? last : begin;
    if (!scan(from, end) && !scan(begin, from)) return false;
    segment.scan_from.store(found + 1, std::memory_order_relaxed);
    return true;
  };
  const auto slow = [&] {
    if (liveness_.everybody_left()) {
      throw Error(ErrorKind::kPeerLost,
                  text("notify_waitsome on notifications [", first, ", ", first + count,
                       ") of segment ", segment.id(), ": every other rank has left"));
    }
  };
  const Outcome outcome = waiter_.until(ready, slow, deadline, "notify_waitsome");
  if (outcome == Outcome::kDone) {
    recorder_.record(Operation::kWaitsome, -1, segment.id(), found, 0);
  }
  return outcome;
}

std::uint32_t Context::notify_reset(Segment& segment, std::uint64_t notification) {
  require_usable();
  require_present(segment);
  check_notification(segment, segment.notifications(), notification);
  FlagWord& word = segment.local().board[notification];
  // Nothing to hand out: leave the cache line with whoever is about to write it.
  if (word.load(std::memory_order_relaxed) == 0) {
    if (progresses_) transport_->progress();  // whoever polls by this call alone waits, too
    return 0;
  }
  return progresses_ ? transport_->take(word) : word.exchange(0, std::memory_order_acq_rel);
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
  check_bounds("target", target, there.bytes);
  recorder_.record(Operation::kAtomic, peer, target.segment->id(), target.offset, 8);
  // The result may come after this call was given up: it lies where it can.
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
        if (!late.posted) late.posted = transport_->post_atomic(internal_queue(), peer, request);
        if (progresses_) transport_->progress();
        return late.posted && complete(internal_queue());
      },
      // Once posted it will change the peer's memory: to give up then would be to lie.
      deadline.one_try() ? Deadline::in(options_.timeout) : deadline, "an atomic");
  late.done = outcome == Outcome::kDone;
  if (late.done && progresses_) old = *late.old;
  return outcome;
}

QueueId Context::queue_create() {
  require_usable();
  const std::lock_guard lock(queue_mutex_);
  for (QueueId queue = 0; queue < options_.queues; ++queue) {
    if (!queues_[queue].exists.exchange(true)) return queue;
  }
  throw Error(ErrorKind::kQueue, text("all ", options_.queues, " queues exist already"));
}

void Context::queue_delete(QueueId queue) {
  require_usable();
  const std::lock_guard lock(queue_mutex_);
  Queue& deleted = queue_at(queue);
  if (queue == 0) throw Error(ErrorKind::kQueue, "queue 0 always exists");
  deleted.exists = false;
  deleted.used = 0;
}

void Context::reconnect(Rank peer) {
  require_peer(peer, "reconnect");
  transport_->reconnect(peer);
}

std::uint32_t Context::queue_size(QueueId queue) const {
  require_usable();
  return const_cast<Context*>(this)->queue_at(queue).used.load(std::memory_order_relaxed);
}

}  // namespace pgasdl
