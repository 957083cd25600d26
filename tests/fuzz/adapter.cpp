#include "adapter.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "fuzz.hpp"

namespace pgasdl::fuzz {
namespace {

constexpr std::size_t kHeaderBytes = sizeof(ibv_grh);

struct Pair : ibv_qp {
  std::deque<ibv_recv_wr> receives;
  std::deque<ibv_sge> pieces;
  std::uint64_t n_sent = 0;  // and not yet reported as completed
};

Pair* datagrams = nullptr;  // the pair that gets datagrams: the last one made for them

int post_recv(ibv_qp* pair, ibv_recv_wr* request, ibv_recv_wr**) {
  for (; request != nullptr; request = request->next) {
    static_cast<Pair*>(pair)->receives.push_back(*request);
    static_cast<Pair*>(pair)->pieces.push_back(request->num_sge == 0 ? ibv_sge{}
                                                                     : *request->sg_list);
  }
  return 0;
}

int post_send(ibv_qp* pair, ibv_send_wr* request, ibv_send_wr**) {
  const ibv_sge& piece = *request->sg_list;
  adapter().sent.assign(reinterpret_cast<const char*>(piece.addr), piece.length);
  ++static_cast<Pair*>(pair)->n_sent;
  return 0;
}

int poll_cq(ibv_cq* queue, int, ibv_wc* completion) {
  *completion = {};
  if (datagrams == nullptr) return 0;
  if (queue == datagrams->send_cq && datagrams->n_sent != 0) {
    --datagrams->n_sent;
    return 1;
  }
  std::string& arriving = adapter().arriving;
  if (queue != datagrams->recv_cq || arriving.empty() || datagrams->receives.empty()) return 0;
  const ibv_sge piece = datagrams->pieces.front();
  completion->wr_id = datagrams->receives.front().wr_id;
  datagrams->receives.pop_front();
  datagrams->pieces.pop_front();
  const std::size_t n = std::min<std::size_t>(arriving.size(), piece.length - kHeaderBytes);
  std::memcpy(reinterpret_cast<char*>(piece.addr) + kHeaderBytes, arriving.data(), n);
  completion->byte_len = static_cast<std::uint32_t>(kHeaderBytes + n);
  arriving.clear();
  return 1;
}

int req_notify_cq(ibv_cq*, int) { return 0; }

ibv_device* the_device() {
  static ibv_device device = [] {
    ibv_device made{};
    std::strcpy(made.name, "none0");
    std::strcpy(made.ibdev_path, "/nowhere");
    return made;
  }();
  return &device;
}

ibv_device** get_device_list(int* count) {
  static ibv_device* list[] = {the_device(), nullptr};
  *count = 1;
  return list;
}

ibv_context* open_device(ibv_device* device) {
  auto* context = new ibv_context{};
  context->device = device;
  context->ops.poll_cq = poll_cq;
  context->ops.post_recv = post_recv;
  context->ops.post_send = post_send;
  context->ops.req_notify_cq = req_notify_cq;
  return context;
}

int query_device(ibv_context*, ibv_device_attr* limits) {
  *limits = {};
  limits->phys_port_cnt = 1;
  limits->max_cqe = 1 << 16;
  limits->max_qp_wr = 1 << 10;
  limits->max_qp_rd_atom = limits->max_qp_init_rd_atom = 16;
  return 0;
}

int query_port(ibv_context*, std::uint8_t, _compat_ibv_port_attr* filled) {
  ibv_port_attr link{};
  link.state = IBV_PORT_ACTIVE;
  link.link_layer = IBV_LINK_LAYER_ETHERNET;
  link.active_mtu = IBV_MTU_1024;
  link.max_msg_sz = 1 << 20;
  link.gid_tbl_len = 2;
  std::memcpy(filled, &link, sizeof link);
  return 0;
}

int query_gid(ibv_context*, std::uint8_t, int index, ibv_gid* gid) {
  *gid = {};
  gid->raw[0] = 0xfd;
  gid->raw[15] = static_cast<std::uint8_t>(index + 1);
  return 0;
}

int query_pkey(ibv_context*, std::uint8_t, int, __be16* pkey) {
  *pkey = 0xffff;
  return 0;
}

ibv_comp_channel* create_comp_channel(ibv_context*) {
  auto* channel = new ibv_comp_channel{};
  channel->fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  return channel;
}

int destroy_comp_channel(ibv_comp_channel* channel) {
  close(channel->fd);
  delete channel;
  return 0;
}

ibv_cq* create_cq(ibv_context* context, int, void*, ibv_comp_channel*, int) {
  auto* queue = new ibv_cq{};
  queue->context = context;
  return queue;
}

ibv_qp* create_qp(ibv_pd* domain, ibv_qp_init_attr* wanted) {
  static std::uint32_t number = 0;
  auto* pair = new Pair{};
  pair->context = domain->context;
  pair->send_cq = wanted->send_cq;
  pair->recv_cq = wanted->recv_cq;
  number = number % 200 + 1;  // fits in a byte, so that inputs can name it
  pair->qp_num = number;
  ++adapter().n_pairs;
  if (wanted->qp_type == IBV_QPT_UD) datagrams = pair;
  return pair;
}

int destroy_qp(ibv_qp* pair) {
  if (pair == datagrams) datagrams = nullptr;
  --adapter().n_pairs;
  delete static_cast<Pair*>(pair);
  return 0;
}

// Attributes that no adapter takes must have been refused before, where the input was read.
int modify_qp(ibv_qp*, ibv_qp_attr* attributes, int mask) {
  if (mask & IBV_QP_PATH_MTU) {
    REQUIRE(attributes->path_mtu >= IBV_MTU_256 && attributes->path_mtu <= IBV_MTU_4096);
  }
  if (mask & IBV_QP_MAX_DEST_RD_ATOMIC) {
    REQUIRE(attributes->max_dest_rd_atomic >= 1 && attributes->max_dest_rd_atomic <= 16);
  }
  return 0;
}

ibv_mr* reg_mr(ibv_pd* domain, void* data, std::size_t bytes, int) {
  auto* region = new ibv_mr{};
  region->context = domain->context;
  region->pd = domain;
  region->addr = data;
  region->length = bytes;
  return region;
}

template <typename T>
int deleted(T* object) {
  delete object;
  return 0;
}

VerbsLibrary made() {
  VerbsLibrary library;
  library.ack_cq_events = [](ibv_cq*, unsigned) {};
  library.alloc_pd = [](ibv_context* context) {
    auto* domain = new ibv_pd{};
    domain->context = context;
    return domain;
  };
  library.close_device = deleted<ibv_context>;
  library.create_ah = [](ibv_pd*, ibv_ah_attr*) { return new ibv_ah{}; };
  library.create_comp_channel = create_comp_channel;
  library.create_cq = create_cq;
  library.create_qp = create_qp;
  library.dealloc_pd = deleted<ibv_pd>;
  library.dereg_mr = deleted<ibv_mr>;
  library.destroy_ah = deleted<ibv_ah>;
  library.destroy_comp_channel = destroy_comp_channel;
  library.destroy_cq = deleted<ibv_cq>;
  library.destroy_qp = destroy_qp;
  library.free_device_list = [](ibv_device**) {};
  library.get_cq_event = [](ibv_comp_channel*, ibv_cq**, void**) { return -1; };
  library.get_device_list = get_device_list;
  library.modify_qp = modify_qp;
  library.open_device = open_device;
  library.port_state_str = [](ibv_port_state) { return "active"; };
  library.query_device = query_device;
  library.query_gid = query_gid;
  library.query_pkey = query_pkey;
  library.query_port = query_port;
  library.reg_mr = reg_mr;
  library.wc_status_str = [](ibv_wc_status) { return "well"; };
  return library;
}

}  // namespace

Adapter& adapter() {
  static Adapter one;
  return one;
}

}  // namespace pgasdl::fuzz

namespace pgasdl {

const VerbsLibrary& verbs_library() {
  static const VerbsLibrary library = fuzz::made();
  return library;
}

}  // namespace pgasdl
