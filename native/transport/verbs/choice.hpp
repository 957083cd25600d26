// Chooses which of a machine's RDMA ports a rank uses, with reasons against the others.
//
// Different subnets need not reach each other, so all ranks take ports of the same subnet, wherever
// their devices are: the subnet of the best address (kind, scope, speed), or among equals that of
// the first device by name. In it a rank takes the ports nearest to its NUMA nodes; ranks with the
// same choice take turns. Several rails use different subnets, as far as there are any with the
// same speed.
#pragma once

#include <string>
#include <vector>

#include "transport/verbs/device.hpp"

namespace pgasdl {

// An address of a port.
struct VerbsCandidate {
  VerbsDeviceInfo info;
  VerbsGid gid{};
  VerbsPkey pkey{};
  int scope = 0;       // how far the address reaches; 0: only this link
  std::string subnet;  // empty: unknown, and so a subnet of its own
};

// Puts the best first, the chosen ones in the order of rails, and sets which are chosen, why others
// are not, and whose turn they are. Candidates that already have a reason are not chosen.
void choose(std::vector<VerbsCandidate>& found, const VerbsOptions& options);

}  // namespace pgasdl
