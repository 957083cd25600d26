#include "transport/verbs/device.hpp"

#include <arpa/inet.h>
#include <endian.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "transport/verbs/choice.hpp"

namespace pgasdl {
namespace {

constexpr const char* kContainerFlags =
    "in a container: --device=/dev/infiniband --ulimit memlock=-1";

class DeviceList {
 public:
  DeviceList() : devices_(verbs_library().get_device_list(&count_)) {}
  DeviceList(const DeviceList&) = delete;
  DeviceList& operator=(const DeviceList&) = delete;
  ~DeviceList() {
    if (devices_ != nullptr) verbs_library().free_device_list(devices_);
  }
  std::span<ibv_device* const> devices() const {
    return {devices_, devices_ == nullptr ? 0 : static_cast<std::size_t>(count_)};
  }

 private:
  int count_ = 0;
  ibv_device** devices_;
};

// The first line of a file below the device's folder in sysfs; empty if there is none.
std::string sysfs(const ibv_device* device, const std::string& path) {
  std::ifstream file(text(device->ibdev_path, "/", path));
  std::string line;
  std::getline(file, line);
  return line;
}

int numa_node(const ibv_device* device) {
  const std::string node = sysfs(device, "device/numa_node");
  return node.empty() ? -1 : std::atoi(node.c_str());
}

ibv_port_attr query_port(ibv_context* context, std::uint8_t port) {
  ibv_port_attr link{};
  // The symbol fills the part of the structure that all versions have; the rest stays zero.
  const int error =
      verbs_library().query_port(context, port, reinterpret_cast<_compat_ibv_port_attr*>(&link));
  if (error != 0) throw_system("ibv_query_port", error);
  return link;
}

bool is_zero(const ibv_gid& gid) {
  return gid.global.subnet_prefix == 0 && gid.global.interface_id == 0;
}

bool is_ipv4(const ibv_gid& gid) {
  constexpr std::uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kMapped, sizeof kMapped) == 0;
}

bool is_link_local(const ibv_gid& gid) {
  if (is_ipv4(gid)) return gid.raw[12] == 169 && gid.raw[13] == 254;
  return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
}

VerbsLink link_of(const ibv_device* device, int port, int index, const ibv_port_attr& link) {
  if (link.link_layer != IBV_LINK_LAYER_ETHERNET) return VerbsLink::kInfiniBand;
  const std::string type = sysfs(device, text("ports/", port, "/gid_attrs/types/", index));
  return type == "RoCE v2" ? VerbsLink::kRoceV2 : VerbsLink::kRoceV1;
}

std::string words(const ibv_gid& gid) {
  char buffer[INET6_ADDRSTRLEN] = {};
  inet_ntop(AF_INET6, gid.raw, buffer, sizeof buffer);
  return buffer;
}

std::string hexadecimal(int number) {
  char words[12];
  std::snprintf(words, sizeof words, "0x%04x", static_cast<unsigned>(number));
  return words;
}

// The requested ports, as the setting spells them.
std::string words(const VerbsOptions& options) {
  std::string list = options.excluded ? "^" : "";
  for (const VerbsPort& one : options.ports) {
    if (&one != options.ports.data()) list += ",";
    list += one.port == 0 ? one.device : text(one.device, ":", one.port);
  }
  return list;
}

std::vector<std::uint16_t> pkey_table(ibv_context* context, std::uint8_t port, int length) {
  std::vector<std::uint16_t> table;
  for (int index = 0; index < length; ++index) {
    __be16 value = 0;
    if (verbs_library().query_pkey(context, port, index, &value) != 0) break;
    table.push_back(be16toh(value));
  }
  return table;
}

std::string refusal(const ibv_device* device, const VerbsCandidate& candidate,
                    const ibv_port_attr& link, const VerbsOptions& options) {
  const VerbsDeviceInfo& info = candidate.info;
  if (!allows(options, info.device, info.port)) {
    return text("device ", words(options), " was asked for");
  }
  if (options.gid_index >= 0 && info.gid_index != options.gid_index) {
    return text("GID index ", options.gid_index, " was asked for");
  }
  if (device->transport_type == IBV_TRANSPORT_IWARP) {
    return "iWARP: it connects through rdma_cm only, and has no atomics";
  }
  if (link.state != IBV_PORT_ACTIVE) return text("the port is ", info.state);
  if (candidate.gid.link == VerbsLink::kInfiniBand && link.lid == 0) {
    return "the port has no LID: no subnet manager runs";
  }
  if (options.mtu > info.mtu) {
    return text("packets of ", options.mtu, " bytes were asked for, and the port has an MTU of ",
                info.mtu);
  }
  return "";
}

std::string no_pkey(std::span<const std::uint16_t> table, int wanted) {
  std::string all;
  for (const std::uint16_t value : table) {
    if (value != 0) all += text(all.empty() ? "" : ", ", hexadecimal(value));
  }
  return text("P_Key ", hexadecimal(wanted), " was asked for, and the port's table has ",
              all.empty() ? "none" : all);
}

// 0: only this link. IPv4 addresses rank first.
int scope_of(const VerbsGid& entry) {
  if (entry.link != VerbsLink::kInfiniBand && is_link_local(entry.gid)) return 0;
  return is_ipv4(entry.gid) ? 2 : 1;
}

// The address and mask of an IP interface as a GID; nothing for other families.
std::optional<ibv_gid> in_gid(const sockaddr* address, std::uint8_t rest) {
  ibv_gid gid{};
  if (address != nullptr && address->sa_family == AF_INET) {
    std::fill_n(gid.raw, 12, rest);
    std::memcpy(gid.raw + 12, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, 4);
    if (rest == 0) gid.raw[10] = gid.raw[11] = 0xff;
    return gid;
  }
  if (address != nullptr && address->sa_family == AF_INET6) {
    std::memcpy(gid.raw, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, 16);
    return gid;
  }
  return std::nullopt;
}

// The IP network of an address of this machine; empty if no interface has it.
std::string network_of(const ibv_gid& gid) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return "";
  std::string network;
  for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
    std::optional<ibv_gid> address = in_gid(each->ifa_addr, 0);
    const std::optional<ibv_gid> mask = in_gid(each->ifa_netmask, 0xff);
    if (!address || !mask || std::memcmp(address->raw, gid.raw, sizeof gid.raw) != 0) continue;
    for (std::size_t i = 0; i < sizeof gid.raw; ++i) address->raw[i] &= mask->raw[i];
    network = words(*address);
  }
  freeifaddrs(list);
  return network;
}

// Ports of one subnet reach each other. InfiniBand fabrics may share the factory's prefix, but each
// has its own subnet manager.
std::string subnet_of(const VerbsGid& entry, const ibv_port_attr& link) {
  if (entry.link == VerbsLink::kInfiniBand) {
    return text("InfiniBand ", be64toh(entry.gid.global.subnet_prefix), " ", link.sm_lid);
  }
  return scope_of(entry) == 0 ? "" : network_of(entry.gid);
}

void look_at_port(ibv_device* device, ibv_context* context, std::uint8_t port,
                  const VerbsOptions& options, std::vector<VerbsCandidate>& found) {
  const ibv_port_attr link = query_port(context, port);
  VerbsCandidate candidate;
  candidate.info.device = device->name;
  candidate.info.port = port;
  candidate.info.state = verbs_library().port_state_str(link.state);
  candidate.info.link_layer =
      link.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand";
  candidate.info.mtu = bytes_of(link.active_mtu);
  candidate.info.gigabits = gigabits_of(link.active_width, link.active_speed);
  if (link.link_layer != IBV_LINK_LAYER_ETHERNET) candidate.info.lid = link.lid;
  candidate.info.numa_node = numa_node(device);
  candidate.info.path_mtu = options.mtu != 0 ? options.mtu : candidate.info.mtu;
  candidate.info.ack_timeout = options.acknowledgement_timeout();
  candidate.info.keeps_order = keeps_order(device->transport_type, options.order);
  // A table on InfiniBand is long, and mostly only its first entry matters.
  const std::vector<std::uint16_t> pkeys =
      pkey_table(context, port, options.pkey == 0 ? 1 : link.pkey_tbl_len);
  const std::optional<VerbsPkey> pkey = find_pkey(pkeys, options.pkey);
  candidate.pkey = pkey.value_or(VerbsPkey{});
  candidate.info.pkey = candidate.pkey.value;
  for (int index = 0; index < link.gid_tbl_len; ++index) {
    ibv_gid gid{};
    if (verbs_library().query_gid(context, port, index, &gid) != 0 || is_zero(gid)) continue;
    candidate.gid = {gid, link_of(device, port, index, link), index};
    candidate.info.gid_index = index;
    candidate.info.gid = words(gid);
    candidate.info.type = name(candidate.gid.link);
    candidate.info.net_device = sysfs(device, text("ports/", +port, "/gid_attrs/ndevs/", index));
    candidate.info.refused = refusal(device, candidate, link, options);
    if (candidate.info.refused.empty() && !pkey) {
      candidate.info.refused = no_pkey(pkeys, options.pkey);
    }
    candidate.scope = scope_of(candidate.gid);
    candidate.subnet = subnet_of(candidate.gid, link);
    found.push_back(candidate);
  }
}

// Why the device cannot be opened: libibverbs tries on, and ends with an unrelated error.
std::string opening_error(const ibv_device* device, int error) {
  const std::string node = text("/dev/infiniband/", device->dev_name);
  if (access(node.c_str(), R_OK | W_OK) != 0) error = errno;
  return text(node, ": ", std::strerror(error));
}

void look_at_device(ibv_device* device, const VerbsOptions& options,
                    std::vector<VerbsCandidate>& found) {
  VerbsCandidate closed;
  closed.info.device = device->name;
  const VerbsPtr<ibv_context> context(verbs_library().open_device(device));
  if (context == nullptr) {
    closed.info.refused =
        text("it cannot be opened: ", opening_error(device, errno), "; ", kContainerFlags);
    found.push_back(closed);
    return;
  }
  ibv_device_attr limits{};
  if (const int error = verbs_library().query_device(context.get(), &limits); error != 0) {
    throw_system("ibv_query_device", error);
  }
  const std::size_t before = found.size();
  for (int port = 1; port <= limits.phys_port_cnt; ++port) {
    look_at_port(device, context.get(), static_cast<std::uint8_t>(port), options, found);
  }
  if (found.size() != before) return;
  closed.info.refused = "no port of it has an address: is its network device up?";
  found.push_back(closed);
}

// All addresses, the chosen ones first if there are any.
std::vector<VerbsCandidate> candidates(const VerbsOptions& options) {
  std::vector<VerbsCandidate> found;
  const DeviceList list;
  for (ibv_device* device : list.devices()) look_at_device(device, options, found);
  choose(found, options);
  return found;
}

[[noreturn]] void throw_none(const std::vector<VerbsCandidate>& found) {
  std::string reasons;
  for (const auto& [info, gid, pkey, scope, subnet] : found) {
    reasons += text("; ", info.device);
    if (info.port != 0) reasons += text(" port ", info.port, " GID ", info.gid_index);
    reasons += text(": ", info.refused);
  }
  std::error_code ignored;
  if (found.empty() && !std::filesystem::is_empty("/sys/class/infiniband", ignored) && !ignored) {
    reasons = text("; the kernel has some, but they cannot be opened; ", kContainerFlags);
  }
  throw Error(ErrorKind::kUnavailable, text("no usable RDMA device", reasons));
}

}  // namespace

std::string_view name(VerbsLink link) {
  constexpr std::array<std::string_view, 3> kNames{"RoCE v1", "RoCE v2", "InfiniBand"};
  return kNames[static_cast<std::size_t>(link)];
}

int bytes_of(ibv_mtu mtu) { return mtu == 0 ? 0 : 128 << mtu; }

bool allows(const VerbsOptions& options, std::string_view device, int port) {
  if (options.ports.empty()) return true;
  const bool named =
      std::any_of(options.ports.begin(), options.ports.end(), [&](const VerbsPort& one) {
        return one.device == device && (one.port == 0 || one.port == port);
      });
  return named != options.excluded;
}

bool keeps_order(ibv_transport_type transport, VerbsOrder order) {
  if (order != VerbsOrder::kAuto) return order == VerbsOrder::kKept;
  return transport == IBV_TRANSPORT_IB;
}

std::optional<VerbsPkey> find_pkey(std::span<const std::uint16_t> table, int wanted) {
  constexpr std::uint16_t kFull = 0x8000;
  constexpr int kPartition = 0x7fff;
  constexpr std::uint16_t kDefault = 0xffff;
  // A port without a table is in the default partition.
  if (wanted == 0) return VerbsPkey{0, table.empty() ? kDefault : table[0]};
  std::optional<VerbsPkey> found;
  for (std::size_t index = 0; index < table.size(); ++index) {
    const VerbsPkey entry{static_cast<std::uint16_t>(index), table[index]};
    if ((entry.value & kPartition) != (wanted & kPartition)) continue;
    if (!found || (found->value & kFull) < (entry.value & kFull)) found = entry;
  }
  return found;
}

// A peer that stalls for less than `timeout_s`, up to a minute, is not lost: a request and its
// repetitions last at least that long. A lost packet waits for a repetition, too, by default for
// half a second.
int VerbsOptions::acknowledgement_timeout() const {
  constexpr double kUnit = 4.096e-6;
  constexpr int kMostExponent = 21;  // 8.6 s
  if (ack_timeout != 0) return ack_timeout;
  // The failure of one of several rails must be found before its peer is taken for dead.
  const double patience_s = rails > 1 ? timeout_s / 3 : timeout_s;
  int exponent = 8;
  while (exponent < kMostExponent && (retry_count + 1) * kUnit * (1u << exponent) < patience_s) {
    ++exponent;
  }
  return exponent;
}

double gigabits_of(std::uint8_t width, std::uint8_t speed) {
  // Each code is one bit. The widths are not in order: 2X was added last.
  constexpr std::array<double, 5> kLanes{1, 4, 8, 12, 2};
  constexpr std::array<double, 8> kPerLane{2.5, 5, 10, 10.3125, 14.0625, 25.78125, 50, 100};
  const auto lanes = static_cast<std::size_t>(std::countr_zero(width));
  if (!std::has_single_bit(width) || !std::has_single_bit(speed) || lanes >= kLanes.size())
    return 0;
  return kLanes[lanes] * kPerLane[static_cast<std::size_t>(std::countr_zero(speed))];
}

std::vector<VerbsDeviceInfo> verbs_devices(const VerbsOptions& options) {
  std::vector<VerbsDeviceInfo> infos;
  for (VerbsCandidate& candidate : candidates(options)) infos.push_back(std::move(candidate.info));
  return infos;
}

ibv_mtu VerbsDevice::mtu() const {
  ibv_mtu mtu = link_.active_mtu;
  while (options_.mtu != 0 && bytes_of(mtu) > options_.mtu) mtu = static_cast<ibv_mtu>(mtu - 1);
  return mtu;
}

bool VerbsDevice::port_is_up() const {
  try {
    return query_port(context(), port_).state == IBV_PORT_ACTIVE;
  } catch (const Error&) {
    return false;  // the device is gone
  }
}

VerbsDevice::VerbsDevice(const VerbsOptions& options) : options_(options) {
  const std::vector<VerbsCandidate> found = candidates(options);
  if (found.empty() || !found[0].info.chosen) throw_none(found);
  const VerbsCandidate& best = found[0];
  name_ = best.info.device;
  port_ = static_cast<std::uint8_t>(best.info.port);
  pkey_ = best.pkey;
  keeps_order_ = best.info.keeps_order;
  // Peers in other subnets may be easier to reach by another address of the same port.
  for (const VerbsCandidate& other : found) {
    const bool as_far = other.scope > 0 || best.scope == 0;
    if (other.info.device == name_ && other.info.port == port_ && as_far &&
        other.gid.link == best.gid.link && (options.gid_index < 0 || other.info.chosen)) {
      gids_.push_back(other.gid);
    }
  }
  const DeviceList list;
  for (ibv_device* device : list.devices()) {
    if (name_ == device->name) context_.reset(verbs_library().open_device(device));
  }
  if (context_ == nullptr) throw_system(text("opening ", name_), errno);
  if (const int error = verbs_library().query_device(context(), &limits_); error != 0) {
    throw_system("ibv_query_device", error);
  }
  link_ = query_port(context(), port_);
  domain_.reset(verbs_library().alloc_pd(context()));
  if (domain_ == nullptr) throw_system(text("a protection domain on ", name_), errno);
}

}  // namespace pgasdl
