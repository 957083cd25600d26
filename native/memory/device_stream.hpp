// The library's own work on a device: streams that are borrowed, and events that show progress.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "sys/cuda.hpp"

namespace pgasdl {

// A stream of the program: new work on it comes after all that was enqueued there before.
struct StreamOrder {
  cuda::Device device;
  cuda::Stream stream;
};

// Whether the stream is recording a graph.
bool is_capturing(const StreamOrder& order);

// Throws kUnavailable if the stream is recording a graph: `what` needs the host at every replay.
void refuse_capture(const StreamOrder& order, const char* what);

// Whether streams can wait for words of host memory and write them.
bool streams_wait(cuda::Device device);

// The address by which the current device's streams reach a word of pinned host memory.
cuda::DevicePtr device_address(const void* word);

// One of a few streams that all plans share, with the highest priority; their work never waits.
// They are made at first use and kept.
inline constexpr std::size_t kSharedStreams = 4;
cuda::Stream shared_stream(cuda::Device device, std::size_t number);

// A library stream that follows no other stream. It is borrowed: before the destructor returns it
// to the pool, all work on it must have ended.
class DeviceStream {
 public:
  explicit DeviceStream(cuda::Device device);
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;
  ~DeviceStream();
  cuda::Device device() const { return device_; }
  cuda::Stream get() const { return stream_; }
  // Waits until all enqueued work has ended or failed.
  void wait() const noexcept;

 private:
  const cuda::Device device_;
  const std::uint64_t born_;
  cuda::Stream stream_ = nullptr;
};

// A point in a stream at which all work enqueued before has ended.
//
// From then on the device's earlier writes are visible to everyone who learns of them from this
// thread: the host, copies and kernels of any process launched later, and a NIC that reads. So a
// flag in host memory, stored after reached(), may announce data on a device.
class DeviceMoment {
 public:
  explicit DeviceMoment(cuda::Device device);
  // The present point of a stream.
  static std::unique_ptr<DeviceMoment> of(const StreamOrder& order);
  DeviceMoment(const DeviceMoment&) = delete;
  DeviceMoment& operator=(const DeviceMoment&) = delete;
  ~DeviceMoment();
  cuda::Device device() const { return device_; }
  // Moves it to the present point of `stream`, which may be the program's.
  void mark(cuda::Stream stream);
  // Work enqueued on `stream` from now on comes after this point.
  void hold(cuda::Stream stream) const;
  // Throws the error if the device's work has failed.
  bool reached() const;
  // Reached, or never to be, because the work has failed.
  bool over() const noexcept;
  // Waits until over().
  void wait() const noexcept;

 private:
  const cuda::Device device_;
  cuda::Event event_ = nullptr;
};

// Copies between any memory of host and devices on a library stream, and returns when the bytes are
// there. Host memory may be pageable.
void device_copy(cuda::Device device, void* to, const void* from, std::size_t bytes);
// Likewise, on a stream of the program.
void device_copy(const StreamOrder& order, void* to, const void* from, std::size_t bytes);

// Fills device memory with zeros, and returns when they are there.
void device_clear(cuda::Device device, std::byte* data, std::size_t bytes);

}  // namespace pgasdl
