// Barriers, all-gathers, segment creation and passive messages among ranks that are threads.

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>

#include "ranks.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

void nap(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Plain memory of all ranks, written before and read after: a barrier that leaks is a race.
void barriers(const Settings& settings, Rank size, std::uint64_t rounds) {
  std::vector<std::uint64_t> cells(static_cast<std::size_t>(size));
  run(size, settings, [&](Local& local) {
    for (std::uint64_t round = 1; round <= rounds; ++round) {
      cells[static_cast<std::size_t>(local.rank())] = round;
      local.barrier();
      for (std::uint64_t cell : cells) CHECK(cell == round);
      local.barrier();
    }
  });
}

std::string contribution(Rank rank, std::uint32_t round, std::size_t most) {
  const std::size_t bytes = (round * 97 + static_cast<std::size_t>(rank) * 31) % most;
  return std::string(bytes,
                     static_cast<char>('a' + (round + static_cast<std::uint32_t>(rank)) % 26));
}

void allgathers(const Settings& settings, Rank size, std::uint32_t rounds) {
  run(size, settings, [&](Local& local) {
    std::vector<Rank> odd;
    for (Rank rank = 0; rank < size; ++rank) {
      if (rank % 2 == local.rank() % 2) odd.push_back(rank);
    }
    const auto half = local.group(odd);
    const auto gather = [&](Group& group, Group::Kind kind, std::uint32_t round) {
      const std::size_t most = Group::slot_bytes(kind);
      const std::string mine = contribution(local.rank(), round, most);
      std::vector<std::string> all;
      CHECK(group.allgather(kind, "gather", 7, std::as_bytes(std::span(mine)), soon(), all) ==
            Outcome::kDone);
      for (std::size_t i = 0; i < all.size(); ++i) {
        CHECK(all[i] == contribution(group.ranks()[i], round, most));
      }
    };
    for (std::uint32_t round = 0; round < rounds; ++round) {
      gather(local.world(), Group::Kind::kExchange, round);
      gather(local.world(), Group::Kind::kReduce, round + 1);
      gather(*half, Group::Kind::kReduce, round + 2);
    }
    // Different calls, or the same with other arguments: an error on every rank, and no hang.
    std::vector<std::string> all;
    require_error(ErrorKind::kMismatch, [&] {
      (void)local.world().allgather(Group::Kind::kExchange, local.rank() == 0 ? "this" : "that",
                                    local.rank() == 0 ? 1 : 2, {}, soon(), all);
    });
    gather(local.world(), Group::Kind::kExchange, 3);
    half->remove();
    local.barrier();
  });
}

// Two threads of each rank create segments at once, each on its own group.
void segments(const Settings& settings) {
  run(3, settings, [&](Local& local) {
    const auto first = local.group({0, 1, 2});
    const auto second = local.group({0, 1, 2});
    const auto create = [&](Group& group, std::byte mark) {
      for (std::uint64_t round = 1; round <= 8; ++round) {
        std::shared_ptr<Segment> made;
        const auto me = static_cast<std::uint64_t>(local.rank());
        const std::uint64_t bytes = 64 * round + 8 * me;
        CHECK(group.create_segment(bytes, 16, nullptr, soon(), made) == Outcome::kDone);
        CHECK(made->bytes() == bytes);
        CHECK(made->remote(local.peer(1))->bytes ==
              64 * round + 8 * static_cast<std::uint64_t>(local.peer(1)));
        made->local().data[8] = mark;
        const Slice source{made, 8, 1};
        const Slice target{made, 16 + me, 1};
        const Pair pair{&source, &target};
        CHECK(local.context.write_notify({&pair, 1}, local.peer(1), *made, 3, 1, 0, soon()) ==
              Outcome::kDone);
        CHECK(local.await(*made, 3) == 1);
        CHECK(made->local().data[16 + static_cast<std::uint64_t>(local.peer(2))] == mark);
        CHECK(group.barrier(soon()) == Outcome::kDone);
        Group::delete_segment(local.context, *made);
        require_error(ErrorKind::kSegment, [&] { (void)local.context.notify_reset(*made, 0); });
      }
    };
    std::thread other([&] { create(*second, std::byte{2}); });
    create(*first, std::byte{1});
    other.join();
    local.barrier();
  });
}

// Everybody sends to everybody, two threads of each rank receive; messages of one sender to one
// receiver come in order, none is lost.
void passive(const Settings& settings, Rank size, std::uint32_t messages) {
  run(size, settings, [&](Local& local) {
    const auto n = static_cast<std::size_t>(size);
    std::vector<std::atomic<std::uint64_t>> sum(n);
    std::atomic<std::uint32_t> left{static_cast<std::uint32_t>(n) * messages};
    std::vector<std::thread> receivers;
    for (int i = 0; i < 2; ++i) {
      receivers.emplace_back([&] {
        while (left.load() != 0) {
          Rank sender = -1;
          std::string message;
          if (local.world().passive_receive(Deadline::in(0.02), sender, message) !=
              Outcome::kDone) {
            continue;
          }
          std::uint32_t number = 0;
          CHECK(message.size() >= sizeof number);
          std::memcpy(&number, message.data(), sizeof number);
          CHECK(message.size() == sizeof number + number * 5 % 3000);
          for (std::size_t k = sizeof number; k < message.size(); ++k) {
            CHECK(message[k] == static_cast<char>(number));
          }
          sum[static_cast<std::size_t>(sender)].fetch_add(number);
          left.fetch_sub(1);
        }
      });
    }
    for (std::uint32_t number = 1; number <= messages; ++number) {
      for (Rank distance = 0; distance < size; ++distance) {
        std::string message(sizeof number + number * 5 % 3000, static_cast<char>(number));
        std::memcpy(message.data(), &number, sizeof number);
        CHECK(local.world().passive_send(local.peer(distance), std::as_bytes(std::span(message)),
                                         soon()) == Outcome::kDone);
      }
    }
    for (std::thread& receiver : receivers) receiver.join();
    for (const auto& total : sum)
      CHECK(total.load() == std::uint64_t{messages} * (messages + 1) / 2);
    local.barrier();
  });
}

// What timed out is continued by calling it again, and then is as good as any.
void resumed(const Settings& settings) {
  run(3, settings, [&](Local& local) {
    const auto insist = [&](auto&& attempt) {
      int tries = 0;
      while (attempt(Deadline::in(0.002)) != Outcome::kDone) CHECK(++tries < 5000);
    };
    for (Rank late = 0; late < 3; ++late) {
      if (local.rank() == late) nap(30);
      insist([&](Deadline deadline) { return local.world().barrier(deadline); });

      if (local.rank() == late) nap(30);
      const std::string mine = contribution(local.rank(), 5, 100);
      std::vector<std::string> all;
      insist([&](Deadline deadline) {
        return local.world().allgather(Group::Kind::kReduce, "late", 1,
                                       std::as_bytes(std::span(mine)), deadline, all);
      });
      CHECK(all[1] == contribution(1, 5, 100));

      if (local.rank() == late) nap(30);
      std::shared_ptr<Segment> made;
      insist([&](Deadline deadline) {
        return local.world().create_segment(100, 4, nullptr, deadline, made);
      });
      CHECK(made->remote(local.peer(1))->bytes == 100);
      std::uint32_t found = 0;
      CHECK(local.context.notify_waitsome(*made, 0, 4, Deadline::in(0.01), found) ==
            Outcome::kTimeout);
      local.barrier();
      local.notify(local.peer(1), *made, 2, 77);
      CHECK(local.await(*made, 0, 4) == 77);
      local.barrier();
    }
    // A second message waits for its mailbox; one try says so at once.
    const std::byte byte{1};
    Rank sender = -1;
    std::string message;
    if (local.rank() == 0) {
      CHECK(local.world().passive_send(1, {&byte, 1}, soon()) == Outcome::kDone);
      CHECK(local.world().passive_send(1, {&byte, 1}, Deadline::in(0.01)) == Outcome::kTimeout);
    }
    local.barrier();
    if (local.rank() == 1) {
      CHECK(local.world().passive_receive(soon(), sender, message) == Outcome::kDone);
      CHECK(local.world().passive_receive(Deadline::in(0.01), sender, message) ==
            Outcome::kTimeout);
    }
    local.barrier();
  });
}

}  // namespace

int main() {
  for (const Settings& settings : adversaries(23)) {
    barriers(settings, 3, 30);
    allgathers(settings, 4, 12);
    segments(settings);
    passive(settings, 2, 30);
    resumed(settings);
  }
  for (Rank size : {1, 2, 5, 8}) barriers({}, size, 100);
  Settings sleeping;
  sleeping.options = sleepy();
  barriers(sleeping, 4, 100);
  allgathers(sleeping, 3, 60);
  passive(sleeping, 3, 60);
  allgathers({}, 5, 100);
  passive({}, 4, 100);
  std::puts("ok");
}
