#pragma once

// Calls of reduce() of every kind, and their comparison with the reference, bit by bit.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "reduce/reduce.hpp"
#include "reduce_reference.hpp"

namespace pgasdl::reference {

using Bytes = std::vector<unsigned char>;

inline constexpr DType kFloats[] = {DType::kF32, DType::kF64, DType::kF16, DType::kBF16};
inline constexpr DType kInts[] = {DType::kI32, DType::kI64};
inline constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                                    ReduceOp::kProd};
inline constexpr std::span<const ReduceOp> kSums(kOps, 1);  // all that devices offer

// ---- data and the comparison

// An implementation to compare with reduce().
struct Variant {
  std::string name;
  std::function<void(std::span<const Destination>, std::span<const Source>, std::size_t n,
                     double scale, ReduceOp op)>
      reduce;
};
using Variants = std::vector<Variant>;

inline std::mt19937_64 random_bits(20240611);

/// Half ordinary numbers, a quarter special ones, a quarter any bits at all.
inline void fill(void* at, DType dtype, std::size_t n) {
  static const double kSpecial[] = {
      0.0,  -0.0, 1.0,    -1.0,   kInfinity, -kInfinity, NAN,    -NAN,  65504., 65520.,    65519.9,
      6e-8, 3e-8, 2.9e-8, 6.1e-5, 1e-40,     1e-45,      3.4e38, 1e300, 1e-310, 2147483647};
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t r = random_bits();
    if (is_integer(dtype)) {
      const std::int64_t value = r & 1 ? std::int64_t(r) >> 3 : std::int64_t(r % 200) - 100;
      dtype == DType::kI32 ? put(at, i, std::int32_t(value)) : put(at, i, value);
    } else if (r % 4 == 0) {
      std::memcpy(static_cast<char*>(at) + i * item_size(dtype), &r, item_size(dtype));
    } else {
      const double value = r % 4 == 1 ? kSpecial[(r >> 8) % std::size(kSpecial)]
                                      : (double(r >> 11) * 0x1p-52 - 1.0) * 8.0;
      write_item(Destination{at, dtype}, i, value);
    }
  }
}

inline constexpr std::size_t kGuard = 64;

struct Case {
  std::vector<DType> sources;
  std::vector<DType> destinations;
  std::size_t n;
  double scale;
  ReduceOp op;
  std::size_t shift = 0;   // bytes away from alignment
  bool in_place = false;   // destination j is source j
  bool staggered = false;  // buffers also differ in alignment
};

struct Arena {
  std::vector<Bytes> buffers;
  std::vector<Source> sources;
  std::vector<Destination> destinations;
};

inline std::size_t shift_of(const Case& c, std::size_t buffer) {
  return c.shift + (c.staggered ? 4 * (buffer % 4) : 0);
}

inline void place(const Case& c, Arena& arena) {
  arena.sources.clear();
  arena.destinations.clear();
  for (std::size_t s = 0; s < c.sources.size(); ++s) {
    arena.sources.push_back({arena.buffers[s].data() + shift_of(c, s), c.sources[s]});
  }
  for (std::size_t d = 0; d < c.destinations.size(); ++d) {
    const bool shared = c.in_place && d < c.sources.size();
    const std::size_t b = shared ? d : c.sources.size() + d;
    arena.destinations.push_back({arena.buffers[b].data() + shift_of(c, b), c.destinations[d]});
  }
}

inline void run(const Variants& variants, const Case& c) {
  Arena start;
  start.buffers.resize(c.sources.size() + c.destinations.size());
  for (Bytes& buffer : start.buffers) buffer.assign(c.n * 8 + c.shift + kGuard, 0xa5);
  for (std::size_t s = 0; s < c.sources.size(); ++s) {
    fill(start.buffers[s].data() + shift_of(c, s), c.sources[s], c.n);
  }
  Arena expected{start.buffers, {}, {}};
  place(c, expected);
  reference::reduce(expected.destinations, expected.sources, c.n, c.scale, c.op);
  for (const Variant& variant : variants) {
    Arena got{start.buffers, {}, {}};
    place(c, got);
    variant.reduce(got.destinations, got.sources, c.n, c.scale, c.op);
    for (std::size_t b = 0; b < got.buffers.size(); ++b) {
      if (got.buffers[b] == expected.buffers[b]) continue;
      const auto g = std::ranges::mismatch(got.buffers[b], expected.buffers[b]).in1;
      CHECK_NOTE(
          false,
          "%s: buffer %zu byte %td: %zu x %s -> %zu x %s, n %zu, op %d, shift %zu, in place %d, "
          "staggered %d",
          variant.name.c_str(), b, g - got.buffers[b].begin() - std::ptrdiff_t(shift_of(c, b)),
          c.sources.size(), std::string(name(c.sources[0])).c_str(), c.destinations.size(),
          std::string(name(c.destinations[0])).c_str(), c.n, int(c.op), c.shift, c.in_place,
          c.staggered);
    }
  }
}

// ---- the calls

inline void test_one_dtype(const Variants& variants, std::span<const ReduceOp> ops = kOps) {
  for (int d = 0; d < int(kDTypes); ++d) {
    const DType dtype{std::uint8_t(d)};
    for (const ReduceOp op : ops) {
      for (std::size_t k = 1; k <= 9; ++k) {
        for (std::size_t m = 1; m <= 5; ++m) {
          Case c{std::vector(k, dtype), std::vector(m, dtype), 0, 1.0, op};
          for (std::size_t n = 0; n <= 70; n += 1 + random_bits() % 3) {
            c.n = n;
            c.scale = is_integer(dtype) || random_bits() % 2 ? 1.0 : 1.0 / double(k + 2);
            c.shift = random_bits() % 4 == 0 ? random_bits() % 16 : 0;
            c.in_place = random_bits() % 3 == 0;
            c.staggered = random_bits() % 4 == 0;
            run(variants, c);
          }
          c.n = 200 + random_bits() % 1000;
          run(variants, c);
        }
      }
    }
  }
}

inline void test_mixed(const Variants& variants, std::span<const ReduceOp> ops = kOps) {
  for (int round = 0; round < 6000; ++round) {
    const bool floats = round % 3 != 0;
    const auto pick = [&] {
      return floats ? kFloats[random_bits() % 4] : kInts[random_bits() % 2];
    };
    Case c{{}, {}, random_bits() % 71, 1.0, ops[random_bits() % ops.size()]};
    if (round % 20 == 0) c.n = 500 + random_bits() % 3000;
    if (floats && round % 2 == 0) c.scale = 0.3;
    const std::size_t k = 1 + random_bits() % 9;
    const std::size_t m = 1 + random_bits() % 5;
    while (c.sources.size() < k) c.sources.push_back(pick());
    while (c.destinations.size() < m) c.destinations.push_back(pick());
    c.shift = round % 4 == 0 ? random_bits() % 16 : 0;
    c.staggered = round % 7 == 0;
    if (round % 5 == 0) {
      // In place with other dtypes as well: each such destination takes its source's dtype.
      c.in_place = true;
      for (std::size_t d = 0; d < std::min(k, m); ++d) c.destinations[d] = c.sources[d];
    }
    run(variants, c);
  }
}

inline void test_large(const Variants& variants) {
  for (int d = 0; d < int(kDTypes); ++d) {
    const DType dtype{std::uint8_t(d)};
    for (const std::size_t k : {1, 2, 4, 7}) {
      Case c{std::vector(k, dtype), std::vector(k, dtype), 100003, 1.0, ReduceOp::kSum, 0, true};
      run(variants, c);
      c.in_place = false;
      c.destinations.resize(1);
      run(variants, c);
      if (is_integer(dtype)) continue;
      c.destinations = {DType::kBF16, DType::kF32};
      c.scale = 0.1;
      run(variants, c);
    }
  }
}

/// Casts `values` to every float dtype and compares.
inline void cast_all(const Variants& variants, DType from, const Bytes& values) {
  const std::size_t n = values.size() / item_size(from);
  for (const DType to : kFloats) {
    Bytes expected(n * 8), got(n * 8);
    const std::vector<Source> source{{values.data(), from}};
    reference::reduce({{expected.data(), to}}, source, n, 1.0, ReduceOp::kSum);
    for (const Variant& variant : variants) {
      const Destination destination{got.data(), to};
      variant.reduce({&destination, 1}, source, n, 1.0, ReduceOp::kSum);
      CHECK_NOTE(got == expected, "%s: %s to %s", variant.name.c_str(),
                 std::string(name(from)).c_str(), std::string(name(to)).c_str());
    }
  }
}

// Every f16 and bf16, and the f32 and f64 nearest to each of them and to each midpoint.
inline void test_conversions(const Variants& variants) {
  for (const auto& [dtype, format] :
       {std::pair{DType::kF16, kHalf}, std::pair{DType::kBF16, kBrain}}) {
    Bytes small(2 * 65536), single(4 * 65536 * 6), wide(8 * 65536 * 6);
    std::size_t at = 0;
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      put(small.data(), bits, std::uint16_t(bits));
      const double here = decode(format, bits);
      const double next = (bits & 0x7fff) == format.infinity() - 1
                              ? std::copysign(std::ldexp(1.0, format.bias + 1), here)
                              : decode(format, bits + 1);
      for (const double middle : {here, (here + next) / 2}) {
        for (const double towards : {-kInfinity, 0.0, kInfinity}) {
          const bool exact = towards == 0.0;
          put(single.data(), at,
              exact ? float(middle) : std::nextafterf(float(middle), float(towards)));
          put(wide.data(), at, exact ? middle : std::nextafter(middle, towards));
          ++at;
        }
      }
    }
    cast_all(variants, dtype, small);
    cast_all(variants, DType::kF32, single);
    cast_all(variants, DType::kF64, wide);
  }
  Bytes sparse(4 << 20);
  for (std::uint32_t i = 0; i < (1u << 20); ++i) put(sparse.data(), i, i * 4093u);
  cast_all(variants, DType::kF32, sparse);
}

}  // namespace pgasdl::reference
