// Events in order of time; simultaneous ones in the order in which they were pushed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pgasdl::simulate {

enum What : std::uint32_t { kPort, kLane, kApplication };

struct Event {
  double at;
  std::uint64_t number;
  What what;
  std::uint32_t which;  // rank, or slot of a lane
  bool before(const Event& other) const {
    return at != other.at ? at < other.at : number < other.number;
  }
};

// A 4-ary heap whose first place stays vacant after take(): most events cause exactly one other,
// which then needs one way down instead of one down and one up.
class Heap {
 public:
  bool empty() const { return events_.size() == static_cast<std::size_t>(vacant_); }

  // Returns the earliest event without taking it; the heap must not be empty.
  const Event& first() {
    fill();
    return events_.front();
  }
  Event take() {
    fill();
    vacant_ = true;
    return events_.front();
  }
  void push(const Event& event) {
    if (vacant_) {
      vacant_ = false;
      down(event);
      return;
    }
    std::size_t at = events_.size();
    events_.push_back(event);
    while (at > 0 && event.before(events_[(at - 1) / 4])) {
      events_[at] = events_[(at - 1) / 4];
      at = (at - 1) / 4;
    }
    events_[at] = event;
  }

 private:
  void fill() {
    if (!vacant_) return;
    vacant_ = false;
    const Event last = events_.back();
    events_.pop_back();
    if (!events_.empty()) down(last);
  }
  // Puts an event into the first place and lets it sink.
  void down(const Event& event) {
    std::size_t at = 0;
    for (;;) {
      const std::size_t first = 4 * at + 1;
      if (first >= events_.size()) break;
      std::size_t least = first;
      for (std::size_t child = first + 1; child < first + 4 && child < events_.size(); ++child) {
        if (events_[child].before(events_[least])) least = child;
      }
      if (!events_[least].before(event)) break;
      events_[at] = events_[least];
      at = least;
    }
    events_[at] = event;
  }

  std::vector<Event> events_;
  bool vacant_ = false;
};

}  // namespace pgasdl::simulate
