// Transport tcp, over this machine's own addresses.

#include <cstdio>

#include "transport/tcp/tcp.hpp"
#include "unmapped.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

Settings over_tcp() {
  Settings settings;
  TcpOptions tcp;
  tcp.queues = settings.options.queues + Context::kOwnQueues;
  settings.transport = [tcp](Rank rank, Rank size) {
    return std::make_unique<TcpTransport>(rank, size, "sixteen bytes...", tcp);
  };
  return settings;
}

}  // namespace

int main() {
  flag_is_last(over_tcp(), 3, 512, 40);
  flag_is_last(over_tcp(), 2, 20000, 10);
  lists_and_reads(over_tcp(), 40);
  lists_and_reads(over_tcp(), 500);
  many_in_flight(over_tcp(), 3000);
  away(over_tcp());
  beats_are_lost(over_tcp(), 60);
  plans(over_tcp(), 3, false);
  plans(over_tcp(), 2, true);
  relayed(over_tcp());
  std::puts("ok");
}
