#include <algorithm>
#include <functional>

#include "simulate/model.hpp"

namespace pgasdl::simulate {
namespace {

// Every message of `program`, by sender and receiver.
void each_put(const Program& program, std::int64_t ranks,
              const std::function<void(std::int64_t, std::int64_t)>& put) {
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    for (std::int64_t lane = 0; lane < program.lanes; ++lane) {
      const std::int64_t* range = &program.ranges[2 * (rank * program.lanes + lane)];
      for (std::int64_t at = range[0]; at < range[1]; ++at) {
        if ((program.ops[at].flags & 7) != kPut) continue;
        const Resolved found = resolve(program, program.ops[at], rank, ranks);
        if (!found.skip) put(rank, found.peer);
      }
    }
  }
}

}  // namespace

Traffic traffic(const Scenario& scenario) {
  std::vector<std::int64_t> messages(scenario.ranks);
  for (const std::int64_t job : scenario.jobs) {
    each_put(*scenario.programs[job], scenario.ranks,
             [&](std::int64_t rank, std::int64_t) { ++messages[rank]; });
  }
  std::vector<std::vector<std::int32_t>> neighbours(scenario.ranks);
  for (const Program* program : scenario.programs) {
    each_put(*program, scenario.ranks, [&](std::int64_t rank, std::int64_t peer) {
      if (peer == rank) return;
      neighbours[rank].push_back(static_cast<std::int32_t>(peer));
      neighbours[peer].push_back(static_cast<std::int32_t>(rank));
    });
  }
  Traffic most;
  for (std::int64_t rank = 0; rank < scenario.ranks; ++rank) {
    auto& all = neighbours[rank];
    std::ranges::sort(all);
    const auto doubled = std::ranges::unique(all);
    const auto different = static_cast<std::int64_t>(doubled.begin() - all.begin());
    most.neighbours = std::max(most.neighbours, different);
    most.messages = std::max(most.messages, messages[rank]);
  }
  return most;
}

}  // namespace pgasdl::simulate
