// device_reduce() through the driver against the reference, bit by bit: on the fake driver, or by
// hand on a GPU.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "check.hpp"
#include "reduce/device_kernels.hpp"
#include "reduce/device_reduce.hpp"
#include "reduce_cases.hpp"
#include "sys/cuda.hpp"
#include "sys/error.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::reference;

constexpr cuda::Device kDevice = 0;
constexpr unsigned char kUntouched = 0x5a;

class Gpu {
 public:
  explicit Gpu(std::size_t bytes) : current_(kDevice) {
    cuda::check(cuda::driver().mem_alloc(&memory_, bytes), "memory");
    cuda::check(cuda::driver().stream_create(&stream_, cuda::kStreamNonBlocking, 0), "a stream");
  }
  ~Gpu() {
    cuda::driver().stream_destroy(stream_);
    cuda::driver().mem_free(memory_);
  }

  // Works like reduce(), on copies of the arrays on the device with the same distance from a
  // vector's boundary. Checks that no other memory changes.
  void reduce(std::span<const Destination> destinations, std::span<const Source> sources,
              std::size_t n, double scale, ReduceOp op) {
    places_.clear();
    block_.clear();
    std::vector<Source> from(sources.begin(), sources.end());
    std::vector<Destination> to(destinations.begin(), destinations.end());
    for (Source& source : from) {
      source.address = on_device(source.address, n * item_size(source.dtype));
    }
    for (Destination& destination : to) {
      destination.address = on_device(destination.address, n * item_size(destination.dtype));
    }
    block_.resize(block_.size() + kGuard, kUntouched);
    copy(memory_, number(block_.data()), block_.size());
    CHECK(op == ReduceOp::kSum);
    device_reduce(kDevice, stream_, to, from, n, scale);
    Bytes after(block_.size());
    copy(number(after.data()), memory_, after.size());
    cuda::check(cuda::driver().stream_synchronize(stream_), "a reduction");
    for (std::size_t d = 0; d < destinations.size(); ++d) {
      const std::size_t at = number(to[d].address) - memory_;
      const std::size_t bytes = n * item_size(to[d].dtype);
      if (bytes == 0) continue;
      std::memcpy(destinations[d].address, after.data() + at, bytes);
      std::memcpy(block_.data() + at, after.data() + at, bytes);
    }
    CHECK(after == block_);
  }

  cuda::Stream stream() const { return stream_; }

 private:
  struct Place {
    const void* host;
    std::size_t at;
  };

  static cuda::DevicePtr number(const void* address) {
    return reinterpret_cast<cuda::DevicePtr>(address);
  }

  void copy(cuda::DevicePtr to, cuda::DevicePtr from, std::size_t bytes) {
    cuda::check(cuda::driver().memcpy_async(to, from, bytes, stream_), "a copy");
  }

  void* on_device(const void* host, std::size_t bytes) {
    for (const Place& place : places_) {
      if (place.host == host) return reinterpret_cast<void*>(memory_ + place.at);
    }
    const std::size_t at =
        (block_.size() + kGuard) / kDeviceVector * kDeviceVector + number(host) % kDeviceVector;
    block_.resize(at + bytes, kUntouched);
    if (bytes > 0) std::memcpy(block_.data() + at, host, bytes);
    places_.push_back({host, at});
    return reinterpret_cast<void*>(memory_ + at);
  }

  cuda::Current current_;
  cuda::Stream stream_ = nullptr;
  cuda::DevicePtr memory_ = 0;
  std::vector<Place> places_;
  Bytes block_;
};

void test_too_many(const Gpu& gpu) {
  const std::vector<Source> sources(kDeviceSources + 1, {nullptr, DType::kF32});
  const std::vector<Destination> destination{{nullptr, DType::kF32}};
  bool refused = false;
  try {
    device_reduce(kDevice, gpu.stream(), destination, sources, 1, 1.0);
  } catch (const Error& error) {
    refused = error.kind() == ErrorKind::kUnavailable;
  }
  CHECK(refused);
  device_reduce(kDevice, gpu.stream(), destination, sources, 0, 1.0);
}

}  // namespace

int main() {
  load_device_kernels(kDevice);
  Gpu gpu(std::size_t{64} << 20);
  const Variants variants = {{"device", [&](const auto&... call) { gpu.reduce(call...); }}};
  test_too_many(gpu);
  test_conversions(variants);
  test_one_dtype(variants, kSums);
  test_mixed(variants, kSums);
  test_large(variants);
  std::puts("ok");
}
