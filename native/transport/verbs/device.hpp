// The device, port and address that a rank uses: enumeration, ranking, and the opened device.
#pragma once

#include <array>
#include <optional>
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

// One entry of a port's table of partitions.
struct VerbsPkey {
  std::uint16_t index;
  std::uint16_t value;
};

class VerbsDevice {
 public:
  // Opens the best device that `options` allow; throws kUnavailable with the reasons against all.
  explicit VerbsDevice(const VerbsOptions& options);

  ibv_context* context() const { return context_.get(); }
  ibv_pd* domain() const { return domain_.get(); }
  const std::string& name() const { return name_; }
  // With its port, as PGASDL_VERBS_DEVICE names it.
  std::string port_name() const { return text(name_, ":", +port_); }
  std::uint8_t port() const { return port_; }
  const ibv_device_attr& limits() const { return limits_; }
  const ibv_port_attr& link() const { return link_; }
  // The port's addresses of one kind, best first.
  const std::vector<VerbsGid>& gids() const { return gids_; }
  const VerbsPkey& pkey() const { return pkey_; }
  // The largest packet that a connection may use.
  ibv_mtu mtu() const;
  const VerbsOptions& options() const { return options_; }
  // The kernel acts as the adapter.
  bool software() const { return limits_.vendor_id == kSoftRoce; }
  // A flag may follow data that have not completed; PGASDL_VERBS_ORDER overrides it.
  bool keeps_order() const { return keeps_order_; }
  // The port carries packets, as far as the adapter knows.
  bool port_is_up() const;
  bool atomics() const { return limits_.atomic_cap != IBV_ATOMIC_NONE; }

 private:
  static constexpr std::uint32_t kSoftRoce = 0xffffff;  // its vendor number

  const VerbsOptions options_;
  VerbsPtr<ibv_context> context_;
  VerbsPtr<ibv_pd> domain_;
  std::string name_;
  std::uint8_t port_ = 0;
  ibv_device_attr limits_{};
  ibv_port_attr link_{};
  std::vector<VerbsGid> gids_;
  VerbsPkey pkey_{};
  bool keeps_order_ = false;
};

std::string_view name(VerbsLink link);
int bytes_of(ibv_mtu mtu);
// Whether `options` allow a port, or a device at all (port 0).
bool allows(const VerbsOptions& options, std::string_view device, int port);
// Whether a device promises the order of a connection's writes, unless `order` decides it.
// InfiniBand's rule for reliable connections promises it, and RoCE has adopted that rule. Devices
// with their own transport (EFA's is "unspecified") promise no such order.
bool keeps_order(ibv_transport_type transport, VerbsOrder order);
// The table's entry for the partition `wanted` (0: the first), preferably with full membership.
std::optional<VerbsPkey> find_pkey(std::span<const std::uint16_t> table, int wanted);
// A link's speed in each direction, by the port's codes of width and speed; 0 for unknown codes.
double gigabits_of(std::uint8_t width, std::uint8_t speed);

}  // namespace pgasdl
