// Plans executed by ranks that are threads: every result is exact, the next iteration's data are
// written as soon as the last one has ended, and there is no barrier.

#include <algorithm>
#include <atomic>
#include <random>

#include "plans.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

using Waited = Executor::Waited;

void iterations(const Settings& settings, Kind kind, Rank size, std::uint64_t count,
                std::uint32_t rounds, bool progress_thread = false) {
  run(size, settings, [&](Local& local) {
    Exchange exchange(local, kind, count);
    if (progress_thread) local.executor.start_thread();
    for (std::uint32_t round = 0; round < rounds; ++round) {
      exchange.fill(local.rank(), round);
      local.executor.start(exchange.plan());
      finish(local, exchange.plan());
      exchange.verify(exchange.data(), size, round);
    }
    CHECK(exchange.plan().number() == rounds);
  });
}

// Each execution works on another array, which each rank takes from any place in one of two common
// segments and announces to its peers.
void arrays_that_move(const Settings& settings, Rank size, std::uint64_t count,
                      bool progress_thread) {
  run(size, settings, [&](Local& local) {
    const std::uint64_t bytes = count * sizeof(float);
    const auto entries = local.segment(64);
    const std::vector homes{local.segment(2 * bytes), local.segment(3 * bytes)};
    const auto rest = local.segment((1 + static_cast<std::uint64_t>(size)) * bytes);
    const auto directory = std::make_shared<Directory>(entries, 56, homes);
    const auto ranks = everybody(local.size());
    const auto somewhere = std::make_shared<Segment>(homes[0]->local().data, bytes);
    const auto plan = bound(local, gdraa_direct(local.rank(), size, count),
                            {{somewhere, 0, DType::kF32, {}, directory}, {rest, 0}, {rest, bytes}},
                            ranks, entries, 7);
    if (progress_thread) local.executor.start_thread();
    std::mt19937_64 random(static_cast<std::uint64_t>(local.rank()) * 31 + 5);
    for (std::uint32_t round = 0; round < 60; ++round) {
      const std::size_t home = random() % 2;
      const std::uint64_t at = random() % ((home + 1) * count + 1);
      float* const array = items<float>(homes[home]) + at;
      for (std::uint64_t i = 0; i < count; ++i) {
        array[i] = Exchange::value(local.rank(), round, i);
      }
      auto* const address = reinterpret_cast<std::byte*>(array);
      local.executor.start(*plan, {BufferAccess::kRebased, address, address, bytes});
      CHECK(local.executor.wait(*plan, soon()) == Waited::kDone);
      for (std::uint64_t i = 0; i < count; ++i) {
        CHECK(array[i] == Exchange::sum(size, round, i));
      }
    }
    local.executor.stop_thread();
    // If one rank's array lies in no home, nothing is reduced, and every rank that reduces knows
    // it.
    std::vector<float> elsewhere(count);
    for (const bool found : {false, true}) {
      float* const array = found || local.rank() != 0 ? items<float>(homes[0]) : elsewhere.data();
      std::fill_n(array, count, 1.0F);
      auto* const address = reinterpret_cast<std::byte*>(array);
      local.executor.start(*plan, {BufferAccess::kRebased, address, address, bytes});
      CHECK(local.executor.wait(*plan, soon()) == Waited::kDone);
      const float sum = found ? static_cast<float>(size) : 1.0F;
      CHECK(std::all_of(array, array + count, [&](float item) { return item == sum; }));
      CHECK(local.rank() != 0 || plan->declined() != found);
    }
    CHECK(plan->number() == 62);
    require_error(ErrorKind::kMismatch, [&] {
      (void)directory->look_up(local.peer(1), bytes, plan->numbering()->generation() + 1);
    });
    require_error(ErrorKind::kMismatch, [&] {
      (void)directory->look_up(local.peer(1), 4 * bytes, plan->numbering()->generation());
    });
    require_error(ErrorKind::kPlan, [&] { Directory(entries, 60, homes); });
    require_error(ErrorKind::kPlan, [&] { Directory(entries, 64, homes); });
    local.barrier();
  });
}

// A plan that does not fit is refused before anything runs.
void refusals() {
  run(2, {}, [&](Local& local) {
    const auto segment = local.segment(4096, 8);
    const auto refused = [&](Steps& lane, std::uint64_t count, std::vector<BufferHome> homes = {}) {
      const Plan plan = plan_of("wrong", local.rank(), 2, count, lane);
      const BufferBinding binding{segment, 0, DType::kF32, std::move(homes)};
      require_error(ErrorKind::kPlan, [&] {
        BoundPlan bound(local.context, plan, {binding, binding, binding}, {0, 1}, segment, 0, 1);
      });
    };
    Steps beyond;
    beyond.put({kData, 90, -1}, 20, local.peer(1), {kData, 0, -1}, 0);
    refused(beyond, 100);
    Steps nobody;
    nobody.flag(2, 0);
    refused(nobody, 100);
    Steps no_id;
    no_id.wait(4, 0);
    refused(no_id, 100);
    Steps too_large;
    too_large.reduce({{kData, 0, -1}}, {{kData, 0, -1}}, 1025);
    refused(too_large, 1025);
    Steps empty;
    empty.reduce({{kData, 0, -1}}, {}, 10);
    refused(empty, 100);
    Steps huge;
    huge.put({kData, UINT64_MAX, -1}, 2, local.peer(1), {kData, 0, -1}, 0);
    refused(huge, 100);
    const BufferHome mine{segment, 0};
    const BufferHome too_far{segment, 4096 - 100 * sizeof(float) + 4};
    const auto peers = local.rank() == 0 ? std::vector{mine, too_far} : std::vector{too_far, mine};
    for (const auto& homes : {peers, {mine}}) {
      Steps fits;
      fits.put({kData, 0, -1}, 100, local.peer(1), {kData, 0, -1}, 0);
      refused(fits, 100, homes);
    }
    local.barrier();
  });
}

}  // namespace

int main() {
  for (const Settings& settings : adversaries(31)) {
    for (const Kind kind : {Kind::kGdraa, Kind::kDirect, Kind::kTree}) {
      if (kind == Kind::kDirect && !settings.faults.mapped) continue;
      for (const Rank size : {2, 3}) iterations(settings, kind, size, 100, 15);
      iterations(settings, kind, 4, 2, 15);
    }
    if (settings.faults.mapped) {
      arrays_that_move(settings, 2, 100, false);
      arrays_that_move(settings, 3, 50, true);
    }
  }
  Settings shared;
  shared.shm = true;
  for (const std::uint64_t count : {2, 900}) {
    arrays_that_move(shared, 4, count, count > 2);
  }
  Settings sleeping;
  sleeping.options = sleepy();
  for (const Kind kind : {Kind::kGdraa, Kind::kDirect, Kind::kTree}) {
    iterations({}, kind, 1, 10, 3);
    iterations({}, kind, 5, 1000, 60);
    iterations({}, kind, 2, 300, 300, true);
    iterations(sleeping, kind, 3, 100, 60, true);
    iterations({}, kind, 2, 1'300'000, 2);  // reductions in several passes
  }
  refusals();
  std::puts("ok");
}
