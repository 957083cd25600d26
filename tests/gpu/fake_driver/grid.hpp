// The built-in names of a CUDA compiler that native/reduce/device_kernels.cu needs, for g++: a grid
// is a loop over its threads, one after another. No thread may wait for another.
#pragma once

#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct GridIndex {
  unsigned x;
};
inline thread_local GridIndex threadIdx, blockIdx, blockDim, gridDim;

template <typename Kernel, typename Parameters>
void run_grid(Kernel* kernel, const Parameters& parameters, unsigned grid, unsigned block) {
  gridDim.x = grid;
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < block; ++threadIdx.x) kernel(parameters);
  }
}
