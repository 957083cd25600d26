// The path to a peer. Each rank describes its port and its requirements; from both descriptions the
// two ranks compute the same path, or an error that names what does not fit.
#pragma once

#include <array>

#include "transport/verbs/device.hpp"

namespace pgasdl {

// A rank's description of its end, for the others.
struct VerbsEndpoint {
  static constexpr std::uint64_t kMagic = 0x367672656c646770;  // of this version of the protocol
  static constexpr std::size_t kMostGids = 8;

  std::uint64_t magic;
  std::uint32_t datagrams;  // number of the queue pair that receives them
  std::uint32_t mtu;        // an ibv_mtu
  std::uint32_t reads;      // outstanding at once
  std::uint32_t lid;
  VerbsLink link;
  std::uint32_t n_gids;
  std::uint32_t pkey;
  std::uint32_t global;            // 1: needs global routes
  std::uint32_t completion_first;  // 1: needs flags to wait for completions
  std::uint32_t count_flags;       // 1: needs flags as immediates
  std::array<ibv_gid, kMostGids> gids;
};

VerbsEndpoint endpoint_of(const VerbsDevice& device, std::uint32_t datagrams);

// The settings that two ranks agree on.
struct VerbsAgreement {
  ibv_mtu mtu;
  std::uint8_t reads;
  bool global;
  bool completion_first;
  bool count_flags;
  std::size_t gid_here;  // index of the GID
  std::size_t gid_there;
};

// Throws kMismatch if they cannot reach each other.
VerbsAgreement agree(Rank rank, const VerbsEndpoint& here, Rank peer, const VerbsEndpoint& there);

// How this rank reaches the peer.
struct VerbsPath {
  ibv_ah_attr address{};
  ibv_mtu mtu = IBV_MTU_256;
  std::uint8_t reads = 1;  // outstanding at once, within both sides' limits
  // How often a request is repeated before its peer is lost, and after how long: 4.096 us times 2
  // to this power. Adapters may wait up to four times as long as they were told, but report a link
  // that is down at once.
  std::uint8_t retry_count = 6;
  std::uint8_t rnr_retry_count = 6;
  std::uint8_t timeout = 16;
  bool completion_first = false;  // a flag waits for the completions of earlier requests
  bool count_flags = false;       // every flag is an immediate
};

VerbsPath path_to(const VerbsDevice& device, const VerbsAgreement& agreed,
                  const VerbsEndpoint& there);

}  // namespace pgasdl
