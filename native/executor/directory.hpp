// The directory in which each rank announces, in every execution, where its array lies: in one of
// the segments that all ranks have, or at any address.
//
// A rank announces its place before it raises the first flag of an execution. A peer looks it up
// after it has waited for a flag of that rank, and before it raises the flag that ends its use of
// the array: so the next place may be announced when an execution is over. If arrays lie at any
// address, a rank that gives the execution up revokes its place: from then on a read may return
// anything. If they must lie in segments, an array may lie in none: ranks that see that reduce
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
  // `homes`: the segments that arrays may lie in, mapped and the same on every rank; empty: arrays
  // lie at any address, which peers that can read this process's memory look up.
  Directory(std::shared_ptr<Segment> entries, std::uint64_t offset,
            std::vector<std::shared_ptr<Segment>> homes);

  bool anywhere() const { return homes_.empty(); }
  // The place of an array that lies in none of the homes.
  static constexpr std::uint64_t kElsewhere = (std::uint64_t{1} << 52) - 1;
  // The entry for an array of this rank.
  std::uint64_t entry_of(const std::byte* array, std::uint64_t bytes) const;
  void announce(std::uint64_t entry, std::uint32_t generation);
  // Later changes of the array by this thread cannot be taken for the execution's data.
  void revoke();
  // The beginning of the array of `peer` in this execution: its address here, or if arrays lie
  // anywhere, in its process. 0: it was revoked, or lies in none of the homes. Throws if the peer
  // has announced nothing for this execution, or an array shorter than `bytes`.
  std::uint64_t look_up(Rank peer, std::uint64_t bytes, std::uint32_t generation) const;
  // True if data read before this call belong to the execution.
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
