#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "fake_kernels.hpp"

namespace fake_cuda {
namespace {

// Device addresses, followed by as many for the memory behind them. Small enough for the thread
// sanitizer's address space.
constexpr std::size_t kArena = std::size_t{64} << 30;
constexpr DevicePtr kNotOfTheHost = DevicePtr{1} << 62;
constexpr std::size_t kPatternBytes = std::size_t{64} << 20;  // the most of one allocation

DevicePtr arena() {
  static const DevicePtr base = [] {
    void* made = mmap(nullptr, 2 * kArena + kGranularity, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED) {
      std::perror("the fake CUDA driver gets no addresses");
      std::abort();
    }
    const auto address = reinterpret_cast<DevicePtr>(made);
    return (address + kGranularity - 1) / kGranularity * kGranularity;
  }();
  return base;
}

bool in_arena(DevicePtr address) { return address >= arena() && address - arena() < kArena; }
void* behind(DevicePtr address) { return reinterpret_cast<void*>(address + kArena); }

std::array<std::atomic<std::size_t>, 64> used{};  // bytes in use on each device
std::atomic<std::size_t> allocations{0};

// The entry of a map by first address whose range holds an address, or end.
template <typename Map>
auto holder(const Map& all, typename Map::key_type address) {
  auto next = all.upper_bound(address);
  if (next == all.begin()) return all.end();
  const auto found = std::prev(next);
  return address - found->first < found->second.bytes ? found : all.end();
}

thread_local const Touching* touching = nullptr;

}  // namespace

std::shared_ptr<Allocation> Allocation::make(Device device, std::size_t bytes, bool legacy) {
  static const std::size_t most = environment_number("FAKE_MEMORY", std::uint64_t{8} << 30);
  auto& here = used[static_cast<std::size_t>(device)];
  if (here.fetch_add(bytes, std::memory_order_relaxed) + bytes > most) {
    here.fetch_sub(bytes, std::memory_order_relaxed);
    return nullptr;
  }
  auto made = std::make_shared<Allocation>();
  made->bytes = bytes;
  made->device = device;
  made->legacy = legacy;
  allocations.fetch_add(1, std::memory_order_relaxed);
  const std::string name =
      "fake-" + std::to_string(physical(device)) + (legacy ? "-alloc" : "-vmm");
  made->file = pgasdl::UniqueFd(memfd_create(name.c_str(), MFD_CLOEXEC));
  if (!made->file || ftruncate(made->file.get(), static_cast<off_t>(bytes)) != 0) return nullptr;
  const std::size_t filled = std::min(bytes, kPatternBytes);
  void* there = mmap(nullptr, filled, PROT_READ | PROT_WRITE, MAP_SHARED, made->file.get(), 0);
  if (there == MAP_FAILED) return nullptr;
  std::memset(there, 0xa5, filled);
  munmap(there, filled);
  return made;
}

std::shared_ptr<Allocation> Allocation::open(pgasdl::UniqueFd file) {
  char target[PATH_MAX] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(file.get());
  if (readlink(link.c_str(), target, sizeof target - 1) < 0) return nullptr;
  int device = 0;
  char kind[8] = {};
  struct stat about{};
  if (std::sscanf(target, "/memfd:fake-%d-%7[a-z]", &device, kind) != 2 ||
      fstat(file.get(), &about) != 0 || (visible(device) < 0 && lacks("unseen"))) {
    return nullptr;
  }
  auto made = std::make_shared<Allocation>();
  made->file = std::move(file);
  made->bytes = static_cast<std::size_t>(about.st_size);
  made->device = visible(device);
  made->legacy = std::strcmp(kind, "alloc") == 0;
  made->opened = true;
  made->properties.location.id = made->device;
  allocations.fetch_add(1, std::memory_order_relaxed);
  return made;
}

Allocation::~Allocation() {
  allocations.fetch_sub(1, std::memory_order_relaxed);
  if (!opened) {
    used[static_cast<std::size_t>(device)].fetch_sub(bytes, std::memory_order_relaxed);
  }
}

std::size_t n_allocations() { return allocations.load(std::memory_order_relaxed); }

DevicePtr Memory::reserve(std::size_t bytes) {
  if (bytes > kArena) return 0;
  // The first gap, with unused addresses before and after so that overruns are noticed.
  DevicePtr address = arena() + kGranularity;
  for (const auto& [first, reserved] : reserved_) {
    if (first >= address + bytes + kGranularity) break;
    const std::size_t rounded = (reserved + kGranularity - 1) / kGranularity * kGranularity;
    address = first + rounded + kGranularity;
  }
  if (address + bytes > arena() + kArena) return 0;
  reserved_[address] = bytes;
  return address;
}

bool Memory::release(DevicePtr address, std::size_t bytes) {
  const auto found = reserved_.find(address);
  if (found == reserved_.end() || found->second != bytes) return false;
  const auto mapped = mapped_.lower_bound(address);
  if (mapped != mapped_.end() && mapped->first < address + bytes) return false;
  reserved_.erase(found);
  return true;
}

bool Memory::is_reserved(DevicePtr address, std::size_t bytes) const {
  auto next = reserved_.upper_bound(address);
  if (next == reserved_.begin()) return false;
  const auto& [first, reserved] = *std::prev(next);
  return bytes <= reserved && address - first <= reserved - bytes;
}

bool Memory::map(DevicePtr address, std::size_t bytes, std::shared_ptr<Allocation> allocation,
                 std::uint64_t devices) {
  if (bytes == 0 || bytes > allocation->bytes || !is_reserved(address, bytes)) return false;
  const auto next = mapped_.lower_bound(address);
  if (next != mapped_.end() && next->first < address + bytes) return false;
  if (holder(mapped_, address) != mapped_.end()) return false;
  if (mmap(behind(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
           allocation->file.get(), 0) == MAP_FAILED) {
    return false;
  }
  mapped_[address] = {bytes, std::move(allocation), devices};
  return true;
}

bool Memory::whole(DevicePtr address, std::size_t bytes) const {
  for (const DevicePtr end = address + bytes; address < end;) {
    const auto found = mapped_.find(address);
    if (found == mapped_.end() || found->second.bytes > end - address) return false;
    address += found->second.bytes;
  }
  return bytes > 0;
}

bool Memory::unmap(DevicePtr address, std::size_t bytes) {
  if (!whole(address, bytes)) return false;
  const auto first = mapped_.find(address);
  mapped_.erase(first, mapped_.lower_bound(address + bytes));
  mmap(behind(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
       -1, 0);
  return true;
}

bool Memory::give_access(DevicePtr address, std::size_t bytes, std::uint64_t devices, bool access) {
  if (!whole(address, bytes)) return false;
  const DevicePtr end = address + bytes;
  for (auto at = mapped_.find(address); at != mapped_.end() && at->first < end; ++at) {
    at->second.devices = access ? at->second.devices | devices : at->second.devices & ~devices;
  }
  return true;
}

const Mapping* Memory::find(DevicePtr address, DevicePtr* first) const {
  const auto found = holder(mapped_, address);
  if (found == mapped_.end()) return nullptr;
  if (first != nullptr) *first = found->first;
  return &found->second;
}

Result Memory::add_host(std::uintptr_t address, std::size_t bytes, unsigned flags,
                        std::uint64_t devices) {
  const auto next = registered_.lower_bound(address);
  if (holder(registered_, address) != registered_.end() ||
      (next != registered_.end() && next->first < address + bytes)) {
    return kAlreadyRegistered;
  }
  registered_[address] = {bytes, flags, devices};
  return kSuccess;
}

bool Memory::remove_host(std::uintptr_t address) { return registered_.erase(address) == 1; }

const Registration* Memory::find_host(std::uintptr_t address, std::uintptr_t* first) const {
  const auto found = holder(registered_, address);
  if (found == registered_.end()) return nullptr;
  if (first != nullptr) *first = found->first;
  return &found->second;
}

DevicePtr device_address(std::uintptr_t host) {
  return lacks("host-pointer") ? host | kNotOfTheHost : host;
}

std::uintptr_t host_address(DevicePtr address) { return address & ~kNotOfTheHost; }

bool Memory::is_pageable(DevicePtr address) const {
  return !in_arena(address) && find_host(host_address(address)) == nullptr;
}

void* Memory::resolve(DevicePtr address, std::size_t bytes, Device device, Use use) const {
  if (in_arena(address)) {
    for (DevicePtr at = address; at < address + bytes;) {
      DevicePtr first = 0;
      const Mapping* mapping = find(at, &first);
      if (mapping == nullptr) return nullptr;
      const Allocation& allocation = *mapping->allocation;
      const bool reached = use == Use::kCopy || opened_.contains({device, allocation.device});
      if (!(reached && allocation.legacy) && (mapping->devices & bit(device)) == 0) return nullptr;
      at = first + mapping->bytes;
    }
    return behind(address);
  }
  const std::uintptr_t host = host_address(address);
  std::uintptr_t first = 0;
  if (const Registration* registered = find_host(host, &first)) {
    // A copy engine gets host addresses unchanged.
    const bool told = address == device_address(host) || use == Use::kCopy;
    const bool inside = host - first + bytes <= registered->bytes;
    const bool reached = (registered->devices & bit(device)) != 0;
    return told && inside && reached ? reinterpret_cast<void*>(host) : nullptr;
  }
  if (use == Use::kKernel || address != host) return nullptr;
  const auto next = registered_.lower_bound(host);
  if (next != registered_.end() && next->first < host + bytes) return nullptr;
  return reinterpret_cast<void*>(host);
}

Memory& memory() {
  static Memory& only = *new Memory;
  return only;
}

Touching::Touching(Device device) : lock_(memory().mutex), device_(device) { touching = this; }
Touching::~Touching() { touching = nullptr; }

void* Touching::operator()(DevicePtr address, std::size_t bytes, Use use) const {
  void* host = memory().resolve(address, bytes, device_, use);
  if (host == nullptr) throw Fault{};
  return host;
}

void* translate(DevicePtr address, std::size_t bytes) {
  if (touching == nullptr) {
    std::fputs("translate() is for kernels\n", stderr);
    std::abort();
  }
  return (*touching)(address, bytes);
}

}  // namespace fake_cuda
