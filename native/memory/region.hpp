// Memory that other ranks can reach: a sealed memfd mapping of this rank's own, a mapping of a
// peer's, or an existing buffer that is only described.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "sys/process.hpp"

namespace pgasdl {

// A mapping that ends when its last owner (a segment, a NumPy view) releases it. Page-aligned,
// zero-filled when new, without a name in any file system.
class Region {
 public:
  // A new memfd of `bytes`, sealed against shrinking and growing; `fd` gets the descriptor, to be
  // handed to peers and closed.
  static std::shared_ptr<Region> create(std::size_t bytes, UniqueFd& fd);
  // Memory that only this process maps: with huge pages, which memfds rarely have.
  static std::shared_ptr<Region> create_private(std::size_t bytes);
  // Maps a peer's descriptor; refuses one that is unsealed or smaller than `bytes`.
  static std::shared_ptr<Region> attach(int fd, std::size_t bytes);

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // Lets this process's GPUs reach the region for its lifetime. `device`: one that the process
  // already uses, so that no new context is created.
  void pin(int device);

 private:
  Region(std::byte* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  std::byte* data_;
  std::size_t bytes_;
  std::mutex pinning_;
  std::atomic<bool> pinned_{false};
  int pinned_by_ = 0;
};

std::size_t page_bytes();
// Makes the pages of a mapping present at once instead of one fault at a time; changes no byte, so
// peers may already be writing there. Does nothing where the kernel lacks it.
void prefault(std::byte* data, std::size_t bytes);
inline std::size_t round_up(std::size_t bytes, std::size_t to) {
  return (bytes + to - 1) / to * to;
}

}  // namespace pgasdl
