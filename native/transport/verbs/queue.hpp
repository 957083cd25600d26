// A rank's queue over verbs: connections to peers, made when needed, with shared completion queues.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/verbs/connection.hpp"

namespace pgasdl {

class VerbsQueue {
 public:
  VerbsQueue(const VerbsDevice& device, VerbsBoards& boards, QueueId id, Rank size,
             std::uint32_t depth);

  QueueId id() const { return id_; }
  VerbsConnection* find(Rank peer) const {
    return connections_[static_cast<std::size_t>(peer)].load(std::memory_order_acquire);
  }
  // The connection to `peer`, made if there is none yet. Called by one thread at a time.
  VerbsConnection& make(Rank peer);

  std::size_t connected() const;

  // Takes everything that has completed or arrived; waits for another thread that does so.
  void poll();
  // Polls, then sends flags that waited for completions. Not for connections, under their locks.
  void progress();
  bool used() const { return used_.load(std::memory_order_relaxed); }
  // True if all that was posted has completed; throws once for each connection that broke.
  bool complete();
  void add_fault(const Error& fault, Rank peer) { faults_.add(fault, peer); }
  void drop_faults(Rank peer) { faults_.drop(peer); }
  // Adds the requests that every connection has under way.
  void list_under_way(std::vector<VerbsMemory::Pending>& all) const;

  // For connections: counts signalled requests, before posting and after completion or loss.
  void posted() { outstanding_.fetch_add(1, std::memory_order_release); }
  void settled(std::uint64_t count) { outstanding_.fetch_sub(count, std::memory_order_release); }
  // Likewise, counts held flags until they are sent or dropped.
  void held() {
    posted();
    n_held_.fetch_add(1, std::memory_order_relaxed);
  }
  void released(std::size_t count) {
    n_held_.fetch_sub(count, std::memory_order_relaxed);
    settled(count);
  }
  // For closing a connection: with the polling lock held, takes everything that has arrived.
  std::mutex& polling() { return poll_mutex_; }
  void poll_locked();

 private:
  const VerbsDevice& device_;
  VerbsBoards& boards_;
  const QueueId id_;
  const Rank size_;
  const std::uint32_t depth_;
  std::uint32_t per_completion_queue_;  // connections
  std::mutex poll_mutex_;
  std::vector<VerbsPtr<ibv_cq>> completions_;
  std::vector<std::unique_ptr<VerbsConnection>> owned_;
  std::unique_ptr<std::atomic<VerbsConnection*>[]> connections_;
  std::atomic<bool> used_{false};  // there are connections
  alignas(64) std::atomic<std::uint64_t> outstanding_{0};
  std::atomic<std::size_t> n_held_{0};
  PeerFaults faults_;
};

}  // namespace pgasdl
