// The verbs transport without the layer above: full queues, faults that the device finds, lost
// peers, reconnections. Skipped without a device.

#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "ranks.hpp"
#include "verbs.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

// A rank without a context: calls that the layer above would refuse reach the device.
class Bare {
 public:
  Bare(Rank rank, Rank size, const VerbsOptions& options)
      : transport(rank, size, kToken, with_queues(options)),
        rank(rank),
        segment(0, kBytes, kIds, nullptr, size) {}

  static constexpr std::uint64_t kBytes = 4000;
  static constexpr std::uint32_t kIds = 64;
  static constexpr std::uint32_t kQueues = 8;

  static VerbsOptions with_queues(VerbsOptions options) {
    options.queues = kQueues;
    return options;
  }

  const RemoteSegment& there() const { return *segment.remote(1 - rank); }
  Transfer transfer(std::uint64_t from, std::uint64_t to, std::uint64_t bytes) const {
    return {&segment.local(), from, &there(), to, bytes};
  }
  bool post(QueueId queue, std::span<const Transfer> transfers, const RemoteFlag* flag = nullptr) {
    return transport.post_write(queue, 1 - rank, transfers, flag);
  }
  // Makes progress until the request is posted or completed, or the flag raised; fails if that
  // never happens.
  template <typename Ready>
  void until(Ready&& ready) {
    const Deadline deadline = soon();
    while (!ready()) {
      CHECK(!deadline.passed());
      transport.progress();
      std::this_thread::yield();
    }
  }
  void notify(QueueId queue, std::uint32_t id, std::uint32_t value) {
    const RemoteFlag flag{&there(), id, value};
    until([&] { return post(queue, {}, &flag); });
  }
  void await(std::uint32_t id, std::uint32_t value) {
    until([&] { return segment.local().board[id].load() == value; });
  }
  void complete(QueueId queue) {
    until([&] { return transport.complete(queue); });
  }
  // The text of an error of this kind, which `call` must throw.
  template <typename Call>
  std::string error(ErrorKind kind, Call&& call) {
    try {
      call();
    } catch (const Error& error) {
      CHECK_NOTE(error.kind() == kind, "kind %d: %s", int(error.kind()), error.what());
      CHECK((kind == ErrorKind::kPeerLost) == (error.rank() == 1 - rank));
      return error.what();
    }
    CHECK_NOTE(false, "no error of kind %d", int(kind));
    return {};
  }

  VerbsTransport transport;
  const Rank rank;
  Segment segment;
  std::barrier<>* together = nullptr;
};

void expect(const std::string& words, std::initializer_list<const char*> parts) {
  for (const char* part : parts) {
    CHECK_NOTE(words.find(part) != std::string::npos, "no \"%s\" in: %s", part, words.c_str());
  }
}

using BareProgram = std::function<void(Bare&)>;

// Runs two of them; rank `silent` has no service thread.
void run_bare(const VerbsOptions& options, const BareProgram& program, Rank silent = -1,
              const std::function<std::string(std::string)>& forge = {}) {
  std::array<std::string, 2> endpoints;
  std::array<std::string, 2> descriptions;
  std::barrier<> together(2);
  std::vector<std::thread> threads;
  for (Rank rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const auto me = static_cast<std::size_t>(rank);
      Bare bare(rank, 2, options);
      bare.together = &together;
      std::atomic<bool> stop{false};
      std::thread service([&] {
        while (rank != silent && !stop.load()) {
          pollfd ready{bare.transport.service_descriptor(), POLLIN, 0};
          if (poll(&ready, 1, 5) == 1) bare.transport.service();
        }
      });
      endpoints[me] = bare.transport.endpoint();
      const std::array<Rank, 1> peer{1 - rank};
      descriptions[me] = bare.transport.publish(bare.segment.local(), peer);
      together.arrive_and_wait();
      bare.transport.connect(1 - rank, endpoints[1 - me]);
      const std::string& theirs = descriptions[1 - me];
      bare.segment.set_remote(
          1 - rank, bare.transport.attach(1 - rank, forge ? forge(theirs) : theirs, kHost, soon()));
      together.arrive_and_wait();
      program(bare);
      together.arrive_and_wait();
      stop.store(true);
      service.join();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

bool untouched(const Bare& bare) {
  return std::all_of(bare.segment.local().data, bare.segment.local().data + Bare::kBytes,
                     [](std::byte byte) { return byte == std::byte{0}; });
}

// After a fault: posts fail until reconnect(), and other queues are not disturbed.
void recover(Bare& bare, QueueId broken) {
  const Transfer transfer = bare.transfer(0, 8, 16);
  bare.error(ErrorKind::kSystem, [&] { (void)bare.post(broken, {&transfer, 1}); });
  bare.transport.reconnect(1);
  bare.until([&] { return bare.post(broken, {&transfer, 1}); });
  bare.complete(broken);
  bare.notify(broken, 9, 99);
}

// The device itself refuses access beyond a segment, beyond its board, or without a valid key.
void out_of_bounds() {
  run_bare(as_messages(), [](Bare& bare) {
    if (bare.rank == 0) {
      std::memset(bare.segment.local().data, 1, Bare::kBytes);
      bare.notify(3, 1, 1);
      const Transfer beyond = bare.transfer(0, Bare::kBytes - 8, 9);
      bare.until([&] { return bare.post(2, {&beyond, 1}); });
      expect(bare.error(ErrorKind::kSystem, [&] { bare.complete(2); }),
             {"write of 9 bytes", "offset 3992", "rank 1", "queue 2", "access"});
      CHECK(bare.transport.complete(2));  // reported once
      bare.notify(3, 2, 1);               // another queue is another connection
      bare.complete(3);
      bare.together->arrive_and_wait();
      bare.together->arrive_and_wait();  // the other rank has looked
      recover(bare, 2);

      const RemoteFlag flag{&bare.there(), 4096, 1};  // a page beyond the board
      bare.until([&] { return bare.post(4, {}, &flag); });
      expect(bare.error(ErrorKind::kSystem, [&] { bare.complete(4); }),
             {"notification 4096", "rank 1", "queue 4"});
      Transfer before = bare.transfer(0, 0, 64);
      before.remote_offset = static_cast<std::uint64_t>(-4);
      std::uint64_t old = 0;
      const Atomic odd{Atomic::Kind::kFetchAdd, &bare.there(), 4, 1, 0, &old};
      bare.notify(5, 3, 1);
      bare.error(ErrorKind::kAlignment, [&] { (void)bare.transport.post_atomic(5, 1, odd); });
      bare.until([&] { return bare.transport.post_read(5, 1, {&before, 1}, nullptr); });
      expect(bare.error(ErrorKind::kSystem, [&] { bare.complete(5); }), {"read of 64", "queue 5"});
      bare.transport.reconnect(1);
      bare.notify(5, 10, 1);
    } else {
      bare.await(2, 1);
      bare.together->arrive_and_wait();
      CHECK(untouched(bare));
      bare.together->arrive_and_wait();
      bare.await(9, 99);
      CHECK(bare.segment.local().data[8] == std::byte{1});
      bare.await(10, 1);
    }
  });
}

// The peer's description, with one bit changed in the key of its data, a 32-bit word.
std::string with_wrong_key(std::string description) {
  description[28 + 2] = static_cast<char>(description[28 + 2] ^ 0x10);
  return description;
}

void wrong_key() {
  const auto program = [](Bare& bare) {
    if (bare.rank != 0) return bare.await(1, 1);
    std::memset(bare.segment.local().data, 1, Bare::kBytes);
    const Transfer transfer = bare.transfer(0, 0, 2000);
    bare.until([&] { return bare.post(0, {&transfer, 1}); });
    expect(bare.error(ErrorKind::kSystem, [&] { bare.complete(0); }),
           {"write of 2000 bytes", "offset 0", "rank 1", "key"});
    bare.transport.reconnect(1);
    bare.notify(0, 1, 1);
  };
  run_bare(
      {},
      [&](Bare& bare) {
        program(bare);
        if (bare.rank == 1) CHECK(untouched(bare));
      },
      -1, with_wrong_key);
  // Likewise if the peer retracts its segment.
  run_bare({}, [&](Bare& bare) {
    if (bare.rank == 1) bare.transport.retract(bare.segment.local());
    bare.together->arrive_and_wait();
    if (bare.rank == 1) return;
    const Transfer transfer = bare.transfer(0, 0, 2000);
    bare.until([&] { return bare.post(0, {&transfer, 1}); });
    expect(bare.error(ErrorKind::kSystem, [&] { bare.complete(0); }), {"rank 1", "deleted"});
  });
}

// Requests under way still read retracted memory; memory that was not published is refused.
void own_memory() {
  run_bare({}, [](Bare& bare) {
    if (bare.rank == 1) return bare.await(1, 1);
    Segment source(1, 1 << 20, 1, nullptr, 2);
    const std::array<Rank, 1> peer{1};
    bare.transport.publish(source.local(), peer);
    bare.notify(0, 2, 1);
    for (int i = 0; i < 50; ++i) {
      const Transfer transfer{&source.local(), static_cast<std::uint64_t>(i), &bare.there(), 0,
                              Bare::kBytes};
      bare.until([&] { return bare.post(0, {&transfer, 1}); });
    }
    bare.transport.retract(source.local());
    bare.complete(0);
    std::byte memory[64];
    Segment nobodys(memory, sizeof memory);
    const Transfer transfer{&nobodys.local(), 0, &bare.there(), 0, 8};
    bare.error(ErrorKind::kBuffer, [&] { (void)bare.post(0, {&transfer, 1}); });
    bare.error(ErrorKind::kQueue, [&] { (void)bare.post(99, {&transfer, 1}); });
    bare.notify(0, 1, 1);
  });
}

// A full queue pair refuses a post as a whole, and has room again after progress.
void full() {
  run_bare(depth(8), [](Bare& bare) {
    if (bare.rank == 1) return bare.await(3, 3);
    bare.notify(0, 1, 1);
    bare.complete(0);
    const Transfer transfer = bare.transfer(0, 64, 8);
    const RemoteFlag flag{&bare.there(), 2, 2};
    for (int i = 0; i < 7; ++i) CHECK(bare.post(0, {&transfer, 1}));
    CHECK(!bare.post(0, {&transfer, 1}, &flag));
    CHECK(bare.post(0, {&transfer, 1}));
    CHECK(!bare.post(0, {&transfer, 1}));
    CHECK(!bare.transport.complete(0));
    bare.until([&] { return bare.post(0, {&transfer, 1}, &flag); });
    bare.complete(0);
    bare.notify(0, 3, 3);
    bare.complete(0);
  });
}

// A peer whose end of the connection is gone, and one that never answered: an error names it, but
// not before the time for which a peer may stall.
void lost() {
  const double still = VerbsOptions{}.timeout_s;
  run_bare({}, [still](Bare& bare) {
    if (bare.rank == 0) {
      bare.notify(1, 1, 1);
      bare.complete(1);
    } else {
      bare.await(1, 1);
      bare.transport.reconnect(0);
    }
    bare.together->arrive_and_wait();
    if (bare.rank == 1) return bare.await(3, 3);
    const auto start = Clock::now();
    for (std::uint32_t i = 0; i < 5; ++i) bare.notify(1, 2, 1);
    expect(bare.error(ErrorKind::kPeerLost, [&] { bare.complete(1); }),
           {"notification 2", "rank 1", "queue 1", "no answer"});
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    CHECK_NOTE(seconds > still, "%.1f s", seconds);
    CHECK(bare.transport.complete(1));
    bare.error(ErrorKind::kPeerLost, [&] { bare.notify(1, 2, 1); });
    bare.transport.reconnect(1);
    bare.notify(1, 3, 3);
    bare.complete(1);
  });
  VerbsOptions impatient;
  impatient.timeout_s = 1;
  run_bare(
      impatient,
      [](Bare& bare) {
        if (bare.rank == 0) {
          const auto start = Clock::now();
          expect(bare.error(ErrorKind::kPeerLost, [&] { bare.notify(0, 1, 1); }),
                 {"rank 1", "not answered", "queue 0"});
          const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
          CHECK_NOTE(seconds > 0.9, "%.1f s", seconds);
        }
        bare.together->arrive_and_wait();
      },
      1);
}

// Both ask for the same connections at the same time, again and again, on all queues.
void both_at_once(std::uint32_t rounds) {
  run_bare({}, [&](Bare& bare) {
    for (std::uint32_t round = 1; round <= rounds; ++round) {
      bare.together->arrive_and_wait();
      for (QueueId queue = 0; queue < Bare::kQueues; ++queue) bare.notify(queue, queue, round);
      for (QueueId queue = 0; queue < Bare::kQueues; ++queue) bare.await(queue, round);
      for (QueueId queue = 0; queue < Bare::kQueues; ++queue) bare.complete(queue);
      bare.together->arrive_and_wait();
      // By both, by one, by the other, twice by one. A rank that reconnects alone notifies the
      // other, since otherwise the other's posts meanwhile would be lost.
      const std::uint32_t who = round % 4;
      const bool me = who == 0 || who % 2 == static_cast<std::uint32_t>(bare.rank);
      if (me) bare.transport.reconnect(1 - bare.rank);
      if (me && who == 3) bare.transport.reconnect(1 - bare.rank);
      if (who == 0) continue;
      if (me) {
        bare.notify(0, 20, round);
      } else {
        bare.await(20, round);
      }
    }
  });
}

}  // namespace

int main() {
  if (!have_device()) return 0;
  step("bounds", out_of_bounds);
  step("keys", wrong_key);
  step("own memory", own_memory);
  step("full", full);
  step("lost", lost);
  step("both at once", [] { both_at_once(9); });
  std::puts("ok");
}
