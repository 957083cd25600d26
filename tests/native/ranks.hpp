#pragma once

// Ranks as threads of this process, each with its own Context and Executor, over one mapping
// (loopback) or over memfd mappings (shm).

#include <barrier>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "executor/executor.hpp"
#include "pgas/context.hpp"
#include "pgas/group.hpp"
#include "transport/loopback/loopback.hpp"
#include "transport/shm/shm.hpp"

namespace pgasdl::testing {

inline constexpr std::size_t kManyNotifications = 1024;

struct Settings {
  LoopbackFaults faults{};
  Options options{};
  bool shm = false;
  std::function<std::unique_ptr<Transport>(Rank, Rank)> transport{};  // of a rank; replaces both
};

// Waits that go to sleep at once: every hand-over depends on the wake word.
inline Options sleepy() {
  Options options;
  options.spin_us = 0;
  options.yield_us = 0;
  return options;
}

// The adversaries, from one that does nothing to one that does everything except failing a rank.
inline std::vector<Settings> adversaries(std::uint64_t seed) {
  std::vector<Settings> all(7);
  all[1].faults = {.seed = seed, .delay = 3};
  all[2].faults = {.seed = seed, .delay = 2, .reorder = true};
  all[3].faults = {.seed = seed, .delay = 2, .late_source = true};
  all[4].faults = {.seed = seed, .delay = 4, .reorder = true, .late_source = true, .refuse = 2};
  all[5].faults = {
      .seed = seed, .delay = 1, .reorder = true, .late_source = true, .refuse = 1, .mapped = false};
  all[6].faults = {.seed = seed,
                   .delay = 2,
                   .late_source = true,
                   .mapped = false,
                   .any_order = true,
                   .completion_first = true};
  return all;
}

inline Deadline soon() { return Deadline::in(20); }

inline void nap(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

template <typename Reached>
void until(const Reached& reached) {
  for (const Deadline deadline = Deadline::in(60); !reached(); nap(1)) CHECK(!deadline.passed());
}

inline std::vector<Rank> everybody(Rank size) {
  std::vector<Rank> ranks;
  for (Rank rank = 0; rank < size; ++rank) ranks.push_back(rank);
  return ranks;
}

struct Failure : std::exception {
  const char* what() const noexcept override { return "failed on purpose"; }
};

// One rank, as a test's program sees it.
class Local {
 public:
  Local(Rank rank, Rank size, std::unique_ptr<Transport> transport, const Options& options)
      : context(rank, size, std::move(transport), options), executor(context) {}

  Rank rank() const { return context.rank(); }
  Rank size() const { return context.size(); }
  Rank peer(Rank distance) const { return (rank() + distance) % size(); }
  Group& world() { return *context.world(); }

  std::shared_ptr<Segment> segment(std::uint64_t bytes,
                                   std::uint32_t notifications = kManyNotifications,
                                   std::byte* bound = nullptr) {
    std::shared_ptr<Segment> made;
    CHECK(world().create_segment(bytes, notifications, bound, soon(), made) == Outcome::kDone);
    return made;
  }

  std::shared_ptr<Group> group(std::vector<Rank> ranks) {
    auto made = std::make_shared<Group>(context, std::move(ranks), false);
    const std::string mine = made->describe();
    std::vector<std::string> all;
    CHECK(world().allgather(Group::Kind::kExchange, "group", 3, std::as_bytes(std::span(mine)),
                            soon(), all) == Outcome::kDone);
    std::vector<std::string> members;
    for (Rank rank : made->ranks()) members.push_back(all[static_cast<std::size_t>(rank)]);
    CHECK(made->attach(members, soon()) == Outcome::kDone);
    return made;
  }

  void barrier() { CHECK(world().barrier(soon()) == Outcome::kDone); }

  // Waits until one notification of the range is raised; resets it and returns its value.
  std::uint32_t await(Segment& segment, std::uint64_t first, std::uint64_t count = 1,
                      std::uint32_t* id = nullptr) {
    std::uint32_t found = 0;
    CHECK(context.notify_waitsome(segment, first, count, soon(), found) == Outcome::kDone);
    if (id != nullptr) *id = found;
    return context.notify_reset(segment, found);
  }

  void notify(Rank peer, Segment& segment, std::uint64_t id, std::uint32_t value = 1) {
    CHECK(context.notify(peer, segment, id, value, 0, soon()) == Outcome::kDone);
  }

  void flush(QueueId queue = 0) { CHECK(context.wait(queue, soon()) == Outcome::kDone); }

  Context context;
  Executor executor;
};

template <typename T>
T* items(const std::shared_ptr<Segment>& segment, std::uint64_t byte_offset = 0) {
  return reinterpret_cast<T*>(segment->local().data + byte_offset);
}

using Program = std::function<void(Local&)>;

// Runs `program` on every rank; returns what each one threw. A rank that throws closes as failed.
inline std::vector<std::exception_ptr> outcomes(Rank size, const Settings& settings,
                                                const Program& program) {
  const auto n = static_cast<std::size_t>(size);
  auto world = std::make_shared<LoopbackWorld>(size, settings.faults);
  std::vector<std::string> endpoints(n);
  std::vector<std::string> descriptions(n);
  std::vector<std::exception_ptr> thrown(n);
  std::barrier<> together(size);
  std::vector<std::thread> threads;
  for (Rank rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      const auto me = static_cast<std::size_t>(rank);
      std::unique_ptr<Transport> transport;
      if (settings.transport) {
        transport = settings.transport(rank, size);
      } else if (settings.shm) {
        transport = std::make_unique<ShmTransport>(rank, size, "sixteen bytes...");
      } else {
        transport = std::make_unique<LoopbackTransport>(world, rank);
      }
      Local local(rank, size, std::move(transport), settings.options);
      endpoints[me] = local.context.endpoint();
      together.arrive_and_wait();
      local.context.connect(endpoints);
      descriptions[me] = local.context.open();
      together.arrive_and_wait();
      local.context.join(descriptions, soon());
      try {
        program(local);
      } catch (...) {
        thrown[me] = std::current_exception();
      }
      local.context.close(thrown[me] != nullptr);
      local.executor.stop_thread();
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

inline std::string words(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  }
}

// Likewise, but no rank may throw.
inline void run(Rank size, const Settings& settings, const Program& program) {
  const auto thrown = outcomes(size, settings, program);
  std::string said;
  for (std::size_t rank = 0; rank < thrown.size(); ++rank) {
    if (thrown[rank] != nullptr) said += text("rank ", rank, ": ", words(thrown[rank]), "\n");
  }
  CHECK_NOTE(said.empty(), "%s", said.c_str());
}

// Requires that `call` throws an Error of this kind, and returns the rank that it names.
template <typename Call>
Rank require_error(ErrorKind kind, Call&& call, std::string* said = nullptr) {
  try {
    call();
  } catch (const Error& error) {
    CHECK_NOTE(error.kind() == kind, "kind %d: %s", int(error.kind()), error.what());
    if (said != nullptr) *said = error.what();
    return error.rank();
  }
  CHECK_NOTE(false, "no error of kind %d", int(kind));
  return -1;
}

}  // namespace pgasdl::testing
