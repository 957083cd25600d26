// Shared memory between the processes of one machine.
//
// Segments are sealed memfd mappings whose descriptors travel over AF_UNIX datagrams, so a write is
// a copy and a flag is a store-release. Bound memory is reached by process_vm_writev(2) and
// process_vm_readv(2). GPU memory is mapped by both ranks and copied by the device. Every request
// is complete when its post returns.
#pragma once

#include <sys/types.h>

#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <vector>

#include "transport/transport.hpp"

namespace pgasdl {

class ShmTransport final : public Transport {
 public:
  // `token`: 16 bytes that only ranks of this job know; descriptors without it are dropped.
  ShmTransport(Rank rank, Rank size, const std::string& token);

  std::string_view name() const override { return "shm"; }
  std::string endpoint() override;
  void connect(Rank peer, const std::string& endpoint) override;
  void set_wake_word(Rank peer, WakeWord* wake_word) override;
  std::string publish(LocalSegment& segment, std::span<const Rank> peers) override;
  RemoteSegment attach(Rank peer, const std::string& description, int device,
                       Deadline deadline) override;
  void retract(const LocalSegment& segment) override;
  std::string refuses_device(int) const override { return ""; }
  int service_descriptor() const override { return socket_.get(); }
  bool service() override;
  void end_service() override;

  bool post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                  const RemoteFlag* flag) override;
  bool post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                 const LocalFlag* flag) override;
  bool post_atomic(QueueId queue, Rank peer, const Atomic& atomic) override;
  bool complete(QueueId) override { return true; }
  bool forget(Rank peer) override;

 private:
  struct Peer {
    UniqueFd mailbox;  // connected to the peer's socket; none if that was gone
    pid_t pid = 0;
    WakeWord* wake_word = nullptr;
  };
  void admit_peers();
  // A descriptor stands for host memory or the board (kHost), or for data on a device (kDevice).
  // kNone retracts the descriptors that were offered before.
  enum class Part : std::uint32_t { kHost, kDevice, kNone };
  void offer(SegmentId segment, Part part, const UniqueFd& descriptor, Rank peer);
  bool send(SegmentId segment, Part part, int descriptor, Rank peer);
  UniqueFd await_descriptor(Rank peer, SegmentId segment, Part part, Deadline deadline);
  void copy_across(Rank peer, const Transfer& transfer, bool write);
  void call_across(Rank peer, std::byte* mine, std::uint64_t theirs, std::uint64_t bytes,
                   bool write);

  const Rank rank_;
  const std::string token_;
  std::string address_;
  std::shared_mutex socket_mutex_;  // exclusive for closing the socket and the mailboxes
  UniqueFd socket_;
  std::vector<Peer> peers_;
  std::mutex mailbox_mutex_;  // guards the members below
  // Descriptors that arrived and are not attached yet; none from forgotten ranks.
  std::map<std::tuple<Rank, SegmentId, Part>, UniqueFd> mailbox_;
  std::vector<bool> forgotten_;
};

}  // namespace pgasdl
