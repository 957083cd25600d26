#pragma once

// The plans of pgasdl/plans as C++ data, for one lane and kind "sum" or "update": tests of the
// executor under a sanitizer must not need Python. The Python plans have their own checker.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "executor/bound_plan.hpp"
#include "ranks.hpp"

namespace pgasdl::testing {

inline std::pair<std::uint64_t, std::uint64_t> block(std::uint64_t count, Rank size, Rank rank) {
  const auto n = static_cast<std::uint64_t>(size);
  const auto r = static_cast<std::uint64_t>(rank);
  return {count * r / n, count * (r + 1) / n - count * r / n};
}

class Steps {
 public:
  void put(PlanSpan source, std::uint64_t count, Rank peer, PlanSpan target, std::int64_t id) {
    steps.push_back({PlanStep::Kind::kPut, {target}, {source}, count, peer, id, 1, {}});
  }
  void flag(Rank peer, std::int64_t id) {
    steps.push_back({PlanStep::Kind::kPut, {}, {}, 0, peer, id, 1, {}});
  }
  void wait(std::int64_t id, Rank owed_by) {
    steps.push_back({PlanStep::Kind::kWait, {}, {}, 0, owed_by, id, 1, {}});
  }
  void reduce(std::vector<PlanSpan> targets, std::vector<PlanSpan> sources, std::uint64_t count) {
    steps.push_back(
        {PlanStep::Kind::kReduce, std::move(targets), std::move(sources), count, -1, -1, 1, {}});
  }
  void call(PlanSpan span, std::uint64_t count) {
    steps.push_back({PlanStep::Kind::kCall, {span}, {}, count, -1, -1, 1, "update"});
  }
  void flush() { steps.push_back({PlanStep::Kind::kFlush, {}, {}, 0, -1, -1, 1, {}}); }

  std::vector<PlanStep> steps;
};

// Buffers of every plan here: 0 data, 1 weights, 2 inbox of size * count elements.
constexpr std::uint32_t kData = 0;
constexpr std::uint32_t kWeights = 1;
constexpr std::uint32_t kInbox = 2;

inline Plan plan_of(const char* name, Rank rank, Rank size, std::uint64_t count, Steps& lane) {
  Plan plan;
  plan.name = name;
  plan.rank = rank;
  plan.size = size;
  plan.notifications = 2 * static_cast<std::uint32_t>(size);
  plan.buffers = {"data", "weights", "inbox"};
  plan.buffer_counts = {count, count, count * static_cast<std::uint64_t>(size)};
  plan.lanes.push_back(std::move(lane.steps));
  return plan;
}

// The inbox slot of `sender` at `owner`; every slot has `width` elements.
inline PlanSpan slot(Rank sender, Rank owner, std::uint64_t width) {
  const Rank number = sender < owner ? sender : sender - 1;
  return {kInbox, static_cast<std::uint64_t>(number) * width, -1};
}

inline Plan gdraa(Rank rank, Rank size, std::uint64_t count, bool update) {
  Steps lane;
  const auto [offset, n] = block(count, size, rank);
  for (Rank step = 1; step < size; ++step) {
    const Rank peer = (rank + step) % size;
    const auto [there, m] = block(count, size, peer);
    if (m != 0) lane.put({kData, there, -1}, m, peer, slot(rank, peer, count), rank);
  }
  if (n != 0) {
    std::vector<PlanSpan> sources;
    for (Rank peer = 0; peer < size; ++peer) {
      if (peer != rank) lane.wait(peer, peer);
      sources.push_back(peer == rank ? PlanSpan{kData, offset, -1} : slot(peer, rank, count));
    }
    lane.reduce({{kData, offset, -1}}, sources, n);
    if (update) lane.call({kData, offset, -1}, n);
    const PlanSpan result{update ? kWeights : kData, offset, -1};
    for (Rank step = 1; step < size; ++step) {
      const Rank peer = (rank + step) % size;
      lane.put(result, n, peer, result, size + rank);
    }
  }
  for (Rank peer = 0; peer < size; ++peer) {
    if (peer != rank && block(count, size, peer).second != 0) lane.wait(size + peer, peer);
  }
  lane.flush();
  return plan_of("gdraa", rank, size, count, lane);
}

inline Plan gdraa_direct(Rank rank, Rank size, std::uint64_t count) {
  Steps lane;
  for (Rank peer = 0; peer < size; ++peer) {
    if (peer != rank && block(count, size, peer).second != 0) lane.flag(peer, rank);
  }
  const auto [offset, n] = block(count, size, rank);
  if (n != 0) {
    std::vector<PlanSpan> everywhere;
    for (Rank peer = 0; peer < size; ++peer) {
      if (peer != rank) lane.wait(peer, peer);
      everywhere.push_back({kData, offset, peer == rank ? -1 : peer});
    }
    lane.reduce(everywhere, everywhere, n);
    for (Rank peer = 0; peer < size; ++peer) {
      if (peer != rank) lane.flag(peer, size + rank);
    }
  }
  for (Rank peer = 0; peer < size; ++peer) {
    if (peer != rank && block(count, size, peer).second != 0) lane.wait(size + peer, peer);
  }
  return plan_of("gdraa-direct", rank, size, count, lane);
}

inline Plan tree(Rank rank, Rank size, std::uint64_t count, bool update) {
  Steps lane;
  std::vector<Rank> children;
  const Rank reach = rank == 0 ? size : rank & -rank;
  for (Rank step = 1; step < reach && rank + step < size; step *= 2) {
    children.push_back(rank + step);
  }
  std::vector<PlanSpan> sources{{kData, 0, -1}};
  for (Rank child : children) {
    lane.wait(child, child);
    sources.push_back({kInbox, static_cast<std::uint64_t>(child) * count, -1});
  }
  if (!children.empty()) lane.reduce({{kData, 0, -1}}, sources, count);
  const PlanSpan result{update ? kWeights : kData, 0, -1};
  if (rank != 0) {
    const Rank parent = rank - (rank & -rank);
    lane.put({kData, 0, -1}, count, parent, {kInbox, static_cast<std::uint64_t>(rank) * count, -1},
             rank);
    lane.wait(size, parent);
  } else if (update) {
    lane.call({kData, 0, -1}, count);
  }
  for (auto child = children.rbegin(); child != children.rend(); ++child) {
    lane.put(result, count, *child, result, size);
  }
  lane.flush();
  return plan_of("tree", rank, size, count, lane);
}

enum class Kind { kGdraa, kDirect, kTree };

// A plan of one phase, bound to run repeatedly, with its own numbering unless one is given.
inline std::unique_ptr<Execution> bound(Local& local, const Plan& plan,
                                        std::vector<BufferBinding> buffers, std::vector<Rank> ranks,
                                        const std::shared_ptr<Segment>& board, std::uint64_t first,
                                        std::uint64_t fingerprint = 1,
                                        std::shared_ptr<Numbering> numbering = nullptr) {
  if (numbering == nullptr) {
    numbering = std::make_shared<Numbering>(board, first, plan.notifications, false);
  }
  std::vector<std::unique_ptr<BoundPlan>> phases;
  phases.push_back(std::make_unique<BoundPlan>(local.context, plan, std::move(buffers),
                                               std::move(ranks), board, first, fingerprint));
  return std::make_unique<Execution>(local.executor, std::move(phases), std::move(numbering));
}

// A plan with its own memory on every rank: [data | weights | inbox], on odd ranks [weights | data
// | inbox], and a range of notifications.
class Exchange {
 public:
  Exchange(Local& local, Kind kind, std::uint64_t count, bool update = false,
           std::uint64_t fingerprint = 1)
      : count_(count), odd_(local.rank() % 2 != 0) {
    const auto size = static_cast<std::uint64_t>(local.size());
    segment_ = local.segment((2 + size) * count * sizeof(float));
    const Plan plan = kind == Kind::kGdraa  ? gdraa(local.rank(), local.size(), count, update)
                      : kind == Kind::kTree ? tree(local.rank(), local.size(), count, update)
                                            : gdraa_direct(local.rank(), local.size(), count);
    std::vector<Rank> ranks;
    for (Rank rank = 0; rank < local.size(); ++rank) ranks.push_back(rank);
    const auto buffer = [&](const auto& first_element) {
      BufferBinding binding{segment_, first_element(local.rank()) * sizeof(float), DType::kF32};
      for (const Rank rank : ranks) {
        binding.homes.push_back({segment_, first_element(rank) * sizeof(float)});
      }
      return binding;
    };
    const BufferBinding data = buffer([&](Rank rank) { return rank % 2 == 0 ? 0 : count; });
    const BufferBinding weights = buffer([&](Rank rank) { return rank % 2 == 0 ? count : 0; });
    const BufferBinding inbox{segment_, 2 * count * sizeof(float), DType::kF32};
    execution_ =
        bound(local, plan, {data, weights, inbox}, std::move(ranks), segment_, 7, fingerprint);
  }

  Execution& plan() { return *execution_; }
  float* data() { return items<float>(segment_) + (odd_ ? count_ : 0); }
  float* weights() { return items<float>(segment_) + (odd_ ? 0 : count_); }
  std::uint64_t count() const { return count_; }

  // Small integers, so that sums are exact in any order; different in every iteration.
  static float value(Rank rank, std::uint32_t iteration, std::uint64_t i) {
    return static_cast<float>((static_cast<std::uint64_t>(rank) * 37 + iteration * 101 + i * 7) %
                              1009);
  }
  static float sum(Rank size, std::uint32_t iteration, std::uint64_t i) {
    float total = 0;
    for (Rank rank = 0; rank < size; ++rank) total += value(rank, iteration, i);
    return total;
  }
  void fill(Rank rank, std::uint32_t iteration) {
    for (std::uint64_t i = 0; i < count_; ++i) data()[i] = value(rank, iteration, i);
  }
  void verify(const float* result, Rank size, std::uint32_t iteration) const {
    for (std::uint64_t i = 0; i < count_; ++i) {
      CHECK_NOTE(result[i] == sum(size, iteration, i), "%s, iteration %u, element %zu: %g, not %g",
                 execution_->name().c_str(), iteration, std::size_t(i), double(result[i]),
                 double(sum(size, iteration, i)));
    }
  }

 private:
  std::uint64_t count_;
  bool odd_;
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<Execution> execution_;
};

inline void finish(Local& local, Execution& execution) {
  const Executor::Waited waited = local.executor.wait(execution, soon());
  CHECK_NOTE(waited == Executor::Waited::kDone, "%s", local.executor.missing(execution).c_str());
}

}  // namespace pgasdl::testing
