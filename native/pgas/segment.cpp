#include "pgas/segment.hpp"

#include "memory/region.hpp"

namespace pgasdl {

Segment::Segment(SegmentId id, std::uint64_t bytes, std::uint32_t notifications, std::byte* bound,
                 Rank size)
    : id_(id), remotes_(static_cast<std::size_t>(size)) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;
  if (bytes > kMostBytes) {
    throw Error(ErrorKind::kSegment, text("a segment of ", bytes, " bytes: at most ", kMostBytes));
  }
  // The board begins on a page of its own, so that it can be registered apart from the data.
  const std::uint64_t board_offset = bound != nullptr ? 0 : round_up(bytes, page_bytes());
  const std::uint64_t board_bytes = std::uint64_t{notifications} * sizeof(FlagWord);
  local_.region = Region::create(board_offset + board_bytes, local_.descriptor);
  local_.id = id;
  local_.bytes = bytes;
  local_.bound = bound != nullptr;
  local_.data = bound != nullptr ? bound : local_.region->data();
  local_.board = reinterpret_cast<FlagWord*>(local_.region->data() + board_offset);
  local_.notifications = notifications;
}

Segment::Segment(std::byte* memory, std::uint64_t bytes) : id_(0) {
  local_.data = memory;
  local_.bytes = bytes;
  local_.bound = true;
}

void Segment::set_remote(Rank peer, RemoteSegment remote) {
  remotes_[static_cast<std::size_t>(peer)] = std::move(remote);
}

void Segment::set_self(Rank self) {
  RemoteSegment remote;
  remote.bytes = local_.bytes;
  remote.notifications = local_.notifications;
  remote.data = local_.data;
  remote.board = local_.board;
  remote.keep = local_.region;
  set_remote(self, std::move(remote));
}

bool Segment::release_local() { return !deleted_.exchange(true, std::memory_order_relaxed); }

}  // namespace pgasdl
