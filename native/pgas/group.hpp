// Ranks that act together: barrier, small all-gathers (on which segment creation and the small
// allreduce stand), and for the world group also passive messages.
//
// Everything travels as writes and notifications on one internal segment per group, so it works on
// any transport. Every collective is resumable: a call that timed out is continued by calling it
// again. One collective of each kind may be under way at a time; different kinds overlap.
//
// Why slots are free again: a member sends generation t + 1 only after it has copied out all of
// generation t, and nobody finishes t + 1 before everybody has sent it. So when t + 2 overwrites
// the slots of t (slots alternate), all have read them.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "pgas/segment.hpp"
#include "sys/clock.hpp"

namespace pgasdl {

class Context;

class Group {
 public:
  // `world`: the group of all ranks, whose segment also holds the control block and mailboxes.
  Group(Context& context, std::vector<Rank> ranks, bool world);

  // --- setup: describe() of all members to attach() of all.
  std::string describe();
  void attach(const std::vector<std::string>& descriptions, Deadline deadline);

  const std::vector<Rank>& ranks() const { return ranks_; }
  Rank size() const { return static_cast<Rank>(ranks_.size()); }
  Rank index() const { return index_; }  // of this rank among the members
  Segment& control() { return *control_; }
  std::uint64_t gossip_offset() const { return gossip_offset_; }
  bool deleted() const { return deleted_; }
  void remove();

  Outcome barrier(Deadline deadline);

  // Which exchange: each has its own slots and generations.
  enum class Kind : std::uint8_t { kExchange, kReduce };
  // Every member's bytes, by member. `what` names the call; members whose `fingerprint` differs
  // get a mismatch error naming them. At most slot_bytes(kind).
  Outcome allgather(Kind kind, const std::string& what, std::uint64_t fingerprint,
                    std::span<const std::byte> mine, Deadline deadline,
                    std::vector<std::string>& all);
  static std::size_t slot_bytes(Kind kind);

  // Collective. Continued by calling it again with the same arguments after a time-out.
  Outcome create_segment(std::uint64_t bytes, std::uint32_t notifications, std::byte* bound,
                         Deadline deadline, std::shared_ptr<Segment>& created);
  static void delete_segment(Context& context, Segment& segment);

  // --- world only: messages of up to options.passive_bytes, from any rank to any rank
  Outcome passive_send(Rank peer, std::span<const std::byte> message, Deadline deadline);
  Outcome passive_receive(Deadline deadline, Rank& sender, std::string& message);

  // What a wait that timed out is still waiting for, in words.
  std::string missing_in_barrier() const;
  std::string missing_in_allgather(Kind kind) const;

 private:
  struct Exchange {  // one per Kind
    std::uint64_t slots_offset = 0;
    std::uint32_t first_id = 0;
    std::uint32_t generation = 0;
    std::uint64_t bytes = 0;  // of this rank's slot, also when a later call continues
    bool under_way = false;
    std::size_t next_to_send = 0;
    std::mutex mutex;
  };
  struct Header {
    std::uint64_t fingerprint;
    std::uint32_t bytes;
    std::uint32_t generation;
    char what[32];
  };
  std::uint64_t slot_offset(const Exchange& exchange, Kind kind, Rank member) const;
  bool send(Rank member, std::uint64_t offset, std::uint64_t bytes, std::uint64_t target_offset,
            std::uint32_t id, std::uint32_t value);
  bool raised(std::uint32_t id, std::uint32_t generation) const;
  void check_members(const char* what) const;

  Context& context_;
  std::vector<Rank> ranks_;
  Rank index_ = -1;
  const bool world_;
  bool deleted_ = false;
  std::shared_ptr<Segment> control_;

  std::mutex barrier_mutex_;
  std::uint32_t barrier_generation_ = 0;
  bool barrier_under_way_ = false;
  bool barrier_sent_ = false;
  std::uint32_t barrier_round_ = 0;

  Exchange exchanges_[2];
  std::shared_ptr<Segment> pending_segment_;  // creation under way
  std::byte* pending_bound_ = nullptr;

  std::uint64_t gossip_offset_ = 0;
  std::uint64_t mail_offset_ = 0;
  std::uint32_t mail_id_ = 0;    // + sender: a message lies in my mailbox
  std::uint32_t credit_id_ = 0;  // + receiver: it has taken my message
  std::mutex passive_mutex_;
  std::vector<std::uint32_t> mail_sent_;      // per receiver: messages sent to it
  std::vector<std::uint32_t> mail_received_;  // per sender
  std::mutex receive_mutex_;
  Rank receive_from_ = 0;  // where the next scan begins, so that no sender starves
};

}  // namespace pgasdl
