// Streams, each a thread with a queue, and events.
//
// Operations have the order that CUDA promises, and no other: queues and markers carry no order
// backwards, so that the thread sanitizer notices a missing wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "fake_driver.hpp"

namespace fake_cuda {

// Raised once, by the operation that it belongs to. Never freed: counting references to it would
// add an order that CUDA does not promise.
class Marker {
 public:
  void raise();
  bool raised() const { return done_.load(std::memory_order_acquire) != 0; }
  void wait() const;

 private:
  std::atomic<std::uint32_t> done_{0};
};

struct Operation {
  std::function<void()> run;
  Marker* done = nullptr;
  bool last = false;  // of its stream
  std::atomic<Operation*> next{nullptr};
};

// The stream that a call names; each context has its null stream. Success, or the refusal.
Result find_stream(Stream handle, std::shared_ptr<StreamObject>* stream);

// Puts an operation into a stream's queue.
const Marker& submit(StreamObject& stream, std::function<void()> run);

// Waits until all streams of the current context have finished. If calls hold up others, no thread
// enqueues anything meanwhile.
void wait_for_streams();
// Waits until a copy between a device and pageable memory is made, on the null stream or another.
void wait_for_pageable(const Marker& made, bool null_stream);

// The last operation of each of the current context's streams.
std::vector<const Marker*> last_operations();
std::size_t n_streams();
std::size_t n_events();

}  // namespace fake_cuda

struct pgasdl::cuda::StreamObject {
  explicit StreamObject(Context in, unsigned stream_flags)
      : context(in), flags(stream_flags), head(new fake_cuda::Operation), tail(head) {}

  const Context context;
  const unsigned flags;
  std::atomic<bool> capturing{false};
  fake_cuda::Operation* head;  // of the stream's thread: its present or last operation

  std::mutex mutex;  // held by submitting threads
  fake_cuda::Operation* tail;
  std::deque<fake_cuda::Marker> markers;      // of all operations
  std::atomic<std::uint32_t> n_submitted{0};  // the stream's thread sleeps on it
};
