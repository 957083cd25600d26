// Sums of reduce() as kernels. tests/gpu/ptx.py compiles them to PTX, and g++ compiles them for the
// fake driver of the tests, whose grid.hpp replaces a CUDA compiler's built-in names.
//
// Every item is computed by itself, in the order of the sources, by the arithmetic of the CPU's
// kernels (simd.hpp), so that it has their bits. That requires compilation without contraction and
// without flushing of subnormals, and one NaN for all results.

#include "reduce/device_kernels.hpp"

namespace pgasdl {
namespace {

using std::int32_t;
using std::int64_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

template <class To, class From>
__device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T>
__device__ __forceinline__ T load(const char* from) {
#if defined(__CUDACC__)
  return *reinterpret_cast<const T*>(from);
#else
  T value;
  memcpy(&value, from, sizeof(T));
  return value;
#endif
}

template <class T>
__device__ __forceinline__ void store(char* to, T value) {
#if defined(__CUDACC__)
  *reinterpret_cast<T*>(to) = value;
#else
  memcpy(to, &value, sizeof(T));
#endif
}

// ---- one struct per DType: its bits in memory

template <DType kDType>
struct Format;
template <>
struct Format<DType::kF32> {
  using Stored = uint32_t;
  using Acc = float;
  __device__ static constexpr Stored nan() { return 0x7fc00000u; }
};
template <>
struct Format<DType::kF64> {
  using Stored = uint64_t;
  using Acc = double;
  __device__ static constexpr Stored nan() { return 0x7ff8000000000000u; }
};
template <>
struct Format<DType::kF16> {
  using Stored = uint16_t;
  using Acc = float;
  __device__ static constexpr Stored nan() { return 0x7e00u; }
};
template <>
struct Format<DType::kBF16> {
  using Stored = uint16_t;
  using Acc = float;
  __device__ static constexpr Stored nan() { return 0x7fc0u; }
};
template <>
struct Format<DType::kI32> {
  using Stored = uint32_t;
  using Acc = uint32_t;
};
template <>
struct Format<DType::kI64> {
  using Stored = uint64_t;
  using Acc = uint64_t;
};

template <DType kDType>
using Stored = typename Format<kDType>::Stored;

template <class Acc>
constexpr bool kFloat = kSame<Acc, float> || kSame<Acc, double>;

// ---- f16: the processor's conversion, which IEEE 754 defines except for NaN; integer arithmetic
// would take longer than the memory accesses

__device__ __forceinline__ float f16_to_f32(uint16_t half) {
#if defined(__CUDACC__)
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  const uint32_t shifted = (half & 0x7fffu) << 13;
  const uint32_t sign = (half & 0x8000u) << 16;
  if (shifted >= (31u << 23)) return bits_as<float>(sign | (shifted + (224u << 23)));
  const float magnitude = bits_as<float>(shifted) * 0x1p112f;
  return bits_as<float>(sign | bits_as<uint32_t>(magnitude));
#endif
}

// Not for NaN.
__device__ __forceinline__ uint16_t f32_to_f16(float value) {
#if defined(__CUDACC__)
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
#else
  const uint32_t sign = (bits_as<uint32_t>(value) >> 16) & 0x8000u;
  const uint32_t magnitude = bits_as<uint32_t>(value) & 0x7fffffffu;
  const uint32_t odd = (magnitude >> 13) & 1u;
  uint32_t half = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
  // Adding 0.5 leaves the denormal's ten bits, rounded by the addition, at the mantissa's end.
  if (magnitude < (113u << 23)) {
    half = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - bits_as<uint32_t>(0.5f);
  }
  if (magnitude >= (143u << 23)) half = 0x7c00u;
  return static_cast<uint16_t>(half | sign);
#endif
}

// Not for NaN.
__device__ __forceinline__ uint16_t f32_to_bf16(float value) {
  const auto bits = bits_as<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Rounded to odd, so that a further rounding to fewer bits is correct. Not for NaN.
__device__ __forceinline__ float f64_to_f32_odd(double value) {
  constexpr uint64_t kMagnitude = ~(uint64_t{1} << 63);
  const auto nearest = static_cast<float>(value);
  const auto back = bits_as<uint64_t>(static_cast<double>(nearest));
  const auto bits = bits_as<uint64_t>(value);
  const uint32_t outward = (back & kMagnitude) > (bits & kMagnitude) ? 1 : 0;
  const uint32_t inexact = back != bits ? 1 : 0;
  return bits_as<float>((bits_as<uint32_t>(nearest) - outward) | inexact);
}

// ---- items

template <DType kDType, class Acc>
__device__ __forceinline__ Acc decode(Stored<kDType> stored) {
  if constexpr (kDType == DType::kF16) {
    return f16_to_f32(stored);
  } else if constexpr (kDType == DType::kBF16) {
    return bits_as<float>(static_cast<uint32_t>(stored) << 16);
  } else if constexpr (kDType == DType::kF32) {
    return bits_as<float>(stored);
  } else if constexpr (kDType == DType::kF64) {
    return bits_as<double>(stored);
  } else if constexpr (kDType == DType::kI32) {
    return static_cast<Acc>(static_cast<int32_t>(stored));
  } else {
    return stored;
  }
}

// Any NaN becomes the positive quiet one without payload, regardless of conversions.
template <DType kDType, class Acc>
__device__ __forceinline__ Stored<kDType> encode(Acc acc) {
  if constexpr (!kFloat<Acc>) {
    return static_cast<Stored<kDType>>(
        kDType == DType::kI64 && kSame<Acc, uint32_t>
            ? static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(acc)))
            : acc);
  } else {
    Stored<kDType> stored;
    if constexpr (kDType == DType::kF64) {
      stored = bits_as<uint64_t>(static_cast<double>(acc));
    } else if constexpr (kDType == DType::kF32) {
      stored = bits_as<uint32_t>(static_cast<float>(acc));
    } else {
      float value;
      if constexpr (kSame<Acc, double>) {
        value = f64_to_f32_odd(acc);
      } else {
        value = acc;
      }
      stored = kDType == DType::kF16 ? f32_to_f16(value) : f32_to_bf16(value);
    }
    return acc == acc ? stored : Format<kDType>::nan();
  }
}

// The initial value of a sum: -0 for floats, since 0 + -0 is 0.
template <class Acc>
constexpr Acc kNothing = kFloat<Acc> ? -Acc{0} : Acc{0};

template <class Acc>
__device__ __forceinline__ Acc scaled(Acc acc, const DeviceReduction& p) {
  if constexpr (kSame<Acc, float>) {
    return acc * p.scale_f32;
  } else if constexpr (kSame<Acc, double>) {
    return acc * p.scale;
  } else {
    return acc;
  }
}

__device__ __forceinline__ uint64_t n_threads() { return uint64_t{gridDim.x} * blockDim.x; }

__device__ __forceinline__ uint64_t this_thread() {
  return uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}

// ---- vectors

template <class Item>
constexpr int kLanes = kDeviceVector / sizeof(Item);

/// The `lane`-th item of a vector.
template <class Item>
__device__ __forceinline__ Item get(const uint4& vector, int lane) {
  const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
  if constexpr (sizeof(Item) == 2) {
    return static_cast<Item>(words[lane / 2] >> (lane % 2 * 16));
  } else if constexpr (sizeof(Item) == 4) {
    return words[lane];
  } else {
    return words[2 * lane] | uint64_t{words[2 * lane + 1]} << 32;
  }
}

template <class Item>
__device__ __forceinline__ uint4 vector_of(const Item* items) {
  uint32_t words[4];
  for (int w = 0; w < 4; ++w) {
    if constexpr (sizeof(Item) == 2) {
      words[w] = items[2 * w] | uint32_t{items[2 * w + 1]} << 16;
    } else if constexpr (sizeof(Item) == 4) {
      words[w] = items[w];
    } else {
      words[w] = static_cast<uint32_t>(items[w / 2] >> (w % 2 * 32));
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// kVectors vectors of one thread. Neighbours in a block take neighbouring vectors; a thread's own
// vectors are a whole grid apart, so that few vectors spread over all multiprocessors.
template <int kVectors>
struct Turn {
  uint64_t bytes[kVectors];  // to the vector
  bool inside[kVectors];

  __device__ __forceinline__ Turn(uint64_t first, uint64_t n_vectors, uint64_t head) {
    for (int v = 0; v < kVectors; ++v) {
      const uint64_t i = first + v * n_threads();
      inside[v] = i < n_vectors;
      bytes[v] = head + i * kDeviceVector;
    }
  }

  __device__ __forceinline__ void load_all(uint4* vectors, const char* from) const {
    for (int v = 0; v < kVectors; ++v) {
      vectors[v] = inside[v] ? load<uint4>(from + bytes[v]) : uint4{};
    }
  }

  __device__ __forceinline__ void store_all(const DeviceReduction& p, const uint4* vectors) const {
#pragma unroll 1
    for (unsigned d = 0; d < p.n_destinations; ++d) {
      char* to = p.destinations[d];
      for (int v = 0; v < kVectors; ++v) {
        if (inside[v]) store(to + bytes[v], vectors[v]);
      }
    }
  }
};

// Calls `item` for the items before and after the vectors, in the grid's last threads, which have
// no vectors if there are few.
template <class Item, class Function>
__device__ __forceinline__ void outside_vectors(const DeviceReduction& p, Function item) {
  const uint64_t in_vectors = p.vectors * kLanes<Item>;
  const uint64_t i = n_threads() - 1 - this_thread();
  if (i < p.n - in_vectors) item(i < p.head ? i : i + in_vectors);
}

// ---- all sources and destinations of one dtype

// How many sources a thread loads before it combines them, and how many vectors of each: enough for
// 64 bytes of loads under way, and few enough registers for two blocks per multiprocessor.
__device__ constexpr int sources_ahead(int n_sources) { return n_sources == 0 ? 4 : n_sources; }
__device__ constexpr int vectors_ahead(int n_sources, int item_size) {
  if (n_sources == 0) return 1;
  return n_sources == 2 && item_size == 2 ? 2 : 4;
}

template <DType kDType, int kSources>
__device__ __forceinline__ void reduce_same(const DeviceReduction& p) {
  using Item = Stored<kDType>;
  using Acc = typename Format<kDType>::Acc;
  constexpr int kAhead = sources_ahead(kSources);
  constexpr int kVectors = vectors_ahead(kSources, sizeof(Item));
  const unsigned n_sources = kSources == 0 ? p.n_sources : kSources;

  for (uint64_t first = this_thread(); first < p.vectors; first += kVectors * n_threads()) {
    const Turn<kVectors> turn(first, p.vectors, p.head * sizeof(Item));
    Acc acc[kVectors][kLanes<Item>];
    for (auto& vector : acc) {
      for (Acc& lane : vector) lane = kNothing<Acc>;
    }
#pragma unroll 1
    for (unsigned begin = 0; begin < n_sources; begin += kAhead) {
      uint4 loaded[kAhead][kVectors];
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        if (kSources != 0 || begin + s < n_sources) turn.load_all(loaded[s], p.sources[begin + s]);
      }
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        if (kSources == 0 && begin + s >= n_sources) break;
        for (int v = 0; v < kVectors; ++v) {
          for (int lane = 0; lane < kLanes<Item>; ++lane) {
            const Item item = get<Item>(loaded[s][v], lane);
            acc[v][lane] += decode<kDType, Acc>(item);
          }
        }
      }
    }
    uint4 results[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      Item items[kLanes<Item>];
      for (int lane = 0; lane < kLanes<Item>; ++lane) {
        items[lane] = encode<kDType>(scaled(acc[v][lane], p));
      }
      results[v] = vector_of(items);
    }
    turn.store_all(p, results);
  }

  outside_vectors<Item>(p, [&](uint64_t i) {
    Acc acc = kNothing<Acc>;
#pragma unroll 4
    for (unsigned s = 0; s < n_sources; ++s) {
      acc += decode<kDType, Acc>(load<Item>(p.sources[s] + i * sizeof(Item)));
    }
    const Item item = encode<kDType>(scaled(acc, p));
#pragma unroll 1
    for (unsigned d = 0; d < p.n_destinations; ++d) {
      store(p.destinations[d] + i * sizeof(Item), item);
    }
  });
}

__device__ __forceinline__ void copy_to_all(const DeviceReduction& p) {
  constexpr int kVectors = 4;
  for (uint64_t first = this_thread(); first < p.vectors; first += kVectors * n_threads()) {
    const Turn<kVectors> turn(first, p.vectors, p.head);
    uint4 vectors[kVectors];
    turn.load_all(vectors, p.sources[0]);
    turn.store_all(p, vectors);
  }
  outside_vectors<char>(p, [&](uint64_t i) {
    const char item = p.sources[0][i];
#pragma unroll 1
    for (unsigned d = 0; d < p.n_destinations; ++d) p.destinations[d][i] = item;
  });
}

// ---- any mix of dtypes: single items, adjacent for neighbours in a block

template <class Item>
__device__ __forceinline__ Item load_bytes(const char* from) {
  Item item = 0;
  for (unsigned b = 0; b < sizeof(Item); ++b) {
    item |= static_cast<Item>(Item{static_cast<unsigned char>(from[b])} << (8 * b));
  }
  return item;
}

template <class Item>
__device__ __forceinline__ void store_bytes(char* to, Item item) {
  for (unsigned b = 0; b < sizeof(Item); ++b) to[b] = static_cast<char>(item >> (8 * b));
}

/// kItems items of one thread, a whole grid apart.
template <int kItems, bool kAligned>
struct Items {
  uint64_t first;
  uint64_t n;

  template <DType kDType, class Acc>
  __device__ __forceinline__ void take(Acc* values, const char* from) const {
    using Item = Stored<kDType>;
    for (int k = 0; k < kItems; ++k) {
      const uint64_t i = first + k * n_threads();
      if (i >= n) continue;
      const char* at = from + i * sizeof(Item);
      values[k] = decode<kDType, Acc>(kAligned ? load<Item>(at) : load_bytes<Item>(at));
    }
  }

  template <DType kDType, class Acc>
  __device__ __forceinline__ void give(const Acc* acc, char* to) const {
    using Item = Stored<kDType>;
    for (int k = 0; k < kItems; ++k) {
      const uint64_t i = first + k * n_threads();
      if (i >= n) continue;
      char* at = to + i * sizeof(Item);
      const Item item = encode<kDType>(acc[k]);
      kAligned ? store(at, item) : store_bytes(at, item);
    }
  }

  template <class Acc>
  __device__ __forceinline__ void take_any(Acc* values, DType dtype, const char* from) const {
    if constexpr (kFloat<Acc>) {
      switch (dtype) {
        case DType::kF32:
          return take<DType::kF32>(values, from);
        case DType::kF16:
          return take<DType::kF16>(values, from);
        case DType::kBF16:
          return take<DType::kBF16>(values, from);
        default:
          if constexpr (kSame<Acc, double>) take<DType::kF64>(values, from);
      }
    } else if (dtype == DType::kI32) {
      take<DType::kI32>(values, from);
    } else if constexpr (kSame<Acc, uint64_t>) {
      take<DType::kI64>(values, from);
    }
  }

  template <class Acc>
  __device__ __forceinline__ void give_any(const Acc* acc, DType dtype, char* to) const {
    if constexpr (kFloat<Acc>) {
      switch (dtype) {
        case DType::kF32:
          return give<DType::kF32>(acc, to);
        case DType::kF16:
          return give<DType::kF16>(acc, to);
        case DType::kBF16:
          return give<DType::kBF16>(acc, to);
        default:
          return give<DType::kF64>(acc, to);
      }
    } else if (dtype == DType::kI32) {
      give<DType::kI32>(acc, to);
    } else {
      give<DType::kI64>(acc, to);
    }
  }
};

template <class Acc, bool kAligned>
__device__ __forceinline__ void reduce_mixed(const DeviceReduction& p) {
  constexpr int kItems = kAligned ? 8 : 1;
  for (uint64_t first = this_thread(); first < p.n; first += kItems * n_threads()) {
    const Items<kItems, kAligned> items{first, p.n};
    Acc acc[kItems];
    for (Acc& value : acc) value = kNothing<Acc>;
#pragma unroll 1
    for (unsigned s = 0; s < p.n_sources; ++s) {
      Acc values[kItems] = {};
      items.take_any(values, p.source_dtypes[s], p.sources[s]);
      for (int k = 0; k < kItems; ++k) acc[k] += values[k];
    }
    for (Acc& value : acc) value = scaled(value, p);
#pragma unroll 1
    for (unsigned d = 0; d < p.n_destinations; ++d) {
      items.give_any(acc, p.destination_dtypes[d], p.destinations[d]);
    }
  }
}

}  // namespace

// ---- the kernels, by name

#define PGASDL_KERNEL(name, body)                                           \
  extern "C" __global__ void __launch_bounds__(kDeviceBlock, kDeviceBlocks) \
      name(const __grid_constant__ DeviceReduction p) {                     \
    body(p);                                                                \
  }
#define PGASDL_SAME_KERNEL(dtype, DTYPE, sources) \
  PGASDL_KERNEL(pgasdl_sum_##dtype##_##sources, (reduce_same<DType::DTYPE, sources>))
#define PGASDL_MIXED_KERNEL(name, Acc) PGASDL_KERNEL(pgasdl_mixed_##name, (reduce_mixed<Acc, true>))
#define PGASDL_UNALIGNED_KERNEL(name, Acc) \
  PGASDL_KERNEL(pgasdl_unaligned_##name, (reduce_mixed<Acc, false>))

PGASDL_DEVICE_SAME(PGASDL_SAME_KERNEL)
PGASDL_DEVICE_MIXED(PGASDL_MIXED_KERNEL)
PGASDL_DEVICE_MIXED(PGASDL_UNALIGNED_KERNEL)
PGASDL_KERNEL(pgasdl_copy, copy_to_all)

}  // namespace pgasdl
