#pragma once

#include <cstddef>
#include <span>

#include "reduce/types.hpp"
#include "sys/cuda.hpp"

namespace pgasdl {

/// The sums of reduce() on a device, with its contract and its bits, enqueued on a stream.
///
/// Addresses are those of the device: its own memory, peers' memory that is mapped, or host memory
/// that is registered and mapped. At most kDeviceSources sources and kDeviceDestinations
/// destinations (device_kernels.hpp), else kUnavailable. The device's primary context, to which the
/// stream belongs, is made the current one for the call.
void device_reduce(cuda::Device device, cuda::Stream stream,
                   std::span<const Destination> destinations, std::span<const Source> sources,
                   std::size_t n, double scale);

/// Loads the kernels, which the first call for a device otherwise does: the driver compiles them,
/// which takes seconds where it has not kept the result. They stay until the process ends.
void load_device_kernels(cuda::Device device);

}  // namespace pgasdl
