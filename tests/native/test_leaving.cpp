// A rank leaves in peace: every operation that can no longer complete ends with an error that names
// the rank, even for ranks that wait for it only indirectly; every operation in which the rank did
// its part ends as if it had stayed.

#include <atomic>

#include "plans.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

using Waited = Executor::Waited;
using State = Execution::State;

void await_leave(Local& local, Rank gone) {
  until([&] { return local.context.liveness().health(gone) == Health::kClosed; });
}

// A rank left before an operation: every other rank gets an error in any kind of wait, and again at
// the next call.
void never_came(const Settings& settings, Rank size, bool tries) {
  for (Rank gone = 0; gone < size; ++gone) {
    run(size, settings, [&](Local& local) {
      const auto group = local.group(everybody(local.size()));
      Exchange exchange(local, Kind::kTree, 50);
      local.barrier();
      if (local.rank() == gone) return;
      const auto attempt = [&](const char* what, auto&& call) {
        const auto wait = [&] {
          const Deadline deadline = soon();
          while (tries && !deadline.passed()) call(Deadline::once());
          call(soon());
        };
        std::string said;
        const Rank named = require_error(ErrorKind::kPeerLost, wait, &said);
        CHECK_NOTE(named == gone, "%s on rank %d, after %d of %d left: %s", what, local.rank(),
                   gone, size, said.c_str());
      };
      const auto barrier = [&](Deadline deadline) { (void)group->barrier(deadline); };
      attempt("barrier", barrier);
      attempt("barrier, again", barrier);
      local.executor.start(exchange.plan());
      attempt("plan",
              [&](Deadline deadline) { (void)local.executor.wait(exchange.plan(), deadline); });
      require_error(ErrorKind::kPeerLost, [&] { local.executor.start(exchange.plan()); });
    });
  }
}

// A rank that has done its part is not needed any more: in the last common operation, some ranks
// return only after others have left.
void last_together(const Settings& settings, Rank size) {
  for (int round = 0; round < 20; ++round) {
    run(size, settings, [&](Local& local) {
      Exchange exchange(local, round % 2 == 0 ? Kind::kGdraa : Kind::kTree, 50);
      exchange.fill(local.rank(), 0);
      local.executor.start(exchange.plan());
      finish(local, exchange.plan());
      exchange.verify(exchange.data(), size, 0);
      local.barrier();
    });
  }
}

// A rank leaves in the middle of a barrier: ranks that have all they need return, the others get an
// error. In the next barrier all get it, including a rank that waits only for one still in this
// barrier.
void half_a_barrier(const Settings& settings) {
  run(4, settings, [&](Local& local) {
    local.barrier();
    if (local.rank() == 0) {  // sends to rank 1, and waits for rank 3
      CHECK(local.world().barrier(Deadline::once()) == Outcome::kTimeout);
      return;
    }
    await_leave(local, 0);
    const auto barrier = [&] { local.barrier(); };
    if (local.rank() != 2) barrier();
    CHECK(require_error(ErrorKind::kPeerLost, barrier) == 0);
  });
}

// Other ranks wait for an execution that this rank does not wait for.
void awaited_elsewhere(bool thread) {
  std::atomic<bool> told{false};
  run(3, {}, [&](Local& local) {
    const auto board = local.segment(64);
    Steps chain;  // 0 notifies 1, 1 notifies 2
    if (local.rank() > 0) chain.wait(0, local.rank() - 1);
    if (local.rank() < 2) chain.flag(local.rank() + 1, 0);
    const BufferBinding nowhere{board, 0, DType::kF32};
    const auto first = bound(local, plan_of("chain", local.rank(), 3, 0, chain),
                             {nowhere, nowhere, nowhere}, everybody(local.size()), board, 0);
    Steps back;  // 2 notifies 1
    if (local.rank() == 1) back.wait(0, 2);
    if (local.rank() == 2) back.flag(1, 0);
    const auto second = bound(local, plan_of("back", local.rank(), 3, 0, back),
                              {nowhere, nowhere, nowhere}, everybody(local.size()), board, 100);
    local.barrier();
    if (local.rank() == 0) return;
    local.executor.start(*first);
    if (local.rank() == 2) {
      CHECK(require_error(ErrorKind::kPeerLost, [&] { finish(local, *first); }) == 0);
      told.store(true);
      local.executor.start(*second);
      finish(local, *second);
      return;
    }
    if (thread) {
      local.executor.start_thread();
      until([&] { return told.load(); });
    }
    local.executor.start(*second);
    finish(local, *second);
    CHECK(first->state() == State::kFailed);
    CHECK(require_error(ErrorKind::kPeerLost, [&] { finish(local, *first); }) == 0);
  });
}

// An execution that only its own program holds up can still end after all others have left.
void alone_with_a_call() {
  run(2, {}, [](Local& local) {
    const auto board = local.segment(64);
    Steps lane;
    if (local.rank() == 0) lane.wait(0, 1);
    if (local.rank() == 0) lane.call({kData, 0, -1}, 0);
    if (local.rank() == 1) lane.flag(0, 0);
    const BufferBinding nowhere{board, 0, DType::kF32};
    const auto execution = bound(local, plan_of("update", local.rank(), 2, 0, lane),
                                 {nowhere, nowhere, nowhere}, everybody(local.size()), board, 0);
    local.executor.start(*execution);
    if (local.rank() == 1) return finish(local, *execution);
    await_leave(local, 1);
    CHECK(local.executor.wait(*execution, soon()) == Waited::kCall);
    Executor::Call call;
    CHECK(local.executor.take_call(call));
    CHECK(local.executor.wait(*execution, Deadline::in(0.05)) == Waited::kTimeout);
    local.executor.answer(call);
    finish(local, *execution);
  });
}

// The transport finds a connection broken before the rank that left was heard: it left in peace all
// the same.
void broken_by_its_leave() {
  Settings settings;
  settings.faults.mapped = false;
  settings.faults.breaks = true;
  settings.options.heartbeat_ms = 60'000;
  settings.options.stopped_after = 600;
  run(2, settings, [](Local& local) {
    const auto segment = local.segment(64);
    if (local.rank() == 1) {
      local.await(*segment, 0);
      return;
    }
    local.notify(1, *segment, 0);
    until([&] {
      (void)local.context.complete(0);
      return local.context.liveness().health(1) != Health::kHealthy;
    });
    CHECK(local.context.liveness().health(1) == Health::kClosed);
  });
}

}  // namespace

int main() {
  const auto all = adversaries(11);
  Settings sleeping;
  sleeping.options = sleepy();
  Settings shm;
  shm.shm = true;
  for (const Settings& settings : {all[0], all[4], all[5], sleeping, shm}) {
    never_came(settings, 5, false);
    last_together(settings, 4);
  }
  never_came(all[0], 8, false);
  never_came(all[0], 4, true);
  half_a_barrier(all[0]);
  half_a_barrier(shm);
  awaited_elsewhere(false);
  awaited_elsewhere(true);
  alone_with_a_call();
  broken_by_its_leave();
  std::puts("ok");
}
