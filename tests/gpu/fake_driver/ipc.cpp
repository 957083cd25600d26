// Legacy sharing: a handle names a process and its descriptor, which another opens below /proc.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "memory.hpp"

namespace fake_cuda {
namespace {

struct Place {
  char magic[8];
  pid_t process;
  int descriptor;
  ino_t file;  // another file may have the descriptor by then
};
static_assert(sizeof(Place) <= sizeof(IpcMemHandle));
constexpr char kMagic[8] = "FAKECU1";

struct Opened {
  DevicePtr address;
  std::size_t bytes;
  int n_times;
};

// Guarded by the memory's mutex.
std::map<ino_t, Opened>& opened() {
  static auto& all = *new std::map<ino_t, Opened>;
  return all;
}

ino_t number_of(int descriptor) {
  struct stat about{};
  return fstat(descriptor, &about) == 0 ? about.st_ino : 0;
}

}  // namespace

Result ipc_get_mem_handle(IpcMemHandle* handle, DevicePtr address) {
  if (const Result refused = enter(Entry::ipc_get_mem_handle, Needs::kContext)) return refused;
  if (lacks("ipc")) return kNotSupported;
  const std::shared_lock lock(memory().mutex);
  const Mapping* mapping = memory().find(address);
  if (mapping == nullptr || !mapping->allocation->legacy || mapping->allocation->opened) {
    return kInvalidValue;
  }
  Place place{};
  std::memcpy(place.magic, kMagic, sizeof kMagic);
  place.process = getpid();
  place.descriptor = mapping->allocation->file.get();
  place.file = number_of(place.descriptor);
  std::memset(handle->reserved, 0, sizeof handle->reserved);
  std::memcpy(handle->reserved, &place, sizeof place);
  return kSuccess;
}

Result ipc_open_mem_handle(DevicePtr* address, IpcMemHandle handle, unsigned flags) {
  if (const Result refused = enter(Entry::ipc_open_mem_handle, Needs::kContext)) return refused;
  if (lacks("ipc")) return kNotSupported;
  Place place;
  std::memcpy(&place, handle.reserved, sizeof place);
  if (std::memcmp(place.magic, kMagic, sizeof kMagic) != 0) return kInvalidValue;
  if (place.process == getpid()) return kInvalidContext;
  const std::scoped_lock lock(memory().mutex);
  if (const auto found = opened().find(place.file); found != opened().end()) {
    ++found->second.n_times;
    *address = found->second.address;
    return kSuccess;
  }
  const std::string path =
      "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.descriptor);
  pgasdl::UniqueFd file(open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!file || number_of(file.get()) != place.file) return kInvalidValue;
  auto allocation = Allocation::open(std::move(file));
  if (allocation == nullptr || !allocation->legacy) return kInvalidValue;
  const Device device = current_context()->device;
  if (device != allocation->device && (flags != kIpcLazyEnablePeerAccess || lacks("peer"))) {
    return kInvalidDevice;
  }
  const std::size_t bytes = allocation->bytes;
  *address = memory().reserve(bytes);
  if (*address == 0) return kOutOfMemory;
  if (!memory().map(*address, bytes, std::move(allocation), bit(device))) {
    memory().release(*address, bytes);
    return kUnknown;
  }
  opened()[place.file] = {*address, bytes, 1};
  return kSuccess;
}

Result ipc_close_mem_handle(DevicePtr address) {
  if (const Result refused = enter(Entry::ipc_close_mem_handle, Needs::kContext)) return refused;
  const std::scoped_lock lock(memory().mutex);
  for (auto at = opened().begin(); at != opened().end(); ++at) {
    if (at->second.address != address) continue;
    if (--at->second.n_times > 0) return kSuccess;
    memory().unmap(address, at->second.bytes);
    memory().release(address, at->second.bytes);
    opened().erase(at);
    return kSuccess;
  }
  return kInvalidValue;
}

}  // namespace fake_cuda
