#pragma once

// Types shared by device_reduce() and its kernels. NVRTC compiles them, too, so they use only the
// names of integers from the standard library.

#include <cstdint>

#include "reduce/types.hpp"

namespace pgasdl {

// The most arrays of one call, which fit well into a kernel's parameters.
inline constexpr unsigned kDeviceSources = 64;
inline constexpr unsigned kDeviceDestinations = 64;

inline constexpr unsigned kDeviceBlock = 512;       // threads
inline constexpr unsigned kDeviceBlocks = 2;        // at most in a grid, per multiprocessor
inline constexpr std::uint64_t kDeviceVector = 16;  // bytes

/// The one parameter of every kernel.
///
/// Kernels for one dtype move a head of single items, `vectors` vectors, then single items to the
/// end: all addresses are aligned to an item, and after the head to a vector. The copy does the
/// same with bytes as items. Kernels for mixed dtypes take any alignment, and neither field.
struct DeviceReduction {
  const char* sources[kDeviceSources];
  char* destinations[kDeviceDestinations];
  DType source_dtypes[kDeviceSources];
  DType destination_dtypes[kDeviceDestinations];
  std::uint64_t n;     // items
  std::uint64_t head;  // items
  std::uint64_t vectors;
  double scale;
  float scale_f32;
  unsigned n_sources;
  unsigned n_destinations;
};

// X(dtype's name, dtype, number of sources; 0: any): the kernel pgasdl_sum_DTYPE_SOURCES. For
// integers a single source is a copy.
#define PGASDL_DEVICE_INTEGERS(X, dtype, DTYPE) \
  X(dtype, DTYPE, 2)                            \
  X(dtype, DTYPE, 0)
#define PGASDL_DEVICE_FLOATS(X, dtype, DTYPE) \
  X(dtype, DTYPE, 1)                          \
  PGASDL_DEVICE_INTEGERS(X, dtype, DTYPE)
#define PGASDL_DEVICE_SAME(X)          \
  PGASDL_DEVICE_FLOATS(X, f32, kF32)   \
  PGASDL_DEVICE_FLOATS(X, f64, kF64)   \
  PGASDL_DEVICE_FLOATS(X, f16, kF16)   \
  PGASDL_DEVICE_FLOATS(X, bf16, kBF16) \
  PGASDL_DEVICE_INTEGERS(X, i32, kI32) \
  PGASDL_DEVICE_INTEGERS(X, i64, kI64)

// X(accumulator's name, accumulator): the kernel pgasdl_mixed_ACCUMULATOR.
#define PGASDL_DEVICE_MIXED(X) \
  X(f32, float)                \
  X(f64, double)               \
  X(i32, std::uint32_t)        \
  X(i64, std::uint64_t)

}  // namespace pgasdl
