// Binds a plan's steps, for BoundPlan's constructor: resolves every address, checks every bound.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "executor/bound_plan.hpp"

namespace pgasdl {

class BoundPlan::Binder {
 public:
  Binder(BoundPlan& bound, const Plan& plan) : bound_(bound), plan_(plan) {}
  // Throws unless every rank has the plan's buffers, on one device.
  void bind_buffers();
  void bind_lane(const std::vector<PlanStep>& steps);
  // The traffic of one execution, by world rank.
  const std::map<Rank, Traffic>& put_traffic() const { return put_traffic_; }
  const std::map<Rank, Traffic>& reduce_traffic() const { return reduce_traffic_; }

 private:
  // The place of a span. No `remote`: in this rank's memory.
  struct Place {
    std::byte* address;  // null: not mapped here
    DType dtype;
    const RemoteSegment* remote;
    std::uint64_t offset;    // bytes
    Rank announced_by = -1;  // the peer that announces in each execution where its copy begins
  };

  // An error that names the current step.
  Error refuse(const std::string& why) const;
  Rank world_rank(Rank rank) const;
  const RemoteSegment& remote_board(Rank peer) const;
  std::uint64_t id_of(std::int64_t notification, std::uint64_t limit) const;
  // `mapped`: a peer's memory has to be mapped here.
  Place place(const PlanSpan& span, std::uint64_t count, bool mapped) const;
  Place place_in_segment(const PlanSpan& span, const BufferHome& home, Rank peer,
                         bool mapped) const;
  void bind_put(const PlanStep& from, Step& step);
  void bind_transfer(const PlanStep& from, Step& step);
  void bind_wait(const PlanStep& from, Step& step) const;
  void bind_reduce(const PlanStep& from, Step& step, Lane& lane);
  void bind_copy(const PlanStep& from, Step& step);
  void bind_source(const PlanStep& from, const PlanSpan& span, Step& step);
  void bind_destination(const PlanStep& from, const PlanSpan& span, Step& step);
  // Notes for a source or a destination whose copy it is, and how to find a peer's.
  void note(const PlanSpan& span, const Place& at, Step& step) const;
  // Counts elements of a peer's memory that a step loads or stores.
  void note_traffic(const PlanSpan& span, const Place& at, std::uint64_t count, bool written);
  void check_dtypes(const Step& step) const;

  BoundPlan& bound_;
  const Plan& plan_;
  std::map<Rank, Traffic> put_traffic_;
  std::map<Rank, Traffic> reduce_traffic_;
  std::size_t lane_ = 0;
  std::size_t step_ = 0;
};

}  // namespace pgasdl
