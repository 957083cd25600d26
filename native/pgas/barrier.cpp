// A group's barrier: a dissemination in ceil(log2 P) rounds.
#include "pgas/context.hpp"
#include "pgas/group.hpp"

namespace pgasdl {

Outcome Group::barrier(const Inside&, Deadline deadline) {
  check_members("barrier");
  if (!barrier_under_way_) {
    barrier_under_way_ = true;
    barrier_.begin();
    context_.recorder().record(Operation::kBarrier, -1, control_->id(), barrier_.generation, 0);
  }
  const auto post = [this](std::size_t round) {
    return send(ahead(barrier_.steps[round].distance), {},
                barrier_.first_flag + static_cast<std::uint32_t>(round), barrier_.generation);
  };
  if (disseminate(barrier_, post, deadline, WaitCause::kBarrier, "barrier") != Outcome::kDone)
    return Outcome::kTimeout;
  barrier_under_way_ = false;
  return Outcome::kDone;
}

std::string Group::missing_in_barrier() const {
  const std::size_t round = barrier_.arrived;
  return text("nothing yet from rank ", behind(barrier_.steps[round].distance), ": barrier ",
              barrier_.generation, " of a group of ", ranks_.size(), ", round ", round,
              ", notification ", barrier_.first_flag + round, " of segment ", control_->id(),
              elsewhere("barrier"));
}

}  // namespace pgasdl
