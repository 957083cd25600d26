#include "transport/loopback/loopback.hpp"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "memory/device_stream.hpp"
#include "transport/processor_atomic.hpp"
#include "transport/raise_flag.hpp"

namespace pgasdl {
namespace {

std::byte* base(const RemoteSegment& remote) {
  return remote.data != nullptr ? remote.data : reinterpret_cast<std::byte*>(remote.address);
}

int device_of(const Transfer& transfer) {
  return transfer.local->device != kHost ? transfer.local->device : transfer.remote->device;
}

void copy_bytes(int device, std::byte* to, const std::byte* from, std::size_t bytes) {
  if (device == kHost) {
    std::memcpy(to, from, bytes);
  } else {
    device_copy(device, to, from, bytes);
  }
}

// The owner that keeps a segment's data.
std::shared_ptr<void> owner_of(const LocalSegment& segment) {
  if (segment.device_region != nullptr) return segment.device_region;
  return segment.region;
}

}  // namespace

LoopbackWorld::LoopbackWorld(Rank size, LoopbackFaults faults)
    : faults_(faults), ranks_(static_cast<std::size_t>(size)) {
  for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
    ranks_[rank].random.seed(faults.seed * 1000003 + rank);
    ranks_[rank].wake_words.resize(ranks_.size());
  }
}

void LoopbackWorld::deliver(RankState& state, Operation& operation) {
  if (operation.source != nullptr) {
    const std::byte* source =
        operation.snapshot.empty() ? operation.source : operation.snapshot.data();
    copy_bytes(operation.device, operation.target, source, operation.bytes);
  } else {
    raise_flag(*operation.flag, operation.value, operation.add);
    WakeWord* wake_word = state.wake_words[static_cast<std::size_t>(operation.peer)];
    if (wake_word != nullptr) wake_word->wake();
  }
}

// With state.mutex held: makes one pass over pending operations in order; each that may be
// delivered is, with the probability that the faults name.
void LoopbackWorld::deliver_some(RankState& state) {
  std::deque<Operation> kept;
  for (Operation& operation : state.pending) {
    const bool earlier = std::any_of(kept.begin(), kept.end(), [&](const Operation& other) {
      return other.queue == operation.queue && other.peer == operation.peer;
    });
    const bool may_overtake = operation.source != nullptr
                                  ? faults_.reorder || faults_.any_order
                                  : faults_.any_order && !operation.own_flag;
    const bool go = state.random() % (faults_.delay + 1) == 0;
    if (go && (!earlier || may_overtake)) {
      deliver(state, operation);
    } else {
      kept.push_back(std::move(operation));
    }
  }
  state.pending = std::move(kept);
  release(state);
}

void LoopbackWorld::enqueue(RankState& state, Operation&& operation) const {
  Connection& connection = state.connections[{operation.queue, operation.peer}];
  if (faults_.completion_first && operation.source == nullptr && !operation.own_flag) {
    connection.held.hold(std::move(operation), connection.posted);
    return release(state);
  }
  operation.number = connection.posted++;
  state.pending.push_back(std::move(operation));
}

// Sends held flags whose earlier requests have all been delivered.
void LoopbackWorld::release(RankState& state) {
  for (auto& [to, connection] : state.connections) {
    std::uint32_t retired = connection.posted;
    for (const Operation& operation : state.pending) {
      if (to != std::pair{operation.queue, operation.peer}) continue;
      retired = std::min(retired, operation.number);
    }
    Operation* const flag = connection.held.ready(retired);
    if (flag == nullptr) continue;
    flag->number = connection.posted++;
    state.pending.push_back(std::move(*flag));
    connection.held.sent(connection.posted);
  }
}

LoopbackTransport::LoopbackTransport(std::shared_ptr<LoopbackWorld> world, Rank rank)
    : world_(std::move(world)), rank_(rank) {
  if (rank < 0 || rank >= world_->size()) {
    throw Error(ErrorKind::kRank, text("rank ", rank, " is not in a world of ", world_->size()));
  }
}

LoopbackTransport::~LoopbackTransport() {
  {
    const std::lock_guard lock(mine().mutex);
    mine().pending.clear();
    mine().connections.clear();
  }
  for (auto& state : world_->ranks_) {
    const std::lock_guard lock(state.mutex);
    const auto first = state.connected.lower_bound({rank_, 0});
    const auto last = state.connected.lower_bound({rank_ + 1, 0});
    if (world_->faults_.breaks) {
      for (auto at = first; at != last; ++at) state.broken.emplace(at->second, rank_);
    }
    state.connected.erase(first, last);
  }
}

void LoopbackTransport::set_wake_word(Rank peer, WakeWord* wake_word) {
  const std::lock_guard lock(mine().mutex);
  mine().wake_words[static_cast<std::size_t>(peer)] = wake_word;
}

std::string LoopbackTransport::publish(LocalSegment& segment, std::span<const Rank> peers) {
  RemoteSegment remote;
  remote.bytes = segment.bytes;
  remote.notifications = segment.notifications;
  const bool reachable = !segment.bound || segment.device != kHost;
  if (world_->faults_.mapped && reachable) remote.data = segment.data;
  remote.address = reinterpret_cast<std::uint64_t>(segment.data);
  remote.board = segment.board;
  remote.device = segment.device;
  if (world_->faults_.mapped) remote.region = segment.region;
  using Both = std::pair<std::shared_ptr<Region>, std::shared_ptr<DeviceRegion>>;
  remote.keep = std::make_shared<Both>(segment.region, segment.device_region);
  const std::lock_guard lock(mine().mutex);
  // This rank may delete the segment, or leave, before the last peer attaches it.
  if (peers.size() > 1) mine().published[segment.id] = {std::move(remote), peers.size() - 1};
  return std::to_string(segment.id);
}

RemoteSegment LoopbackTransport::attach(Rank peer, const std::string& description, int device,
                                        Deadline) {
  auto& state = world_->ranks_[static_cast<std::size_t>(peer)];
  const std::lock_guard lock(state.mutex);
  SegmentId id = 0;
  const char* end = description.data() + description.size();
  const bool number = std::from_chars(description.data(), end, id).ptr == end;
  const auto found = state.published.find(id);
  if (!number || found == state.published.end()) {
    throw Error(ErrorKind::kSegment, text("rank ", peer, " has no segment ", description));
  }
  RemoteSegment remote = found->second.as_peers_see;
  if (--found->second.n_to_attach == 0) state.published.erase(found);
  if (device != kHost && remote.device != kHost) open_to(device, remote.device);
  return remote;
}

// With the mutex held, at every post: false where a real transport's queue may be full.
bool LoopbackTransport::room(QueueId queue, Rank peer) {
  auto& state = mine();
  const LoopbackFaults& faults = world_->faults_;
  if (faults.refuse != 0 && state.random() % (faults.refuse + 1) != 0) return false;
  if ((faults.breaks || !faults.mapped) && peer != rank_) state.connected.emplace(peer, queue);
  ++state.posted;
  if (faults.fail_rank == rank_ && faults.fail_at == state.posted) {
    throw Error(ErrorKind::kSystem,
                text("rank ", rank_, " failed at operation ", state.posted, ", as was asked for"));
  }
  return true;
}

void LoopbackTransport::submit(LoopbackWorld::Operation&& operation) {
  auto& state = mine();
  if (world_->faults_.immediate()) {
    LoopbackWorld::deliver(state, operation);
    return;
  }
  if (operation.source != nullptr && !world_->faults_.late_source) {
    operation.snapshot.resize(operation.bytes);
    copy_bytes(operation.device, operation.snapshot.data(), operation.source, operation.bytes);
  }
  world_->enqueue(state, std::move(operation));
}

bool LoopbackTransport::post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                                   const RemoteFlag* flag) {
  const std::lock_guard lock(mine().mutex);
  if (!room(queue, peer)) return false;
  for (const Transfer& transfer : transfers) {
    if (transfer.bytes == 0) continue;
    submit({queue,
            peer,
            transfer.local->data + transfer.local_offset,
            base(*transfer.remote) + transfer.remote_offset,
            transfer.bytes,
            device_of(transfer),
            {},
            nullptr,
            0,
            false,
            transfer.remote->keep,
            owner_of(*transfer.local)});
  }
  if (flag != nullptr) {
    submit({queue,
            peer,
            nullptr,
            nullptr,
            0,
            kHost,
            {},
            &flag->remote->board[flag->notification],
            flag->value,
            flag->add,
            flag->remote->keep,
            nullptr});
  }
  return true;
}

bool LoopbackTransport::post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                                  const LocalFlag* flag) {
  const std::lock_guard lock(mine().mutex);
  if (!room(queue, peer)) return false;
  for (const Transfer& transfer : transfers) {
    if (transfer.bytes == 0) continue;
    LoopbackWorld::Operation operation{queue,
                                       peer,
                                       base(*transfer.remote) + transfer.remote_offset,
                                       transfer.local->data + transfer.local_offset,
                                       transfer.bytes,
                                       device_of(transfer),
                                       {},
                                       nullptr,
                                       0,
                                       false,
                                       transfer.remote->keep,
                                       owner_of(*transfer.local)};
    // A read looks at the peer when it is delivered, never when it is posted.
    if (world_->faults_.immediate()) {
      LoopbackWorld::deliver(mine(), operation);
    } else {
      world_->enqueue(mine(), std::move(operation));
    }
  }
  if (flag != nullptr) {
    LoopbackWorld::Operation operation{queue,
                                       peer,
                                       nullptr,
                                       nullptr,
                                       0,
                                       kHost,
                                       {},
                                       &flag->local->board[flag->notification],
                                       flag->value,
                                       false,
                                       flag->local->region,
                                       nullptr};
    operation.own_flag = true;
    submit(std::move(operation));
  }
  return true;
}

bool LoopbackTransport::post_atomic(QueueId queue, Rank peer, const Atomic& atomic) {
  {
    const std::lock_guard lock(mine().mutex);
    if (!room(queue, peer)) return false;
  }
  processor_atomic(atomic, base(*atomic.remote));
  return true;
}

bool LoopbackTransport::complete(QueueId queue) {
  if (world_->faults_.immediate() && !world_->faults_.breaks) return true;
  const std::lock_guard lock(mine().mutex);
  auto& broken = mine().broken;
  if (const auto first = broken.lower_bound({queue, 0});
      first != broken.end() && first->first == queue) {
    const Rank peer = first->second;
    broken.erase(first);
    throw Error(ErrorKind::kPeerLost,
                text("rank ", peer, " is gone, and what was under way to it on queue ", queue),
                peer);
  }
  const auto& connections = mine().connections;
  if (std::ranges::any_of(connections, [&](const auto& to) {
        return to.first.first == queue && !to.second.held.empty();
      })) {
    return false;
  }
  const auto& pending = mine().pending;
  return std::none_of(pending.begin(), pending.end(),
                      [&](const auto& operation) { return operation.queue == queue; });
}

std::size_t LoopbackTransport::connections(QueueId queue) const {
  auto& state = world_->ranks_[static_cast<std::size_t>(rank_)];
  const std::lock_guard lock(state.mutex);
  return static_cast<std::size_t>(std::ranges::count_if(
      state.connected, [&](const auto& connected) { return connected.second == queue; }));
}

// Advances the operations of all ranks, as a network would while their owners compute.
void LoopbackTransport::progress() {
  for (auto& state : world_->ranks_) {
    const std::unique_lock lock(state.mutex, std::try_to_lock);
    if (lock.owns_lock() && !state.pending.empty()) world_->deliver_some(state);
  }
}

void LoopbackTransport::take_over(QueueId queue) {
  const std::lock_guard lock(mine().mutex);
  for (LoopbackWorld::Operation& each : mine().pending) {
    // The queue of plans has no reads; a source in a segment is the program's again, too.
    if (each.queue != queue || each.source == nullptr || !each.snapshot.empty()) continue;
    each.snapshot.resize(each.bytes);
    copy_bytes(each.device, each.snapshot.data(), each.source, each.bytes);
  }
}

// Drops what is under way, both ways: the program may use its memory again, and any rank's
// progress() would deliver what the lost one has sent.
bool LoopbackTransport::forget(Rank peer) {
  const auto drop = [](LoopbackWorld::RankState& state, Rank to) {
    const std::lock_guard lock(state.mutex);
    std::erase_if(state.pending, [&](const auto& operation) { return operation.peer == to; });
    std::erase_if(state.connections, [&](const auto& each) { return each.first.second == to; });
  };
  drop(mine(), peer);
  drop(world_->ranks_[static_cast<std::size_t>(peer)], rank_);
  return false;
}

}  // namespace pgasdl
