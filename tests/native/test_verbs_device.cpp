// Computations about RDMA devices that need no device.

#include "check.hpp"
#include "transport/verbs/choice.hpp"
#include "transport/verbs/path.hpp"

namespace {

using namespace pgasdl;

// The codes of libibverbs, in the order of their speeds.
void speeds() {
  constexpr std::uint8_t kOne = 1, kTwo = 16, kFour = 2, kTwelve = 8;
  constexpr std::uint8_t kSdr = 1, kQdr = 4, kFdr10 = 8, kFdr = 16, kEdr = 32, kHdr = 64,
                         kNdr = 128;
  CHECK(gigabits_of(kFour, kQdr) == 40);
  CHECK(gigabits_of(kFour, kNdr) == 400 && gigabits_of(kTwelve, kSdr) == 30);
  CHECK(gigabits_of(kTwo, kEdr) < gigabits_of(kFour, kHdr));
  CHECK(gigabits_of(kTwo, kHdr) < gigabits_of(kFour, kEdr));
  CHECK(gigabits_of(kFour, kQdr) < gigabits_of(kFour, kFdr10));
  CHECK(gigabits_of(kFour, kFdr10) < gigabits_of(kFour, kFdr));
  CHECK(gigabits_of(kOne, kEdr) < gigabits_of(kTwo, kEdr));
  CHECK(gigabits_of(32, kEdr) == 0);
  for (const std::uint8_t nonsense : {std::uint8_t{0}, std::uint8_t{3}, std::uint8_t{255}}) {
    CHECK(gigabits_of(nonsense, kEdr) == 0 && gigabits_of(kFour, nonsense) == 0);
  }
}

ibv_gid gid(std::initializer_list<std::uint8_t> subnet, std::uint8_t last) {
  ibv_gid made{};
  std::copy(subnet.begin(), subnet.end(), made.raw);
  made.raw[15] = last;
  return made;
}

VerbsEndpoint endpoint(VerbsLink link, ibv_gid first) {
  VerbsEndpoint made{};
  made.magic = VerbsEndpoint::kMagic;
  made.mtu = IBV_MTU_4096;
  made.reads = 16;
  made.link = link;
  made.pkey = 0xffff;
  made.n_gids = 1;
  made.gids[0] = first;
  return made;
}

// Both sides compute the same agreement.
VerbsAgreement both(const VerbsEndpoint& a, const VerbsEndpoint& b) {
  const VerbsAgreement one = agree(3, a, 5, b);
  const VerbsAgreement other = agree(5, b, 3, a);
  CHECK(one.mtu == other.mtu && one.reads == other.reads && one.global == other.global);
  CHECK(one.completion_first == other.completion_first && one.count_flags == other.count_flags);
  CHECK(one.gid_here == other.gid_there && one.gid_there == other.gid_here);
  return one;
}

void agreement() {
  const ibv_gid near = gid({0xfe, 0x80}, 1);
  VerbsEndpoint a = endpoint(VerbsLink::kInfiniBand, near);
  VerbsEndpoint b = endpoint(VerbsLink::kInfiniBand, gid({0xfe, 0x80}, 2));
  CHECK(both(a, b).mtu == IBV_MTU_4096 && !both(a, b).global);
  b.mtu = IBV_MTU_1024;
  a.reads = 4;
  CHECK(both(a, b).mtu == IBV_MTU_1024 && both(a, b).reads == 4);
  b.global = 1;  // one request is enough
  CHECK(both(a, b).global);
  b.global = 0;
  b.gids[0] = gid({0xfe, 0x80, 0, 7}, 2);
  CHECK(both(a, b).global);  // another subnet
  b.gids[b.n_gids++] = gid({0xfe, 0x80}, 9);
  CHECK(!both(a, b).global && both(a, b).gid_there == 1);
  a.link = b.link = VerbsLink::kRoceV2;
  CHECK(both(a, b).global);
  CHECK(!both(a, b).completion_first);
  b.completion_first = 1;  // one need is enough
  CHECK(both(a, b).completion_first);
  a.completion_first = 1;
  CHECK(both(a, b).completion_first && !both(a, b).count_flags);
  a.count_flags = 1;  // likewise
  CHECK(both(a, b).count_flags);
  b.count_flags = 1;
  CHECK(both(a, b).count_flags);
}

void disagreement() {
  const ibv_gid near = gid({0xfe, 0x80}, 1);
  const VerbsEndpoint good = endpoint(VerbsLink::kRoceV2, near);
  const auto refuse = [](const VerbsEndpoint& here, const VerbsEndpoint& there,
                         std::initializer_list<const char*> parts) {
    try {
      agree(3, here, 5, there);
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kMismatch);
      for (const char* part : parts) {
        CHECK_NOTE(std::string(error.what()).find(part) != std::string::npos, "no \"%s\" in: %s",
                   part, error.what());
      }
    }
  };
  VerbsEndpoint other = good;
  other.pkey = 0x8001;
  refuse(good, other, {"rank 3 has the P_Key 0xffff", "rank 5 0x8001", "PGASDL_VERBS_PKEY"});
  other.pkey = 0x7fff;  // a limited member of the same partition
  CHECK(both(good, other).global);
  VerbsEndpoint limited = good;
  limited.pkey = 0x7fff;
  refuse(limited, other, {"rank 3 has the P_Key 0x7fff", "rank 5 0x7fff", "limited"});
  other = good;
  other.link = VerbsLink::kInfiniBand;
  refuse(good, other, {"rank 3's RDMA address is one of RoCE v2", "rank 5's of InfiniBand"});
  for (const auto spoil :
       {+[](VerbsEndpoint& end) { end.magic ^= 1; }, +[](VerbsEndpoint& end) { end.n_gids = 0; },
        +[](VerbsEndpoint& end) { end.n_gids = 9; }, +[](VerbsEndpoint& end) { end.mtu = 0; },
        +[](VerbsEndpoint& end) { end.mtu = 6; }, +[](VerbsEndpoint& end) { end.reads = 0; },
        +[](VerbsEndpoint& end) { end.completion_first = 2; },
        +[](VerbsEndpoint& end) { end.count_flags = 2; },
        +[](VerbsEndpoint& end) { end.link = static_cast<VerbsLink>(3); }}) {
    other = good;
    spoil(other);
    refuse(good, other, {"rank 5 speaks another version"});
  }
}

void partitions() {
  const std::array<std::uint16_t, 4> table{0x7fff, 0x0001, 0x8001, 0xffff};
  CHECK(find_pkey(table, 0)->index == 0);
  CHECK(find_pkey(table, 0x8001)->index == 2 && find_pkey(table, 0x0001)->index == 2);
  CHECK(find_pkey(table, 0xffff)->value == 0xffff && find_pkey(table, 0x7fff)->index == 3);
  CHECK(!find_pkey(table, 0x8002));
  CHECK(find_pkey({}, 0)->value == 0xffff);
}

void ports() {
  VerbsOptions options;
  CHECK(allows(options, "mlx5_0", 1));
  options.ports = {{"mlx5_0", 1}, {"mlx5_1", 0}};
  CHECK(allows(options, "mlx5_0", 1) && !allows(options, "mlx5_0", 2));
  CHECK(allows(options, "mlx5_1", 2) && !allows(options, "mlx5_10", 1));
  options.excluded = true;
  CHECK(!allows(options, "mlx5_0", 1) && allows(options, "mlx5_0", 2));
  CHECK(!allows(options, "mlx5_1", 2) && allows(options, "mlx5_10", 1));
}

VerbsCandidate candidate(const char* device, int node, const char* subnet, double gigabits = 400) {
  VerbsCandidate made;
  made.info.device = device;
  made.info.port = 1;
  made.info.numa_node = node;
  made.info.gigabits = gigabits;
  made.gid.link = VerbsLink::kRoceV2;
  made.scope = 2;
  made.subnet = subnet;
  return made;
}

// The chosen ones in order, and the reasons against the others.
std::string chosen(std::vector<VerbsCandidate> found, const VerbsOptions& options) {
  choose(found, options);
  std::string words;
  for (const VerbsCandidate& each : found) {
    CHECK(each.info.chosen == each.info.refused.empty());
    words += text(words.empty() ? "" : "; ", each.info.device);
    if (!each.info.chosen) words += text(": ", each.info.refused);
  }
  return words;
}

// Ranks of a machine with two NUMA nodes, running on the first or on both of them.
void turns() {
  const std::vector<VerbsCandidate> one_subnet{candidate("d", 1, "s"), candidate("c", 1, "s"),
                                               candidate("b", 0, "s"), candidate("a", 0, "s")};
  VerbsOptions options;
  CHECK(chosen(one_subnet, options) ==
        "a; b: it is another rank's turn; c: it is another rank's "
        "turn; d: it is another rank's turn");
  for (const char* name : {"a", "b", "c", "d", "a"}) {
    CHECK(chosen(one_subnet, options).substr(0, 3) == text(name, "; "));
    ++options.turn;
  }
  options.distances = {21, 10};
  const std::string far = ": it is on a farther NUMA node than ";
  options.turn = 2;
  CHECK(chosen(one_subnet, options) ==
        text("c; a", far, "c; b", far, "c; d: it is another rank's turn"));
  options.turn = 1;
  CHECK(chosen(one_subnet, options).substr(0, 3) == "d; ");
  std::vector<VerbsCandidate> found = one_subnet;
  choose(found, options);
  CHECK(found[0].info.turn == 1 && found[1].info.turn == -1 && found[3].info.turn == 0);
  options.rails = 2;
  CHECK(chosen(one_subnet, options).substr(0, 6) == "c; d; ");  // both, as for every rank
  options.rails = 3;
  options.turn = 0;
  CHECK(chosen(one_subnet, options).substr(0, 9) == "c; d; a; ");
}

// Wherever its devices are, a rank has to reach the others.
void subnets() {
  const std::vector<VerbsCandidate> two{candidate("a", 0, "s"), candidate("b", 1, "t"),
                                        candidate("c", 1, "s"), candidate("d", 1, "t")};
  VerbsOptions options;
  options.distances = {21, 10};
  const std::string other = ": it is in another subnet than c";
  CHECK(chosen(two, options) ==
        text("c; a: it is on a farther NUMA node than c; b", other, "; d", other));
  options.rails = 2;  // one in each subnet
  CHECK(chosen(two, options).substr(0, 6) == "c; b; ");
  options.turn = 1;
  CHECK(chosen(two, options).substr(0, 6) == "c; d; ");
  std::vector<VerbsCandidate> found = two;
  choose(found, options);
  CHECK(found[0].info.turn == 0 && found[1].info.turn == -1);
  options = {};
  options.turn = 1;
  const std::vector<VerbsCandidate> unknown{candidate("a", 0, ""), candidate("b", 0, "")};
  CHECK(chosen(unknown, options) == "a; b: it is in another subnet than a");
}

void merits() {
  VerbsCandidate first = candidate("z", 0, "s");
  VerbsCandidate slow = candidate("a", 0, "s", 100);
  VerbsCandidate near = candidate("b", 0, "");
  near.scope = 0;
  VerbsCandidate old = candidate("c", 0, "s");
  old.gid.link = VerbsLink::kRoceV1;
  VerbsCandidate down = candidate("d", 0, "s");
  down.info.refused = "the port is down";
  VerbsCandidate again = first;
  again.info.gid_index = 7;
  VerbsOptions options;
  options.turn = 5;
  CHECK(chosen({down, old, near, slow, first, again}, options) ==
        "z; z: GID index -1 comes first; a: it is slower than z; b: its address reaches less far "
        "than z; c: it is RoCE v1, which is not routed; d: the port is down");
  options.rails = 2;  // the second is slower
  CHECK(chosen({slow, first}, options) == "z; a");
  CHECK(chosen({down}, options) == "d: the port is down");
  CHECK(chosen({}, options).empty());
}

void orders() {
  CHECK(keeps_order(IBV_TRANSPORT_IB, VerbsOrder::kAuto));
  for (const auto other : {IBV_TRANSPORT_UNSPECIFIED, IBV_TRANSPORT_UNKNOWN, IBV_TRANSPORT_USNIC}) {
    CHECK(!keeps_order(other, VerbsOrder::kAuto) && keeps_order(other, VerbsOrder::kKept));
  }
  CHECK(!keeps_order(IBV_TRANSPORT_IB, VerbsOrder::kCompletion));
}

// All attempts together last as long as a peer may be silent, unless a time is set.
void acknowledgements() {
  VerbsOptions options;
  const auto last = [&] {
    return (options.retry_count + 1) * 4.096e-6 * (1 << options.acknowledgement_timeout());
  };
  for (const int retries : {0, 3, 6}) {
    options.retry_count = retries;
    CHECK(last() >= options.timeout_s && last() < 2 * options.timeout_s);
  }
  options.ack_timeout = 20;
  CHECK(options.acknowledgement_timeout() == 20);
}

}  // namespace

int main() {
  orders();
  agreement();
  disagreement();
  partitions();
  ports();
  turns();
  subnets();
  merits();
  acknowledgements();
  speeds();
  std::puts("ok");
}
