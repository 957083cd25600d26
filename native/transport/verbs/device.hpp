// Which device, port and address, and why: enumeration, ranking, and the one that was opened.
#pragma once

#include <array>
#include <vector>

#include "transport/transport.hpp"
#include "transport/verbs/library.hpp"
#include "transport/verbs/verbs.hpp"

namespace pgasdl {

enum class VerbsLink : std::uint32_t { kRoceV1, kRoceV2, kInfiniBand };

// One entry of a port's table of addresses.
struct VerbsGid {
  ibv_gid gid;
  VerbsLink link;
  std::int32_t index;
};

class VerbsDevice {
 public:
  // Opens what is best of what `options` allow; throws kUnavailable with the reasons.
  explicit VerbsDevice(const VerbsOptions& options);

  ibv_context* context() const { return context_.get(); }
  ibv_pd* domain() const { return domain_.get(); }
  const std::string& name() const { return name_; }
  std::uint8_t port() const { return port_; }
  const ibv_device_attr& limits() const { return limits_; }
  const ibv_port_attr& link() const { return link_; }
  // Of the port and of one kind, the best first.
  const std::vector<VerbsGid>& gids() const { return gids_; }
  // The kernel is the adapter.
  bool software() const { return limits_.vendor_id == kSoftRoce; }
  bool atomics() const { return limits_.atomic_cap != IBV_ATOMIC_NONE; }

 private:
  static constexpr std::uint32_t kSoftRoce = 0xffffff;  // its vendor number

  VerbsPtr<ibv_context> context_;
  VerbsPtr<ibv_pd> domain_;
  std::string name_;
  std::uint8_t port_ = 0;
  ibv_device_attr limits_{};
  ibv_port_attr link_{};
  std::vector<VerbsGid> gids_;
};

int bytes_of(ibv_mtu mtu);
// Of a link in each direction, by the port's codes of width and speed; 0 for codes without meaning.
double gigabits_of(std::uint8_t width, std::uint8_t speed);

}  // namespace pgasdl
