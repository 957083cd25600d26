// Counts the traffic of one rank with each peer, its registrations of memory and its waits, since
// it joined. Always on: no other process touches these cache lines.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/transport.hpp"

namespace pgasdl {

// The traffic that a rank causes with one peer.
struct Traffic {
  std::uint64_t bytes_written = 0;
  std::uint64_t messages_written = 0;
  std::uint64_t bytes_read = 0;
  std::uint64_t messages_read = 0;
  std::uint64_t notifications = 0;  // raised at the peer
};

using PeerTraffic = std::pair<Rank, Traffic>;

// An empty transfer is no message.
inline Traffic traffic_written(std::span<const Transfer> transfers, bool flagged) {
  Traffic traffic{.notifications = flagged ? 1u : 0u};
  for (const Transfer& each : transfers) {
    traffic.bytes_written += each.bytes;
    traffic.messages_written += each.bytes != 0 ? 1 : 0;
  }
  return traffic;
}

inline Traffic traffic_read(std::span<const Transfer> transfers) {
  Traffic traffic;
  for (const Transfer& each : transfers) {
    traffic.bytes_read += each.bytes;
    traffic.messages_read += each.bytes != 0 ? 1 : 0;
  }
  return traffic;
}

// The reason for a wait.
enum class WaitCause : std::uint8_t {
  kNotification,
  kQueue,      // requests posted to it to complete
  kQueueFull,  // a free place in it, or a connection
  kBarrier,
  kCollective,  // of a group, without a plan: all members' blocks
  kPlan,
  kPassive,
  kAtomic,
  kUncounted,  // the library's own threads
};
constexpr std::array<std::string_view, 8> kWaitCauses{
    "notification", "queue", "queue_full", "barrier", "collective", "plan", "passive", "atomic"};

struct Waits {
  std::uint64_t number = 0;
  std::uint64_t ticks = 0;
};

class Counters {
 public:
  explicit Counters(Rank size) : peers_(static_cast<std::size_t>(size)) {}

  // Adds the traffic of an operation; any thread.
  void add(Rank peer, const Traffic& traffic) {
    auto& words = at(peer).operations;
    each(traffic, [&](std::size_t i, std::uint64_t more) {
      words[i].fetch_add(more, std::memory_order_relaxed);
    });
  }
  // Takes back the traffic of an operation that was not posted.
  void take_back(Rank peer, const Traffic& traffic) {
    auto& words = at(peer).operations;
    each(traffic, [&](std::size_t i, std::uint64_t less) {
      words[i].fetch_sub(less, std::memory_order_relaxed);
    });
  }
  // Adds the traffic of a plan's execution, under the executor's lock: one thread at a time.
  void add_executed(std::span<const PeerTraffic> peers) {
    for (const auto& [peer, traffic] : peers) {
      auto& words = at(peer).plans;
      each(traffic, [&](std::size_t i, std::uint64_t more) {
        words[i].store(words[i].load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
      });
    }
  }
  void add_registration() { registrations_.fetch_add(1, std::memory_order_relaxed); }

  // Counts a wait that is over, or adds ticks to one that was counted already.
  void add_wait(WaitCause cause, bool counted, std::uint64_t ticks) {
    if (cause == WaitCause::kUncounted) return;
    WaitWords& words = waits_[static_cast<std::size_t>(cause)];
    if (!counted) words.number.fetch_add(1, std::memory_order_relaxed);
    words.ticks.fetch_add(ticks, std::memory_order_relaxed);
  }

  Traffic with(Rank peer) const {
    const Peer& found = peers_[static_cast<std::size_t>(peer)];
    const auto sum = [&](std::size_t i) {
      return found.operations[i].load(std::memory_order_relaxed) +
             found.plans[i].load(std::memory_order_relaxed);
    };
    return {sum(0), sum(1), sum(2), sum(3), sum(4)};
  }
  std::uint64_t registrations() const { return registrations_.load(std::memory_order_relaxed); }
  Waits waits(std::size_t cause) const {
    return {waits_[cause].number.load(std::memory_order_relaxed),
            waits_[cause].ticks.load(std::memory_order_relaxed)};
  }

 private:
  // In the order of the members of Traffic.
  using Words = std::array<std::atomic<std::uint64_t>, 5>;
  // Separate cache lines for threads that post and for the thread that advances plans.
  struct Peer {
    alignas(64) Words operations{};
    alignas(64) Words plans{};
  };
  struct alignas(64) WaitWords {
    std::atomic<std::uint64_t> number{0};
    std::atomic<std::uint64_t> ticks{0};
  };

  Peer& at(Rank peer) { return peers_[static_cast<std::size_t>(peer)]; }
  // Skips zeros, so that their words are not touched.
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
  std::array<WaitWords, kWaitCauses.size()> waits_;
};

}  // namespace pgasdl
