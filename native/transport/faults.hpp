// Errors that broke connections of a queue, until complete() throws them.
#pragma once

#include <atomic>
#include <deque>
#include <mutex>

#include "transport/transport.hpp"

namespace pgasdl {

// An Error to be thrown by several threads: copies of an exception share their text, through a
// count that no sanitizer sees.
struct PeerFault {
  explicit PeerFault(const Error& error)
      : kind(error.kind()), words(error.what()), rank(error.rank()) {}
  Error error() const { return Error(kind, words, rank); }
  ErrorKind kind;
  std::string words;
  int rank;
};

// Holds at most one error per peer, the first.
class PeerFaults {
 public:
  void add(const Error& error, Rank peer);
  void drop(Rank peer);
  // Throws the oldest one, once.
  void raise() {
    if (n_faults_.load(std::memory_order_acquire) != 0) [[unlikely]]
      throw_oldest();
  }

 private:
  struct Fault {
    Rank peer;
    PeerFault what;
  };
  void throw_oldest();

  std::atomic<std::size_t> n_faults_{0};
  std::mutex mutex_;
  std::deque<Fault> faults_;
};

}  // namespace pgasdl
