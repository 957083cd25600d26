// Promises of an execution besides its result: it never takes another's flags for its own, keeps
// what it still needs, and releases it when it is done.

#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "plans.hpp"

namespace {

std::atomic<bool> no_memory{false};  // for progress threads
thread_local bool starved = false;   // this thread gets no memory

bool is_progress_thread() {
  char name[16] = {};
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::string_view(name) == "pgasdl-progress";
}

}  // namespace

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  if (starved || (no_memory.load(std::memory_order_relaxed) && is_progress_thread())) {
    throw std::bad_alloc();
  }
  void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

using Waited = Executor::Waited;
using State = Execution::State;

// Ranks whose fingerprints differ in any one bit: always reported.
void any_difference_is_told() {
  for (int bit = 0; bit < 64; ++bit) {
    const auto thrown = outcomes(2, {}, [&](Local& local) {
      const std::uint64_t fingerprint = 12345 ^ (std::uint64_t{local.rank() == 1} << bit);
      Exchange exchange(local, Kind::kGdraa, 40, false, fingerprint);
      local.executor.start(exchange.plan());
      finish(local, exchange.plan());
    });
    for (const auto& error : thrown) CHECK_NOTE(error != nullptr, "bit %d went unnoticed", bit);
  }
}

// More executions than there are generations, of two sizes on one range of notifications, one of
// them rare: an old flag is never mistaken for a new one or for a disagreement.
void numbers_come_again() {
  run(2, {}, [](Local& local) {
    const std::uint64_t counts[] = {8, 500};
    const auto segment = local.segment(4096 * sizeof(float));
    const auto numbering = std::make_shared<Numbering>(segment, 0, 64, true);
    std::vector<std::unique_ptr<Execution>> executions;
    for (const std::uint64_t count : counts) {
      const Plan plan = gdraa(local.rank(), 2, count, false);
      std::vector<BufferBinding> buffers;
      for (const std::uint64_t at : {0, 1000, 2000}) {
        buffers.push_back({segment, at * sizeof(float), DType::kF32});
      }
      executions.push_back(bound(local, plan, buffers, {0, 1}, segment, 0, count, numbering));
    }
    float* const data = items<float>(segment);
    for (std::uint32_t round = 0; round < 3 * kGenerations; ++round) {
      const std::size_t which = round % kGenerations == 5 ? 1 : 0;
      for (std::uint64_t i = 0; i < counts[which]; ++i) {
        data[i] = Exchange::value(local.rank(), round, i);
      }
      local.executor.start(*executions[which]);
      finish(local, *executions[which]);
      for (std::uint64_t i = 0; i < counts[which]; ++i) {
        CHECK_NOTE(data[i] == Exchange::sum(2, round, i), "round %u", round);
      }
    }
  });
}

// Memory kept for an interrupted call is released when its result is taken, not before.
void kept_until_taken() {
  std::atomic<bool> interrupted{false};
  run(2, {}, [&](Local& local) {
    Exchange exchange(local, Kind::kTree, 50);
    auto kept = std::make_shared<int>(1);
    const std::weak_ptr<int> watched = kept;
    while (local.rank() == 1 && !interrupted.load()) std::this_thread::yield();
    local.executor.start(exchange.plan());
    if (local.rank() == 0) {
      CHECK(local.executor.wait(exchange.plan(), Deadline::once()) == Waited::kTimeout);
      exchange.plan().interrupt(std::move(kept));
      interrupted.store(true);
      CHECK(!watched.expired());
    }
    finish(local, exchange.plan());
    CHECK(local.rank() == 1 || watched.expired());
    CHECK(!exchange.plan().interrupted());
  });
}

// If the progress thread gets no memory, the waiting thread gets the error, and the process
// continues.
void no_memory_for_progress() {
  std::atomic<bool> started{false};
  Settings settings;
  settings.shm = true;  // its progress allocates nothing, except for the update's Call
  const auto thrown = outcomes(2, settings, [&](Local& local) {
    Exchange exchange(local, Kind::kTree, 200, true);
    if (local.rank() == 0) {
      no_memory.store(true);
      local.executor.start_thread();
    }
    while (local.rank() == 1 && !started.load()) std::this_thread::yield();
    local.executor.start(exchange.plan());
    started.store(true);
    // Rank 0's program makes no progress, so its progress thread reaches the update.
    const Deadline deadline = soon();
    while (local.rank() == 0 && exchange.plan().state() == State::kRunning) {
      CHECK(!deadline.passed());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (local.rank() == 0) no_memory.store(false);
    local.executor.stop_thread();
    finish(local, exchange.plan());
  });
  bool told = false;
  try {
    if (thrown[0] != nullptr) std::rethrow_exception(thrown[0]);
  } catch (const std::bad_alloc&) {
    told = true;
  } catch (const std::exception& other) {
    CHECK_NOTE(false, "%s", other.what());
  }
  CHECK(told);
}

// An execution gets its place among the live ones when it takes its number: another one that begins
// while the first one's array is copied must not take that place, nor make it depend on memory.
void begins_while_another_is_copied() {
  Settings settings;
  settings.shm = true;
  run(2, settings, [&](Local& local) {
    Exchange small(local, Kind::kTree, 50);
    Exchange large(local, Kind::kTree, 8 << 20);
    const auto both = [&](auto&& step) {
      step(small.plan());
      step(large.plan());
    };
    small.fill(local.rank(), 0);
    local.executor.start(small.plan());  // reserves a place for one
    finish(local, small.plan());
    local.barrier();
    const std::vector<float> source(large.count(), 1);
    std::vector<float> target(large.count());
    const Array array{BufferAccess::kCopied, reinterpret_cast<const std::byte*>(source.data()),
                      reinterpret_cast<std::byte*>(target.data()), 4 * large.count()};
    if (local.rank() == 0) {
      std::thread begins([&] {
        starved = true;
        try {
          local.executor.start(large.plan(), array);
        } catch (const std::bad_alloc&) {
          starved = false;
          CHECK_NOTE(false, "no place for execution %d", int(large.plan().number()));
        }
        starved = false;
      });
      while (large.plan().state() != State::kRunning) std::this_thread::yield();
      local.executor.start(small.plan());
      begins.join();
      local.barrier();
    } else {
      local.barrier();
      both([&](Execution& execution) {
        local.executor.start(execution, &execution == &large.plan() ? array : Array{});
      });
    }
    both([&](Execution& execution) { finish(local, execution); });
    CHECK(target.front() == 2 && target.back() == 2);
    local.barrier();
  });
}

// An execution that is closed while its result is taken releases what it kept only once.
void closed_while_taken() {
  run(1, {}, [](Local& local) {
    for (int round = 0; round < 100; ++round) {
      Exchange exchange(local, Kind::kGdraa, 50);
      Execution& execution = exchange.plan();
      local.executor.start(execution);
      CHECK(execution.done());
      auto kept = std::make_shared<int>(1);
      const std::weak_ptr<int> watched = kept;
      execution.interrupt(std::move(kept));
      std::atomic<int> ready{0};
      std::thread takes([&] {
        ready.fetch_add(1);
        while (ready.load() < 2) std::this_thread::yield();
        try {
          finish(local, execution);
        } catch (const Error& error) {
          CHECK(error.kind() == ErrorKind::kClosed);
        }
      });
      ready.fetch_add(1);
      while (ready.load() < 2) std::this_thread::yield();
      execution.close();
      takes.join();
      CHECK(watched.expired() && execution.state() == State::kClosed);
    }
  });
}

}  // namespace

int main() {
  any_difference_is_told();
  numbers_come_again();
  kept_until_taken();
  no_memory_for_progress();
  begins_while_another_is_copied();
  closed_while_taken();
  std::puts("ok");
}
