// Registers GPU memory with an adapter, which then reads and writes it without the host.
#pragma once

#include <cstdint>
#include <string>

#include "sys/cuda.hpp"
#include "transport/verbs/device.hpp"

namespace pgasdl {

// How an adapter reaches a GPU's memory: by a descriptor that the GPU's driver makes (dmabuf), or
// by its address, which nvidia-peermem explains to the kernel.
enum class GpuPath : std::uint8_t { kNone, kDmaBuf, kPeerMemory };

struct GpuAccess {
  GpuPath path = GpuPath::kNone;
  bool needs_flush = false;  // before the GPU reads an adapter's writes
  std::string refusal;       // why there is no path
};

// The first path that both drivers support. Registers nothing.
GpuAccess gpu_access(const VerbsDevice& adapter, cuda::Device gpu);

// Null, with errno, if the adapter or the kernel refuses. Requests use the GPU's addresses.
VerbsPtr<ibv_mr> register_gpu_memory(const VerbsDevice& adapter, const GpuAccess& way,
                                     cuda::Device gpu, std::byte* data, std::uint64_t bytes,
                                     int access);

}  // namespace pgasdl
