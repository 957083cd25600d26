// Lets one process of a host at a time do something, unless that takes too long.
#pragma once

namespace pgasdl {

// Holds the turn for its lifetime; a process that dies releases it. After `seconds` this process
// continues beside the holder, which may be waiting for something that this process does later.
class HostTurn {
 public:
  explicit HostTurn(double seconds);
  ~HostTurn();
  HostTurn(const HostTurn&) = delete;
  HostTurn& operator=(const HostTurn&) = delete;

 private:
  int folder_;
};

}  // namespace pgasdl
