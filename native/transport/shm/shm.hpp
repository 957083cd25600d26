// Shared memory between the processes of one machine.
//
// Segments are sealed memfd mappings whose descriptors travel over AF_UNIX datagrams, so a write is
// a copy and a flag is a store-release. Memory that was only bound is reached by
// process_vm_writev(2) and process_vm_readv(2). Everything is complete when its post returns.
#pragma once

#include <sys/types.h>

#include <map>
#include <mutex>
#include <vector>

#include "transport/transport.hpp"

namespace pgasdl {

class ShmTransport final : public Transport {
 public:
  // `token`: 16 bytes that only ranks of this job know; descriptors that come without are dropped.
  ShmTransport(Rank rank, Rank size, const std::string& token);

  std::string_view name() const override { return "shm"; }
  std::string endpoint() override;
  void connect(Rank peer, const std::string& endpoint) override;
  void set_wake_word(Rank peer, WakeWord* wake_word) override;
  std::string publish(LocalSegment& segment, std::span<const Rank> peers) override;
  RemoteSegment attach(Rank peer, const std::string& description, Deadline deadline) override;
  int service_descriptor() const override { return socket_.get(); }
  void service() override;

  bool post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                  const RemoteFlag* flag) override;
  bool post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                 const LocalFlag* flag) override;
  bool post_atomic(QueueId queue, Rank peer, const Atomic& atomic) override;
  bool complete(QueueId) override { return true; }

 private:
  struct Peer {
    std::string address;  // its socket, in the abstract name space
    pid_t pid = 0;
    WakeWord* wake_word = nullptr;
  };
  void admit_peers();
  void offer(const LocalSegment& segment, Rank peer);
  UniqueFd await_descriptor(Rank peer, SegmentId segment, Deadline deadline);
  void copy_across(Rank peer, const Transfer& transfer, bool write);

  const Rank rank_;
  const std::string token_;
  std::string address_;
  UniqueFd socket_;
  std::vector<Peer> peers_;
  std::mutex mailbox_mutex_;
  std::map<std::pair<Rank, SegmentId>, UniqueFd> mailbox_;  // arrived, not yet attached
};

}  // namespace pgasdl
