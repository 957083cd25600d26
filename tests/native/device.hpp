#pragma once

// A GPU's memory, streams and plans on the fake driver, for tests of the core.

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memory/device_stream.hpp"
#include "plans.hpp"

namespace pgasdl::testing {

inline constexpr cuda::Device kDevice = 0;
inline constexpr Rank kSize = 2;
inline constexpr std::uint64_t kCount = 600;

template <typename Function>
Function* of_the_driver(const char* name) {
  void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  CHECK(handle != nullptr);
  const auto found = reinterpret_cast<Function*>(dlsym(handle, name));
  CHECK(found != nullptr);
  return found;
}

inline std::string live() { return of_the_driver<const char*()>("fakeLive")(); }

inline void fail(const char* entry, std::uint64_t n) {
  (void)of_the_driver<std::uint64_t(const char*, std::uint64_t)>("fakeFail")(entry, n);
}

// From now on calls of this entry wait; "": calls of none.
inline void block(const char* entry) { of_the_driver<void(const char*)>("fakeBlock")(entry); }

// How many calls wait.
inline int blocked() { return of_the_driver<int()>("fakeBlocked")(); }

// Makes calls of a driver's entry wait for its lifetime, or a minute if they hold up the test.
class Blocking {
 public:
  explicit Blocking(const char* entry) {
    block(entry);
    ends_ = std::thread([this] {
      for (const Deadline minute = Deadline::in(60); !over_.load() && !minute.passed();) nap(1);
      block("");
    });
  }
  Blocking(const Blocking&) = delete;
  Blocking& operator=(const Blocking&) = delete;
  ~Blocking() {
    over_.store(true);
    ends_.join();
  }
  // Returns when such a call waits.
  static void reached() {
    until([] { return blocked() != 0; });
  }

 private:
  std::atomic<bool> over_{false};
  std::thread ends_;
};

// A stream of the program.
class ProgramStream {
 public:
  ProgramStream() {
    const cuda::Current current(kDevice);
    cuda::check(cuda::driver().stream_create(&stream_, cuda::kStreamNonBlocking, 0), "a stream");
  }
  ~ProgramStream() {
    const cuda::Current current(kDevice);
    cuda::check(cuda::driver().stream_destroy(stream_), "a stream's end");
  }
  ProgramStream(const ProgramStream&) = delete;
  ProgramStream& operator=(const ProgramStream&) = delete;

  StreamOrder order() const { return {kDevice, stream_}; }
  void synchronize() const {
    const cuda::Current current(kDevice);
    cuda::check(cuda::driver().stream_synchronize(stream_), "a stream's work");
  }
  bool idle() const {
    const cuda::Current current(kDevice);
    const cuda::Result result = cuda::driver().stream_query(stream_);
    if (result != cuda::kNotReady) cuda::check(result, "a stream's work");
    return result == cuda::kSuccess;
  }
  // Delayed, as a kernel's work is.
  void fill(std::byte* data, unsigned char value, std::size_t bytes) const {
    const cuda::Current current(kDevice);
    cuda::check(
        cuda::driver().memset_async(reinterpret_cast<cuda::DevicePtr>(data), value, bytes, stream_),
        "filling");
  }

 private:
  cuda::Stream stream_ = nullptr;
};

inline std::shared_ptr<Segment> on_device(Local& local, std::uint64_t bytes) {
  std::shared_ptr<Segment> made;
  CHECK(local.world().create_segment(bytes, kManyNotifications, {nullptr, kDevice}, soon(), made) ==
        Outcome::kDone);
  return made;
}

inline void put(Local& local, const ProgramStream& stream, const std::shared_ptr<Segment>& segment,
                std::uint64_t to, std::uint64_t bytes, std::uint64_t notification) {
  const Slice mine{segment, 0, bytes};
  const Slice theirs{segment, to, bytes};
  const Pair pair{&mine, &theirs};
  CHECK(local.context.write_notify_on(stream.order(), {&pair, 1}, local.peer(1), segment,
                                      notification, 1, 0, soon()) == Outcome::kDone);
}

// [data | weights | inbox] on a GPU.
class DeviceExchange {
 public:
  DeviceExchange(Local& local, Kind kind, std::uint64_t fingerprint = 1)
      : DeviceExchange(local,
                       kind == Kind::kGdraa  ? gdraa(local.rank(), kSize, kCount, false)
                       : kind == Kind::kTree ? tree(local.rank(), kSize, kCount, false)
                                             : gdraa_direct(local.rank(), kSize, kCount),
                       fingerprint) {}
  DeviceExchange(Local& local, const Plan& plan, std::uint64_t fingerprint) {
    const auto size = static_cast<std::uint64_t>(local.size());
    segment_ = on_device(local, (2 + size) * kCount * sizeof(float));
    std::vector<Rank> ranks(size);
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto place = [&](std::uint64_t elements) {
      return BufferBinding{segment_, elements * sizeof(float), DType::kF32};
    };
    execution_ = bound(local, plan, {place(0), place(kCount), place(2 * kCount)}, std::move(ranks),
                       segment_, 7, fingerprint);
  }

  Execution& plan() { return *execution_; }
  void fill(Rank rank, std::uint32_t turn) const {
    std::vector<float> values(kCount);
    for (std::uint64_t i = 0; i < kCount; ++i) values[i] = Exchange::value(rank, turn, i);
    device_copy(kDevice, segment_->local().data, values.data(), kCount * sizeof(float));
  }
  void verify(const StreamOrder& order, std::uint32_t turn) const {
    std::vector<float> found(kCount);
    device_copy(order, found.data(), segment_->local().data, kCount * sizeof(float));
    for (std::uint64_t i = 0; i < kCount; ++i) {
      CHECK_NOTE(found[i] == Exchange::sum(kSize, turn, i), "turn %u, element %zu: %g", turn,
                 std::size_t(i), double(found[i]));
    }
  }

 private:
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<Execution> execution_;
};

// The parts of a program of tests, each run on memory of this process and on shared memory; an
// argument names the only one to run.
class Parts {
 public:
  Parts(int argc, char** argv) : only_(argc > 1 ? argv[1] : "") { shm_.shm = true; }

  template <typename Test>
  void operator()(const std::string& name, Test&& test) const {
    if (!only_.empty() && only_ != name) return;
    for (const Settings& settings : {Settings{}, shm_}) test(settings);
  }

 private:
  std::string only_;
  Settings shm_;
};

}  // namespace pgasdl::testing
