// The record of who is alive, and the alarm that ends every wait when somebody is not.
//
// Each rank has a ControlBlock that all ranks of the machine map. Whoever notices a loss first
// writes it into everybody's state vector and raises everybody's alarm; every spin reads its own.
// Gossip carries the news of ranks that are not mapped, both ways.
#pragma once

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

struct ControlBlock {
  WakeWord wake_word;
  alignas(64) std::atomic<std::uint64_t> heartbeat;
  alignas(64) std::atomic<std::uint32_t> alarm;  // how many losses were reported to this rank
  std::atomic<std::uint32_t> finder;             // 1 + the rank that reported the last one
  std::atomic<std::uint32_t> first;              // 1 + the rank lost first since survivors(), or 0
  std::atomic<std::uint32_t> gone;               // how many ranks left, in whatever way
  std::atomic<std::uint32_t> reason_bytes;       // of its error, once it has failed
  char reason[188];
  // followed by the state vector, one byte per rank
  std::atomic<Health>* states() { return reinterpret_cast<std::atomic<Health>*>(this + 1); }
  static std::size_t bytes(Rank size) { return sizeof(ControlBlock) + static_cast<size_t>(size); }
};

// A flag that announces to a peer that this rank cannot go on.
struct AbortNotice {
  QueueId queue;  // that of the flags before it, which it must not overtake
  Rank peer;
  RemoteFlag flag;
  std::shared_ptr<Segment> board;
};

class Liveness {
 public:
  Liveness(Rank rank, Rank size, const Options& options);
  ~Liveness();

  // Starts the service thread; it polls the transport's descriptor from now on, and looks after
  // streams.
  void start(Transport* transport, std::function<void()> look_after_streams);
  // From here on peers are watched. `blocks`: null for peers that are not mapped, of whom `gossip`
  // tells (null if there are none). `pids`: 0 for a thread of this process or of another machine.
  void watch(std::vector<ControlBlock*> blocks, std::span<const pid_t> pids,
             std::unique_ptr<Gossip> gossip);
  void stop();

  // --- from here on: any thread. After start() the members above belong to one thread.
  // Cheap, in every spin: a loss was reported that survivors() has not acknowledged.
  bool alarmed() const {
    return own_ != nullptr && own_->alarm.load(std::memory_order_relaxed) !=
                                  acknowledged_.load(std::memory_order_relaxed);
  }
  // Throws, naming the losses that survivors() has not accepted; returns if there is none, which
  // is so for the moment in which a report of a loss accepted already is not complete.
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
  // Some rank was lost or has left: only then may a wait be without hope.
  bool somebody_gone() const {
    return own_ != nullptr && own_->gone.load(std::memory_order_relaxed) != 0;
  }
  // Its loss was acknowledged.
  bool accepted(Rank rank) const {
    return accepted_[static_cast<std::size_t>(rank)].load(std::memory_order_relaxed);
  }
  void acknowledge();
  // The error that ends this rank, for those that map its block; before it is reported. Once.
  void give_reason(std::string_view reason);
  // Tells every rank (this one too) that `lost` is no more.
  void report(Rank lost, Health how);
  // Takes note of what `peer` has said of its own end, which may have come just now.
  void hear(Rank peer);
  // Kills the process of a rank of this machine, unless it has ended.
  void kill(Rank peer);
  // Its process, or what connects us with it, has ended: it died, unless it has said otherwise.
  void note_end(Rank peer);
  // Tells every rank of the losses this one knows, before it leaves because of them: whoever
  // reported them may not have come to all yet, and must not find us gone without the reason.
  void pass_on();
  // Posts it at once if the queue takes it, else by the service thread as soon as it does.
  void announce(AbortNotice notice);
  // Until all notices are posted: before this rank leaves.
  void finish_announcing(Deadline deadline);
  // Tells those that are not mapped what this rank's state vector says, its own end above all.
  void take_leave(Deadline deadline);
  WakeWord* wake_word() { return own_ == nullptr ? nullptr : &own_->wake_word; }

 private:
  void run();
  void watch_process(std::size_t peer, pid_t pid);
  void look_at_processes();
  bool take_note(std::size_t peer);
  void look_at_heartbeats();
  void learn(Rank of, Health announced);
  void exchange_gossip();
  void announce_gossip();
  bool post(const AbortNotice& notice);
  bool post_abort_notices();  // true: all are posted
  void judge(Rank peer, std::uint64_t seen);
  std::string own_silence() const;
  std::string in_words(Rank lost) const;
  [[noreturn]] void refuse(Rank peer, const char* operation) const;

  const Rank rank_;
  const Rank size_;
  const Options options_;
  Transport* transport_ = nullptr;
  std::function<void()> look_after_streams_;
  UniqueFd wake_;     // eventfd: stop, or peers to watch were added
  UniqueFd endings_;  // epoll: tells which of many processes have ended, at the price of one
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  ControlBlock* own_ = nullptr;
  std::atomic<std::uint32_t> acknowledged_{0};           // so many losses were accepted,
  const std::unique_ptr<std::atomic<bool>[]> accepted_;  // and of these ranks

  std::mutex watch_mutex_;  // of what follows
  std::vector<ControlBlock*> blocks_;
  std::vector<pid_t> pids_;
  std::vector<ProcessWatch> processes_;
  std::vector<std::size_t> unpolled_;  // peers whose process has to be looked at
  std::optional<Heartbeats> heartbeats_;
  std::atomic<Clock::time_point> last_beat_{};  // of this rank
  std::atomic<Nanoseconds> longest_silence_{};
  std::unique_ptr<Gossip> gossip_;

  std::mutex notices_mutex_;
  std::vector<AbortNotice> abort_notices_;  // not posted yet
};

}  // namespace pgasdl
