// Settings of a fabric reach the queue pairs, as the device itself reports. Skipped without a
// device.

#include <dlfcn.h>

#include "transport/verbs/queue.hpp"
#include "verbs.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

decltype(&::ibv_query_qp) query_qp() {
  void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr);
  const auto query = reinterpret_cast<decltype(&::ibv_query_qp)>(dlsym(library, "ibv_query_qp"));
  CHECK(query != nullptr);
  return query;
}

// A rank's end of a connection.
class End {
 public:
  End(Rank rank, const VerbsOptions& options)
      : rank_(rank),
        device_(options),
        queue_(device_, boards_, 0, 2, options.depth),
        connection_(queue_.make(1 - rank)),
        endpoint_(endpoint_of(device_, 1)) {
    connection_.open();
  }

  void join(const End& peer) {
    const VerbsAgreement agreed = agree(rank_, endpoint_, peer.rank_, peer.endpoint_);
    path = path_to(device_, agreed, peer.endpoint_);
    connection_.join(path, peer.connection_.here());
    constexpr int kAsked = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_TIMEOUT |
                           IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_PKEY_INDEX | IBV_QP_CAP;
    ibv_qp_init_attr made{};
    CHECK(query_qp()(connection_.pair(), &now, kAsked, &made) == 0);
    CHECK(now.qp_state == IBV_QPS_RTS);
    most_inline = made.cap.max_inline_data;
  }

  const VerbsDevice& device() const { return device_; }
  std::uint32_t inline_bytes() const { return connection_.inline_bytes(); }

  VerbsPath path;
  ibv_qp_attr now{};
  std::uint32_t most_inline = 0;  // within the queue pair's limit

 private:
  const Rank rank_;
  VerbsDevice device_;
  VerbsBoards boards_;
  VerbsQueue queue_;
  VerbsConnection& connection_;
  const VerbsEndpoint endpoint_;
};

class Joined : public End {
 public:
  explicit Joined(const VerbsOptions& options) : End(0, options), peer_(1, options) { join(peer_); }

 private:
  End peer_;
};

void defaults() {
  const Joined joined{VerbsOptions{}};
  CHECK(joined.now.path_mtu == joined.device().link().active_mtu);
  CHECK(joined.now.retry_cnt == 6 && joined.now.rnr_retry == 6);
  CHECK(joined.now.ah_attr.sl == 0 && joined.now.ah_attr.grh.traffic_class == 0);
  CHECK(joined.now.pkey_index == 0 && joined.now.timeout == 17);  // 7 of 0.54 s last 3 s
  CHECK(joined.inline_bytes() == 64 && joined.most_inline >= 64);
}

void each() {
  VerbsOptions options;
  options.pkey = 0x7fff;  // includes full members of the partition
  options.mtu = 512;
  options.service_level = 3;
  options.traffic_class = 104;
  options.retry_count = 5;
  options.rnr_retry_count = 4;
  options.ack_timeout = 15;
  options.inline_bytes = 200;
  const Joined joined(options);
  CHECK(joined.now.path_mtu == IBV_MTU_512);
  CHECK(joined.now.retry_cnt == 5 && joined.now.rnr_retry == 4 && joined.now.timeout == 15);
  CHECK(joined.now.ah_attr.grh.traffic_class == 104);
  CHECK(joined.path.address.sl == 3);  // soft-RoCE has none, and does not report it
  CHECK(joined.now.ah_attr.is_global == 1);
  CHECK(joined.now.ah_attr.grh.sgid_index == joined.device().gids()[0].index);
  CHECK(joined.now.pkey_index == joined.device().pkey().index);
  CHECK(joined.device().pkey().value == 0xffff);
  CHECK(joined.inline_bytes() == 200 && joined.most_inline >= 200);
}

// More than the device takes: a smaller size is found.
void too_much_inline() {
  VerbsOptions options;
  options.inline_bytes = 1 << 20;
  const Joined joined(options);
  std::printf("%u bytes inline, of %u\n", joined.inline_bytes(), joined.most_inline);
  CHECK(joined.inline_bytes() < options.inline_bytes && joined.inline_bytes() >= 64);
  CHECK(joined.inline_bytes() <= joined.most_inline);
}

// The smaller of two MTUs counts on both sides; other settings are each side's own.
void different() {
  VerbsOptions small;
  small.mtu = 512;
  small.retry_count = 2;
  VerbsOptions large;
  large.mtu = 1024;
  large.traffic_class = 104;
  End one(0, small);
  End other(1, large);
  one.join(other);
  other.join(one);
  CHECK(one.now.path_mtu == IBV_MTU_512 && other.now.path_mtu == IBV_MTU_512);
  CHECK(one.now.retry_cnt == 2 && other.now.retry_cnt == 6);
  CHECK(one.now.ah_attr.grh.traffic_class == 0 && other.now.ah_attr.grh.traffic_class == 104);
}

void refuse(const VerbsOptions& options, const char* words) {
  try {
    const VerbsDevice none(options);
    CHECK_NOTE(false, "no error \"%s\"", words);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kUnavailable);
    CHECK_NOTE(std::string(error.what()).find(words) != std::string::npos, "no \"%s\" in %s", words,
               error.what());
  }
}

// A setting that a port cannot have is the reason not to use it.
void refusals() {
  VerbsOptions options;
  options.pkey = 0x8001;
  refuse(options, "P_Key 0x8001 was asked for, and the port's table has 0xffff");
  options = {};
  options.mtu = 4096;
  const int most = verbs_devices()[0].mtu;
  if (most < options.mtu) refuse(options, "packets of 4096 bytes were asked for");
  const std::string best = verbs_devices()[0].device;
  options = {};
  options.ports = {{best, 0}};
  options.excluded = true;
  refuse(options, text("device ^", best, " was asked for").c_str());
  options.ports = {{best, 200}};
  CHECK(VerbsDevice(options).name() == best);
  options.excluded = false;
  refuse(options, (best + ":200 was asked for").c_str());
}

}  // namespace

int main() {
  if (!have_device()) return 0;
  step("defaults", defaults);
  step("each", each);
  step("inline", too_much_inline);
  step("different", different);
  step("refusals", refusals);
  std::puts("ok");
}
