// Streams that wait in vain, with the fake driver: they are released and the peers informed, after
// any end and during any call that the driver holds up.

#include <atomic>
#include <optional>

#include "device.hpp"

using namespace pgasdl;
using namespace pgasdl::testing;

namespace {

using State = Execution::State;
using Waited = Executor::Waited;

// The program holds up a stream, which reaches its waits after the progress thread has ended and
// after a peer, which runs another collective, has overwritten what this rank had raised there.
void let_go_without_a_thread(const Settings& settings, bool waits) {
  std::atomic<bool> through{false};
  run(kSize, settings, [&](Local& local) {
    const ProgramStream stream;
    const auto gate = on_device(local, 64);
    DeviceExchange exchange(local, Kind::kDirect, 1 + static_cast<std::uint64_t>(local.rank()));
    Exchange host(local, Kind::kGdraa, 50);
    if (local.rank() == 0) {
      local.context.notify_wait_on(stream.order(), gate, 0, soon());
      CHECK(local.executor.enqueue(exchange.plan(), {}, stream.order(), soon()));
      local.executor.stop_thread();
      CHECK(exchange.plan().state() == State::kFailed);
    }
    local.barrier();
    if (local.rank() == 1) {
      local.executor.start(exchange.plan());
      local.flush();
      local.notify(0, *gate, 0);
      if (waits) until([&] { return through.load(); });
    }
    const auto idle = [&] {
      if (!waits) (void)local.executor.progress();
      return stream.idle();
    };
    std::thread looks;
    if (local.rank() == 0) {
      looks = std::thread([&] {
        until(idle);
        through.store(true);
      });
      if (!waits) looks.join();
    }
    local.executor.start(host.plan());
    CHECK(local.executor.wait(host.plan(), Deadline::in(60)) == Waited::kDone);
    if (looks.joinable()) looks.join();
    local.barrier();
  });
}

// A rank gives up what its stream makes: hosts in the same collective are informed, including those
// that come later, when the released stream has raised all its flags.
void hosts_are_told(const Settings& settings, bool late) {
  run(kSize, settings, [&](Local& local) {
    const ProgramStream stream;
    const auto gate = on_device(local, 64);
    DeviceExchange exchange(local, Kind::kDirect);
    if (local.rank() == 1 && !late) local.executor.start(exchange.plan());
    local.barrier();
    if (local.rank() == 0) {
      if (!late) local.context.notify_wait_on(stream.order(), gate, 0, Deadline::in(60));
      CHECK(local.executor.enqueue(exchange.plan(), {}, stream.order(), Deadline::in(0.1)));
      until([&] { return exchange.plan().state() == State::kFailed && (!late || stream.idle()); });
    }
    if (late) local.barrier();
    if (local.rank() == 1) {
      if (late) local.executor.start(exchange.plan());
      std::string said;
      const Rank named = require_error(
          ErrorKind::kPeerLost,
          [&] { (void)local.executor.wait(exchange.plan(), Deadline::in(60)); }, &said);
      CHECK_NOTE(named == 0 && said.find("rank 0 has given it up") != said.npos, "%s",
                 said.c_str());
      if (!late) local.notify(0, *gate, 0);
    } else {
      require_error(ErrorKind::kTimeout,
                    [&] { (void)local.executor.wait(exchange.plan(), soon()); });
    }
    local.barrier();
  });
}

// The execution before is void, too: the released stream has overwritten its result.
void the_one_before_is_void(const Settings& settings) {
  run(kSize, settings, [](Local& local) {
    const ProgramStream stream;
    Plan plan = tree(local.rank(), kSize, kCount, false);
    std::erase_if(plan.lanes[0], [](const PlanStep& step) {
      return step.kind == PlanStep::Kind::kFlush;  // no stream makes it
    });
    DeviceExchange exchange(local, plan, 1);
    exchange.fill(local.rank(), 0);
    const auto has_sent = [&] {
      (void)local.executor.progress();
      return local.executor.missing(exchange.plan()).find("waits for") != std::string::npos;
    };
    if (local.rank() == 1) {
      local.executor.start(exchange.plan());
      until(has_sent);
    }
    local.barrier();
    if (local.rank() == 0) {
      CHECK(local.executor.enqueue(exchange.plan(), {}, stream.order(), soon()));
      CHECK(local.executor.wait(exchange.plan(), soon()) == Waited::kDone);
      CHECK(local.executor.enqueue(exchange.plan(), {}, stream.order(), Deadline::in(0.1)));
      until([&] { return exchange.plan().state() == State::kFailed; });
    }
    local.barrier();
    if (local.rank() == 1) {
      CHECK(require_error(ErrorKind::kPeerLost, [&] {
              (void)local.executor.wait(exchange.plan(), Deadline::in(60));
            }) == 0);
    }
    local.barrier();
  });
}

// A rank's loss ends a stream's wait while the driver holds up another call.
void waits_end(Settings settings, bool writes) {
  settings.options.heartbeat_ms = 20;  // so that the service thread looks often
  const auto thrown = outcomes(kSize, settings, [&](Local& local) {
    const ProgramStream streams[2];
    const auto segment = on_device(local, 4096);
    local.barrier();
    if (local.rank() == 1) {
      Blocking::reached();
      nap(200);  // the service thread reaches the call that is held up
      throw Failure();
    }
    local.context.notify_wait_on(streams[0].order(), segment, 0, Deadline::in(600));
    std::optional<Blocking> blocking("event_record");
    std::thread calls([&] {
      try {
        if (writes) {
          put(local, streams[1], segment, 2048, 1024, 1);
        } else {
          local.context.notify_wait_on(streams[1].order(), segment, 1, Deadline::in(600));
        }
      } catch (const Error&) {
        // The loss, if it was noticed before.
      }
    });
    until([&] { return streams[0].idle(); });
    CHECK_NOTE(blocked() != 0, "the stream went on when the driver did");
    blocking.reset();
    calls.join();
    until([&] { return streams[1].idle(); });
    throw Failure();
  });
  for (const std::exception_ptr& each : thrown) CHECK(each != nullptr);
}

}  // namespace

int main(int argc, char** argv) {
  const Parts part(argc, argv);
  part("polls", [](const Settings& settings) { let_go_without_a_thread(settings, false); });
  part("waits", [](const Settings& settings) { let_go_without_a_thread(settings, true); });
  part("told", [](const Settings& settings) { hosts_are_told(settings, false); });
  part("late", [](const Settings& settings) { hosts_are_told(settings, true); });
  part("before", the_one_before_is_void);
  part("wait ends", [](const Settings& settings) { waits_end(settings, false); });
  part("write ends", [](const Settings& settings) { waits_end(settings, true); });
  std::puts("ok");
}
