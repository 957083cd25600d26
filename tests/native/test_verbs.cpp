// The verbs transport on a real device, ranks as threads of this process. Without a device it says
// so and ends well: tests/softroce boots a machine that has one.

#include <poll.h>

#include <array>
#include <atomic>
#include <cstring>
#include <random>

#include "plans.hpp"
#include "ranks.hpp"
#include "transport/verbs.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

constexpr const char* kToken = "sixteen bytes...";

Settings over_verbs(VerbsOptions verbs = {}) {
  Settings settings;
  verbs.queues = settings.options.queues + 2;
  settings.transport = [verbs](Rank rank, Rank size) {
    return std::make_unique<VerbsTransport>(rank, size, kToken, verbs);
  };
  return settings;
}

unsigned char pattern(Rank from, std::uint32_t round, std::uint64_t i) {
  return static_cast<unsigned char>(static_cast<std::uint64_t>(from) * 31 + round * 7 + i * 13 + 1);
}

// Every rank writes to every other, pieces and then the flag: who sees it sees all of them.
void flag_is_last(const Settings& settings, Rank size, std::uint64_t slot, std::uint32_t rounds) {
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
        CHECK(local.await(*inbox, from) == round);
        for (std::uint64_t i = 0; i < slot; ++i) {
          CHECK_NOTE(items<unsigned char>(inbox)[from * slot + i] ==
                         pattern(static_cast<Rank>(from), round, i),
                     "round %u, from %zu, byte %zu", round, std::size_t(from), std::size_t(i));
        }
        local.notify(static_cast<Rank>(from), *inbox, n + me, round);
      }
      local.flush();
      for (Rank distance = 1; distance < size; ++distance) {
        CHECK(local.await(*inbox, n + static_cast<std::uint64_t>(local.peer(distance))) == round);
      }
    }
  });
}

// Lists that fit and lists many times longer than a queue pair is deep, reads, and their flags.
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
    // Back from the peer, where it is by now.
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

// The owner and two others add to one word, and guard plain memory with a lock.
void atomics(const Settings& settings, std::uint64_t rounds) {
  constexpr Rank kSize = 3;
  run(kSize, settings, [&](Local& local) {
    const auto segment = local.segment(64);
    const Slice counter{segment, 0, 8};
    const Slice lock{segment, 8, 8};
    const Slice guarded{segment, 16, 8};
    const Slice own{segment, 24, 8};
    const auto atomic = [&](Atomic::Kind kind, const Slice& target, std::uint64_t operand,
                            std::uint64_t compare) {
      std::uint64_t old = ~std::uint64_t{0};
      CHECK(local.context.atomic(kind, target, 0, operand, compare, soon(), old) == Outcome::kDone);
      return old;
    };
    std::uint64_t last = 0;
    for (std::uint64_t i = 0; i < rounds; ++i) {
      const std::uint64_t old = atomic(Atomic::Kind::kFetchAdd, counter, 1, 0);
      CHECK(old < kSize * rounds && (i == 0 || old > last));
      last = old;
      while (atomic(Atomic::Kind::kCompareSwap, lock, 1, 0) != 0) std::this_thread::yield();
      const Pair pair{&own, &guarded};
      CHECK(local.context.read({&pair, 1}, 0, 0, soon()) == Outcome::kDone);
      local.flush();
      ++*items<std::uint64_t>(segment, 24);
      CHECK(local.context.write({&pair, 1}, 0, 0, soon()) == Outcome::kDone);
      local.flush();
      CHECK(atomic(Atomic::Kind::kCompareSwap, lock, 0, 1) == 1);
    }
    local.barrier();
    if (local.rank() == 0) {
      CHECK(*items<std::uint64_t>(segment) == kSize * rounds);
      CHECK(*items<std::uint64_t>(segment, 16) == kSize * rounds);
    }
    local.barrier();
  });
}

// Several threads of each rank post far more than there is room for, on one queue.
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
          CHECK(local.context.write_notify({&own, 1}, local.peer(1), *segment, number, i, 0,
                                           soon()) == Outcome::kDone);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    local.flush();
    CHECK(local.context.queue_size(0) == 0);
    local.barrier();  // on another queue: flags of this one may still be on their way
    for (std::uint64_t number = 0; number < kThreads; ++number) {
      while (segment->local().board[number].load() != writes) std::this_thread::yield();
      CHECK(*items<std::uint64_t>(segment, 2048 + 64 * number) == number + 1);
    }
    local.barrier();
  });
}

// More than the device carries in one message, from and into memory that was only bound, and a
// segment of no bytes.
void large_and_empty(const Settings& settings, std::uint64_t bytes) {
  run(2, settings, [&](Local& local) {
    std::vector<std::byte> memory(bytes + 64);
    const auto segment = local.segment(bytes, 8, memory.data() + 24);
    const auto target = local.segment(bytes + 3, 8);
    const auto empty = local.segment(0, 8);
    for (std::uint64_t i = 0; i < bytes; i += 509) {
      items<unsigned char>(segment)[i] = pattern(local.rank(), 1, i);
    }
    const Slice from{segment, 0, bytes};
    const Slice to{target, 3, bytes};
    const Pair pair{&from, &to};
    CHECK(local.context.write_notify({&pair, 1}, local.peer(1), *empty, 5, 1, 0, soon()) ==
          Outcome::kDone);
    CHECK(local.await(*empty, 5) == 1);
    for (std::uint64_t i = 0; i < bytes; ++i) {
      CHECK(items<unsigned char>(target)[3 + i] ==
            (i % 509 == 0 ? pattern(local.peer(1), 1, i) : 0));
    }
    local.flush();
    std::fill(memory.begin(), memory.end(), std::byte{0});
    local.barrier();
    CHECK(local.context.read_notify({&pair, 1}, local.peer(1), *segment, 1, 1, 0, soon()) ==
          Outcome::kDone);
    CHECK(local.await(*segment, 1) == 1);
    for (std::uint64_t i = 0; i < bytes; i += 509) {
      CHECK(items<unsigned char>(segment)[i] == pattern(local.rank(), 1, i));
    }
    local.barrier();
  });
}

// A rank is a peer of its own.
void self(const Settings& settings) {
  run(1, settings, [&](Local& local) {
    const auto segment = local.segment(256);
    const Slice low{segment, 0, 64};
    const Slice high{segment, 128, 64};
    const Slice word{segment, 128, 8};
    const Pair pair{&low, &high};
    *items<std::uint64_t>(segment) = 41;
    CHECK(local.context.write_notify({&pair, 1}, 0, *segment, 1, 2, 0, soon()) == Outcome::kDone);
    CHECK(local.await(*segment, 1) == 2);
    std::uint64_t old = 0;
    CHECK(local.context.atomic(Atomic::Kind::kFetchAdd, word, 0, 1, 0, soon(), old) ==
          Outcome::kDone);
    CHECK(old == 41);
    CHECK(local.context.read_notify({&pair, 1}, 0, *segment, 3, 4, 0, soon()) == Outcome::kDone);
    CHECK(local.await(*segment, 3) == 4 && *items<std::uint64_t>(segment) == 42);
    local.flush();
  });
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

// Barriers, an all-gather in groups, passive messages, and segments that come and go.
void groups(const Settings& settings, Rank size) {
  std::vector<std::uint64_t> cells(static_cast<std::size_t>(size));
  run(size, settings, [&](Local& local) {
    for (std::uint64_t round = 1; round <= 20; ++round) {
      cells[static_cast<std::size_t>(local.rank())] = round;
      local.barrier();
      for (std::uint64_t cell : cells) CHECK(cell == round);
      local.barrier();
    }
    std::vector<Rank> alike;
    for (Rank rank = local.rank() % 2; rank < size; rank += 2) alike.push_back(rank);
    const auto half = local.group(alike);
    for (Rank round = 0; round < 5; ++round) {
      const std::string mine(static_cast<std::size_t>(100 * round + local.rank()), 'x');
      std::vector<std::string> got;
      CHECK(half->allgather(Group::Kind::kReduce, "gather", 7, std::as_bytes(std::span(mine)),
                            soon(), got) == Outcome::kDone);
      for (std::size_t i = 0; i < got.size(); ++i) {
        CHECK(got[i].size() == static_cast<std::size_t>(100 * round + half->ranks()[i]));
      }
      const auto segment = local.segment(64 * static_cast<std::uint64_t>(round), 4);
      local.notify(local.peer(1), *segment, 3, 5);
      CHECK(local.await(*segment, 3) == 5);
      local.barrier();
      Group::delete_segment(local.context, *segment);
      const std::string message = text("from ", local.rank(), " in ", round);
      CHECK(local.world().passive_send(local.peer(1), std::as_bytes(std::span(message)), soon()) ==
            Outcome::kDone);
      Rank sender = -1;
      std::string received;
      CHECK(local.world().passive_receive(soon(), sender, received) == Outcome::kDone);
      CHECK(sender == local.peer(size - 1) && received == text("from ", sender, " in ", round));
    }
    local.barrier();
  });
}

// A rank without a context: what the layer above lets nobody do gets as far as the device.
class Bare {
 public:
  Bare(Rank rank, Rank size, const VerbsOptions& options)
      : transport(rank, size, kToken, options),
        rank(rank),
        segment(0, kBytes, kIds, nullptr, size) {}

  static constexpr std::uint64_t kBytes = 4000;
  static constexpr std::uint32_t kIds = 64;

  const RemoteSegment& there() const { return *segment.remote(1 - rank); }
  Transfer transfer(std::uint64_t from, std::uint64_t to, std::uint64_t bytes) const {
    return {&segment.local(), from, &there(), to, bytes};
  }
  bool post(QueueId queue, std::span<const Transfer> transfers, const RemoteFlag* flag = nullptr) {
    return transport.post_write(queue, 1 - rank, transfers, flag);
  }
  // Until it is posted, completed, raised: one of them has to come.
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
  // The words of an error of this kind, which has to come.
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

// Two of them; a rank that is `silent` has no service thread.
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
          1 - rank, bare.transport.attach(1 - rank, forge ? forge(theirs) : theirs, soon()));
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

// After a fault: posts go on failing until reconnect(), other queues are not disturbed.
void recover(Bare& bare, QueueId broken) {
  const Transfer transfer = bare.transfer(0, 8, 16);
  bare.error(ErrorKind::kSystem, [&] { (void)bare.post(broken, {&transfer, 1}); });
  bare.transport.reconnect(1);
  bare.until([&] { return bare.post(broken, {&transfer, 1}); });
  bare.complete(broken);
  bare.notify(broken, 9, 99);
}

// The device itself refuses what lies beyond a segment, beyond its board, or has no valid key.
void out_of_bounds() {
  run_bare({}, [](Bare& bare) {
    if (bare.rank == 0) {
      std::memset(bare.segment.local().data, 1, Bare::kBytes);
      bare.notify(3, 1, 1);
      const Transfer beyond = bare.transfer(0, Bare::kBytes - 8, 9);
      bare.until([&] { return bare.post(2, {&beyond, 1}); });
      expect(bare.error(ErrorKind::kSystem, [&] { bare.complete(2); }),
             {"write of 9 bytes", "offset 3992", "rank 1", "queue 2", "access"});
      CHECK(bare.transport.complete(2));  // told once
      bare.notify(3, 2, 1);               // another queue is another connection
      bare.complete(3);
      bare.together->arrive_and_wait();
      bare.together->arrive_and_wait();  // the other one has looked
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

// The key of the peer's data, a 32-bit word of its description, with one bit changed.
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
  // The same when the peer takes its segment back.
  run_bare({}, [&](Bare& bare) {
    if (bare.rank == 1) bare.transport.retract(bare.segment.local());
    bare.together->arrive_and_wait();
    if (bare.rank == 1) return;
    const Transfer transfer = bare.transfer(0, 0, 2000);
    bare.until([&] { return bare.post(0, {&transfer, 1}); });
    expect(bare.error(ErrorKind::kSystem, [&] { bare.complete(0); }), {"rank 1", "deleted"});
  });
}

// What was retracted is still read by requests under way; memory of nobody is refused.
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

// A queue pair that is full says so, all or nothing, and has room again after progress.
void full() {
  VerbsOptions options;
  options.depth = 8;
  run_bare(options, [](Bare& bare) {
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

// A peer whose end is gone, and one that never answered: named within three seconds.
void lost() {
  run_bare({}, [](Bare& bare) {
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
    CHECK_NOTE(seconds < 3, "%.1f s", seconds);
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
          CHECK_NOTE(seconds > 0.9 && seconds < 3, "%.1f s", seconds);
        }
        bare.together->arrive_and_wait();
      },
      1);
}

// Both ask for the same connections at the same moment, again and again, on all queues.
void both_at_once(std::uint32_t rounds) {
  VerbsOptions options;
  options.queues = 8;
  run_bare(options, [&](Bare& bare) {
    for (std::uint32_t round = 1; round <= rounds; ++round) {
      bare.together->arrive_and_wait();
      for (QueueId queue = 0; queue < 8; ++queue) bare.notify(queue, queue, round);
      for (QueueId queue = 0; queue < 8; ++queue) bare.await(queue, round);
      for (QueueId queue = 0; queue < 8; ++queue) bare.complete(queue);
      bare.together->arrive_and_wait();
      // By both, by one, by the other, twice by one. Who alone does it says so, or what the other
      // posts meanwhile is lost.
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
  try {
    const auto devices = verbs_devices();
    for (const VerbsDeviceInfo& info : devices) {
      std::printf("%s port %d GID %d %s %s %s: %s\n", info.device.c_str(), info.port,
                  info.gid_index, info.gid.c_str(), info.type.c_str(), info.net_device.c_str(),
                  info.chosen ? "chosen" : info.refused.c_str());
    }
    if (devices.empty() || !devices[0].chosen) {
      std::puts("no RDMA device: skipped");
      return 0;
    }
  } catch (const Error& error) {
    CHECK_NOTE(error.kind() == ErrorKind::kUnavailable, "%s", error.what());
    std::printf("no RDMA device: skipped (%s)\n", error.what());
    return 0;
  }
  const auto step = [](const char* name, auto&& test) {
    const auto start = Clock::now();
    test();
    std::printf("%-16s %6.2f s\n", name,
                std::chrono::duration<double>(Clock::now() - start).count());
    std::fflush(stdout);
  };
  VerbsOptions shallow;
  shallow.depth = 8;
  step("flags", [] { flag_is_last(over_verbs(), 3, 512, 40); });
  step("flags, shallow", [&] { flag_is_last(over_verbs(shallow), 2, 20000, 10); });
  step("lists", [] { lists_and_reads(over_verbs(), 40); });
  step("long lists", [&] { lists_and_reads(over_verbs(shallow), 500); });
  step("atomics", [] { atomics(over_verbs(), 20); });
  step("many", [&] { many_in_flight(over_verbs(shallow), 300); });
  step("large", [] { large_and_empty(over_verbs(), 20'000'001); });
  step("self", [] { self(over_verbs()); });
  step("plans", [] { plans(over_verbs(), 3, false); });
  step("plans, thread", [&] { plans(over_verbs(shallow), 2, true); });
  step("groups", [] { groups(over_verbs(), 4); });
  step("bounds", out_of_bounds);
  step("keys", wrong_key);
  step("own memory", own_memory);
  step("full", full);
  step("lost", lost);
  step("both at once", [] { both_at_once(9); });
  std::puts("ok");
}
