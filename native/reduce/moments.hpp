#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/kernels.hpp"
#include "reduce/types.hpp"

namespace pgasdl {

enum class Squares : std::uint8_t { kNone, kOfItems, kFromMean };

struct Moments {
  double sum = 0;
  double squares = 0;  // of the items, or of their distances from their mean
};

/// The sum of n items, of kF32 or kF64, and of squares.
///
/// Computed in f64, in parts that are added pairwise. The bits depend on the items and n alone, as
/// those of reduce(). Any thread may call.
Moments moments(const void* items, DType dtype, std::size_t n, Squares squares);

/// moments() with the instructions of a given variant, or narrower ones.
Moments moments(const void* items, DType dtype, std::size_t n, Squares squares, Isa isa);

}  // namespace pgasdl
