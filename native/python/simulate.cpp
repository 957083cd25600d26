#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>

#include "python/handles.hpp"
#include "simulate/model.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

using Integers = nb::ndarray<const std::int64_t, nb::c_contig, nb::device::cpu>;
using Reals = nb::ndarray<nb::numpy, double, nb::ndim<1>>;
using Links = std::vector<std::int32_t>;
// group, link, link_beta, through, latency, startup, port_beta
using LevelTuple = std::tuple<Links, Links, double, bool, double, double, double>;
// gamma, copy, remote, update, blocking
using Costs = std::tuple<double, double, double, double, bool, bool>;
using ActionTuple = std::tuple<std::int64_t, std::int64_t, double>;

std::vector<std::int64_t> copied(const Integers& array) {
  return {array.data(), array.data() + array.size()};
}

void check(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

simulate::Program* make_program(const Integers& ops, const Integers& ranges, const Integers& table,
                                std::int64_t ranks, std::int64_t notifications) {
  auto made = std::make_unique<simulate::Program>();
  check(ops.size() % 4 == 0 && ranks > 0 && ranges.size() % (2 * ranks) == 0, "ops or ranges");
  const auto count = static_cast<std::int64_t>(ops.size() / 4);
  made->ops.resize(count);
  std::copy_n(ops.data(), ops.size(), reinterpret_cast<std::int64_t*>(made->ops.data()));
  made->ranges = copied(ranges);
  made->table = copied(table);
  made->lanes = static_cast<std::int64_t>(ranges.size()) / (2 * ranks);
  made->notifications = notifications;
  for (std::size_t i = 0; i < made->ranges.size(); i += 2) {
    const std::int64_t begin = made->ranges[i], end = made->ranges[i + 1];
    check(0 <= begin && begin <= end && end <= count, "a range leaves the ops");
  }
  for (const simulate::Op& op : made->ops) {
    const std::int64_t kind = op.flags & 7;
    const bool table_used = op.flags & (simulate::kBytesOfPeer | simulate::kBytesOfSelf);
    check(kind <= simulate::kFlush && op.bytes >= 0, "no such operation");
    check(!table_used || table.size() == static_cast<std::size_t>(ranks), "no table");
    check(kind == simulate::kReduce || (0 <= op.peer && op.peer < ranks), "no such peer");
    const bool flagged = kind == simulate::kWait || (kind == simulate::kPut && op.note >= 0);
    const std::int64_t reach =
        op.note + (op.flags & (simulate::kNoteOfPeer | simulate::kNoteOfSelf) ? ranks - 1 : 0);
    check(!flagged || (op.note >= 0 && reach < notifications), "no such notification");
  }
  check(made->index(ranks), "a notification is awaited twice");
  return made.release();
}

Reals as_array(std::vector<double> values) {
  auto* kept = new std::vector<double>(std::move(values));
  const nb::capsule owner(kept, [](void* of) noexcept { delete static_cast<decltype(kept)>(of); });
  return Reals(kept->data(), {kept->size()}, owner);
}

simulate::Scenario scenario_of(const std::vector<const simulate::Program*>& programs,
                               const std::vector<std::int64_t>& jobs, std::size_t ranks) {
  simulate::Scenario scenario;
  scenario.ranks = static_cast<std::int64_t>(ranks);
  scenario.programs = programs;
  scenario.jobs = jobs;
  for (const simulate::Program* program : programs) {
    check(program->ranges.size() == 2 * ranks * program->lanes, "a program of another size");
  }
  for (const std::int64_t job : jobs) {
    check(0 <= job && job < static_cast<std::int64_t>(programs.size()), "no such program");
  }
  return scenario;
}

// Messages and neighbours of the ranks with the most.
std::pair<std::int64_t, std::int64_t> traffic(const std::vector<const simulate::Program*>& programs,
                                              const std::vector<std::int64_t>& jobs,
                                              std::size_t ranks) {
  const simulate::Scenario scenario = scenario_of(programs, jobs, ranks);
  const WithoutGil release;
  const simulate::Traffic most = simulate::traffic(scenario);
  return {most.messages, most.neighbours};
}

std::tuple<Reals, Reals, std::vector<double>, std::vector<double>, std::int64_t, std::string>
run_simulation(const std::vector<LevelTuple>& levels, const Costs& costs,
               const std::vector<const simulate::Program*>& programs,
               const std::vector<std::int64_t>& jobs, const std::vector<ActionTuple>& application,
               const std::vector<double>& begin, const std::vector<double>& slow) {
  simulate::Machine machine;
  const std::size_t ranks = begin.size();
  check(!levels.empty() && ranks > 0 && slow.size() == ranks, "levels, begin or slow");
  for (const auto& [group, link, link_beta, through, latency, startup, port_beta] : levels) {
    check(group.size() == ranks && link.size() == ranks, "a level of another number of ranks");
    for (const std::int32_t number : link) check(number >= -1, "no such link");
    machine.levels.push_back({group, link, link_beta, through, latency, startup, port_beta});
  }
  for (const std::int32_t group : machine.levels.back().group) {
    check(group == machine.levels.back().group[0], "ranks that never meet");
  }
  std::tie(machine.gamma, machine.copy, machine.remote, machine.update, machine.blocking,
           machine.turns) = costs;
  simulate::Scenario scenario = scenario_of(programs, jobs, ranks);
  for (const auto& [act, job, seconds] : application) {
    check(simulate::kCompute <= act && act <= simulate::kJoin, "no such action");
    check(0 <= job && job < static_cast<std::int64_t>(jobs.size() + 1), "no such job");
    scenario.application.push_back({act, job, seconds});
  }
  scenario.begin = begin;
  scenario.slow = slow;
  simulate::Result result;
  {
    const WithoutGil release;
    result = simulate::run(machine, scenario);
  }
  return {as_array(std::move(result.finish)),
          as_array(std::move(result.moments)),
          result.link_busy,
          result.bytes,
          result.messages,
          result.stuck};
}

}  // namespace

void bind_simulate(nb::module_& module) {
  nb::class_<simulate::Program>(module, "Program",
                                "A plan of all ranks as arrays of steps, to be simulated.")
      .def(nb::new_(&make_program), "ops"_a, "ranges"_a, "table"_a, "ranks"_a, "notifications"_a);
  module.def("traffic", &traffic, "programs"_a, "jobs"_a, "ranks"_a,
             "Messages that a rank sends, and ranks that it sends to or gets from: the most.");
  module.def("simulate", &run_simulation, "levels"_a, "costs"_a, "programs"_a, "jobs"_a,
             "application"_a, "begin"_a, "slow"_a,
             "Runs plans on a modelled machine; pgasdl.simulate says what it takes and gives.");
}

}  // namespace pgasdl
