// Transport mpi over an emulated MPI, whose calls a test can hold at chosen points (mpi_ranks.hpp).

#include <latch>
#include <thread>

#include "mpi_ranks.hpp"
#include "ranks.hpp"

namespace pgasdl::testing {
namespace {

struct Mpi {
  // `maps`: MPI allocates windows, and maps all of them everywhere.
  explicit Mpi(Rank size, bool maps = false) : machine(std::make_shared<MpiMachine>(size)) {
    machine->maps = maps;
    for (Rank rank = 0; rank < size; ++rank) {
      worlds.push_back(std::make_shared<MpiWorld>(std::make_unique<MpiThread>(machine, rank), 1,
                                                  rank, size, std::set<Rank>{rank}, true,
                                                  MpiWorld::Threads::kMultiple));
    }
    settings.options.heartbeat_ms = 5;
    settings.transport = [this](Rank rank, Rank) -> std::unique_ptr<Transport> {
      return std::make_unique<MpiTransport>(
          worlds.at(static_cast<std::size_t>(rank)),
          MpiOptions{.queues = settings.options.queues + Context::kOwnQueues,
                     .created = !machine->maps});
    };
  }
  std::shared_ptr<MpiMachine> machine;
  // Worlds outlive contexts, as a process's MpiWorld does: memory that peers may write to stays.
  std::vector<std::shared_ptr<MpiWorld>> worlds;
  Settings settings;
};

constexpr std::uint32_t kFirst = 77;
constexpr std::uint32_t kMessages = 5;

// Rank 0 is about to return from the call that made a segment, and another of its threads takes
// messages from rank 1, whose call has already returned. A `bound` segment has two windows, data
// and board.
void what_comes_while_a_segment_is_made(bool bound) {
  Mpi mpi(2);
  std::mutex mutex;
  std::condition_variable changed;
  std::uint32_t n_taken = 0;
  bool armed = false;
  mpi.machine->taken = [&](int rank, const MpiHeader& header) {
    if (rank != 0 || header.kind != MpiHeader::Kind::kWrite) return;
    if (header.notification < kFirst || header.notification >= kFirst + kMessages) return;
    const std::lock_guard lock(mutex);
    ++n_taken;
    changed.notify_all();
  };
  mpi.machine->made = [&](int rank) {
    std::unique_lock lock(mutex);
    if (rank != 0 || !armed) return;
    armed = false;
    // The last message is taken before the earlier ones are known to be in place.
    CHECK(changed.wait_for(lock, std::chrono::seconds(20), [&] { return n_taken == kMessages; }));
  };
  run(2, mpi.settings, [&](Local& local) {
    std::vector<std::uint64_t> memory(64);
    auto* own = bound ? reinterpret_cast<std::byte*>(memory.data()) : nullptr;
    local.barrier();
    if (local.rank() == 0) {
      const std::lock_guard lock(mutex);
      armed = true;
    }
    local.barrier();
    const auto segment = local.segment(512, 128, own);
    if (local.rank() == 1) {
      for (std::uint32_t number = 0; number < kMessages; ++number) {
        items<std::uint64_t>(segment)[number] = 1000 + number;
        const Slice from{segment, 8 * number, 8};
        const Slice to{segment, 256 + 8 * number, 8};
        const Pair pair{&from, &to};
        CHECK(local.context.write_notify(std::span(&pair, 1), 0, *segment, kFirst + number, 3, 0,
                                         soon()) == Outcome::kDone);
      }
      local.flush();
    } else {
      CHECK(n_taken == kMessages);
      for (std::uint32_t number = 0; number < kMessages; ++number) {
        CHECK(local.await(*segment, kFirst + number) == 3);
        CHECK(items<std::uint64_t>(segment, 256)[number] == 1000 + number);
      }
    }
    local.barrier();
  });
}

// A message for a deleted segment does no harm, and does not delay later messages.
void what_comes_for_a_deleted_segment() {
  Mpi mpi(2);
  run(2, mpi.settings, [&](Local& local) {
    const auto kept = local.segment(64, 8);
    for (int round = 0; round < 50; ++round) {
      auto gone = local.segment(64, 8);
      if (local.rank() == 0) {
        Group::delete_segment(local.context, *gone);
        gone.reset();
      }
      local.barrier();
      if (local.rank() == 1) {
        local.notify(0, *gone, 1);
        local.notify(0, *kept, 2, 7);
      } else {
        CHECK(local.await(*kept, 2) == 7);
      }
    }
  });
}

// While long data are under way, later requests of their queue wait: flags, reads and the flags of
// later long data. Another queue's do not. The source stays in use until the data have left.
void what_comes_behind_long_data() {
  Mpi mpi(2);
  std::atomic<bool> lets{false};
  mpi.machine->lets = [&](int) { return lets.load(); };
  constexpr std::uint64_t kLong = 100 << 10;
  run(2, mpi.settings, [&](Local& local) {
    const auto segment = local.segment(4 * kLong, 8);
    const QueueId other = local.context.queue_create();
    const auto write = [&](std::uint64_t from, std::uint64_t bytes, std::uint32_t flag,
                           QueueId queue) {
      const Slice source{segment, from, bytes};
      const Slice target{segment, from + 2 * kLong, bytes};
      const Pair pair{&source, &target};
      CHECK(local.context.write_notify(std::span(&pair, 1), 0, *segment, flag, 3, queue, soon()) ==
            Outcome::kDone);
    };
    if (local.rank() == 1) {
      std::memset(items<std::byte>(segment), 7, 2 * kLong);
      write(0, kLong, 1, 0);
      write(kLong, 8, 2, 0);
      write(kLong + 8, kLong - 8, 3, 0);
      write(kLong, 8, 4, other);
      CHECK(local.context.wait(0, Deadline::in(0.05)) == Outcome::kTimeout);
      local.barrier();  // on another queue
      local.flush();
      std::memset(items<std::byte>(segment), 9, 2 * kLong);
    } else {
      CHECK(local.await(*segment, 4) == 3);
      for (const std::uint32_t flag : {1, 2, 3}) {
        CHECK(segment->local().board[flag].load(std::memory_order_acquire) == 0);
      }
      local.barrier();
      lets = true;
      for (const std::uint32_t flag : {3, 2, 1}) CHECK(local.await(*segment, flag) == 3);
      const auto* target = items<std::byte>(segment, 2 * kLong);
      CHECK(std::all_of(target, target + 2 * kLong,
                        [](std::byte byte) { return byte == std::byte{7}; }));
    }
    local.barrier();
  });
}

// Long data for a segment that the receiver has deleted, before or after they were announced.
void long_data_for_a_deleted_segment() {
  Mpi mpi(2);
  std::atomic<bool> lets{true};
  mpi.machine->lets = [&](int) { return lets.load(); };
  constexpr std::uint64_t kLong = 100 << 10;
  run(2, mpi.settings, [&](Local& local) {
    const auto kept = local.segment(kLong, 8);
    for (const bool announced : {false, true}) {
      auto gone = local.segment(2 * kLong, 8);
      lets = false;
      const auto remove = [&] {
        Group::delete_segment(local.context, *gone);
        gone.reset();
      };
      if (local.rank() == 0 && !announced) remove();
      local.barrier();
      if (local.rank() == 1) {
        const Slice source{gone, 0, kLong};
        const Slice target{gone, kLong, kLong};
        const Pair pair{&source, &target};
        CHECK(local.context.write_notify(std::span(&pair, 1), 0, *gone, 1, 3, 0, soon()) ==
              Outcome::kDone);
        local.notify(0, *kept, 2, 7);
      }
      local.barrier();  // the header came before
      if (local.rank() == 0) {
        if (announced) remove();
        lets = true;
        CHECK(local.await(*kept, 2) == 7);
      }
      local.barrier();
    }
  });
}

// Two threads of each rank make segments concurrently, each in its own group of the same ranks.
void groups_of_the_same_ranks_at_once() {
  Mpi mpi(3);
  run(3, mpi.settings, [&](Local& local) {
    const std::vector<std::shared_ptr<Group>> groups{local.group({0, 1, 2}),
                                                     local.group({0, 1, 2})};
    const auto work = [&](std::size_t which) {
      for (std::uint64_t round = 0; round < 20; ++round) {
        std::shared_ptr<Segment> segment;
        CHECK(groups[which]->create_segment(64 * (which + 1), 8, nullptr, soon(), segment) ==
              Outcome::kDone);
        const std::uint64_t content = 1000 * (round + 1) + which;
        items<std::uint64_t>(segment)[0] = content;
        const Slice from{segment, 0, 8};
        const Slice to{segment, 8, 8};
        const Pair pair{&from, &to};
        CHECK(local.context.write_notify(std::span(&pair, 1), local.peer(1), *segment, 1, 3, 0,
                                         soon()) == Outcome::kDone);
        CHECK(local.await(*segment, 1) == 3);
        CHECK(items<std::uint64_t>(segment)[1] == content);
        local.flush();
        CHECK(groups[which]->barrier(soon()) == Outcome::kDone);
      }
    };
    std::thread other(work, std::size_t{0});
    work(1);
    other.join();
    local.barrier();
  });
}

// Where all flags come as messages, every poll of a wait asks the library for them.
void each_poll_asks() {
  Mpi mpi(2);
  run(2, mpi.settings, [&](Local& local) {
    const auto probes = [&] {
      const std::lock_guard lock(mpi.machine->mutex);
      return mpi.machine->n_probes[local.rank()];
    };
    const int before = probes();
    for (int poll = 0; poll < 1000; ++poll) local.context.transport().progress();
    CHECK(probes() - before > 500);  // in some polls the thread of heartbeats asks
    local.barrier();
  });
}

// A rank that sleeps until a flag is woken by the store that raises it.
void a_store_wakes() {
  Mpi mpi(2, true);
  std::latch sleeps(1);
  std::latch raised(1);
  run(2, mpi.settings, [&](Local& local) {
    const auto segment = local.segment(64, 8);
    local.barrier();
    if (local.rank() == 0) {
      WakeWord& word = *local.context.liveness().wake_word();
      const std::uint32_t armed = word.arm();
      sleeps.count_down();
      raised.wait();
      CHECK(word.state.load() != armed);
      CHECK(local.await(*segment, 1) == 7);
      const std::uint32_t for_read = word.arm();
      CHECK(local.context.read_notify({}, 1, *segment, 2, 5, 0, soon()) == Outcome::kDone);
      CHECK(word.state.load() != for_read);
      const std::uint32_t for_own = word.arm();
      local.notify(0, *segment, 3);
      CHECK(word.state.load() != for_own);
    } else {
      sleeps.wait();
      local.notify(0, *segment, 1, 7);
      raised.count_down();
    }
    local.barrier();
  });
}

// A member describes its segment and times out: no rank is held inside MPI, and all continue when
// the member calls again.
void who_comes_late() {
  for (const Rank late : {0, 1, 2}) {
    Mpi mpi(3);
    std::latch described(1);
    std::latch waited(2);
    run(3, mpi.settings, [&](Local& local) {
      std::shared_ptr<Segment> segment;
      const auto create = [&](Deadline deadline) {
        return local.world().create_segment(64, 8, nullptr, deadline, segment);
      };
      if (local.rank() == late) {
        CHECK(create(Deadline::once()) == Outcome::kTimeout);
        described.count_down();
        waited.wait();
      } else {
        described.wait();
        CHECK(create(Deadline::in(0.1)) == Outcome::kTimeout);
        CHECK(create(Deadline::once()) == Outcome::kTimeout);
        waited.count_down();
      }
      CHECK(create(soon()) == Outcome::kDone);
      local.notify(local.peer(1), *segment, 1, 7);
      CHECK(local.await(*segment, 1) == 7);
      local.barrier();
      local.segment(64, 8);
    });
  }
}

}  // namespace
}  // namespace pgasdl::testing

int main() {
  using namespace pgasdl::testing;
  what_comes_while_a_segment_is_made(false);
  what_comes_while_a_segment_is_made(true);
  what_comes_for_a_deleted_segment();
  what_comes_behind_long_data();
  long_data_for_a_deleted_segment();
  groups_of_the_same_ranks_at_once();
  each_poll_asks();
  a_store_wakes();
  who_comes_late();
  return 0;
}
