// The simulator's engine, for the sanitizers: its results are tested from Python.
#include <cmath>
#include <cstdio>
#include <numeric>

#include "check.hpp"
#include "simulate/heap.hpp"
#include "simulate/model.hpp"

namespace {

using namespace pgasdl::simulate;

// Every rank puts a block to every other, in relative operations, and waits for all blocks.
Program all_to_all(std::int64_t ranks, std::int64_t bytes) {
  Program made;
  for (std::int64_t step = 1; step < ranks; ++step) {
    made.ops.push_back({kPut | kRelative | kNoteOfSelf, step, 0, bytes});
  }
  for (std::int64_t step = 1; step < ranks; ++step) {
    made.ops.push_back({kWait | kRelative | kNoteOfPeer, step, 0, 0});
  }
  made.ops.push_back({kFlush, 0, 0, 0});
  made.lanes = 1;
  made.notifications = ranks;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    made.ranges.insert(made.ranges.end(), {0, static_cast<std::int64_t>(made.ops.size())});
  }
  CHECK(made.index(ranks));
  return made;
}

Machine machine(std::int64_t ranks, std::int64_t per_group, bool blocking) {
  Machine made;
  Level inside{{}, {}, 2.0, true, 10.0, 1.0, 1.0}, whole{{}, {}, 0.0, true, 20.0, 1.0, 1.0};
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    inside.group.push_back(static_cast<std::int32_t>(rank / per_group));
    inside.link.push_back(static_cast<std::int32_t>(rank / per_group));
    whole.group.push_back(0);
    whole.link.push_back(-1);
  }
  made.levels = {inside, whole};
  made.blocking = blocking;
  return made;
}

void exchanges(std::int64_t ranks, bool blocking) {
  const Program program = all_to_all(ranks, 100);
  const Machine on = machine(ranks, 3, blocking);
  Scenario scenario;
  scenario.ranks = ranks;
  scenario.programs = {&program};
  scenario.jobs = {0, 0, 0};
  scenario.application = {{kCompute, 0, 5.0}, {kStart, 0, 0}, {kStart, 1, 0}, {kJoin, 1, 0},
                          {kStart, 2, 0},     {kJoin, 2, 0},  {kJoin, 0, 0}};
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    scenario.begin.push_back(static_cast<double>(rank * 7 % 5));
    scenario.slow.push_back(1.0 + static_cast<double>(rank % 2));
  }
  const Result one = run(on, scenario), other = run(on, scenario);
  CHECK(one.stuck.empty());
  CHECK(one.finish == other.finish && one.moments == other.moments);
  CHECK(one.messages == 3 * ranks * (ranks - 1));
  // A port is busy for 101 seconds with each message of an exchange.
  for (const double end : one.finish) CHECK(end >= 101.0 * static_cast<double>(ranks - 1));
}

void waits_for_ever() {
  Program program = all_to_all(2, 8);
  program.ops[0].note = 0;
  program.ops[0].flags = kFlush;  // no rank sends
  CHECK(program.index(2));
  const Machine on = machine(2, 1, false);
  const Scenario scenario{2,          {&program}, {0}, {{kStart, 0, 0}, {kJoin, 0, 0}},
                          {0.0, 0.0}, {1.0, 1.0}};
  CHECK(run(on, scenario).stuck.find("of which 0 are ever raised") != std::string::npos);
}

void heaps() {
  Heap heap;
  std::uint64_t number = 0;
  double last = -1;
  std::uint64_t seed = 1;
  for (int round = 0; round < 3000; ++round) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    for (std::uint64_t n = 0; n < (seed >> 60) % 3; ++n) {
      heap.push({last + 1 + static_cast<double>((seed >> 33) % 50), number++, kPort, 0});
    }
    if (!heap.empty()) {
      const Event first = heap.first(), taken = heap.take();
      CHECK(first.number == taken.number && taken.at >= last);
      last = taken.at;
    }
  }
}

}  // namespace

int main() {
  for (const std::int64_t ranks : {2, 3, 7, 16}) {
    exchanges(ranks, false);
    exchanges(ranks, true);
  }
  waits_for_ever();
  heaps();
  std::puts("ok");
}
