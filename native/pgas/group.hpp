// Ranks that act together: barrier, small all-gathers (on which segment creation and the small
// allreduce stand), and for the world group also passive messages.
//
// All data travel as writes and notifications on one internal segment per group, so any transport
// works. Every collective is resumable: if a call ends early by its deadline or an error, calling
// it again with the same arguments continues it; until then other calls of its kind are refused.
// One collective of each kind may be under way at a time, by one thread; different kinds overlap.
//
// Barriers and all-gathers use the steps of dissemination.hpp. In groups of up to 16 an all-gather
// has one base, so every member sends to every other. In larger groups its radix is 2, as in every
// barrier: a rank is connected only with members 2^k ahead and behind, and blocks are passed on.
//
// Why slots may be reused: a member sends generation t + 1 only after it has copied out all of
// generation t, and no member finishes t + 1 before every member's block of t + 1 has reached it,
// directly or passed on. So when a member writes t + 2 over the slots of t (slots alternate), all
// members have finished t and read its slots. Those slots are no source any more either: whatever a
// member sent or passed on in t had arrived, with its flag, before the receiver finished t.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "pgas/counters.hpp"
#include "pgas/dissemination.hpp"
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

  // --- setup: describe() of all members goes to attach() of all. kTimeout: call it again.
  std::string describe();
  Outcome attach(const std::vector<std::string>& descriptions, Deadline deadline);

  const std::vector<Rank>& ranks() const { return ranks_; }
  Rank size() const { return static_cast<Rank>(ranks_.size()); }
  Rank index() const { return index_; }  // of this rank among the members
  Segment& control() { return *control_; }
  std::uint64_t gossip_offset() const { return gossip_offset_; }
  void remove();

  // The kinds of collectives that may overlap. Each kind has its own slots and generations.
  enum class Kind : std::uint8_t { kExchange, kReduce, kBarrier };

  // Bytes of the group's own segment on each member, in the order in which they lie there. The
  // world group has those of a group of all ranks.
  struct Memory {
    std::uint64_t states = 0;  // the control block: the known states of ranks
    std::uint64_t gossip = 0;
    std::uint64_t exchange = 0;  // slots of all-gathers, by kind
    std::uint64_t reduce = 0;
    std::uint64_t mail = 0;   // mailboxes, and outgoing messages
    std::uint32_t flags = 0;  // of the board: a number of notifications
    std::uint64_t data() const { return states + gossip + exchange + reduce + mail; }
  };
  static Memory memory(std::size_t members, bool world, std::uint64_t passive_bytes);
  // The steps of a collective: to which members a member sends, and from which it receives.
  static std::vector<DisseminationStep> steps(Kind kind, std::size_t members) {
    const bool direct = kind != Kind::kBarrier && members <= kMostDirect;
    return dissemination(members, direct ? std::max<std::size_t>(members, 2) : 2);
  }

  // A thread's claim on the group's collectives of one kind: taken before anything changes and held
  // for the whole call, over all its attempts. A second thread is refused at once (kMismatch) and
  // has changed nothing.
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

  // gaspi_barrier. kTimeout: call it again to continue. Throws kPeerLost if a member is gone that
  // it cannot end without; no later barrier of this group ends either.
  Outcome barrier(const Inside& inside, Deadline deadline);

  // Collects every member's bytes, by member, in pieces of slot_bytes(kind). `what` names the call;
  // a member whose `fingerprint` differs causes a mismatch error that names it. `kind`: an
  // exchange. Throws kPeerLost as barrier() does.
  Outcome allgather(const Inside& inside, Kind kind, const std::string& what,
                    std::uint64_t fingerprint, std::span<const std::byte> mine, Deadline deadline,
                    std::vector<std::string>& all);
  std::size_t slot_bytes(Kind kind) const { return slot_bytes(kind, ranks_.size()); }
  static std::size_t slot_bytes(Kind kind, std::size_t members);

  // For the thread inside exchanges. gaspi_segment_create; with the caller's memory, `bound`,
  // gaspi_segment_bind and gaspi_segment_use. Collective: all members call it, each with its own
  // `bytes` and `notifications`. kTimeout: call it again with the same arguments.
  Outcome create_segment(const Inside& inside, std::uint64_t bytes, std::uint32_t notifications,
                         SegmentHome home, Deadline deadline, std::shared_ptr<Segment>& created);
  // The caller's memory of an unfinished creation, or null: peers may know it already.
  const std::byte* half_bound() const { return creation_ ? creation_->home.bound : nullptr; }

  // For callers that make a single attempt.
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
  // gaspi_segment_delete, of this rank's copy only. kSegment: it was deleted before.
  static void delete_segment(Context& context, Segment& segment);

  // --- world only: messages of up to options.passive_bytes, from any rank to any rank, in order
  // (gaspi_passive_send, gaspi_passive_receive). Any thread may call, several at once. kBuffer: too
  // long. kPeerLost: the receiver, or every possible sender, has left.
  Outcome passive_send(Rank peer, std::span<const std::byte> message, Deadline deadline);
  Outcome passive_receive(Deadline deadline, Rank& sender, std::string& message);

  // Which messages a timed-out wait still lacks, in words.
  std::string missing_in_barrier() const;
  std::string missing_in_allgather(Kind kind, std::string_view what) const;

 private:
  // The state of the collectives of one kind.
  struct Course {
    std::vector<DisseminationStep> steps;
    // Ids on the group's board, each + step: the flag that the step has arrived; and, if steps of
    // several bases follow each other, the notice that the sender cannot continue.
    std::uint32_t first_flag = 0;
    std::uint32_t first_word = 0;
    std::uint32_t generation = 0;
    // Counts of this generation's steps. Steps of the next one may have arrived, too.
    std::size_t sent = 0;
    std::size_t arrived = 0;
    Clock::time_point refused_since{};  // the next post, by a broken connection

    void begin() {
      generation = following(generation);
      sent = arrived = 0;
    }
    // Members also wait for each other indirectly.
    bool relayed() const { return !steps.empty() && steps.back().needed != 0; }
    // The end of the steps that are sent together with `step`.
    std::size_t end_of_base(std::size_t step) const {
      std::size_t end = step;
      while (end < steps.size() && steps[end].needed == steps[step].needed) ++end;
      return end;
    }
  };
  static constexpr std::size_t kNoStep = SIZE_MAX;
  struct Exchange {
    std::uint64_t slots_offset = 0;
    Course course;
    // The call under way, and its current piece.
    bool under_way = false;
    std::string what;
    std::uint64_t fingerprint = 0;
    std::string mine;
    std::vector<std::string> all;  // the previous pieces
    std::size_t piece = 0;
    std::vector<Transfer> outgoing;  // the blocks of a step, and which step
    std::size_t outgoing_step = kNoStep;
  };
  struct Header {
    std::uint64_t fingerprint;
    std::uint64_t total;  // bytes, of all pieces
    std::uint32_t bytes;
    std::uint32_t generation;
    char what[32];
  };
  // Precedes a member's description of its copy, and its verdict after attaching all others.
  struct Head {
    std::uint64_t bytes;
    SegmentId id;
    std::uint32_t fault;  // an ErrorKind whose text follows; or kNoFault
    std::uint32_t on_device;
    std::uint32_t reached;  // SegmentHome::reached
  };
  static constexpr std::uint32_t kNoFault = UINT32_MAX;
  struct Creation {
    std::shared_ptr<Segment> segment;  // null: this rank has none, because of `fault`
    std::uint64_t bytes;
    std::uint32_t notifications;
    SegmentHome home;
    std::string description;
    std::string verdict;                  // empty: no segment of the group is on a device
    std::vector<RemoteSegment> attached;  // until all members have given their verdicts
    std::exception_ptr fault;
  };
  // Ids on the group's board: flags of barriers, then their abort notices, then for each exchange
  // one id per member: flags, and abort notices, which only large groups have.
  static constexpr std::uint32_t kBarrierRounds = 16;
  static constexpr std::size_t kMostMembers = std::size_t{1} << kBarrierRounds;
  // The next generation, which is never 0.
  static std::uint32_t following(std::uint32_t generation) {
    return generation + 1 == 0 ? 1 : generation + 1;
  }
  static constexpr std::size_t kMostDirect = 16;
  void begin_piece(Exchange& exchange, Kind kind);
  void gather_blocks(Exchange& exchange, Kind kind, std::size_t step);
  // True when all pieces have come. Throws if others are in another call.
  bool take_piece(Exchange& exchange, Kind kind);
  void begin_creation(std::uint64_t bytes, std::uint32_t notifications, SegmentHome home);
  void take_descriptions(const std::vector<std::string>& all, const char* what);
  void forget(const std::vector<std::string>& all, Deadline deadline) const;
  std::vector<Head> require_all(const std::vector<std::string>& all, const char* what) const;
  std::vector<RemoteSegment> attach(const std::vector<std::string>& descriptions,
                                    std::size_t skipped, int device, Deadline deadline);
  static void handed_over(Segment& segment);
  Outcome settle(Segment& segment, std::vector<RemoteSegment>& remotes, Deadline deadline);
  [[noreturn]] void refuse_another(const Exchange& exchange, const std::string& what) const;
  // Slots are ordered by distance: slot d holds the packed blocks of the step of distance d; the
  // first one holds this rank's own.
  std::uint64_t slot_offset(const Exchange& exchange, Kind kind, std::size_t distance,
                            std::uint32_t generation) const;
  std::uint64_t slot_offset(const Exchange& exchange, Kind kind, std::size_t distance) const {
    return slot_offset(exchange, kind, distance, exchange.course.generation);
  }
  // Calls found(distance, block, sound) for each block from slot `distance` on. It stops at the
  // first block that is not sound. Returns the bytes of all blocks; for an unsound one, only its
  // header's.
  template <typename Found>
  std::uint64_t walk(const Exchange& exchange, Kind kind, std::size_t distance, std::size_t blocks,
                     Found&& found) const;
  // The ranks `distance` members ahead of and behind this one.
  Rank ahead(std::size_t distance) const;
  Rank behind(std::size_t distance) const;
  // Sends the steps of a generation by post(step), which returns whether it was posted, each once
  // the steps that it needs have arrived; then waits until all have arrived.
  Outcome disseminate(Course& course, const std::function<bool(std::size_t)>& post,
                      Deadline deadline, WaitCause cause, const char* what);
  bool arrived(const Course& course, std::size_t step) const;
  std::uint32_t announced(const Course& course, std::size_t step) const;
  void announce_lost(const Course& course, Rank gone);
  bool send(Rank peer, std::span<const Transfer> transfers, std::uint32_t id, std::uint32_t value);
  std::int64_t control_bytes() const;
  bool raised(std::uint32_t id, std::uint32_t generation) const;
  void check_members(const char* what) const;
  // Members that have begun a collective of a kind in which this rank is not, or else what others
  // wait for, unless it is `what`; in words.
  std::string elsewhere(std::string_view what) const;

  Context& context_;
  std::vector<Rank> ranks_;
  Rank index_ = -1;
  const bool world_;
  std::atomic<bool> deleted_{false};
  std::shared_ptr<Segment> control_;
  std::atomic<bool> inside_[3]{};  // by kind

  Course barrier_;
  bool barrier_under_way_ = false;

  Exchange exchanges_[2];
  std::optional<Creation> creation_;    // of a segment, under way
  std::vector<RemoteSegment> remotes_;  // of it, or of control_, until all are settled

  std::uint64_t gossip_offset_ = 0;
  std::uint64_t mail_offset_ = 0;
  std::uint32_t mail_id_ = 0;    // + sender: its message lies in this rank's mailbox
  std::uint32_t credit_id_ = 0;  // + receiver: it has taken this rank's message
  std::mutex passive_mutex_;
  std::vector<std::uint32_t> mail_sent_;      // per receiver: messages sent to it
  std::vector<std::uint32_t> mail_received_;  // per sender
  std::mutex receive_mutex_;
  Rank receive_from_ = 0;  // where the next scan begins, so that no sender starves
};

}  // namespace pgasdl
