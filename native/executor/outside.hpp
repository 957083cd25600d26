// Releases the executor's lock while a thread is in a call of the GPU driver that may take long:
// the driver holds such calls up while another thread waits for a stream, and that stream may wait
// for something that only a holder of the lock can end.
#pragma once

#include <mutex>

namespace pgasdl {

using Lock = std::unique_lock<std::mutex>;

class Outside {
 public:
  explicit Outside(Lock& lock) : lock_(lock) { lock_.unlock(); }
  Outside(const Outside&) = delete;
  Outside& operator=(const Outside&) = delete;
  ~Outside() { lock_.lock(); }

 private:
  Lock& lock_;
};

}  // namespace pgasdl
