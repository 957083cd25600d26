#include "reduce/device_reduce.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include "reduce/device_launch.hpp"
#include "reduce/reduce.hpp"
#include "sys/error.hpp"

namespace pgasdl {

extern const char* const kDevicePtx;  // device_ptx.cpp.in

namespace {

struct Loaded {
  std::array<cuda::Function, kDeviceKernelNames.size()> functions;
  std::uint64_t most_blocks;
};

Loaded load(cuda::Device device) {
  using Attribute = cuda::DeviceAttribute;
  const int major = cuda::attribute(device, Attribute::kComputeCapabilityMajor);
  if (major < 8) {
    throw Error(
        ErrorKind::kUnavailable,
        text("reductions on a device need compute capability 8.0, CUDA device ", device, " has ",
             major, ".", cuda::attribute(device, Attribute::kComputeCapabilityMinor)));
  }
  cuda::Module module = nullptr;
  cuda::check(cuda::driver().module_load_data(&module, kDevicePtx),
              text("compiling the reductions for CUDA device ", device));
  Loaded loaded{};
  for (std::size_t i = 0; i < loaded.functions.size(); ++i) {
    const char* name = kDeviceKernelNames[i];
    cuda::check(cuda::driver().module_get_function(&loaded.functions[i], module, name), name);
  }
  const int multiprocessors = cuda::attribute(device, Attribute::kMultiprocessors);
  loaded.most_blocks = static_cast<std::uint64_t>(std::max(multiprocessors, 1)) * kDeviceBlocks;
  return loaded;
}

// The device's context must be current.
const Loaded& loaded_on(cuda::Device device) {
  static std::mutex mutex;
  static std::map<cuda::Device, Loaded> devices;
  const std::scoped_lock lock(mutex);
  const auto found = devices.find(device);
  return found != devices.end() ? found->second
                                : devices.emplace(device, load(device)).first->second;
}

void copy_to_each(cuda::Stream stream, std::span<const Destination> destinations,
                  const Source& source, std::size_t bytes) {
  const auto from = reinterpret_cast<cuda::DevicePtr>(source.address);
  for (const Destination& destination : destinations) {
    const auto to = reinterpret_cast<cuda::DevicePtr>(destination.address);
    if (to == from) continue;
    const cuda::Result result = cuda::driver().memcpy_async(to, from, bytes, stream);
    if (result != cuda::kSuccess) cuda::check(result, text("copying ", bytes, " bytes"));
  }
}

}  // namespace

void device_reduce(cuda::Device device, cuda::Stream stream,
                   std::span<const Destination> destinations, std::span<const Source> sources,
                   std::size_t n, double scale) {
  if (n == 0) return;
  const cuda::Current current(device);
  if (is_copy(destinations, sources, scale)) {
    const auto in_place = std::ranges::count(destinations, sources[0].address,
                                             [](const Destination& d) { return d.address; });
    // The driver makes a single copy, since it knows more: copy engines, peers, any alignment.
    if (destinations.size() - static_cast<std::size_t>(in_place) <= 1 ||
        !fits_vectors(destinations, sources, 1)) {
      return copy_to_each(stream, destinations, sources[0], n * item_size(sources[0].dtype));
    }
  }
  DeviceLaunch launch = device_launch(destinations, sources, n, scale);
  const Loaded& loaded = loaded_on(device);
  const std::uint64_t blocks = (launch.work + kDeviceBlock - 1) / kDeviceBlock;
  const auto grid = std::clamp<std::uint64_t>(blocks, 1, loaded.most_blocks);
  void* parameters[] = {&launch.parameters};
  const cuda::Result result =
      cuda::driver().launch_kernel(loaded.functions[launch.kernel], static_cast<unsigned>(grid), 1,
                                   1, kDeviceBlock, 1, 1, 0, stream, parameters, nullptr);
  if (result != cuda::kSuccess) {
    cuda::check(result, text("launching ", kDeviceKernelNames[launch.kernel]));
  }
}

void load_device_kernels(cuda::Device device) {
  const cuda::Current current(device);
  loaded_on(device);
}

}  // namespace pgasdl
