// In place of the others where the headers of libibverbs were missing at build time.
#include "transport/verbs.hpp"

namespace pgasdl {

class VerbsDevice {};
class VerbsMemory {};
class VerbsQueue {};
class VerbsWire {};

namespace {

[[noreturn]] void throw_not_built() {
  throw Error(ErrorKind::kUnavailable,
              "this build of pgasdl knows no verbs: <infiniband/verbs.h> was missing when it was "
              "made (Debian: apt-get install libibverbs-dev, then build again)");
}

}  // namespace

std::vector<VerbsDeviceInfo> verbs_devices(const VerbsOptions&) { throw_not_built(); }

VerbsTransport::VerbsTransport(Rank rank, Rank, const std::string&, const VerbsOptions&)
    : rank_(rank) {
  throw_not_built();
}

VerbsTransport::~VerbsTransport() = default;

// No object exists on which any of these could be called.
std::string VerbsTransport::endpoint() { throw_not_built(); }
void VerbsTransport::connect(Rank, const std::string&) { throw_not_built(); }
void VerbsTransport::set_doorbell(Rank, Doorbell*) {}
std::string VerbsTransport::publish(LocalSegment&, std::span<const Rank>) { throw_not_built(); }
RemoteSegment VerbsTransport::attach(Rank, const std::string&, Deadline) { throw_not_built(); }
void VerbsTransport::retract(const LocalSegment&) {}
int VerbsTransport::service_descriptor() const { return -1; }
void VerbsTransport::service() {}
bool VerbsTransport::post_write(QueueId, Rank, std::span<const Transfer>, const RemoteFlag*) {
  throw_not_built();
}
bool VerbsTransport::post_read(QueueId, Rank, std::span<const Transfer>, const LocalFlag*) {
  throw_not_built();
}
bool VerbsTransport::post_atomic(QueueId, Rank, const Atomic&) { throw_not_built(); }
bool VerbsTransport::connecting(QueueId, Rank) const { return false; }
bool VerbsTransport::complete(QueueId) { throw_not_built(); }
void VerbsTransport::progress() {}
void VerbsTransport::reconnect(Rank) {}

}  // namespace pgasdl
