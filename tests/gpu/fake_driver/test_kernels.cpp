// A kernel for the tests of the fake driver itself.
#include <cstdint>

#include "fake_kernels.hpp"

namespace fake_cuda {
namespace {

// fake_add(uint32_t* numbers, uint32_t count, uint32_t summand)
void add(void** parameters, Dim, Dim) {
  const auto count = *static_cast<std::uint32_t*>(parameters[1]);
  const auto summand = *static_cast<std::uint32_t*>(parameters[2]);
  std::uint32_t* numbers = translate(*static_cast<std::uint32_t**>(parameters[0]), count);
  for (std::uint32_t i = 0; i < count; ++i) numbers[i] += summand;
}

const FakeKernel kAdd("fake_add", add,
                      {sizeof(std::uint32_t*), sizeof(std::uint32_t), sizeof(std::uint32_t)});

}  // namespace
}  // namespace fake_cuda
