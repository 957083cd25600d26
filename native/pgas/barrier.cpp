// A group's barrier: dissemination, in as many rounds as its size has bits.
#include "pgas/context.hpp"
#include "pgas/group.hpp"

namespace pgasdl {

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

}  // namespace pgasdl
