// Makes connections. A rank that needs one asks by a datagram that names its own end; the peer's
// service thread makes the other end and answers with it. An end may be used once the peer is known
// to have joined it, too, since earlier packets are dropped and cost a time-out.
//
// Datagrams may be lost, doubled and late: each is complete in itself, receiving one twice does
// nothing, and a rank that wants something repeats itself. If two ranks ask each other at the same
// moment, they mean the same two ends. Every rank counts how often it dropped its connections with
// a peer (reconnect()); the higher count wins, and the other side drops its own. A rank that ends
// announces the highest count there is, so peers need no time-outs to notice.
//
// The token of the job does not travel. A datagram has a tag over its whole content, which only the
// token can make: a stranger who sees datagrams cannot make new ones. A stranger can repeat a
// datagram, which its receiver takes for a late one: it may pass for a sign of life but changes
// nothing, since all its content refers to one count, and counts only rise. Other contexts and
// other rails have other tokens.
#pragma once

#include <mutex>
#include <vector>

#include "transport/verbs/datagram_channel.hpp"
#include "transport/verbs/queue.hpp"

namespace pgasdl {

class VerbsConnectionManager {
 public:
  // `token`: 16 bytes that only ranks of this job know, and no other manager of these ranks has.
  // `timeout_s`: a peer that is silent for so long is lost; where many connect at once, an answer
  // may take longer.
  VerbsConnectionManager(const VerbsDevice& device, const std::string& token, Rank rank, Rank size,
                         const std::vector<std::unique_ptr<VerbsQueue>>& queues, double timeout_s);

  std::string endpoint() const;
  void connect(Rank peer, const std::string& endpoint);
  int descriptor() const { return datagrams_.descriptor(); }

  // Makes sure that a connection for posts on `queue` to `peer` comes about.
  void want(QueueId queue, Rank peer);
  // Connections are wanted and not there yet: call progress().
  bool busy() const { return n_wanted_.load(std::memory_order_relaxed) != 0; }
  // Neither throws: an error of one connection becomes that connection's fault.
  void progress();
  bool service();  // the descriptor was readable; true: call it again soon
  void reconnect(Rank peer);
  // Ends all traffic of connections with `peer`, and makes none ever again.
  void forget(Rank peer);
  // As in Transport.
  void send_farewell(Rank peer, std::uint64_t word);
  std::uint64_t farewell(Rank peer);
  // Takes leave of every peer; the last call.
  void leave();

  // --- as one of several rails
  // Ends all traffic of connections with `peer`, and makes none, until reconnect().
  void part(Rank peer);
  std::uint32_t round(Rank peer);  // how often connections with it were dropped
  std::uint64_t renewals() const { return n_renewals_.load(std::memory_order_acquire); }
  void announce(Rank peer, const VerbsRailNews& news);
  void hear(VerbsTransport::HearNews hear);

 private:
  static constexpr std::uint32_t kLeft = UINT32_MAX;
  struct Message {
    std::uint64_t magic;
    std::uint64_t tag;
    Rank from;
    Rank to;
    QueueId queue;
    std::uint32_t count;   // of reconnects, as the sender knows it
    VerbsEnd end;          // the sender's; number 0: it has none, and only reports the count
    std::uint32_t joined;  // the receiver's end if the sender's end has joined it, else 0
    std::uint32_t answer;  // 1: the sender wants one
  };
  struct News {
    std::uint64_t magic;
    std::uint64_t tag;
    Rank from;
    Rank to;
    VerbsRailNews what;
    std::uint32_t padding;
  };
  struct Farewell {
    std::uint64_t magic;
    std::uint64_t tag;
    Rank from;
    Rank to;
    std::uint64_t word;
  };
  // Lengths tell the kinds of datagrams apart.
  static_assert(sizeof(Message) != sizeof(News) && sizeof(News) != sizeof(Farewell) &&
                sizeof(Farewell) != sizeof(Message));
  struct Peer {
    bool known = false;
    bool parted = false;
    bool forgotten = false;
    VerbsPath path;
    std::uint32_t datagrams = 0;  // number of its UD queue pair
    VerbsPtr<ibv_ah> address;
    std::uint32_t count = 0;
    std::uint64_t farewell = 0;
    Clock::time_point heard;  // the last datagram of any kind
  };
  struct Wanted {
    VerbsConnection* connection;
    Clock::time_point since;
    Clock::time_point next;
    Nanoseconds interval;
    int repetitions = 0;
  };

  Peer& peer_at(Rank peer) { return peers_[static_cast<std::size_t>(peer)]; }
  bool take_datagrams();  // false: some are left
  void handle(const Message& message);
  void handle(const News& news);
  void handle(const Farewell& farewell);
  // True if a rank of this job sent it; then that rank has been heard.
  template <typename Datagram>
  bool is_ours(const Datagram& datagram);
  void answer(const Message& message, VerbsConnection& connection);
  template <typename Datagram>
  void send(Peer& peer, Datagram datagram);
  void announce(VerbsConnection& connection, bool answer);
  void repeat();
  void repeat(Wanted& wanted, Clock::time_point now);
  bool patience_over(const Wanted& wanted, Clock::time_point now) const;
  void give_up_all(Rank peer, std::uint32_t count);

  const VerbsDevice& device_;
  const std::string token_;
  const Rank rank_;
  const std::vector<std::unique_ptr<VerbsQueue>>& queues_;
  const double timeout_s_;
  std::timed_mutex mutex_;  // guards the members below
  VerbsDatagramChannel datagrams_;
  std::vector<Peer> peers_;
  std::vector<Wanted> wanted_;
  std::atomic<std::size_t> n_wanted_{0};
  std::atomic<std::uint64_t> n_renewals_{0};
  VerbsTransport::HearNews hear_;
};

}  // namespace pgasdl
