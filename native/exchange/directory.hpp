// Where each rank's array lies, told anew in every execution: for arrays that ranks cut from
// segments of all, each where it likes.
//
// A rank tells its place before it raises the first flag of an execution. A peer looks it up once
// it has waited for a flag of that rank, and no later than it raises the flag by which it is done
// with the array: so the next place may be told when an execution is over.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "pgas/segment.hpp"

namespace pgasdl {

class Directory {
 public:
  // Each rank has an entry of 8 bytes at `offset` of its copy of `entries`. `homes`: the segments
  // that arrays may lie in. Both are mapped, and the same on every rank.
  Directory(std::shared_ptr<Segment> entries, std::uint64_t offset,
            std::vector<std::shared_ptr<Segment>> homes);

  // The entry for an array of this rank. Throws if it lies in none of the homes.
  std::uint64_t entry_of(const std::byte* array, std::uint64_t bytes) const;
  void tell(std::uint64_t entry, std::uint32_t generation);
  // Where the array of `peer` begins in this execution. Throws if it has not told, or told of one
  // that is shorter than `bytes`.
  std::byte* look_up(Rank peer, std::uint64_t bytes, std::uint32_t generation) const;

 private:
  using Entry = std::atomic<std::uint64_t>;

  const std::shared_ptr<Segment> entries_;
  const std::uint64_t offset_;
  const std::vector<std::shared_ptr<Segment>> homes_;
};

}  // namespace pgasdl
