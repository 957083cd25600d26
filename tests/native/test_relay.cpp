// All-gathers of groups in which members pass blocks on, and of groups in which they do not:
// results, disagreement, unreadable blocks, and members that leave.

#include <atomic>
#include <chrono>
#include <cstring>
#include <random>

#include "ranks.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

using Kind = Group::Kind;

// Every step carries each block once, in the order of distance, from neighbours only.
void steps() {
  for (std::size_t members = 1; members <= 300; ++members) {
    for (const std::size_t radix : {std::size_t{2}, std::size_t{3}, std::max<size_t>(members, 2)}) {
      std::size_t have = 1;  // the own block, of distance 0
      std::size_t first_of_base = 0;
      const auto all = dissemination(members, radix);
      for (std::size_t i = 0; i < all.size(); ++i) {
        CHECK(all[i].distance == have && all[i].blocks >= 1);
        if (i > 0 && all[i].needed != all[i - 1].needed) first_of_base = i;
        CHECK(all[i].needed == first_of_base && all[i].blocks <= all[first_of_base].distance);
        have += all[i].blocks;
      }
      CHECK(have == members);
    }
    const auto barrier = Group::steps(Kind::kBarrier, members);
    const auto gather = Group::steps(Kind::kExchange, members);
    CHECK(members > 16 ? gather.size() == barrier.size() : gather.size() == members - 1);
  }
}

// Most are short, some empty, some of several pieces.
std::string part_of(Rank rank, std::uint32_t round, std::size_t slot) {
  std::mt19937 random(round * 7919 + static_cast<std::uint32_t>(rank));
  const std::size_t lengths[] = {0, slot, slot + 1, 2 * slot + random() % slot};
  std::string part(random() % 12 == 0 ? lengths[random() % 4] : random() % 70, 'x');
  for (std::size_t i = 0; i < part.size(); ++i) part[i] = static_cast<char>(random() + i / 5);
  return part;
}

Outcome gather(Group& group, Kind kind, const std::string& mine, Deadline deadline,
               std::vector<std::string>& all, const std::string& what = "gather") {
  return group.allgather(kind, what, std::hash<std::string>{}(what), std::as_bytes(std::span(mine)),
                         deadline, all);
}

// Likewise, in attempts of this length.
void insist(Group& group, Kind kind, const std::string& mine, std::vector<std::string>& all,
            double seconds) {
  const Deadline deadline = soon();
  while (gather(group, kind, mine, Deadline::in(seconds), all) != Outcome::kDone) {
    CHECK_NOTE(!deadline.passed(), "%s", group.missing_in_allgather(kind, "a relay").c_str());
    std::this_thread::yield();
  }
}

void results(const Settings& settings, Rank size, std::uint32_t rounds) {
  run(size, settings, [&](Local& local) {
    const auto ours = local.group(everybody(size));
    for (std::uint32_t round = 0; round < rounds; ++round) {
      const Kind kind = round % 4 == 3 ? Kind::kReduce : Kind::kExchange;
      Group& group = round % 2 == 0 ? local.world() : *ours;
      const std::size_t slot = group.slot_bytes(kind);
      std::vector<std::string> all;
      const double patience[] = {20, 0, 0.001};
      insist(group, kind, part_of(local.rank(), round, slot), all, patience[round % 3]);
      for (Rank rank = 0; rank < size; ++rank) {
        CHECK_NOTE(all[static_cast<std::size_t>(rank)] == part_of(rank, round, slot),
                   "rank %d of %d, block of %d in round %u", local.rank(), size, rank, round);
      }
    }
    local.barrier();
  });
}

// A member is in another call, of more pieces: all learn which one, and continue.
void another_call(const Settings& settings, Rank size) {
  const Rank other = 7;
  run(size, settings, [&](Local& local) {
    std::vector<std::string> all;
    for (std::uint32_t round = 0; round < 4; ++round) {
      const bool differs = local.rank() == other;
      std::string said;
      require_error(
          ErrorKind::kMismatch,
          [&] {
            (void)gather(local.world(), Kind::kExchange, std::string(differs ? 3000 : 3, 'x'),
                         soon(), all, differs ? "that" : "this");
          },
          &said);
      const char* const names = differs ? "rank 0 is in this" : "but rank 7 is in that:";
      CHECK_NOTE(said.find(names) != std::string::npos, "%s", said.c_str());
      insist(local.world(), Kind::kExchange, part_of(local.rank(), round, 1024), all, 20);
      CHECK(all[other] == part_of(other, round, 1024));
    }
    local.barrier();
  });
}

// A member writes invalid blocks into its neighbours' slots: all get an error, and read nothing
// outside the slots.
void unreadable(std::uint32_t generation, std::uint32_t bytes) {
  constexpr Rank kSize = 20;
  constexpr Rank kLiar = 5;
  run(kSize, {}, [&](Local& local) {
    if (local.rank() != kLiar) {
      std::vector<std::string> all;
      std::string said;
      require_error(
          ErrorKind::kMismatch,
          [&] { (void)gather(local.world(), Kind::kExchange, "sound", soon(), all); }, &said);
      CHECK_NOTE(said.find("rank 5 said nothing that can be read") != std::string::npos, "%s",
                 said.c_str());
      return;
    }
    const auto memory = Group::memory(kSize, true, local.context.options().passive_bytes);
    const std::uint64_t slot = memory.exchange / (2 * kSize);
    std::vector<std::byte> lie(slot - local.world().slot_bytes(Kind::kExchange), std::byte{0xff});
    std::memcpy(lie.data() + 16, &bytes, sizeof bytes);  // after a fingerprint and a total
    std::memcpy(lie.data() + 20, &generation, sizeof generation);
    Segment source(lie.data(), lie.size());
    Segment& control = local.world().control();
    const auto steps = Group::steps(Kind::kExchange, kSize);
    for (std::size_t step = 0; step < steps.size(); ++step) {
      const Rank peer = local.peer(static_cast<Rank>(steps[step].distance));
      const RemoteSegment* remote = control.remote(peer);
      // The first generation is odd.
      const std::uint64_t target =
          memory.states + memory.gossip + (kSize + steps[step].distance) * slot;
      const Transfer transfer{&source.local(), 0, remote, target, lie.size()};
      const RemoteFlag flag{remote, 32 + static_cast<std::uint32_t>(step), 1};
      CHECK(local.context.transport().post_write(local.context.internal_queue(), peer,
                                                 {&transfer, 1}, &flag));
    }
  });
}

enum class When { kBefore, kWithin, kAfter };

// A member leaves, in peace or not, before its all-gather, within it, or right after it: every
// other member has the result or an error that names the rank, and again at its next call.
void loses(const Settings& settings, Rank size, Rank gone, When when, bool fails, bool tries) {
  std::atomic<Rank> begun{0};
  const auto thrown = outcomes(size, settings, [&](Local& local) {
    const auto ours = local.group(everybody(size));
    Group& group = gone % 2 == 0 ? local.world() : *ours;
    const std::string mine = part_of(local.rank(), 5, 64);
    std::vector<std::string> all;
    insist(group, Kind::kReduce, mine, all, 20);
    begun.fetch_add(1);
    if (local.rank() == gone) {
      while (begun.load() < size) std::this_thread::yield();  // all have finished the first one
      for (Rank attempt = 0; when == When::kWithin && attempt < 1 + gone % 5; ++attempt) {
        if (gather(group, Kind::kReduce, mine, Deadline::once(), all) == Outcome::kDone) break;
        std::this_thread::sleep_for(std::chrono::microseconds(200));
      }
      if (when == When::kAfter) insist(group, Kind::kReduce, mine, all, 20);
      if (fails) throw Failure();
      return;
    }
    const auto ends = [&] {
      try {
        insist(group, Kind::kReduce, mine, all, tries ? 0 : 20);
        for (Rank rank = 0; rank < size; ++rank) {
          CHECK(all[static_cast<std::size_t>(rank)] == part_of(rank, 5, 64));
        }
        return true;
      } catch (const Error& error) {
        CHECK_NOTE(error.kind() == ErrorKind::kPeerLost && error.rank() == gone,
                   "rank %d, %d left: %s", local.rank(), gone, error.what());
        return false;
      }
    };
    const bool first = ends();
    if (when == When::kBefore) CHECK(!first);
    if (when == When::kAfter && !fails) CHECK(first);
    CHECK(!ends());
    CHECK(!ends());
  });
  for (Rank rank = 0; rank < size; ++rank) {
    const auto& error = thrown[static_cast<std::size_t>(rank)];
    CHECK_NOTE((error != nullptr) == (fails && rank == gone), "rank %d, %d left: %s", rank, gone,
               error != nullptr ? words(error).c_str() : "no error");
  }
}

}  // namespace

int main() {
  steps();
  const auto all = adversaries(31);
  Settings sleeping;
  sleeping.options = sleepy();
  Settings shm;
  shm.shm = true;
  for (const Rank size : {2, 3, 5, 16, 17, 18, 31, 32, 33}) results(all[0], size, 24);
  results(all[0], 64, 8);
  for (const Settings& settings : all) results(settings, 17, 16);
  for (const std::size_t some : {4, 5, 6}) {
    for (const Rank size : {16, 18, 33}) results(all[some], size, 8);
  }
  results(sleeping, 20, 24);
  results(shm, 20, 24);
  for (const Settings& settings : {all[0], all[4], all[6]}) another_call(settings, 20);
  another_call(all[0], 16);
  unreadable(0xffffffff, 0xffffffff);
  unreadable(1, 0xffffffff);
  unreadable(1, 1025);
  unreadable(3, 0);
  for (const Settings& settings : {all[0], all[5], sleeping, shm}) {
    for (const When when : {When::kBefore, When::kWithin, When::kAfter}) {
      for (const Rank gone : {0, 7, 12, 19}) loses(settings, 20, gone, when, false, false);
      loses(settings, 20, 3, when, true, false);
    }
  }
  for (const When when : {When::kBefore, When::kWithin, When::kAfter}) {
    loses(all[0], 20, 13, when, false, true);
    loses(all[4], 20, 4, when, false, false);
    loses(all[6], 17, 16, when, false, false);
    loses(all[0], 16, 3, when, false, false);
  }
  std::puts("ok");
}
