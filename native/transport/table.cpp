#include "transport/table.hpp"

#include "transport/shm/shm.hpp"
#include "transport/tcp/tcp.hpp"
#ifdef PGASDL_VERBS
#include "transport/verbs/rails.hpp"
#endif

namespace pgasdl {
namespace {

std::unique_ptr<Transport> make_shm(const TransportSetup& setup) {
  return std::make_unique<ShmTransport>(setup.rank, setup.size, setup.token);
}

#ifdef PGASDL_VERBS
std::unique_ptr<Transport> make_verbs(const TransportSetup& setup) {
  if (setup.verbs.rails > 1) {
    return std::make_unique<VerbsRails>(setup.rank, setup.size, setup.token, setup.verbs);
  }
  return std::make_unique<VerbsTransport>(setup.rank, setup.size, setup.token, setup.verbs);
}

std::string verbs_missing(const TransportSetup& setup) {
  std::string refused;
  for (const VerbsDeviceInfo& info : verbs_devices(setup.verbs)) {
    if (info.chosen) return "";
    refused += text(refused.empty() ? "" : "; ", info.device, ": ", info.refused);
  }
  return refused.empty() ? "no RDMA device" : refused;
}
#endif

std::unique_ptr<Transport> make_mpi(const TransportSetup& setup) {
  if (setup.mpi_world == nullptr) {
    throw Error(ErrorKind::kUnavailable, "transport \"mpi\" is for ranks that met through MPI");
  }
  return std::make_unique<MpiTransport>(setup.mpi_world, setup.mpi);
}

std::string mpi_missing(const TransportSetup& setup) {
  return setup.mpi_world == nullptr ? "no communicator" : "";
}

std::unique_ptr<Transport> make_tcp(const TransportSetup& setup) {
  return std::make_unique<TcpTransport>(setup.rank, setup.size, setup.token, setup.tcp);
}

std::unique_ptr<Transport> make_loopback(const TransportSetup& setup) {
  if (setup.loopback_world == nullptr) {
    throw Error(ErrorKind::kUnavailable,
                "transport \"loopback\" is for ranks that are threads: pgasdl.loopback.run");
  }
  return std::make_unique<LoopbackTransport>(setup.loopback_world, setup.rank);
}

constexpr TransportRow kRows[] = {
    {"shm", make_shm},
#ifdef PGASDL_VERBS
    {"verbs", make_verbs, verbs_missing, verbs_devices, verbs_inline_bytes},
#else
    {.name = "verbs",
     .left_out = "verbs was not built in: <infiniband/verbs.h> was missing when pgasdl was built "
                 "(Debian: apt-get install libibverbs-dev, then build again)"},
#endif
    {"mpi", make_mpi, mpi_missing},
    {"tcp", make_tcp},
    {"loopback", make_loopback},
};

}  // namespace

std::span<const TransportRow> transports() { return kRows; }

const TransportRow& transport_row(std::string_view name) {
  std::string names;
  for (const TransportRow& row : kRows) {
    if (row.name == name && row.make != nullptr) return row;
    if (row.name == name) throw Error(ErrorKind::kUnavailable, std::string(row.left_out));
    names += text(names.empty() ? "" : ", ", row.name);
  }
  throw Error(ErrorKind::kUnavailable, text("no transport \"", name, "\": there are ", names));
}

std::string transport_missing(std::string_view name, const TransportSetup& setup) {
  try {
    const TransportRow& row = transport_row(name);
    return row.missing == nullptr ? "" : row.missing(setup);
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace pgasdl
