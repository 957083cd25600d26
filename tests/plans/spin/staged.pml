/* Everybody stages a piece in a slot that peers load from, and nobody says when it is done: so
 * executions alternate between two slots. Broken: ONE_PHASE.
 * With OWNERS a slot has a block for each rank, which stores its result there, in all slots, and each
 * copies from its own. One phase would do. Broken: NO_DONE (copies a block that is not reduced).
 */
#ifndef N
#define N 3
#endif
#define ITERATIONS 4
#ifdef ONE_PHASE
#define PHASES 1
#else
#define PHASES 2
#endif
#define LANES 1
#ifdef OWNERS
#define BLOCKS N
#else
#define BLOCKS 1
#endif
#define CELLS (N * BLOCKS * PHASES)
#define FLAGS (2 * N * N * PHASES)
#include "onesided.pml"
#define BLOCK(rank, block) (((rank) * BLOCKS + (block)) * PHASES + g % PHASES)
#define SLOT(rank) BLOCK(rank, 0)
#define STAGED(at, who) (((at) * N + (who)) * PHASES + g % PHASES)
#define DONE(at, who) (N * N * PHASES + STAGED(at, who))
#define PEER ((me + p) % N)

proctype Rank(byte me) {
  byte g, p, lane = me;
  for (g : 1 .. ITERATIONS) {
#ifdef OWNERS
    for (p : 1 .. N - 1) { WRITE(BLOCK(me, PEER), g) }
#else
    WRITE(SLOT(me), g);
#endif
    for (p : 1 .. N - 1) { RAISE(STAGED(PEER, me), PEER) }
    for (p : 1 .. N - 1) { WAIT(STAGED(me, PEER)) }
#ifdef OWNERS
    for (p : 1 .. N - 1) { READ(BLOCK(PEER, me)) }
    for (p : 1 .. N - 1) { WRITE(BLOCK(PEER, me), RESULT + g) }
#ifndef NO_DONE
    for (p : 1 .. N - 1) { RAISE(DONE(PEER, me), PEER) }
    for (p : 1 .. N - 1) { WAIT(DONE(me, PEER)) }
#endif
    for (p : 1 .. N - 1) {
      assert(memory[BLOCK(me, PEER)] == RESULT + g);
      assert(memory[BLOCK(me, PEER)] == RESULT + g)
    }
#else
    for (p : 1 .. N - 1) { READ(SLOT(PEER)) }
#endif
  }
}
#include "start.pml"
