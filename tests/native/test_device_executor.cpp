// Long calls of a GPU's driver, with the fake driver: they hold up nothing else in the executor,
// and an execution that ends meanwhile ends properly.

#include <atomic>
#include <list>
#include <optional>

#include "device.hpp"
#include "memory/device_region.hpp"

using namespace pgasdl;
using namespace pgasdl::testing;

namespace {

using State = Execution::State;
using Waited = Executor::Waited;

// An exchange of an array on a GPU through the host.
class StagedExchange {
 public:
  explicit StagedExchange(Local& local) {
    const std::uint64_t bytes = kCount * sizeof(float);
    segment_ = local.segment((2 + kSize) * bytes);
    segment_->local().region->pin(kDevice);
    UniqueFd fd;
    array_ = DeviceRegion::create(kDevice, bytes, fd);
    std::vector<BufferBinding> buffers;
    for (const std::uint64_t at : {0, 1, 2}) {
      buffers.push_back({segment_, at * bytes, DType::kF32});
    }
    std::vector<std::unique_ptr<BoundPlan>> phases;
    const Plan plan = gdraa(local.rank(), kSize, kCount, false);
    phases.push_back(std::make_unique<BoundPlan>(local.context, plan, std::move(buffers),
                                                 everybody(kSize), segment_, 7, 1));
    phases[0]->copy_array(kDevice, {{kCount, 1}});
    auto numbering = std::make_shared<Numbering>(segment_, 7, plan.notifications, false);
    execution_ =
        std::make_unique<Execution>(local.executor, std::move(phases), std::move(numbering));
  }

  Execution& plan() { return *execution_; }
  Array array() const {
    return {BufferAccess::kCopied, array_->data(), array_->data(), kCount * sizeof(float), kDevice};
  }

 private:
  std::shared_ptr<Segment> segment_;
  std::shared_ptr<DeviceRegion> array_;
  std::unique_ptr<Execution> execution_;
};

// Makes an exchange on hosts while `call` of rank 0 waits in the driver.
template <typename Call>
void hosts_go_on(Local& local, const char* entry, Call&& call) {
  Exchange host(local, Kind::kGdraa, 50);
  host.fill(local.rank(), 0);
  std::optional<Blocking> blocking;
  std::thread calls;
  if (local.rank() == 0) {
    blocking.emplace(entry);
    calls = std::thread(call);
    Blocking::reached();
  }
  local.barrier();
  local.executor.start(host.plan());
  finish(local, host.plan());
  host.verify(host.data(), kSize, 0);
  if (local.rank() == 0) {
    CHECK_NOTE(blocked() != 0, "%s held up an exchange on hosts", entry);
    blocking.reset();
    calls.join();
  }
  local.barrier();
  if (local.rank() == 1) call();
}

void hosts_beside_a_stream(const Settings& settings, const char* entry) {
  run(kSize, settings, [&](Local& local) {
    const ProgramStream stream;
    DeviceExchange exchange(local, Kind::kDirect);
    exchange.fill(local.rank(), 0);
    hosts_go_on(local, entry, [&] {
      CHECK(local.executor.enqueue(exchange.plan(), {}, stream.order(), soon()));
    });
    CHECK(local.executor.wait(exchange.plan(), soon()) == Waited::kDone);
    exchange.verify(stream.order(), 0);
    local.barrier();
  });
}

// Steps that hosts have a GPU make, before and after a stream's moment.
void hosts_beside_hosts(const Settings& settings, const char* entry) {
  run(kSize, settings, [&](Local& local) {
    const ProgramStream stream;
    DeviceExchange exchange(local, Kind::kGdraa);
    exchange.fill(local.rank(), 0);
    const StreamOrder order = stream.order();
    hosts_go_on(local, entry, [&] { local.executor.start(exchange.plan(), {}, &order); });
    CHECK(local.executor.wait(exchange.plan(), soon()) == Waited::kDone);
    exchange.verify(order, 0);
    local.barrier();
  });
}

void hosts_beside_copies(const Settings& settings, const char* entry) {
  static int turn = 0;
  const int more = 8 * ++turn;  // than all earlier turns have left
  run(kSize, settings, [&](Local& local) {
    const ProgramStream stream;
    StagedExchange exchange(local);
    std::list<DeviceStream> borrowed;  // so that copies need new ones
    for (int i = 0; i < more; ++i) borrowed.emplace_back(kDevice);
    stream.fill(exchange.array().target, 0, kCount * sizeof(float));
    const StreamOrder order = stream.order();
    local.barrier();
    hosts_go_on(local, entry,
                [&] { local.executor.start(exchange.plan(), exchange.array(), &order); });
    CHECK(local.executor.wait(exchange.plan(), soon()) == Waited::kDone);
    local.barrier();
  });
}

// A thread that returns a stream holds the executor's lock: making another device's first streams
// must not block it.
void streams_beside_a_new_device() {
  static cuda::Device device = 0;
  if (++device >= cuda::device_count()) return;
  std::optional<DeviceStream> borrowed(kDevice);
  std::optional<Blocking> blocking("stream_create");
  std::thread calls([] { (void)shared_stream(device, 0); });
  Blocking::reached();
  borrowed.reset();
  CHECK_NOTE(blocked() != 0, "a stream was given back when the driver went on");
  blocking.reset();
  calls.join();
}

void hosts_beside_an_answer(const Settings& settings) {
  run(kSize, settings, [&](Local& local) {
    const ProgramStream stream;
    DeviceExchange exchange(local, gdraa(local.rank(), kSize, kCount, true), 1);
    exchange.fill(local.rank(), 0);
    local.executor.start(exchange.plan());
    CHECK(local.executor.wait(exchange.plan(), soon()) == Waited::kCall);
    Executor::Call call;
    CHECK(local.executor.take_call(call));
    local.barrier();
    const StreamOrder order = stream.order();
    hosts_go_on(local, "event_record", [&] { local.executor.answer(call, &order); });
    CHECK(local.executor.wait(exchange.plan(), soon()) == Waited::kDone);
    local.barrier();
  });
}

// A stream's execution is given up and its stream released while the driver holds up another call.
void given_up_beside(const Settings& settings) {
  run(kSize, settings, [](Local& local) {
    const ProgramStream streams[2];
    DeviceExchange first(local, Kind::kDirect, 1 + static_cast<std::uint64_t>(local.rank()));
    DeviceExchange second(local, Kind::kDirect);
    second.fill(local.rank(), 0);
    const auto enqueue = [&](int number, DeviceExchange& exchange) {
      CHECK(local.executor.enqueue(exchange.plan(), {}, streams[number].order(), soon()));
    };
    if (local.rank() == 0) {
      enqueue(0, first);
      std::optional<Blocking> blocking("event_record");
      std::thread calls([&] { enqueue(1, second); });
      Blocking::reached();
      CHECK(first.plan().state() == State::kRunning);
      local.barrier();
      until([&] { return first.plan().state() == State::kFailed && streams[0].idle(); });
      CHECK_NOTE(blocked() != 0, "it was given up when the driver went on");
      blocking.reset();
      calls.join();
    } else {
      local.barrier();
      local.executor.start(first.plan());  // another collective
    }
    require_error(ErrorKind::kMismatch, [&] { (void)local.executor.wait(first.plan(), soon()); });
    local.barrier();
    if (local.rank() == 1) enqueue(1, second);
    CHECK(local.executor.wait(second.plan(), soon()) == Waited::kDone);
    second.verify(streams[1].order(), 0);
    local.barrier();
  });
}

// Streams get whole collectives, one after another, from whichever threads enqueue them.
void in_turn(const Settings& settings) {
  run(kSize, settings, [](Local& local) {
    const ProgramStream stream;
    DeviceExchange first(local, Kind::kDirect);
    DeviceExchange second(local, Kind::kDirect);
    first.fill(local.rank(), 0);
    second.fill(local.rank(), 1);
    const auto enqueue = [&](DeviceExchange& exchange) {
      CHECK(local.executor.enqueue(exchange.plan(), {}, stream.order(), soon()));
    };
    if (local.rank() == 0) {
      std::optional<Blocking> blocking("stream_wait_value");
      std::thread calls([&] { enqueue(first); });
      Blocking::reached();
      std::atomic<bool> begun{false};
      std::thread again([&] {
        begun.store(true);
        std::string said;
        require_error(ErrorKind::kPlan, [&] { enqueue(first); }, &said);
        CHECK_NOTE(said.find("under way") != said.npos, "%s", said.c_str());
        enqueue(second);
      });
      until([&] { return begun.load(); });
      nap(20);
      CHECK_NOTE(blocked() == 1, "%d are in the driver", blocked());
      blocking.reset();
      calls.join();
      again.join();
      local.barrier();
    } else {
      local.barrier();
      enqueue(first);
      enqueue(second);
    }
    for (DeviceExchange* const each : {&first, &second}) {
      CHECK(local.executor.wait(each->plan(), soon()) == Waited::kDone);
      each->verify(stream.order(), each == &first ? 0 : 1);
    }
    local.barrier();
  });
}

// An event that ends an execution while it is being enqueued takes effect afterwards: then no work
// of it is under way, and its stream continues.
void ended_meanwhile(const Settings& settings, const char* how) {
  const std::string end = how;
  const ProgramStream stream;
  const auto thrown = outcomes(kSize, settings, [&](Local& local) {
    DeviceExchange exchange(local, Kind::kDirect);
    local.barrier();
    if (local.rank() == 1) {
      if (end != "lost") return local.barrier();
      until([] { return blocked() != 0; });
      throw Failure();
    }
    std::optional<Blocking> blocking("event_record");
    std::string said;
    std::thread calls([&] {
      try {
        (void)local.executor.enqueue(exchange.plan(), {}, stream.order(), soon());
      } catch (const Error& error) {
        said = error.what();
      }
    });
    Blocking::reached();
    std::atomic<bool> ended{false};
    std::thread ends([&] {
      if (end == "closed") exchange.plan().close();
      if (end == "stopped") local.executor.stop_thread();
      if (end == "lost") until([&] { return local.context.liveness().alarmed(); });
      ended.store(true);
    });
    if (end != "closed") until([&] { return ended.load(); });
    nap(20);
    CHECK(ended.load() == (end != "closed") && blocked() == 1);
    blocking.reset();
    calls.join();
    ends.join();
    until([&] { return stream.idle(); });
    if (end == "stopped") {
      CHECK_NOTE(said.find("its thread was stopped") != said.npos, "%s", said.c_str());
    }
    CHECK(end == "closed" ? exchange.plan().state() == State::kClosed
                          : exchange.plan().state() == State::kFailed);
    if (end == "lost") {
      require_error(ErrorKind::kPeerLost,
                    [&] { (void)local.executor.wait(exchange.plan(), soon()); });
      throw Failure();
    }
    local.barrier();
  });
  for (const std::exception_ptr& each : thrown) {
    CHECK_NOTE((each != nullptr) == (end == "lost"), "%s",
               each == nullptr ? how : words(each).c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Parts part(argc, argv);
  part("stream", [](const Settings& settings) {
    for (const char* entry : {"stream_wait_value", "event_record"}) {
      hosts_beside_a_stream(settings, entry);
    }
  });
  part("hosts", [](const Settings& settings) {
    for (const char* entry : {"event_record", "memcpy_async"}) hosts_beside_hosts(settings, entry);
  });
  part("copies", [](const Settings& settings) {
    for (const char* entry : {"memcpy_async", "stream_create"}) {
      hosts_beside_copies(settings, entry);
    }
  });
  part("shared", [](const Settings&) { streams_beside_a_new_device(); });
  part("answer", hosts_beside_an_answer);
  part("beside", given_up_beside);
  part("turn", in_turn);
  for (const char* how : {"closed", "stopped", "lost"}) {
    part(how, [how](const Settings& settings) { ended_meanwhile(settings, how); });
  }
  std::puts("ok");
}
