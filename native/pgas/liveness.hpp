// Records who is alive, and raises the alarm that ends every wait after a loss.
//
// Each rank has a ControlBlock that all ranks of the machine map. The rank that notices a loss
// first writes it into every rank's state vector and raises every rank's alarm; every spin reads
// its own alarm. Gossip carries the news to and from ranks that are not mapped.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "pgas/gossip.hpp"
#include "pgas/health.hpp"
#include "pgas/heartbeats.hpp"
#include "pgas/options.hpp"
#include "sys/process.hpp"
#include "sys/wake_word.hpp"
#include "transport/transport.hpp"

namespace pgasdl {

// A line of text for the ranks that map it, which may find it half written.
class SharedLine {
 public:
  void set(std::string_view text);
  std::string get() const;

 private:
  static constexpr std::size_t kBytes = 96;
  std::atomic<std::uint64_t> words_[kBytes / sizeof(std::uint64_t)];
};

// A collective that a rank has bound, for peers that find a flag of it where they run another one.
struct SharedPlan {
  std::atomic<std::uint64_t> fingerprint, first_notification;  // as BoundPlan has them
  SharedLine what;
};

struct ControlBlock {
  WakeWord wake_word;
  alignas(64) std::atomic<std::uint64_t> heartbeat;
  alignas(64) std::atomic<std::uint32_t> alarm;  // the number of losses reported to this rank
  std::atomic<std::uint32_t> finder;             // 1 + the rank that reported the last one
  std::atomic<std::uint32_t> first;              // 1 + the first rank lost since survivors(), or 0
  std::atomic<std::uint32_t> gone;               // the number of ranks that left, in whatever way
  std::atomic<std::uint32_t> reason_bytes;       // of this rank's error, once it has failed
  char reason[188];
  SharedLine wait;  // what this rank waits for, once it sleeps
  static constexpr std::uint32_t kPlans = 16;
  std::atomic<std::uint32_t> n_plans;  // the number of those noted so far; the newest are kept
  SharedPlan plans[kPlans];
  // followed by the state vector, one byte per rank
  std::atomic<Health>* states() { return reinterpret_cast<std::atomic<Health>*>(this + 1); }
  static std::size_t bytes(Rank size) { return sizeof(ControlBlock) + static_cast<size_t>(size); }
};

// A flag that announces to a peer that this rank cannot continue.
struct AbortNotice {
  QueueId queue;  // the queue of earlier flags, which the notice must not overtake
  Rank peer;
  RemoteFlag flag;
  std::shared_ptr<Segment> board;
};

class Liveness {
 public:
  Liveness(Rank rank, Rank size, const Options& options);
  ~Liveness();

  // Starts the service thread, which polls the transport's descriptor and looks after streams.
  void start(Transport* transport, std::function<void()> look_after_streams);
  // Begins to watch peers. `blocks`: null for peers that are not mapped, whose news `gossip` brings
  // (null if there are none). `pids`: 0 for a thread of this process or a rank of another machine.
  void watch(std::vector<ControlBlock*> blocks, std::span<const pid_t> pids,
             std::unique_ptr<Gossip> gossip);
  void stop();

  // --- from here on: any thread. After start(), one thread may call the members above. A loss was
  // reported that survivors() has not accepted. Cheap: every spin calls it.
  bool alarmed() const {
    return own_ != nullptr && own_->alarm.load(std::memory_order_relaxed) !=
                                  acknowledged_.load(std::memory_order_relaxed);
  }
  // Throws, naming the losses that survivors() has not accepted. Returns if there is none: for a
  // moment, while the report of an accepted loss is still incomplete.
  void raise_alarm(const std::string& during) const;
  // Throws if `peer` can no longer be reached: kPeerLost, or kClosed if this rank has left
  // (gaspi_proc_ping).
  void require(Rank peer, const char* operation) const {
    if (health(peer) != Health::kHealthy) [[unlikely]]
      refuse(peer, operation);
  }
  // gaspi_state_vec_get, of one rank.
  Health health(Rank rank) const {
    return own_ == nullptr
               ? Health::kHealthy
               : own_->states()[static_cast<std::size_t>(rank)].load(std::memory_order_acquire);
  }
  bool everybody_left() const;
  // Some rank was lost or has left: only then may an awaited event never come.
  bool somebody_gone() const {
    return own_ != nullptr && own_->gone.load(std::memory_order_relaxed) != 0;
  }
  // survivors() has accepted its loss.
  bool accepted(Rank rank) const {
    return accepted_[static_cast<std::size_t>(rank)].load(std::memory_order_relaxed);
  }
  // Accepts the losses so far; nothing of those ranks lands in memory here any more. Returns those
  // whose processes it ended, since nothing else makes that certain.
  std::vector<Rank> acknowledge();
  // "rank 1 failed (ValueError: ...)": how it ended, with its error if it left one.
  std::string in_words(Rank lost) const;
  // The error that ends this rank, for ranks that map its block. Once, and before the report.
  void give_reason(std::string_view reason);
  // Likewise what this rank waits for, and since when; "": for nothing.
  void note_wait(std::string_view what, Clock::time_point since = {});
  // The wait that was noted has timed out; what it waited for is told until there is another.
  void note_timeout();
  // "rank 0 waits in ... for 3.2 s", or "".
  std::string own_wait() const;
  // "; rank 1 waits in ...": what others wait for, unless it is `own`.
  std::string waits_of_others(std::string_view own = {}) const;
  // Likewise a collective that this rank has bound, or runs although peers run another one.
  void note_plan(std::uint64_t fingerprint, std::uint64_t first_notification,
                 std::string_view what);
  // The words of the newest plan of `peer` for which matches(fingerprint, first_notification).
  template <typename Matches>
  std::string plan_of(Rank peer, Matches&& matches) const {
    const ControlBlock* const block = blocks_[static_cast<std::size_t>(peer)];
    if (block == nullptr) return "";
    const std::uint32_t n = block->n_plans.load(std::memory_order_acquire);
    for (std::uint32_t back = 1; back <= std::min(n, ControlBlock::kPlans); ++back) {
      const SharedPlan& plan = block->plans[(n - back) % ControlBlock::kPlans];
      if (matches(plan.fingerprint.load(std::memory_order_relaxed),
                  plan.first_notification.load(std::memory_order_relaxed))) {
        return plan.what.get();
      }
    }
    return "";
  }
  // Reports to every rank, including this one, that `lost` is gone.
  void report(Rank lost, Health how);
  // Takes note of what `peer` has reported about its own end, possibly just now.
  void hear(Rank peer);
  // Kills the process of a rank of this machine, unless it has ended.
  void kill(Rank peer);
  // The peer's process or its connection has ended: it died, unless it has reported another end.
  void note_end(Rank peer);
  // Passes this rank's known losses on to every rank before it leaves because of them: the first
  // report may not have reached all, and they must not see this rank leave without the reason.
  void pass_on();
  // Posts the notice at once if the queue takes it; else the service thread does so later.
  void announce(AbortNotice notice);
  // Waits until all notices are posted; called before this rank leaves.
  void finish_announcing(Deadline deadline);
  // Sends the state vector, which includes this rank's own end, to ranks that are not mapped.
  void take_leave(Deadline deadline);
  WakeWord* wake_word() { return own_ == nullptr ? nullptr : &own_->wake_word; }

 private:
  void run();
  void watch_process(std::size_t peer, pid_t pid);
  void look_at_processes();
  bool take_note(std::size_t peer);
  bool end_process(Rank peer);  // false: it has ended, or is none of this machine
  void look_at_heartbeats();
  void learn(Rank of, Health announced);
  void exchange_gossip();
  void announce_gossip();
  bool post(const AbortNotice& notice);
  bool post_abort_notices();  // true: all are posted
  void judge(Rank peer, std::uint64_t seen, bool begun = false);
  std::string own_silence() const;
  [[noreturn]] void refuse(Rank peer, const char* operation) const;

  const Rank rank_;
  const Rank size_;
  const Options options_;
  Transport* transport_ = nullptr;
  std::function<void()> look_after_streams_;
  UniqueFd wake_;     // eventfd: wakes the thread to stop, or to watch new peers
  UniqueFd endings_;  // epoll over processes that end: one descriptor to poll, not one each
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  ControlBlock* own_ = nullptr;
  std::atomic<Clock::time_point> waits_since_{};
  std::mutex plans_mutex_;                               // of threads that bind plans
  std::atomic<std::uint32_t> acknowledged_{0};           // how many losses were accepted,
  const std::unique_ptr<std::atomic<bool>[]> accepted_;  // and of which ranks

  std::mutex watch_mutex_;  // guards the members below
  std::vector<ControlBlock*> blocks_;
  std::vector<pid_t> pids_;
  std::vector<ProcessWatch> processes_;
  std::vector<std::size_t> unpolled_;  // peers whose processes have no descriptor to poll
  std::optional<Heartbeats> heartbeats_;
  std::atomic<Clock::time_point> last_beat_{};  // of this rank
  std::atomic<Nanoseconds> longest_silence_{};
  std::unique_ptr<Gossip> gossip_;

  std::mutex notices_mutex_;
  std::vector<AbortNotice> abort_notices_;  // not yet posted
};

}  // namespace pgasdl
