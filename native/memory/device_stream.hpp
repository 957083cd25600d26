// Work of the library's own on a device: streams that are borrowed, and how far they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "sys/cuda.hpp"

namespace pgasdl {

// A stream of the program's: what is ordered on it comes after all that was enqueued there before.
struct StreamOrder {
  cuda::Device device;
  cuda::Stream stream;
};

// Whether the stream is recording a graph.
bool is_capturing(const StreamOrder& order);

// Throws kUnavailable if the stream is recording a graph: `what` needs the host at every replay.
void refuse_capture(const StreamOrder& order, const char* what);

// Whether streams can wait for words of the host, and write them.
bool streams_wait(cuda::Device device);

// The address by which the current device's streams reach a word of pinned memory of the host.
cuda::DevicePtr device_address(const void* word);

// One of a few streams that all plans share, whose work waits for nothing: of greatest priority.
// They are made at first use, and kept.
inline constexpr std::size_t kSharedStreams = 4;
cuda::Stream shared_stream(cuda::Device device, std::size_t number);

// One of the library's streams, which follow no other stream. Borrowed: given back, all enqueued
// on it must have ended. Streams are kept for the next borrower.
class DeviceStream {
 public:
  explicit DeviceStream(cuda::Device device);
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  ~DeviceStream();
  cuda::Device device() const { return device_; }
  cuda::Stream get() const { return stream_; }
  // Until all that was enqueued has ended, or has failed.
  void wait() const noexcept;

 private:
  const cuda::Device device_;
  const std::uint64_t born_;
  cuda::Stream stream_ = nullptr;
};

// A moment of a stream, at which all that was enqueued before has ended.
//
// The device's writes of before are visible then to whoever learns of them from this thread: to the
// host, to copies and kernels of any process that are launched later, and to a NIC that reads. That
// is what lets a flag in host memory, stored after reached(), tell of data on a device.
class DeviceMoment {
 public:
  explicit DeviceMoment(cuda::Device device);
  // The present one of a stream.
  static std::unique_ptr<DeviceMoment> of(const StreamOrder& order);
  DeviceMoment(const DeviceMoment&) = delete;
  DeviceMoment& operator=(const DeviceMoment&) = delete;
  ~DeviceMoment();
  cuda::Device device() const { return device_; }
  // From now on it is the present one of `stream`, which may be a program's.
  void mark(cuda::Stream stream);
  // Work that is enqueued on `stream` from now on comes after it.
  void hold(cuda::Stream stream) const;
  // Throws what made the device's work fail.
  bool reached() const;
  // Reached, or never to be: the work has failed.
  bool over() const noexcept;
  // Until then.
  void wait() const noexcept;

 private:
  const cuda::Device device_;
  cuda::Event event_ = nullptr;
};

// Copies between any memory of host and devices, on a stream of the library's, and returns when the
// bytes are there. The host's part may be pageable.
void device_copy(cuda::Device device, void* to, const void* from, std::size_t bytes);
// The same on a stream of the program's.
void device_copy(const StreamOrder& order, void* to, const void* from, std::size_t bytes);

// Fills memory of a device with zeros, and returns when they are there.
void device_clear(cuda::Device device, std::byte* data, std::size_t bytes);

}  // namespace pgasdl
