// An RDMA adapter that is none: takes every request, and hands out the datagrams it was given. It
// stands where libibverbs is loaded, so that all of pgasdl's own code runs as it is.
#pragma once

#include <deque>
#include <string>

#include "transport/verbs/library.hpp"

namespace pgasdl::fuzz {

struct Adapter {
  std::string arriving;  // the next datagram; empty: none
  std::string sent;      // the last one
  int n_pairs = 0;       // queue pairs there are
};

Adapter& adapter();

}  // namespace pgasdl::fuzz
