// Ranks that act together: barrier, small all-gathers (on which segment creation and the small
// allreduce stand), and for the world group also passive messages.
//
// Everything travels as writes and notifications on one internal segment per group, so it works on
// any transport. Every collective is resumable: a call that ended half way, by its deadline or by
// an error, is continued by calling it again with the same arguments; until then other calls of its
// kind are refused. One collective of each kind may be under way at a time, by one thread;
// different kinds overlap.
//
// Why slots are free again: a member sends generation t + 1 only after it has copied out all of
// generation t, and nobody finishes t + 1 before everybody has sent it. So when t + 2 overwrites
// the slots of t (slots alternate), all have read them.
#pragma once

#include <atomic>
#include <exception>
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
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // --- setup: describe() of all members to attach() of all. kTimeout: to be called again.
  std::string describe();
  Outcome attach(const std::vector<std::string>& descriptions, Deadline deadline);

  const std::vector<Rank>& ranks() const { return ranks_; }
  Rank size() const { return static_cast<Rank>(ranks_.size()); }
  Rank index() const { return index_; }  // of this rank among the members
  Segment& control() { return *control_; }
  std::uint64_t gossip_offset() const { return gossip_offset_; }
  void remove();

  // What may be under way at once. Exchanges have slots and generations of their own.
  enum class Kind : std::uint8_t { kExchange, kReduce, kBarrier };

  // A thread's place in the group's collectives of one kind: taken before anything changes, kept as
  // long as a call lasts, over all its attempts. A second thread is refused at once (kMismatch) and
  // has touched nothing.
  class Inside {
   public:
    Inside(Group& group, Kind kind, const std::string& what);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    Group& group_;
    const Kind kind_;
    std::atomic<bool>& taken_;
  };

  // gaspi_barrier. kTimeout: call it again, it goes on. Throws kPeerLost if a member is gone
  // without which it cannot end; no barrier of this group ends after that.
  Outcome barrier(const Inside& inside, Deadline deadline);

  // Every member's bytes, by member, in pieces of slot_bytes(kind). `what` names the call; members
  // whose `fingerprint` differs get a mismatch error naming them. `kind`: an exchange.
  Outcome allgather(const Inside& inside, Kind kind, const std::string& what,
                    std::uint64_t fingerprint, std::span<const std::byte> mine, Deadline deadline,
                    std::vector<std::string>& all);
  static std::size_t slot_bytes(Kind kind);

  // By whoever is inside exchanges. gaspi_segment_create; with memory of the caller's, `bound`,
  // gaspi_segment_bind and gaspi_segment_use. Collective: all members, each with `bytes` and
  // `notifications` of its own. kTimeout: call it again with the same arguments.
  Outcome create_segment(const Inside& inside, std::uint64_t bytes, std::uint32_t notifications,
                         SegmentHome home, Deadline deadline, std::shared_ptr<Segment>& created);
  // The caller's memory of a creation that ended half way, or null: peers may know it already.
  const std::byte* half_bound() const { return creation_ ? creation_->home.bound : nullptr; }

  // For callers that make one attempt.
  Outcome barrier(Deadline deadline) {
    return barrier(Inside(*this, Kind::kBarrier, "barrier"), deadline);
  }
  Outcome allgather(Kind kind, const std::string& what, std::uint64_t fingerprint,
                    std::span<const std::byte> mine, Deadline deadline,
                    std::vector<std::string>& all) {
    return allgather(Inside(*this, kind, what), kind, what, fingerprint, mine, deadline, all);
  }
  Outcome create_segment(std::uint64_t bytes, std::uint32_t notifications, SegmentHome home,
                         Deadline deadline, std::shared_ptr<Segment>& created) {
    return create_segment(Inside(*this, Kind::kExchange, "segment"), bytes, notifications, home,
                          deadline, created);
  }
  // gaspi_segment_delete, of this rank's copy alone. kSegment: it was deleted before.
  static void delete_segment(Context& context, Segment& segment);

  // --- world only: messages of up to options.passive_bytes, from any rank to any rank, in order
  // (gaspi_passive_send, gaspi_passive_receive). Any thread may call, several at once. kBuffer: too
  // long. kPeerLost: the receiver, or every possible sender, has left.
  Outcome passive_send(Rank peer, std::span<const std::byte> message, Deadline deadline);
  Outcome passive_receive(Deadline deadline, Rank& sender, std::string& message);

  // What a wait that timed out is still waiting for, in words.
  std::string missing_in_barrier() const;
  std::string missing_in_allgather(Kind kind) const;

 private:
  struct Exchange {
    std::uint64_t slots_offset = 0;
    std::uint32_t first_id = 0;
    std::uint32_t generation = 0;
    // Of the call under way: what it is, and which piece of it.
    bool under_way = false;
    std::string what;
    std::uint64_t fingerprint = 0;
    std::string mine;
    std::vector<std::string> all;  // the pieces before
    std::size_t piece = 0;
    std::uint64_t bytes_to_send = 0;
    std::size_t next_to_send = 0;
  };
  struct Header {
    std::uint64_t fingerprint;
    std::uint64_t total;  // bytes, of all pieces
    std::uint32_t bytes;
    std::uint32_t generation;
    char what[32];
  };
  // What a member says before its description of a copy, and when it has attached all others.
  struct Head {
    SegmentId id;
    std::uint32_t on_device;
    std::uint32_t fault;  // an ErrorKind, of which the words follow; or kNoFault
  };
  static constexpr std::uint32_t kNoFault = UINT32_MAX;
  struct Creation {
    std::shared_ptr<Segment> segment;  // null: this rank has none, by `fault`
    std::uint64_t bytes;
    std::uint32_t notifications;
    SegmentHome home;
    std::string description;
    std::string verdict;                  // empty: no segment of the group is on a device
    std::vector<RemoteSegment> attached;  // until all have given their verdict
    std::exception_ptr fault;
  };
  // Ids on the group's board: barrier rounds first, then by which of them the one who owes it tells
  // that it cannot go on, then one per member for each exchange.
  static constexpr std::uint32_t kBarrierRounds = 16;
  static constexpr std::size_t kMostMembers = std::size_t{1} << kBarrierRounds;
  // Of generations, which are never 0.
  static std::uint32_t following(std::uint32_t generation) {
    return generation + 1 == 0 ? 1 : generation + 1;
  }
  void begin_piece(Exchange& exchange, Kind kind);
  // True when all pieces have come. Throws where others are in another call.
  bool take_piece(Exchange& exchange, Kind kind);
  void begin_creation(std::uint64_t bytes, std::uint32_t notifications, SegmentHome home);
  void take_descriptions(const std::vector<std::string>& all, const char* what);
  void forget(const std::vector<std::string>& all, Deadline deadline) const;
  std::vector<Head> require_all(const std::vector<std::string>& all, const char* what) const;
  std::vector<RemoteSegment> attach(const std::vector<std::string>& descriptions,
                                    std::size_t skipped, Deadline deadline);
  Outcome settle(Segment& segment, std::vector<RemoteSegment>& remotes, Deadline deadline);
  [[noreturn]] void refuse_another(const Exchange& exchange, const std::string& what) const;
  std::uint64_t slot_offset(const Exchange& exchange, Kind kind, Rank member) const;
  bool send(Rank member, std::uint64_t offset, std::uint64_t bytes, std::uint64_t target_offset,
            std::uint32_t id, std::uint32_t value);
  bool raised(std::uint32_t id, std::uint32_t generation) const;
  // This rank cannot end its barrier, since `behind` is gone, or waits for `gone`.
  void tell_barrier_lost(Rank gone, Rank behind);
  void check_members(const char* what) const;

  Context& context_;
  std::vector<Rank> ranks_;
  Rank index_ = -1;
  const bool world_;
  std::atomic<bool> deleted_{false};
  std::shared_ptr<Segment> control_;
  std::atomic<bool> inside_[3]{};  // by kind

  std::uint32_t barrier_generation_ = 0;
  bool barrier_under_way_ = false;
  bool barrier_sent_ = false;
  std::uint32_t barrier_round_ = 0;

  Exchange exchanges_[2];
  std::optional<Creation> creation_;    // of a segment, under way
  std::vector<RemoteSegment> remotes_;  // of it, or of control_, where not all are settled yet

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
