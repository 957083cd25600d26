// Types shared by the files of MpiWorld: ranks that have segments together, and a segment until its
// window is made.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "transport/mpi/world.hpp"

namespace pgasdl {

// A description has to fit into a slot of the group's exchange.
constexpr std::size_t kMostDropped = 48;
constexpr MpiLibrary::Handle kNoHandle = 0;

// Seconds to wait for the first member's answer, which comes at its next heartbeat. A member that
// gives none for so long is lost, has closed its context, or calls MPI by one thread only, which is
// busy elsewhere.
constexpr double kPatience = 10;

struct MpiDescription {
  std::uint64_t group;
  std::uint64_t bytes;
  std::uint64_t ticket;  // of the sender; the first member's ticket names the meeting
  std::uint64_t n_dropped;
  std::uint32_t notifications;
  std::uint32_t bound;
  std::uint32_t created;
  std::uint32_t padding;
  MpiWindowName dropped[kMostDropped];  // windows of groups within this one that the sender dropped
};

// Ranks that have segments together.
struct MpiWindowGroup {
  struct Dropped {
    MpiLibrary::Handle data;
    MpiLibrary::Handle board;
    std::shared_ptr<Region> region;
  };
  std::vector<Rank> members;
  std::uint64_t key = 0;
  MpiLibrary::Handle communicator = kNoHandle;  // made with the first window
  std::atomic<std::uint64_t> n_made{0};  // windows made, in the order that the first member gave
  std::atomic<bool> making{false};
  std::set<MpiWindow*> live;
  std::map<std::uint64_t, Dropped> dropped;
};

struct MpiPending {
  bool created = false;
  bool gathered = false;
  std::set<MpiWindowName> dropped_by_all;  // by all members of their groups
  std::vector<MpiDescription> members;     // their descriptions, including this rank's
  std::unique_ptr<Error> failure;          // of making the window while this rank left
  MpiWindowName meeting(const MpiWindowGroup& group) const {
    return {group.key, members.front().ticket};
  }
};

}  // namespace pgasdl
