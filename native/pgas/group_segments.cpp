// A group's segments: its own, and those that its members create together.
#include <algorithm>

#include "pgas/context.hpp"
#include "pgas/group.hpp"
#include "sys/packed.hpp"

namespace pgasdl {

std::vector<RemoteSegment> Group::attach(const std::vector<std::string>& descriptions,
                                         std::size_t skipped, int device, Deadline deadline) {
  if (descriptions.size() != ranks_.size()) {
    throw Error(ErrorKind::kMismatch, text("descriptions of ", descriptions.size(),
                                           " ranks for a group of ", ranks_.size()));
  }
  std::vector<RemoteSegment> remotes(ranks_.size());
  std::exception_ptr fault;
  for (std::size_t member = 0; member < ranks_.size(); ++member) {
    const Rank peer = ranks_[member];
    if (descriptions[member].size() < skipped) throw_malformed("segment description", peer);
    if (peer == context_.rank()) continue;
    // Takes every description, even after a failure: the transport keeps descriptors until then.
    try {
      remotes[member] =
          context_.transport().attach(peer, descriptions[member].substr(skipped), device, deadline);
    } catch (const Error&) {
      if (!fault) fault = std::current_exception();
    }
  }
  if (fault) std::rethrow_exception(fault);
  return remotes;
}

// Every member has all descriptions, and attaches or drops what was published.
void Group::handed_over(Segment& segment) {
  segment.local().descriptor.reset();
  segment.local().device_descriptor.reset();
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
  return Outcome::kDone;
}

void Group::begin_creation(std::uint64_t bytes, std::uint32_t notifications, SegmentHome home) {
  Creation creation{nullptr, bytes, notifications, home, {}, {}, {}, nullptr};
  Head head{bytes, context_.next_segment_id(), kNoFault, home.device != kHost, home.reached};
  std::string rest;
  try {
    creation.segment =
        std::make_shared<Segment>(head.id, bytes, notifications, home, context_.size());
    const LocalSegment& local = creation.segment->local();
    rest = context_.publish(creation.segment->local(), ranks_);
    if (local.needs_flush) context_.flush_before_kernels(local.device);
  } catch (const Error& error) {
    // The others cannot continue without it, so the fault is sent to them.
    if (home.device == kHost || error.kind() == ErrorKind::kSegment) throw;
    if (creation.segment != nullptr) context_.transport().retract(creation.segment->local());
    creation.segment.reset();
    creation.fault = std::current_exception();
    head.fault = static_cast<std::uint32_t>(error.kind());
    rest = error.what();
  }
  creation.description = packed(head) + rest;
  creation_ = std::move(creation);
}

void Group::take_descriptions(const std::vector<std::string>& all, const char* what) {
  Creation& creation = *creation_;
  if (creation.segment != nullptr) handed_over(*creation.segment);
  // Peers sent all that attaching needs before the exchange ended: it is here, or the peer is gone.
  const Deadline deadline = Deadline::in(context_.options().timeout);
  std::vector<Head> heads;
  try {
    heads = require_all(all, what);
  } catch (const Error&) {
    forget(all, deadline);
    throw;
  }
  creation.segment->set_id(heads[0].id);
  if (std::ranges::none_of(heads, [](const Head& head) { return head.on_device != 0; })) {
    remotes_ = attach(all, sizeof(Head), kHost, deadline);
    return;
  }
  // Not every rank sees every GPU, so each rank sends a verdict whether it reaches all copies.
  Head head{creation.bytes, heads[0].id, kNoFault, 1, creation.home.reached};
  std::string rest;
  try {
    creation.attached = attach(all, sizeof(Head), creation.home.device, deadline);
    for (std::size_t member = 0; member < heads.size(); ++member) {
      RemoteSegment& remote = creation.attached[member];
      if (heads[member].on_device == 0 || ranks_[member] == context_.rank()) continue;
      if (creation.home.device != kHost && heads[member].reached != head.reached) {
        throw Error(ErrorKind::kMismatch,
                    text(what, ": rank ", head.reached != 0 ? ranks_[member] : context_.rank(),
                         " does not let peers reach memory of its GPU, rank ",
                         head.reached != 0 ? context_.rank() : ranks_[member], " does (",
                         head.reached != 0 ? "it" : context_.why_unreached(creation.home.device),
                         "); set PGASDL_GPU=staged on all ranks where one cannot"),
                    ranks_[member]);
      }
      if (heads[member].reached == 0) {
        remote.device = kUnreached;
        remote.bytes = heads[member].bytes;
      }
    }
  } catch (const Error& error) {
    creation.fault = std::current_exception();
    head.fault = static_cast<std::uint32_t>(error.kind());
    rest = error.what();
  }
  creation.verdict = packed(head) + rest;
}

// Attaches and drops what the transport keeps of members that have a copy.
void Group::forget(const std::vector<std::string>& all, Deadline deadline) const {
  for (std::size_t member = 0; member < all.size(); ++member) {
    std::string_view rest = all[member];
    try {
      const auto head = take_packed<Head>(rest, "segment description", ranks_[member]);
      if (head.fault != kNoFault || ranks_[member] == context_.rank()) continue;
      (void)context_.transport().attach(ranks_[member], std::string(rest), kHost, deadline);
    } catch (const Error&) {
      continue;
    }
  }
}

// Throws the fault that keeps this rank or another one from having a copy.
std::vector<Group::Head> Group::require_all(const std::vector<std::string>& all,
                                            const char* what) const {
  if (creation_->fault) std::rethrow_exception(creation_->fault);
  std::vector<Head> heads;
  for (std::size_t member = 0; member < all.size(); ++member) {
    std::string_view rest = all[member];
    heads.push_back(take_packed<Head>(rest, "segment description", ranks_[member]));
    if (heads.back().fault == kNoFault) continue;
    throw Error(static_cast<ErrorKind>(heads.back().fault),
                text(what, ": rank ", ranks_[member], " cannot: ", rest));
  }
  return heads;
}

Outcome Group::create_segment(const Inside& inside, std::uint64_t bytes,
                              std::uint32_t notifications, SegmentHome home, Deadline deadline,
                              std::shared_ptr<Segment>& created) {
  Transport& transport = context_.transport();
  const char* const what = home.bound != nullptr ? "bind" : "segment";
  Exchange& exchange = exchanges_[static_cast<std::size_t>(Kind::kExchange)];
  check_members(what);
  home.reached = home.device == kHost || context_.why_unreached(home.device).empty();
  if (!exchange.under_way && remotes_.empty()) {
    begin_creation(bytes, notifications, home);
  } else if (!creation_ || creation_->bytes != bytes || creation_->notifications != notifications ||
             !(creation_->home == home)) {
    refuse_another(exchange, what);
  }
  const std::uint64_t fingerprint = home.bound != nullptr ? 2 : 1;
  const auto exchanged = [&](const std::string& mine, std::uint64_t step,
                             std::vector<std::string>& all) {
    return allgather(inside, Kind::kExchange, what, fingerprint + 2 * step,
                     std::as_bytes(std::span(mine)), deadline, all) == Outcome::kDone;
  };
  try {
    std::vector<std::string> all;
    if (remotes_.empty() && creation_->verdict.empty()) {
      if (!exchanged(creation_->description, 0, all)) return Outcome::kTimeout;
      take_descriptions(all, what);
    }
    if (remotes_.empty()) {
      if (!exchanged(creation_->verdict, 1, all)) return Outcome::kTimeout;
      (void)require_all(all, what);
      remotes_ = std::move(creation_->attached);
    }
    if (settle(*creation_->segment, remotes_, deadline) != Outcome::kDone) {
      // A rank that has closed has left without settling.
      for (const Rank peer : ranks_) context_.liveness().require(peer, what);
      return Outcome::kTimeout;
    }
  } catch (const Error&) {
    if (exchange.under_way) throw;  // the caller may continue it
    if (creation_->segment != nullptr) {
      transport.leave(creation_->segment->local());
      transport.retract(creation_->segment->local());
    }
    creation_.reset();
    remotes_.clear();
    throw;
  }
  created = std::move(creation_->segment);
  creation_.reset();
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
