#pragma once

// Data followed by a flag, over any transport.

#include <random>

#include "ranks.hpp"

namespace pgasdl::testing {

inline unsigned char pattern(Rank from, std::uint32_t round, std::uint64_t i) {
  return static_cast<unsigned char>(static_cast<std::uint64_t>(from) * 31 + round * 7 + i * 13 + 1);
}

// Every rank writes pieces to every other one and then raises a flag: whoever sees it sees all
// pieces. The answer proves that the slot is free again.
inline void flag_is_last(const Settings& settings, Rank size, std::uint64_t slot,
                         std::uint32_t rounds) {
  run(size, settings, [&](Local& local) {
    const auto n = static_cast<std::uint64_t>(size);
    const auto me = static_cast<std::uint64_t>(local.rank());
    const auto inbox = local.segment(n * slot);
    const auto outbox = local.segment(slot);
    std::mt19937_64 random(me + 5);
    for (std::uint32_t round = 1; round <= rounds; ++round) {
      for (std::uint64_t i = 0; i < slot; ++i) {
        items<unsigned char>(outbox)[i] = pattern(local.rank(), round, i);
      }
      for (Rank distance = 1; distance < size; ++distance) {
        const Rank peer = local.peer(distance);
        for (std::uint64_t at = 0; at < slot;) {
          const std::uint64_t bytes = std::min(slot - at, 1 + random() % (slot / 2));
          const Slice source{outbox, at, bytes};
          const Slice target{inbox, me * slot + at, bytes};
          const Pair pair{&source, &target};
          at += bytes;
          CHECK((at < slot ? local.context.write({&pair, 1}, peer, 0, soon())
                           : local.context.write_notify({&pair, 1}, peer, *inbox, me, round, 0,
                                                        soon())) == Outcome::kDone);
        }
      }
      for (Rank distance = 1; distance < size; ++distance) {
        const auto from = static_cast<std::uint64_t>(local.peer(distance));
        std::uint32_t found = 0;
        CHECK(local.context.notify_waitsome(*inbox, from, 1, soon(), found) == Outcome::kDone);
        for (std::uint64_t i = 0; i < slot; ++i) {
          CHECK_NOTE(items<unsigned char>(inbox)[from * slot + i] ==
                         pattern(static_cast<Rank>(from), round, i),
                     "round %u, from %zu, byte %zu", round, std::size_t(from), std::size_t(i));
        }
        CHECK(local.context.notify_reset(*inbox, from) == round);  // only now: it orders, too
        local.notify(static_cast<Rank>(from), *inbox, n + me, round);
      }
      local.flush();
      for (Rank distance = 1; distance < size; ++distance) {
        CHECK(local.await(*inbox, n + static_cast<std::uint64_t>(local.peer(distance))) == round);
      }
    }
  });
}

}  // namespace pgasdl::testing
