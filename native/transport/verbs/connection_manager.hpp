// How connections come about. Whoever needs one asks by a datagram that names its own end; the
// peer's service thread makes the other end and answers with it. An end may be used once the peer
// is known to have joined it too, since what arrives earlier is dropped and costs a time-out.
//
// Datagrams may be lost, doubled and late: each says all there is to know, receiving one twice does
// nothing, and who wants something repeats itself. Two that ask each other at the same moment mean
// the same two ends. Every rank counts how often it gave up its connections with a peer
// (reconnect()); the higher count wins, and the other side gives up its own. One that ends says so
// by the highest count there is, so that peers need not find out by time-outs.
#pragma once

#include <mutex>
#include <vector>

#include "transport/token.hpp"
#include "transport/verbs/datagram_channel.hpp"
#include "transport/verbs/queue.hpp"

namespace pgasdl {

class VerbsConnectionManager {
 public:
  // `token`: 16 bytes that only ranks of this job know. `timeout_s`: after which one who does not
  // answer is lost.
  VerbsConnectionManager(const VerbsDevice& device, const std::string& token, Rank rank, Rank size,
                         const std::vector<std::unique_ptr<VerbsQueue>>& queues, double timeout_s);

  std::string endpoint() const;
  void connect(Rank peer, const std::string& endpoint);
  int descriptor() const { return datagrams_.descriptor(); }

  // Somebody wants to post on `queue` to `peer`: sees to it that a connection comes about.
  void want(QueueId queue, Rank peer);
  // Connections are wanted and not there yet: call progress().
  bool busy() const { return n_wanted_.load(std::memory_order_relaxed) != 0; }
  // Neither throws: what goes wrong with one connection is the fault of that one.
  void progress();
  void service();  // the descriptor was readable
  void reconnect(Rank peer);
  // Takes leave of everybody; the last call.
  void leave();

 private:
  static constexpr std::uint32_t kLeft = UINT32_MAX;
  struct Message {
    std::uint64_t magic;
    char token[kTokenBytes];
    Rank from;
    Rank to;
    QueueId queue;
    std::uint32_t count;   // of reconnects, as the sender knows it
    VerbsEnd end;          // the sender's; number 0: it has none, and only tells the count
    std::uint32_t joined;  // number of the receiver's end if the sender's has joined it, else 0
    std::uint32_t answer;  // 1: please do
  };
  struct Peer {
    bool known = false;
    VerbsPath path;
    std::uint32_t datagrams = 0;  // number of its UD queue pair
    VerbsPtr<ibv_ah> address;
    std::uint32_t count = 0;
  };
  struct Wanted {
    VerbsConnection* connection;
    Clock::time_point since;
    Clock::time_point next;
    Nanoseconds interval;
    int repetitions = 0;
  };
  struct Endpoint;

  Peer& peer_at(Rank peer) { return peers_[static_cast<std::size_t>(peer)]; }
  VerbsPath path_to(Rank peer, const Endpoint& there) const;
  void take_datagrams();
  void handle(const Message& message);
  void answer(const Message& message, VerbsConnection& connection);
  void send(Peer& peer, Message message);
  void tell(VerbsConnection& connection, bool answer);
  void repeat();
  void repeat(Wanted& wanted, Clock::time_point now);
  bool patience_over(const Wanted& wanted, Clock::time_point now) const {
    return now - wanted.since > std::chrono::duration<double>(timeout_s_);
  }
  void give_up_all(Rank peer, std::uint32_t count);

  const VerbsDevice& device_;
  const std::string token_;
  const Rank rank_;
  const std::vector<std::unique_ptr<VerbsQueue>>& queues_;
  const double timeout_s_;
  std::mutex mutex_;  // of all that follows
  VerbsDatagramChannel datagrams_;
  std::vector<Peer> peers_;
  std::vector<Wanted> wanted_;
  std::atomic<std::size_t> n_wanted_{0};
};

}  // namespace pgasdl
