// Segments on a GPU, with the fake driver: operations on streams, plans, and ends while work is
// under way.

#include <array>
#include <numeric>

#include "device.hpp"
#include "executor/array_copies.hpp"
#include "memory/device_region.hpp"

using namespace pgasdl;
using namespace pgasdl::testing;

namespace {

// A stream's puts alternate with waits for the other's: data that are overwritten were sent before.
void one_sided(const Settings& settings) {
  constexpr std::uint64_t kBytes = 4096;
  run(kSize, settings, [&](Local& local) {
    const ProgramStream stream;
    const auto segment = on_device(local, 2 * kBytes);
    std::byte* const data = segment->local().data;
    local.barrier();
    for (unsigned char turn = 1; turn <= 10; ++turn) {
      const auto mine = static_cast<unsigned char>(turn + 100 * local.rank());
      const auto his = static_cast<unsigned char>(turn + 100 * local.peer(1));
      stream.fill(data, mine, kBytes);
      put(local, stream, segment, kBytes, kBytes, 0);
      local.context.notify_wait_on(stream.order(), segment, 0, soon());
      local.context.notify_reset_on(stream.order(), segment, 0);
      std::array<unsigned char, kBytes> seen{};
      device_copy(stream.order(), seen.data(), data + kBytes, kBytes);
      for (const unsigned char byte : seen) CHECK_NOTE(byte == his, "turn %d: %d", turn, byte);
      local.barrier();
    }
    local.flush();
  });
}

void plans(const Settings& settings, Kind kind, bool thread) {
  run(kSize, settings, [&](Local& local) {
    const ProgramStream stream;
    DeviceExchange exchange(local, kind);
    if (thread) local.executor.start_thread();
    for (std::uint32_t turn = 0; turn < 6; ++turn) {
      exchange.fill(local.rank(), turn);
      if (turn % 2 == 0) {
        local.executor.start(exchange.plan());
        CHECK(local.executor.wait(exchange.plan(), soon()) == Executor::Waited::kDone);
      } else {
        const StreamOrder order = stream.order();
        if (!local.executor.enqueue(exchange.plan(), {}, order, soon())) {
          local.executor.start(exchange.plan(), {}, &order);
          CHECK(local.executor.wait(exchange.plan(), soon()) == Executor::Waited::kDone);
        }
      }
      exchange.verify(stream.order(), turn);
      CHECK(local.executor.wait(exchange.plan(), soon()) == Executor::Waited::kDone);
    }
    local.barrier();
  });
}

// Ranks leave and memory is dropped while streams and plans are working.
void ends_under_way(const Settings& settings, bool failing) {
  for (int turn = 0; turn < 10; ++turn) {
    const ProgramStream streams[kSize];
    const auto thrown = outcomes(kSize, settings, [&](Local& local) {
      const ProgramStream& stream = streams[local.rank()];
      const StreamOrder order = stream.order();
      const auto segment = on_device(local, 1 << 14);
      DeviceExchange exchange(local, Kind::kGdraa);
      local.barrier();
      for (std::uint64_t id = 0; id < 8; ++id) put(local, stream, segment, 8192, 4096, id);
      local.context.notify_wait_on(order, segment, 9, soon());  // never raised
      if (!local.executor.enqueue(exchange.plan(), {}, order, soon())) {
        local.executor.start(exchange.plan(), {}, &order);
      }
      if (failing && local.rank() == turn % kSize) throw Error(ErrorKind::kSystem, "on purpose");
      if (!failing) local.barrier();  // a put needs a peer that is still there
    });
    const std::exception_ptr& mine = thrown[static_cast<std::size_t>(turn % kSize)];
    CHECK_NOTE((mine != nullptr) == failing, "%s", mine == nullptr ? "" : words(mine).c_str());
    for (const ProgramStream& stream : streams) stream.synchronize();
  }
}

// The program holds up a stream, which reaches its waits after a peer, which runs another
// collective, has overwritten what this rank had raised there. Closing a later execution waits for
// that.
void let_go_late(const Settings& settings, bool closes) {
  run(kSize, settings, [&](Local& local) {
    const ProgramStream stream;
    const auto gate = on_device(local, 64);
    DeviceExchange exchange(local, Kind::kDirect, 1 + static_cast<std::uint64_t>(local.rank()));
    DeviceExchange after(local, Kind::kDirect);
    if (local.rank() == 0) {
      local.context.notify_wait_on(stream.order(), gate, 0, soon());
      for (Execution* const each : {&exchange.plan(), &after.plan()}) {
        CHECK(local.executor.enqueue(*each, {}, stream.order(), Deadline::in(0.1)));
      }
      for (Execution* const each : {&exchange.plan(), &after.plan()}) {
        until([&] { return each->state() == Execution::State::kFailed; });
      }
    }
    local.barrier();
    if (local.rank() == 1) {
      local.executor.start(exchange.plan());
      local.flush();
      local.notify(0, *gate, 0);
    } else {
      if (closes) after.plan().close();
      until([&] { return stream.idle(); });
    }
    local.barrier();
  });
}

// The driver refuses a part of a stream's execution: even so, no work of it is under way after
// close(), and the first refusal is reported.
void refused_in_between(const Settings& settings) {
  run(kSize, settings, [](Local& local) {
    const ProgramStream stream;
    const auto gate = on_device(local, 64);
    DeviceExchange first(local, Kind::kDirect);
    DeviceExchange second(local, Kind::kDirect);
    const auto refused = [&](DeviceExchange& exchange) {
      std::string said;
      require_error(
          ErrorKind::kSystem,
          [&] { (void)local.executor.enqueue(exchange.plan(), {}, stream.order(), soon()); },
          &said);
      return said;
    };
    local.barrier();
    if (local.rank() == 0) {
      local.context.notify_wait_on(stream.order(), gate, 0, soon());
      fail("event_record", 1);
      std::string said = refused(first);
      CHECK_NOTE(said.find("recording an event") != said.npos, "%s", said.c_str());
      first.plan().close();
      CHECK(stream.idle());
      fail("stream_wait_value", 1);
      fail("event_record", 1);
      said = refused(second);
      CHECK_NOTE(said.find("letting a stream wait") != said.npos, "%s", said.c_str());
      fail("any", 0);
      stream.synchronize();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      local.notify(0, *gate, 0);
    }
    local.barrier();
  });
}

// Rank 2 runs another collective, which only rank 0 sees, its parent in a tree. Rank 1 gets all
// that it waits for from rank 0's stream, and has no reason to look before that.
void told_of_another_collective(Settings settings) {
  settings.options.spin_us = 1e7;
  run(3, settings, [](Local& local) {
    const ProgramStream stream;
    Plan plan = tree(local.rank(), local.size(), kCount, false);
    std::erase_if(plan.lanes[0], [](const PlanStep& step) {
      return step.kind == PlanStep::Kind::kFlush;  // no stream makes it
    });
    DeviceExchange exchange(local, plan, local.rank() == 2 ? 2 : 1);
    CHECK(local.executor.enqueue(exchange.plan(), {}, stream.order(), soon()));
    until([&] { return exchange.plan().state() != Execution::State::kRunning; });
    require_error(ErrorKind::kMismatch,
                  [&] { (void)local.executor.wait(exchange.plan(), soon()); });
    local.barrier();
  });
}

// One rank cannot make its copy: all ranks are informed, and can make the next segment.
void a_copy_that_cannot_be(const Settings& settings) {
  run(kSize, settings, [](Local& local) {
    std::shared_ptr<Segment> made;
    const std::uint64_t bytes = local.rank() == 1 ? std::uint64_t{1} << 45 : 4096;
    std::string said;
    require_error(
        ErrorKind::kSystem,
        [&] { (void)local.world().create_segment(bytes, 8, {nullptr, kDevice}, soon(), made); },
        &said);
    CHECK_NOTE(local.rank() == 1 || said.find("rank 1 cannot") != said.npos, "%s", said.c_str());
    CHECK(on_device(local, 4096)->remote(local.peer(1))->bytes == 4096);
    CHECK(local.segment(64)->remote(local.peer(1))->bytes == 64);
    local.barrier();
  });
}

// A lane continues once its piece is here, and the piece goes back while others still arrive.
void pieces_of_an_array() {
  constexpr std::size_t kPieces = 40;
  constexpr std::uint64_t kBytes = 512;
  run(1, {}, [](Local& local) {
    UniqueFd fd;
    const auto array = DeviceRegion::create(kDevice, kPieces * kBytes, fd);
    const auto copy = Region::create(kPieces * kBytes, fd);
    copy->pin(0);
    std::vector<unsigned char> bytes(kPieces * kBytes);
    std::iota(bytes.begin(), bytes.end(), 0);
    device_copy(kDevice, array->data(), bytes.data(), bytes.size());
    // The first piece has two lanes with steps; the second has one without.
    std::vector<ArrayCopies::Extent> extents(kPieces, {kBytes, 1, 1});
    extents[0] = {kBytes, 3, 2};
    extents[1] = {kBytes, 1, 0};
    const auto lane_of = [](std::size_t piece) { return piece == 0 ? 0 : piece + 2; };
    ArrayCopies copies(local.context.waiter(), kDevice, copy->data(), copy->data(), extents);
    const auto found = [&] {
      std::vector<unsigned char> now(bytes.size());
      device_copy(kDevice, now.data(), array->data(), now.size());
      return now;
    };
    // The progress of copies is random; an advantage of pieces must show at least once.
    std::mutex mutex;
    Lock lock(mutex);
    bool ahead = false;
    bool back_before_all_came = false;
    for (int turn = 0; turn < 200 && !(ahead && back_before_all_came); ++turn) {
      copies.begin(array->data(), array->data(), lock);
      std::size_t ended = 0;  // pieces whose lanes have ended
      while (!copies.over()) {
        (void)copies.advance(lock);
        back_before_all_came |= copies.left() < kPieces && !copies.here(lane_of(kPieces - 1));
        if (ended == kPieces || !copies.here(lane_of(ended))) continue;
        ahead |= !copies.here(lane_of(kPieces - 1));
        auto* const here = reinterpret_cast<unsigned char*>(copy->data() + ended * kBytes);
        CHECK(std::equal(here, here + kBytes, &bytes[ended * kBytes]));
        if (ended != 1) {
          for (std::uint64_t i = 0; i < kBytes; ++i) {
            here[i] = bytes[ended * kBytes + i] = static_cast<unsigned char>(~here[i]);
          }
          if (ended == 0) copies.lane_ended(1, lock);
          copies.lane_ended(lane_of(ended), lock);
        }
        ++ended;
      }
      CHECK(found() == bytes);
    }
    CHECK(ahead);
    CHECK(back_before_all_came);
    // The first piece has one more lane with steps: it stays until that has ended, too.
    copies.begin(array->data(), array->data(), lock);
    while (!copies.here(lane_of(kPieces - 1))) (void)copies.advance(lock);
    for (const std::size_t piece : {0, 2}) {
      std::fill_n(copy->data() + piece * kBytes, kBytes, std::byte{7});
    }
    copies.lane_ended(0, lock);
    copies.lane_ended(lane_of(2), lock);
    copies.drain();
    CHECK(copies.over());
    std::fill_n(bytes.begin() + 2 * kBytes, kBytes, 7);
    CHECK(found() == bytes);
  });
}

}  // namespace

int main() {
  Settings shm;
  shm.shm = true;
  Settings adversary;
  adversary.faults = {.seed = 5, .delay = 2, .reorder = true, .late_source = true};
  const auto all = [&] {
    one_sided({});
    one_sided(shm);
    for (const Kind kind : {Kind::kGdraa, Kind::kDirect, Kind::kTree}) {
      for (const bool thread : {false, true}) {
        plans({}, kind, thread);
        plans(shm, kind, thread);
      }
    }
    plans(adversary, Kind::kGdraa, true);
    for (const bool failing : {false, true}) {
      ends_under_way({}, failing);
      ends_under_way(shm, failing);
    }
    for (const bool closes : {false, true}) {
      let_go_late({}, closes);
      let_go_late(shm, closes);
    }
    refused_in_between({});
    refused_in_between(shm);
    told_of_another_collective({});
    told_of_another_collective(shm);
    a_copy_that_cannot_be({});
    a_copy_that_cannot_be(shm);
    pieces_of_an_array();
  };
  {
    // Streams are kept for the next borrower: borrow as many as ranks ever do at once.
    const DeviceStream borrowed[] = {DeviceStream(kDevice), DeviceStream(kDevice),
                                     DeviceStream(kDevice), DeviceStream(kDevice)};
  }
  all();
  const std::string after_once = live();
  all();
  CHECK_NOTE(live() == after_once, "%s, then %s", after_once.c_str(), live().c_str());
  std::puts("ok");
}
