// Several rails under one transport, on two real devices: long transfers use both, a flag comes
// after everything else, and a device whose link goes down in the middle costs only time. Skipped
// without two devices; links are taken down only in guests of tests/softroce.

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "flags.hpp"
#include "transport/verbs/rails.hpp"
#include "verbs.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

constexpr std::uint64_t kStripe = 64 << 10;

VerbsOptions two_rails(VerbsOrder order = VerbsOrder::kAuto, std::uint32_t requests = 127) {
  VerbsOptions options = depth(requests);
  options.rails = 2;
  options.stripe = kStripe;
  options.order = order;
  options.warns = false;
  return options;
}

Settings over(VerbsOptions verbs) {
  Settings settings;
  verbs.queues = settings.options.queues + Context::kOwnQueues;
  settings.transport = [verbs](Rank rank, Rank size) {
    return std::make_unique<VerbsRails>(rank, size, kToken, verbs);
  };
  return settings;
}

VerbsRails& rails_of(Local& local) { return dynamic_cast<VerbsRails&>(local.context.transport()); }

// The packets that a device has sent so far.
std::uint64_t packets(const VerbsDeviceInfo& device) {
  std::ifstream file(text("/sys/class/infiniband/", device.device, "/ports/", device.port,
                          "/hw_counters/sent_pkts"));
  std::uint64_t count = 0;
  file >> count;
  return count;
}

std::vector<VerbsDeviceInfo> rails() {
  std::vector<VerbsDeviceInfo> chosen;
  for (const VerbsDeviceInfo& info : verbs_devices(two_rails())) {
    if (info.chosen) chosen.push_back(info);
  }
  return chosen;
}

void set_link(const VerbsDeviceInfo& rail, bool up) {
  const std::string command = text("ip link set ", rail.net_device, up ? " up" : " down");
  CHECK_NOTE(std::system(command.c_str()) == 0, "%s", command.c_str());
}

void fill(const std::shared_ptr<Segment>& segment, Rank from, std::uint32_t round,
          std::uint64_t bytes) {
  for (std::uint64_t i = 0; i < bytes; ++i) {
    items<unsigned char>(segment)[i] = pattern(from, round, i);
  }
}

void expect(const std::shared_ptr<Segment>& segment, std::uint64_t at, Rank from,
            std::uint32_t round, std::uint64_t bytes) {
  for (std::uint64_t i = 0; i < bytes; ++i) {
    CHECK_NOTE(items<unsigned char>(segment)[at + i] == pattern(from, round, i),
               "round %u, from %d, byte %zu", round, from, std::size_t(i));
  }
}

// Two ranks send each other messages of all lengths, each in a few writes and a flag; whoever sees
// the flag sees everything. A counted notification beside them is never lost or counted twice.
// `harm` runs on rank 0 before each round.
void exchanges(const Settings& settings, std::uint32_t rounds, std::uint64_t most,
               const std::function<void(Local&, std::uint32_t)>& harm = {}) {
  run(2, settings, [&](Local& local) {
    const auto inbox = local.segment(most);
    const auto outbox = local.segment(most);
    const auto back = local.segment(most);
    const Rank peer = local.peer(1);
    std::mt19937_64 random(7);  // the same on both
    for (std::uint32_t round = 1; round <= rounds; ++round) {
      if (local.rank() == 0 && harm) harm(local, round);
      const std::uint64_t bytes = round % 3 == 0 ? 1 + random() % 200 : 1 + random() % most;
      fill(outbox, local.rank(), round, bytes);
      std::vector<std::pair<std::uint64_t, std::uint64_t>> parts;
      for (std::uint64_t at = 0; at < bytes;) {
        const std::uint64_t part = std::min(bytes - at, 1 + random() % most);
        parts.emplace_back(at, part);
        at += part;
      }
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const Slice source{outbox, parts[i].first, parts[i].second};
        const Slice target{inbox, parts[i].first, parts[i].second};
        const Pair pair{&source, &target};
        CHECK((i + 1 < parts.size() ? local.context.write({&pair, 1}, peer, 0, soon())
                                    : local.context.write_notify({&pair, 1}, peer, *inbox, 0, round,
                                                                 0, soon())) == Outcome::kDone);
      }
      CHECK(local.context.write_notify_add({}, peer, *inbox, 5, 1, 0, soon()) == Outcome::kDone);
      CHECK(local.await(*inbox, 0) == round);
      expect(inbox, 0, peer, round, bytes);
      // Reads the same bytes back from their source.
      std::memset(items<unsigned char>(back), 0, bytes);
      const Slice here{back, 0, bytes};
      const Slice there{outbox, 0, bytes};
      const Pair pair{&here, &there};
      CHECK(local.context.read_notify({&pair, 1}, peer, *back, 3, round, 0, soon()) ==
            Outcome::kDone);
      CHECK(local.await(*back, 3) == round);
      expect(back, 0, peer, round, bytes);
      local.flush();
      local.barrier();
    }
    std::uint32_t left = 0;
    CHECK(local.context.notify_wait_count(*inbox, 5, rounds, soon(), left) == Outcome::kDone);
    CHECK_NOTE(left == 0, "%u too many", left);
    local.barrier();
  });
}

// Both devices send; short transfers go by the first.
void striped() {
  const auto both = rails();
  const std::uint64_t before[] = {packets(both[0]), packets(both[1])};
  run(2, over(two_rails()), [&](Local& local) {
    const auto segment = local.segment(32 * kStripe);
    const Slice all{segment, 0, 32 * kStripe};
    const Pair pair{&all, &all};
    for (std::uint32_t round = 1; round <= 3; ++round) {
      if (local.rank() == 0) {
        fill(segment, 0, round, all.bytes);
        CHECK(local.context.write_notify({&pair, 1}, 1, *segment, 1, round, 0, soon()) ==
              Outcome::kDone);
        local.flush();
      } else {
        CHECK(local.await(*segment, 1) == round);
        expect(segment, 0, 0, round, all.bytes);
      }
      local.barrier();
    }
    CHECK(local.context.transport().describe().find("RDMA by stripes of 65536 bytes") == 0);
  });
  const std::uint64_t least = 3 * 32 / 2 * kStripe / 4096;  // packets of half of the bytes
  for (int i = 0; i < 2; ++i) {
    const std::uint64_t sent = packets(both[static_cast<std::size_t>(i)]) - before[i];
    CHECK_NOTE(sent >= least, "device %d sent %zu packets of at least %zu", i, std::size_t(sent),
               std::size_t(least));
  }
}

// By the first rail only.
void atomics() {
  run(3, over(two_rails()), [](Local& local) {
    const auto segment = local.segment(64);
    const Slice target{segment, 8, 8};
    std::uint64_t old = 0;
    for (int i = 0; i < 20; ++i) {
      for (Rank rank = 0; rank < local.size(); ++rank) {
        CHECK(local.context.atomic(Atomic::Kind::kFetchAdd, target, rank, 1, 0, soon(), old) ==
              Outcome::kDone);
      }
    }
    local.barrier();
    CHECK(items<std::uint64_t>(segment, 8)[0] == 60);
    local.barrier();
  });
}

// One rail fails between rounds, and everything continues.
void lost(std::size_t victim, VerbsOrder order) {
  const auto both = rails();
  exchanges(over(two_rails(order)), 24, 20 * kStripe, [&](Local&, std::uint32_t round) {
    if (round == 8) set_link(both[victim], false);
  });
  set_link(both[victim], true);
}

// Runs `harm` so many milliseconds after the fourth round began.
void harmed_at_any_moment(VerbsOrder order, int milliseconds,
                          const std::function<void(Local&)>& harm) {
  std::thread later;
  exchanges(over(two_rails(order)), 16, 40 * kStripe, [&](Local& local, std::uint32_t round) {
    if (round != 4) return;
    later = std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
      harm(local);
    });
  });
  later.join();
}

void lost_at_any_moment(std::size_t victim, VerbsOrder order, int milliseconds) {
  const auto both = rails();
  harmed_at_any_moment(order, milliseconds, [&](Local&) { set_link(both[victim], false); });
  set_link(both[victim], true);
}

// One end of the rail's connections breaks, and its peer gets no answer: no port is down.
void broken_at_any_moment(std::size_t victim, VerbsOrder order, int milliseconds) {
  harmed_at_any_moment(order, milliseconds,
                       [&](Local& local) { rails_of(local).rail(victim).part(1); });
}

// As many rails as both ranks have.
void unequal() {
  Settings settings;
  VerbsOptions verbs = two_rails();
  verbs.queues = settings.options.queues + Context::kOwnQueues;
  settings.transport = [verbs](Rank rank, Rank size) {
    VerbsOptions options = verbs;
    if (rank == 1) options.ports = {{rails()[0].device, 0}};
    return std::make_unique<VerbsRails>(rank, size, kToken, options);
  };
  exchanges(settings, 8, 20 * kStripe);
}

void until_state(Local& local, bool dropped) {
  const Deadline deadline = soon();
  while ((rails_of(local).describe().find("was dropped") != std::string::npos) != dropped) {
    CHECK_NOTE(!deadline.passed(), "%s", rails_of(local).describe().c_str());
    local.context.transport().progress();
  }
}

// Rank 0 takes a dropped rail up again while nothing is under way.
void take_up(Local& local, const std::shared_ptr<Segment>& segment) {
  const Rank peer = local.peer(1);
  local.flush();
  local.barrier();
  if (local.rank() == 0) {
    CHECK(local.await(*segment, 100) == 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    local.context.reconnect(peer);
    local.notify(peer, *segment, 101, 1);
    local.flush();
  } else {
    local.notify(peer, *segment, 100, 1);
    local.flush();
    CHECK(local.await(*segment, 101) == 1);
  }
  until_state(local, false);
  local.barrier();
}

// Between two ends of two cables the acknowledgements of the first cable vanish: flags that arrived
// by it, and earlier bytes that were used meanwhile, do not arrive again by the second.
void not_acknowledged() {
  constexpr std::uint32_t kBurst = 30;
  Settings settings;
  VerbsOptions verbs = two_rails();
  verbs.queues = settings.options.queues + Context::kOwnQueues;
  settings.transport = [verbs](Rank rank, Rank size) {
    VerbsOptions options = verbs;
    options.ports = rank == 0 ? std::vector<VerbsPort>{{"rxe0"}, {"rxe2"}}
                              : std::vector<VerbsPort>{{"rxe1"}, {"rxe3"}};
    return std::make_unique<VerbsRails>(rank, size, kToken, options);
  };
  run(2, settings, [](Local& local) {
    const auto segment = local.segment(64);
    const Slice source{segment, 0, 8};
    const Slice target{segment, 16, 8};
    const Pair pair{&source, &target};
    auto& arrived = items<std::uint64_t>(segment, 16)[0];
    items<std::uint64_t>(segment)[0] = 7;
    local.barrier();
    if (local.rank() == 0) {
      local.notify(1, *segment, 6, 1);
      local.flush();
      CHECK(std::system("tc qdisc replace dev veth1 root netem limit 10000 loss 100%") == 0);
      for (std::uint32_t i = 0; i < kBurst; ++i) {
        CHECK(local.context.write_notify_add({&pair, 1}, 1, *segment, 5, 1, 0, soon()) ==
              Outcome::kDone);
      }
    } else {
      std::uint32_t left = 0;
      CHECK(local.context.notify_wait_count(*segment, 5, kBurst, soon(), left) == Outcome::kDone);
      CHECK(left == 0 && arrived == 7);
      arrived = 8;
    }
    until_state(local, true);
    local.flush();  // the second rail shows that all has arrived
    local.barrier();
    if (local.rank() == 0) {
      CHECK(std::system("tc qdisc del dev veth1 root") == 0);
    } else {
      CHECK_NOTE(arrived == 8, "%zu", std::size_t(arrived));
      CHECK(local.context.notify_reset(*segment, 5) == 0);
    }
    local.barrier();
  });
}

// Refused with the reason, until the first rail is taken up again.
void atomics_after_a_loss() {
  const auto both = rails();
  run(2, over(two_rails()), [&](Local& local) {
    const auto segment = local.segment(64);
    const Slice target{segment, 8, 8};
    std::uint64_t old = 0;
    const auto add = [&] {
      return local.context.atomic(Atomic::Kind::kFetchAdd, target, local.peer(1), 1, 0, soon(),
                                  old);
    };
    CHECK(add() == Outcome::kDone);
    local.barrier();
    if (local.rank() == 0) set_link(both[0], false);
    until_state(local, true);
    const std::string state = rails_of(local).describe();
    CHECK_NOTE(state.find(both[0].device) != std::string::npos, "%s", state.c_str());
    std::string said;
    require_error(ErrorKind::kUnavailable, [&] { (void)add(); }, &said);
    CHECK_NOTE(said.find("first rail only") != std::string::npos, "%s", said.c_str());
    local.barrier();
    if (local.rank() == 0) set_link(both[0], true);
    take_up(local, segment);
    CHECK(add() == Outcome::kDone);
    local.barrier();
  });
}

// The last rail is not dropped: its peer is lost, as with one rail.
void last() {
  const auto both = rails();
  Settings settings = over(two_rails());
  settings.options.stopped_after = 3;
  const auto thrown = outcomes(2, settings, [&](Local& local) {
    const auto segment = local.segment(64);
    local.barrier();
    if (local.rank() == 0) {
      set_link(both[0], false);
      set_link(both[1], false);
    }
    (void)local.await(*segment, 1);
  });
  for (const VerbsDeviceInfo& rail : both) set_link(rail, true);
  for (const std::exception_ptr& each : thrown) {
    require_error(ErrorKind::kPeerLost, [&] {
      if (each != nullptr) std::rethrow_exception(each);
    });
  }
}

}  // namespace

int main() {
  if (!have_device()) return 0;
  const bool in_guest = std::getenv("SOFTROCE_GUEST") != nullptr;
  if (in_guest && rails()[0].net_device == "veth0") {
    step("not acknowledged", not_acknowledged);
    std::puts("ok");
    return 0;
  }
  if (rails().size() < 2) {
    std::puts("no two RDMA devices: skipped");
    return 0;
  }
  constexpr auto kAuto = VerbsOrder::kAuto, kCompletion = VerbsOrder::kCompletion;
  step("striped", striped);
  step("exchanges", [] { exchanges(over(two_rails()), 30, 20 * kStripe); });
  step("completion", [] { exchanges(over(two_rails(kCompletion)), 30, 20 * kStripe); });
  step("shallow", [] { exchanges(over(two_rails(kAuto, 8)), 20, 20 * kStripe); });
  step("unequal", unequal);
  step("atomics", atomics);
  for (const std::size_t victim : {1u, 0u}) {
    for (const int moment : {5, 50, 95}) {
      step("broken", [&] { broken_at_any_moment(victim, kAuto, moment); });
    }
    step("held: broken", [&] { broken_at_any_moment(victim, kCompletion, 50); });
  }
  if (in_guest) {
    for (const std::size_t victim : {1u, 0u}) {
      step("lost", [&] { lost(victim, kAuto); });
      step("held: lost", [&] { lost(victim, kCompletion); });
      for (const int moment : {37, 74, 111}) {
        step("any moment", [&] { lost_at_any_moment(victim, kAuto, moment); });
      }
      step("held: any moment", [&] { lost_at_any_moment(victim, kCompletion, 74); });
    }
    step("atomics, lost", atomics_after_a_loss);
    step("last", last);
  }
  std::puts("ok");
}
