// The library's own kernels, from their source.
#include "double_kernels.hpp"
#include "grid.hpp"
#include "reduce/device_kernels.cu"

namespace pgasdl {
namespace {

using gpu_double::Dim;
using gpu_double::DoubleKernel;
using gpu_double::translate;

std::size_t stored_bytes(DType dtype) {
  switch (dtype) {
    case DType::kF16:
    case DType::kBF16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    default:
      return 8;
  }
}

template <void (*kKernel)(DeviceReduction), bool kBytes = false>
void run(void** parameters, Dim grid, Dim block) {
  DeviceReduction p = *static_cast<const DeviceReduction*>(parameters[0]);
  const auto bytes = [&](DType dtype) { return kBytes ? p.n : p.n * stored_bytes(dtype); };
  for (unsigned s = 0; s < p.n_sources; ++s) {
    p.sources[s] = translate(p.sources[s], bytes(p.source_dtypes[s]));
  }
  for (unsigned d = 0; d < p.n_destinations; ++d) {
    p.destinations[d] = translate(p.destinations[d], bytes(p.destination_dtypes[d]));
  }
  run_grid(kKernel, p, grid.x, block.x);
}

#define DOUBLE_SAME(dtype, DTYPE, sources) \
  {"pgasdl_sum_" #dtype "_" #sources,      \
   run<pgasdl_sum_##dtype##_##sources>,    \
   {sizeof(DeviceReduction)}},
#define DOUBLE_MIXED(name, Acc) \
  {"pgasdl_mixed_" #name, run<pgasdl_mixed_##name>, {sizeof(DeviceReduction)}},
#define DOUBLE_UNALIGNED(name, Acc) \
  {"pgasdl_unaligned_" #name, run<pgasdl_unaligned_##name>, {sizeof(DeviceReduction)}},

const DoubleKernel kKernels[] = {
    // clang-format off
    PGASDL_DEVICE_SAME(DOUBLE_SAME)
    PGASDL_DEVICE_MIXED(DOUBLE_MIXED)
    PGASDL_DEVICE_MIXED(DOUBLE_UNALIGNED)
    {"pgasdl_copy", run<pgasdl_copy, true>, {sizeof(DeviceReduction)}},
    // clang-format on
};

}  // namespace
}  // namespace pgasdl
