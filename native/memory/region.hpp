// Memory that other ranks can reach: a sealed memfd mapping of our own, a mapping of a peer's, or
// somebody else's buffer that is only described.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "sys/process.hpp"

namespace pgasdl {

// A mapping that is unmapped when its last owner (a segment, a NumPy view) lets go. Page-aligned,
// zero-filled when new, without a name in any file system.
class Region {
 public:
  // A new memfd of `bytes`, sealed against shrinking and growing; the descriptor goes to `fd` so
  // that it can be handed to peers and closed.
  static std::shared_ptr<Region> create(std::size_t bytes, UniqueFd& fd);
  // Memory of this process alone, where nobody maps it: with huge pages, which memfds rarely have.
  static std::shared_ptr<Region> create_private(std::size_t bytes);
  // Maps a peer's descriptor; refuses one that is not sealed or is smaller than `bytes`.
  static std::shared_ptr<Region> attach(int fd, std::size_t bytes);

  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  // Lets the GPUs of this process reach it, as long as it lives. `device`: one that the process
  // uses, so that no context of another has to be made.
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
// Makes the pages of a mapping present now rather than one fault at a time; changes no byte, so
// peers may be writing there already. Silently does nothing where the kernel cannot.
void prefault(std::byte* data, std::size_t bytes);
inline std::size_t round_up(std::size_t bytes, std::size_t to) {
  return (bytes + to - 1) / to * to;
}

}  // namespace pgasdl
