// Transport verbs over several rails: devices or ports that share the work (PGASDL_VERBS_RAILS).
//
// A rail is a VerbsTransport of one port. Two ranks' rails are paired in the order of their choice
// (choice.hpp), as many as both have; rail_connection.hpp says how a connection uses them. Atomics
// go by the first rail only: two adapters' atomics on one word are not atomic to each other.
//
// If a rail between two ranks fails, by an error or because its port is down, both drop it for all
// queues: each ends its queue pairs, takes what has arrived by them, and reports to the other, by
// the remaining rails, how many flags that were. Only then is the rest posted again, so that
// nothing arrives twice, or late. The last rail is not dropped: with it the peer is lost.
// reconnect() takes dropped rails up again, on both sides.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "transport/verbs/rail_connection.hpp"

namespace pgasdl {

class VerbsRails final : public Transport {
 public:
  VerbsRails(Rank rank, Rank size, const std::string& token, const VerbsOptions& options);
  ~VerbsRails() override;

  std::string_view name() const override { return "verbs"; }
  std::string describe() const override;
  std::string endpoint() override;
  void connect(Rank peer, const std::string& endpoint) override;
  void set_wake_word(Rank peer, WakeWord* wake_word) override;
  std::string publish(LocalSegment& segment, std::span<const Rank> peers) override;
  RemoteSegment attach(Rank peer, const std::string& description, int device,
                       Deadline deadline) override;
  std::string refuses_device(int device) const override;
  void retract(const LocalSegment& segment) override;
  int service_descriptor() const override { return ready_.get(); }
  bool service() override;

  // As in VerbsTransport, except that a post allocates, and returns before an adapter has the
  // request: if its connection fails later, complete() throws.
  bool post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                  const RemoteFlag* flag) override;
  bool post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                 const LocalFlag* flag) override;
  bool post_atomic(QueueId queue, Rank peer, const Atomic& atomic) override;
  bool connecting(QueueId queue, Rank peer) const override;
  std::size_t connections(QueueId queue) const override;
  std::optional<QueueId> connected(QueueId queue, Rank peer) const override;
  void send_farewell(Rank peer, std::uint64_t word) override;
  std::uint64_t farewell(Rank peer) const override;
  bool complete(QueueId queue) override;
  std::uint64_t mark(QueueId queue, Rank peer) const override;
  bool reached(QueueId queue, Rank peer, std::uint64_t mark) const override;
  bool needs_progress() const override { return true; }
  void progress() override;
  void reconnect(Rank peer) override;
  bool forget(Rank peer) override;

  std::size_t n_rails() const { return rails_.size(); }
  VerbsTransport& rail(std::size_t number) { return *rails_[number]; }

 private:
  struct Dropped {
    std::uint32_t round = 0;  // of the connections that were dropped
    std::string why;          // empty: the rail is not dropped
  };
  struct Peer {
    std::uint32_t common = 0;                // rails that both ranks have, as bits
    std::atomic<std::uint32_t> carrying{0};  // those of them that were not dropped
    std::vector<Dropped> dropped;            // by rail
  };
  struct Heard {
    Rank from;
    VerbsRailNews news;
  };

  std::atomic<RailConnection*>& place_of(QueueId queue, Rank peer) const;
  RailConnection* find(QueueId queue, Rank peer) const {
    return place_of(queue, peer).load(std::memory_order_acquire);
  }
  RailConnection& make(QueueId queue, Rank peer);
  template <typename Call>
  void for_each_connection(Rank peer, Call&& call);
  // False: it is the only rail that carries.
  bool drop(Rank peer, std::size_t rail, const std::string& why);
  void announce(Rank peer, VerbsRailNews news);
  void look_after_rails();
  void look_at_ports();
  void look_at_renewals();
  void answer(const Heard& heard);
  bool is_of_before(Rank peer, std::size_t rail, std::uint32_t round) const;
  std::string name_of(std::size_t rail) const;

  const Rank rank_;
  const Rank size_;
  const VerbsOptions options_;
  std::vector<std::unique_ptr<VerbsTransport>> rails_;
  std::vector<VerbsTransport*> lanes_;  // the same
  std::vector<RailQueue> queues_;
  std::vector<Peer> peers_;
  std::unique_ptr<std::atomic<RailConnection*>[]> places_;  // by queue and peer
  std::vector<std::unique_ptr<RailConnection>> owned_;
  std::atomic<RailConnection*> connections_{nullptr};  // a list
  std::atomic<WakeWord*> wake_word_{nullptr};
  UniqueFd ready_;  // epoll: readable when a rail's descriptor is

  mutable std::mutex rails_mutex_;       // guards peers_' rails, and the making of connections
  std::mutex care_mutex_;                // held by the thread that looks after rails
  Clock::time_point next_look_{};        // at ports
  std::vector<std::uint64_t> renewals_;  // seen so far, by rail
  std::atomic<bool> dropping_{false};
  std::mutex heard_mutex_;
  std::vector<Heard> heard_;
  std::atomic<bool> has_heard_{false};
};

}  // namespace pgasdl
