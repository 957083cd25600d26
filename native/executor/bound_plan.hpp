// A plan bound to memory: every address is resolved, every bound is checked. An Execution has one
// for each of its phases. A notification's value is the execution's generation and a tag, a hash of
// what all ranks must agree on: no old flag or other plan's flag is mistaken for the expected one.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "executor/array_copies.hpp"
#include "executor/directory.hpp"
#include "executor/numbering.hpp"
#include "executor/plan.hpp"
#include "memory/device_stream.hpp"
#include "pgas/context.hpp"
#include "reduce/reduce.hpp"
#include "reduce/staging.hpp"

namespace pgasdl {

// Where one rank's copy of a plan's buffer begins.
struct BufferHome {
  std::shared_ptr<Segment> segment;
  std::uint64_t offset = 0;  // bytes
};

struct BufferBinding {
  std::shared_ptr<Segment> segment;  // holds this rank's copy, which begins
  std::uint64_t offset = 0;          // here
  DType dtype = DType::kF32;
  std::vector<BufferHome> homes{};         // of each of the plan's ranks; empty: all as this one's
  std::shared_ptr<Directory> directory{};  // where each execution announces the copies' places
};

class BoundPlan {
 public:
  // `ranks`: the world rank of each of the plan's ranks. `board`: the segment whose notifications
  // [first_notification, + plan.notifications) are this plan's on every rank. `fingerprint`: a hash
  // of what all ranks must agree on (plan, count, dtype); a flag with another tag is an error, not
  // a hang. Each flag has 20 bits of its own hash, which changes with the generation: a mismatch
  // that one flag misses, one time in a million, shows at the next flag. `op`: how the plan's
  // reductions combine several sources; a device only adds. `what`: what `fingerprint` stands for,
  // in words.
  BoundPlan(Context& context, const Plan& plan, std::vector<BufferBinding> buffers,
            std::vector<Rank> ranks, std::shared_ptr<Segment> board,
            std::uint64_t first_notification, std::uint64_t fingerprint,
            ReduceOp op = ReduceOp::kSum, std::string what = {});

  // The address of this rank's copy of the array, the buffer "data"; null if the plan has none.
  std::byte* data() const { return data_ < 0 ? nullptr : own_[static_cast<std::size_t>(data_)]; }
  std::size_t n_buffers() const { return buffers_.size(); }
  // The GPU that holds the plan's buffers, or kHost.
  int device() const { return device_; }
  // Moves that copy, if only this rank uses it, to another address; not while the plan runs.
  void rebase(std::byte* address);
  // Likewise for every buffer, by its number; 0: no change.
  void rebase(std::span<const std::uintptr_t> addresses);
  // The directory in which peers look it up, or null.
  Directory* directory() const;
  // The last execution reduced nothing: some rank's array lies in no segment of the directory.
  // Every rank that reduces notices that.
  bool declined() const { return declined_; }
  void set_declined(bool declined) { declined_ = declined; }

  // A GPU's stream can make all steps, in one order and without a host.
  bool by_stream() const { return by_stream_; }

  // A part of the array, and its lanes, which follow those of the piece before.
  struct Piece {
    std::uint64_t count;
    std::uint32_t lanes;
  };
  // In each execution the plan works on a copy of an array, which a GPU makes in these pieces. A
  // plan with a buffer of weights sends those back.
  void copy_array(int device, const std::vector<Piece>& pieces);
  // Null without copy_array().
  ArrayCopies* array_copies() const { return array_copies_.get(); }

  ~BoundPlan();

  const std::string& name() const { return name_; }
  // What it makes, in a few words.
  const std::string& title() const { return title_; }
  const std::vector<Rank>& ranks() const { return ranks_; }
  // Bytes that this rank writes, reads and sends in one execution.
  std::uint64_t bytes_moved() const { return bytes_moved_; }
  // Adds the execution that has ended to the context's counters.
  void count_traffic() const;
  // All its notifications are below this one.
  std::uint64_t end_notification() const { return first_notification_ + notifications_; }
  // When the last execution began and ended, in ticks().
  std::uint64_t began() const { return began_; }
  std::uint64_t ended() const { return ended_; }

 private:
  friend class Executor;
  class Binder;
  // Aligned to a cache line: a wait looks at one line, a transfer needs two.
  struct alignas(64) Step {
    PlanStep::Kind kind;
    bool flagged = false;
    bool on_device = false;  // a GPU's sources and destinations, also of a kPut
    Rank peer = -1;
    const FlagWord* word = nullptr;
    std::uint64_t salt = 0;  // of its notification's tag
    std::int64_t notification = -1;
    RemoteFlag flag{};
    double scale = 1;
    std::uint64_t count = 0;
    Transfer transfer{};
    struct {
      std::byte* to = nullptr;
      const std::byte* from = nullptr;
    } device_copy;  // of `count` bytes; for a kPut into a GPU's memory
    struct {
      std::uint64_t count = 0;
      std::uint64_t source_step = 0;  // bytes
      std::uint64_t target_step = 0;
    } rows;                     // of a kCopy
    std::uint64_t pass = 0;     // at most this many elements or rows per call of progress()
    std::uint64_t staging = 0;  // bytes of a plain copy into an inbox that peers load from
    std::uint64_t offset = 0;   // kCall: of the span, in elements
    std::vector<Source> sources;
    std::vector<Destination> destinations;
    // By source, then by destination: the buffer if it is this rank's copy, else -1.
    std::vector<std::int32_t> own;
    struct LookedUp {
      std::size_t number;  // likewise: of a source or a destination
      std::uint32_t buffer;
      Rank peer;
      std::uint64_t offset;  // bytes
      std::uint64_t needed;  // of the whole buffer
    };
    std::vector<LookedUp> looked_up;  // peers announce the places of these
    std::string hook;
  };
  struct Lane {
    std::vector<Step> steps;
    std::size_t at = 0;
    std::uint64_t progress = 0;                  // kReduce: elements done; kCopy: rows
    std::vector<Destination> part_destinations;  // of a reduction done in passes
    std::vector<Source> part_sources;
    enum class Call : std::uint8_t { kNone, kAsked, kTaken, kAnswered } call = Call::kNone;
    // The state of the current step's work on the GPU, and the event at its end;
    // also of the work that the program enqueued before it answered a kCall.
    enum class Work : std::uint8_t { kNone, kEnqueued, kEnded } work = Work::kNone;
    std::unique_ptr<DeviceMoment> work_end;
  };

  // Which notifications each stalled lane waits for, and which ranks owe them.
  std::string missing() const;
  // Throws if a rank that owes a notification is gone, or waits for a lost one as it announced.
  void require_peers(const Numbering& numbering) const;
  // Throws if a notification of the numbering shows that ranks run different plans as this
  // execution, or that a living rank takes no more part.
  void require_same_plan(const Numbering& numbering) const;
  // Announces that this rank gave up, for a reason that Numbering describes, to every rank that may
  // wait for it now or in a later execution. `boards_stay`: no peer can have deleted its board.
  void announce_given_up(const Numbering& numbering, std::uint32_t why,
                         bool boards_stay = false) const;
  // The announcement of the rank at this place of `ranks` when it gave up, or 0.
  std::uint32_t announced_by(const Numbering& numbering, std::size_t of) const {
    return board_->local().board[numbering.given_up_id(of)].load(std::memory_order_acquire);
  }
  // Likewise, but 0 if the rank takes part in this execution, as in all before the one that it gave
  // up. On a GPU earlier executions count as given up, too: the rank's stream, once released, may
  // have overwritten their results.
  std::uint32_t left_by(const Numbering& numbering, std::size_t of) const {
    const std::uint32_t announced = announced_by(numbering, of);
    return concerns(announced, device_ == kHost ? generation_ : 0) ? announced : 0;
  }
  Error given_up_by(std::size_t of, std::uint32_t announced) const;
  // That rank announced that ranks run different plans as this execution.
  bool announced_mismatch(const Numbering& numbering, std::size_t of) const {
    return announced_by(numbering, of) == (kMismatched | generation_);
  }
  Error mismatch_announced_by(std::size_t of) const;
  // The end of a mismatch's message, with what another rank runs, if it has said so.
  std::string must_agree(Rank other = -1, const std::string& theirs = {}) const;
  // Likewise, by the value that a notification has.
  std::string must_agree(std::uint64_t notification, std::uint32_t seen) const;
  // `mark`: a value that all ranks must agree on in this execution, besides the fingerprint.
  void begin(std::uint32_t generation, std::uint64_t mark = 0);
  // Advances as far as possible without blocking; true if anything moved. After an exception, which
  // says what failed, nothing may advance any more. `lock` is free while work is enqueued on a GPU.
  bool advance(Lock& lock);
  bool over() const {
    return lanes_left_ == 0 && (array_copies_ == nullptr || array_copies_->over());
  }
  // Lets a stream make the execution that began (see by_stream()): all steps are enqueued, and
  // peers' streams do the rest. `from`: is copied to data() first; `to`: gets a copy of data() at
  // the end; or null. advance() then only looks at the progress.
  void enqueue(const StreamOrder& order, const std::byte* from, std::byte* to, std::uint64_t bytes);
  bool enqueued() const { return enqueued_; }
  // Lets the stream continue by raising what it waits for, as no peer will. Returns whether it is
  // through; until then call it again: a peer in another collective may raise another value
  // meanwhile.
  bool release();
  // Throws if a peer announced that it gave up: flags that it has raised since prove nothing.
  void require_nobody_gave_up(const Numbering& numbering) const;
  // Waits until no work on a GPU or the transport is under way: memory may go then.
  void drain();
  // The part of drain() that may take long on a GPU; changes nothing.
  void await_device() const;
  void drain_stream();
  bool is_by_stream() const;
  void rebase_buffer(std::int32_t number, std::byte* address);
  bool advance_lane(std::size_t number, Lock& lock);
  bool arrived(const Step& step) const;
  void look_up(Step& step);
  bool reduce_some(Lane& lane, const Step& step);
  bool copy_some(Lane& lane, const Step& step) const;
  // Enqueues the step's work on the GPU, once; true when it has ended.
  bool device_done(std::size_t lane_number, const Step& step, Lock& lock);
  void enqueue_work(const Step& step, cuda::Stream stream) const;
  void enqueue_step(const Step& step, cuda::Stream stream) const;
  // Derives the stream's progress from flags; true if it moved.
  bool follow_stream();
  std::uint32_t value(std::uint64_t salt) const { return value(salt, hash_); }
  std::uint32_t value(std::uint64_t salt, std::uint64_t hash) const {
    return (generation_ << kTagBits) | static_cast<std::uint32_t>((hash * salt) >> (64 - kTagBits));
  }
  std::uint64_t hash_of(std::uint64_t fingerprint) const;
  static std::uint64_t salt(std::uint64_t notification);

  Context& context_;
  const std::string name_;
  const std::int32_t data_;     // number of the buffer "data", or -1
  const std::int32_t weights_;  // likewise
  const std::vector<BufferBinding> buffers_;
  std::vector<std::byte*> own_;  // the present addresses of this rank's copies, by buffer
  const std::shared_ptr<Segment> board_;
  const std::uint64_t first_notification_;
  const std::uint32_t notifications_;
  const std::uint64_t fingerprint_;
  const std::string what_;
  const std::string title_;
  const std::vector<Rank> ranks_;  // of the world
  const ReduceOp op_;
  std::vector<Lane> lanes_;
  std::uint64_t bytes_moved_ = 0;
  // The traffic of one execution by Puts, and by reductions that load from or store to peers'
  // memory.
  std::vector<PeerTraffic> put_traffic_;
  std::vector<PeerTraffic> reduce_traffic_;
  StagingCopy stage_;
  std::size_t lanes_left_ = 0;
  bool declined_ = false;
  std::uint32_t generation_ = 0;
  std::uint64_t mark_ = 0;
  std::uint64_t hash_ = 0;  // of fingerprint, mark and generation
  std::uint64_t began_ = 0;
  std::uint64_t ended_ = 0;
  bool call_pending_ = false;
  int device_ = kHost;
  std::size_t first_stream_ = 0;  // of the shared streams, for the first lane
  bool by_stream_ = false;
  bool enqueued_ = false;                     // a stream makes the current execution
  std::unique_ptr<DeviceMoment> stream_end_;  // of the last execution that a stream made
  std::unique_ptr<ArrayCopies> array_copies_;
};

}  // namespace pgasdl
