// The transports there are, each a row: how one is made, and what devices it may use.
//
// Whoever is left out of a build has a row that says why and how to get it, and nothing else of it
// is compiled: there is no class to stand in for it.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/loopback/loopback.hpp"
#include "transport/mpi/mpi.hpp"
#include "transport/transport.hpp"
#include "transport/verbs/verbs.hpp"

namespace pgasdl {

// Everything that one of them needs; each takes its own.
struct TransportSetup {
  Rank rank;
  Rank size;
  std::string token;  // 16 bytes that only ranks of this job know
  VerbsOptions verbs;
  MpiOptions mpi;
  std::shared_ptr<LoopbackWorld> loopback_world;
  std::shared_ptr<MpiWorld> mpi_world;
};

struct TransportRow {
  std::string_view name;
  std::unique_ptr<Transport> (*make)(const TransportSetup& setup) = nullptr;  // null: left out
  // Every address it could use, best first; null if it needs none.
  std::vector<VerbsDeviceInfo> (*devices)(const VerbsOptions& options) = nullptr;
  std::uint32_t (*inline_bytes)(const VerbsOptions& options) = nullptr;  // of a request
  std::string_view left_out = {};  // of this build: why, and how to get it
};

std::span<const TransportRow> transports();

// The row of that name. Throws kUnavailable with the reason if this build lacks it.
const TransportRow& transport_row(std::string_view name);

// Why there is none of that name here; empty if there is.
std::string transport_missing(std::string_view name, const VerbsOptions& options);

}  // namespace pgasdl
