#pragma once

// Internal to native/reduce and its test: one table of kernels for each instruction set.

#include <cstddef>
#include <cstdint>
#include <span>

#include "reduce/types.hpp"

namespace pgasdl {

/// Sources and destinations as in reduce(); n_sources and n_destinations are at least 1.
using Kernel = void (*)(const Destination* destinations, std::size_t n_destinations,
                        const Source* sources, std::size_t n_sources, std::size_t n, double scale);

enum class Accumulator : std::uint8_t { kF32, kF64, kI32, kI64 };
inline constexpr std::size_t kAccumulators = 4;
Accumulator accumulator_for(std::span<const Source> sources);

// Not std::array: the kernels' files call nothing of the standard library.
template <class T, std::size_t kCount>
struct Row {
  T items[kCount];
  constexpr const T& operator[](std::size_t i) const { return items[i]; }
};

// Counts with their own kernel; 0 takes any number.
inline constexpr std::size_t kOwnSources = 4;
inline constexpr std::size_t kOwnDestinations = 2;

using KernelsByDestinations = Row<Kernel, kOwnDestinations + 1>;
using KernelsBySources = Row<KernelsByDestinations, kOwnSources + 1>;
using KernelsByOp = Row<KernelsBySources, kReduceOps>;

struct Kernels {
  Row<KernelsByOp, kDTypes> same;                     // all sources and destinations of one dtype
  Row<Row<Kernel, kReduceOps>, kAccumulators> mixed;  // any dtypes that this accumulator takes
  void (*stream)(char* to, const char* from, std::size_t bytes);  // bypasses the caches
};

enum class Isa : std::uint8_t { kBaseline, kAvx2, kAvx512 };

// nullptr if this build or this processor lacks the variant.
const Kernels* kernels_for(Isa isa);

/// The widest variant of this processor, chosen once.
const Kernels& best_kernels();

/// reduce() with a given variant.
void reduce_with(const Kernels& kernels, std::span<const Destination> destinations,
                 std::span<const Source> sources, std::size_t n, double scale, ReduceOp op);

namespace isa_baseline {
extern const Kernels kKernels;
}
namespace isa_avx2 {
extern const Kernels kKernels;
}
namespace isa_avx512 {
extern const Kernels kKernels;
}

}  // namespace pgasdl
