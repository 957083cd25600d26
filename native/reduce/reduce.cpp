#include "reduce/reduce.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

#include "reduce/copy.hpp"
#include "reduce/kernels.hpp"

namespace pgasdl {
namespace {

constexpr std::size_t kItemSizes[kDTypes + 1] = {4, 8, 2, 2, 4, 8, 1};
constexpr std::string_view kNames[kDTypes + 1] = {"float32", "float64", "float16", "bfloat16",
                                                  "int32",   "int64",   "bytes"};

std::size_t index(DType dtype) { return static_cast<std::size_t>(dtype); }

bool is_integer(DType dtype) { return dtype == DType::kI32 || dtype == DType::kI64; }

void copy_to_all(std::span<const Destination> destinations, const Source& source,
                 std::size_t bytes) {
  if (destinations.size() == 1) {
    copy(destinations[0].address, source.address, bytes);
    return;
  }
  // In blocks, so that the source comes from memory once and from L1 afterwards.
  constexpr std::size_t kBlock = 16384;
  for (std::size_t begin = 0; begin < bytes; begin += kBlock) {
    const std::size_t count = std::min(kBlock, bytes - begin);
    for (const Destination& destination : destinations) {
      if (destination.address == source.address) continue;
      copy(static_cast<char*>(destination.address) + begin,
           static_cast<const char*>(source.address) + begin, count);
    }
  }
}

inline void run(const Kernels& kernels, std::span<const Destination> destinations,
                std::span<const Source> sources, std::size_t n, double scale, ReduceOp op) {
  assert(!sources.empty() && !destinations.empty());
  const DType dtype = sources[0].dtype;
  bool same = true;
  for (const Source& source : sources) {
    assert(is_integer(source.dtype) == is_integer(dtype));
    same = same && source.dtype == dtype;
  }
  for (const Destination& destination : destinations) {
    assert(is_integer(destination.dtype) == is_integer(dtype));
    same = same && destination.dtype == dtype;
  }
  assert(scale == 1.0 || !is_integer(dtype));

  if (same && sources.size() == 1 && scale == 1.0) {
    copy_to_all(destinations, sources[0], n * kItemSizes[index(dtype)]);
    return;
  }
  assert(dtype != DType::kBytes);
  const auto column = static_cast<std::size_t>(op);
  Kernel kernel;
  if (same) {
    const std::size_t own_sources = sources.size() <= kOwnSources ? sources.size() : 0;
    const std::size_t own_destinations =
        destinations.size() <= kOwnDestinations ? destinations.size() : 0;
    kernel = kernels.same[index(dtype)][column][own_sources][own_destinations];
  } else {
    kernel = kernels.mixed[static_cast<std::size_t>(accumulator_for(sources))][column];
  }
  kernel(destinations.data(), destinations.size(), sources.data(), sources.size(), n, scale);
}

}  // namespace

std::size_t item_size(DType dtype) { return kItemSizes[index(dtype)]; }

std::string_view name(DType dtype) { return kNames[index(dtype)]; }

Accumulator accumulator_for(std::span<const Source> sources) {
  bool wide = false;
  for (const Source& source : sources) {
    wide = wide || source.dtype == DType::kF64 || source.dtype == DType::kI64;
  }
  if (is_integer(sources[0].dtype)) return wide ? Accumulator::kI64 : Accumulator::kI32;
  return wide ? Accumulator::kF64 : Accumulator::kF32;
}

const Kernels* kernels_for(Isa isa) {
  switch (isa) {
    case Isa::kBaseline:
      return &isa_baseline::kKernels;
#if defined(__x86_64__)
    case Isa::kAvx2:
      if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        return &isa_avx2::kKernels;
      }
      break;
    case Isa::kAvx512:
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        return &isa_avx512::kKernels;
      }
      break;
#endif
    default:
      break;
  }
  return nullptr;
}

const Kernels& best_kernels() {
  static const Kernels& best = [&]() -> const Kernels& {
    for (const Isa isa : {Isa::kAvx512, Isa::kAvx2}) {
      if (const Kernels* kernels = kernels_for(isa)) return *kernels;
    }
    return isa_baseline::kKernels;
  }();
  return best;
}

void reduce_with(const Kernels& kernels, std::span<const Destination> destinations,
                 std::span<const Source> sources, std::size_t n, double scale, ReduceOp op) {
  run(kernels, destinations, sources, n, scale, op);
}

void reduce(std::span<const Destination> destinations, std::span<const Source> sources,
            std::size_t n, double scale, ReduceOp op) {
  run(best_kernels(), destinations, sources, n, scale, op);
}

void copy_rows(Destination target, Source source, std::size_t n, std::size_t rows,
               std::size_t target_step, std::size_t source_step) {
  if (target_step == n * item_size(target.dtype) && source_step == n * item_size(source.dtype)) {
    n *= std::exchange(rows, 1);
  }
  for (std::size_t row = 0; row < rows; ++row) {
    reduce({&target, 1}, {&source, 1}, n, 1);
    target.address = static_cast<std::byte*>(target.address) + target_step;
    source.address = static_cast<const std::byte*>(source.address) + source_step;
  }
}

}  // namespace pgasdl
