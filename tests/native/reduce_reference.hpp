#pragma once

// The reference for reduce(): one item at a time, 16-bit floats by their definition.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "reduce/reduce.hpp"

namespace pgasdl::reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline bool is_integer(DType dtype) { return dtype == DType::kI32 || dtype == DType::kI64; }

struct Small {
  int mantissa;
  int bias;
  std::uint64_t infinity() const { return std::uint64_t((2 * bias + 1)) << mantissa; }
};
inline constexpr Small kHalf{10, 15};
inline constexpr Small kBrain{7, 127};

inline double decode(Small f, std::uint64_t bits) {
  const bool negative = bits >> 15;
  bits &= 0x7fff;
  if (bits > f.infinity()) return std::numeric_limits<double>::quiet_NaN();
  const std::uint64_t exponent = bits >> f.mantissa;
  const std::uint64_t fraction = bits & ((1u << f.mantissa) - 1);
  double value = std::ldexp(double(fraction + (exponent ? 1u << f.mantissa : 0)),
                            int(exponent ? exponent : 1) - f.bias - f.mantissa);
  if (bits == f.infinity()) value = kInfinity;
  return negative ? -value : value;
}

inline std::uint16_t encode(Small f, double value) {
  if (std::isnan(value)) return std::uint16_t(f.infinity() | (1u << (f.mantissa - 1)));
  const std::uint64_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(value);
  std::uint64_t bits = f.infinity();
  if (magnitude < std::ldexp(1.0, f.bias + 1)) {
    const int lowest = 1 - f.bias;
    const int exponent = magnitude == 0 ? lowest : std::max(std::ilogb(magnitude), lowest);
    const double units = std::nearbyint(std::ldexp(magnitude, f.mantissa - exponent));
    bits = (std::uint64_t(exponent - lowest) << f.mantissa) + std::uint64_t(units);
  }
  return std::uint16_t(std::min(bits, f.infinity()) | sign);
}

template <class T>
T get(const void* at, std::size_t i) {
  T value;
  std::memcpy(&value, static_cast<const char*>(at) + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void put(void* at, std::size_t i, T value) {
  std::memcpy(static_cast<char*>(at) + i * sizeof(T), &value, sizeof(T));
}

template <class Acc>
Acc read_item(const Source& source, std::size_t i) {
  switch (source.dtype) {
    case DType::kF32:
      return Acc(get<float>(source.address, i));
    case DType::kF64:
      return Acc(get<double>(source.address, i));
    case DType::kF16:
      return Acc(decode(kHalf, get<std::uint16_t>(source.address, i)));
    case DType::kBF16:
      return Acc(decode(kBrain, get<std::uint16_t>(source.address, i)));
    case DType::kI32:
      return Acc(get<std::int32_t>(source.address, i));
    default:
      return Acc(get<std::int64_t>(source.address, i));
  }
}

template <class Acc>
void write_item(const Destination& destination, std::size_t i, Acc value) {
  switch (destination.dtype) {
    case DType::kF32:
      if (std::isnan(double(value))) return put(destination.address, i, 0x7fc00000u);
      return put(destination.address, i, float(value));
    case DType::kF64:
      if (std::isnan(double(value))) return put(destination.address, i, 0x7ff8000000000000u);
      return put(destination.address, i, double(value));
    case DType::kF16:
      return put(destination.address, i, encode(kHalf, double(value)));
    case DType::kBF16:
      return put(destination.address, i, encode(kBrain, double(value)));
    case DType::kI32:
      return put(destination.address, i, std::int32_t(value));
    default:
      return put(destination.address, i, std::int64_t(value));
  }
}

template <class Acc>
Acc combine(ReduceOp op, Acc a, Acc b) {
  if (op == ReduceOp::kMin) return a < b || a != a ? a : b;
  if (op == ReduceOp::kMax) return a > b || a != a ? a : b;
  if constexpr (std::is_integral_v<Acc>) {
    using U = std::make_unsigned_t<Acc>;
    return op == ReduceOp::kSum ? Acc(U(a) + U(b)) : Acc(U(a) * U(b));
  } else {
    return op == ReduceOp::kSum ? a + b : a * b;
  }
}

template <class Acc>
void reference_in(const std::vector<Destination>& destinations, const std::vector<Source>& sources,
                  std::size_t n, double scale, ReduceOp op) {
  for (std::size_t i = 0; i < n; ++i) {
    Acc acc = read_item<Acc>(sources[0], i);
    for (std::size_t s = 1; s < sources.size(); ++s) {
      acc = combine(op, acc, read_item<Acc>(sources[s], i));
    }
    if constexpr (std::is_floating_point_v<Acc>) acc = acc * Acc(scale);
    for (const Destination& destination : destinations) write_item(destination, i, acc);
  }
}

inline bool is_copy(const std::vector<Destination>& destinations,
                    const std::vector<Source>& sources, double scale) {
  return sources.size() == 1 && scale == 1.0 &&
         std::ranges::all_of(destinations, [&](auto d) { return d.dtype == sources[0].dtype; });
}

inline void reduce(const std::vector<Destination>& destinations, const std::vector<Source>& sources,
                   std::size_t n, double scale, ReduceOp op) {
  if (is_copy(destinations, sources, scale)) {
    for (const Destination& d : destinations) {
      std::memmove(d.address, sources[0].address, n * item_size(d.dtype));
    }
    return;
  }
  const bool wide = std::ranges::any_of(
      sources, [](auto s) { return s.dtype == DType::kF64 || s.dtype == DType::kI64; });
  if (is_integer(sources[0].dtype)) {
    if (wide) return reference_in<std::int64_t>(destinations, sources, n, scale, op);
    return reference_in<std::int32_t>(destinations, sources, n, scale, op);
  }
  if (wide) return reference_in<double>(destinations, sources, n, scale, op);
  return reference_in<float>(destinations, sources, n, scale, op);
}

}  // namespace pgasdl::reference
