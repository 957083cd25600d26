// The kernel of tests/gpu/on_device/work.ptx, which takes its time.
#include <cstdint>

#include "fake_kernels.hpp"

namespace fake_cuda {
namespace {

void work(void** parameters, Dim, Dim) {
  const auto turns = *static_cast<std::uint64_t*>(parameters[0]);
  volatile std::uint64_t turn = 0;
  while (turn < turns) turn = turn + 1;
}

const FakeKernel kWork("on_device_work", work, {sizeof(std::uint64_t), sizeof(std::uint64_t)});

}  // namespace
}  // namespace fake_cuda
