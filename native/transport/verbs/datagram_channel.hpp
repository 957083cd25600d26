// Datagrams by which ranks agree on connections: a small UD queue pair, with a descriptor to poll.
#pragma once

#include <cstring>

#include "transport/verbs/device.hpp"
#include "transport/verbs/memory.hpp"

namespace pgasdl {

// Used by one thread at a time. After the constructor nothing throws: a datagram that cannot be
// sent or received counts as lost.
class VerbsDatagramChannel {
 public:
  static constexpr std::size_t kMostBytes = 128;

  VerbsDatagramChannel(const VerbsDevice& device, std::uint32_t key);

  std::uint32_t number() const { return pair_->qp_num; }
  int descriptor() const { return channel_->fd; }
  // Makes the descriptor unreadable until more arrives. To be called before receive().
  void rearm();
  // Copies the next datagram and returns its bytes; 0: there is none.
  std::size_t receive(std::span<std::byte, kMostBytes> datagram);
  // The datagram may be lost on the way, and is dropped if too many are being sent.
  template <typename Message>
  void send(ibv_ah* to, std::uint32_t number, const Message& message) {
    static_assert(sizeof message <= kMostBytes);
    send(to, number, &message, sizeof message);
  }
  // Waits until all have left, or for a moment.
  void drain();

 private:
  void send(ibv_ah* to, std::uint32_t number, const void* message, std::size_t bytes);
  bool offer(std::uint32_t slot);
  void take_departures();

  const std::uint32_t key_;
  VerbsPtr<ibv_comp_channel> channel_;
  VerbsPtr<ibv_cq> arrivals_;
  VerbsPtr<ibv_cq> departures_;
  VerbsBuffer buffer_;  // slots to receive into, then slots to send from
  VerbsPtr<ibv_qp> pair_;
  std::uint32_t next_to_send_ = 0;
  std::uint32_t n_sending_ = 0;
};

}  // namespace pgasdl
