// Datagrams between ranks, by which connections are agreed on: one small UD queue pair, whose
// arrivals make a descriptor readable.
#pragma once

#include <cstring>

#include "transport/verbs/device.hpp"
#include "transport/verbs/memory.hpp"

namespace pgasdl {

// By one thread at a time. Once it is made nothing throws: a datagram that cannot be sent or taken
// is one that was lost.
class VerbsDatagramChannel {
 public:
  static constexpr std::size_t kMostBytes = 128;

  VerbsDatagramChannel(const VerbsDevice& device, std::uint32_t key);

  std::uint32_t number() const { return pair_->qp_num; }
  int descriptor() const { return channel_->fd; }
  // Makes the descriptor unreadable until more arrives. Before receive().
  void rearm();
  // The bytes of the next datagram, which are there from then on; 0: there is none.
  std::size_t receive(std::span<std::byte, kMostBytes> datagram);
  // May be lost on the way, and is if too many are.
  template <typename Message>
  void send(ibv_ah* to, std::uint32_t number, const Message& message) {
    static_assert(sizeof message <= kMostBytes);
    send(to, number, &message, sizeof message);
  }
  // Until all has left, or a moment has passed.
  void drain();

 private:
  void send(ibv_ah* to, std::uint32_t number, const void* message, std::size_t bytes);
  bool offer(std::uint32_t slot);
  void take_departures();

  const std::uint32_t key_;
  VerbsPtr<ibv_comp_channel> channel_;
  VerbsPtr<ibv_cq> arrivals_;
  VerbsPtr<ibv_cq> departures_;
  VerbsBuffer buffer_;  // slots to receive into, then to send from
  VerbsPtr<ibv_qp> pair_;
  std::uint32_t next_to_send_ = 0;
  std::uint32_t n_sending_ = 0;
};

}  // namespace pgasdl
