// A plan as it comes from Python: only data, nothing resolved. pgasdl/plans/plan.py defines the
// steps; names and meanings are the same here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "transport/transport.hpp"

namespace pgasdl {

struct PlanSpan {
  std::uint32_t buffer;  // index into Plan::buffers
  std::uint64_t offset;  // elements
  Rank rank;             // which rank's copy; -1: this rank's
};

struct PlanStep {
  enum class Kind : std::uint8_t { kPut, kWait, kReduce, kCopy, kCall, kFlush };
  Kind kind;
  std::vector<PlanSpan> targets;
  std::vector<PlanSpan> sources;
  std::uint64_t count = 0;         // elements
  Rank peer = -1;                  // kPut: the target; kWait: owes the notification (-1: unknown)
  std::int64_t notification = -1;  // kPut: -1 for none
  double scale = 1;
  std::string hook;
  // kCopy: rows of `count` elements each, whose beginnings lie this many elements apart.
  std::uint64_t rows = 1;
  std::uint64_t target_step = 0;
  std::uint64_t source_step = 0;
};

struct Plan {
  std::string name;
  Rank rank = 0;
  Rank size = 1;
  std::uint32_t notifications = 0;
  std::vector<std::string> buffers;
  std::vector<std::uint64_t> buffer_counts;  // elements
  std::vector<std::vector<PlanStep>> lanes;
};

}  // namespace pgasdl
