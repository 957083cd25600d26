// Flags that wait for what was posted before them, where a fabric may place writes in another order
// than they were posted in (several paths or rails): data first, their completion, then the flag.
//
// Requests of a connection are numbered as they are posted, modulo 2**32, and complete in that
// order. Not locked: its owner's lock guards it.
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

  // Until the first `posted` requests, which are all so far, have completed.
  void hold(Flag flag, std::uint32_t posted) { held_.push_back({std::move(flag), posted}); }
  // The oldest, if it may be sent now that `retired` requests have completed; else null.
  Flag* ready(std::uint32_t retired) {
    if (held_.empty()) return nullptr;
    Held& oldest = held_.front();
    const bool complete = static_cast<std::int32_t>(retired - oldest.posted) >= 0;
    return complete ? &oldest.flag : nullptr;
  }
  // The oldest waits for these, too.
  void wait(std::uint32_t posted) { held_.front().posted = posted; }
  // The oldest was sent: the next one waits for it, too, and for all of the `posted` requests.
  void sent(std::uint32_t posted) {
    held_.pop_front();
    if (!held_.empty()) held_.front().posted = posted;
  }
  // Gives them all up; how many they were.
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
