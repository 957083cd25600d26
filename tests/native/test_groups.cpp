// Barriers, all-gathers, segment creation and passive messages among ranks that are threads.

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <tuple>

#include "ranks.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

void nap(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Plain memory of all ranks, written before a barrier and read after it: a leaky barrier is a race.
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
      const std::size_t most = group.slot_bytes(kind);
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

// Two threads of each rank create segments concurrently, each in its own group.
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

// Every rank sends to every rank, two threads of each rank receive; messages from one sender to one
// receiver arrive in order, none is lost.
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

// The receiver cannot tell the sender that its mailbox is free: it still gets the message.
void passive_without_thanks() {
  Settings failing;
  failing.faults = {.fail_rank = 1, .fail_at = 1};
  run(2, failing, [&](Local& local) {
    const std::byte byte{7};
    if (local.rank() == 0) {
      CHECK(local.world().passive_send(1, {&byte, 1}, soon()) == Outcome::kDone);
      return;
    }
    Rank sender = -1;
    std::string message;
    CHECK(local.world().passive_receive(soon(), sender, message) == Outcome::kDone);
    CHECK(sender == 0 && message == "\7");
  });
}

// Contributions longer than a slot travel in pieces; some members have more pieces than others.
void pieces(const Settings& settings) {
  run(3, settings, [&](Local& local) {
    for (const Group::Kind kind : {Group::Kind::kExchange, Group::Kind::kReduce}) {
      const std::size_t slot = local.world().slot_bytes(kind);
      for (const std::size_t most : {slot, 2 * slot, 3 * slot + 5}) {
        const auto part_of = [&](Rank rank) {
          std::string part(rank == 1 ? most : most / 3, 'x');
          for (std::size_t i = 0; i < part.size(); ++i) {
            part[i] = static_cast<char>(static_cast<std::size_t>(rank) + i / 7);
          }
          return part;
        };
        const std::string mine = part_of(local.rank());
        std::vector<std::string> all;
        int tries = 0;
        while (local.world().allgather(kind, "pieces", 5, std::as_bytes(std::span(mine)),
                                       Deadline::in(0.001), all) != Outcome::kDone) {
          CHECK(++tries < 20000);
        }
        for (Rank rank = 0; rank < 3; ++rank) {
          CHECK(all[static_cast<std::size_t>(rank)] == part_of(rank));
        }
      }
    }
  });
}

// While one thread is inside, even between its attempts, another is refused and changes nothing.
void one_inside(const Settings& settings) {
  run(2, settings, [&](Local& local) {
    const auto signal = local.segment(0, 4);
    const auto create = [&](std::uint64_t bytes, Deadline deadline) {
      std::shared_ptr<Segment> made;
      CHECK(local.world().create_segment(bytes, 4, nullptr, deadline, made) == Outcome::kDone);
      return made;
    };
    std::vector<std::string> all;
    std::shared_ptr<Segment> made;
    if (local.rank() == 0) {
      std::atomic<bool> inside{false};
      std::thread first([&] {
        const Group::Inside here(local.world(), Group::Kind::kExchange, "segment");
        while (local.world().create_segment(here, 64, 4, nullptr, Deadline::in(0.001), made) !=
               Outcome::kDone) {
          inside.store(true);
        }
      });
      while (!inside.load()) nap(1);
      for (int i = 0; i < 200; ++i) {
        require_error(ErrorKind::kMismatch, [&] { (void)create(i % 2 == 0 ? 64 : 32, soon()); });
        require_error(ErrorKind::kMismatch, [&] {
          (void)local.world().allgather(Group::Kind::kExchange, "other", 1, {}, soon(), all);
        });
      }
      local.notify(1, *signal, 0);
      first.join();
    } else {
      CHECK(local.await(*signal, 0) == 1);
      made = create(64, soon());
    }
    CHECK(made->bytes() == 64 && made->remote(local.peer(1))->bytes == 64);
    local.notify(local.peer(1), *made, 3, 9);
    CHECK(local.await(*made, 3) == 9);
    local.barrier();
  });
}

// Threads create segments in one group again and again: each call is refused, or correct.
void storm(const Settings& settings) {
  run(2, settings, [&](Local& local) {
    std::atomic<int> left{20};
    const auto work = [&] {
      while (left.fetch_sub(1) > 0) {
        std::shared_ptr<Segment> made;
        while (made == nullptr) {
          try {
            CHECK(local.world().create_segment(64, 4, nullptr, soon(), made) == Outcome::kDone);
          } catch (const Error& error) {
            CHECK_NOTE(error.kind() == ErrorKind::kMismatch, "%s", error.what());
            std::this_thread::yield();
          }
        }
        CHECK(made->remote(local.peer(1))->bytes == 64);
      }
    };
    std::thread other(work);
    work();
    other.join();
    local.barrier();
  });
}

// A collective that timed out half way keeps out others of its kind until it is continued, but not
// those of another kind.
void half_way() {
  run(2, {}, [&](Local& local) {
    const auto signal = local.segment(0, 4);
    std::vector<std::string> all;
    std::shared_ptr<Segment> made;
    const std::string mine = "what was given first";
    const auto gather = [&](const std::string& what, const std::string& given, Deadline deadline) {
      return local.world().allgather(Group::Kind::kReduce, what, 1, std::as_bytes(std::span(given)),
                                     deadline, all);
    };
    if (local.rank() == 0) {
      const auto once = Deadline::once();
      CHECK(local.world().create_segment(64, 4, nullptr, once, made) == Outcome::kTimeout);
      CHECK(gather("gather", mine, once) == Outcome::kTimeout);
      const std::byte byte{1};
      std::byte bound[64];
      for (const auto& [bytes, flags, memory] :
           {std::tuple{32, 4, false}, {64, 3, false}, {64, 4, true}}) {
        require_error(ErrorKind::kMismatch, [&] {
          (void)local.world().create_segment(static_cast<std::uint64_t>(bytes),
                                             static_cast<std::uint32_t>(flags),
                                             memory ? bound : nullptr, soon(), made);
        });
      }
      require_error(ErrorKind::kMismatch, [&] {
        (void)local.world().allgather(Group::Kind::kExchange, "other", 1, {&byte, 1}, soon(), all);
      });
      require_error(ErrorKind::kMismatch, [&] { (void)gather("gathering", mine, soon()); });
      require_error(ErrorKind::kMismatch, [&] { (void)gather("gather", "else", soon()); });
      local.notify(1, *signal, 0);
    } else {
      CHECK(local.await(*signal, 0) == 1);
    }
    local.barrier();
    CHECK(gather("gather", mine, soon()) == Outcome::kDone);
    CHECK(all[0] == mine && all[1] == mine);
    CHECK(local.world().create_segment(64, 4, nullptr, soon(), made) == Outcome::kDone);
    local.notify(local.peer(1), *made, 3, 9);
    CHECK(local.await(*made, 3) == 9);
    local.barrier();
  });
}

// Groups that overlap make segments concurrently: no rank has two with the same id.
void names() {
  run(3, {}, [&](Local& local) {
    const auto alone = local.group({local.rank()});
    const auto first = local.group(local.rank() == 2 ? std::vector<Rank>{2} : std::vector{0, 1});
    const auto second = local.group(local.rank() == 0 ? std::vector<Rank>{0} : std::vector{1, 2});
    const auto create = [](Group& group, std::shared_ptr<Segment>& made, Deadline deadline) {
      return group.create_segment(8, 1, nullptr, deadline, made);
    };
    std::vector<std::shared_ptr<Segment>> all;
    std::shared_ptr<Segment> one;
    std::shared_ptr<Segment> two;
    if (local.rank() == 1) {
      // It begins both before either is agreed on.
      CHECK(create(*first, one, Deadline::once()) == Outcome::kTimeout);
      CHECK(create(*second, two, Deadline::once()) == Outcome::kTimeout);
    } else {
      for (int i = 0; i < 9; ++i) {
        CHECK(create(*alone, all.emplace_back(), soon()) == Outcome::kDone);
      }
    }
    local.barrier();
    if (local.rank() != 2) CHECK(create(*first, one, soon()) == Outcome::kDone);
    if (local.rank() != 0) CHECK(create(*second, two, soon()) == Outcome::kDone);
    if (one != nullptr) all.push_back(one);
    if (two != nullptr) all.push_back(two);
    for (std::size_t i = 0; i < all.size(); ++i) {
      for (std::size_t k = 0; k < i; ++k) CHECK(all[i]->id() != all[k]->id());
    }
    local.barrier();
  });
}

// A malformed description of a peer's segment is an error that names the peer.
void malformed(const Settings& settings) {
  run(2, settings, [](Local& local) {
    for (std::size_t bytes = 0; bytes <= 6; ++bytes) {
      if (local.rank() == 0) {
        std::shared_ptr<Segment> made;
        const auto create = [&] {
          (void)local.world().create_segment(64, 1, nullptr, soon(), made);
        };
        if (bytes < sizeof(SegmentId)) CHECK(require_error(ErrorKind::kMismatch, create) == 1);
        if (bytes >= sizeof(SegmentId)) {  // an id, and nothing that a transport understands
          try {
            create();
            CHECK(false);
          } catch (const Error& error) {
            CHECK_NOTE(words(std::current_exception()).find("rank 1") != std::string::npos, "%s",
                       error.what());
          }
        }
      } else {
        const std::string garbage(bytes, 'x');
        std::vector<std::string> all;
        CHECK(local.world().allgather(Group::Kind::kExchange, "segment", 1,
                                      std::as_bytes(std::span(garbage)), soon(),
                                      all) == Outcome::kDone);
      }
    }
    const auto group = std::make_shared<Group>(local.context, std::vector<Rank>{0, 1}, false);
    (void)group->describe();
    require_error(ErrorKind::kMismatch, [&] { (void)group->attach({}, soon()); });
    local.barrier();
  });
}

// A call that timed out is continued by calling it again, and then succeeds like any other.
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
    // A second message waits until its mailbox is free, here until it times out.
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
    pieces(settings);
    one_inside(settings);
    storm(settings);
  }
  passive_without_thanks();
  half_way();
  names();
  malformed({});
  malformed({.shm = true});
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
