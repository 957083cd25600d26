/* Owners load all ranks' blocks and store the results to all: flags only, no copies in flight.
 * Broken: NO_READY (does not wait until all have begun), NO_DONE (leaves while owners still work).
 */
#ifndef N
#define N 3
#endif
#define LANES 1
#define CELLS (N * N)
#define FLAGS (2 * N * N)
#include "onesided.pml"
#define DATA(rank, block) ((rank) * N + (block))
#define READY(at, who) ((at) * 2 * N + (who))
#define DONE(at, who) ((at) * 2 * N + N + (who))
#define PEER ((me + p) % N)

proctype Rank(byte me) {
  byte g, p, lane = me;
  for (g : 1 .. ITERATIONS) {
    for (p : 0 .. N - 1) { memory[DATA(me, p)] = g }
#ifndef NO_READY
    for (p : 1 .. N - 1) { RAISE(READY(PEER, me), PEER) }
    for (p : 1 .. N - 1) { WAIT(READY(me, PEER)) }
#endif
    for (p : 0 .. N - 1) { READ(DATA(PEER, me)) }
    for (p : 0 .. N - 1) { WRITE(DATA(PEER, me), RESULT + g) }
#ifndef NO_DONE
    for (p : 1 .. N - 1) { RAISE(DONE(PEER, me), PEER) }
    for (p : 1 .. N - 1) { WAIT(DONE(me, PEER)) }
#endif
    for (p : 0 .. N - 1) { assert(memory[DATA(me, p)] == RESULT + g) }
  }
}
#include "start.pml"
