// One process of a host at a time.
#pragma once

namespace pgasdl {

// Held from construction to destruction; a process that dies gives it back. Waits for the holder.
class HostTurn {
 public:
  HostTurn();
  ~HostTurn();
  HostTurn(const HostTurn&) = delete;
  HostTurn& operator=(const HostTurn&) = delete;

 private:
  int folder_;
};

}  // namespace pgasdl
