/* Owners copy their block from all, and all copy it back: flags only, no Puts in flight.
 * Broken: NO_READY (does not wait until all have begun), NO_DONE (copies a block that is not done),
 * NO_END (leaves while others still copy).
 */
#ifndef N
#define N 3
#endif
#define LANES 1
#define CELLS (N * N)
#define FLAGS (3 * N * N)
#include "onesided.pml"
#define DATA(rank, block) ((rank) * N + (block))
#define READY(at, who) ((at) * 3 * N + (who))
#define END(at, who) ((at) * 3 * N + N + (who))
#define DONE(at, who) ((at) * 3 * N + 2 * N + (who))
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
    WRITE(DATA(me, me), RESULT + g);
#ifndef NO_DONE
    for (p : 1 .. N - 1) { RAISE(DONE(PEER, me), PEER) }
#endif
    for (p : 1 .. N - 1) {
#ifndef NO_DONE
      WAIT(DONE(me, PEER));
#endif
      assert(memory[DATA(PEER, PEER)] == RESULT + g);
      assert(memory[DATA(PEER, PEER)] == RESULT + g);
      WRITE(DATA(me, PEER), RESULT + g)
    }
#ifndef NO_END
    for (p : 1 .. N - 1) { RAISE(END(PEER, me), PEER) }
    for (p : 1 .. N - 1) { WAIT(END(me, PEER)) }
#endif
    for (p : 0 .. N - 1) { assert(memory[DATA(me, p)] == RESULT + g) }
  }
}
#include "start.pml"
