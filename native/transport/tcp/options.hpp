// Settings of transport tcp.
#pragma once

#include <cstdint>
#include <string>

namespace pgasdl {

struct TcpOptions {
  std::string interfaces;        // names between commas; empty: all
  std::uint16_t first_port = 0;  // 0: the kernel chooses
  std::uint16_t last_port = 0;
  std::uint32_t queues = 1;  // the number of QueueIds
  double timeout_s = 3;      // a peer that does not answer for longer is lost
};

}  // namespace pgasdl
