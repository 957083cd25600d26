#include "transport/verbs/gpu_memory.hpp"

#include <unistd.h>

#include <cerrno>

#include "memory/region.hpp"
#include "sys/error.hpp"
#include "sys/process.hpp"

namespace pgasdl {
namespace {

using cuda::DeviceAttribute;

// Passes an invalid descriptor: a kernel that knows the call reports just that.
bool takes_descriptors(const VerbsDevice& adapter) {
  const auto& library = verbs_library();
  if (library.reg_dmabuf_mr == nullptr) return false;
  const VerbsPtr<ibv_mr> none(
      library.reg_dmabuf_mr(adapter.domain(), 0, page_bytes(), 0, -1, IBV_ACCESS_LOCAL_WRITE));
  return none == nullptr && errno == EBADF;
}

bool kernel_knows_addresses() { return access("/sys/module/nvidia_peermem", F_OK) == 0; }

// CUflushGPUDirectRDMAWritesOptions, CUGPUDirectRDMAWritesOrdering.
constexpr int kFlushByHost = 1;
constexpr int kOrderedForOwner = 100;

}  // namespace

GpuAccess gpu_access(const VerbsDevice& adapter, cuda::Device gpu) {
  GpuAccess access;
  if (access.refusal = cuda::missing(); !access.refusal.empty()) return access;
  if (gpu < 0 || gpu >= cuda::device_count()) {
    access.refusal = text("there is no GPU ", gpu);
    return access;
  }
  const auto& driver = cuda::driver();
  access.needs_flush =
      cuda::attribute(gpu, DeviceAttribute::kGpuDirectRdmaWritesOrdering) < kOrderedForOwner;
  const int flushes = cuda::attribute(gpu, DeviceAttribute::kGpuDirectRdmaFlushWrites);
  if (access.needs_flush &&
      (driver.flush_gpu_direct_rdma_writes == nullptr || (flushes & kFlushByHost) == 0)) {
    access.refusal = text("GPU ", gpu, " may read old bytes after an adapter's write, and its ",
                          "driver has no call that flushes such writes");
  } else if (cuda::attribute(gpu, DeviceAttribute::kGpuDirectRdmaWithVmm) == 0) {
    access.refusal = text("GPU ", gpu, " or its driver lacks RDMA to shareable allocations");
  } else if (driver.mem_get_handle_for_range != nullptr &&
             cuda::attribute(gpu, DeviceAttribute::kDmaBuf) != 0 && takes_descriptors(adapter)) {
    access.path = GpuPath::kDmaBuf;
  } else if (kernel_knows_addresses()) {
    access.path = GpuPath::kPeerMemory;
  } else {
    access.refusal =
        text(adapter.name(), " and GPU ", gpu, " have neither dmabuf (Linux 5.12, rdma-core 34, ",
             "NVIDIA's open kernel modules) nor nvidia-peermem (modprobe nvidia-peermem)");
  }
  return access;
}

VerbsPtr<ibv_mr> register_gpu_memory(const VerbsDevice& adapter, const GpuAccess& way,
                                     cuda::Device gpu, std::byte* data, std::uint64_t bytes,
                                     int access) {
  const auto& library = verbs_library();
  if (way.path == GpuPath::kPeerMemory) {
    return VerbsPtr<ibv_mr>(library.reg_mr(adapter.domain(), data, bytes, access));
  }
  // Whole pages; the registered region begins and ends with the memory.
  const cuda::DevicePtr address = cuda::pointer(data);
  const cuda::DevicePtr first = address / page_bytes() * page_bytes();
  const std::size_t length = round_up(address - first + bytes, page_bytes());
  int descriptor = -1;
  {
    const cuda::Current current(gpu);
    cuda::check(cuda::driver().mem_get_handle_for_range(&descriptor, first, length,
                                                        cuda::kRangeHandleDmaBuf, 0),
                "asking for a descriptor (dmabuf) of GPU memory");
  }
  const UniqueFd closes(descriptor);  // the registration keeps the memory
  return VerbsPtr<ibv_mr>(
      library.reg_dmabuf_mr(adapter.domain(), address - first, bytes, address, descriptor, access));
}

}  // namespace pgasdl
