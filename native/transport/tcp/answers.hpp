// A peer's requests on one of its queues, taken here without the program.
#pragma once

#include "transport/tcp/memory.hpp"
#include "transport/tcp/stream.hpp"

namespace pgasdl {

class TcpAnswers final : public TcpStream {
 public:
  // `sleeper`: this rank's wake word, once there is one.
  TcpAnswers(TcpSocket socket, int events, Rank peer, QueueId queue, const TcpMemories& memories,
             const std::atomic<WakeWord*>& sleeper);
  QueueId queue() const { return queue_; }

  // Tells the peer a word about this rank's end.
  void say_farewell(std::uint64_t word);

 private:
  void closed(const std::string& why) override { end(why); }
  void ended_locked(const std::string&) override {}
  std::byte* begin(const TcpFrame& frame, std::shared_ptr<const void>& keep) override;
  void finish(const TcpFrame& frame) override;
  void drained() override;
  // The memory with this number, unless it was deleted. Throws if the bytes are outside it.
  std::shared_ptr<const TcpMemory> checked(const TcpFrame& frame, std::uint64_t bytes) const;
  void raise(const TcpFrame& frame) const;
  void answer(TcpFrame frame, const std::byte* data = nullptr,
              std::shared_ptr<const void> keep = nullptr);

  const QueueId queue_;
  const TcpMemories& memories_;
  const std::atomic<WakeWord*>& sleeper_;
  std::uint64_t n_taken_ = 0;
  bool asked_ = false;
  bool refused_ = false;  // a write since the latest acknowledgement
};

}  // namespace pgasdl
