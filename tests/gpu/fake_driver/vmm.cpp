// Entries for memory: created, exported, imported and mapped; allocated; opened from another
// process; queries about addresses; registered host memory.
#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "memory.hpp"
#include "streams.hpp"

namespace fake_cuda {
namespace {

struct Held {
  std::shared_ptr<Allocation> allocation;
  int n_references = 1;
};

// Guarded by the memory's mutex, like everything here.
struct Tables {
  std::map<AllocationHandle, Held> handles;
  AllocationHandle next_handle = 0x1000;
};

Tables& tables() {
  static Tables& only = *new Tables;
  return only;
}

AllocationHandle add_handle(std::shared_ptr<Allocation> allocation) {
  const AllocationHandle handle = ++tables().next_handle;
  tables().handles[handle] = {std::move(allocation)};
  return handle;
}

std::shared_ptr<Allocation> allocation_of(AllocationHandle handle) {
  const auto found = tables().handles.find(handle);
  return found == tables().handles.end() ? nullptr : found->second.allocation;
}

bool is_sound(const MemAllocationProp& properties) {
  const bool exportable = properties.requested_handle_types == kHandlePosixFileDescriptor;
  return properties.type == 1 && properties.location.type == 1 && properties.location.id >= 0 &&
         properties.location.id < n_devices() &&
         (properties.requested_handle_types == 0 || exportable);
}

bool is_multiple(std::uint64_t value) { return value % kGranularity == 0; }

}  // namespace

std::size_t n_handles() { return tables().handles.size(); }

Result mem_get_granularity(std::size_t* granularity, const MemAllocationProp* properties, int) {
  if (const Result refused = enter(Entry::mem_get_granularity, Needs::kDriver)) return refused;
  if (lacks("vmm")) return kNotSupported;
  if (!is_sound(*properties)) return kInvalidValue;
  *granularity = kGranularity;
  return kSuccess;
}

Result mem_create(AllocationHandle* handle, std::size_t bytes, const MemAllocationProp* properties,
                  unsigned long long flags) {
  if (const Result refused = enter(Entry::mem_create, Needs::kDriver)) return refused;
  if (lacks("vmm")) return kNotSupported;
  if (!is_sound(*properties) || flags != 0 || bytes == 0 || !is_multiple(bytes)) {
    return kInvalidValue;
  }
  if (properties->requested_handle_types != 0 && lacks("posix-handles")) return kNotSupported;
  if (properties->flags.gpu_direct_rdma_capable != 0 && lacks("rdma-with-vmm")) {
    return kNotSupported;
  }
  auto made = Allocation::make(properties->location.id, bytes, false);
  if (made == nullptr) return kOutOfMemory;
  made->properties = *properties;
  const std::scoped_lock lock(memory().mutex);
  *handle = add_handle(std::move(made));
  return kSuccess;
}

Result mem_release(AllocationHandle handle) {
  if (const Result refused = enter(Entry::mem_release, Needs::kDriver)) return refused;
  const std::scoped_lock lock(memory().mutex);
  const auto found = tables().handles.find(handle);
  if (found == tables().handles.end()) return kInvalidValue;
  if (--found->second.n_references == 0) tables().handles.erase(found);
  return kSuccess;
}

Result mem_export(void* shareable, AllocationHandle handle, int type, unsigned long long flags) {
  if (const Result refused = enter(Entry::mem_export, Needs::kDriver)) return refused;
  const std::scoped_lock lock(memory().mutex);
  const auto allocation = allocation_of(handle);
  if (allocation == nullptr || type != kHandlePosixFileDescriptor || flags != 0 ||
      allocation->properties.requested_handle_types != type) {
    return kInvalidValue;
  }
  const int copy = fcntl(allocation->file.get(), F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return kUnknown;
  *static_cast<int*>(shareable) = copy;
  return kSuccess;
}

Result mem_import(AllocationHandle* handle, void* shareable, int type) {
  if (const Result refused = enter(Entry::mem_import, Needs::kDriver)) return refused;
  if (lacks("vmm") || lacks("posix-handles")) return kNotSupported;
  if (type != kHandlePosixFileDescriptor) return kInvalidValue;
  const int given = static_cast<int>(reinterpret_cast<std::intptr_t>(shareable));
  pgasdl::UniqueFd copy(fcntl(given, F_DUPFD_CLOEXEC, 0));
  auto opened = copy ? Allocation::open(std::move(copy)) : nullptr;
  if (opened == nullptr || opened->legacy) return kInvalidValue;
  const std::scoped_lock lock(memory().mutex);
  *handle = add_handle(std::move(opened));
  return kSuccess;
}

Result mem_retain(AllocationHandle* handle, void* address) {
  if (const Result refused = enter(Entry::mem_retain, Needs::kDriver)) return refused;
  const std::scoped_lock lock(memory().mutex);
  const Mapping* mapping = memory().find(reinterpret_cast<DevicePtr>(address));
  if (mapping == nullptr || mapping->allocation->legacy) return kInvalidValue;
  for (auto& [number, held] : tables().handles) {
    if (held.allocation != mapping->allocation) continue;
    ++held.n_references;
    *handle = number;
    return kSuccess;
  }
  *handle = add_handle(mapping->allocation);
  return kSuccess;
}

Result mem_address_reserve(DevicePtr* address, std::size_t bytes, std::size_t alignment, DevicePtr,
                           unsigned long long flags) {
  if (const Result refused = enter(Entry::mem_address_reserve, Needs::kDriver)) return refused;
  if (lacks("vmm")) return kNotSupported;
  // A larger alignment than the granularity is not offered here.
  if (bytes == 0 || !is_multiple(bytes) || alignment > kGranularity || flags != 0) {
    return kInvalidValue;
  }
  const std::scoped_lock lock(memory().mutex);
  *address = memory().reserve(bytes);
  return *address == 0 ? kOutOfMemory : kSuccess;
}

Result mem_address_free(DevicePtr address, std::size_t bytes) {
  if (const Result refused = enter(Entry::mem_address_free, Needs::kDriver)) return refused;
  const std::scoped_lock lock(memory().mutex);
  return memory().release(address, bytes) ? kSuccess : kInvalidValue;
}

Result mem_map(DevicePtr address, std::size_t bytes, std::size_t offset, AllocationHandle handle,
               unsigned long long flags) {
  if (const Result refused = enter(Entry::mem_map, Needs::kDriver)) return refused;
  const std::scoped_lock lock(memory().mutex);
  const auto allocation = allocation_of(handle);
  if (allocation == nullptr || offset != 0 || flags != 0 || !is_multiple(address) ||
      !is_multiple(bytes)) {
    return kInvalidValue;
  }
  return memory().map(address, bytes, allocation, 0) ? kSuccess : kInvalidValue;
}

Result mem_unmap(DevicePtr address, std::size_t bytes) {
  if (const Result refused = enter(Entry::mem_unmap, Needs::kDriver)) return refused;
  const std::scoped_lock lock(memory().mutex);
  const Mapping* mapping = memory().find(address);
  if (mapping == nullptr || mapping->allocation->legacy) return kInvalidValue;
  return memory().unmap(address, bytes) ? kSuccess : kInvalidValue;
}

Result mem_set_access(DevicePtr address, std::size_t bytes, const MemAccessDesc* access,
                      std::size_t count) {
  if (const Result refused = enter(Entry::mem_set_access, Needs::kDriver)) return refused;
  const std::scoped_lock lock(memory().mutex);
  const Mapping* mapping = memory().find(address);
  if (mapping == nullptr || mapping->allocation->legacy) return kInvalidValue;
  for (std::size_t i = 0; i < count; ++i) {
    const Device device = access[i].location.id;
    if (access[i].location.type != 1 || device < 0 || device >= n_devices()) return kInvalidValue;
    if (device != mapping->allocation->device && lacks("peer")) return kInvalidDevice;
    if (!memory().give_access(address, bytes, bit(device), access[i].flags == 3)) {
      return kInvalidValue;
    }
  }
  return kSuccess;
}

Result mem_alloc(DevicePtr* address, std::size_t bytes) {
  if (const Result refused = enter(Entry::mem_alloc, Needs::kContext)) return refused;
  if (bytes == 0) return kInvalidValue;
  const Device device = current_context()->device;
  auto made = Allocation::make(device, bytes, true);
  if (made == nullptr) return kOutOfMemory;
  const std::scoped_lock lock(memory().mutex);
  *address = memory().reserve(bytes);
  if (*address == 0) return kOutOfMemory;
  if (memory().map(*address, bytes, std::move(made), bit(device))) return kSuccess;
  memory().release(*address, bytes);
  return kUnknown;
}

Result mem_free(DevicePtr address) {
  if (const Result refused = enter(Entry::mem_free, Needs::kContext)) return refused;
  wait_for_streams();
  const std::scoped_lock lock(memory().mutex);
  DevicePtr first = 0;
  const Mapping* mapping = memory().find(address, &first);
  if (mapping == nullptr || first != address || !mapping->allocation->legacy ||
      mapping->allocation->opened) {
    return kInvalidValue;
  }
  const std::size_t bytes = mapping->bytes;
  memory().unmap(address, bytes);
  memory().release(address, bytes);
  return kSuccess;
}

Result mem_get_address_range(DevicePtr* base, std::size_t* bytes, DevicePtr address) {
  if (const Result refused = enter(Entry::mem_get_address_range, Needs::kContext)) return refused;
  const std::shared_lock lock(memory().mutex);
  DevicePtr first = 0;
  const Mapping* mapping = memory().find(address, &first);
  if (mapping == nullptr) return kNotFound;
  if (base != nullptr) *base = first;
  if (bytes != nullptr) *bytes = mapping->bytes;
  return kSuccess;
}

Result mem_get_handle_for_range(void* handle, DevicePtr address, std::size_t bytes, int type,
                                unsigned long long flags) {
  if (const Result refused = enter(Entry::mem_get_handle_for_range, Needs::kContext)) {
    return refused;
  }
  if (lacks("dmabuf")) return kNotSupported;
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::shared_lock lock(memory().mutex);
  DevicePtr first = 0;
  const Mapping* mapping = memory().find(address, &first);
  // Unlike a real one, the descriptor does not say where in the memory the range begins.
  if (mapping == nullptr || type != kRangeHandleDmaBuf || flags != 0 || address % page != 0 ||
      bytes % page != 0 || bytes == 0 ||
      address - first + bytes > (mapping->bytes + page - 1) / page * page) {
    return kInvalidValue;
  }
  const Allocation& allocation = *mapping->allocation;
  if (!allocation.legacy && allocation.properties.flags.gpu_direct_rdma_capable == 0) {
    return kNotSupported;
  }
  const int copy = fcntl(allocation.file.get(), F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return kUnknown;
  *static_cast<int*>(handle) = copy;
  return kSuccess;
}

Result pointer_get_attribute(void* value, PointerAttribute attribute, DevicePtr address) {
  if (const Result refused = enter(Entry::pointer_get_attribute, Needs::kDriver)) return refused;
  const std::shared_lock lock(memory().mutex);
  DevicePtr first = 0;
  const Mapping* mapping = memory().find(address, &first);
  std::uintptr_t host_first = 0;
  const Registration* registered =
      mapping == nullptr ? memory().find_host(host_address(address), &host_first) : nullptr;
  if (mapping == nullptr && registered == nullptr) return kInvalidValue;
  switch (attribute) {
    case PointerAttribute::kMemoryType:
      *static_cast<unsigned*>(value) = mapping != nullptr ? 2 : 1;
      return kSuccess;
    case PointerAttribute::kSyncMemops:
      *static_cast<unsigned*>(value) = 0;
      return kSuccess;
    case PointerAttribute::kDeviceOrdinal:
      *static_cast<int*>(value) = mapping != nullptr ? mapping->allocation->device : 0;
      return kSuccess;
    case PointerAttribute::kIsLegacyCudaIpcCapable:
      *static_cast<int*>(value) =
          mapping != nullptr && mapping->allocation->legacy && !lacks("ipc");
      return kSuccess;
    case PointerAttribute::kRangeStart:
      *static_cast<DevicePtr*>(value) = mapping != nullptr ? first : device_address(host_first);
      return kSuccess;
    case PointerAttribute::kRangeSize:
      *static_cast<std::size_t*>(value) = mapping != nullptr ? mapping->bytes : registered->bytes;
      return kSuccess;
    case PointerAttribute::kAllowedHandleTypes:
      *static_cast<std::uint64_t*>(value) =
          mapping != nullptr && !mapping->allocation->legacy
              ? static_cast<std::uint64_t>(mapping->allocation->properties.requested_handle_types)
              : 0;
      return kSuccess;
  }
  return kInvalidValue;
}

Result mem_host_register(void* address, std::size_t bytes, unsigned flags) {
  if (const Result refused = enter(Entry::mem_host_register, Needs::kContext)) return refused;
  if (lacks("host-register")) return kNotSupported;
  if (address == nullptr || bytes == 0) return kInvalidValue;
  const bool portable = (flags & kHostRegisterPortable) != 0;
  const std::uint64_t devices = portable ? ~std::uint64_t{0} : bit(current_context()->device);
  const std::scoped_lock lock(memory().mutex);
  return memory().add_host(reinterpret_cast<std::uintptr_t>(address), bytes, flags, devices);
}

Result mem_host_unregister(void* address) {
  if (const Result refused = enter(Entry::mem_host_unregister, Needs::kContext)) return refused;
  wait_for_streams();
  const std::scoped_lock lock(memory().mutex);
  return memory().remove_host(reinterpret_cast<std::uintptr_t>(address)) ? kSuccess
                                                                         : kNotRegistered;
}

Result mem_host_get_device_pointer(DevicePtr* device_pointer, void* address, unsigned flags) {
  if (const Result refused = enter(Entry::mem_host_get_device_pointer, Needs::kContext)) {
    return refused;
  }
  const std::shared_lock lock(memory().mutex);
  const Registration* registered = memory().find_host(reinterpret_cast<std::uintptr_t>(address));
  if (registered == nullptr || flags != 0 || (registered->flags & kHostRegisterDeviceMap) == 0) {
    return kInvalidValue;
  }
  *device_pointer = device_address(reinterpret_cast<std::uintptr_t>(address));
  return kSuccess;
}

Result flush_gpu_direct_rdma_writes(int, int) {
  if (const Result refused = enter(Entry::flush_gpu_direct_rdma_writes, Needs::kContext)) {
    return refused;
  }
  return lacks("flush-writes") ? kNotSupported : kSuccess;
}

}  // namespace fake_cuda
