// Binds the steps of a plan, for the constructor of BoundPlan: resolves every address, checks every
// bound.
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
  // One execution causes it, by world rank.
  const std::map<Rank, Traffic>& put_traffic() const { return put_traffic_; }
  const std::map<Rank, Traffic>& reduce_traffic() const { return reduce_traffic_; }

 private:
  // Where a span lies. No `remote`: here.
  struct Place {
    std::byte* address;  // null: it is not mapped here
    DType dtype;
    const RemoteSegment* remote;
    std::uint64_t offset;    // bytes
    Rank announced_by = -1;  // the peer that tells, in each execution, where its copy begins
  };

  // Names the step at hand.
  Error refuse(const std::string& why) const;
  Rank world_rank(Rank rank) const;
  const RemoteSegment& remote_board(Rank peer) const;
  std::uint64_t id_of(std::int64_t notification, std::uint64_t limit) const;
  // `mapped`: it has to be, if it is a peer's.
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
  // Whose copy a source or a destination is, and how a peer's is found.
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
