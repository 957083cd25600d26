#include "transport/verbs/datagram_channel.hpp"

#include <fcntl.h>
#include <sched.h>

#include <cerrno>

namespace pgasdl {
namespace {

// Many ranks may ask at once; the sender repeats a datagram that finds no room.
constexpr std::uint32_t kReceives = 256;
constexpr std::uint32_t kSends = 32;
constexpr std::size_t kHeaderBytes = sizeof(ibv_grh);  // precedes every received datagram
constexpr std::size_t kSlotBytes = 256;
static_assert(kHeaderBytes + VerbsDatagramChannel::kMostBytes <= kSlotBytes);

template <typename T>
VerbsPtr<T> made(T* object, const char* what) {
  if (object == nullptr) throw_system(text("for RDMA datagrams: ", what), errno);
  return VerbsPtr<T>(object);
}

}  // namespace

VerbsDatagramChannel::VerbsDatagramChannel(const VerbsDevice& device, std::uint32_t key)
    : key_(key),
      channel_(made(verbs_library().create_comp_channel(device.context()), "an event channel")),
      arrivals_(
          made(verbs_library().create_cq(device.context(), kReceives, nullptr, channel_.get(), 0),
               "a completion queue")),
      departures_(made(verbs_library().create_cq(device.context(), kSends, nullptr, nullptr, 0),
                       "a completion queue")),
      buffer_(device, (kReceives + kSends) * kSlotBytes) {
  const int flags = fcntl(channel_->fd, F_GETFL);
  if (fcntl(channel_->fd, F_SETFL, flags | O_NONBLOCK) != 0) throw_system("fcntl", errno);
  ibv_qp_init_attr wanted{};
  wanted.send_cq = departures_.get();
  wanted.recv_cq = arrivals_.get();
  wanted.cap = {kSends, kReceives, 1, 1, 0};
  wanted.qp_type = IBV_QPT_UD;
  wanted.sq_sig_all = 1;
  pair_ = made(verbs_library().create_qp(device.domain(), &wanted), "a queue pair");
  const auto change = [&](ibv_qp_attr attributes, int mask) {
    const int error = verbs_library().modify_qp(pair_.get(), &attributes, mask | IBV_QP_STATE);
    if (error != 0) throw_system("preparing a queue pair for RDMA datagrams", error);
  };
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device.port();
  attributes.pkey_index = device.pkey().index;
  attributes.qkey = key;
  change(attributes, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY);
  for (std::uint32_t slot = 0; slot < kReceives; ++slot) {
    if (!offer(slot)) throw_system("offering room for RDMA datagrams", errno);
  }
  attributes.qp_state = IBV_QPS_RTR;
  change(attributes, 0);
  attributes.qp_state = IBV_QPS_RTS;
  change(attributes, IBV_QP_SQ_PSN);
  rearm();
}

bool VerbsDatagramChannel::offer(std::uint32_t slot) {
  ibv_sge piece{reinterpret_cast<std::uint64_t>(buffer_.data() + slot * kSlotBytes),
                kHeaderBytes + kMostBytes, buffer_.registered->lkey};
  ibv_recv_wr request{slot, nullptr, &piece, 1};
  ibv_recv_wr* refused = nullptr;
  return ibv_post_recv(pair_.get(), &request, &refused) == 0;
}

void VerbsDatagramChannel::rearm() {
  ibv_cq* queue = nullptr;
  void* ignored = nullptr;
  unsigned events = 0;
  while (verbs_library().get_cq_event(channel_.get(), &queue, &ignored) == 0) ++events;
  if (events != 0) verbs_library().ack_cq_events(arrivals_.get(), events);
  ibv_req_notify_cq(arrivals_.get(), 0);
}

std::size_t VerbsDatagramChannel::receive(std::span<std::byte, kMostBytes> datagram) {
  for (;;) {
    ibv_wc arrived;
    if (ibv_poll_cq(arrivals_.get(), 1, &arrived) != 1) return 0;
    const auto slot = static_cast<std::uint32_t>(arrived.wr_id);
    const bool fits = arrived.status == IBV_WC_SUCCESS && arrived.byte_len > kHeaderBytes &&
                      arrived.byte_len <= kHeaderBytes + kMostBytes;
    const std::size_t bytes = fits ? arrived.byte_len - kHeaderBytes : 0;
    std::memcpy(datagram.data(), buffer_.data() + slot * kSlotBytes + kHeaderBytes, bytes);
    offer(slot);
    if (bytes != 0) return bytes;
  }
}

void VerbsDatagramChannel::take_departures() {
  ibv_wc left;
  while (n_sending_ != 0 && ibv_poll_cq(departures_.get(), 1, &left) == 1) --n_sending_;
}

void VerbsDatagramChannel::drain() {
  const Deadline deadline = Deadline::in(0.1);
  while (n_sending_ != 0 && !deadline.passed()) {
    take_departures();
    sched_yield();
  }
}

void VerbsDatagramChannel::send(ibv_ah* to, std::uint32_t number, const void* message,
                                std::size_t bytes) {
  take_departures();
  if (n_sending_ == kSends) return;
  std::byte* slot = buffer_.data() + (kReceives + next_to_send_) * kSlotBytes;
  next_to_send_ = (next_to_send_ + 1) % kSends;
  std::memcpy(slot, message, bytes);
  ibv_sge piece{reinterpret_cast<std::uint64_t>(slot), static_cast<std::uint32_t>(bytes),
                buffer_.registered->lkey};
  ibv_send_wr request{};
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_SEND;
  request.wr.ud = {to, number, key_};
  ibv_send_wr* refused = nullptr;
  if (ibv_post_send(pair_.get(), &request, &refused) == 0) ++n_sending_;
}

}  // namespace pgasdl
