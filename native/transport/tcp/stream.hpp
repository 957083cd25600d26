// One established connection: frames that leave when the kernel takes them, and frames that arrive
// straight where their bytes belong.
//
// Two locks: one for what leaves, one for what arrives; who holds the second may take the first.
// The descriptor stays open until retire(), so that no thread uses another one's.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/tcp/socket.hpp"
#include "transport/tcp/wire.hpp"

namespace pgasdl {

class TcpStream {
 public:
  // `events`: an epoll that gets the stream's address with its events. The stream outlives it.
  TcpStream(TcpSocket socket, int events, Rank peer);
  virtual ~TcpStream() = default;
  TcpStream(const TcpStream&) = delete;
  TcpStream& operator=(const TcpStream&) = delete;

  // Other threads use it from now on.
  void begin_events();
  Rank peer() const { return peer_; }
  // Nothing arrives or leaves any more.
  bool ended() const { return ended_.load(std::memory_order_acquire); }
  // Takes what has arrived, a limited amount, unless another thread does. Any thread.
  void receive();
  // Sends what the kernel takes now. Any thread.
  void flush();
  // Copies bytes that nothing keeps and that have not left. Any thread.
  void take_over();
  // Ends the connection from this side. Any thread.
  void end(const std::string& why);
  // Neither stores to that memory nor sends from it any more. Any thread.
  void abandon(const std::shared_ptr<const void>& memory);
  // Closes the descriptor of a connection that has ended; false: it was closed before.
  bool retire();

 protected:
  // --- with the lock of what leaves
  // Appends a frame, and the bytes at `data`, which `keep` owns and which stay as they are until
  // they have left. flush_locked() sends them.
  void push(const TcpFrame& frame, const std::byte* data = nullptr,
            std::shared_ptr<const void> keep = nullptr);
  void flush_locked();
  void end_locked(const std::string& why);
  std::size_t backlog() const { return leaving_.size(); }
  // The connection has just ended.
  virtual void ended_locked(const std::string& why) = 0;

  // --- with the lock of what arrives
  // Where the frame's bytes go; null: nowhere. `keep` then owns that memory until they are there.
  // Throws Error if no such frame may come.
  virtual std::byte* begin(const TcpFrame& frame, std::shared_ptr<const void>& keep) = 0;
  // All its bytes have arrived.
  virtual void finish(const TcpFrame& frame) = 0;
  // They came to memory, which is still there. For finish().
  bool stored() const { return keep_ != nullptr; }
  // All that had arrived has been taken.
  virtual void drained() {}
  // The peer has closed the connection, or it broke: end() must follow.
  virtual void closed(const std::string& why) = 0;

  std::mutex leave_mutex_;

 private:
  struct Leaving {
    TcpFrame frame;
    const std::byte* data;
    std::shared_ptr<const void> keep;
    std::uint64_t sent;  // bytes of frame and data
    std::uint64_t bytes() const { return sizeof frame + (data == nullptr ? 0 : frame.payload()); }
  };
  void watch(bool room);
  void copy_leaving(const std::shared_ptr<const void>& keep);
  void take(std::size_t got);
  void arrived();

  const Rank peer_;
  const int events_;
  TcpSocket socket_;
  std::atomic<bool> ended_{false};
  std::deque<Leaving> leaving_;
  bool watches_room_ = false;

  std::mutex arrive_mutex_;
  TcpFrame frame_{};
  std::byte* target_ = nullptr;
  std::shared_ptr<const void> keep_;  // owns that
  std::uint64_t missing_ = 0;         // bytes of frame_
  std::size_t n_staged_ = 0;
  std::vector<std::byte> staged_;  // arrived and not taken; none once retired
};

}  // namespace pgasdl
