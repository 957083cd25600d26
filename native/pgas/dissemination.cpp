// The steps of a group's barriers and all-gathers, and the notices of members that cannot continue.
#include "pgas/dissemination.hpp"

#include <optional>

#include "pgas/context.hpp"
#include "pgas/group.hpp"

namespace pgasdl {

Rank Group::ahead(std::size_t distance) const {
  return ranks_[(static_cast<std::size_t>(index_) + distance) % ranks_.size()];
}

Rank Group::behind(std::size_t distance) const { return ahead(ranks_.size() - distance); }

bool Group::arrived(const Course& course, std::size_t step) const {
  return raised(course.first_flag + static_cast<std::uint32_t>(step), course.generation);
}

// 1 + the lost rank for which the sender of the step waits in vain, or 0.
std::uint32_t Group::announced(const Course& course, std::size_t step) const {
  if (!course.relayed()) return 0;
  const FlagWord& word = control_->local().board[course.first_word + step];
  return word.load(std::memory_order_acquire);
}

Outcome Group::disseminate(Course& course, const std::function<bool(std::size_t)>& post,
                           Deadline deadline, WaitCause cause, const char* what) {
  const auto patience = std::chrono::milliseconds(2 * context_.options().heartbeat_ms);
  while (course.arrived < course.steps.size()) {
    const std::size_t end = course.end_of_base(course.arrived);
    std::optional<Error> refused;
    const auto ready = [&] {
      for (; course.sent < end; ++course.sent) {
        const Rank peer = ahead(course.steps[course.sent].distance);
        refused.reset();
        try {
          // A dead peer needs nothing; ranks that wait for blocks through it learn of its death.
          if (context_.liveness().health(peer) == Health::kHealthy && !post(course.sent)) {
            return false;
          }
        } catch (const Error& error) {
          if (error.kind() != ErrorKind::kPeerLost || error.rank() != peer) throw;
          if (course.refused_since == Clock::time_point{}) course.refused_since = Clock::now();
          refused = error;
          return false;
        }
        course.refused_since = {};
      }
      for (; course.arrived < end; ++course.arrived) {
        if (!arrived(course, course.arrived)) return false;
      }
      return true;
    };
    // This rank learns of a peer's leave or death a moment after its transport does; a peer that is
    // still healthy after that is only out of reach.
    const auto give_up = [&] {
      if (refused && Clock::now() - course.refused_since > patience) throw Error(*refused);
    };
    Rank hopeless = -1;  // the rank from which nothing more comes
    const auto slow = [&] {
      give_up();
      for (std::size_t step = course.arrived; step < end; ++step) {
        const Rank peer = behind(course.steps[step].distance);
        if (context_.liveness().health(peer) == Health::kHealthy && announced(course, step) == 0) {
          continue;
        }
        // Its messages are here: it announced before it left, and raised its flag before both. If
        // the step has arrived, only posts of this rank or steps of others are missing.
        if (arrived(course, step)) continue;
        hopeless = peer;
        const std::uint32_t gone = announced(course, step);
        if (gone == 0) context_.liveness().require(peer, what);
        throw Error(ErrorKind::kPeerLost,
                    text(what, ": rank ", peer, " waits for rank ", gone - 1, ", which is gone"),
                    static_cast<Rank>(gone - 1));
      }
    };
    try {
      if (context_.waiter().until(ready, slow, deadline, cause, what) != Outcome::kDone) {
        give_up();
        return Outcome::kTimeout;
      }
    } catch (const Error& error) {
      if (hopeless >= 0 && error.kind() == ErrorKind::kPeerLost) {
        announce_lost(course, error.rank() >= 0 ? error.rank() : hopeless);
      }
      throw;
    }
  }
  return Outcome::kDone;
}

// Announces this rank's end to all that may wait for it, now or in later collectives of this kind.
void Group::announce_lost(const Course& course, Rank gone) {
  if (!course.relayed()) return;
  for (std::size_t step = 0; step < course.steps.size(); ++step) {
    const Rank peer = ahead(course.steps[step].distance);
    const RemoteSegment* remote = control_->remote(peer);
    // A peer that has finished this collective may have deleted the group: without a mapping, its
    // addresses must not be written to.
    if (step < course.sent && !world_ && remote->board == nullptr) continue;
    const auto id = course.first_word + static_cast<std::uint32_t>(step);
    context_.liveness().announce({context_.internal_queue(),
                                  peer,
                                  {remote, id, static_cast<std::uint32_t>(gone + 1)},
                                  control_});
  }
}

}  // namespace pgasdl
