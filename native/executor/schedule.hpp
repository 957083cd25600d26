// Tracks which layers of a gradient exchange are ready, and the exchange of each bucket: the link
// between a training loop and the executor, used once per layer.
//
// Any thread may call it, one at a time: the bindings hold the GIL.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "executor/executor.hpp"

namespace pgasdl {

class LayerSchedule {
 public:
  struct Layer {
    std::size_t bucket = 0;
    bool ready = false;
    bool arrived = false;  // its exchange is over, and no wait has returned for it
    // Moments of the last iteration, in ticks().
    std::uint64_t became_ready = 0;
    std::uint64_t began = 0;
    std::uint64_t ended = 0;
    std::uint64_t waited = 0;
    // Ticks of all iterations: before the layer's calls, until the exchange began, in it, in waits.
    std::uint64_t computing = 0;
    std::uint64_t queued = 0;
    std::uint64_t exchanging = 0;
    std::uint64_t waiting = 0;
  };

  LayerSchedule(Executor& executor, const std::vector<std::vector<std::uint32_t>>& buckets);

  // Executions take turns, each with its array. Replaces earlier ones; throws if one is under way.
  void bind(std::size_t bucket, std::vector<std::shared_ptr<Execution>> executions,
            std::vector<Array> arrays = {});
  // Throws unless the layer exists and the exchange goes on.
  std::size_t require(std::int64_t layer) const;

  // The layer's gradient is there, or will be after the work that a stream has so far; the last
  // layer of a bucket begins its exchange.
  void ready(std::int64_t layer, const StreamOrder* order = nullptr);
  // The execution to wait for; null if it is over, for a layer that shared it, and before any layer
  // was ready. Throws if the layer was not ready since its last wait, unless a wait was interrupted
  // meanwhile: then the program may begin its loop of waits again.
  std::shared_ptr<Execution> awaited(std::int64_t layer) const;
  std::shared_ptr<Execution> awaited_bucket(std::size_t bucket) const;
  // The bucket's exchange is over, and its result was taken.
  void taken(std::size_t bucket, const Execution& execution);
  // A wait ended by an error.
  void note_interruption() { interrupted_ = true; }
  // A wait for the layer returns.
  void claim(std::size_t layer) { layers_.at(layer).arrived = false; }
  void note_wait(std::size_t layer, std::uint64_t began, std::uint64_t ended);
  // The program continues: the time until its next call counts as computing.
  void note_return(std::uint64_t now) { returned_ = now; }

  const Layer& layer(std::size_t number) const { return layers_.at(number); }
  // How many exchanges of the layer's bucket are over.
  std::uint64_t executions(std::size_t layer) const;
  // The bucket whose update a Call asks for; -1: none of these.
  std::int64_t bucket_of(const Executor::Call& call) const;

  // Ends the exchange: later calls throw the reason.
  void end(const std::string& why) {
    if (!ended_) ended_ = why;
  }
  const std::optional<std::string>& ended() const { return ended_; }
  // Tells the peers that this rank takes no more part. Only while a bucket is under way on all of
  // them, so that none can have deleted its board.
  void renounce();
  // Removes all executions from the executor, for good.
  void close();
  // Nothing is under way and nothing failed, so no peer writes to this rank's memory.
  bool idle() const;

 private:
  struct Bucket {
    std::vector<std::uint32_t> layers;
    std::vector<std::shared_ptr<Execution>> executions;
    std::vector<Array> arrays;
    std::size_t current = 0;
    std::size_t missing = 0;  // layers that are not ready
    bool under_way = false;
    std::uint64_t taken = 0;                  // exchanges that are over
    std::unique_ptr<DeviceMoment> gradients;  // of the ready layers, on a GPU
  };
  void turn_over(Bucket& bucket);
  void note_call(Layer& layer, std::uint64_t now) const;

  Executor& executor_;
  std::vector<Layer> layers_;
  std::vector<Bucket> buckets_;
  std::optional<std::string> ended_;
  bool begun_ = false;          // a layer was ready
  bool interrupted_ = false;    // a wait was, and no layer was ready since
  bool abandoned_ = false;      // something was under way, or had failed, when it was closed
  std::uint64_t returned_ = 0;  // from the last call for a layer
};

}  // namespace pgasdl
