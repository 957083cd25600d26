// News of ranks that are not mapped: who informs whom, and that every rank learns of each loss.

#include <algorithm>
#include <atomic>
#include <queue>
#include <stdexcept>

#include "plans.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

// The most heartbeats that a loss takes from one rank to another, if `gone` ranks pass on nothing.
Rank farthest(Rank size, const std::vector<bool>& gone) {
  const std::vector<Rank> distances = Gossip::distances(size);
  Rank most = 0;
  for (Rank first = 0; first < size; ++first) {
    if (gone[static_cast<std::size_t>(first)]) continue;
    std::vector<Rank> hops(static_cast<std::size_t>(size), -1);
    std::queue<Rank> next;
    hops[static_cast<std::size_t>(first)] = 0;
    next.push(first);
    for (; !next.empty(); next.pop()) {
      for (const Rank distance : distances) {
        const auto at = static_cast<std::size_t>((next.front() + distance) % size);
        if (gone[at] || hops[at] >= 0) continue;
        hops[at] = hops[static_cast<std::size_t>(next.front())] + 1;
        next.push(static_cast<Rank>(at));
      }
    }
    for (std::size_t rank = 0; rank < hops.size(); ++rank) {
      if (gone[rank]) continue;
      CHECK_NOTE(hops[rank] >= 0, "%d ranks: %zu hears nothing from %d", size, rank, first);
      most = std::max(most, hops[rank]);
    }
  }
  return most;
}

void neighbours() {
  CHECK(Gossip::distances(1).empty());
  CHECK((Gossip::distances(2) == std::vector<Rank>{1}));
  CHECK(Gossip::distances(9).size() == 8);
  CHECK((Gossip::distances(20) == std::vector<Rank>{1, 2, 3, 4, 8, 12, 16, 17, 18, 19}));
  for (const Rank size : {3, 10, 16, 33, 100, 256}) {
    const std::vector<Rank> all = Gossip::distances(size);
    for (const Rank distance : all) {  // each informs the other
      CHECK(std::ranges::binary_search(all, size - distance));
    }
    Rank bits = 0;
    while ((Rank{1} << bits) < size) ++bits;
    CHECK(farthest(size, std::vector<bool>(static_cast<std::size_t>(size))) <= bits / 2 + 1);
    CHECK(all.size() <= static_cast<std::size_t>(2 * bits + 4));
  }
  // Machines of eight: every second one is gone, or all but two.
  for (const Rank kept : {2, 4}) {
    std::vector<bool> gone(64);
    for (std::size_t rank = 0; rank < gone.size(); ++rank) {
      gone[rank] = static_cast<Rank>(rank / 8) % kept != 0;
    }
    (void)farthest(64, gone);
  }
  CHECK(Gossip::bytes(1024) < 40 * 1024);
  CHECK(Gossip::bytes(16384) < 50 * 16384);
}

Settings many(std::size_t adversary) {
  Settings settings = adversaries(48)[adversary];
  settings.options.heartbeat_ms = 20;
  return settings;
}

// One rank reports many losses at once, of adjacent ranks and of others: all other ranks learn of
// each of them, and of no other.
void many_losses(const Settings& settings) {
  constexpr Rank kMany = 26;
  const auto lost = [](Rank rank) { return rank % 2 == 1 || (rank >= 8 && rank < 12); };
  int n_left = 0;
  for (Rank rank = 0; rank < kMany; ++rank) n_left += lost(rank) ? 0 : 1;
  std::atomic<int> sure{0};
  run(kMany, settings, [&](Local& local) {
    Liveness& liveness = local.context.liveness();
    for (Rank rank = 0; local.rank() == 0 && rank < kMany; ++rank) {
      if (lost(rank)) liveness.report(rank, Health::kDied);
    }
    if (!lost(local.rank())) {  // the lost get no news
      for (Rank rank = 0; rank < kMany; ++rank) {
        if (lost(rank)) until([&] { return liveness.health(rank) == Health::kDied; });
      }
      for (Rank rank = 0; rank < kMany; ++rank) {
        CHECK(lost(rank) == (liveness.health(rank) != Health::kHealthy));
      }
      sure.fetch_add(1);
    }
    until([&] { return sure.load() == n_left; });  // leaving would be news
  });
}

// A rank leaves because of a loss that no other rank has noticed: all blame the lost rank.
void cause(const Settings& settings) {
  constexpr Rank kMany = 20;
  constexpr Rank kLost = 13;
  constexpr Rank kLeaves = 2;
  std::atomic<int> begun{0};
  std::atomic<int> sure{0};
  const auto thrown = outcomes(kMany, settings, [&](Local& local) {
    Liveness& liveness = local.context.liveness();
    local.barrier();
    begun.fetch_add(1);
    if (local.rank() == kLeaves) {
      until([&] { return begun.load() == kMany; });  // no rank is still in the barrier
      until([&] { return sure.load() == 1; });
      liveness.report(kLost, Health::kDied);
      liveness.raise_alarm("a test");
    }
    if (local.rank() == kLost) {  // stays, so that no other rank notices anything
      sure.fetch_add(1);
    } else {
      until([&] { return liveness.health(kLeaves) != Health::kHealthy; });
      CHECK(liveness.health(kLeaves) == Health::kFailed);
      CHECK(liveness.health(kLost) == Health::kDied);
      CHECK(require_error(ErrorKind::kPeerLost, [&] { liveness.raise_alarm("a test"); }) == kLost);
      sure.fetch_add(1);
    }
    until([&] { return sure.load() == kMany - 1; });
  });
  for (Rank rank = 0; rank < kMany; ++rank) {
    CHECK((thrown[static_cast<std::size_t>(rank)] != nullptr) == (rank == kLeaves));
  }
}

// One rank fails and another one leaves: all ranks learn that, and the silence of the two must not
// make them count as stopped.
void long_after(const Settings& settings) {
  constexpr Rank kMany = 16;
  constexpr Rank kFails = 11;
  constexpr Rank kLeaves = 3;
  std::atomic<int> begun{0};
  std::atomic<int> sure{0};
  (void)outcomes(kMany, settings, [&](Local& local) {
    Liveness& liveness = local.context.liveness();
    local.barrier();
    begun.fetch_add(1);
    until([&] { return begun.load() == kMany; });  // no rank is still in the barrier
    if (local.rank() == kFails) throw std::runtime_error("it fails on purpose");
    if (local.rank() == kLeaves) return;
    const auto gone = [&](Rank rank) { return liveness.health(rank) != Health::kHealthy; };
    until([&] { return gone(kFails) && gone(kLeaves); });
    nap(static_cast<int>(1500 * settings.options.stopped_after));
    for (Rank rank = 0; rank < kMany; ++rank) {
      CHECK(gone(rank) == (rank == kFails || rank == kLeaves));
    }
    sure.fetch_add(1);
    until([&] { return sure.load() == kMany - 2; });
  });
  CHECK(sure.load() == kMany - 2);
}

}  // namespace

int main() {
  neighbours();
  for (const std::size_t adversary : {5u, 6u}) {
    many_losses(many(adversary));
    cause(many(adversary));
  }
  long_after(many(5));
  std::puts("ok");
}
