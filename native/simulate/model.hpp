// The input of a simulation: plans as arrays of steps, a machine, and every rank's application. All
// times are in seconds, all amounts in bytes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pgasdl::simulate {

constexpr std::int64_t kPut = 0, kWait = 1, kReduce = 2, kCall = 3, kFlush = 4;

// The meaning of an operation's fields; the low three bits are its kind, one of the above.
enum Flags : std::int64_t {
  kRelative = 8,      // peer is relative to this rank
  kBytesOfPeer = 16,  // bytes: the peer's, in the program's table
  kBytesOfSelf = 32,  // bytes: this rank's, likewise
  kNoteOfPeer = 64,   // notification: add the peer's rank
  kNoteOfSelf = 128,  // notification: add this rank
  kSkipIfNone = 256,  // skips the operation if there are no bytes
};

// Put: to `peer`, raising `note` (-1: none). Wait: for `note`. Reduce: `peer` additions per
// element, `note` remote loads and stores per element.
struct Op {
  std::int64_t flags;
  std::int64_t peer;
  std::int64_t note;
  std::int64_t bytes;
};
static_assert(sizeof(Op) == 32);

// One plan for all ranks. Rank r's lane l is ops[ranges[2 * (r * lanes + l)] .. the next entry).
struct Program {
  std::vector<Op> ops;
  std::vector<std::int64_t> ranges;
  std::vector<std::int64_t> table;
  std::int64_t lanes = 0;
  std::int64_t notifications = 0;

  // Waits that follow each other in a lane form one gathering: it is over when the last of their
  // flags is raised. Numbered from 0 on each rank, in the order of its lanes.
  std::vector<std::int32_t> gathering_of_op;
  std::vector<std::int32_t> gathering_of_note;  // [rank * notifications + note]; one row if `alike`
  bool alike = false;                           // all ranks run the same operations
  std::int32_t gatherings = 0;                  // the most of any rank

  // Fills these in; false: a notification is awaited twice.
  bool index(std::int64_t ranks);
};

// An operation as one rank makes it.
struct Resolved {
  std::int64_t peer, note, bytes;
  bool skip;
};
Resolved resolve(const Program& program, const Op& op, std::int64_t rank, std::int64_t ranks);

// One level of a machine: ranks of one group reach each other below it. Traffic that leaves a group
// passes that group's link up and the other group's link down.
struct Level {
  std::vector<std::int32_t> group;  // of every rank
  std::vector<std::int32_t> link;   // of every rank: which link it uses; -1: none
  double link_beta = 0;             // seconds per byte of each link
  bool through = true;              // also for traffic to farther levels
  // For messages between ranks that meet at this level:
  double latency = 0;    // from leaving the sender to the receiver
  double startup = 0;    // occupies the sender's port before the first byte
  double port_beta = 0;  // seconds per byte of the sender's and the receiver's port
};

struct Machine {
  std::vector<Level> levels;  // nearest first; in the last one all ranks meet
  double gamma = 0;           // per byte and addition of own elements
  double copy = 0;            // per byte of a copy
  double remote = 0;          // per byte loaded from or stored to a peer's memory
  double update = 0;          // per byte of a Call
  bool blocking = false;      // a Put holds up its lane until it is sent
  // Lanes go on only while the application does not compute: after each of its actions, and while
  // it waits. Their work holds it up.
  bool turns = false;
};

enum Act : std::int64_t { kCompute, kStart, kJoin };

// An action of a rank's application; a rank takes its actions in order.
struct Action {
  std::int64_t act;
  std::int64_t job;  // of kStart and kJoin
  double seconds;    // of kCompute
};

struct Scenario {
  std::int64_t ranks = 0;
  std::vector<const Program*> programs;
  std::vector<std::int64_t> jobs;  // the program of each
  std::vector<Action> application;
  std::vector<double> begin;  // of every rank: when it starts
  std::vector<double> slow;   // of every rank: factor on its computation
};

struct Result {
  std::vector<double> finish;     // of job j on rank r: [j * ranks + r]
  std::vector<double> moments;    // when action a ended on rank r: [a * ranks + r]
  std::vector<double> link_busy;  // of each level: the busiest link's seconds; ports first
  std::vector<double> bytes;      // of each level: of messages that met there
  std::int64_t messages = 0;
  std::string stuck;  // empty, or which lane waits for what for ever
};

// Runs the scenario event by event, deterministically, in the caller's thread only.
Result run(const Machine& machine, const Scenario& scenario);

// The highest counts of any rank: messages that it sends, and other ranks that it sends to or
// receives from, each of which takes a connection.
struct Traffic {
  std::int64_t messages = 0;
  std::int64_t neighbours = 0;
};
Traffic traffic(const Scenario& scenario);

}  // namespace pgasdl::simulate
