// Barriers, segment creation and passive messages among ranks that are threads, for the thread
// sanitizer. test_relay tests all-gathers, and tests/contract refused and continued calls.

#include <atomic>
#include <cstring>

#include "ranks.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

// Every rank's plain memory, written before a barrier and read after it: a leaky barrier is a race.
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

// Every rank sends to every rank, and two threads of each rank receive: messages from one sender to
// one receiver arrive in order, and none is lost.
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

// The receiver cannot inform the sender that its mailbox is free, and still gets the message.
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

// Overlapping groups create segments concurrently: no rank gets the same id twice.
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

}  // namespace

int main() {
  for (const Settings& settings : adversaries(23)) {
    barriers(settings, 3, 30);
    segments(settings);
    passive(settings, 2, 30);
  }
  passive_without_thanks();
  names();
  malformed({});
  malformed({.shm = true});
  for (Rank size : {1, 2, 5, 8}) barriers({}, size, 100);
  Settings sleeping;
  sleeping.options = sleepy();
  barriers(sleeping, 4, 100);
  passive(sleeping, 3, 60);
  passive({}, 4, 100);
  std::puts("ok");
}
