#include "reduce/moments.hpp"

#include <cassert>

#include "reduce/kernels.hpp"

namespace pgasdl {
namespace {

constexpr std::size_t kPart = 4096;  // items: in the first cache for the second look
// Vectors that every processor adds alike: two of AVX2 are one of AVX-512, and no faster.
constexpr int kLanes = 4, kVectors = 8;
constexpr std::size_t kRow = kLanes * kVectors;

typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));

/// Adds up vectors pairwise, into the first.
template <class Vector>
[[gnu::always_inline]] inline void fold(Vector (&sums)[kVectors]) {
  for (int k = kVectors / 2; k > 0; k /= 2) {
    for (int j = 0; j < k; ++j) sums[j] += sums[j + k];
  }
}

/// The sum of n items, or of the squares of their distances from a center.
template <class T, bool kSquares>
[[gnu::always_inline]] inline double sum(const T* items, std::size_t n, double center) {
  typedef T Loaded __attribute__((vector_size(kLanes * sizeof(T)), aligned(alignof(T)), may_alias));
  Lanes sums[kVectors] = {};
  std::size_t i = 0;
  for (; n - i >= kRow; i += kRow) {
    for (int k = 0; k < kVectors; ++k) {
      const auto* at = reinterpret_cast<const Loaded*>(items + i + k * kLanes);
      Lanes found = __builtin_convertvector(*at, Lanes);
      if constexpr (kSquares) {
        found -= center;
        found *= found;
      }
      sums[k] += found;
    }
  }
  for (; i < n; ++i) {
    const double item = static_cast<double>(items[i]) - (kSquares ? center : 0);
    sums[i / kLanes % kVectors][i % kLanes] += kSquares ? item * item : item;
  }
  fold(sums);
  return (sums[0][0] + sums[0][1]) + (sums[0][2] + sums[0][3]);
}

/// The sum of squares in f32, 16 to a lane, and of those in f64: twice as fast. Items have to be
/// such that it is within f32, or else it is no sum.
[[gnu::always_inline]] inline double narrow_squares(const float* items, std::size_t n) {
  typedef float Half __attribute__((vector_size(kLanes * sizeof(float))));
  typedef float Narrow __attribute__((vector_size(2 * sizeof(Half))));
  typedef float Loaded __attribute__((vector_size(sizeof(Narrow)), aligned(4), may_alias));
  constexpr std::size_t kRun = 16 * 2 * kRow;
  Lanes total = {};
  std::size_t i = 0;
  for (; n - i >= kRun; i += kRun) {
    Narrow sums[kVectors] = {};
    for (std::size_t row = i; row < i + kRun; row += 2 * kRow) {
      for (int k = 0; k < kVectors; ++k) {
        const Narrow found = *reinterpret_cast<const Loaded*>(items + row + 2 * kLanes * k);
        sums[k] += found * found;
      }
    }
    fold(sums);
    const Half low = __builtin_shufflevector(sums[0], sums[0], 0, 1, 2, 3);
    const Half high = __builtin_shufflevector(sums[0], sums[0], 4, 5, 6, 7);
    total += __builtin_convertvector(low, Lanes) + __builtin_convertvector(high, Lanes);
  }
  const double rest = sum<float, true>(items + i, n - i, 0);
  return ((total[0] + total[1]) + (total[2] + total[3])) + rest;
}

template <class T>
[[gnu::always_inline]] inline Moments part(const T* items, std::size_t n, Squares squares) {
  if (squares == Squares::kOfItems) {
    if constexpr (sizeof(T) == sizeof(float)) {
      const double found = narrow_squares(items, n);
      if (found > 1e-30 && found < 1e37) return {0, found};
    }
    return {0, sum<T, true>(items, n, 0)};
  }
  Moments found{sum<T, false>(items, n, 0)};
  if (squares == Squares::kFromMean) {
    found.squares = sum<T, true>(items, n, found.sum / static_cast<double>(n));
  }
  return found;
}

template <class T>
using Part = Moments (*)(const T* items, std::size_t n, Squares squares);

template <class T>
Moments part_baseline(const T* items, std::size_t n, Squares squares) {
  return part(items, n, squares);
}
#if defined(__x86_64__)
template <class T>
[[gnu::target("avx2")]] Moments part_avx2(const T* items, std::size_t n, Squares squares) {
  return part(items, n, squares);
}
#endif

/// Two halves, and what they are together (Chan et al., 1979).
template <class T>
Moments moments(Part<T> part, const T* items, std::size_t n, Squares squares) {
  if (n <= kPart) return part(items, n, squares);
  const std::size_t first = (n / 2 + kPart - 1) / kPart * kPart, second = n - first;
  const Moments a = moments(part, items, first, squares);
  const Moments b = moments(part, items + first, second, squares);
  Moments found{a.sum + b.sum, a.squares + b.squares};
  if (squares == Squares::kFromMean) {
    const auto x = static_cast<double>(first), y = static_cast<double>(second);
    const double apart = b.sum / y - a.sum / x;
    found.squares += apart * apart * (x * y / (x + y));
  }
  return found;
}

template <class T>
Moments moments(const void* items, std::size_t n, Squares squares, Isa isa) {
  Part<T> part = part_baseline<T>;
#if defined(__x86_64__)
  if (isa != Isa::kBaseline) part = part_avx2<T>;
#endif
  return moments(part, static_cast<const T*>(items), n, squares);
}

}  // namespace

Moments moments(const void* items, DType dtype, std::size_t n, Squares squares, Isa isa) {
  assert(dtype == DType::kF32 || dtype == DType::kF64);
  if (n == 0) return {};
  return dtype == DType::kF32 ? moments<float>(items, n, squares, isa)
                              : moments<double>(items, n, squares, isa);
}

Moments moments(const void* items, DType dtype, std::size_t n, Squares squares) {
  static const Isa isa = kernels_for(Isa::kAvx2) != nullptr ? Isa::kAvx2 : Isa::kBaseline;
  return moments(items, dtype, n, squares, isa);
}

}  // namespace pgasdl
