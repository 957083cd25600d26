// This rank's requests to a peer on one queue, and the peer's answers.
#pragma once

#include <functional>

#include "transport/faults.hpp"
#include "transport/tcp/stream.hpp"

namespace pgasdl {

// A queue to all peers: what has not been acknowledged, and the losses that complete() reports.
struct TcpQueue {
  std::atomic<std::uint64_t> n_posted{0};
  std::atomic<std::uint64_t> n_asked{0};  // of those, when an acknowledgement was last asked for
  std::atomic<std::uint64_t> n_over{0};   // taken or lost
  PeerFaults faults;

  bool complete() {
    faults.raise();
    const std::uint64_t over = n_over.load(std::memory_order_acquire);
    return over == n_posted.load(std::memory_order_relaxed);
  }
};

class TcpRequests final : public TcpStream {
 public:
  // What the transport is told, by any thread.
  struct Listener {
    std::function<void()> advanced;            // something is over
    std::function<void(TcpRequests&)> closed;  // by the peer; end() must follow
    std::function<void()> ended;
  };
  TcpRequests(TcpSocket socket, int events, Rank peer, TcpQueue& queue, std::uint32_t generation,
              const Listener& listener);

  // Post; false: there is no room, or the peer has just closed the connection. Throw kPeerLost
  // after its end.
  bool write(std::span<const Transfer> transfers, const RemoteFlag* flag);
  bool read(std::span<const Transfer> transfers, const LocalFlag* flag);
  bool atomic(const Atomic& atomic);
  // Ends the connection, and reports no loss: the peer's is known, or, `renewed`, there will be
  // another connection.
  void drop(const std::string& why, bool renewed);
  // All has left.
  bool sent();
  // Asks for an acknowledgement of all that was posted so far.
  void ask();
  // It ended before a read or an atomic was answered; once.
  bool lost_answers() { return lost_answers_.exchange(false); }
  // The requests so far, and whether they have been taken or were lost.
  std::uint64_t mark();
  bool reached(std::uint64_t mark) const;
  // The peer's word about its end.
  std::uint64_t farewell() const { return farewell_.load(std::memory_order_relaxed); }

 private:
  // What the next answer is for.
  struct Expected {
    std::byte* target;  // of a read's bytes
    std::uint64_t bytes;
    std::uint64_t* old;  // of an atomic; then there is no target
    FlagWord* flag;
    std::uint32_t value;
    std::shared_ptr<const void> keep;
    std::uint64_t number;  // of this request, counted from 1
    std::uint64_t first;   // of the requests that were posted together with it

    bool answered_by(const TcpFrame& frame) const;
  };
  bool admits();
  void post(const TcpFrame& frame, const std::byte* data, std::shared_ptr<const void> keep);
  void ask_locked();
  void refused(const char* what);
  void over(std::uint64_t requests);
  void closed(const std::string& why) override;
  void ended_locked(const std::string& why) override;
  std::byte* begin(const TcpFrame& frame, std::shared_ptr<const void>& keep) override;
  void finish(const TcpFrame& frame) override;

  TcpQueue& queue_;
  const std::uint64_t generation_;
  const Listener& listener_;
  std::atomic<bool> closing_{false};
  std::atomic<std::uint64_t> farewell_{0};
  std::atomic<std::uint64_t> n_taken_{0};
  std::atomic<bool> lost_answers_{false};

  // --- with the lock of what leaves
  std::uint64_t n_posted_ = 0;
  std::uint64_t n_asked_ = 0;
  std::deque<Expected> expected_;
  std::uint64_t refused_ = 0;  // the newest read that was refused
  std::string why_;            // it ended
  bool dropped_ = false;
  bool renewed_ = false;
};

}  // namespace pgasdl
