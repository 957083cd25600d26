// Memory of a GPU that other ranks of the machine can reach: our own, a mapping of a peer's, or
// somebody else's allocation that is only described.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "sys/cuda.hpp"
#include "sys/process.hpp"

namespace pgasdl {

// Instead of a device's number.
inline constexpr int kHost = -1;
inline constexpr int kUnreached = -2;  // some device of a peer, which nobody reaches from here
inline constexpr int kAway = -3;       // likewise, which an adapter reaches

// The handle by which another process maps an allocation, besides a descriptor if it is
// `kDescriptor`.
struct DeviceHandle {
  enum class Kind : std::uint32_t { kNothing, kDescriptor, kIpc };
  Kind kind = Kind::kNothing;
  cuda::Uuid uuid{};         // of its device: processes number devices as they like
  std::uint64_t bytes = 0;   // of the allocation
  std::uint64_t offset = 0;  // in it, of the memory that is meant
  cuda::IpcMemHandle ipc{};
};

// Addresses are the device's: the host must not touch them. Every device of this process that can
// reach the memory may. Given back when the last owner lets go.
class DeviceRegion {
 public:
  // New zero-filled memory; the descriptor goes to `fd`, so that it can be handed to peers.
  static std::shared_ptr<DeviceRegion> create(cuda::Device device, std::size_t bytes, UniqueFd& fd);
  // Memory that somebody else allocated, by whatever way, and keeps. Throws kUnavailable if no
  // other process can be let into it.
  static std::shared_ptr<DeviceRegion> describe(cuda::Device device, std::byte* address,
                                                std::size_t bytes, UniqueFd& fd);
  // A peer's, by what it handed out, for `device` of this process; kHost: for the same one, if it
  // is visible here. Throws kUnavailable if that does not reach it.
  static std::shared_ptr<DeviceRegion> attach(const DeviceHandle& handle, int fd, std::size_t bytes,
                                              int device);

  DeviceRegion(const DeviceRegion&) = delete;
  DeviceRegion& operator=(const DeviceRegion&) = delete;
  ~DeviceRegion();

  // Which reaches it.
  cuda::Device device() const { return device_; }
  std::byte* data() const { return data_; }
  const DeviceHandle& handle() const { return handle_; }

 private:
  explicit DeviceRegion(cuda::Device device) : device_(device) {}
  // Maps an allocation of cuMemCreate at an address of its own, for these devices.
  void map(cuda::AllocationHandle allocation, std::size_t bytes,
           std::span<const cuda::MemAccessDesc> access);
  // A peer's, for these devices.
  void open(const DeviceHandle& handle, int fd, std::span<const cuda::MemAccessDesc> access);

  const cuda::Device device_;
  std::byte* data_ = nullptr;
  DeviceHandle handle_;
  std::byte* base_ = nullptr;  // of the allocation, if it is ours to give back
  std::size_t reserved_ = 0;   // bytes there; 0: it was opened by legacy IPC
  bool mapped_ = false;
};

// Lets kernels and copies of one device reach what this process has allocated on another. Throws
// kUnavailable unless they have peer access to it.
void open_to(cuda::Device from, cuda::Device to);

// The device that an address lies on. Throws kBuffer if it is none of a device's.
cuda::Device device_of(const std::byte* address);

}  // namespace pgasdl
