// One process of a host at a time, as far as that ends in time.
#pragma once

namespace pgasdl {

// Held from construction to destruction; a process that dies gives it back. After `seconds` it goes
// on beside the holder, who may be waiting for something that this process does later.
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
