#include "transport/verbs/queue.hpp"

#include <algorithm>
#include <cerrno>

namespace pgasdl {
namespace {

// Few enough that a job whose ranks need two peers each does not pay for hundreds of connections,
// and many enough that a rank which needs all peers polls only a handful of completion queues.
constexpr int kMostPerCompletionQueue = 32;
constexpr int kCompletionsPerPoll = 16;

}  // namespace

VerbsQueue::VerbsQueue(const VerbsDevice& device, VerbsBoards& boards, QueueId id, Rank size,
                       std::uint32_t depth)
    : device_(device),
      boards_(boards),
      id_(id),
      size_(size),
      depth_(depth),
      connections_(
          std::make_unique<std::atomic<VerbsConnection*>[]>(static_cast<std::size_t>(size))) {
  const int fit = device.limits().max_cqe / static_cast<int>(depth + VerbsFlags::kReceives);
  const int most = std::min({fit, kMostPerCompletionQueue, static_cast<int>(size)});
  per_completion_queue_ = static_cast<std::uint32_t>(std::max(most, 1));
}

VerbsConnection& VerbsQueue::make(Rank peer) {
  if (VerbsConnection* found = find(peer)) return *found;
  if (owned_.size() % per_completion_queue_ == 0) {
    const auto entries = static_cast<int>(per_completion_queue_ * (depth_ + VerbsFlags::kReceives));
    VerbsPtr<ibv_cq> more(
        verbs_library().create_cq(device_.context(), entries, nullptr, nullptr, 0));
    if (more == nullptr) throw_system(text("a completion queue of ", entries, " entries"), errno);
    const std::lock_guard lock(poll_mutex_);
    completions_.push_back(std::move(more));
  }
  auto made = std::make_unique<VerbsConnection>(device_, boards_, *this, completions_.back().get(),
                                                peer, depth_);
  owned_.push_back(std::move(made));
  connections_[static_cast<std::size_t>(peer)].store(owned_.back().get(),
                                                     std::memory_order_release);
  used_.store(true, std::memory_order_relaxed);
  return *owned_.back();
}

std::size_t VerbsQueue::connected() const {
  std::size_t count = 0;
  for (Rank peer = 0; used() && peer < size_; ++peer) {
    const VerbsConnection* connection = find(peer);
    count += connection != nullptr && connection->holds_pair() ? 1 : 0;
  }
  return count;
}

void VerbsQueue::poll() {
  const std::lock_guard lock(poll_mutex_);
  poll_locked();
}

void VerbsQueue::progress() {
  poll();
  if (n_held_.load(std::memory_order_relaxed) == 0) [[likely]]
    return;
  for (Rank peer = 0; peer < size_; ++peer) {
    if (VerbsConnection* connection = find(peer)) connection->release();
  }
}

void VerbsQueue::poll_locked() {
  ibv_wc completions[kCompletionsPerPoll];
  for (const auto& queue : completions_) {
    int taken;
    do {
      taken = ibv_poll_cq(queue.get(), kCompletionsPerPoll, completions);
      // Makes the notes of these requests, written before they were posted, visible to this thread.
      (void)outstanding_.load(std::memory_order_acquire);
      for (int i = 0; i < taken; ++i) {
        VerbsConnection* connection = find(VerbsConnection::peer_of(completions[i]));
        if (connection != nullptr) connection->completed(completions[i]);
      }
    } while (taken == kCompletionsPerPoll);
    if (taken < 0) [[unlikely]] {
      add_fault(Error(ErrorKind::kSystem, text("polling for completions of queue ", id_)), -1);
    }
  }
}

bool VerbsQueue::complete() {
  faults_.raise();
  return outstanding_.load(std::memory_order_acquire) == 0;
}

void VerbsQueue::list_under_way(std::vector<VerbsMemory::Pending>& all) const {
  for (Rank peer = 0; peer < size_; ++peer) {
    if (const VerbsConnection* connection = find(peer)) all.push_back(connection->under_way());
  }
}

}  // namespace pgasdl
