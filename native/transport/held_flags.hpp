// Flags that wait until earlier requests have completed, for fabrics that may reorder writes
// (several paths or rails). A connection's requests are numbered as posted, modulo 2**32, and
// complete in that order. The owner's lock guards this class.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

namespace pgasdl {

template <typename Flag>
class HeldFlags {
 public:
  bool empty() const { return held_.empty(); }
  std::size_t size() const { return held_.size(); }

  // Holds the flag until the first `posted` requests, all that were posted so far, have completed.
  void hold(Flag flag, std::uint32_t posted) { held_.push_back({std::move(flag), posted}); }
  // The oldest flag if `retired` completed requests allow it to be sent; else null.
  Flag* ready(std::uint32_t retired) {
    if (held_.empty()) return nullptr;
    Held& oldest = held_.front();
    const bool complete = static_cast<std::int32_t>(retired - oldest.posted) >= 0;
    return complete ? &oldest.flag : nullptr;
  }
  // The oldest flag has to wait for these requests as well.
  void wait(std::uint32_t posted) { held_.front().posted = posted; }
  // The oldest flag was sent as a request of its own: the next one waits for all `posted` requests.
  void sent(std::uint32_t posted) {
    held_.pop_front();
    if (!held_.empty()) held_.front().posted = posted;
  }
  // Drops all flags and returns their number.
  std::size_t drop() {
    const std::size_t count = held_.size();
    held_.clear();
    return count;
  }

 private:
  struct Held {
    Flag flag;
    std::uint32_t posted;
  };
  std::deque<Held> held_;
};

}  // namespace pgasdl
