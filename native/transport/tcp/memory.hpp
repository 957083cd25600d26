// Segments that peers may name in frames: every byte is checked against them before it is stored.
#pragma once

#include <map>
#include <memory>
#include <shared_mutex>

#include "transport/transport.hpp"

namespace pgasdl {

// This rank's copy of a segment, as frames reach it.
struct TcpMemory {
  std::byte* data = nullptr;  // null: on a device, which is not reached
  std::uint64_t bytes = 0;
  FlagWord* board = nullptr;
  std::uint32_t notifications = 0;
  std::shared_ptr<Region> region;  // owns both, unless the data are the caller's
};

// A segment has a number, which never comes again.
class TcpMemories : public std::enable_shared_from_this<TcpMemories> {
 public:
  std::string publish(LocalSegment& segment);
  static RemoteSegment attach(Rank peer, const std::string& description);
  // The number of a peer's copy.
  static std::uint32_t number_of(const RemoteSegment& remote);
  // Peers find it no more. The memory; null: it was not published.
  std::shared_ptr<const TcpMemory> retract(const LocalSegment& segment);
  // Null: there is none, or no more.
  std::shared_ptr<const TcpMemory> find(std::uint32_t number) const;

 private:
  mutable std::shared_mutex mutex_;
  std::map<std::uint32_t, std::shared_ptr<const TcpMemory>> all_;
  std::uint32_t last_ = 0;
};

}  // namespace pgasdl
