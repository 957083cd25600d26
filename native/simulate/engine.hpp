// The event loop behind run().
#pragma once

#include <deque>
#include <vector>

#include "simulate/heap.hpp"
#include "simulate/model.hpp"

namespace pgasdl::simulate {

// An outgoing port sends one message at a time, in the order of posting. Links and incoming ports
// pass bytes in the order in which messages' heads arrive, and interleave several messages: a
// message delays others' last bytes, but not their heads (unbounded buffers, no loss).
class Engine {
 public:
  Engine(const Machine& machine, const Scenario& scenario);
  Result run();

 private:
  // A lane of one job on one rank, while the job runs.
  struct Lane {
    std::int64_t next = 0, end = 0;
    std::int32_t awaits = -1;  // gathering
    std::int32_t unsent = 0;   // runs of Puts in the port's queue
    bool flushing = false, done = true;
  };

  struct Gathering {
    double latest = 0;
    std::int32_t raised = 0;
    std::int32_t needed = -1;  // set once a lane waits for it
    std::uint32_t lane = 0;
  };

  struct Job {
    bool started = false;
    std::int32_t running = 0;           // lanes
    std::vector<Gathering> gatherings;  // empty: no flag so far
    std::vector<Lane> lanes;
  };

  // Consecutive Puts of a lane, in a port's queue.
  struct Run {
    std::int64_t job, next, end;
    std::uint32_t lane;
  };

  struct Port {
    std::deque<Run> queue;
    bool busy = false;
    double receiver_free = 0;
  };

  struct Message {
    std::int32_t source, target;
    std::int32_t met;  // level at which source and target meet
    std::int32_t job;
    std::int64_t note, bytes;
    double head, tail;
    std::uint64_t number;  // as in an event
  };

  const Program& program(std::int64_t job) const {
    return *scenario_.programs[scenario_.jobs[job]];
  }
  Job& job(std::int64_t number, std::int64_t rank) { return jobs_[number * ranks_ + rank]; }
  Resolved resolved(const Program& of, const Op& op, std::int64_t rank) const {
    return resolve(of, op, rank, ranks_);
  }
  std::int32_t meeting(std::int64_t a, std::int64_t b) const;
  void push(double at, What what, std::uint32_t which);

  void act(std::int64_t rank);
  bool turn(std::int64_t rank);
  void start(std::int64_t number, std::int64_t rank);
  void advance(std::int64_t number, std::int64_t rank, std::uint32_t lane);
  bool step(std::int64_t number, std::int64_t rank, std::uint32_t index, Lane& lane);
  void finish(std::int64_t number, std::int64_t rank);
  void post(std::int64_t number, std::int64_t rank, std::uint32_t index, Lane& lane);
  void serve(std::int64_t rank);
  void end_run(const Run& run, std::int64_t rank);
  void send(const Run& run, const Resolved& put, std::int64_t rank);
  void pass(const Message& message);
  std::vector<Gathering>& gatherings(std::int64_t number, std::int64_t rank);
  void deliver(const Message& message, double tail);
  std::string stuck() const;

  const Machine& machine_;
  const Scenario& scenario_;
  const std::int64_t ranks_;
  double now_ = 0;
  std::uint64_t number_ = 0;
  Heap events_;
  std::vector<Job> jobs_;
  std::vector<Port> ports_;
  std::vector<double> reducer_free_;
  std::vector<std::int64_t> position_;  // of every rank in the application
  std::vector<std::int64_t> joins_;     // the job that each rank waits for, or -1
  std::vector<std::vector<double>> up_free_, down_free_;
  std::vector<std::vector<double>> link_busy_;
  std::vector<double> port_busy_;
  // Heads on their way to the first link: between ranks that meet at one level all take equally
  // long, so they arrive in the order in which they left.
  std::vector<std::deque<Message>> heads_;
  // The meaning of a lane's event, kept outside the event, which stays small.
  struct Resume {
    std::int64_t job;
    std::uint32_t rank, lane;
  };
  std::vector<Resume> resumes_;
  // With turns: until when each rank computes, and the lanes that go on then.
  std::vector<double> computes_until_;
  std::vector<std::vector<Resume>> held_;
  std::vector<std::uint32_t> unused_resumes_;
  void resume(double at, std::int64_t job, std::int64_t rank, std::uint32_t lane);
  Result result_;
};

}  // namespace pgasdl::simulate
