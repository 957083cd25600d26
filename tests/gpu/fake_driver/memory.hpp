// The address space of the devices: which ranges are reserved and mapped, which host memory is
// registered, and where the fake driver itself finds all that.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <shared_mutex>
#include <utility>

#include "fake_driver.hpp"
#include "sys/process.hpp"

namespace fake_cuda {

inline constexpr std::size_t kGranularity = std::size_t{2} << 20;

// Physical memory of a device: a memfd, named after the device and its kind.
struct Allocation {
  // New memory, filled with a pattern: nobody may rely on zeros. Null if the device has no more.
  static std::shared_ptr<Allocation> make(Device device, std::size_t bytes, bool legacy);
  // The memory of another process, or of this one again. Null if the file is none.
  static std::shared_ptr<Allocation> open(pgasdl::UniqueFd file);
  ~Allocation();

  pgasdl::UniqueFd file;
  std::size_t bytes = 0;
  Device device = 0;
  bool legacy = false;  // made by cuMemAlloc
  bool opened = false;  // counts in the process that made it
  MemAllocationProp properties;
};

struct Mapping {
  std::size_t bytes = 0;
  std::shared_ptr<Allocation> allocation;
  std::uint64_t devices = 0;  // those that have access, as bits
};

struct Registration {
  std::size_t bytes = 0;
  unsigned flags = 0;
  std::uint64_t devices = 0;
};

// The reader or writer: a kernel needs access itself; a copy engine also reaches another device's
// memory, and all host memory.
enum class Use : std::uint8_t { kKernel, kCopy };

class Memory {
 public:
  // Operations hold it shared while they touch memory, so that nothing is unmapped under them.
  std::shared_mutex mutex;

  // 0: no such range is left.
  DevicePtr reserve(std::size_t bytes);
  bool release(DevicePtr address, std::size_t bytes);
  bool is_reserved(DevicePtr address, std::size_t bytes) const;

  bool map(DevicePtr address, std::size_t bytes, std::shared_ptr<Allocation> allocation,
           std::uint64_t devices);
  // Whole mappings only.
  bool unmap(DevicePtr address, std::size_t bytes);
  bool give_access(DevicePtr address, std::size_t bytes, std::uint64_t devices, bool access);
  // The mapping that holds an address, and its first address.
  const Mapping* find(DevicePtr address, DevicePtr* first = nullptr) const;

  Result add_host(std::uintptr_t address, std::size_t bytes, unsigned flags, std::uint64_t devices);
  bool remove_host(std::uintptr_t address);
  const Registration* find_host(std::uintptr_t address, std::uintptr_t* first = nullptr) const;

  // Lets kernels of one device reach allocations on another; false: they already do.
  bool open_peer(Device device, Device peer) { return opened_.emplace(device, peer).second; }

  // Null: the device cannot reach all of these bytes.
  void* resolve(DevicePtr address, std::size_t bytes, Device device, Use use) const;
  // Neither a device's memory nor registered host memory.
  bool is_pageable(DevicePtr address) const;

  std::size_t n_reserved() const { return reserved_.size(); }
  std::size_t n_mapped() const { return mapped_.size(); }
  std::size_t n_registered() const { return registered_.size(); }

 private:
  // Whether whole mappings fill the range without a gap.
  bool whole(DevicePtr address, std::size_t bytes) const;

  std::map<DevicePtr, std::size_t> reserved_;
  std::map<DevicePtr, Mapping> mapped_;
  std::map<std::uintptr_t, Registration> registered_;
  std::set<std::pair<Device, Device>> opened_;
};

Memory& memory();

// The devices' address of registered host memory: the same one, or for devices that lack
// "host-pointer" one that no host can touch.
DevicePtr device_address(std::uintptr_t host);
std::uintptr_t host_address(DevicePtr address);

// For fakeLive.
std::size_t n_allocations();
std::size_t n_handles();

// For its lifetime, translate() works in this thread, for this device, and memory stays mapped.
class Touching {
 public:
  explicit Touching(Device device);
  ~Touching();
  Touching(const Touching&) = delete;
  Touching& operator=(const Touching&) = delete;

  // Throws Fault.
  void* operator()(DevicePtr address, std::size_t bytes, Use use = Use::kKernel) const;

 private:
  std::shared_lock<std::shared_mutex> lock_;
  Device device_;
};

}  // namespace fake_cuda
