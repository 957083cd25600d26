// A rank fails: every other rank's call ends with an error that names it.

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <vector>

#include "plans.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

constexpr Rank kSize = 3;
constexpr Rank kVictim = 2;

// The victim throws while the others are in `call`, which must soon end with PeerLostError naming
// it.
void lost_during(const char* what, const Settings& settings,
                 const std::function<void(Local&, const std::shared_ptr<Segment>&)>& call) {
  std::atomic<int> begun{0};
  std::atomic<int> told{0};
  const auto thrown = outcomes(kSize, settings, [&](Local& local) {
    const auto segment = local.segment(256);
    local.barrier();
    begun.fetch_add(1);
    if (local.rank() == kVictim) {
      until([&] { return begun.load() == kSize; });  // all ranks have left the barrier
      nap(5);
      throw Failure();
    }
    const auto begin = Clock::now();
    try {
      call(local, segment);
    } catch (const Error& error) {
      const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      CHECK_NOTE(error.kind() == ErrorKind::kPeerLost, "%s: %s", what, error.what());
      CHECK_NOTE(error.rank() == kVictim, "%s names rank %d: %s", what, error.rank(), error.what());
      CHECK_NOTE(seconds < 3, "%s: %g s", what, seconds);
      CHECK(local.context.liveness().health(kVictim) == Health::kFailed);
      // All waits fail until the loss is accepted; then the survivors continue among themselves.
      std::uint32_t found = 0;
      require_error(ErrorKind::kPeerLost,
                    [&] { (void)local.context.notify_waitsome(*segment, 0, 8, soon(), found); });
      local.context.liveness().acknowledge();
      told.fetch_add(1);
      until([&] { return told.load() == kSize - 1; });
      const Rank other = 1 - local.rank();
      local.notify(other, *segment, 9, 4);
      CHECK(local.await(*segment, 9) == 4);
      CHECK(require_error(ErrorKind::kPeerLost, [&] { local.notify(kVictim, *segment, 9); }) ==
            kVictim);
      return;
    }
    CHECK_NOTE(false, "%s ended as if nothing had happened", what);
  });
  for (Rank rank = 0; rank < kSize; ++rank) {
    const auto& error = thrown[static_cast<std::size_t>(rank)];
    CHECK_NOTE((error != nullptr) == (rank == kVictim), "%s, rank %d: %s", what, rank,
               error != nullptr ? words(error).c_str() : "no error");
  }
}

void every_wait(const Settings& settings) {
  lost_during("barrier", settings, [](Local& local, const auto&) { local.barrier(); });
  lost_during("allgather", settings, [](Local& local, const auto&) {
    std::vector<std::string> all;
    (void)local.world().allgather(Group::Kind::kReduce, "gather", 1, {}, soon(), all);
  });
  lost_during("segment", settings, [](Local& local, const auto&) { (void)local.segment(64); });
  lost_during("notify_waitsome", settings,
              [](Local& local, const auto& segment) { local.await(*segment, 0, 5); });
  lost_during("passive_receive", settings, [](Local& local, const auto&) {
    Rank sender = -1;
    std::string message;
    (void)local.world().passive_receive(soon(), sender, message);
  });
  lost_during("passive_send", settings, [](Local& local, const auto&) {
    for (;;) (void)local.world().passive_send(kVictim, {}, soon());
  });
  for (const Kind kind : {Kind::kGdraa, Kind::kTree}) {
    std::atomic<int> progress{0};
    lost_during("a plan", settings, [&](Local& local, const std::shared_ptr<Segment>& segment) {
      const std::vector<Rank> ranks{0, 1, 2};
      const BufferBinding data{segment, 0, DType::kF32};
      const BufferBinding weights{segment, 64, DType::kF32};
      const BufferBinding inbox{segment, 128, DType::kF32};
      const Plan plan = kind == Kind::kGdraa ? gdraa(local.rank(), kSize, 4, false)
                                             : tree(local.rank(), kSize, 4, false);
      const auto execution = bound(local, plan, {data, weights, inbox}, ranks, segment, 20);
      if (progress.fetch_add(1) == 0) local.executor.start_thread();
      local.executor.start(*execution);
      (void)local.executor.wait(*execution, soon());
    });
  }
}

// A loss interrupts the creation of a segment; once it is accepted, the same call continues.
void creation_continued(const Settings& settings) {
  std::atomic<bool> begun{false};
  std::atomic<bool> told{false};
  const auto thrown = outcomes(kSize, settings, [&](Local& local) {
    const auto pair =
        local.group(local.rank() == kVictim ? std::vector{kVictim} : std::vector<Rank>{0, 1});
    local.barrier();
    if (local.rank() == kVictim) {
      until([&] { return begun.load(); });
      nap(5);
      throw Failure();
    }
    std::shared_ptr<Segment> made;
    if (local.rank() == 0) {
      CHECK(pair->create_segment(64, 4, nullptr, Deadline::once(), made) == Outcome::kTimeout);
      begun.store(true);
      require_error(ErrorKind::kPeerLost,
                    [&] { (void)pair->create_segment(64, 4, nullptr, soon(), made); });
      told.store(true);
    } else {
      until([&] { return told.load(); });
      require_error(ErrorKind::kPeerLost, [&] { (void)pair->barrier(soon()); });
    }
    local.context.liveness().acknowledge();
    CHECK(pair->create_segment(64, 4, nullptr, soon(), made) == Outcome::kDone);
    const Rank other = 1 - local.rank();
    local.notify(other, *made, 1, 4);
    CHECK(local.await(*made, 1) == 4);
    CHECK(pair->create_segment(32, 2, nullptr, soon(), made) == Outcome::kDone);
    CHECK(made->remote(other)->bytes == 32);
  });
  CHECK(thrown[kVictim] != nullptr);
  for (Rank rank : {0, 1}) {
    const auto& error = thrown[static_cast<std::size_t>(rank)];
    CHECK_NOTE(error == nullptr, "rank %d: %s", rank, words(error).c_str());
  }
}

// A connection that broke with a lost rank is no error once the loss is accepted: a plan of the
// survivors runs, although its flush is the first to notice the broken connection.
void flush_after_loss() {
  Settings settings;
  settings.faults.breaks = true;
  std::atomic<int> begun{0};
  std::atomic<int> told{0};
  const auto thrown = outcomes(kSize, settings, [&](Local& local) {
    Exchange all(local, Kind::kGdraa, 60);
    all.fill(local.rank(), 1);
    local.executor.start(all.plan());
    CHECK(local.executor.wait(all.plan(), soon()) == Executor::Waited::kDone);
    const auto segment = local.segment(256);
    if (local.rank() == kVictim) {
      until([&] { return begun.load() == kSize - 1; });
      throw Failure();
    }
    local.notify(kVictim, *segment, 1);
    begun.fetch_add(1);
    until([&] {  // all queues' connections to it break together
      try {
        (void)local.context.transport().complete(0);
        return false;
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::kPeerLost && error.rank() == kVictim);
        return true;
      }
    });
    require_error(ErrorKind::kPeerLost, [&] { local.barrier(); });
    local.context.liveness().acknowledge();
    told.fetch_add(1);
    until([&] { return told.load() == kSize - 1; });
    const BufferBinding data{segment, 0, DType::kF32};
    const BufferBinding weights{segment, 64, DType::kF32};
    const BufferBinding inbox{segment, 128, DType::kF32};
    const auto execution =
        bound(local, gdraa(local.rank(), 2, 4, false), {data, weights, inbox}, {0, 1}, segment, 20);
    local.executor.start(*execution);
    CHECK(local.executor.wait(*execution, soon()) == Executor::Waited::kDone);
  });
  for (Rank rank = 0; rank < kSize; ++rank) {
    const auto& error = thrown[static_cast<std::size_t>(rank)];
    CHECK_NOTE((error != nullptr) == (rank == kVictim), "rank %d: %s", rank,
               error != nullptr ? words(error).c_str() : "no error");
  }
}

// A heartbeat that this rank fails to send, for lack of memory say, does not mean that a rank died.
void failing_heartbeat() {
  Settings settings;
  settings.faults = {.fail_rank = 0, .fail_at = 3, .mapped = false};
  settings.options.heartbeat_ms = 5;
  run(2, settings, [](Local& local) {
    nap(200);
    CHECK(local.context.liveness().health(1 - local.rank()) == Health::kHealthy);
    local.barrier();
  });
}

// A thread that rarely gets its turn, as on a busy machine, gives the others longer: here a peer is
// silent for longer than the limit, again and again, but only for few looks.
void rare_looks() {
  struct Block {
    ControlBlock control{};
    std::atomic<Health> states[2]{};
  };
  const auto own = std::make_unique<Block>();
  const auto peer = std::make_unique<Block>();
  Options options;
  options.heartbeat_ms = 20;
  options.stopped_after = 0.6;
  ShmTransport transport(0, 2, "sixteen bytes...");
  Liveness liveness(0, 2, options);
  liveness.start(&transport, [] { nap(200); });
  liveness.watch({&own->control, &peer->control}, std::vector<pid_t>{0, 0}, nullptr);
  for (int beat = 0; beat < 4; ++beat) {
    peer->control.heartbeat.fetch_add(1);
    nap(900);
    CHECK(liveness.health(1) == Health::kHealthy);
  }
  const Deadline deadline = Deadline::in(60);
  while (liveness.health(1) == Health::kHealthy && !deadline.passed()) nap(10);
  CHECK(liveness.health(1) == Health::kStopped);
  liveness.stop();
}

// Settings that could never detect a stopped rank are refused.
void too_few_heartbeats() {
  for (const std::uint32_t heartbeat_ms : {334u, 600u, 60000u}) {
    Options options;
    options.stopped_after = 1;
    options.heartbeat_ms = heartbeat_ms;
    require_error(ErrorKind::kSystem, [&] { const Liveness liveness(0, 2, options); });
  }
}

// A fault at any n-th operation of a rank: the other ranks end, too, with the reason.
void failing_operation(const Settings& settings, Kind kind) {
  int ends = 0;
  for (std::uint64_t at = 1; at < 40; ++at) {
    Settings failing = settings;
    failing.faults.fail_rank = 1;
    failing.faults.fail_at = at;
    const auto thrown = outcomes(kSize, failing, [&](Local& local) {
      Exchange exchange(local, kind, 60);
      for (std::uint32_t round = 0; round < 3; ++round) {
        exchange.fill(local.rank(), round);
        local.executor.start(exchange.plan());
        CHECK(local.executor.wait(exchange.plan(), soon()) == Executor::Waited::kDone);
        exchange.verify(exchange.data(), kSize, round);
      }
      local.barrier();
    });
    if (thrown[1] == nullptr) {
      for (const auto& error : thrown) CHECK_NOTE(error == nullptr, "%s", words(error).c_str());
      ++ends;
      continue;
    }
    CHECK(words(thrown[1]).find("as was asked for") != std::string::npos);
    for (Rank rank : {0, 2}) {
      const auto& error = thrown[static_cast<std::size_t>(rank)];
      if (error == nullptr) continue;  // it had already finished
      CHECK_NOTE(words(error).find("rank 1") != std::string::npos, "%s", words(error).c_str());
    }
  }
  CHECK(ends > 0 && ends < 39);
}

// A source that is read late stays until then, even if all its owners have released it.
void source_outlives_its_segment(const Settings& settings) {
  constexpr std::uint64_t kBytes = 1 << 20;
  run(2, settings, [&](Local& local) {
    const auto target = local.segment(kBytes);
    auto source = local.segment(kBytes);
    std::memset(source->local().data, 3, kBytes);
    if (local.rank() == 1) source.reset();
    local.barrier();
    if (local.rank() == 0) {
      {
        const Slice mine{std::move(source), 0, kBytes};
        const Slice theirs{target, 0, kBytes};
        const Pair pair{&mine, &theirs};
        CHECK(local.context.write({&pair, 1}, 1, 0, soon()) == Outcome::kDone);
      }
      local.notify(1, *target, 0, 5);
    } else {
      CHECK(local.await(*target, 0) == 5);
      CHECK(items<char>(target)[kBytes - 1] == 3);
    }
    local.barrier();
  });
}

// Threads of the closing rank itself, which wait in short pieces as the bindings do.
void closed_under_its_threads() {
  run(2, {}, [&](Local& local) {
    const auto segment = local.segment(64);
    local.barrier();
    std::vector<std::thread> waiting;
    for (int i = 0; local.rank() == 0 && i < 3; ++i) {
      waiting.emplace_back([&, i] {
        require_error(ErrorKind::kClosed, [&] {
          for (;;) {
            std::uint32_t found = 0;
            Rank sender = -1;
            std::string message;
            const Deadline piece = Deadline::in(0.005);
            if (i == 0) {
              (void)local.context.notify_waitsome(*segment, 0, 8, piece, found);
            } else if (i == 1) {
              (void)local.world().passive_receive(piece, sender, message);
            } else {
              (void)local.context.wait(0, piece);
            }
          }
        });
      });
    }
    if (local.rank() == 0) {
      nap(10);
    } else {
      while (local.context.liveness().health(0) != Health::kClosed) nap(1);
    }
    local.context.close(false);
    local.context.close(true);  // idempotent
    for (std::thread& thread : waiting) thread.join();
    require_error(ErrorKind::kClosed, [&] { local.notify(1, *segment, 0); });
    require_error(ErrorKind::kClosed, [&] { local.barrier(); });
    require_error(ErrorKind::kClosed, [&] { (void)local.context.queue_create(); });
  });
}

}  // namespace

int main() {
  const auto all = adversaries(47);
  Settings sleeping;
  sleeping.options = sleepy();
  every_wait(all[0]);
  every_wait(all[4]);
  every_wait(sleeping);
  for (const Kind kind : {Kind::kGdraa, Kind::kDirect, Kind::kTree}) {
    failing_operation(all[0], kind);
  }
  failing_operation(all[4], Kind::kGdraa);
  creation_continued(all[0]);
  creation_continued(all[4]);
  flush_after_loss();
  failing_heartbeat();
  too_few_heartbeats();
  rare_looks();
  source_outlives_its_segment(all[3]);
  closed_under_its_threads();
  std::puts("ok");
}
