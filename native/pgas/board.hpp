// How a rank finds out which of many notifications is raised without reading all of the board.
//
// Behind its notifications a board has marks: one word for each block of them, and one for each
// region of blocks, which are set once and for good before one of the block is raised for the first
// time. A scan reads the marks of regions, the marks in those that have one, and the blocks that
// have one. Whoever raises a notification sees to the marks first: where the board is mapped it
// looks there, elsewhere it knows what it has told (ToldMarks), and tells by flags of the same
// queue. Several may set the same mark, in any way, as there is but one value.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "transport/transport.hpp"

namespace pgasdl {

// Of the default board with one block in use a scan reads 32 + 32 + 64 words.
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
// The words of a board, of which transports know.
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

// Whoever learns of a flag from the one that raised it finds its marks: that one has set them
// before, or seen them.
inline void set_marks(FlagWord* board, std::uint32_t notifications, std::uint32_t id) {
  FlagWord& mark = board[block_mark(notifications, id)];
  if (mark.load(std::memory_order_acquire) != 0) [[likely]]
    return;
  board[region_mark(notifications, id)].store(1, std::memory_order_relaxed);
  mark.store(1, std::memory_order_release);
}

// One that is raised, of [begin, end). `found` is left alone if there is none.
bool find_raised(const FlagWord* board, std::uint32_t notifications, std::uint32_t begin,
                 std::uint32_t end, std::uint32_t& found);
// Marks the blocks of [begin, end) where one is raised without: what told of it was lost.
void mark_raised(FlagWord* board, std::uint32_t notifications, std::uint32_t begin,
                 std::uint32_t end);

// What this rank has told its peers of blocks, by queue: a flag of another queue may come first.
// Any thread.
class ToldMarks {
 public:
  explicit ToldMarks(std::size_t size) : peers_(size) {}
  ToldMarks(const ToldMarks&) = delete;
  ToldMarks& operator=(const ToldMarks&) = delete;
  ~ToldMarks();

  // `connection`: what was told over an earlier one may have been lost with it.
  bool knows(Rank peer, QueueId queue, std::uint32_t connection, std::uint32_t mark) const;
  void note(Rank peer, QueueId queue, std::uint32_t connection, std::uint32_t mark,
            std::uint32_t n_marks);

 private:
  struct Told;
  Told* find(Rank peer, QueueId queue, std::uint32_t connection) const;
  std::vector<std::atomic<Told*>> peers_;  // lists, to which any thread adds
};

}  // namespace pgasdl
