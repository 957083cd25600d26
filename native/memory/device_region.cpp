#include "memory/device_region.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "memory/device_stream.hpp"
#include "memory/region.hpp"
#include "sys/error.hpp"

namespace pgasdl {
namespace {

using cuda::check;
using cuda::pointer;

std::byte* address_of(cuda::DevicePtr pointer) { return reinterpret_cast<std::byte*>(pointer); }

cuda::Uuid uuid_of(cuda::Device device) {
  cuda::Uuid uuid{};
  check(cuda::driver().device_get_uuid(&uuid, device), "asking for a GPU's UUID");
  return uuid;
}

cuda::MemAllocationProp properties_of(cuda::Device device) {
  cuda::MemAllocationProp properties;
  properties.location.id = device;
  properties.flags.gpu_direct_rdma_capable =
      cuda::attribute(device, cuda::DeviceAttribute::kGpuDirectRdmaWithVmm) != 0 ? 1 : 0;
  return properties;
}

bool reaches(cuda::Device from, cuda::Device to) {
  int can = 1;
  if (from != to) {
    check(cuda::driver().device_can_access_peer(&can, from, to), "asking for peer access");
  }
  return can != 0;
}

// Every device here that can load from and store to memory of `device`. If that device is not
// visible (kHost), no query can exclude any, so all are listed.
std::vector<cuda::MemAccessDesc> access_to(cuda::Device device) {
  std::vector<cuda::MemAccessDesc> all;
  for (cuda::Device each = 0; each < cuda::device_count(); ++each) {
    if (device != kHost && !reaches(each, device)) continue;
    cuda::MemAccessDesc& access = all.emplace_back();
    access.location.id = each;
  }
  return all;
}

// The device of this process with this UUID, or kHost: each rank may see only a GPU of its own.
cuda::Device visible(const cuda::Uuid& uuid) {
  for (cuda::Device device = 0; device < cuda::device_count(); ++device) {
    if (std::memcmp(uuid_of(device).bytes, uuid.bytes, sizeof uuid.bytes) == 0) return device;
  }
  return kHost;
}

void require_shareable(cuda::Device device) {
  using enum cuda::DeviceAttribute;
  for (const auto& [attribute, what] :
       {std::pair{kVirtualMemoryManagement, "virtual memory management"},
        std::pair{kHandleTypePosixFileDescriptor, "allocations that descriptors name"},
        std::pair{kUnifiedAddressing, "unified addresses"}}) {
    if (cuda::attribute(device, attribute) == 0) {
      throw Error(ErrorKind::kUnavailable, text("GPU ", device, " or its driver lacks ", what,
                                                ", which segments on a device need"));
    }
  }
}

// Owns the handle until the allocation is mapped, or mapping fails.
class Allocation {
 public:
  explicit Allocation(cuda::AllocationHandle handle) : handle_(handle) {}
  Allocation(const Allocation&) = delete;
  Allocation& operator=(const Allocation&) = delete;
  ~Allocation() { (void)cuda::driver().mem_release(handle_); }
  cuda::AllocationHandle get() const { return handle_; }

 private:
  const cuda::AllocationHandle handle_;
};

void export_to(UniqueFd& fd, cuda::AllocationHandle handle) {
  int descriptor = -1;
  check(cuda::driver().mem_export(&descriptor, handle, cuda::kHandlePosixFileDescriptor, 0),
        "making a descriptor of GPU memory");
  fd.reset(descriptor);
}

// Throws kUnavailable unless kernels and copies of one device reach the memory of another.
void require_reach(cuda::Device from, cuda::Device to) {
  if (reaches(from, to)) return;
  throw Error(ErrorKind::kUnavailable,
              text("GPU ", from, " has no peer access to memory of GPU ", to));
}

}  // namespace

void open_to(cuda::Device from, cuda::Device to) {
  require_reach(from, to);
  if (from == to) return;
  const cuda::Context peer = cuda::primary_context(to);
  const cuda::Current current(from);
  const cuda::Result result = cuda::driver().ctx_enable_peer_access(peer, 0);
  if (result == cuda::kPeerAccessAlreadyEnabled) return;
  check(result, text("opening memory of GPU ", to, " to GPU ", from));
}

cuda::Device device_of(const std::byte* address) {
  int type = 0;
  int device = 0;
  const auto& driver = cuda::driver();
  constexpr int kDeviceMemory = 2;
  if (driver.pointer_get_attribute(&type, cuda::PointerAttribute::kMemoryType, pointer(address)) !=
          cuda::kSuccess ||
      type != kDeviceMemory) {
    throw Error(ErrorKind::kBuffer, text("address ", static_cast<const void*>(address),
                                         " is not memory of a GPU of this process"));
  }
  check(driver.pointer_get_attribute(&device, cuda::PointerAttribute::kDeviceOrdinal,
                                     pointer(address)),
        "asking where memory lies");
  return device;
}

void DeviceRegion::map(cuda::AllocationHandle allocation, std::size_t bytes,
                       std::span<const cuda::MemAccessDesc> access) {
  const auto& driver = cuda::driver();
  cuda::DevicePtr address = 0;
  check(driver.mem_address_reserve(&address, bytes, 0, 0, 0),
        text("reserving ", bytes, " bytes of addresses of GPU ", device_));
  base_ = data_ = address_of(address);
  reserved_ = bytes;
  check(driver.mem_map(address, bytes, 0, allocation, 0), "mapping GPU memory");
  mapped_ = true;
  check(driver.mem_set_access(address, bytes, access.data(), access.size()),
        "opening GPU memory to the devices of this process");
}

std::shared_ptr<DeviceRegion> DeviceRegion::create(cuda::Device device, std::size_t bytes,
                                                   UniqueFd& fd) {
  const auto& driver = cuda::driver();
  if (device < 0 || device >= cuda::device_count()) {
    throw Error(ErrorKind::kUnavailable,
                text("no GPU ", device, ": this process sees ", cuda::device_count()));
  }
  require_shareable(device);
  std::shared_ptr<DeviceRegion> region(new DeviceRegion(device));
  region->handle_.uuid = uuid_of(device);
  if (bytes == 0) return region;
  const cuda::Current current(device);
  const auto properties = properties_of(device);
  std::size_t granularity = 0;
  check(driver.mem_get_granularity(&granularity, &properties, cuda::kGranularityMinimum),
        "asking for the granularity of GPU memory");
  const std::size_t rounded = round_up(bytes, granularity);
  cuda::AllocationHandle handle = 0;
  check(driver.mem_create(&handle, rounded, &properties, 0),
        text("allocating ", rounded, " bytes on GPU ", device));
  const Allocation allocation(handle);
  region->map(handle, rounded, access_to(device));
  // On a library stream: the program's streams may have work of any length.
  device_clear(device, region->data_, rounded);
  export_to(fd, handle);
  region->handle_.kind = DeviceHandle::Kind::kDescriptor;
  region->handle_.bytes = rounded;
  return region;
}

std::shared_ptr<DeviceRegion> DeviceRegion::describe(cuda::Device device, std::byte* address,
                                                     std::size_t bytes, UniqueFd& fd) {
  const auto& driver = cuda::driver();
  const cuda::Current current(device);
  std::shared_ptr<DeviceRegion> region(new DeviceRegion(device));
  region->data_ = address;
  DeviceHandle& handle = region->handle_;
  handle.uuid = uuid_of(device);
  cuda::DevicePtr base = 0;
  std::size_t length = 0;
  check(driver.mem_get_address_range(&base, &length, pointer(address)),
        "looking for the allocation of GPU memory");
  handle.offset = pointer(address) - base;
  handle.bytes = length;
  if (handle.offset > length || bytes > length - handle.offset) {
    // PyTorch's expandable segments consist of many adjacent allocations.
    throw Error(
        ErrorKind::kUnavailable,
        text("these ", bytes, " bytes on GPU ", device, " span several allocations (",
             length - handle.offset, " bytes are in the first), which cannot be shared as ",
             "one: use ctx.segment(), or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"));
  }
  cuda::AllocationHandle allocated = 0;
  if (driver.mem_retain(&allocated, address_of(base)) == cuda::kSuccess) {
    const Allocation allocation(allocated);
    export_to(fd, allocated);
    handle.kind = DeviceHandle::Kind::kDescriptor;
    return region;
  }
  unsigned legacy = 1;  // stays for older drivers, which do not know the attribute
  (void)driver.pointer_get_attribute(&legacy, cuda::PointerAttribute::kIsLegacyCudaIpcCapable,
                                     pointer(address));
  if (legacy == 0) {
    throw Error(
        ErrorKind::kUnavailable,
        text("this memory on GPU ", device, " was allocated in a way that no other process ",
             "can be let into (cudaMallocAsync, for example): use ctx.segment()"));
  }
  check(driver.ipc_get_mem_handle(&handle.ipc, base), "making an IPC handle of GPU memory");
  handle.kind = DeviceHandle::Kind::kIpc;
  return region;
}

void DeviceRegion::open(const DeviceHandle& handle, int fd,
                        std::span<const cuda::MemAccessDesc> access) {
  const auto& driver = cuda::driver();
  if (handle.kind == DeviceHandle::Kind::kDescriptor) {
    cuda::AllocationHandle imported = 0;
    // The interface takes the descriptor in place of a pointer.
    check(driver.mem_import(&imported, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                            cuda::kHandlePosixFileDescriptor),
          "opening a peer's GPU memory");
    const Allocation allocation(imported);
    map(imported, handle.bytes, access);
  } else if (handle.kind == DeviceHandle::Kind::kIpc) {
    cuda::DevicePtr base = 0;
    const cuda::Current current(device_);  // opens the memory for this device's kernels
    check(driver.ipc_open_mem_handle(&base, handle.ipc, cuda::kIpcLazyEnablePeerAccess),
          "opening a peer's GPU memory");
    base_ = data_ = address_of(base);
  }
}

std::shared_ptr<DeviceRegion> DeviceRegion::attach(const DeviceHandle& handle, int fd,
                                                   std::size_t bytes, int device) {
  const cuda::Device theirs = visible(handle.uuid);
  if (device == kHost) device = std::max(theirs, 0);
  if (theirs != kHost) require_reach(device, theirs);
  if (handle.offset > handle.bytes || bytes > handle.bytes - handle.offset) {
    throw Error(ErrorKind::kMismatch, "impossible description of a peer's GPU memory");
  }
  std::shared_ptr<DeviceRegion> region(new DeviceRegion(device));
  region->handle_ = handle;
  try {
    region->open(handle, fd, access_to(theirs));
  } catch (const Error& error) {
    if (theirs != kHost) throw;
    throw Error(
        ErrorKind::kUnavailable,
        text("a peer's segment is on a GPU that this process does not see, and GPU ", device,
             " does not reach (", error.what(), "): let CUDA_VISIBLE_DEVICES name it"));
  }
  if (region->data_ != nullptr) region->data_ += handle.offset;
  return region;
}

DeviceRegion::~DeviceRegion() {
  if (base_ == nullptr) return;
  try {
    const auto& driver = cuda::driver();
    const cuda::Current current(device_);
    // Fails only if the driver has shut down before, which freed everything.
    if (reserved_ == 0) {
      (void)driver.ipc_close_mem_handle(pointer(base_));
    } else {
      if (mapped_) (void)driver.mem_unmap(pointer(base_), reserved_);
      (void)driver.mem_address_free(pointer(base_), reserved_);
    }
  } catch (const Error&) {
    // A forked child: the parent owns the memory.
  }
}

}  // namespace pgasdl
