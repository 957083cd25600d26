#pragma once

// Internal to device_reduce() and its tests: chooses the kernel of a call, and its parameters.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "reduce/device_kernels.hpp"

namespace pgasdl {

#define PGASDL_SAME_NAME(dtype, DTYPE, sources) "pgasdl_sum_" #dtype "_" #sources,
#define PGASDL_MIXED_NAME(name, Acc) "pgasdl_mixed_" #name,
#define PGASDL_UNALIGNED_NAME(name, Acc) "pgasdl_unaligned_" #name,
inline constexpr auto kDeviceKernelNames = std::to_array<const char*>({
    // clang-format off
    PGASDL_DEVICE_SAME(PGASDL_SAME_NAME)
    PGASDL_DEVICE_MIXED(PGASDL_MIXED_NAME)
    PGASDL_DEVICE_MIXED(PGASDL_UNALIGNED_NAME)
    "pgasdl_copy",
    // clang-format on
});
#undef PGASDL_SAME_NAME
#undef PGASDL_MIXED_NAME
#undef PGASDL_UNALIGNED_NAME

struct DeviceLaunch {
  std::size_t kernel;  // in kDeviceKernelNames
  std::uint64_t work;  // threads that have work; a smaller grid loops
  DeviceReduction parameters;
};

/// Whether reduce() would copy: one source, of scale 1, to destinations of its dtype.
bool is_copy(std::span<const Destination> destinations, std::span<const Source> sources,
             double scale);

/// Whether all addresses lie equally far from a vector's boundary, by a whole number of items.
bool fits_vectors(std::span<const Destination> destinations, std::span<const Source> sources,
                  std::size_t item_size);

// A call that is_copy() must fit vectors of bytes. kUnavailable for too many addresses.
DeviceLaunch device_launch(std::span<const Destination> destinations,
                           std::span<const Source> sources, std::size_t n, double scale);

}  // namespace pgasdl
