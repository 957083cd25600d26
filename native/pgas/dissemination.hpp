// The steps by which every member of a group receives a block from every other member.
//
// Bruck et al., "Efficient algorithms for all-to-all communications in multiport message-passing
// systems" (1997), the concatenation; without data, Hensgen, Finkel and Manber's barrier (1988). In
// a step of distance d each of P members sends to the member d ahead and receives from the one d
// behind. Bases are the powers of the radix r; a base b has the steps of distance b, 2 b, ... below
// the next base, which are independent of each other. A step carries n blocks: the sender's own and
// those of the n - 1 members behind it, which arrived in steps of smaller bases. So after all steps
// of base b a member has the blocks of the min(r b, P) - 1 members behind it.
//
// Radix 2, P = 5: distances 1, 2 and 4 with 1, 2 and 1 blocks; rank 0 receives the block of 4 from
// rank 4, those of 3 and 2 from rank 3, and that of 1 from rank 1. Radix P: one base, with a step
// of one block to each other member. ceil(log_r P) bases follow each other; a member sends P - 1
// blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace pgasdl {

struct DisseminationStep {
  std::size_t distance;
  std::size_t blocks;
  std::size_t needed;  // the number of first steps that must arrive before this one is sent
};

// `radix`: 2 or more.
inline std::vector<DisseminationStep> dissemination(std::size_t members, std::size_t radix) {
  std::vector<DisseminationStep> steps;
  for (std::size_t base = 1; base < members; base *= radix) {
    const std::size_t needed = steps.size();
    for (std::size_t distance = base; distance < std::min(members, base * radix);
         distance += base) {
      steps.push_back({distance, std::min(base, members - distance), needed});
    }
  }
  return steps;
}

}  // namespace pgasdl
