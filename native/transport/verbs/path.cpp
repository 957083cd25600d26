#include "transport/verbs/path.hpp"

#include <algorithm>
#include <bit>
#include <cstdio>

namespace pgasdl {
namespace {

// The most reads and atomics under way at once: adapters have room for 16.
constexpr int kMostReads = 16;
constexpr int kSubnetBits = 64;
constexpr std::uint32_t kFullMember = 0x8000;

int common_bits(const ibv_gid& a, const ibv_gid& b) {
  int bits = 0;
  for (std::size_t i = 0; i < sizeof a.raw; ++i, bits += 8) {
    const auto differ = static_cast<std::uint8_t>(a.raw[i] ^ b.raw[i]);
    if (differ != 0) return bits + std::countl_zero(differ);
  }
  return bits;
}

void require_one_link(Rank rank, const VerbsEndpoint& here, Rank peer, const VerbsEndpoint& there) {
  if (there.link == here.link) return;
  throw Error(ErrorKind::kMismatch,
              text("rank ", rank, "'s RDMA address is one of ", name(here.link), ", rank ", peer,
                   "'s of ", name(there.link),
                   ": choose alike ones (PGASDL_VERBS_DEVICE, PGASDL_VERBS_GID; `pgasdl topo` "
                   "lists them)"));
}

void require_one_partition(Rank rank, const VerbsEndpoint& here, Rank peer,
                           const VerbsEndpoint& there) {
  const auto say = [&](const char* reason) {
    char keys[2][8];
    std::snprintf(keys[0], sizeof keys[0], "0x%04x", here.pkey & 0xffff);
    std::snprintf(keys[1], sizeof keys[1], "0x%04x", there.pkey & 0xffff);
    throw Error(ErrorKind::kMismatch,
                text("rank ", rank, " has the P_Key ", keys[0], ", rank ", peer, " ", keys[1], ": ",
                     reason, ", and cannot reach each other"));
  };
  if (((here.pkey ^ there.pkey) & ~kFullMember) != 0) {
    say("they are in different partitions (give all ranks one PGASDL_VERBS_PKEY)");
  }
  if (((here.pkey | there.pkey) & kFullMember) == 0) {
    say("both are limited members of the partition (the subnet manager makes full ones)");
  }
}

}  // namespace

VerbsEndpoint endpoint_of(const VerbsDevice& device, std::uint32_t datagrams) {
  VerbsEndpoint endpoint{};
  endpoint.magic = VerbsEndpoint::kMagic;
  endpoint.datagrams = datagrams;
  endpoint.mtu = device.mtu();
  const ibv_device_attr& limits = device.limits();
  endpoint.reads = static_cast<std::uint32_t>(
      std::clamp(std::min(limits.max_qp_rd_atom, limits.max_qp_init_rd_atom), 1, kMostReads));
  endpoint.lid = device.link().lid;
  endpoint.link = device.gids()[0].link;
  endpoint.pkey = device.pkey().value;
  const bool required = (device.link().flags & IBV_QPF_GRH_REQUIRED) != 0;
  endpoint.global = device.options().global_routes || required ? 1 : 0;
  endpoint.completion_first = device.keeps_order() ? 0 : 1;
  endpoint.count_flags = device.options().count_flags.value_or(device.software()) ? 1 : 0;
  for (const VerbsGid& gid : device.gids()) {
    if (endpoint.n_gids == VerbsEndpoint::kMostGids) break;
    endpoint.gids[endpoint.n_gids++] = gid.gid;
  }
  return endpoint;
}

VerbsAgreement agree(Rank rank, const VerbsEndpoint& here, Rank peer, const VerbsEndpoint& there) {
  if (there.magic != VerbsEndpoint::kMagic || there.n_gids == 0 ||
      there.n_gids > VerbsEndpoint::kMostGids || there.reads == 0 || there.mtu < IBV_MTU_256 ||
      there.mtu > IBV_MTU_4096 || there.link > VerbsLink::kInfiniBand ||
      there.completion_first > 1 || there.count_flags > 1) {
    throw Error(ErrorKind::kMismatch,
                text("rank ", peer, " speaks another version of RDMA set-up than rank ", rank));
  }
  require_one_link(rank, here, peer, there);
  require_one_partition(rank, here, peer, there);
  VerbsAgreement agreed{};
  agreed.mtu = static_cast<ibv_mtu>(std::min(here.mtu, there.mtu));
  agreed.reads = static_cast<std::uint8_t>(std::min(here.reads, there.reads));
  // Both sides choose the same pair: the longest common prefix, and among equals the pair that the
  // lower rank ranks first, then the higher rank.
  const bool lower = rank <= peer;
  const VerbsEndpoint& first = lower ? here : there;
  const VerbsEndpoint& second = lower ? there : here;
  int most = -1;
  for (std::size_t a = 0; a < first.n_gids; ++a) {
    for (std::size_t b = 0; b < second.n_gids; ++b) {
      const int bits = common_bits(first.gids[a], second.gids[b]);
      if (bits <= most) continue;
      most = bits;
      agreed.gid_here = lower ? a : b;
      agreed.gid_there = lower ? b : a;
    }
  }
  agreed.global = here.link != VerbsLink::kInfiniBand || most < kSubnetBits || here.global != 0 ||
                  there.global != 0;
  agreed.completion_first = here.completion_first != 0 || there.completion_first != 0;
  agreed.count_flags = here.count_flags != 0 || there.count_flags != 0;
  return agreed;
}

VerbsPath path_to(const VerbsDevice& device, const VerbsAgreement& agreed,
                  const VerbsEndpoint& there) {
  const VerbsOptions& options = device.options();
  VerbsPath path;
  path.mtu = agreed.mtu;
  path.reads = agreed.reads;
  path.retry_count = static_cast<std::uint8_t>(options.retry_count);
  path.rnr_retry_count = static_cast<std::uint8_t>(options.rnr_retry_count);
  path.timeout = static_cast<std::uint8_t>(options.acknowledgement_timeout());
  path.completion_first = agreed.completion_first;
  path.count_flags = agreed.count_flags;
  path.address.port_num = device.port();
  path.address.dlid = static_cast<std::uint16_t>(there.lid);
  path.address.sl = static_cast<std::uint8_t>(options.service_level);
  path.address.is_global = agreed.global;
  path.address.grh.dgid = there.gids[agreed.gid_there];
  path.address.grh.sgid_index = static_cast<std::uint8_t>(device.gids()[agreed.gid_here].index);
  path.address.grh.hop_limit = 64;
  path.address.grh.traffic_class = static_cast<std::uint8_t>(options.traffic_class);
  return path;
}

}  // namespace pgasdl
