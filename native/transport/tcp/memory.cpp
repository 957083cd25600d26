#include "transport/tcp/memory.hpp"

#include <mutex>

#include "sys/packed.hpp"

namespace pgasdl {
namespace {

struct Description {
  std::uint64_t bytes;
  std::uint64_t address;
  std::uint32_t notifications;
  std::uint32_t number;
  std::uint32_t on_device;
  std::uint32_t padding;
};

}  // namespace

std::string TcpMemories::publish(LocalSegment& segment) {
  if (segment.keep == nullptr) {
    auto memory = std::make_shared<TcpMemory>();
    memory->data = segment.device == kHost ? segment.data : nullptr;
    memory->bytes = segment.bytes;
    memory->board = segment.board;
    memory->notifications = segment.notifications;
    memory->region = segment.region;
    const std::lock_guard lock(mutex_);
    const std::uint32_t number = ++last_;
    all_[number] = std::move(memory);
    segment.keep = std::shared_ptr<std::uint32_t>(
        new std::uint32_t(number), [all = shared_from_this()](std::uint32_t* dropped) {
          {
            const std::lock_guard lock(all->mutex_);
            all->all_.erase(*dropped);
          }
          delete dropped;
        });
  }
  Description description{};
  description.bytes = segment.bytes;
  description.address = reinterpret_cast<std::uint64_t>(segment.data);
  description.notifications = segment.notifications;
  description.number = *static_cast<const std::uint32_t*>(segment.keep.get());
  description.on_device = segment.device != kHost;
  return packed(description);
}

RemoteSegment TcpMemories::attach(Rank peer, const std::string& bytes) {
  const auto description = unpacked<Description>(bytes, "segment description", peer);
  RemoteSegment remote;
  remote.bytes = description.bytes;
  remote.notifications = description.notifications;
  remote.device = description.on_device != 0 ? kAway : kHost;
  remote.address = description.address;
  remote.keep = std::make_shared<std::uint32_t>(description.number);
  return remote;
}

std::shared_ptr<const TcpMemory> TcpMemories::retract(const LocalSegment& segment) {
  if (segment.keep == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = all_.extract(*static_cast<const std::uint32_t*>(segment.keep.get()));
  return found.empty() ? nullptr : found.mapped();
}

std::uint32_t TcpMemories::number_of(const RemoteSegment& remote) {
  return *static_cast<const std::uint32_t*>(remote.keep.get());
}

std::shared_ptr<const TcpMemory> TcpMemories::find(std::uint32_t number) const {
  const std::shared_lock lock(mutex_);
  const auto found = all_.find(number);
  return found == all_.end() ? nullptr : found->second;
}

}  // namespace pgasdl
