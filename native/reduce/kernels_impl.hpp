#pragma once

// The kernels, compiled once per instruction set. A file defines PGASDL_ISA_NAMESPACE, then
// includes this one, and gets that namespace's kKernels.
//
// Every lane does the same arithmetic at any vector width, so a tail is a chain of ever narrower
// vectors, and results do not depend on where a range is cut.

#include "reduce/kernels.hpp"
#include "reduce/simd.hpp"
#include "reduce/stream_impl.hpp"

namespace pgasdl {
namespace PGASDL_ISA_NAMESPACE {
namespace {

template <ReduceOp kOp, class T, int L>
PGASDL_INLINE Vec<T, L> combine(Vec<T, L> a, Vec<T, L> b) {
  if constexpr (kOp == ReduceOp::kSum) {
    return a + b;
  } else if constexpr (kOp == ReduceOp::kProd) {
    return a * b;
  } else if constexpr (Traits<T>::kFloat) {
    if constexpr (kOp == ReduceOp::kMin) return (a < b) | (a != a) ? a : b;
    if constexpr (kOp == ReduceOp::kMax) return (a > b) | (a != a) ? a : b;
  } else {
    using S = Vec<typename Traits<T>::Signed, L>;
    if constexpr (kOp == ReduceOp::kMin) return bits_as<S>(a) < bits_as<S>(b) ? a : b;
    if constexpr (kOp == ReduceOp::kMax) return bits_as<S>(a) > bits_as<S>(b) ? a : b;
  }
}

// Which NaN an addition returns depends on the order of operands in the instruction, which the
// compiler picks: one NaN for all keeps results the same everywhere.
template <class T, int L>
PGASDL_INLINE Vec<T, L> finish(Vec<T, L> acc, T scale) {
  if constexpr (Traits<T>::kFloat) {
    acc = acc * splat<T, L>(scale);
    return acc == acc ? acc : splat<T, L>(bits_as<T>(Traits<T>::kNan));
  } else {
    return acc;
  }
}

// ---- all sources and destinations of one dtype: registers only

// The addresses in a local array, so that the compiler knows that stores do not change them. kN = 0
// stands for any number, read from the caller's memory.
template <class Pointer, class Place, int kN>
struct Addresses {
  Pointer items[kN];

  PGASDL_INLINE Addresses(const Place* places, std::size_t) {
    for (int i = 0; i < kN; ++i) items[i] = static_cast<Pointer>(places[i].address);
  }
  PGASDL_INLINE std::size_t size() const { return kN; }
  PGASDL_INLINE Pointer operator[](std::size_t i) const { return items[i]; }
};

template <class Pointer, class Place>
struct Addresses<Pointer, Place, 0> {
  const Place* places;
  std::size_t n_places;

  PGASDL_INLINE Addresses(const Place* first, std::size_t n) : places(first), n_places(n) {}
  PGASDL_INLINE std::size_t size() const { return n_places; }
  PGASDL_INLINE Pointer operator[](std::size_t i) const {
    return static_cast<Pointer>(places[i].address);
  }
};

template <class Format, ReduceOp kOp, int kSources, int kDestinations>
struct Same {
  using Acc = typename Format::Value;
  using From = Addresses<const char*, Source, kSources>;
  using To = Addresses<char*, Destination, kDestinations>;
  static constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(Acc));
  static constexpr int kUnrolled = kSources == 0 ? 8 : 4;
  static constexpr std::size_t kItem = sizeof(typename Format::Stored);

  /// kPairs pairs of vectors. All loads come before the first store: destinations may be sources.
  template <int kPairs>
  PGASDL_INLINE static void block(const To& to, const From& from, std::size_t i, Acc scale) {
    constexpr std::size_t kStride = 2 * kLanes * kItem;
    const std::size_t offset = i * kItem;
    Vec<Acc, kLanes> acc[2 * kPairs];
    for (int u = 0; u < kPairs; ++u) {
      load_two<Format, Acc, kLanes>(from[0] + offset + u * kStride, acc[2 * u], acc[2 * u + 1]);
    }
    for (std::size_t s = 1; s < from.size(); ++s) {
      const char* source = from[s] + offset;
      for (int u = 0; u < kPairs; ++u) {
        Vec<Acc, kLanes> first, second;
        load_two<Format, Acc, kLanes>(source + u * kStride, first, second);
        acc[2 * u] = combine<kOp, Acc, kLanes>(acc[2 * u], first);
        acc[2 * u + 1] = combine<kOp, Acc, kLanes>(acc[2 * u + 1], second);
      }
    }
    for (auto& vector : acc) vector = finish<Acc, kLanes>(vector, scale);
    for (std::size_t d = 0; d < to.size(); ++d) {
      char* destination = to[d] + offset;
      for (int u = 0; u < kPairs; ++u) {
        store_two<Format, Acc, kLanes>(destination + u * kStride, acc[2 * u], acc[2 * u + 1]);
      }
    }
  }

  /// One vector of L lanes.
  template <int L>
  PGASDL_INLINE static void step(const To& to, const From& from, std::size_t i, Acc scale) {
    const std::size_t offset = i * kItem;
    auto acc = load<Format, Acc, L>(from[0] + offset);
    for (std::size_t s = 1; s < from.size(); ++s) {
      acc = combine<kOp, Acc, L>(acc, load<Format, Acc, L>(from[s] + offset));
    }
    acc = finish<Acc, L>(acc, scale);
    for (std::size_t d = 0; d < to.size(); ++d) store<Format, Acc, L>(to[d] + offset, acc);
  }

  template <int L>
  PGASDL_INLINE static void tail(const To& to, const From& from, std::size_t i, std::size_t n,
                                 Acc scale) {
    if ((n - i) & L) {
      step<L>(to, from, i, scale);
      i += L;
    }
    if constexpr (L > 1) tail<L / 2>(to, from, i, n, scale);
  }

  static void run(const Destination* destinations, std::size_t n_destinations,
                  const Source* sources, std::size_t n_sources, std::size_t n, double scale_f64) {
    const From from(sources, n_sources);
    const To to(destinations, n_destinations);
    const auto scale = static_cast<Acc>(scale_f64);
    std::size_t i = 0;
    constexpr std::size_t kBlock = kLanes * kUnrolled;
    for (; n - i >= kBlock; i += kBlock) block<kUnrolled / 2>(to, from, i, scale);
    for (; n - i >= kLanes; i += kLanes) step<kLanes>(to, from, i, scale);
    if constexpr (kLanes > 1) tail<kLanes / 2>(to, from, i, n, scale);
  }
};

// ---- any mix of dtypes: block by block through an accumulator on the stack

template <class Acc, ReduceOp kOp>
struct Mixed {
  static constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(Acc));
  static constexpr std::size_t kBlock = 4096 / sizeof(Acc);  // stays in L1 with all its streams

  template <class Format, int L, bool kFirst>
  PGASDL_INLINE static void take(Acc* acc, const char* from, std::size_t i) {
    char* at = reinterpret_cast<char*>(acc + i);
    auto v = load<Format, Acc, L>(from + i * sizeof(typename Format::Stored));
    if constexpr (!kFirst) v = combine<kOp, Acc, L>(load_lanes<Acc, L>(at), v);
    store_lanes<Acc, L>(at, v);
  }

  template <class Format, bool kFirst>
  static void take_all(Acc* acc, const void* address, std::size_t begin, std::size_t n) {
    const char* from = static_cast<const char*>(address) + begin * sizeof(typename Format::Stored);
    std::size_t i = 0;
    for (; n - i >= kLanes; i += kLanes) take<Format, kLanes, kFirst>(acc, from, i);
    for (; i < n; ++i) take<Format, 1, kFirst>(acc, from, i);
  }

  template <class Format, int L>
  PGASDL_INLINE static void give(const Acc* acc, char* to, std::size_t i, Acc scale) {
    const auto v = load_lanes<Acc, L>(reinterpret_cast<const char*>(acc + i));
    store<Format, Acc, L>(to + i * sizeof(typename Format::Stored), finish<Acc, L>(v, scale));
  }

  template <class Format>
  static void give_all(const Acc* acc, void* address, std::size_t begin, std::size_t n, Acc scale) {
    char* to = static_cast<char*>(address) + begin * sizeof(typename Format::Stored);
    constexpr int kFit = sizeof(typename Format::Value) > sizeof(Acc) ? kLanes / 2 : kLanes;
    std::size_t i = 0;
    for (; n - i >= kFit; i += kFit) give<Format, kFit>(acc, to, i, scale);
    for (; i < n; ++i) give<Format, 1>(acc, to, i, scale);
  }

  template <bool kFirst>
  static void take_source(Acc* acc, const Source& source, std::size_t begin, std::size_t n) {
    if constexpr (Traits<Acc>::kFloat) {
      switch (source.dtype) {
        case DType::kF32:
          return take_all<F32, kFirst>(acc, source.address, begin, n);
        case DType::kF16:
          return take_all<F16, kFirst>(acc, source.address, begin, n);
        case DType::kBF16:
          return take_all<BF16, kFirst>(acc, source.address, begin, n);
        default:
          if constexpr (sizeof(Acc) == 8) take_all<F64, kFirst>(acc, source.address, begin, n);
      }
    } else if (source.dtype == DType::kI32) {
      take_all<I32, kFirst>(acc, source.address, begin, n);
    } else if constexpr (sizeof(Acc) == 8) {
      take_all<I64, kFirst>(acc, source.address, begin, n);
    }
  }

  static void give_destination(const Acc* acc, const Destination& destination, std::size_t begin,
                               std::size_t n, Acc scale) {
    if constexpr (Traits<Acc>::kFloat) {
      switch (destination.dtype) {
        case DType::kF32:
          return give_all<F32>(acc, destination.address, begin, n, scale);
        case DType::kF16:
          return give_all<F16>(acc, destination.address, begin, n, scale);
        case DType::kBF16:
          return give_all<BF16>(acc, destination.address, begin, n, scale);
        default:
          return give_all<F64>(acc, destination.address, begin, n, scale);
      }
    } else if (destination.dtype == DType::kI32) {
      give_all<I32>(acc, destination.address, begin, n, scale);
    } else {
      give_all<I64>(acc, destination.address, begin, n, scale);
    }
  }

  static void run(const Destination* destinations, std::size_t n_destinations,
                  const Source* sources, std::size_t n_sources, std::size_t n, double scale_f64) {
    alignas(kVectorBytes) Acc acc[kBlock];
    const auto scale = static_cast<Acc>(scale_f64);
    for (std::size_t begin = 0; begin < n; begin += kBlock) {
      const std::size_t count = n - begin < kBlock ? n - begin : kBlock;
      take_source<true>(acc, sources[0], begin, count);
      for (std::size_t s = 1; s < n_sources; ++s) {
        take_source<false>(acc, sources[s], begin, count);
      }
      for (std::size_t d = 0; d < n_destinations; ++d) {
        give_destination(acc, destinations[d], begin, count, scale);
      }
    }
  }
};

// ---- the table

template <class Format, ReduceOp kOp, int kSources>
constexpr KernelsByDestinations by_destinations() {
  // With one source every op gives the same; only sums deserve a kernel per destination count.
  constexpr ReduceOp kDone = kSources == 1 ? ReduceOp::kSum : kOp;
  if constexpr (kDone == ReduceOp::kSum) {
    return {Same<Format, kDone, kSources, 0>::run, Same<Format, kDone, kSources, 1>::run,
            Same<Format, kDone, kSources, 2>::run};
  } else {
    constexpr Kernel kAny = Same<Format, kDone, kSources, 0>::run;
    return {kAny, kAny, kAny};
  }
}

template <class Format, ReduceOp kOp>
constexpr KernelsBySources by_sources() {
  return {by_destinations<Format, kOp, 0>(), by_destinations<Format, kOp, 1>(),
          by_destinations<Format, kOp, 2>(), by_destinations<Format, kOp, 3>(),
          by_destinations<Format, kOp, 4>()};
}

template <class Format>
constexpr KernelsByOp same() {
  return {by_sources<Format, ReduceOp::kSum>(), by_sources<Format, ReduceOp::kMin>(),
          by_sources<Format, ReduceOp::kMax>(), by_sources<Format, ReduceOp::kProd>()};
}

template <class Acc>
constexpr Row<Kernel, kReduceOps> mixed() {
  return {Mixed<Acc, ReduceOp::kSum>::run, Mixed<Acc, ReduceOp::kMin>::run,
          Mixed<Acc, ReduceOp::kMax>::run, Mixed<Acc, ReduceOp::kProd>::run};
}

}  // namespace

const Kernels kKernels = {
    {same<F32>(), same<F64>(), same<F16>(), same<BF16>(), same<I32>(), same<I64>()},
    {mixed<float>(), mixed<double>(), mixed<std::uint32_t>(), mixed<std::uint64_t>()},
    stream,
};

}  // namespace PGASDL_ISA_NAMESPACE
}  // namespace pgasdl
