// A rank's part in making connections, over the stub of an adapter.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/verbs/connection_manager.hpp"

namespace pgasdl::fuzz {

class RankOverVerbs {
 public:
  static constexpr Rank kSize = 3;
  static constexpr QueueId kQueues = 2;

  RankOverVerbs(const VerbsDevice& device, Rank rank, const std::string& token)
      : queues_(make_queues(device, boards_)), manager(device, token, rank, kSize, queues_, 3) {}

 private:
  static std::vector<std::unique_ptr<VerbsQueue>> make_queues(const VerbsDevice& device,
                                                              VerbsBoards& boards) {
    std::vector<std::unique_ptr<VerbsQueue>> queues;
    for (QueueId id = 0; id < kQueues; ++id) {
      queues.push_back(std::make_unique<VerbsQueue>(device, boards, id, kSize, 4));
    }
    return queues;
  }
  VerbsBoards boards_;
  std::vector<std::unique_ptr<VerbsQueue>> queues_;

 public:
  VerbsConnectionManager manager;
};

}  // namespace pgasdl::fuzz
