// The directory in which each rank announces, in every execution, where its array lies: in one of
// the segments that all ranks have.
//
// A rank announces its place before it raises the first flag of an execution. A peer looks it up
// after it has waited for a flag of that rank, and before it raises the flag that ends its use of
// the array: so the next place may be announced when an execution is over. An array may lie in none
// of the segments: ranks that see that reduce nothing.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "pgas/segment.hpp"

namespace pgasdl {

class Directory {
 public:
  // Each rank has an entry of 8 bytes at `offset` of its copy of `entries`, which is mapped.
  // `homes`: the segments that arrays may lie in, mapped and the same on every rank.
  Directory(std::shared_ptr<Segment> entries, std::uint64_t offset,
            std::vector<std::shared_ptr<Segment>> homes);

  // The place of an array that lies in none of the homes.
  static constexpr std::uint64_t kElsewhere = (std::uint64_t{1} << 52) - 1;
  // The entry for an array of this rank.
  std::uint64_t entry_of(const std::byte* array, std::uint64_t bytes) const;
  void announce(std::uint64_t entry, std::uint32_t generation);
  // The address at which the array of `peer` begins in this execution. 0: it lies in none of the
  // homes. Throws if the peer has announced nothing for this execution, or an array shorter than
  // `bytes`.
  std::uint64_t look_up(Rank peer, std::uint64_t bytes, std::uint32_t generation) const;

 private:
  using Entry = std::atomic<std::uint64_t>;
  Entry& own() const { return *reinterpret_cast<Entry*>(entries_->local().data + offset_); }
  const Entry& of(Rank peer) const;

  const std::shared_ptr<Segment> entries_;
  const std::uint64_t offset_;
  const std::vector<std::shared_ptr<Segment>> homes_;
};

}  // namespace pgasdl
