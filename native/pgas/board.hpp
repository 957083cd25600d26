// Finds which of many notifications is raised without reading the whole board.
//
// Behind its notifications a board has marks: one word for each block of notifications, and one for
// each region of blocks. Marks are set once, for good, before the first notification of a block is
// raised. A scan reads the marks of all regions, the block marks of marked regions, and the marked
// blocks. A rank that raises a notification sets the marks first: on a mapped board it looks at
// them, elsewhere it remembers what it has sent (ToldMarks) and sets them by flags on the same
// queue. Several ranks may set the same mark, in any way, since a mark has one value only.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "transport/transport.hpp"

namespace pgasdl {

// With one block in use, a scan of the default board reads 32 + 32 + 64 words.
inline constexpr std::uint32_t kBlock = 64;
inline constexpr std::uint32_t kRegion = 32 * kBlock;
// Marks share no cache line with notifications, which change.
inline constexpr std::uint32_t kLineWords = 64 / sizeof(FlagWord);

constexpr std::uint32_t blocks_of(std::uint32_t notifications) {
  return (notifications + kBlock - 1) / kBlock;
}
constexpr std::uint32_t regions_of(std::uint32_t notifications) {
  return (notifications + kRegion - 1) / kRegion;
}
// The words of a board, as transports see it.
constexpr std::uint32_t board_words(std::uint32_t notifications) {
  return notifications + (kLineWords - 1) + regions_of(notifications) + blocks_of(notifications);
}
// The inverse.
constexpr std::uint32_t notifications_of(std::uint32_t words) {
  constexpr std::uint64_t kRegionWords = kRegion + 1 + kRegion / kBlock;
  std::uint64_t found = words * std::uint64_t{kRegion} / kRegionWords;
  while (found > 0 && board_words(static_cast<std::uint32_t>(found)) > words) --found;
  return static_cast<std::uint32_t>(found);
}
// The words that mark a notification's region and block.
constexpr std::uint32_t region_mark(std::uint32_t notifications, std::uint32_t id) {
  return (notifications + kLineWords - 1) / kLineWords * kLineWords + id / kRegion;
}
constexpr std::uint32_t block_mark(std::uint32_t notifications, std::uint32_t id) {
  return region_mark(notifications, 0) + regions_of(notifications) + id / kBlock;
}

// A thread that acquires the flag sees its marks: the raiser has set them before, or acquired them.
inline void set_marks(FlagWord* board, std::uint32_t notifications, std::uint32_t id) {
  FlagWord& mark = board[block_mark(notifications, id)];
  if (mark.load(std::memory_order_acquire) != 0) [[likely]]
    return;
  board[region_mark(notifications, id)].store(1, std::memory_order_relaxed);
  mark.store(1, std::memory_order_release);
}

// Finds a raised notification in [begin, end); false leaves `found` unchanged.
bool find_raised(const FlagWord* board, std::uint32_t notifications, std::uint32_t begin,
                 std::uint32_t end, std::uint32_t& found);
// Marks the blocks of [begin, end) that have a raised notification but no mark, because the flag
// that was to set it got lost.
void mark_raised(FlagWord* board, std::uint32_t notifications, std::uint32_t begin,
                 std::uint32_t end);

// Marks sent to peers, by queue: another queue's flag may arrive first. Any thread.
class ToldMarks {
 public:
  explicit ToldMarks(std::size_t size) : peers_(size) {}
  ToldMarks(const ToldMarks&) = delete;
  ToldMarks& operator=(const ToldMarks&) = delete;
  ~ToldMarks();

  // `connection` counts reconnections: marks that were sent before one may be lost.
  bool knows(Rank peer, QueueId queue, std::uint32_t connection, std::uint32_t mark) const;
  void note(Rank peer, QueueId queue, std::uint32_t connection, std::uint32_t mark,
            std::uint32_t n_marks);

 private:
  struct Told;
  Told* find(Rank peer, QueueId queue, std::uint32_t connection) const;
  std::vector<std::atomic<Told*>> peers_;  // lists that any thread extends
};

}  // namespace pgasdl
