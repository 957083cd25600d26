// TCP: for ranks whose machines have nothing but a network.
//
// One connection for each queue and peer, made when first needed (meeting.hpp). A peer takes what
// arrives straight into its segments and raises the flag after it (answers.hpp): by its waits while
// they poll, else by a thread of this transport, so its program takes no part. Bytes travel
// unencrypted and unsigned, as with NCCL and gloo: both ends prove that they know the job's token,
// and a peer's frames reach its segments only, but whoever sees the network sees the data.
#pragma once

#include <thread>
#include <vector>

#include "transport/tcp/answers.hpp"
#include "transport/tcp/meeting.hpp"
#include "transport/tcp/requests.hpp"

namespace pgasdl {

class TcpTransport final : public Transport {
 public:
  // `token`: 16 bytes that only ranks of this job know.
  TcpTransport(Rank rank, Rank size, const std::string& token, const TcpOptions& options);
  ~TcpTransport() override;

  std::string_view name() const override { return "tcp"; }
  std::string describe() const override { return described_; }
  std::string endpoint() override;
  void connect(Rank peer, const std::string& endpoint) override;
  void set_wake_word(Rank peer, WakeWord* wake_word) override;
  std::string publish(LocalSegment& segment, std::span<const Rank> peers) override;
  RemoteSegment attach(Rank peer, const std::string& description, int device,
                       Deadline deadline) override;
  void retract(const LocalSegment& segment) override;
  int service_descriptor() const override { return news_.get(); }
  bool service() override;
  void end_service() override;

  bool post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                  const RemoteFlag* flag) override;
  bool post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                 const LocalFlag* flag) override;
  bool post_atomic(QueueId queue, Rank peer, const Atomic& atomic) override;
  bool complete(QueueId queue) override;
  bool sent(QueueId queue) override;
  bool lost_answers(QueueId queue, Rank peer) override;
  std::uint64_t mark(QueueId queue, Rank peer) const override;
  bool reached(QueueId queue, Rank peer, std::uint64_t mark) const override;
  bool connecting(QueueId queue, Rank peer) const override;
  std::size_t connections(QueueId queue) const override;
  std::optional<QueueId> connected(QueueId queue, Rank peer) const override;
  void send_farewell(Rank peer, std::uint64_t word) override;
  std::uint64_t farewell(Rank peer) const override;
  void reconnect(Rank peer) override;
  void lost(Rank peer) override;
  std::string unreached(Rank peer) const override;
  bool forget(Rank peer) override;
  void take_over(QueueId queue) override;
  bool needs_progress() const override { return true; }
  void progress() override;

 private:
  // This rank's connection to one peer for one queue.
  struct Slot {
    std::atomic<TcpRequests*> requests{nullptr};
    std::atomic<bool> wanted{false};
    std::atomic<const std::string*> failure{nullptr};  // why there will be none
    std::uint32_t generation = 0;
  };
  struct Peer {
    std::vector<sockaddr_in6> addresses;
    std::atomic<bool> left{false};  // it has closed a connection
    std::atomic<bool> forgotten{false};
  };
  struct Closing {
    TcpRequests* requests;
    Clock::time_point until;
  };
  Slot& slot(QueueId queue, Rank peer) const;
  TcpRequests* to(QueueId queue, Rank peer);  // null: it is being made. Throws if it failed
  void own_flag(FlagWord& word, std::uint32_t value, bool add);
  void run();
  void advance();
  void take_events();
  void establish(TcpMeeting::Established made);
  void fail(Rank peer, QueueId queue, const std::string& why);
  void begin_wanted();
  void end_closing();
  void retire_ended();

  const Rank rank_;
  const Rank size_;
  const TcpOptions options_;
  const std::shared_ptr<TcpMemories> memories_ = std::make_shared<TcpMemories>();
  std::atomic<WakeWord*> sleeper_{nullptr};
  UniqueFd events_;  // of all established connections
  UniqueFd wake_;    // wakes the thread
  UniqueFd news_;    // wakes the service thread, which then finds a lost peer
  std::vector<TcpQueue> queues_;
  std::vector<Slot> slots_;
  std::vector<Peer> peers_;
  const TcpRequests::Listener listener_;
  TcpMeeting meeting_;  // the thread's alone, once it runs
  const std::string described_ = text("TCP at ", tcp_place(&meeting_.listener(), options_));
  std::atomic<std::uint32_t> n_polls_{0};
  std::atomic<int> n_polling_{0};            // threads that use events_
  std::atomic<TcpStream*> latest_{nullptr};  // something arrived there
  std::atomic<bool> has_ended_{false};
  std::atomic<bool> stopping_{false};

  mutable std::mutex mutex_;  // guards the members below, and the slots' generations
  std::vector<std::pair<QueueId, Rank>> wanted_;
  std::vector<Closing> closing_;
  std::vector<std::unique_ptr<TcpStream>> streams_;  // until the end: other threads may use them
  std::vector<TcpAnswers*> answers_;
  std::deque<std::string> failures_;
  std::thread thread_;
};

}  // namespace pgasdl
