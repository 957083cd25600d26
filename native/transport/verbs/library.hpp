// libibverbs, loaded at run time: only its public symbols, and owners for the objects it makes.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace pgasdl {

// Posting and polling are missing here, since the header itself calls the provider.
#define PGASDL_VERBS_FUNCTIONS(X) \
  X(ack_cq_events)                \
  X(alloc_pd)                     \
  X(close_device)                 \
  X(create_ah)                    \
  X(create_comp_channel)          \
  X(create_cq)                    \
  X(create_qp)                    \
  X(dealloc_pd)                   \
  X(dereg_mr)                     \
  X(destroy_ah)                   \
  X(destroy_comp_channel)         \
  X(destroy_cq)                   \
  X(destroy_qp)                   \
  X(fork_init)                    \
  X(free_device_list)             \
  X(get_cq_event)                 \
  X(get_device_list)              \
  X(modify_qp)                    \
  X(open_device)                  \
  X(port_state_str)               \
  X(query_device)                 \
  X(query_gid)                    \
  X(query_pkey)                   \
  X(query_port)                   \
  X(reg_mr)                       \
  X(wc_status_str)

struct VerbsLibrary {
#define PGASDL_MEMBER(name) decltype(&::ibv_##name) name = nullptr;
  PGASDL_VERBS_FUNCTIONS(PGASDL_MEMBER)
#undef PGASDL_MEMBER
  // Null before rdma-core 34, whose headers lack it, too.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd* domain, std::uint64_t offset, std::size_t length,
                           std::uint64_t iova, int descriptor, int access) = nullptr;
};

// Loads it at the first call, made safe for fork before any device is opened; throws kUnavailable.
const VerbsLibrary& verbs_library();

struct VerbsDestroy {
  void operator()(ibv_context* context) const { verbs_library().close_device(context); }
  void operator()(ibv_pd* domain) const { verbs_library().dealloc_pd(domain); }
  void operator()(ibv_comp_channel* channel) const {
    verbs_library().destroy_comp_channel(channel);
  }
  void operator()(ibv_cq* queue) const { verbs_library().destroy_cq(queue); }
  void operator()(ibv_qp* pair) const { verbs_library().destroy_qp(pair); }
  void operator()(ibv_mr* region) const { verbs_library().dereg_mr(region); }
  void operator()(ibv_ah* address) const { verbs_library().destroy_ah(address); }
};

template <typename T>
using VerbsPtr = std::unique_ptr<T, VerbsDestroy>;

}  // namespace pgasdl
