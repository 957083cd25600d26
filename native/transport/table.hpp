// The table of transports: how each one is made, and which devices it may use.
//
// A transport that is left out of this build has a row that says why and how to get it; none of its
// code is compiled, and no stub class stands in for it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/loopback/loopback.hpp"
#include "transport/mpi/mpi.hpp"
#include "transport/tcp/options.hpp"
#include "transport/transport.hpp"
#include "transport/verbs/verbs.hpp"

namespace pgasdl {

// Arguments for all transports; each takes its own.
struct TransportSetup {
  Rank rank = 0;
  Rank size = 0;
  std::string token;  // 16 bytes that only the ranks of this job know
  VerbsOptions verbs;
  MpiOptions mpi;
  TcpOptions tcp;
  std::shared_ptr<LoopbackWorld> loopback_world;
  std::shared_ptr<MpiWorld> mpi_world;
};

struct TransportRow {
  std::string_view name;
  std::unique_ptr<Transport> (*make)(const TransportSetup& setup) = nullptr;  // null: left out
  // Why this rank lacks it; empty if it has it. Null: every rank has it where it is built.
  std::string (*missing)(const TransportSetup& setup) = nullptr;
  // Every address that the transport could use, best first; null if it needs none.
  std::vector<VerbsDeviceInfo> (*devices)(const VerbsOptions& options) = nullptr;
  std::uint32_t (*inline_bytes)(const VerbsOptions& options) = nullptr;  // largest inline request
  std::string_view left_out = {};  // why this build lacks it, and how to get it
};

std::span<const TransportRow> transports();

// The row of that name. Throws kUnavailable with the reason if this build lacks it.
const TransportRow& transport_row(std::string_view name);

// Why this rank lacks the named transport; empty if it has it. `setup` needs no rank and no token.
std::string transport_missing(std::string_view name, const TransportSetup& setup);

}  // namespace pgasdl
