// Work of the fake driver at every call: counting, injected failures, and checks who may call at
// all.
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "fake_driver.hpp"

namespace fake_cuda {
namespace {

struct Name {
  std::string_view member, exported;
  void* address;  // a missing entry shows when this library is linked
};

const Name kNames[] = {
#define FAKE_NAME(member, name, parameters) {#member, name, reinterpret_cast<void*>(&member)},
    FAKE_ENTRIES(FAKE_NAME)
#undef FAKE_NAME
};
constexpr std::size_t kEntries = std::size(kNames);

struct Failure {
  std::string name;
  std::uint64_t at = 0;  // the number of the call
  Result result = kUnknown;
};

struct State {
  std::atomic<pid_t> process{0};  // the one that called cuInit
  std::atomic<bool> ended{false};
  std::vector<Failure> failures;
  std::array<std::atomic<std::uint64_t>, kEntries> n_calls{};
  std::atomic<std::uint64_t> n_all_calls{0};
  // Which call of each entry fails, set by fakeFail; the last one counts all entries.
  std::array<std::atomic<std::uint64_t>, kEntries + 1> armed{};
  std::atomic<const char*> failed{nullptr};
  // The entry whose calls wait, set by fakeBlock, and how many do.
  std::atomic<std::size_t> blocked{kEntries};
  std::atomic<int> n_blocked{0};
};

std::vector<std::string> parts(const char* name, char separator) {
  std::vector<std::string> all;
  std::string_view left = std::getenv(name) != nullptr ? std::getenv(name) : "";
  while (!left.empty()) {
    const std::size_t end = left.find(separator);
    all.emplace_back(left.substr(0, end));
    left.remove_prefix(end == left.npos ? left.size() : end + 1);
  }
  return all;
}

std::vector<Failure> read_failures() {
  std::vector<Failure> all;
  for (const std::string& part : parts("FAKE_FAIL", ',')) {
    char name[64];
    unsigned long long at = 0;
    Failure failure;
    if (std::sscanf(part.c_str(), "%63[^:]:%llu:%d", name, &at, &failure.result) < 2) {
      std::fprintf(stderr, "FAKE_FAIL=%s: NAME:N or NAME:N:CODE\n", part.c_str());
      std::abort();
    }
    failure.name = name;
    failure.at = at;
    all.push_back(failure);
  }
  return all;
}

// Never destroyed: streams outlive main.
State& state() {
  static State& only = *[] {
    State* made = new State;
    made->failures = read_failures();
    return made;
  }();
  return only;
}

thread_local bool in_host_function = false;

// Their number of calls is random, so "any" does not count them.
bool is_polled(Entry entry) {
  return entry == Entry::ctx_push || entry == Entry::ctx_pop || entry == Entry::event_query ||
         entry == Entry::thread_exchange_capture_mode;
}

// The entry with either name; kEntries: there is none.
std::size_t number_of(const char* name) {
  const auto* const found =
      std::find_if(std::begin(kNames), std::end(kNames),
                   [&](const Name& each) { return name == each.member || name == each.exported; });
  return static_cast<std::size_t>(found - std::begin(kNames));
}

void wait_if_blocked(Entry entry) {
  State& here = state();
  const auto blocked = [&] {
    return here.blocked.load(std::memory_order_relaxed) == static_cast<std::size_t>(entry);
  };
  if (!blocked()) return;
  here.n_blocked.fetch_add(1, std::memory_order_relaxed);
  while (blocked() && !ended()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  here.n_blocked.fetch_sub(1, std::memory_order_relaxed);
}

Result injected(Entry entry) {
  State& here = state();
  if (entry == Entry::get_error_name || entry == Entry::get_error_string) return kSuccess;
  const auto index = static_cast<std::size_t>(entry);
  const std::uint64_t n = here.n_calls[index].fetch_add(1, std::memory_order_relaxed) + 1;
  const std::uint64_t n_all =
      is_polled(entry) ? 0 : here.n_all_calls.fetch_add(1, std::memory_order_relaxed) + 1;
  if (here.armed[index].load(std::memory_order_relaxed) == n ||
      (n_all != 0 && here.armed[kEntries].load(std::memory_order_relaxed) == n_all)) {
    here.failed.store(kNames[index].exported.data(), std::memory_order_relaxed);
    return kUnknown;
  }
  for (const Failure& failure : here.failures) {
    const Name& name = kNames[index];
    if (failure.name == "any" && failure.at == n_all) return failure.result;
    if ((failure.name == name.member || failure.name == name.exported) && failure.at == n) {
      return failure.result;
    }
  }
  return kSuccess;
}

}  // namespace

Result enter(Entry entry, Needs needs) {
  wait_if_blocked(entry);
  if (const Result failed = injected(entry)) return failed;
  if (in_host_function) return kNotPermitted;
  State& here = state();
  const pid_t process = here.process.load(std::memory_order_acquire);
  if (process != 0 && process != getpid()) return kNotInitialized;
  if (needs == Needs::kNothing) return kSuccess;
  if (process == 0) return kNotInitialized;
  if (ended()) return kDeinitialized;
  if (const Result spoils = held_up(entry)) return spoils;
  if (needs == Needs::kDriver) return kSuccess;
  const Context context = current_context();
  return context == nullptr ? kInvalidContext : context->error.load(std::memory_order_relaxed);
}

void begin_driver() {
  static std::once_flag once;
  std::call_once(once, [] {
    state().process.store(getpid(), std::memory_order_release);
    std::atexit([] { state().ended.store(true, std::memory_order_relaxed); });
  });
}

bool ended() { return state().ended.load(std::memory_order_relaxed); }

void set_in_host_function(bool running) { in_host_function = running; }

std::uint64_t environment_number(const char* name, std::uint64_t otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == 0 ? otherwise : std::strtoull(value, nullptr, 10);
}

bool lacks(const char* feature) {
  static const auto& all = *new std::vector<std::string>(parts("FAKE_LACKS", ','));
  for (const std::string& one : all) {
    if (one == feature) return true;
  }
  return false;
}

}  // namespace fake_cuda

// For tests: from now on the n-th call of an entry ("any": of all that are not polled) fails once,
// instead of an earlier choice; 0: none fails. Returns the calls so far.
extern "C" __attribute__((visibility("default"))) std::uint64_t fakeFail(const char* name,
                                                                         std::uint64_t n) {
  using namespace fake_cuda;
  State& here = state();
  const std::size_t index = number_of(name);
  if (index == kEntries && std::strcmp(name, "any") != 0) std::abort();
  const std::uint64_t now =
      (index == kEntries ? here.n_all_calls : here.n_calls[index]).load(std::memory_order_relaxed);
  here.failed.store(nullptr, std::memory_order_relaxed);
  if (n == 0) {
    for (auto& each : here.armed) each.store(0, std::memory_order_relaxed);
  } else {
    here.armed[index].store(now + n, std::memory_order_relaxed);
  }
  return now;
}

// The entry that was made to fail since fakeFail(); null: none.
extern "C" __attribute__((visibility("default"))) const char* fakeFailed() {
  return fake_cuda::state().failed.load(std::memory_order_relaxed);
}

// For tests: from now on calls of this entry wait, and those of another continue; "": none waits.
extern "C" __attribute__((visibility("default"))) void fakeBlock(const char* name) {
  using namespace fake_cuda;
  const std::size_t index = number_of(name);
  if (index == kEntries && *name != 0) std::abort();
  state().blocked.store(index, std::memory_order_relaxed);
}

// How many calls wait because of fakeBlock().
extern "C" __attribute__((visibility("default"))) int fakeBlocked() {
  return fake_cuda::state().n_blocked.load(std::memory_order_relaxed);
}
