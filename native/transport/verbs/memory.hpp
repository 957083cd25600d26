// Registered memory: two regions per segment, its data and its board, and the keys that peers need.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "transport/verbs/device.hpp"
#include "transport/verbs/flags.hpp"
#include "transport/verbs/gpu_memory.hpp"

namespace pgasdl {

class VerbsConnection;

// The content of LocalSegment::keep after publish().
struct VerbsLocalKeys {
  // Registered memory stays mapped as long as it is registered.
  std::shared_ptr<Region> region;
  std::shared_ptr<DeviceRegion> device_region;
  VerbsPtr<ibv_mr> data;   // null: no bytes
  VerbsPtr<ibv_mr> board;  // null: no notifications
  std::uint32_t data_key = 0;
  std::uint32_t board_number = 0;
};

// The content of RemoteSegment::keep.
struct VerbsRemoteKeys {
  std::uint64_t data_address;
  std::uint64_t board_address;
  std::uint32_t data_key;
  std::uint32_t board_key;
  std::uint32_t board;  // its number at the peer
};

// The transport's own registered memory, page-aligned so that a fork does no harm.
struct VerbsBuffer {
  // `access`: of peers.
  VerbsBuffer(const VerbsDevice& device, std::size_t bytes, int access = 0);
  std::byte* data() const { return region->data(); }
  std::shared_ptr<Region> region;
  VerbsPtr<ibv_mr> registered;
};

class VerbsMemory : public std::enable_shared_from_this<VerbsMemory> {
 public:
  VerbsMemory(std::shared_ptr<VerbsDevice> device, std::shared_ptr<VerbsBoards> boards)
      : device_(std::move(device)), boards_(std::move(boards)) {}

  std::string publish(LocalSegment& segment);
  static RemoteSegment attach(Rank peer, const std::string& description);
  // The keys by which this rank reaches its own copy through the adapter.
  VerbsRemoteKeys own_keys(const std::byte* data) const;

  // Why memory of a GPU cannot be registered; "" if it can.
  std::string refuses_device(int device) const { return access_to(device).refusal; }

  // Deregisters after every request posted so far; also called by LocalSegment::keep's deleter.
  void retract(VerbsLocalKeys& keys);
  bool has_retired() const { return n_retired_.load(std::memory_order_relaxed) != 0; }
  // A request that may still use retracted memory: of `connection`, up to its number `posted`.
  struct Pending {
    const VerbsConnection* connection;
    std::uint32_t posted;
    std::uint32_t generation;
  };
  // `pending()` lists all requests under way; `over(pending)` tells whether one is over.
  template <typename List, typename Over>
  void collect(List&& pending, Over&& over);
  // No queue pair is left, so nothing has to be awaited any more.
  void close();

 private:
  struct Retired {
    std::shared_ptr<Region> region;
    std::shared_ptr<DeviceRegion> device_region;
    VerbsPtr<ibv_mr> data;
    VerbsPtr<ibv_mr> board;
    bool listed = false;
    std::vector<Pending> pending;
  };
  VerbsPtr<ibv_mr> reg(std::byte* data, std::uint64_t bytes, SegmentId segment, int gpu = kHost);

  GpuAccess access_to(int gpu) const;

  const std::shared_ptr<VerbsDevice> device_;
  const std::shared_ptr<VerbsBoards> boards_;
  mutable std::mutex gpus_mutex_;
  mutable std::map<int, GpuAccess> gpus_;  // those asked for so far
  mutable std::mutex mutex_;
  std::map<const std::byte*, std::uint32_t> own_;  // by the data of each segment
  std::vector<Retired> retired_;
  std::atomic<std::size_t> n_retired_{0};
  std::uint64_t registered_bytes_ = 0;
  bool closed_ = false;
};

template <typename List, typename Over>
void VerbsMemory::collect(List&& pending, Over&& over) {
  std::vector<Retired> gone;  // deregistered after the lock is released
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  for (std::size_t i = 0; i < retired_.size();) {
    Retired& retired = retired_[i];
    if (!retired.listed) {
      retired.pending = pending();
      retired.listed = true;
    }
    std::erase_if(retired.pending, over);
    if (!retired.pending.empty()) {
      ++i;
      continue;
    }
    std::swap(retired, retired_.back());
    gone.push_back(std::move(retired_.back()));
    retired_.pop_back();
  }
  n_retired_.store(retired_.size(), std::memory_order_relaxed);
}

}  // namespace pgasdl
