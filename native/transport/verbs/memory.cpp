#include "transport/verbs/memory.hpp"

#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <string_view>

#include "sys/packed.hpp"

namespace pgasdl {
namespace {

// No relaxed ordering: flags and data must become visible in the order of the writes. No memory
// windows, no paging on demand.
constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                        IBV_ACCESS_REMOTE_ATOMIC;

struct Description {
  std::uint64_t bytes;
  std::uint64_t data_address;
  std::uint64_t board_address;
  std::uint32_t notifications;
  std::uint32_t data_key;
  std::uint32_t board_key;
  std::uint32_t board;
  std::uint32_t on_device;
  std::uint32_t padding;
};

// Advice after a failed registration of GPU memory.
constexpr std::string_view kStaged =
    "; the adapter was to reach this GPU, and does not: PGASDL_GPU=staged lets arrays there go by "
    "way of the host";

// Advice after a failed registration of host memory.
std::string advice(int error, std::uint64_t bytes, std::uint64_t registered) {
  if (error == EFAULT) return "; the memory is not mapped, is read-only, or is another device's";
  rlimit limit{};
  const bool memory = error == ENOMEM || error == EPERM || error == EAGAIN;
  if (!memory || getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "";
  if (limit.rlim_cur == RLIM_INFINITY) return "; memory may be locked without limit here";
  return text("; RLIMIT_MEMLOCK allows ", limit.rlim_cur, " bytes of locked memory, and ",
              registered, " + ", bytes,
              " are to be registered: raise it (ulimit -l unlimited; docker run --ulimit "
              "memlock=-1 --device=/dev/infiniband)");
}

[[noreturn]] void refuse(int error, const VerbsDevice& device, std::uint64_t bytes,
                         const std::string& what, std::string_view advice) {
  throw Error(ErrorKind::kBuffer,
              text("registering ", bytes, " bytes of ", what, " with ", device.name(), ": ",
                   std::strerror(error), " (errno ", error, ")", advice));
}

// `before`: bytes that are registered already.
VerbsPtr<ibv_mr> registered(const VerbsDevice& device, std::byte* data, std::uint64_t bytes,
                            int access, const std::string& what, std::uint64_t before) {
  VerbsPtr<ibv_mr> region(verbs_library().reg_mr(device.domain(), data, bytes, access));
  if (region == nullptr) {
    const int error = errno;
    refuse(error, device, bytes, what, advice(error, bytes, before));
  }
  return region;
}

}  // namespace

VerbsBuffer::VerbsBuffer(const VerbsDevice& device, std::size_t bytes, int access) {
  UniqueFd descriptor;
  region = Region::create(bytes, descriptor);
  registered = pgasdl::registered(device, region->data(), bytes, access | IBV_ACCESS_LOCAL_WRITE,
                                  "the library's own memory", 0);
}

GpuAccess VerbsMemory::access_to(int gpu) const {
  const std::lock_guard lock(gpus_mutex_);
  const auto found = gpus_.find(gpu);
  return found != gpus_.end() ? found->second : gpus_[gpu] = gpu_access(*device_, gpu);
}

VerbsPtr<ibv_mr> VerbsMemory::reg(std::byte* data, std::uint64_t bytes, SegmentId segment,
                                  int gpu) {
  if (bytes == 0) return nullptr;
  const int access = device_->atomics() ? kAccess : kAccess & ~IBV_ACCESS_REMOTE_ATOMIC;
  VerbsPtr<ibv_mr> region;
  if (gpu == kHost) {
    region =
        registered(*device_, data, bytes, access, text("segment ", segment), registered_bytes_);
  } else {
    region = register_gpu_memory(*device_, access_to(gpu), gpu, data, bytes, access);
    if (region == nullptr) {
      refuse(errno, *device_, bytes, text("segment ", segment, " on GPU ", gpu), kStaged);
    }
  }
  registered_bytes_ += bytes;
  return region;
}

std::string VerbsMemory::publish(LocalSegment& segment) {
  if (segment.keep == nullptr) {
    auto keys = std::make_unique<VerbsLocalKeys>();
    {
      const std::lock_guard lock(mutex_);
      keys->data = reg(segment.data, segment.bytes, segment.id, segment.device);
      keys->board = reg(reinterpret_cast<std::byte*>(segment.board),
                        std::uint64_t{segment.notifications} * sizeof(FlagWord), segment.id);
      if (keys->data != nullptr) own_[segment.data] = keys->data->rkey;
    }
    keys->data_key = keys->data == nullptr ? 0 : keys->data->lkey;
    if (keys->board != nullptr) {
      keys->board_number = boards_->add(segment.board, segment.notifications);
    }
    keys->region = segment.region;
    keys->device_region = segment.device_region;
    if (segment.device != kHost) {
      segment.needs_flush = access_to(segment.device).needs_flush;
    }
    // If a segment is dropped without retract(), requests under way must keep its memory.
    segment.keep = std::shared_ptr<VerbsLocalKeys>(
        keys.release(), [memory = shared_from_this()](VerbsLocalKeys* dropped) {
          memory->retract(*dropped);
          delete dropped;
        });
  }
  const auto& keys = *static_cast<const VerbsLocalKeys*>(segment.keep.get());
  Description description{};
  description.bytes = segment.bytes;
  description.data_address = reinterpret_cast<std::uint64_t>(segment.data);
  description.board_address = reinterpret_cast<std::uint64_t>(segment.board);
  description.notifications = segment.notifications;
  description.data_key = keys.data == nullptr ? 0 : keys.data->rkey;
  description.board_key = keys.board == nullptr ? 0 : keys.board->rkey;
  description.board = keys.board_number;
  description.on_device = segment.device != kHost;
  return packed(description);
}

RemoteSegment VerbsMemory::attach(Rank peer, const std::string& bytes) {
  const auto description = unpacked<Description>(bytes, "segment description", peer);
  RemoteSegment remote;
  remote.bytes = description.bytes;
  remote.notifications = description.notifications;
  remote.device = description.on_device != 0 ? kAway : kHost;
  remote.address = description.data_address;
  remote.keep = std::make_shared<VerbsRemoteKeys>(
      VerbsRemoteKeys{description.data_address, description.board_address, description.data_key,
                      description.board_key, description.board});
  return remote;
}

VerbsRemoteKeys VerbsMemory::own_keys(const std::byte* data) const {
  const std::lock_guard lock(mutex_);
  const auto found = own_.find(data);
  if (found == own_.end()) {
    throw Error(ErrorKind::kSegment,
                "this rank's copy of the segment is not registered (deleted?)");
  }
  return {reinterpret_cast<std::uint64_t>(data), 0, found->second, 0, 0};
}

void VerbsMemory::retract(VerbsLocalKeys& keys) {
  if (keys.board != nullptr) boards_->remove(keys.board_number);
  Retired retired{std::move(keys.region),
                  std::move(keys.device_region),
                  std::move(keys.data),
                  std::move(keys.board),
                  false,
                  {}};
  const std::lock_guard lock(mutex_);
  if (retired.data != nullptr) {
    std::erase_if(own_, [&](const auto& own) { return own.second == retired.data->rkey; });
  }
  for (const auto& region : {retired.data.get(), retired.board.get()}) {
    if (region != nullptr) registered_bytes_ -= region->length;
  }
  if (closed_ || (retired.data == nullptr && retired.board == nullptr)) return;
  retired_.push_back(std::move(retired));
  n_retired_.store(retired_.size(), std::memory_order_relaxed);
}

void VerbsMemory::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  retired_.clear();
  n_retired_.store(0, std::memory_order_relaxed);
}

}  // namespace pgasdl
