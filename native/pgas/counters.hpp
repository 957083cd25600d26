// The traffic of one rank, by peer, and its registrations of memory, since it joined. Always kept:
// adding to it costs no cache line that another process writes to.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "transport/transport.hpp"

namespace pgasdl {

// Between this rank and a peer.
struct Traffic {
  std::uint64_t bytes_written = 0;
  std::uint64_t messages_written = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t messages_read = 0;
  std::uint64_t notifications = 0;  // raised at the peer
};

using PeerTraffic = std::pair<Rank, Traffic>;

inline Traffic traffic_written(std::span<const Transfer> transfers, bool flagged) {
  Traffic traffic{.messages_written = transfers.size(), .notifications = flagged ? 1u : 0u};
  for (const Transfer& each : transfers) traffic.bytes_written += each.bytes;
  return traffic;
}

inline Traffic traffic_read(std::span<const Transfer> transfers) {
  Traffic traffic{.messages_read = transfers.size()};
  for (const Transfer& each : transfers) traffic.bytes_read += each.bytes;
  return traffic;
}

class Counters {
 public:
  explicit Counters(Rank size) : peers_(static_cast<std::size_t>(size)) {}

  // Of an operation; any thread.
  void add(Rank peer, const Traffic& traffic) {
    auto& words = at(peer).operations;
    each(traffic, [&](std::size_t i, std::uint64_t more) {
      words[i].fetch_add(more, std::memory_order_relaxed);
    });
  }
  // Of an operation that was added, and then not posted.
  void take_back(Rank peer, const Traffic& traffic) {
    auto& words = at(peer).operations;
    each(traffic, [&](std::size_t i, std::uint64_t less) {
      words[i].fetch_sub(less, std::memory_order_relaxed);
    });
  }
  // Of executions of plans; one thread at a time, under the executor's lock.
  void add_executed(std::span<const PeerTraffic> peers) {
    for (const auto& [peer, traffic] : peers) {
      auto& words = at(peer).plans;
      each(traffic, [&](std::size_t i, std::uint64_t more) {
        words[i].store(words[i].load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
      });
    }
  }
  void add_registration() { registrations_.fetch_add(1, std::memory_order_relaxed); }

  Traffic with(Rank peer) const {
    const Peer& found = peers_[static_cast<std::size_t>(peer)];
    const auto sum = [&](std::size_t i) {
      return found.operations[i].load(std::memory_order_relaxed) +
             found.plans[i].load(std::memory_order_relaxed);
    };
    return {sum(0), sum(1), sum(2), sum(3), sum(4)};
  }
  std::uint64_t registrations() const { return registrations_.load(std::memory_order_relaxed); }

 private:
  // In the order of Traffic.
  using Words = std::array<std::atomic<std::uint64_t>, 5>;
  // Each is of other threads than the other.
  struct Peer {
    alignas(64) Words operations{};
    alignas(64) Words plans{};
  };

  Peer& at(Rank peer) { return peers_[static_cast<std::size_t>(peer)]; }
  // Where nothing is to be added, a word is not touched.
  template <typename Change>
  [[gnu::always_inline]] static void each(const Traffic& traffic, Change&& change) {
    if (traffic.bytes_written != 0) change(0, traffic.bytes_written);
    if (traffic.messages_written != 0) change(1, traffic.messages_written);
    if (traffic.bytes_read != 0) change(2, traffic.bytes_read);
    if (traffic.messages_read != 0) change(3, traffic.messages_read);
    if (traffic.notifications != 0) change(4, traffic.notifications);
  }

  std::vector<Peer> peers_;
  std::atomic<std::uint64_t> registrations_{0};
};

}  // namespace pgasdl
