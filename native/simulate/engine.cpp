#include "simulate/engine.hpp"

#include <algorithm>

namespace pgasdl::simulate {

Result run(const Machine& machine, const Scenario& scenario) {
  return Engine(machine, scenario).run();
}

Engine::Engine(const Machine& machine, const Scenario& scenario)
    : machine_(machine),
      scenario_(scenario),
      ranks_(scenario.ranks),
      jobs_(scenario.jobs.size() * scenario.ranks),
      ports_(scenario.ranks),
      reducer_free_(scenario.ranks, 0.0),
      position_(scenario.ranks, 0),
      joins_(scenario.ranks, -1),
      port_busy_(scenario.ranks, 0.0),
      heads_(machine.levels.size()),
      computes_until_(scenario.ranks, 0.0),
      held_(scenario.ranks) {
  for (const Level& level : machine.levels) {
    std::int32_t links = 0;
    for (const std::int32_t link : level.link) links = std::max(links, link + 1);
    up_free_.emplace_back(links, 0.0);
    down_free_.emplace_back(links, 0.0);
    link_busy_.emplace_back(links, 0.0);
  }
  result_.finish.assign(scenario.jobs.size() * ranks_, -1.0);
  result_.moments.assign(scenario.application.size() * ranks_, -1.0);
  result_.bytes.assign(machine.levels.size(), 0.0);
}

Result Engine::run() {
  for (std::int64_t rank = 0; rank < ranks_; ++rank) {
    push(scenario_.begin[rank], kApplication, static_cast<std::uint32_t>(rank));
  }
  for (;;) {
    // Takes the earliest of the heap's first event and the heads on their way.
    std::deque<Message>* earliest = nullptr;
    for (auto& heads : heads_) {
      if (heads.empty()) continue;
      const Message& head = heads.front();
      if (earliest == nullptr || head.head < earliest->front().head ||
          (head.head == earliest->front().head && head.number < earliest->front().number)) {
        earliest = &heads;
      }
    }
    if (earliest != nullptr) {
      Message& message = earliest->front();
      const Event head{message.head, message.number, kPort, 0};
      if (events_.empty() || head.before(events_.first())) {
        now_ = message.head;
        const Message arrived = message;
        earliest->pop_front();
        pass(arrived);
        continue;
      }
    } else if (events_.empty()) {
      break;
    }
    const Event event = events_.take();
    now_ = event.at;
    switch (event.what) {
      case kPort:
        serve(event.which);
        break;
      case kLane: {
        const Resume resume = resumes_[event.which];
        unused_resumes_.push_back(event.which);
        if (machine_.turns && now_ < computes_until_[resume.rank]) {
          held_[resume.rank].push_back(resume);
        } else {
          advance(resume.job, resume.rank, resume.lane);
        }
        break;
      }
      case kApplication:
        act(event.which);
        break;
    }
  }
  result_.link_busy.push_back(*std::max_element(port_busy_.begin(), port_busy_.end()));
  for (const auto& busy : link_busy_) {
    result_.link_busy.push_back(busy.empty() ? 0.0 : *std::max_element(busy.begin(), busy.end()));
  }
  result_.stuck = stuck();
  return std::move(result_);
}

void Engine::push(double at, What what, std::uint32_t which) {
  events_.push({at, number_++, what, which});
}

void Engine::resume(double at, std::int64_t job, std::int64_t rank, std::uint32_t lane) {
  std::uint32_t slot;
  if (unused_resumes_.empty()) {
    slot = static_cast<std::uint32_t>(resumes_.size());
    resumes_.emplace_back();
  } else {
    slot = unused_resumes_.back();
    unused_resumes_.pop_back();
  }
  resumes_[slot] = {job, static_cast<std::uint32_t>(rank), lane};
  push(at, kLane, slot);
}

std::int32_t Engine::meeting(std::int64_t a, std::int64_t b) const {
  std::int32_t level = 0;
  while (machine_.levels[level].group[a] != machine_.levels[level].group[b]) ++level;
  return level;
}

// --- the application

// Lets lanes go on that were held; false: they have work, and the application goes on later.
bool Engine::turn(std::int64_t rank) {
  if (!machine_.turns) return true;
  double later = reducer_free_[rank];
  if (!held_[rank].empty()) {
    for (const Resume& lane : held_[rank]) resume(now_, lane.job, lane.rank, lane.lane);
    held_[rank].clear();
  } else if (later <= now_) {
    return true;
  }
  push(std::max(now_, later), kApplication, static_cast<std::uint32_t>(rank));
  return false;
}

void Engine::act(std::int64_t rank) {
  if (!turn(rank)) return;
  const auto& actions = scenario_.application;
  std::int64_t& position = position_[rank];
  while (position < static_cast<std::int64_t>(actions.size())) {
    const Action& action = actions[position];
    double& moment = result_.moments[position * ranks_ + rank];
    if (action.act == kCompute && moment < 0) {
      moment = now_ + action.seconds * scenario_.slow[rank];
      computes_until_[rank] = moment;
      push(moment, kApplication, static_cast<std::uint32_t>(rank));
      return;
    }
    if (action.act == kJoin && result_.finish[action.job * ranks_ + rank] < 0) {
      joins_[rank] = action.job;
      return;
    }
    moment = now_;
    ++position;
    if (action.act != kStart) continue;
    start(action.job, rank);
    if (machine_.turns) {  // its lanes begin before the next action
      push(now_, kApplication, static_cast<std::uint32_t>(rank));
      return;
    }
  }
}

void Engine::start(std::int64_t number, std::int64_t rank) {
  const Program& of = program(number);
  Job& here = job(number, rank);
  here.started = true;
  here.lanes.resize(of.lanes);
  for (std::int64_t lane = 0; lane < of.lanes; ++lane) {
    const std::int64_t* range = &of.ranges[2 * (rank * of.lanes + lane)];
    here.lanes[lane].next = range[0];
    here.lanes[lane].end = range[1];
    here.lanes[lane].done = range[0] == range[1];
    here.running += !here.lanes[lane].done;
  }
  if (here.running == 0) {
    finish(number, rank);
    return;
  }
  // The event loop begins lanes: the application may start more at this moment.
  for (std::int64_t lane = 0; lane < of.lanes; ++lane) {
    if (!here.lanes[lane].done) resume(now_, number, rank, static_cast<std::uint32_t>(lane));
  }
}

void Engine::finish(std::int64_t number, std::int64_t rank) {
  result_.finish[number * ranks_ + rank] = now_;
  Job& here = job(number, rank);
  here.gatherings = {};
  here.lanes = {};
  if (joins_[rank] == number) {
    joins_[rank] = -1;
    push(now_, kApplication, static_cast<std::uint32_t>(rank));
  }
}

// --- lanes

void Engine::advance(std::int64_t number, std::int64_t rank, std::uint32_t index) {
  Job& here = job(number, rank);
  Lane& lane = here.lanes[index];
  while (lane.next < lane.end) {
    if (!step(number, rank, index, lane)) return;
  }
  if (machine_.blocking && lane.unsent > 0) return;
  lane.done = true;
  if (--here.running == 0) finish(number, rank);
}

// Runs one step, or a run of Puts; false: the lane is resumed by an event.
bool Engine::step(std::int64_t number, std::int64_t rank, std::uint32_t index, Lane& lane) {
  const Program& of = program(number);
  const Op& op = of.ops[lane.next];
  const Resolved step = resolved(of, op, rank);
  if (step.skip) {
    ++lane.next;
    return true;
  }
  switch (op.flags & 7) {
    case kPut:
      post(number, rank, index, lane);
      return !machine_.blocking;
    case kWait: {
      const std::int32_t number_of = of.gathering_of_op[lane.next];
      std::int32_t needed = 0;
      for (; lane.next < lane.end && (of.ops[lane.next].flags & 7) == kWait; ++lane.next) {
        needed += !resolved(of, of.ops[lane.next], rank).skip;
      }
      Gathering& gathering = gatherings(number, rank)[number_of];
      if (gathering.raised < needed) {
        gathering.needed = needed;
        gathering.lane = index;
        lane.awaits = number_of;
        return false;
      }
      if (gathering.latest <= now_) return true;
      resume(gathering.latest, number, rank, index);
      return false;
    }
    case kReduce:
    case kCall: {
      const bool call = (op.flags & 7) == kCall;
      const bool copy = op.peer == 0 && op.note == 0;
      const auto added = static_cast<double>(op.peer), remote = static_cast<double>(op.note);
      const double per_byte = call   ? machine_.update
                              : copy ? machine_.copy
                                     : machine_.gamma * added + machine_.remote * remote;
      ++lane.next;
      const double cost = per_byte * static_cast<double>(step.bytes);
      if (cost <= 0) return true;
      double& free = reducer_free_[rank];
      free = std::max(free, now_) + cost;
      resume(free, number, rank, index);
      return false;
    }
    default:
      ++lane.next;
      lane.flushing = lane.unsent > 0;
      return !lane.flushing;
  }
}

// --- messages

// Queues consecutive Puts, from the lane's next step on.
void Engine::post(std::int64_t number, std::int64_t rank, std::uint32_t index, Lane& lane) {
  const Program& of = program(number);
  std::int64_t end = lane.next;
  while (end < lane.end && (of.ops[end].flags & 7) == kPut) ++end;
  Port& port = ports_[rank];
  port.queue.push_back({number, lane.next, end, index});
  lane.next = end;
  ++lane.unsent;
  if (!port.busy) serve(rank);
}

// The port is free and takes the next message of its queue.
void Engine::serve(std::int64_t rank) {
  Port& port = ports_[rank];
  port.busy = false;
  while (!port.queue.empty()) {
    Run& run = port.queue.front();
    const Program& of = program(run.job);
    while (run.next < run.end) {
      const Resolved put = resolved(of, of.ops[run.next], rank);
      ++run.next;
      if (put.skip) continue;
      send(run, put, rank);
      if (port.busy) return;
    }
    const Run over = run;
    port.queue.pop_front();
    end_run(over, rank);
  }
}

void Engine::end_run(const Run& run, std::int64_t rank) {
  Job& here = job(run.job, rank);
  if (here.lanes.empty()) return;  // the job is over: a plan may end before its last flag has left
  Lane& lane = here.lanes[run.lane];
  const bool held = lane.flushing || (machine_.blocking && !lane.done);
  if (--lane.unsent == 0 && held) {
    lane.flushing = false;
    resume(now_, run.job, rank, run.lane);
  }
}

void Engine::send(const Run& run, const Resolved& put, std::int64_t rank) {
  const std::int32_t met = meeting(rank, put.peer);
  const Level& level = machine_.levels[met];
  const auto bytes = static_cast<double>(put.bytes);
  const double busy = level.startup + bytes * level.port_beta;
  heads_[met].push_back({static_cast<std::int32_t>(rank), static_cast<std::int32_t>(put.peer), met,
                         static_cast<std::int32_t>(run.job), put.note, put.bytes,
                         now_ + level.startup + level.latency, now_ + busy + level.latency,
                         number_++});
  ++result_.messages;
  result_.bytes[met] += bytes;
  port_busy_[rank] += busy;
  if (busy > 0) {
    ports_[rank].busy = true;
    push(now_ + busy, kPort, static_cast<std::uint32_t>(rank));
  }
}

// A message's head has arrived: passes it through links up to the level where both ends meet, and
// down from there. Its last byte arrives when each of these links, and the receiver's port, has
// passed all earlier bytes and its own.
void Engine::pass(const Message& message) {
  const auto bytes = static_cast<double>(message.bytes);
  double tail = message.tail;
  for (std::int32_t at = 0; at < message.met; ++at) {
    const Level& level = machine_.levels[at];
    if (!level.through && at + 1 != message.met) continue;
    const double busy = bytes * level.link_beta;
    for (const bool up : {true, false}) {
      const std::int32_t link = level.link[up ? message.source : message.target];
      if (link < 0) continue;
      double& free = (up ? up_free_ : down_free_)[at][link];
      free = std::max(now_, free) + busy;
      tail = std::max(tail, free);
      if (up) link_busy_[at][link] += busy;
    }
  }
  double& free = ports_[message.target].receiver_free;
  free = std::max(now_, free) + bytes * machine_.levels[message.met].port_beta;
  deliver(message, std::max(tail, free));
}

std::vector<Engine::Gathering>& Engine::gatherings(std::int64_t number, std::int64_t rank) {
  std::vector<Gathering>& here = job(number, rank).gatherings;
  if (here.empty()) here.resize(program(number).gatherings);
  return here;
}

void Engine::deliver(const Message& message, double tail) {
  if (message.note < 0) return;
  const Program& of = program(message.job);
  const std::int64_t row = of.alike ? 0 : message.target * of.notifications;
  const std::int32_t which = of.gathering_of_note[row + message.note];
  if (which < 0) return;  // no lane waits for it
  Gathering& gathering = gatherings(message.job, message.target)[which];
  gathering.latest = std::max(gathering.latest, tail);
  if (++gathering.raised != gathering.needed) return;
  job(message.job, message.target).lanes[gathering.lane].awaits = -1;
  resume(gathering.latest, message.job, message.target, gathering.lane);
}

std::string Engine::stuck() const {
  for (std::size_t index = 0; index < jobs_.size(); ++index) {
    if (!jobs_[index].started || result_.finish[index] >= 0) continue;
    for (std::size_t lane = 0; lane < jobs_[index].lanes.size(); ++lane) {
      const Lane& at = jobs_[index].lanes[lane];
      if (at.awaits < 0) continue;
      const Gathering& of = jobs_[index].gatherings[at.awaits];
      return "rank " + std::to_string(index % ranks_) + ", job " + std::to_string(index / ranks_) +
             ", lane " + std::to_string(lane) + " waits for " + std::to_string(of.needed) +
             " flags, of which " + std::to_string(of.raised) + " are ever raised";
    }
  }
  return {};
}

}  // namespace pgasdl::simulate
