#pragma once

// Vectors of L lanes and the number formats in memory. Only kernels_impl.hpp includes it, once per
// instruction set. Everything has internal linkage and calls nothing of the standard library: the
// linker must never keep a copy of an inline function that was compiled for AVX-512.

#include <cstddef>
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define PGASDL_INLINE [[gnu::always_inline]] inline

namespace pgasdl {
namespace PGASDL_ISA_NAMESPACE {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T, int L>
struct VecOf {
  typedef T type __attribute__((vector_size(sizeof(T) * L)));
  typedef T unaligned __attribute__((vector_size(sizeof(T) * L), aligned(1), may_alias));
};
template <class T>
struct VecOf<T, 1> {
  typedef T type;
  typedef T unaligned __attribute__((aligned(1), may_alias));
};
template <class T, int L>
using Vec = typename VecOf<T, L>::type;

template <class T>
struct Traits;
template <>
struct Traits<float> {
  using Bits = std::uint32_t;
  static constexpr bool kFloat = true;
  static constexpr Bits kNan = 0x7fc00000u;
};
template <>
struct Traits<double> {
  using Bits = std::uint64_t;
  static constexpr bool kFloat = true;
  static constexpr Bits kNan = 0x7ff8000000000000u;
};
template <>
struct Traits<std::uint32_t> {
  using Signed = std::int32_t;
  static constexpr bool kFloat = false;
};
template <>
struct Traits<std::uint64_t> {
  using Signed = std::int64_t;
  static constexpr bool kFloat = false;
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class To, class From>
PGASDL_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T, int L>
PGASDL_INLINE Vec<T, L> splat(T value) {
  if constexpr (L == 1) {
    return value;
  } else {
    // Written so that the compiler sees one broadcast; x - 0 is x, even for x = -0.
    return value - Vec<T, L>{};
  }
}

template <class To, class From, int L>
PGASDL_INLINE Vec<To, L> cast(Vec<From, L> v) {
  if constexpr (L == 1) {
    return static_cast<To>(v);
  } else {
    return __builtin_convertvector(v, Vec<To, L>);
  }
}

// Through an unaligned type: gcc 12 copies a vector to memory through the stack for memcpy.
template <class T, int L>
PGASDL_INLINE Vec<T, L> load_lanes(const char* from) {
  return *reinterpret_cast<const typename VecOf<T, L>::unaligned*>(from);
}

template <class T, int L>
PGASDL_INLINE void store_lanes(char* to, Vec<T, L> v) {
  *reinterpret_cast<typename VecOf<T, L>::unaligned*>(to) = v;
}

// ---- f16 and bf16: F16C where the processor has it, else the same bits from integer arithmetic

template <int L>
PGASDL_INLINE Vec<float, L> f16_to_f32(Vec<std::uint16_t, L> half) {
#if defined(__AVX512F__)
  // maskz: the plain form reads an undefined register, which gcc 12 warns about.
  if constexpr (L == 16) {
    return bits_as<Vec<float, L>>(_mm512_maskz_cvtph_ps(0xffff, bits_as<__m256i>(half)));
  }
#endif
#if defined(__F16C__)
  if constexpr (L == 8) return bits_as<Vec<float, L>>(_mm256_cvtph_ps(bits_as<__m128i>(half)));
  if constexpr (L == 4) {
    const Vec<std::uint64_t, 2> padded = {bits_as<std::uint64_t>(half), 0};
    return bits_as<Vec<float, L>>(_mm_cvtph_ps(bits_as<__m128i>(padded)));
  }
#endif
  using U = Vec<std::uint32_t, L>;
  using F = Vec<float, L>;
  const U wide = cast<std::uint32_t, std::uint16_t, L>(half);
  const U shifted = (wide & 0x7fffu) << 13;
  const U normal = shifted + (112u << 23);
  // Infinity and NaN have the largest exponent in both formats.
  const U special = shifted + (224u << 23);
  // 2^-14 (1 + m) - 2^-14 is exact and avoids denormal f32, which FTZ would lose.
  const F magic = splat<float, L>(0x1p-14f);
  const U denormal = bits_as<U>(bits_as<F>(normal + (1u << 23)) - magic);
  const U magnitude = shifted < (1u << 23) ? denormal : shifted >= (31u << 23) ? special : normal;
  return bits_as<F>(magnitude | ((wide & 0x8000u) << 16));
}

/// NaN must be the positive quiet one.
template <int L>
PGASDL_INLINE Vec<std::uint16_t, L> f32_to_f16(Vec<float, L> v) {
#if defined(__AVX512F__)
  if constexpr (L == 16) {
    return bits_as<Vec<std::uint16_t, L>>(
        _mm512_maskz_cvtps_ph(0xffff, bits_as<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
#if defined(__F16C__)
  if constexpr (L == 8) {
    return bits_as<Vec<std::uint16_t, L>>(
        _mm256_cvtps_ph(bits_as<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
  }
  if constexpr (L == 4) {
    const __m128i padded = _mm_cvtps_ph(bits_as<__m128>(v), _MM_FROUND_TO_NEAREST_INT);
    return bits_as<Vec<std::uint16_t, L>>(bits_as<Vec<std::uint64_t, 2>>(padded)[0]);
  }
#endif
  using U = Vec<std::uint32_t, L>;
  using F = Vec<float, L>;
  const U sign = (bits_as<U>(v) >> 16) & 0x8000u;
  const U magnitude = bits_as<U>(v) & 0x7fffffffu;
  const U odd = (magnitude >> 13) & 1u;
  const U normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
  // Adding 0.5 leaves the denormal's ten bits, rounded by the addition, at the mantissa's end.
  const F magic = splat<float, L>(0.5f);
  const U denormal = bits_as<U>(bits_as<F>(magnitude) + magic) - bits_as<U>(magic);
  const U infinity = splat<std::uint32_t, L>(0x7c00u);
  const U nan = splat<std::uint32_t, L>(0x7e00u);
  const U half = magnitude > (255u << 23)    ? nan
                 : magnitude >= (143u << 23) ? infinity
                 : magnitude < (113u << 23)  ? denormal
                                             : normal;
  return cast<std::uint16_t, std::uint32_t, L>(half | sign);
}

/// The upper half is the rounded bf16. NaN must be the positive quiet one: it then survives.
template <int L>
PGASDL_INLINE Vec<std::uint32_t, L> round_to_bf16(Vec<float, L> v) {
  const auto u = bits_as<Vec<std::uint32_t, L>>(v);
  return u + 0x7fffu + ((u >> 16) & 1u);
}

template <int L>
PGASDL_INLINE Vec<float, L> bf16_to_f32(Vec<std::uint16_t, L> v) {
  using F = Vec<float, L>;
#if defined(__AVX2__)
  // gcc 12 splits the same conversion in two.
  if constexpr (L == 8) {
    return bits_as<F>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits_as<__m128i>(v)), 16));
  }
#endif
  return bits_as<F>(cast<std::uint32_t, std::uint16_t, L>(v) << 16);
}

template <int L>
PGASDL_INLINE Vec<std::uint16_t, L> f32_to_bf16(Vec<float, L> v) {
  return cast<std::uint16_t, std::uint32_t, L>(round_to_bf16<L>(v) >> 16);
}

// f64 to f32 rounded to odd, so that a further rounding to fewer bits is correct.
template <int L>
PGASDL_INLINE Vec<float, L> f64_to_f32_odd(Vec<double, L> v) {
  using U64 = Vec<std::uint64_t, L>;
  const Vec<float, L> nearest = cast<float, double, L>(v);
  const Vec<double, L> back = cast<double, float, L>(nearest);
  const U64 one = splat<std::uint64_t, L>(1);
  const U64 zero = splat<std::uint64_t, L>(0);
  constexpr std::uint64_t kMagnitude = ~(std::uint64_t{1} << 63);
  const U64 outward =
      (bits_as<U64>(back) & kMagnitude) > (bits_as<U64>(v) & kMagnitude) ? one : zero;
  const U64 inexact = bits_as<U64>(back) != bits_as<U64>(v) ? one : zero;
  const auto truncated =
      bits_as<Vec<std::uint32_t, L>>(nearest) - cast<std::uint32_t, std::uint64_t, L>(outward);
  return bits_as<Vec<float, L>>(truncated | cast<std::uint32_t, std::uint64_t, L>(inexact));
}

// ---- one struct per DType: what lies in memory, and what it is computed in

struct F32 {
  using Stored = float;
  using Value = float;
};
struct F64 {
  using Stored = double;
  using Value = double;
};
struct F16 {
  using Stored = std::uint16_t;
  using Value = float;
};
struct BF16 {
  using Stored = std::uint16_t;
  using Value = float;
};
struct I32 {
  using Stored = std::uint32_t;
  using Value = std::uint32_t;
};
struct I64 {
  using Stored = std::uint64_t;
  using Value = std::uint64_t;
};

template <class Format, class Acc, int L>
PGASDL_INLINE Vec<Acc, L> load(const char* from) {
  using Value = typename Format::Value;
  const auto stored = load_lanes<typename Format::Stored, L>(from);
  Vec<Value, L> value;
  if constexpr (kSame<Format, F16>) {
    value = f16_to_f32<L>(stored);
  } else if constexpr (kSame<Format, BF16>) {
    value = bf16_to_f32<L>(stored);
  } else {
    value = stored;
  }
  if constexpr (kSame<Acc, Value>) {
    return value;
  } else if constexpr (Traits<Acc>::kFloat) {
    return cast<Acc, Value, L>(value);
  } else {
    using From = typename Traits<Value>::Signed;
    using To = typename Traits<Acc>::Signed;
    return bits_as<Vec<Acc, L>>(cast<To, From, L>(bits_as<Vec<From, L>>(value)));
  }
}

template <class Format, class Acc, int L>
PGASDL_INLINE void store(char* to, Vec<Acc, L> acc) {
  using Value = typename Format::Value;
  Vec<Value, L> value;
  if constexpr (kSame<Acc, Value>) {
    value = acc;
  } else if constexpr (Traits<Acc>::kFloat) {
    if constexpr (sizeof(typename Format::Stored) == 2) {
      value = f64_to_f32_odd<L>(acc);
    } else {
      value = cast<Value, Acc, L>(acc);
    }
  } else {
    using From = typename Traits<Acc>::Signed;
    using To = typename Traits<Value>::Signed;
    value = bits_as<Vec<Value, L>>(cast<To, From, L>(bits_as<Vec<From, L>>(acc)));
  }
  Vec<typename Format::Stored, L> stored;
  if constexpr (kSame<Format, F16>) {
    stored = f32_to_f16<L>(value);
  } else if constexpr (kSame<Format, BF16>) {
    stored = f32_to_bf16<L>(value);
  } else {
    stored = value;
  }
  store_lanes<typename Format::Stored, L>(to, stored);
}

// ---- two vectors at once: bf16 then needs no shuffles, as the even and the odd items of one
// vector of pairs are each a mask or a shift away from f32

template <class Format, class Acc, int L>
PGASDL_INLINE void load_two(const char* from, Vec<Acc, L>& first, Vec<Acc, L>& second) {
  if constexpr (kSame<Format, BF16> && kSame<Acc, float>) {
    const auto pairs = load_lanes<std::uint32_t, L>(from);
    first = bits_as<Vec<float, L>>(pairs << 16);
    second = bits_as<Vec<float, L>>(pairs & 0xffff0000u);
  } else {
    first = load<Format, Acc, L>(from);
    second = load<Format, Acc, L>(from + L * sizeof(typename Format::Stored));
  }
}

template <class Format, class Acc, int L>
PGASDL_INLINE void store_two(char* to, Vec<Acc, L> first, Vec<Acc, L> second) {
  if constexpr (kSame<Format, BF16> && kSame<Acc, float>) {
    const auto low = round_to_bf16<L>(first) >> 16;
    store_lanes<std::uint32_t, L>(to, (round_to_bf16<L>(second) & 0xffff0000u) | low);
  } else {
    store<Format, Acc, L>(to, first);
    store<Format, Acc, L>(to + L * sizeof(typename Format::Stored), second);
  }
}

}  // namespace
}  // namespace PGASDL_ISA_NAMESPACE
}  // namespace pgasdl
