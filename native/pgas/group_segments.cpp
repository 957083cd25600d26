// A group's segments: its own, and those that its members create together.
#include "pgas/context.hpp"
#include "pgas/group.hpp"
#include "sys/packed.hpp"

namespace pgasdl {

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

}  // namespace pgasdl
