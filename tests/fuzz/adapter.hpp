// A stub of an RDMA adapter: takes every request, and delivers the datagrams it is given. It
// stands in for the loaded libibverbs, so that all of pgasdl's own code runs unchanged.
#pragma once

#include <deque>
#include <string>

#include "transport/verbs/library.hpp"

namespace pgasdl::fuzz {

struct Adapter {
  std::string arriving;  // the next datagram to deliver; empty: none
  std::string sent;      // the last datagram that was sent
  int n_pairs = 0;       // queue pairs that exist
};

Adapter& adapter();

}  // namespace pgasdl::fuzz
