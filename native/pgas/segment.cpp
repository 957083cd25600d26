#include "pgas/segment.hpp"

#include <mutex>
#include <utility>

#include "memory/region.hpp"

namespace pgasdl {

Segment::Segment(SegmentId id, std::uint64_t bytes, std::uint32_t notifications, SegmentHome home,
                 Rank size)
    : id_(id), notifications_(notifications), remotes_(static_cast<std::size_t>(size)) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 46;
  if (bytes > kMostBytes) {
    throw Error(ErrorKind::kSegment, text("a segment of ", bytes, " bytes: at most ", kMostBytes));
  }
  const bool new_on_host = home.bound == nullptr && home.device == kHost;
  // The board begins on its own page, so that it can be registered apart from the data.
  const std::uint64_t board_offset = new_on_host ? round_up(bytes, page_bytes()) : 0;
  const std::uint64_t board_bytes = std::uint64_t{board_words(notifications)} * sizeof(FlagWord);
  local_.region = Region::create(board_offset + board_bytes, local_.descriptor);
  local_.id = id;
  local_.bytes = bytes;
  local_.bound = home.bound != nullptr;
  local_.device = home.device;
  if (!home.reached) {
    // Transports see a board without data, on the host.
    reached_ = false;
    home_ = home;
    unreached_bytes_ = bytes;
    unreached_data_ = home.bound;
    if (home.bound == nullptr) {
      local_.device_region = DeviceRegion::create(home.device, bytes, local_.device_descriptor);
      unreached_data_ = local_.device_region->data();
    }
    local_.bytes = 0;
    local_.bound = false;
    local_.device = kHost;
    local_.data = local_.region->data();
  } else if (home.device != kHost) {
    local_.device_region =
        local_.bound
            ? DeviceRegion::describe(home.device, home.bound, bytes, local_.device_descriptor)
            : DeviceRegion::create(home.device, bytes, local_.device_descriptor);
    local_.data = local_.device_region->data();
  } else {
    local_.data = local_.bound ? home.bound : local_.region->data();
  }
  local_.board = reinterpret_cast<FlagWord*>(local_.region->data() + board_offset);
  local_.notifications = board_words(notifications);
}

Segment::Segment(std::byte* memory, std::uint64_t bytes, int device) : id_(0) {
  local_.data = memory;
  local_.bytes = bytes;
  local_.device = device;
  local_.bound = true;
}

void Segment::set_remote(Rank peer, RemoteSegment remote) {
  on_devices_ |= remote.device != kHost;
  remote.notifications = notifications_of(remote.notifications);
  if (remote.board == nullptr && told_marks_ == nullptr) {
    told_marks_ = std::make_unique<ToldMarks>(remotes_.size());
  }
  remotes_[static_cast<std::size_t>(peer)] = std::move(remote);
}

void Segment::set_self(Rank self) {
  if (!reached_) {
    local_.data = unreached_data_;
    local_.bytes = unreached_bytes_;
    local_.bound = home_.bound != nullptr;
    local_.device = home_.device;
  }
  RemoteSegment remote;
  remote.bytes = local_.bytes;
  remote.notifications = local_.notifications;
  remote.device = reached_ ? local_.device : kUnreached;
  remote.data = local_.data;
  remote.board = local_.board;
  remote.region = local_.region;
  remote.keep = local_.region;
  set_remote(self, std::move(remote));
}

void keep_for_good(std::shared_ptr<const Segment> segment) {
  static std::mutex mutex;
  static auto* const all = new std::vector<std::shared_ptr<const Segment>>;
  const std::lock_guard lock(mutex);
  all->push_back(std::move(segment));
}

bool Segment::release_local() { return !deleted_.exchange(true, std::memory_order_relaxed); }

}  // namespace pgasdl
