// The effects of a driver's call on other calls, as observed on an H200 (driver 580): a call that
// waits for streams holds up nearly all calls of other threads, and some calls invalidate a
// capture.
#include <algorithm>
#include <atomic>
#include <iterator>
#include <shared_mutex>

#include "streams.hpp"

namespace fake_cuda {
namespace {

// Locks of calls that enqueue, and of calls that make or release: a waiting call holds one or both.
std::shared_mutex enqueuing, making;
constexpr Entry kEnqueue[] = {Entry::event_record, Entry::launch_kernel, Entry::memcpy_async,
                              Entry::memset_async};
constexpr Entry kMake[] = {Entry::event_create,        Entry::stream_create,
                           Entry::mem_alloc,           Entry::mem_host_register,
                           Entry::mem_host_unregister, Entry::module_load_data};
// These invalidate a capture unless their thread's mode is relaxed.
constexpr Entry kSpoil[] = {Entry::event_query, Entry::mem_alloc, Entry::mem_host_register,
                            Entry::mem_host_unregister};

bool holds() {
  static const bool on = environment_number("FAKE_HOLDS", 0) != 0;
  return on;
}

std::atomic<int> n_captures{0};
std::atomic<bool> spoilt{false};
thread_local int capture_mode = 0;

template <std::size_t n>
bool is_one_of(const Entry (&all)[n], Entry entry) {
  return std::find(std::begin(all), std::end(all), entry) != std::end(all);
}

}  // namespace

Result held_up(Entry entry) {
  if (n_captures.load(std::memory_order_relaxed) != 0 && capture_mode != kCaptureModeRelaxed &&
      is_one_of(kSpoil, entry)) {
    spoilt.store(true, std::memory_order_relaxed);
    return kCaptureUnsupported;
  }
  if (!holds()) return kSuccess;
  if (is_one_of(kEnqueue, entry)) const std::shared_lock passes(enqueuing);
  if (is_one_of(kMake, entry)) const std::shared_lock passes(making);
  return kSuccess;
}

void begin_capture() {
  spoilt.store(false, std::memory_order_relaxed);
  n_captures.fetch_add(1, std::memory_order_relaxed);
}

Result end_capture() {
  n_captures.fetch_sub(1, std::memory_order_relaxed);
  return spoilt.load(std::memory_order_relaxed) ? kCaptureInvalidated : kSuccess;
}

void wait_for_streams() {
  if (!holds()) return;
  const std::scoped_lock nobody_else(enqueuing, making);
  for (const Marker* marker : last_operations()) marker->wait();
}

void wait_for_pageable(const Marker& made, bool null_stream) {
  std::unique_lock all(enqueuing, std::defer_lock);
  std::unique_lock some(making, std::defer_lock);
  if (holds()) {
    if (null_stream) all.lock();
    some.lock();
  }
  made.wait();
}

Result thread_exchange_capture_mode(int* mode) {
  if (const Result refused = enter(Entry::thread_exchange_capture_mode, Needs::kDriver)) {
    return refused;
  }
  std::swap(*mode, capture_mode);
  return kSuccess;
}

}  // namespace fake_cuda
