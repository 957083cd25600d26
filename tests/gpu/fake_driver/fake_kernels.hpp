// Kernels of the fake driver: functions on host memory that are launched by name. A file that
// defines some registers each by a static FakeKernel.
#pragma once

#include <cstddef>
#include <vector>

#include "sys/cuda.hpp"

namespace fake_cuda {

struct Dim {
  unsigned x, y, z;
};

// Does the work of a whole grid in the stream's thread.
struct FakeKernel {
  using Run = void (*)(void** parameters, Dim grid, Dim block);

  FakeKernel(const char* name, Run run, std::vector<std::size_t> parameter_bytes);

  const char* name;
  Run run;
  std::vector<std::size_t> parameter_bytes;  // of each parameter: they are copied at launch
};

// The host memory behind these bytes of a device's address space: kernels must not use device
// addresses in any other way. Memory that the device cannot reach ends the kernel, and with it the
// context, as an illegal address does.
void* translate(pgasdl::cuda::DevicePtr address, std::size_t bytes = 1);

template <typename Element>
Element* translate(Element* address, std::size_t count = 1) {
  return static_cast<Element*>(
      translate(reinterpret_cast<pgasdl::cuda::DevicePtr>(address), count * sizeof(Element)));
}

}  // namespace fake_cuda
