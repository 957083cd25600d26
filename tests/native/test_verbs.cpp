// The verbs transport on a real device, with ranks as threads of this process. Without a device the
// test reports that and succeeds: tests/softroce boots a machine that has one.

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>

#include "flags.hpp"
#include "plans.hpp"
#include "verbs.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

Settings over_verbs(VerbsOptions verbs = {}, std::uint32_t queues = Options{}.queues) {
  Settings settings;
  settings.options.queues = queues;
  verbs.queues = settings.options.queues + Context::kOwnQueues;
  settings.transport = [verbs](Rank rank, Rank size) {
    return std::make_unique<VerbsTransport>(rank, size, kToken, verbs);
  };
  return settings;
}

VerbsOptions completion_first(std::uint32_t requests) {
  VerbsOptions options = depth(requests);
  options.order = VerbsOrder::kCompletion;
  return options;
}

// For many ranks in a guest, whose only processor may be busy with other work for seconds.
Settings patiently(VerbsOptions verbs) {
  verbs.timeout_s = 20;
  Settings settings = over_verbs(verbs);
  settings.options.stopped_after = verbs.timeout_s;
  return settings;
}

// Short lists, and lists many times longer than the queue pair's depth; reads and their flags.
void lists_and_reads(const Settings& settings, std::size_t pieces) {
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
void many_in_flight(const Settings& settings, std::uint32_t writes) {
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
void away(Settings settings) {
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
void beats_are_lost(Settings settings, std::uint32_t rounds) {
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

// The requested device is chosen, or refused with the reason.
void choice() {
  const auto best = verbs_devices();
  CHECK(std::count_if(best.begin(), best.end(), [](const auto& info) { return info.chosen; }) == 1);
  for (const VerbsDeviceInfo& info : best) CHECK(info.chosen == info.refused.empty());
  VerbsOptions options;
  options.ports = {{best.back().device, best.back().port}};
  options.gid_index = best.back().gid_index;
  if (best.back().state == best.front().state) {
    const auto last = verbs_devices(options);
    CHECK(last[0].chosen && last[0].gid == best.back().gid);
    CHECK(last.size() == best.size());
  }
  options.ports = {{"nonesuch", 0}};
  for (const VerbsDeviceInfo& info : verbs_devices(options)) {
    CHECK(!info.chosen && info.refused == "device nonesuch was asked for");
  }
  require_error(ErrorKind::kUnavailable, [&] { VerbsTransport none(0, 1, kToken, options); });
}

// No setting has its default.
VerbsOptions unusual() {
  VerbsOptions options;
  options.pkey = 0x7fff;
  options.mtu = 512;
  options.service_level = 3;
  options.traffic_class = 104;
  options.global_routes = true;
  options.retry_count = 5;
  options.rnr_retry_count = 4;
  options.ack_timeout = 16;
  options.inline_bytes = 256;
  return options;
}

// Plans of three shapes in flight together, no barrier between iterations.
void plans(const Settings& settings, Rank size, bool progress_thread) {
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
void relayed(const Settings& settings) {
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

// Two ranks ask each other for a thousand connections before the first one exists. The last answer
// comes long after the time for which a silent peer is lost; no connection is given up.
void all_at_once() {
  constexpr std::uint32_t kQueues = 1000;
  run(2, over_verbs({}, kQueues), [&](Local& local) {
    const auto segment = local.segment(8, kQueues);
    const Rank peer = local.peer(1);
    const Deadline deadline = Deadline::in(150);
    std::vector<QueueId> queues(kQueues, 0);
    for (QueueId& queue : std::span(queues).subspan(1)) queue = local.context.queue_create();
    local.barrier();
    while (!queues.empty() && !deadline.passed()) {
      std::erase_if(queues, [&](QueueId queue) {
        return local.context.notify(peer, *segment, queue, 1, queue, Deadline::once()) ==
               Outcome::kDone;
      });
    }
    CHECK_NOTE(queues.empty(), "%zu connections are not there", queues.size());
    for (QueueId queue = 0; queue < kQueues; ++queue) {
      std::uint32_t found = 0;
      CHECK(local.context.notify_waitsome(*segment, queue, 1, deadline, found) == Outcome::kDone);
      CHECK(local.context.transport().connections(queue) == 1);
    }
    CHECK(local.world().barrier(deadline) == Outcome::kDone);
  });
}

}  // namespace

int main() {
  if (!have_device()) return 0;
  step("choice", choice);
  step("flags", [] { flag_is_last(over_verbs(), 3, 512, 40); });
  step("flags, shallow", [] { flag_is_last(over_verbs(depth(8)), 2, 20000, 10); });
  step("lists", [] { lists_and_reads(over_verbs(), 40); });
  step("long lists", [] { lists_and_reads(over_verbs(depth(8)), 500); });
  step("beats", [] { beats_are_lost(over_verbs(), 60); });
  step("many", [] { many_in_flight(over_verbs(depth(8)), 300); });
  step("away", [] { away(over_verbs(as_messages())); });
  step("away, counted", [] { away(over_verbs()); });
  step("settings", [] { flag_is_last(over_verbs(unusual()), 2, 20000, 5); });
  step("plans", [] { plans(over_verbs(), 3, false); });
  step("plans, thread", [] { plans(over_verbs(depth(8)), 2, true); });
  step("relayed", [] { relayed(patiently({})); });
  step("all at once", all_at_once);
  const auto held = [](std::uint32_t requests) { return over_verbs(completion_first(requests)); };
  step("held: flags", [&] { flag_is_last(held(127), 3, 512, 20); });
  step("shallow", [&] { flag_is_last(held(8), 2, 20000, 10); });
  step("long lists", [&] { lists_and_reads(held(8), 500); });
  step("many", [&] { many_in_flight(held(8), 300); });
  step("away", [&] { away(over_verbs(as_messages(completion_first(127)))); });
  step("away, counted", [&] { away(held(127)); });
  step("plans, thread", [&] { plans(held(8), 2, true); });
  step("relayed", [&] { relayed(patiently(completion_first(127))); });
  std::puts("ok");
}
