// A stream's work on memory: copies, fills, and words that it waits for or writes.
#include <atomic>
#include <cstring>
#include <thread>

#include "memory.hpp"
#include "streams.hpp"

namespace fake_cuda {
namespace {

constexpr unsigned kWaitValueAnd = 2;
constexpr unsigned kWaitValueNor = 3;

// Success if the device can access these bytes now.
Result reachable(const StreamObject& stream, DevicePtr address, std::size_t bytes, Use use) {
  const std::shared_lock lock(memory().mutex);
  const bool reached = memory().resolve(address, bytes, stream.context->device, use) != nullptr;
  return reached ? kSuccess : kInvalidValue;
}

bool is_pageable(DevicePtr address) {
  const std::shared_lock lock(memory().mutex);
  return memory().is_pageable(address);
}

bool holds(std::uint32_t word, std::uint32_t value, unsigned flags) {
  switch (flags) {
    case kWaitValueGeq:
      return static_cast<std::int32_t>(word - value) >= 0;
    case kWaitValueEq:
      return word == value;
    case kWaitValueAnd:
      return (word & value) != 0;
    default:
      return ~(word | value) != 0;
  }
}

std::atomic_ref<std::uint32_t> word_at(const Touching& touch, DevicePtr address) {
  return std::atomic_ref(*static_cast<std::uint32_t*>(touch(address, sizeof(std::uint32_t))));
}

// Success if a stream may use the word.
Result word_refused(const StreamObject& stream, DevicePtr address) {
  if (lacks("stream-values")) return kNotSupported;
  if (address % sizeof(std::uint32_t) != 0) return kInvalidValue;
  return reachable(stream, address, sizeof(std::uint32_t), Use::kKernel);
}

}  // namespace

Result memcpy_async(DevicePtr to, DevicePtr from, std::size_t bytes, Stream handle) {
  if (const Result refused = enter(Entry::memcpy_async, Needs::kContext)) return refused;
  std::shared_ptr<StreamObject> stream;
  if (const Result refused = find_stream(handle, &stream)) return refused;
  if (bytes == 0) return kSuccess;
  if (const Result refused = reachable(*stream, to, bytes, Use::kCopy)) return refused;
  if (const Result refused = reachable(*stream, from, bytes, Use::kCopy)) return refused;
  const Marker* const done = &submit(*stream, [=, device = stream->context->device] {
    const Touching touch(device);
    std::memmove(touch(to, bytes, Use::kCopy), touch(from, bytes, Use::kCopy), bytes);
  });
  if (is_pageable(to) || is_pageable(from)) {
    wait_for_pageable(*done, reinterpret_cast<std::uintptr_t>(handle) <= 2);
    return stream->context->error.load(std::memory_order_relaxed);
  }
  return kSuccess;
}

Result memset_async(DevicePtr address, unsigned char value, std::size_t bytes, Stream handle) {
  if (const Result refused = enter(Entry::memset_async, Needs::kContext)) return refused;
  std::shared_ptr<StreamObject> stream;
  if (const Result refused = find_stream(handle, &stream)) return refused;
  if (bytes == 0) return kSuccess;
  if (const Result refused = reachable(*stream, address, bytes, Use::kKernel)) return refused;
  submit(*stream, [=, device = stream->context->device] {
    std::memset(Touching(device)(address, bytes), value, bytes);
  });
  return kSuccess;
}

Result stream_wait_value(Stream handle, DevicePtr address, std::uint32_t value, unsigned flags) {
  if (const Result refused = enter(Entry::stream_wait_value, Needs::kContext)) return refused;
  std::shared_ptr<StreamObject> stream;
  if (const Result refused = find_stream(handle, &stream)) return refused;
  if (const Result refused = word_refused(*stream, address)) return refused;
  if (flags > kWaitValueNor) return kInvalidValue;
  if (flags == kWaitValueNor && lacks("wait-value-nor")) return kNotSupported;
  submit(*stream, [=, device = stream->context->device] {
    const auto arrived = [&] {
      const Touching touch(device);
      return holds(word_at(touch, address).load(std::memory_order_acquire), value, flags);
    };
    while (!ended() && !arrived()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
  return kSuccess;
}

Result stream_write_value(Stream handle, DevicePtr address, std::uint32_t value, unsigned flags) {
  if (const Result refused = enter(Entry::stream_write_value, Needs::kContext)) return refused;
  std::shared_ptr<StreamObject> stream;
  const Result found = find_stream(handle, &stream);
  if (found == kCaptureUnsupported) return kSuccess;  // recorded in a graph that nobody replays
  if (found != kSuccess) return found;
  if (const Result refused = word_refused(*stream, address)) return refused;
  if (flags != kWriteValueDefault) return kInvalidValue;
  submit(*stream, [=, device = stream->context->device] {
    const Touching touch(device);
    word_at(touch, address).store(value, std::memory_order_release);
  });
  return kSuccess;
}

}  // namespace fake_cuda
