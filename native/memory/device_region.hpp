// GPU memory that other ranks of the machine can reach: this rank's own, a mapping of a peer's, or
// an existing allocation that is only described.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "sys/cuda.hpp"
#include "sys/process.hpp"

namespace pgasdl {

// Values in place of a device's number.
inline constexpr int kHost = -1;
inline constexpr int kUnreached = -2;  // on a device of a peer, which nothing here reaches
inline constexpr int kAway = -3;       // likewise, but an adapter reaches it

// The handle by which another process maps an allocation; kDescriptor comes with a descriptor.
struct DeviceHandle {
  enum class Kind : std::uint32_t { kNothing, kDescriptor, kIpc };
  Kind kind = Kind::kNothing;
  cuda::Uuid uuid{};         // of the device, which each process numbers in its own way
  std::uint64_t bytes = 0;   // of the allocation
  std::uint64_t offset = 0;  // of the memory in the allocation
  cuda::IpcMemHandle ipc{};
};

// Addresses belong to the device: the host must not touch them. Every device of this process that
// can reach the memory may use it. The last owner's release frees it.
class DeviceRegion {
 public:
  // Allocates zero-filled memory; `fd` gets the descriptor, to be handed to peers.
  static std::shared_ptr<DeviceRegion> create(cuda::Device device, std::size_t bytes, UniqueFd& fd);
  // Describes memory that was allocated elsewhere, in whatever way, and stays there. Throws
  // kUnavailable if it cannot be shared with another process.
  static std::shared_ptr<DeviceRegion> describe(cuda::Device device, std::byte* address,
                                                std::size_t bytes, UniqueFd& fd);
  // Maps a peer's memory by the handle it sent, for `device` of this process; kHost: for the peer's
  // own device, if visible here. Throws kUnavailable if that device does not reach it.
  static std::shared_ptr<DeviceRegion> attach(const DeviceHandle& handle, int fd, std::size_t bytes,
                                              int device);

  DeviceRegion(const DeviceRegion&) = delete;
  DeviceRegion& operator=(const DeviceRegion&) = delete;
  ~DeviceRegion();

  // The device that reaches it.
  cuda::Device device() const { return device_; }
  std::byte* data() const { return data_; }
  const DeviceHandle& handle() const { return handle_; }

 private:
  explicit DeviceRegion(cuda::Device device) : device_(device) {}
  // Maps an allocation of cuMemCreate at a new address, for these devices.
  void map(cuda::AllocationHandle allocation, std::size_t bytes,
           std::span<const cuda::MemAccessDesc> access);
  // Maps a peer's memory, for these devices.
  void open(const DeviceHandle& handle, int fd, std::span<const cuda::MemAccessDesc> access);

  const cuda::Device device_;
  std::byte* data_ = nullptr;
  DeviceHandle handle_;
  std::byte* base_ = nullptr;  // the allocation, if this object frees it
  std::size_t reserved_ = 0;   // bytes there; 0 if opened by legacy IPC
  bool mapped_ = false;
};

// Lets kernels and copies of one device reach memory that this process has allocated on another.
// Throws kUnavailable without peer access.
void open_to(cuda::Device from, cuda::Device to);

// The device of an address. Throws kBuffer if the address lies on none.
cuda::Device device_of(const std::byte* address);

}  // namespace pgasdl
