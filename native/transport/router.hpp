// Combines several transports: each peer is reached by the one that its route names.
#pragma once

#include <vector>

#include "transport/transport.hpp"

namespace pgasdl {

class Router final : public Transport {
 public:
  // `routes`: for each peer, an index into `transports`.
  Router(std::vector<std::unique_ptr<Transport>> transports, std::vector<std::size_t> routes);

  std::string_view name() const override { return "router"; }
  std::string_view name_for(Rank peer) const override { return to(peer).name_for(peer); }
  std::string describe() const override;
  std::string endpoint() override;
  void connect(Rank peer, const std::string& endpoint) override;
  void set_wake_word(Rank peer, WakeWord* wake_word) override;
  std::string publish(LocalSegment& segment, std::span<const Rank> peers) override;
  RemoteSegment attach(Rank peer, const std::string& description, int device,
                       Deadline deadline) override;
  std::string refuses_device(int device) const override;
  void retract(const LocalSegment& segment) override;
  std::string unreached(Rank peer) const override { return to(peer).unreached(peer); }
  int service_descriptor() const override { return ready_.get(); }
  bool service() override;

  bool post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                  const RemoteFlag* flag) override {
    return to(peer).post_write(queue, peer, transfers, flag);
  }
  bool post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                 const LocalFlag* flag) override {
    return to(peer).post_read(queue, peer, transfers, flag);
  }
  bool post_atomic(QueueId queue, Rank peer, const Atomic& atomic) override {
    return to(peer).post_atomic(queue, peer, atomic);
  }
  bool connecting(QueueId queue, Rank peer) const override {
    return to(peer).connecting(queue, peer);
  }
  bool complete(QueueId queue) override;
  bool sent(QueueId queue) override;
  bool lost_answers(QueueId queue, Rank peer) override {
    return to(peer).lost_answers(queue, peer);
  }
  std::size_t connections(QueueId queue) const override;
  std::optional<QueueId> connected(QueueId queue, Rank peer) const override {
    return to(peer).connected(queue, peer);
  }
  void send_farewell(Rank peer, std::uint64_t word) override { to(peer).send_farewell(peer, word); }
  std::uint64_t farewell(Rank peer) const override { return to(peer).farewell(peer); }
  std::uint64_t mark(QueueId queue, Rank peer) const override { return to(peer).mark(queue, peer); }
  bool reached(QueueId queue, Rank peer, std::uint64_t mark) const override {
    return to(peer).reached(queue, peer, mark);
  }
  void end_service() override;
  bool needs_progress() const override;
  void progress() override;
  bool receives_in_progress() const override;
  void reconnect(Rank peer) override { to(peer).reconnect(peer); }
  void lost(Rank peer) override { to(peer).lost(peer); }
  bool forget(Rank peer) override { return to(peer).forget(peer); }
  void take_over(QueueId queue) override {
    for (const auto& transport : transports_) transport->take_over(queue);
  }

 private:
  Transport& to(Rank peer) const { return *transports_[routes_[static_cast<std::size_t>(peer)]]; }

  std::vector<std::unique_ptr<Transport>> transports_;
  const std::vector<std::size_t> routes_;
  UniqueFd ready_;  // epoll: readable when a transport's descriptor is
};

}  // namespace pgasdl
