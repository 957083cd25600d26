// A fake CUDA driver: a libcuda.so.1 on host memory, for tests on machines without a GPU.
//
// Memory is memfds. A device address lies in a range that nobody may touch; the memory is mapped at
// a fixed distance from it, which only the fake driver adds. Streams are threads that do one
// operation after another, each after a random delay. Wrong use is refused as CUDA does, or more
// strictly.
//
// The environment, read at cuInit:
//   FAKE_DEVICES=2           how many devices there are; CUDA_VISIBLE_DEVICES selects among them
//   FAKE_MEMORY=8589934592   bytes of each device, counted per process
//   FAKE_LACKS=vmm,dmabuf    features that devices lack: see kFeatures in devices.cpp
//   FAKE_DELAY_US=50         the longest delay before an operation; 0: none
//   FAKE_SEED=0              of the delays
//   FAKE_FAIL=NAME:N[:CODE]  the N-th call of an entry, as in mem_create:1 or cuMemCreate:1:2,
//                              fails once; any:N counts all that are not polled; several
//                              with commas between
//   FAKE_HOLDS=1             calls hold up others as a real driver's do (holds.cpp)
// Tests call fakeLive() to see what was not released yet, put a stream into a global capture, and
// by fakeBlock() make calls of an entry wait.
#pragma once

#include <atomic>
#include <cstdint>

#include "sys/cuda.hpp"

namespace fake_cuda {

using namespace pgasdl::cuda;

// Every entry is a function with the member's name here, exported under the driver's name.
#define FAKE_ENTRIES(X) PGASDL_CUDA_FUNCTIONS(X) PGASDL_CUDA_OPTIONAL_FUNCTIONS(X)
#define FAKE_DECLARE(member, name, parameters) \
  __attribute__((visibility("default"))) Result member parameters __asm__(name);
FAKE_ENTRIES(FAKE_DECLARE)
#undef FAKE_DECLARE

enum class Entry : std::uint8_t {
#define FAKE_NUMBER(member, name, parameters) member,
  FAKE_ENTRIES(FAKE_NUMBER)
#undef FAKE_NUMBER
};

inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kInvalidImage = 200;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kPeerAccessUnsupported = 217;
inline constexpr Result kInvalidPtx = 218;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotFound = 500;
inline constexpr Result kIllegalAddress = 700;
inline constexpr Result kNotRegistered = 713;
inline constexpr Result kNotPermitted = 800;
inline constexpr Result kCaptureUnsupported = 900;
inline constexpr Result kCaptureInvalidated = 901;

enum class Needs : std::uint8_t { kNothing, kDriver, kContext };

// Begins every entry: counts the call; any result except success refuses it. All calls are refused
// in the child of a process that called cuInit, in a host function, and while the process ends.
Result enter(Entry entry, Needs needs);

// Called by cuInit, and when the process ends.
void begin_driver();
bool ended();

// holds.cpp: called at the beginning of a call.
Result held_up(Entry entry);
void begin_capture();
// Success, or the driver's error for a capture that a call has invalidated.
Result end_capture();

// Marks this thread as one that runs a host function.
void set_in_host_function(bool running);

// The environment variable FAKE_... as a number.
std::uint64_t environment_number(const char* name, std::uint64_t otherwise);

// Whether FAKE_LACKS names the feature.
bool lacks(const char* feature);

int n_devices();
// The number of a visible device among all devices, and the reverse: -1 if it is not visible.
int physical(Device device);
Device visible(int physical_device);
inline std::uint64_t bit(Device device) { return std::uint64_t{1} << device; }

// This thread's current context; null: none.
Context current_context();

struct Fault {};  // thrown by an operation that ends its context

}  // namespace fake_cuda

struct pgasdl::cuda::ContextObject {
  int device = 0;
  int n_retained = 0;
  std::atomic<int> error{0};  // once set, every call in the context returns it
};
