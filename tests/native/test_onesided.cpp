// One-sided operations between ranks that are threads, for the thread sanitizer: flags and earlier
// data, counts, counters, and a queue that threads share. tests/contract tests the rest.

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>

#include "flags.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

// Two ranks' transports, and a segment of each, of which the writer has attached the reader's.
struct Ends {
  static constexpr std::size_t kBytes = 384;
  explicit Ends(const LoopbackFaults& faults)
      : world(std::make_shared<LoopbackWorld>(2, faults)), writer(world, 0), reader(world, 1) {
    const std::array<Rank, 2> both{0, 1};
    for (std::size_t i = 0; i < local.size(); ++i) {
      local[i].data = data[i].data();
      local[i].bytes = kBytes;
      local[i].board = &board[i];
      local[i].notifications = 1;
    }
    there = writer.attach(1, reader.publish(local[1], both), kHost, soon());
  }
  std::shared_ptr<LoopbackWorld> world;
  LoopbackTransport writer, reader;
  std::array<std::array<std::byte, kBytes>, 2> data{};
  std::array<FlagWord, 2> board{};
  std::array<LocalSegment, 2> local;
  RemoteSegment there;
};

// Over a fabric that keeps no order: how many of `rounds` flags were seen before all earlier data,
// or whose word did not end with their last value. One thread, one seed.
std::uint32_t overtaken(bool completion_first, std::uint32_t rounds) {
  constexpr std::size_t kPiece = 64;
  Ends ends({.seed = 3, .delay = 3, .any_order = true, .completion_first = completion_first});
  auto& [world, writer, reader, data, board, local, there] = ends;
  std::uint32_t wrong = 0;
  for (std::uint32_t round = 1; round <= rounds; ++round) {
    data[0].fill(static_cast<std::byte>(round));
    for (std::uint64_t at = 0; at < Ends::kBytes; at += kPiece) {
      const Transfer piece{&local[0], at, &there, at, kPiece};
      CHECK(writer.post_write(0, 1, {&piece, 1}, nullptr));
    }
    const RemoteFlag first{&there, 0, 2 * round};
    const RemoteFlag last{&there, 0, 2 * round + 1};
    CHECK(writer.post_write(0, 1, {}, &first) && writer.post_write(0, 1, {}, &last));
    bool in_order = true;
    while (!writer.complete(0)) {
      reader.progress();
      if (board[1].load() >= 2 * round) in_order &= data[0] == data[1];
    }
    in_order &= board[1].load() == 2 * round + 1;
    CHECK(data[0] == data[1]);  // all arrive
    wrong += in_order ? 0 : 1;
  }
  return wrong;
}

void any_order() {
  const std::uint32_t wrong = overtaken(false, 200);
  CHECK_NOTE(wrong > 100, "only %u of 200 flags overtook their data", wrong);
  CHECK(overtaken(true, 200) == 0);
}

// Once a loss is accepted, nothing that was under way to the lost rank reads its source any more.
void forgotten() {
  Ends ends({.delay = 1'000'000'000, .late_source = true, .completion_first = true});
  const Transfer all{&ends.local[0], 0, &ends.there, 0, Ends::kBytes};
  const RemoteFlag flag{&ends.there, 0, 1};
  CHECK(ends.writer.post_write(0, 1, {&all, 1}, &flag));
  CHECK(!ends.writer.complete(0));
  ends.writer.forget(1);
  CHECK(ends.writer.complete(0));
}

void layout_of_boards() {
  const auto check = [](std::uint32_t n) {
    const std::uint32_t words = board_words(n);
    CHECK_NOTE(notifications_of(words) == n, "%u", n);
    if (n == 0) return;
    CHECK_NOTE(region_mark(n, 0) >= n, "%u", n);
    CHECK_NOTE(region_mark(n, n - 1) < block_mark(n, 0), "%u", n);
    CHECK_NOTE(block_mark(n, n - 1) < words, "%u", n);
  };
  for (std::uint32_t n = 0; n < 10'000; ++n) check(n);
  for (std::uint32_t n = (1u << 28) - 5'000; n <= 1u << 28; ++n) check(n);
}

// By queue and connection, also if several threads note marks at once.
void told_marks() {
  constexpr std::uint32_t kBlocks = 200;
  ToldMarks told(2);
  std::vector<std::thread> threads;
  for (QueueId queue = 0; queue < 4; ++queue) {
    threads.emplace_back([&, queue] {
      for (std::uint32_t block = queue % 2; block < kBlocks; block += 2) {
        CHECK(!told.knows(1, queue, 0, block));
        told.note(1, queue, 0, block, kBlocks);
        CHECK(told.knows(1, queue, 0, block));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(told.knows(1, 2, 0, 198) && !told.knows(1, 2, 0, 199) && told.knows(1, 3, 0, 199));
  CHECK(!told.knows(0, 2, 0, 198));  // another peer
  CHECK(!told.knows(1, 2, 1, 198));  // another connection
}

std::size_t pages_of(const FlagWord* board, std::uint32_t words) {
  const std::uint64_t bytes = round_up(words * sizeof(FlagWord), page_bytes());
  std::vector<unsigned char> there(bytes / page_bytes());
  CHECK(mincore(const_cast<FlagWord*>(board), bytes, there.data()) == 0);
  return static_cast<std::size_t>(std::ranges::count_if(there, [](auto in) { return in & 1; }));
}

// A wait for any notification reads little of a board on which few were ever raised, and the first
// look finds each of them. A long wait also finds one that came without its mark.
void any_of_many() {
  run(1, {}, [](Local& local) {
    constexpr std::uint32_t kMany = 1u << 16;
    const auto segment = local.segment(64, kMany);
    FlagWord* const board = segment->local().board;
    std::uint32_t id = 0;
    for (const std::uint32_t raised : {5u, 40'000u, 41'000u, kMany - 1}) {
      local.notify(0, *segment, raised);
      CHECK(local.context.notify_waitsome(*segment, 0, kMany, Deadline::once(), id) ==
            Outcome::kDone);
      CHECK(id == raised && local.context.notify_reset(*segment, id) == 1);
    }
    CHECK(local.context.notify_waitsome(*segment, 0, kMany, Deadline::once(), id) ==
          Outcome::kTimeout);
    const std::size_t pages = pages_of(board, segment->local().notifications);
    CHECK_NOTE(pages <= 4 + 2, "%zu pages of the board were read", pages);  // marks have two
    local.flush();
    CHECK(local.context.read_notify({}, 0, *segment, 20'000, 3, 0, soon()) == Outcome::kDone);
    CHECK(local.context.notify_waitsome(*segment, 10'000, 30'000, Deadline::once(), id) ==
          Outcome::kDone);
    CHECK(id == 20'000 && local.context.notify_reset(*segment, id) == 3);
    board[30'000].store(7, std::memory_order_release);
    CHECK(local.await(*segment, 0, kMany, &id) == 7 && id == 30'000);
  });
}

// Several threads of a rank wait for and reset notifications of two other ranks: each value comes
// once.
void several_takers(const Settings& settings, std::uint32_t values) {
  constexpr std::uint32_t kIds = 6;
  constexpr std::uint32_t kApart = 300;  // more than a block
  run(3, settings, [&](Local& local) {
    const auto segment = local.segment(2 * kIds * sizeof(std::uint64_t), 2 * kIds * kApart);
    auto* words = items<std::uint64_t>(segment);
    if (local.rank() == 0) {
      std::vector<std::atomic<std::uint32_t>> taken(2 * kIds * (values + 1));
      std::atomic<std::uint32_t> left{2 * kIds * values};
      std::vector<std::thread> takers;
      for (int taker = 0; taker < 3; ++taker) {
        takers.emplace_back([&] {
          while (left.load() != 0) {
            std::uint32_t id = 0;
            if (local.context.notify_waitsome(*segment, 0, 2 * kIds * kApart, Deadline::in(0.02),
                                              id) != Outcome::kDone) {
              continue;
            }
            const std::uint32_t value = local.context.notify_reset(*segment, id);
            id /= kApart;
            if (value == 0) continue;  // another thread was first
            CHECK_NOTE(taken[id * (values + 1) + value].fetch_add(1) == 0,
                       "value %u of id %u was handed out twice", value, id);
            CHECK(words[id] == value * 3u);
            left.fetch_sub(1);
            local.notify(1 + static_cast<Rank>(id / kIds), *segment, id % kIds * kApart, value);
          }
        });
      }
      for (std::thread& taker : takers) taker.join();
    } else {
      const auto base = static_cast<std::uint64_t>(local.rank() - 1) * kIds;
      std::array<std::uint32_t, kIds> next{};
      const auto raise = [&](std::uint32_t id) {
        const std::uint32_t value = ++next[id];
        words[id] = value * 3u;
        const Slice source{segment, id * 8, 8};
        const Slice target{segment, (base + id) * 8, 8};
        const Pair pair{&source, &target};
        CHECK(local.context.write_notify({&pair, 1}, 0, *segment, (base + id) * kApart, value, 0,
                                         soon()) == Outcome::kDone);
      };
      for (std::uint32_t id = 0; id < kIds; ++id) raise(id);
      for (std::uint32_t answers = 0; answers < kIds * values; ++answers) {
        std::uint32_t id = 0;
        const std::uint32_t value = local.await(*segment, 0, kIds * kApart, &id);
        CHECK(value == next[id /= kApart]);
        if (next[id] < values) raise(id);
      }
    }
    local.barrier();
  });
}

// Two threads of each rank add to one notification of rank 0, each after its own data: a thread
// that has the count sees all data, and counts that are reset meanwhile are not counted twice.
void counts(const Settings& settings, Rank size, std::uint64_t rounds) {
  constexpr std::uint64_t kThreads = 2;
  constexpr std::uint64_t kBytes = 64;
  run(size, settings, [&](Local& local) {
    const std::uint64_t n = static_cast<std::uint64_t>(size) * kThreads;
    const auto inbox = local.segment(n * kBytes);
    const auto outbox = local.segment(n * kBytes);
    const auto add = [&](std::uint64_t round, std::uint64_t thread) {
      const std::uint64_t at = (static_cast<std::uint64_t>(local.rank()) * kThreads + thread);
      std::memset(outbox->local().data + at * kBytes, static_cast<int>(round + at), kBytes);
      const Slice source{outbox, at * kBytes, kBytes};
      const Slice target{inbox, at * kBytes, kBytes};
      const Pair pair{&source, &target};
      CHECK(local.context.write_notify_add({&pair, 1}, 0, *inbox, 0, 1, 0, soon()) ==
            Outcome::kDone);
      CHECK(local.context.write_notify_add({}, 0, *inbox, 1, round, 0, soon()) == Outcome::kDone);
      local.flush();
    };
    std::uint64_t taken = 0;
    for (std::uint64_t round = 1; round <= rounds; ++round) {
      std::thread other([&] { add(round, 1); });
      add(round, 0);
      if (local.rank() == 0) {
        taken += local.context.notify_reset(*inbox, 1);
        std::uint32_t left = 1;
        CHECK(local.context.notify_wait_count(*inbox, 0, n, soon(), left) == Outcome::kDone);
        CHECK(left == 0);
        for (std::uint64_t at = 0; at < n * kBytes; ++at) {
          CHECK_NOTE(
              items<unsigned char>(inbox)[at] == static_cast<unsigned char>(round + at / kBytes),
              "round %zu, byte %zu", std::size_t(round), std::size_t(at));
        }
      }
      other.join();
      local.barrier();
    }
    if (local.rank() == 0) {
      const std::uint64_t all = n * rounds * (rounds + 1) / 2;
      std::uint32_t left = 1;
      if (taken < all) {
        CHECK_NOTE(
            local.context.notify_wait_count(*inbox, 1, all - taken, soon(), left) == Outcome::kDone,
            "%zu of %zu", std::size_t(taken), std::size_t(all));
      }
      CHECK(local.context.notify_reset(*inbox, 1) == 0);
    }
    local.barrier();
  });
}

// One thread posts while another waits on the same queue: its own wait still ends when its request
// is complete, not before, and the queue's size stays the number of its requests.
void shared_queue(Settings settings, std::uint32_t rounds) {
  constexpr std::uint32_t kDepth = 4;
  settings.options.queue_depth = kDepth;
  run(2, settings, [&](Local& local) {
    const auto segment = local.segment(16, 4);
    auto* const cells = items<std::uint32_t>(segment);
    if (local.rank() == 1) {
      for (std::uint32_t round = 1; round <= rounds; ++round) {
        CHECK(local.await(*segment, 0) == round);
        CHECK_NOTE(cells[1] == round, "%u, not %u", cells[1], round);
        local.notify(0, *segment, 1);
      }
      return;
    }
    std::atomic<bool> over{false};
    std::thread other([&] {
      while (!over.load()) {
        local.flush();
        CHECK_NOTE(local.context.queue_size(0) <= kDepth, "%u", local.context.queue_size(0));
      }
    });
    const Slice source{segment, 0, 4};
    const Slice target{segment, 4, 4};
    const Pair pair{&source, &target};
    for (std::uint32_t round = 1; round <= rounds; ++round) {
      cells[0] = round;
      const auto post = [&](Deadline deadline) {
        return local.context.write_notify({&pair, 1}, 1, *segment, 0, round, 0, deadline);
      };
      while (post(round % 2 == 0 ? Deadline::once() : soon()) != Outcome::kDone) {
        std::this_thread::yield();
      }
      local.flush();
      cells[0] = 0;  // the source is free again
      CHECK(local.await(*segment, 1) == 1);
    }
    over.store(true);
    other.join();
    local.flush();
    CHECK(local.context.queue_size(0) == 0);
    const Traffic traffic = local.context.counters().with(1);
    CHECK(traffic.bytes_written == 4 * rounds);
    CHECK(traffic.messages_written == rounds && traffic.notifications == rounds);
  });
}

// Threads add to the counters of one peer at the same time.
void additions() {
  constexpr std::uint64_t kTimes = 3'000'000;
  Counters counters(2);
  std::vector<std::thread> threads;
  std::atomic<int> late{3};
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      --late;
      while (late.load() != 0) std::this_thread::yield();
      for (std::uint64_t time = 0; time < kTimes; ++time) {
        counters.add(1, {.bytes_written = 8, .messages_written = 1});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(counters.with(1).bytes_written == 3 * 8 * kTimes);
  CHECK(counters.with(1).messages_written == 3 * kTimes);
  CHECK(counters.with(0).messages_written == 0);
}

// Lists, reads and their notifications, and a second queue.
void lists_and_reads(const Settings& settings) {
  run(3, settings, [&](Local& local) {
    constexpr std::size_t kPieces = 40;
    const auto segment = local.segment(16384);
    auto* bytes = items<unsigned char>(segment);
    const Rank peer = local.peer(1);
    const QueueId queue = local.context.queue_create();
    for (std::uint64_t i = 0; i < 4096; ++i) bytes[i] = pattern(local.rank(), 1, i);
    std::vector<Slice> sources;
    std::vector<Slice> targets;
    for (std::uint64_t i = 0; i < kPieces; ++i) {
      sources.push_back({segment, i * 100, 100});
      targets.push_back({segment, 4096 + (kPieces - 1 - i) * 100, 100});
    }
    std::vector<Pair> pairs;
    for (std::size_t i = 0; i < kPieces; ++i) pairs.push_back({&sources[i], &targets[i]});
    CHECK(local.context.write_notify(pairs, peer, *segment, 0, 1, queue, soon()) == Outcome::kDone);
    CHECK(local.await(*segment, 0) == 1);
    const Rank writer = local.peer(2);
    for (std::uint64_t i = 0; i < kPieces * 100; ++i) {
      const std::uint64_t from = (kPieces - 1 - i / 100) * 100 + i % 100;
      CHECK(bytes[4096 + i] == pattern(writer, 1, from));
    }
    // Reads it back from the peer after a barrier: a read is not ordered after a write.
    local.barrier();
    std::vector<Slice> here;
    for (std::uint64_t i = 0; i < kPieces; ++i) here.push_back({segment, 8192 + i * 100, 100});
    for (std::size_t i = 0; i < kPieces; ++i) pairs[i] = {&here[i], &targets[i]};
    CHECK(local.context.read_notify(pairs, peer, *segment, 1, 9, queue, soon()) == Outcome::kDone);
    CHECK(local.await(*segment, 1) == 9);
    CHECK(std::memcmp(bytes + 8192, bytes, kPieces * 100) == 0);
    std::memset(bytes + 8192, 0, kPieces * 100);
    CHECK(local.context.read(pairs, peer, queue, soon()) == Outcome::kDone);
    local.flush(queue);
    CHECK(std::memcmp(bytes + 8192, bytes, kPieces * 100) == 0);
    CHECK(local.context.queue_size(queue) == 0);
    local.barrier();
    local.context.queue_delete(queue);
  });
}

}  // namespace

int main() {
  any_order();
  forgotten();
  additions();
  layout_of_boards();
  told_marks();
  any_of_many();
  for (const Settings& settings : adversaries(11)) {
    flag_is_last(settings, 3, 512, 40);
    lists_and_reads(settings);
    several_takers(settings, 60);
    counts(settings, 3, 40);
    shared_queue(settings, 100);
  }
  Settings refusing;
  refusing.faults = {.seed = 5, .delay = 20, .late_source = true, .refuse = 40};
  shared_queue(refusing, 20);
  flag_is_last({}, 4, 512, 300);
  several_takers({}, 800);
  counts({}, 4, 500);
  Settings sleeping;
  sleeping.options = sleepy();
  flag_is_last(sleeping, 2, 512, 100);
  several_takers(sleeping, 100);
  counts(sleeping, 2, 100);
  std::puts("ok");
}
