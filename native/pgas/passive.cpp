// Messages of the world group, from any rank to any rank: one mailbox for each sender.
#include <algorithm>
#include <cstring>

#include "pgas/context.hpp"
#include "pgas/group.hpp"

namespace pgasdl {

Outcome Group::passive_send(Rank peer, std::span<const std::byte> message, Deadline deadline) {
  context_.require_peer(peer, "passive_send");
  const std::uint64_t longest = context_.options().passive_bytes;
  if (message.size() > longest) {
    throw Error(ErrorKind::kBuffer, text("a passive message of ", message.size(),
                                         " bytes: at most ", longest, " (PGASDL_PASSIVE_BYTES)"));
  }
  const std::uint64_t slot = sizeof(std::uint64_t) + longest;
  const auto to = static_cast<std::uint32_t>(peer);
  const auto me = static_cast<std::uint32_t>(context_.rank());
  const std::uint64_t outbox = mail_offset_ + (ranks_.size() + to) * slot;
  context_.recorder().record(Operation::kPassiveSend, peer, control_->id(), 0, message.size());
  const auto ready = [&] {
    const std::unique_lock lock(passive_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    // The receiver must have taken this rank's previous message from the mailbox.
    const std::uint32_t sent = mail_sent_[to];
    if (sent != 0 && !raised(credit_id_ + to, sent)) return false;
    std::byte* data = control_->local().data + outbox;
    const std::uint64_t bytes = message.size();
    std::memcpy(data, &bytes, sizeof bytes);
    if (bytes != 0) std::memcpy(data + sizeof bytes, message.data(), bytes);
    const Transfer mail{&control_->local(), outbox, control_->remote(peer),
                        mail_offset_ + me * slot, sizeof bytes + bytes};
    if (!send(peer, {&mail, 1}, mail_id_ + me, following(sent))) return false;
    mail_sent_[to] = following(sent);
    return true;
  };
  const auto slow = [&] { context_.liveness().require(peer, "passive_send"); };
  return context_.waiter().until(ready, slow, deadline, WaitCause::kPassive, "passive_send");
}

Outcome Group::passive_receive(Deadline deadline, Rank& sender, std::string& message) {
  context_.require_usable();
  const auto me = static_cast<std::uint32_t>(context_.rank());
  const auto size = static_cast<std::uint32_t>(ranks_.size());
  const std::uint64_t slot = sizeof(std::uint64_t) + context_.options().passive_bytes;
  const auto ready = [&] {
    const std::unique_lock lock(receive_mutex_, std::try_to_lock);
    if (!lock.owns_lock()) return false;
    for (std::uint32_t i = 0; i < size; ++i) {
      const std::uint32_t from = (static_cast<std::uint32_t>(receive_from_) + i) % size;
      const std::uint32_t next = following(mail_received_[from]);
      if (!raised(mail_id_ + from, next)) continue;
      const std::byte* data = control_->local().data + mail_offset_ + from * slot;
      std::uint64_t bytes;
      std::memcpy(&bytes, data, sizeof bytes);
      message.assign(reinterpret_cast<const char*>(data + sizeof bytes),
                     std::min(bytes, context_.options().passive_bytes));
      mail_received_[from] = next;
      sender = static_cast<Rank>(from);
      receive_from_ = static_cast<Rank>((from + 1) % size);
      return true;
    }
    return false;
  };
  const auto slow = [&] {
    if (context_.liveness().everybody_left()) {
      throw Error(ErrorKind::kPeerLost, "passive_receive: every other rank has left");
    }
  };
  const Outcome outcome =
      context_.waiter().until(ready, slow, deadline, WaitCause::kPassive, "passive_receive");
  if (outcome != Outcome::kDone) return outcome;
  context_.recorder().record(Operation::kPassiveReceive, sender, control_->id(), 0, message.size());
  // The mailbox is free: inform the sender, if it is still there to send more.
  const Deadline bounded = Deadline::in(context_.options().timeout);
  try {
    while (!send(sender, {}, credit_id_ + me, mail_received_[static_cast<std::size_t>(sender)])) {
      if (context_.liveness().health(sender) != Health::kHealthy || bounded.passed()) break;
      context_.transport().progress();
    }
  } catch (const Error&) {
    // A sender that cannot be answered has left or is cut off; its earlier messages are here.
  }
  return outcome;
}

}  // namespace pgasdl
