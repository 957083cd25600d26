// Tests of transports that do not map peers' memory, with ranks as threads of one process.
#pragma once

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>

#include "flags.hpp"
#include "plans.hpp"

namespace pgasdl::testing {

// Short lists, and lists many times longer than the queue pair's depth; reads and their flags.
inline void lists_and_reads(const Settings& settings, std::size_t pieces) {
  run(3, settings, [&](Local& local) {
    const std::uint64_t bytes = pieces * 100;
    const auto segment = local.segment(3 * bytes);
    auto* here = items<unsigned char>(segment);
    const Rank peer = local.peer(1);
    const QueueId queue = local.context.queue_create();
    for (std::uint64_t i = 0; i < bytes; ++i) here[i] = pattern(local.rank(), 1, i);
    std::vector<Slice> sources;
    std::vector<Slice> targets;
    for (std::uint64_t i = 0; i < pieces; ++i) {
      sources.push_back({segment, i * 100, i % 7 == 3 ? 0u : 100u});
      targets.push_back({segment, bytes + (pieces - 1 - i) * 100, sources.back().bytes});
    }
    std::vector<Pair> pairs;
    for (std::size_t i = 0; i < pieces; ++i) pairs.push_back({&sources[i], &targets[i]});
    CHECK(local.context.write_notify(pairs, peer, *segment, 0, 1, queue, soon()) == Outcome::kDone);
    CHECK(local.await(*segment, 0) == 1);
    const auto arrived = [&](std::uint64_t piece, std::uint64_t byte) -> unsigned {
      return piece % 7 == 3 ? 0u : pattern(local.peer(2), 1, piece * 100 + byte);
    };
    for (std::uint64_t i = 0; i < bytes; ++i) {
      CHECK(here[bytes + i] == arrived(pieces - 1 - i / 100, i % 100));
    }
    local.barrier();
    // Reads it back from the peer, where it has arrived by now.
    std::vector<Slice> back;
    for (std::uint64_t i = 0; i < pieces; ++i) {
      back.push_back({segment, 2 * bytes + i * 100, sources[i].bytes});
    }
    for (std::size_t i = 0; i < pieces; ++i) pairs[i] = {&back[i], &targets[i]};
    CHECK(local.context.read_notify(pairs, peer, *segment, 1, 9, queue, soon()) == Outcome::kDone);
    CHECK(local.await(*segment, 1) == 9);
    const auto check_back = [&] {
      for (std::uint64_t i = 0; i < bytes; ++i) {
        CHECK(here[2 * bytes + i] == (i / 100 % 7 == 3 ? 0u : here[i]));
      }
    };
    check_back();
    std::memset(here + 2 * bytes, 0, bytes);
    CHECK(local.context.read(pairs, peer, queue, soon()) == Outcome::kDone);
    local.flush(queue);
    check_back();
    CHECK(local.context.read_notify({}, peer, *segment, 2, 4, queue, soon()) == Outcome::kDone);
    CHECK(local.await(*segment, 2) == 4);
    local.barrier();
  });
}

// Several threads of each rank post far more to one queue than it has room for.
inline void many_in_flight(const Settings& settings, std::uint32_t writes) {
  constexpr std::uint64_t kThreads = 3;
  run(2, settings, [&](Local& local) {
    const auto segment = local.segment(4096, 2 * kThreads);
    std::vector<std::thread> threads;
    for (std::uint64_t number = 0; number < kThreads; ++number) {
      threads.emplace_back([&, number] {
        const Slice mine{segment, 64 * number, 8};
        const Slice there{segment, 2048 + 64 * number, 8};
        const Pair own{&mine, &there};
        *items<std::uint64_t>(segment, 64 * number) = number + 1;
        for (std::uint32_t i = 1; i <= writes; ++i) {
          // With and without data: flags of one notification keep their order.
          const std::span<const Pair> data(&own, i % 3 == 1 ? 0 : 1);
          CHECK(local.context.write_notify(data, local.peer(1), *segment, number, i, 0, soon()) ==
                Outcome::kDone);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    local.flush();
    CHECK(local.context.queue_size(0) == 0);
    local.barrier();  // on another queue: flags of this one may still be under way
    for (std::uint64_t number = 0; number < kThreads; ++number) {
      while (segment->local().board[number].load() != writes) std::this_thread::yield();
      CHECK(*items<std::uint64_t>(segment, 2048 + 64 * number) == number + 1);
    }
    local.barrier();
  });
}

// A rank that calls nothing delays no other rank, and finds all flags and data when it looks. If
// flags are counted, its heartbeats take them.
inline void away(Settings settings) {
  settings.options.heartbeat_ms = 5;
  constexpr std::uint32_t kFlags = 1000;
  run(2, settings, [&](Local& local) {
    const auto segment = local.segment(8 * kFlags, kFlags);
    for (std::uint64_t id = 0; id < kFlags; ++id) {
      *items<std::uint64_t>(segment, 8 * id) = local.rank() == 0 ? id + 1 : 0;
    }
    local.barrier();
    if (local.rank() == 0) {
      for (std::uint64_t id = 0; id < kFlags; ++id) {
        const Slice slice{segment, 8 * id, 8};
        const Pair pair{&slice, &slice};
        CHECK(local.context.write_notify({&pair, 1}, 1, *segment, id, 7, 0, soon()) ==
              Outcome::kDone);
      }
      local.flush();
    } else {
      // The last request must not be a flag that rank 1 has to take: rank 1 holds too few receives.
      while (segment->local().board[kFlags - 1].load() == 0) std::this_thread::yield();
      for (std::uint64_t id = 0; id < kFlags; ++id) {
        CHECK(*items<std::uint64_t>(segment, 8 * id) == id + 1);
        CHECK(local.await(*segment, id) == 7);
      }
    }
    local.barrier();
  });
}

// One of two ranks reconnects: heartbeats of the other that get lost cause no error.
inline void beats_are_lost(Settings settings, std::uint32_t rounds) {
  settings.options.heartbeat_ms = 1;
  run(2, settings, [&](Local& local) {
    const auto segment = local.segment(64);
    for (std::uint32_t round = 1; round <= rounds; ++round) {
      const Rank peer = local.peer(1);
      std::uint64_t old = 0;
      local.barrier();
      if (local.rank() == 0) {
        local.context.reconnect(peer);
        local.notify(peer, *segment, 1, round);
      } else {
        CHECK(local.await(*segment, 1) == round);
      }
      const Slice target{segment, 8, 8};
      CHECK(local.context.atomic(Atomic::Kind::kFetchAdd, target, peer, 1, 0, soon(), old) ==
            Outcome::kDone);
      CHECK(old + 1 == round);
      local.flush();
    }
    local.barrier();
  });
}

// Plans of three shapes in flight together, no barrier between iterations.
inline void plans(const Settings& settings, Rank size, bool progress_thread) {
  run(size, settings, [&](Local& local) {
    std::vector<std::unique_ptr<Exchange>> all;
    for (const std::uint64_t count : {5, 900, 20000}) {
      const Kind kind = all.size() % 2 == 0 ? Kind::kGdraa : Kind::kTree;
      all.push_back(std::make_unique<Exchange>(local, kind, count));
    }
    if (progress_thread) local.executor.start_thread();
    for (std::uint32_t round = 0; round < 8; ++round) {
      for (const auto& exchange : all) {
        exchange->fill(local.rank(), round);
        local.executor.start(exchange->plan());
      }
      for (const auto& exchange : all) {
        CHECK_NOTE(local.executor.wait(exchange->plan(), soon()) == Executor::Waited::kDone, "%s",
                   local.executor.missing(exchange->plan()).c_str());
        exchange->verify(exchange->data(), size, round);
      }
    }
    local.executor.stop_thread();
    local.barrier();
  });
}

// Members of a large group pass blocks on, with no more connections than barriers and heartbeats
// have. One leaves: all learn its name, whichever rank they wait for.
inline void relayed(const Settings& settings) {
  constexpr Rank kSize = 18;
  constexpr Rank kGone = 5;
  constexpr std::size_t kNeighbours = 10;  // 1, 2, 3, 4, 8, 16 ahead, and behind
  std::atomic<Rank> told{0};
  run(kSize, settings, [&](Local& local) {
    const auto gather = [&] {
      const std::string mine(static_cast<std::size_t>(local.rank()) * 97, 'x');
      std::vector<std::string> got;
      CHECK(local.world().allgather(Group::Kind::kExchange, "gather", 7,
                                    std::as_bytes(std::span(mine)), Deadline::in(60),
                                    got) == Outcome::kDone);
      for (std::size_t i = 0; i < got.size(); ++i) CHECK(got[i].size() == i * 97);
    };
    for (int round = 0; round < 3; ++round) gather();
    const auto queue = local.context.internal_queue();
    const std::size_t open = local.context.transport().connections(queue);
    CHECK_NOTE(open <= kNeighbours, "%zu connections", open);
    gather();  // no rank leaves before all have counted
    if (local.rank() == kGone) return;
    for (int round = 0; round < 2; ++round) {
      std::string said;
      const Rank named = require_error(ErrorKind::kPeerLost, gather, &said);
      CHECK_NOTE(named == kGone, "rank %d: %s", local.rank(), said.c_str());
    }
    told.fetch_add(1);
    while (told.load() < kSize - 1)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // no other has left before
  });
}

}  // namespace pgasdl::testing
