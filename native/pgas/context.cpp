#include "pgas/context.hpp"

#include <algorithm>

#include "pgas/group.hpp"
#include "sys/packed.hpp"

namespace pgasdl {
namespace {

// A rank's data about itself, sent before anything is mapped.
struct Introduction {
  std::uint64_t host;
  std::int32_t pid;
  std::uint32_t queue_depth;
  std::uint64_t passive_bytes;
};

std::uint64_t host() { return std::hash<std::string>{}(host_identity()); }

}  // namespace

Context::Context(Rank rank, Rank size, std::unique_ptr<Transport> transport, const Options& options)
    : rank_(rank),
      size_(size),
      options_(options),
      fork_depth_(fork_depth()),
      transport_(std::move(transport)),
      progresses_(transport_->needs_progress()),
      counters_(size),
      liveness_(rank, size, options),
      waiter_(liveness_, counters_, *transport_, options),
      queues_(options.queues + kOwnQueues),
      pids_(static_cast<std::size_t>(size)) {
  if (size < 1 || rank < 0 || rank >= size) {
    throw Error(ErrorKind::kRank, text("rank ", rank, " of ", size, " ranks"));
  }
  queues_[0].exists = true;
  queues_[internal_queue()].exists = true;
  queues_[atomic_queue()].exists = true;
  queues_[plan_queue()].exists = true;
  liveness_.start(transport_.get(), [this] {
    look_after_streams(liveness_.alarmed() || liveness_.everybody_left());
  });
}

Context::~Context() {
  try {
    close(true);
  } catch (const std::exception&) {
    // A destructor cannot report errors; an explicit close() does.
  }
}

std::string Context::endpoint() {
  const Introduction introduction{host(), getpid(), options_.queue_depth, options_.passive_bytes};
  return packed(introduction) + transport_->endpoint();
}

void Context::connect(const std::vector<std::string>& endpoints) {
  if (endpoints.size() != static_cast<std::size_t>(size_)) {
    throw Error(ErrorKind::kMismatch,
                text("endpoints of ", endpoints.size(), " ranks for a job of ", size_));
  }
  const std::uint64_t here = host();
  for (Rank peer = 0; peer < size_; ++peer) {
    std::string_view endpoint = endpoints[static_cast<std::size_t>(peer)];
    const auto introduction = take_packed<Introduction>(endpoint, "endpoint", peer);
    if (introduction.passive_bytes != options_.passive_bytes) {
      throw Error(ErrorKind::kMismatch, text("rank ", peer, " was started with passive_bytes ",
                                             introduction.passive_bytes, ", rank ", rank_, " with ",
                                             options_.passive_bytes, ": all ranks need the same"));
    }
    pids_[static_cast<std::size_t>(peer)] = introduction.host == here ? introduction.pid : 0;
    transport_->connect(peer, std::string(endpoint));
  }
}

std::string Context::open() {
  std::vector<Rank> everybody(static_cast<std::size_t>(size_));
  for (Rank peer = 0; peer < size_; ++peer) everybody[static_cast<std::size_t>(peer)] = peer;
  world_ = std::make_shared<Group>(*this, std::move(everybody), true);
  return world_->describe();
}

void Context::join(const std::vector<std::string>& descriptions, Deadline deadline) {
  if (world_->attach(descriptions, deadline) != Outcome::kDone) {
    throw Error(ErrorKind::kSystem, text("init on rank ", rank_, " of ", size_,
                                         ": not all ranks came to make the world's segment"));
  }
  std::vector<ControlBlock*> blocks;
  std::vector<pid_t> watched;
  std::vector<Rank> unmapped;
  for (Rank peer = 0; peer < size_; ++peer) {
    auto* block = reinterpret_cast<ControlBlock*>(world_->control().remote(peer)->data);
    blocks.push_back(block);
    if (block == nullptr) unmapped.push_back(peer);
    if (block != nullptr) transport_->set_wake_word(peer, &block->wake_word);
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
    // Posted requests still arrive, if they can.
    const Deadline deadline = Deadline::in(failed ? 0.2 : 5);
    liveness_.finish_announcing(deadline);
    drain(deadline);
    liveness_.pass_on();
    liveness_.report(rank_, failed ? Health::kFailed : Health::kClosed);
    liveness_.take_leave(deadline);
    drain(deadline);
    liveness_.stop();
    stream_waits_.close();
    while (!look_after_streams(true) && !deadline.passed()) {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  // The world group, its segment and the transport stay until the last reference to the context
  // goes: other threads may still be leaving a call.
}

void Context::drain(Deadline deadline) {
  const auto over = [&](QueueId queue) {
    try {
      return transport_->complete(queue);
    } catch (const Error&) {
      return false;  // a peer is gone, with its requests; each loss is thrown once
    }
  };
  for (QueueId queue = 0; queue < queues_.size(); ++queue) {
    while (!over(queue) && !deadline.passed()) {
      transport_->progress();
      std::this_thread::yield();
    }
  }
}

std::vector<Rank> Context::acknowledge() {
  std::vector<Rank> ended = liveness_.acknowledge();
  const QueueId queue = plan_queue();
  const Deadline deadline = Deadline::in(options_.timeout);
  for (Rank peer = 0; peer < size(); ++peer) {
    const std::uint64_t posted = transport_->mark(queue, peer);
    while (liveness_.health(peer) == Health::kHealthy && !deadline.passed() &&
           !transport_->reached(queue, peer, posted)) {
      transport_->progress();
      std::this_thread::yield();
    }
  }
  return ended;
}

bool Context::look_after_streams(bool a_rank_is_lost) {
  std::optional<Error> loss;
  if (a_rank_is_lost) {
    loss.emplace(ErrorKind::kPeerLost, "the other ranks have left");
    try {
      if (liveness_.alarmed()) liveness_.raise_alarm("a stream's wait");
    } catch (const Error& error) {
      loss = error;
    }
  }
  const bool waits_are_over = stream_waits_.look(loss ? &*loss : nullptr);
  return queued_streams_.look() && waits_are_over;
}

void Context::refuse_use() const {
  if (inherited()) {
    throw Error(ErrorKind::kClosed,
                text("rank ", rank_,
                     "'s context belongs to the parent process: a forked child "
                     "cannot use it (start workers with spawn, or keep pgasdl out of them)"));
  }
  throw Error(ErrorKind::kClosed,
              text("rank ", rank_,
                   "'s context is closed: its `with` block has ended, or close() was called"));
}

void Context::refuse_rank(Rank peer, const char* operation) const {
  throw Error(ErrorKind::kRank, text(operation, " to rank ", peer, ": ranks are 0 to ", size_ - 1,
                                     size_ == 1 ? "; `pgasdl run -n 2 PROGRAM` starts two" : ""));
}

void Context::refuse_queue(QueueId queue) const {
  throw Error(ErrorKind::kQueue, text("queue ", queue,
                                      " does not exist (queue_create() makes "
                                      "one, at most ",
                                      options_.queues, ")"));
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
  reconnections_.fetch_add(1, std::memory_order_release);  // marks that were sent may be lost
}

std::string Context::publish(LocalSegment& segment, std::span<const Rank> peers) {
  std::string description = transport_->publish(segment, peers);
  counters_.add_registration();
  return description;
}

std::size_t Context::connections(QueueId first, QueueId end) const {
  std::size_t open = 0;
  for (QueueId queue = first; queue < end; ++queue) open += transport_->connections(queue);
  return open;
}

std::uint32_t Context::queue_size(QueueId queue) const {
  require_usable();
  return const_cast<Context*>(this)->queue_at(queue).used.load(std::memory_order_relaxed);
}

}  // namespace pgasdl
