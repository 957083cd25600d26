// Atomics by the processor, for transports that map the peer's word.
#pragma once

#include <atomic>

#include "transport/transport.hpp"

namespace pgasdl {

// Acquire and release, on the word at `atomic.offset` of `data`, which is mapped here and aligned.
// Atomic with other processors' operations in any process, but not with an adapter's. The old value
// is in `*atomic.old` on return. Any thread.
inline void processor_atomic(const Atomic& atomic, std::byte* data) {
  std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(data + atomic.offset));
  if (atomic.kind == Atomic::Kind::kFetchAdd) {
    *atomic.old = word.fetch_add(atomic.operand, std::memory_order_acq_rel);
  } else {
    *atomic.old = atomic.compare;
    word.compare_exchange_strong(*atomic.old, atomic.operand, std::memory_order_acq_rel);
  }
}

}  // namespace pgasdl
