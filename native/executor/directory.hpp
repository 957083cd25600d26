// Where each rank's array lies, told anew in every execution: each rank has it where it likes, in
// segments of all, or anywhere.
//
// A rank tells its place before it raises the first flag of an execution. A peer looks it up once
// it has waited for a flag of that rank, and no later than it raises the flag by which it is done
// with the array: so the next place may be announced when an execution is over. Where an array lies
// anywhere, a rank that gives the execution up revokes the place: what is read then may be
// anything. Where only segments of all serve, an array may lie in none: ranks that see that reduce
// nothing.
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
  // `homes`: the segments that arrays may lie in, mapped, the same on every rank; empty: arrays lie
  // anywhere, and peers that can read this process's memory look for their addresses.
  Directory(std::shared_ptr<Segment> entries, std::uint64_t offset,
            std::vector<std::shared_ptr<Segment>> homes);

  bool anywhere() const { return homes_.empty(); }
  // The place of an array in none of the homes.
  static constexpr std::uint64_t kElsewhere = (std::uint64_t{1} << 52) - 1;
  // The entry for an array of this rank.
  std::uint64_t entry_of(const std::byte* array, std::uint64_t bytes) const;
  void announce(std::uint64_t entry, std::uint32_t generation);
  // Nothing that this thread does to the array from now on is taken for the execution's.
  void revoke();
  // Where the array of `peer` begins in this execution: here, or, if arrays lie anywhere, in its
  // process. 0: it was revoked; of segments of all, it lies in none of them. Throws if the peer
  // has not told, or told of one that is shorter than `bytes`.
  std::uint64_t look_up(Rank peer, std::uint64_t bytes, std::uint32_t generation) const;
  // Data read from it before this call are the execution's.
  bool announced(Rank peer, std::uint32_t generation) const;

 private:
  using Entry = std::atomic<std::uint64_t>;
  Entry& own() const { return *reinterpret_cast<Entry*>(entries_->local().data + offset_); }
  const Entry& of(Rank peer) const;

  const std::shared_ptr<Segment> entries_;
  const std::uint64_t offset_;
  const std::vector<std::shared_ptr<Segment>> homes_;
};

}  // namespace pgasdl
