// Memory of a GPU registered with an adapter, which then reads and writes it without the host.
#pragma once

#include <cstdint>
#include <string>

#include "sys/cuda.hpp"
#include "transport/verbs/device.hpp"

namespace pgasdl {

// How an adapter comes to a GPU's memory: by a descriptor that the GPU's driver makes (dmabuf), or
// by its address, which nvidia-peermem explains to the kernel.
enum class GpuPath : std::uint8_t { kNone, kDmaBuf, kPeerMemory };

struct GpuAccess {
  GpuPath path = GpuPath::kNone;
  bool needs_flush = false;  // before the GPU reads what the adapter has written
  std::string refusal;       // why there is none
};

// The first way that both drivers have. Nothing is registered.
GpuAccess gpu_access(const VerbsDevice& adapter, cuda::Device gpu);

// Null, and errno, if the adapter or the kernel refuses. Addresses of requests are the GPU's.
VerbsPtr<ibv_mr> register_gpu_memory(const VerbsDevice& adapter, const GpuAccess& way,
                                     cuda::Device gpu, std::byte* data, std::uint64_t bytes,
                                     int access);

}  // namespace pgasdl
