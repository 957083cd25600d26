#include "pgas/group.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "pgas/context.hpp"

namespace pgasdl {
namespace {

// Ids on the group's board: barrier rounds first, then one per member for each exchange.
constexpr std::uint32_t kBarrierRounds = 32;
constexpr std::size_t kExchangeBytes = 1024;
constexpr std::size_t kReduceBytes = 8192;

std::uint32_t following(std::uint32_t generation) {
  return generation + 1 == 0 ? 1 : generation + 1;
}

std::unique_lock<std::mutex> sole_caller(std::mutex& mutex, const char* what) {
  std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) {
    throw Error(ErrorKind::kMismatch, text("two threads of one rank are in ", what,
                                           " of the same group at once: give "
                                           "each thread a group of its own"));
  }
  return lock;
}

}  // namespace

std::size_t Group::slot_bytes(Kind kind) {
  return kind == Kind::kExchange ? kExchangeBytes : kReduceBytes;
}

Group::Group(Context& context, std::vector<Rank> ranks, bool world)
    : context_(context), ranks_(std::move(ranks)), world_(world) {
  std::sort(ranks_.begin(), ranks_.end());
  if (ranks_.empty()) throw Error(ErrorKind::kRank, "a group of no ranks");
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i] < 0 || ranks_[i] >= context.size()) {
      throw Error(ErrorKind::kRank,
                  text("rank ", ranks_[i], ": ranks are 0 to ", context.size() - 1));
    }
    if (i > 0 && ranks_[i] == ranks_[i - 1]) {
      throw Error(ErrorKind::kRank, text("rank ", ranks_[i], " is twice in the group"));
    }
    if (ranks_[i] == context.rank()) index_ = static_cast<Rank>(i);
  }
  if (index_ < 0) {
    throw Error(ErrorKind::kRank, text("rank ", context.rank(), " is not in the group it creates"));
  }
  const std::uint64_t members = ranks_.size();
  std::uint64_t bytes = 0;
  if (world) {
    bytes = gossip_offset_ = round_up(ControlBlock::bytes(context.size()), 64);
    bytes += Gossip::bytes(context.size());
  }
  std::uint32_t ids = kBarrierRounds;
  for (Kind kind : {Kind::kExchange, Kind::kReduce}) {
    Exchange& exchange = exchanges_[static_cast<int>(kind)];
    exchange.slots_offset = bytes;
    exchange.first_id = ids;
    bytes += 2 * members * (sizeof(Header) + slot_bytes(kind));
    ids += static_cast<std::uint32_t>(members);
  }
  if (world) {
    // Mailboxes by sender, then the messages on their way out by receiver.
    mail_offset_ = bytes;
    bytes += 2 * members * (sizeof(std::uint64_t) + context.options().passive_bytes);
    mail_id_ = ids;
    credit_id_ = ids + static_cast<std::uint32_t>(members);
    ids += 2 * static_cast<std::uint32_t>(members);
    mail_sent_.resize(members);
    mail_received_.resize(members);
  }
  control_ =
      std::make_shared<Segment>(context.next_segment_id(), bytes, ids, nullptr, context.size());
}

std::string Group::describe() { return context_.transport().publish(control_->local(), ranks_); }

void Group::attach(const std::vector<std::string>& descriptions, Deadline deadline) {
  for (std::size_t member = 0; member < ranks_.size(); ++member) {
    const Rank peer = ranks_[member];
    if (peer != context_.rank()) {
      control_->set_remote(peer,
                           context_.transport().attach(peer, descriptions.at(member), deadline));
    }
  }
  control_->set_self(context_.rank());
  control_->local().descriptor.reset();
}

void Group::remove() {
  if (world_) throw Error(ErrorKind::kRank, "the group of all ranks cannot be deleted");
  deleted_ = true;
  context_.transport().retract(control_->local());
}

bool Group::send(Rank member, std::uint64_t offset, std::uint64_t bytes,
                 std::uint64_t target_offset, std::uint32_t id, std::uint32_t value) {
  const Rank peer = ranks_[static_cast<std::size_t>(member)];
  const RemoteSegment* remote = control_->remote(peer);
  const Transfer transfer{&control_->local(), offset, remote, target_offset, bytes};
  const RemoteFlag flag{remote, id, value};
  return context_.transport().post_write(context_.internal_queue(), peer,
                                         std::span<const Transfer>(&transfer, bytes == 0 ? 0 : 1),
                                         &flag);
}

bool Group::raised(std::uint32_t id, std::uint32_t generation) const {
  if (context_.transport().needs_progress()) context_.transport().progress();
  const std::uint32_t seen = control_->local().board[id].load(std::memory_order_acquire);
  return seen != 0 && static_cast<std::int32_t>(seen - generation) >= 0;
}

// Members that are gone for good; those that only closed may have done their part before.
void Group::check_members(const char* what) const {
  context_.require_usable();
  if (deleted_) throw Error(ErrorKind::kRank, "the group was deleted");
  for (Rank peer : ranks_) {
    if (context_.liveness().health(peer) != Health::kClosed) {
      context_.liveness().require(peer, what);
    }
  }
}

Outcome Group::barrier(Deadline deadline) {
  const auto lock = sole_caller(barrier_mutex_, "barrier");
  check_members("barrier");
  const auto members = static_cast<std::uint32_t>(ranks_.size());
  const auto me = static_cast<std::uint32_t>(index_);
  if (!barrier_under_way_) {
    barrier_under_way_ = true;
    barrier_generation_ = following(barrier_generation_);
    barrier_round_ = 0;
    barrier_sent_ = false;
    context_.recorder().record(Operation::kBarrier, -1, control_->id(), barrier_generation_, 0);
  }
  // Dissemination: in round k tell the member 2^k ahead, wait for the one 2^k behind.
  for (; (1u << barrier_round_) < members; ++barrier_round_) {
    const std::uint32_t distance = 1u << barrier_round_;
    const auto ahead = static_cast<Rank>((me + distance) % members);
    const auto behind = ranks_[(me + members - distance) % members];
    const auto ready = [&] {
      if (!barrier_sent_) {
        barrier_sent_ = send(ahead, 0, 0, 0, barrier_round_, barrier_generation_);
      }
      return barrier_sent_ && raised(barrier_round_, barrier_generation_);
    };
    const auto slow = [&] { context_.liveness().require(behind, "barrier"); };
    if (context_.waiter().until(ready, slow, deadline, "barrier") != Outcome::kDone) {
      return Outcome::kTimeout;
    }
    barrier_sent_ = false;
  }
  barrier_under_way_ = false;
  return Outcome::kDone;
}

std::string Group::missing_in_barrier() const {
  const auto members = static_cast<std::uint32_t>(ranks_.size());
  const std::uint32_t distance = 1u << barrier_round_;
  const Rank behind = ranks_[(static_cast<std::uint32_t>(index_) + members - distance) % members];
  return text("barrier ", barrier_generation_, " of a group of ", members, ": in round ",
              barrier_round_, " rank ", behind, " has not raised notification ", barrier_round_,
              " of segment ", control_->id());
}

std::uint64_t Group::slot_offset(const Exchange& exchange, Kind kind, Rank member) const {
  const std::uint64_t slot =
      (exchange.generation & 1) * ranks_.size() + static_cast<std::uint64_t>(member);
  return exchange.slots_offset + slot * (sizeof(Header) + slot_bytes(kind));
}

Outcome Group::allgather(Kind kind, const std::string& what, std::uint64_t fingerprint,
                         std::span<const std::byte> mine, Deadline deadline,
                         std::vector<std::string>& all) {
  Exchange& exchange = exchanges_[static_cast<int>(kind)];
  const auto lock = sole_caller(exchange.mutex, what.c_str());
  check_members(what.c_str());
  if (mine.size() > slot_bytes(kind)) {
    throw Error(ErrorKind::kSystem,
                text(what, ": ", mine.size(), " bytes for a slot of ", slot_bytes(kind)));
  }
  std::byte* data = control_->local().data;
  if (!exchange.under_way) {
    exchange.under_way = true;
    exchange.generation = following(exchange.generation);
    exchange.next_to_send = 0;
    exchange.bytes = sizeof(Header) + mine.size();
    Header header{fingerprint, static_cast<std::uint32_t>(mine.size()), exchange.generation, {}};
    what.copy(header.what, sizeof header.what - 1);
    std::byte* slot = data + slot_offset(exchange, kind, index_);
    std::memcpy(slot, &header, sizeof header);
    if (!mine.empty()) std::memcpy(slot + sizeof header, mine.data(), mine.size());
    context_.recorder().record(Operation::kAllgather, -1, control_->id(), exchange.generation,
                               mine.size());
  }
  const std::uint64_t my_slot = slot_offset(exchange, kind, index_);
  const std::size_t members = ranks_.size();
  std::size_t arrived = 0;
  const auto ready = [&] {
    for (; exchange.next_to_send < members; ++exchange.next_to_send) {
      const auto member = static_cast<Rank>(exchange.next_to_send);
      if (member == index_) continue;
      if (!send(member, my_slot, exchange.bytes, my_slot,
                exchange.first_id + static_cast<std::uint32_t>(index_), exchange.generation)) {
        return false;
      }
    }
    for (; arrived < members; ++arrived) {
      if (static_cast<Rank>(arrived) == index_) continue;
      const auto id = exchange.first_id + static_cast<std::uint32_t>(arrived);
      if (!raised(id, exchange.generation)) return false;
    }
    return true;
  };
  const auto slow = [&] {
    if (arrived < members) context_.liveness().require(ranks_[arrived], what.c_str());
  };
  if (context_.waiter().until(ready, slow, deadline, what.c_str()) != Outcome::kDone) {
    return Outcome::kTimeout;
  }
  exchange.under_way = false;
  all.assign(members, {});
  std::string others;
  for (std::size_t member = 0; member < members; ++member) {
    const std::byte* slot = data + slot_offset(exchange, kind, static_cast<Rank>(member));
    Header header;
    std::memcpy(&header, slot, sizeof header);
    if (header.fingerprint != fingerprint || header.bytes > slot_bytes(kind)) {
      header.what[sizeof header.what - 1] = 0;
      others += text(others.empty() ? "" : ", ", "rank ", ranks_[member], " is in ", header.what);
      continue;
    }
    all[member].assign(reinterpret_cast<const char*>(slot + sizeof header), header.bytes);
  }
  if (!others.empty()) {
    throw Error(ErrorKind::kMismatch,
                text("collective ", exchange.generation, " of segment ", control_->id(),
                     "'s group: rank ", ranks_[static_cast<std::size_t>(index_)], " is in ", what,
                     ", but ", others, ": order, sizes and dtypes must be the same on all ranks"));
  }
  return Outcome::kDone;
}

std::string Group::missing_in_allgather(Kind kind) const {
  const Exchange& exchange = exchanges_[static_cast<int>(kind)];
  std::string missing;
  for (std::size_t member = 0; member < ranks_.size(); ++member) {
    const auto id = exchange.first_id + static_cast<std::uint32_t>(member);
    if (static_cast<Rank>(member) != index_ && !raised(id, exchange.generation)) {
      missing +=
          text(missing.empty() ? "" : ", ", "rank ", ranks_[member], " (notification ", id, ")");
    }
  }
  return text("collective ", exchange.generation, " of segment ", control_->id(),
              "'s group: nothing yet from ", missing);
}

Outcome Group::create_segment(std::uint64_t bytes, std::uint32_t notifications, std::byte* bound,
                              Deadline deadline, std::shared_ptr<Segment>& created) {
  Transport& transport = context_.transport();
  check_members("segment");
  if (pending_segment_ != nullptr &&
      (pending_segment_->bytes() != bytes || pending_segment_->notifications() != notifications ||
       pending_bound_ != bound)) {
    throw Error(ErrorKind::kMismatch,
                "the creation of another segment timed out on this group: continue that one first, "
                "with the same arguments");
  }
  if (pending_segment_ == nullptr) {
    auto segment = std::make_shared<Segment>(context_.next_segment_id(), bytes, notifications,
                                             bound, context_.size());
    pending_segment_ = std::move(segment);
    pending_bound_ = bound;
  }
  Segment& segment = *pending_segment_;
  std::string mine;
  if (!exchanges_[0].under_way) {
    const SegmentId proposal = segment.id();
    mine.assign(reinterpret_cast<const char*>(&proposal), sizeof proposal);
    mine += transport.publish(segment.local(), ranks_);
  }
  std::vector<std::string> all;
  const auto bytes_of = std::as_bytes(std::span(mine));
  const std::uint64_t fingerprint = bound != nullptr ? 2 : 1;
  try {
    if (allgather(Kind::kExchange, bound != nullptr ? "bind" : "segment", fingerprint, bytes_of,
                  deadline, all) != Outcome::kDone) {
      return Outcome::kTimeout;
    }
  } catch (const Error&) {
    transport.retract(segment.local());
    pending_segment_.reset();
    throw;
  }
  created = std::move(pending_segment_);
  pending_segment_.reset();
  SegmentId agreed = created->id();
  std::vector<RemoteSegment> remotes(ranks_.size());
  for (std::size_t member = 0; member < ranks_.size(); ++member) {
    SegmentId proposal;
    std::memcpy(&proposal, all[member].data(), sizeof proposal);
    agreed = std::max(agreed, proposal);
    const Rank peer = ranks_[member];
    // Everything needed was sent before the exchange ended: it is here, or the peer is gone.
    if (peer != context_.rank()) {
      remotes[member] = transport.attach(peer, all[member].substr(sizeof proposal),
                                         Deadline::in(context_.options().timeout));
    }
  }
  for (std::size_t member = 0; member < ranks_.size(); ++member) {
    const Rank peer = ranks_[member];
    if (peer == context_.rank()) continue;
    transport.attached(peer, remotes[member]);
    created->set_remote(peer, std::move(remotes[member]));
  }
  created->set_self(context_.rank());  // last: a transport may have moved this rank's copy
  created->set_id(agreed);
  created->local().descriptor.reset();
  context_.use_segment_id(agreed);
  return Outcome::kDone;
}

void Group::delete_segment(Context& context, Segment& segment) {
  context.require_usable();
  if (segment.deleted()) {
    throw Error(ErrorKind::kSegment, text("segment ", segment.id(), " was deleted already"));
  }
  segment.release_local();
  context.transport().retract(segment.local());
}

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
    // My previous message to this rank must have been taken out of its mailbox.
    const std::uint32_t sent = mail_sent_[to];
    if (sent != 0 && !raised(credit_id_ + to, sent)) return false;
    std::byte* data = control_->local().data + outbox;
    const std::uint64_t bytes = message.size();
    std::memcpy(data, &bytes, sizeof bytes);
    if (bytes != 0) std::memcpy(data + sizeof bytes, message.data(), bytes);
    if (!send(peer, outbox, sizeof bytes + bytes, mail_offset_ + me * slot, mail_id_ + me,
              following(sent))) {
      return false;
    }
    mail_sent_[to] = following(sent);
    return true;
  };
  const auto slow = [&] { context_.liveness().require(peer, "passive_send"); };
  return context_.waiter().until(ready, slow, deadline, "passive_send");
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
  const Outcome outcome = context_.waiter().until(ready, slow, deadline, "passive_receive");
  if (outcome != Outcome::kDone) return outcome;
  context_.recorder().record(Operation::kPassiveReceive, sender, control_->id(), 0, message.size());
  // The mailbox is free: tell the sender, if it is still there to send more.
  const Deadline bounded = Deadline::in(context_.options().timeout);
  while (
      !send(sender, 0, 0, 0, credit_id_ + me, mail_received_[static_cast<std::size_t>(sender)])) {
    if (context_.liveness().health(sender) != Health::kHealthy || bounded.passed()) break;
    context_.transport().progress();
  }
  return outcome;
}

}  // namespace pgasdl
