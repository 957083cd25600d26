// Which of a machine's RDMA ports a rank uses, and why not the others.
//
// Two subnets need not reach each other, so all ranks take ports of the same one, whatever lies
// near them: the subnet of the best address (kind, scope, speed), of equals that of the first
// device by name. In it a rank takes the ports nearest to its NUMA nodes; ranks with the same
// choice take turns. Of several rails each goes to another subnet, as far as there are any of the
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
  int scope = 0;       // how far the address reaches; 0: this link only
  std::string subnet;  // empty: unknown, and so a subnet of its own
};

// Puts the best first, the chosen ones in the order of rails; says of all which are chosen, why the
// others are not, and whose turn they are. Those that have a reason already are not chosen.
void choose(std::vector<VerbsCandidate>& found, const VerbsOptions& options);

}  // namespace pgasdl
