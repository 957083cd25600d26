// Words of host memory that streams of a GPU write and wait for.
#pragma once

#include <atomic>
#include <cstdint>

#include "sys/cuda.hpp"

namespace pgasdl {

// A word only grows, also from one owner to the next: a stream that comes late to its wait finds it
// ended.
class PinnedWord {
 public:
  // Of a page that is registered at first use and kept until the process ends.
  PinnedWord();
  PinnedWord(const PinnedWord&) = delete;
  PinnedWord& operator=(const PinnedWord&) = delete;
  ~PinnedWord();

  // Streams that wait go on.
  void raise() { word_->fetch_add(1, std::memory_order_release); }
  // `stream` goes on when the word is raised next.
  void await_on(cuda::Device device, cuda::Stream stream) const { enqueue(device, stream, 1); }
  // Throws where streams cannot wait.
  void require_waits(cuda::Device device, cuda::Stream stream) const { enqueue(device, stream, 0); }

 private:
  void enqueue(cuda::Device device, cuda::Stream stream, std::uint32_t more) const;

  const std::uint64_t born_;
  std::atomic<std::uint32_t>* word_;
};

}  // namespace pgasdl
