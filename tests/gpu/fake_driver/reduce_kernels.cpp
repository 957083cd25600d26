// The library's own kernels, from their source.
#include "fake_kernels.hpp"
#include "grid.hpp"
#include "reduce/device_kernels.cu"

namespace pgasdl {
namespace {

using fake_cuda::Dim;
using fake_cuda::FakeKernel;
using fake_cuda::translate;

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

#define FAKE_SAME(dtype, DTYPE, sources) \
  {"pgasdl_sum_" #dtype "_" #sources,    \
   run<pgasdl_sum_##dtype##_##sources>,  \
   {sizeof(DeviceReduction)}},
#define FAKE_MIXED(name, Acc) \
  {"pgasdl_mixed_" #name, run<pgasdl_mixed_##name>, {sizeof(DeviceReduction)}},
#define FAKE_UNALIGNED(name, Acc) \
  {"pgasdl_unaligned_" #name, run<pgasdl_unaligned_##name>, {sizeof(DeviceReduction)}},

const FakeKernel kKernels[] = {
    // clang-format off
    PGASDL_DEVICE_SAME(FAKE_SAME)
    PGASDL_DEVICE_MIXED(FAKE_MIXED)
    PGASDL_DEVICE_MIXED(FAKE_UNALIGNED)
    {"pgasdl_copy", run<pgasdl_copy, true>, {sizeof(DeviceReduction)}},
    // clang-format on
};

}  // namespace
}  // namespace pgasdl
