#pragma once

#include <cstddef>
#include <span>

#include "reduce/types.hpp"
#include "sys/cuda.hpp"

namespace pgasdl {

// Enqueues the sums of reduce() on a device's stream, with the same contract and the same bits.
//
// Addresses belong to the device: its own memory, peers' memory that is mapped, or host memory that
// is registered and mapped. At most kDeviceSources sources and kDeviceDestinations destinations
// (device_kernels.hpp), else kUnavailable. For the call, the device's primary context, to which the
// stream belongs, is the current one.
void device_reduce(cuda::Device device, cuda::Stream stream,
                   std::span<const Destination> destinations, std::span<const Source> sources,
                   std::size_t n, double scale);

// Loads the kernels, which otherwise the first call for a device does: the driver compiles them,
// which takes seconds if it has not cached the result. They stay until the process ends.
void load_device_kernels(cuda::Device device);

}  // namespace pgasdl
