#include "pgas/group.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "pgas/context.hpp"
#include "sys/packed.hpp"

namespace pgasdl {
namespace {

// Ids on the group's board: barrier rounds first, then by which of them the one who owes it tells
// that it cannot go on, then one per member for each exchange.
constexpr std::uint32_t kBarrierRounds = 16;
constexpr std::size_t kMostMembers = std::size_t{1} << kBarrierRounds;
constexpr std::size_t kExchangeBytes = 1024;
constexpr std::size_t kReduceBytes = 8192;

std::uint32_t following(std::uint32_t generation) {
  return generation + 1 == 0 ? 1 : generation + 1;
}

}  // namespace

std::size_t Group::slot_bytes(Kind kind) {
  return kind == Kind::kExchange ? kExchangeBytes : kReduceBytes;
}

Group::Inside::Inside(Group& group, Kind kind, const std::string& what)
    : group_(group), kind_(kind), taken_(group.inside_[static_cast<std::size_t>(kind)]) {
  if (taken_.exchange(true, std::memory_order_acquire)) {
    throw Error(ErrorKind::kMismatch,
                text("two threads of rank ", group.context_.rank(), " are in ", what,
                     " of the same group at once: this one is refused, the other goes on; give "
                     "each thread a group of its own"));
  }
}

Group::Inside::~Inside() {
  if (kind_ == Kind::kExchange && group_.pending_segment_ != nullptr) {
    group_.context_.transport().leave(group_.pending_segment_->local());
  }
  taken_.store(false, std::memory_order_release);
}

Group::Group(Context& context, std::vector<Rank> ranks, bool world)
    : context_(context), ranks_(std::move(ranks)), world_(world) {
  std::sort(ranks_.begin(), ranks_.end());
  if (ranks_.empty()) throw Error(ErrorKind::kRank, "a group of no ranks");
  if (ranks_.size() > kMostMembers) {
    throw Error(ErrorKind::kRank,
                text("a group of ", ranks_.size(), " ranks: at most ", kMostMembers));
  }
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
  std::uint32_t ids = 2 * kBarrierRounds;
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

Group::~Group() {
  if (pending_segment_ != nullptr) context_.transport().retract(pending_segment_->local());
}

std::string Group::describe() { return context_.transport().publish(control_->local(), ranks_); }

Outcome Group::attach(const std::vector<std::string>& descriptions, Deadline deadline) {
  if (remotes_.empty()) remotes_ = attach(descriptions, 0, deadline);
  if (settle(*control_, remotes_, deadline) == Outcome::kDone) return Outcome::kDone;
  context_.transport().leave(control_->local());
  return Outcome::kTimeout;
}

std::vector<RemoteSegment> Group::attach(const std::vector<std::string>& descriptions,
                                         std::size_t skipped, Deadline deadline) {
  if (descriptions.size() != ranks_.size()) {
    throw Error(ErrorKind::kMismatch, text("descriptions of ", descriptions.size(),
                                           " ranks for a group of ", ranks_.size()));
  }
  std::vector<RemoteSegment> remotes(ranks_.size());
  for (std::size_t member = 0; member < ranks_.size(); ++member) {
    const Rank peer = ranks_[member];
    if (descriptions[member].size() < skipped) throw_malformed("segment description", peer);
    if (peer == context_.rank()) continue;
    remotes[member] =
        context_.transport().attach(peer, descriptions[member].substr(skipped), deadline);
  }
  return remotes;
}

Outcome Group::settle(Segment& segment, std::vector<RemoteSegment>& remotes, Deadline deadline) {
  if (context_.transport().settle(segment.local(), ranks_, remotes, deadline) != Outcome::kDone) {
    return Outcome::kTimeout;
  }
  for (std::size_t member = 0; member < ranks_.size(); ++member) {
    if (ranks_[member] == context_.rank()) continue;
    segment.set_remote(ranks_[member], std::move(remotes[member]));
  }
  remotes.clear();
  segment.set_self(context_.rank());  // last: a transport may have moved this rank's copy
  segment.local().descriptor.reset();
  return Outcome::kDone;
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
    const Health health = context_.liveness().health(peer);  // once: it may close just now
    if (health != Health::kHealthy && health != Health::kClosed) {
      context_.liveness().require(peer, what);
    }
  }
}

Outcome Group::barrier(const Inside&, Deadline deadline) {
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
    bool hopeless = false;
    const auto slow = [&] {
      const FlagWord& word = control_->local().board[kBarrierRounds + barrier_round_];
      if (context_.liveness().health(behind) == Health::kHealthy &&
          word.load(std::memory_order_acquire) == 0) {
        return;
      }
      // What it sent is here: it told before it left, and raised its flag before both. Then only
      // this rank's own flag is not posted yet.
      if (raised(barrier_round_, barrier_generation_)) return;
      hopeless = true;
      const std::uint32_t told = word.load(std::memory_order_acquire);
      if (told == 0) context_.liveness().require(behind, "barrier");
      throw Error(ErrorKind::kPeerLost,
                  text("barrier: rank ", behind, " waits for rank ", told - 1, ", which is gone"),
                  static_cast<Rank>(told - 1));
    };
    try {
      if (context_.waiter().until(ready, slow, deadline, "barrier") != Outcome::kDone) {
        return Outcome::kTimeout;
      }
    } catch (const Error& error) {
      if (hopeless && error.kind() == ErrorKind::kPeerLost) tell_barrier_lost(error.rank(), behind);
      throw;
    }
    barrier_sent_ = false;
  }
  barrier_under_way_ = false;
  return Outcome::kDone;
}

// Whoever may wait for this rank, now or in a barrier to come, would do so in vain.
void Group::tell_barrier_lost(Rank gone, Rank behind) {
  const auto members = static_cast<std::uint32_t>(ranks_.size());
  for (std::uint32_t round = 0; (1u << round) < members; ++round) {
    const Rank ahead = ranks_[(static_cast<std::uint32_t>(index_) + (1u << round)) % members];
    const RemoteSegment* remote = control_->remote(ahead);
    // Who needs no more of this barrier may have deleted the group: addresses are not to be
    // written to then.
    if (round < barrier_round_ && !world_ && remote->board == nullptr) continue;
    const auto told = static_cast<std::uint32_t>((gone >= 0 ? gone : behind) + 1);
    context_.liveness().tell(
        {context_.internal_queue(), ahead, {remote, kBarrierRounds + round, told}, control_});
  }
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

void Group::refuse_another(const Exchange& exchange, const std::string& what) const {
  throw Error(
      ErrorKind::kMismatch,
      text(what, ": ", exchange.what, " ended half way on this group of rank ", context_.rank(),
           ": continue that one first, with the same arguments, or form another group"));
}

void Group::begin_piece(Exchange& exchange, Kind kind) {
  exchange.generation = following(exchange.generation);
  exchange.next_to_send = 0;
  const std::size_t first = std::min(exchange.piece * slot_bytes(kind), exchange.mine.size());
  const std::size_t bytes = std::min(slot_bytes(kind), exchange.mine.size() - first);
  Header header{exchange.fingerprint,
                exchange.mine.size(),
                static_cast<std::uint32_t>(bytes),
                exchange.generation,
                {}};
  exchange.what.copy(header.what, sizeof header.what - 1);
  std::byte* slot = control_->local().data + slot_offset(exchange, kind, index_);
  std::memcpy(slot, &header, sizeof header);
  if (bytes != 0) std::memcpy(slot + sizeof header, exchange.mine.data() + first, bytes);
  exchange.bytes_to_send = sizeof header + bytes;
  context_.recorder().record(Operation::kAllgather, -1, control_->id(), exchange.generation, bytes);
}

bool Group::take_piece(Exchange& exchange, Kind kind) {
  std::uint64_t longest = 0;
  std::string others;
  for (std::size_t member = 0; member < ranks_.size(); ++member) {
    const std::byte* slot =
        control_->local().data + slot_offset(exchange, kind, static_cast<Rank>(member));
    Header header;
    std::memcpy(&header, slot, sizeof header);
    if (header.fingerprint != exchange.fingerprint || header.bytes > slot_bytes(kind)) {
      header.what[sizeof header.what - 1] = 0;
      others += text(others.empty() ? "" : ", ", "rank ", ranks_[member], " is in ", header.what);
      continue;
    }
    longest = std::max(longest, header.total);
    exchange.all[member].append(reinterpret_cast<const char*>(slot + sizeof header), header.bytes);
  }
  if (!others.empty()) {
    throw Error(ErrorKind::kMismatch,
                text("collective ", exchange.generation, " of segment ", control_->id(),
                     "'s group: rank ", context_.rank(), " is in ", exchange.what, ", but ", others,
                     ": order, sizes and dtypes must be the same on all ranks"));
  }
  return ++exchange.piece * slot_bytes(kind) >= longest;
}

Outcome Group::allgather(const Inside&, Kind kind, const std::string& what,
                         std::uint64_t fingerprint, std::span<const std::byte> mine,
                         Deadline deadline, std::vector<std::string>& all) {
  Exchange& exchange = exchanges_[static_cast<std::size_t>(kind)];
  check_members(what.c_str());
  if (kind == Kind::kExchange && !remotes_.empty()) refuse_another(exchange, what);
  if (!exchange.under_way) {
    exchange.what = what;
    exchange.fingerprint = fingerprint;
    exchange.mine.assign(reinterpret_cast<const char*>(mine.data()), mine.size());
    exchange.all.assign(ranks_.size(), {});
    exchange.piece = 0;
    begin_piece(exchange, kind);
    exchange.under_way = true;
  } else if (exchange.what != what || exchange.fingerprint != fingerprint ||
             !std::ranges::equal(std::as_bytes(std::span(exchange.mine)), mine)) {
    refuse_another(exchange, what);
  }
  const std::size_t members = ranks_.size();
  for (;;) {
    const std::uint64_t my_slot = slot_offset(exchange, kind, index_);
    std::size_t arrived = 0;
    const auto ready = [&] {
      for (; exchange.next_to_send < members; ++exchange.next_to_send) {
        const auto member = static_cast<Rank>(exchange.next_to_send);
        if (member == index_) continue;
        if (!send(member, my_slot, exchange.bytes_to_send, my_slot,
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
    // Everybody needs every member: nobody has to be told of one that is gone.
    const auto slow = [&] {
      for (std::size_t member = arrived; member < members; ++member) {
        const Rank peer = ranks_[member];
        if (context_.liveness().health(peer) == Health::kHealthy) continue;
        const auto id = exchange.first_id + static_cast<std::uint32_t>(member);
        if (!raised(id, exchange.generation)) context_.liveness().require(peer, what.c_str());
      }
    };
    if (context_.waiter().until(ready, slow, deadline, what.c_str()) != Outcome::kDone) {
      return Outcome::kTimeout;
    }
    exchange.under_way = false;
    const bool over = take_piece(exchange, kind);
    if (over) break;
    begin_piece(exchange, kind);
    exchange.under_way = true;
  }
  all = std::move(exchange.all);
  return Outcome::kDone;
}

std::string Group::missing_in_allgather(Kind kind) const {
  if (kind == Kind::kExchange && !remotes_.empty()) {
    return text("segment ", pending_segment_->id(), " of a group of ", ranks_.size(),
                ": every member has described its copy, but not all were there at once to make it; "
                "call it again");
  }
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

Outcome Group::create_segment(const Inside& inside, std::uint64_t bytes,
                              std::uint32_t notifications, std::byte* bound, Deadline deadline,
                              std::shared_ptr<Segment>& created) {
  Transport& transport = context_.transport();
  const char* const what = bound != nullptr ? "bind" : "segment";
  Exchange& exchange = exchanges_[static_cast<std::size_t>(Kind::kExchange)];
  check_members(what);
  std::string mine;
  if (!exchange.under_way && remotes_.empty()) {
    auto segment = std::make_shared<Segment>(context_.next_segment_id(), bytes, notifications,
                                             bound, context_.size());
    mine = packed(segment->id()) + transport.publish(segment->local(), ranks_);
    pending_segment_ = std::move(segment);
    pending_bound_ = bound;
  } else if (pending_segment_ != nullptr && pending_segment_->bytes() == bytes &&
             pending_segment_->notifications() == notifications && pending_bound_ == bound) {
    mine = exchange.mine;
  } else {
    refuse_another(exchange, what);
  }
  try {
    if (remotes_.empty()) {
      std::vector<std::string> all;
      if (allgather(inside, Kind::kExchange, what, bound != nullptr ? 2 : 1,
                    std::as_bytes(std::span(mine)), deadline, all) != Outcome::kDone) {
        return Outcome::kTimeout;
      }
      // Everything needed was sent before the exchange ended: it is here, or the peer is gone.
      remotes_ = attach(all, sizeof(SegmentId), Deadline::in(context_.options().timeout));
      std::string_view first = all[0];
      pending_segment_->set_id(
          take_packed<SegmentId>(first, "segment description", ranks_.front()));
    }
    if (settle(*pending_segment_, remotes_, deadline) != Outcome::kDone) {
      // Whoever closed has left without it.
      for (const Rank peer : ranks_) context_.liveness().require(peer, what);
      return Outcome::kTimeout;
    }
  } catch (const Error&) {
    if (exchange.under_way) throw;  // to be continued
    transport.leave(pending_segment_->local());
    transport.retract(pending_segment_->local());
    pending_segment_.reset();
    pending_bound_ = nullptr;
    remotes_.clear();
    throw;
  }
  created = std::move(pending_segment_);
  pending_bound_ = nullptr;
  return Outcome::kDone;
}

void Group::delete_segment(Context& context, Segment& segment) {
  context.require_usable();
  if (!segment.release_local()) {
    throw Error(ErrorKind::kSegment, text("segment ", segment.id(), " was deleted already"));
  }
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
  try {
    while (
        !send(sender, 0, 0, 0, credit_id_ + me, mail_received_[static_cast<std::size_t>(sender)])) {
      if (context_.liveness().health(sender) != Health::kHealthy || bounded.passed()) break;
      context_.transport().progress();
    }
  } catch (const Error&) {
    // Who cannot be told has left, or will not be heard again: what it sent before is here.
  }
  return outcome;
}

}  // namespace pgasdl
