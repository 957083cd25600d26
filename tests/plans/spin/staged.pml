/* Everybody stages a piece in a slot that peers load from, and nobody says when it is done: so
 * executions alternate between two slots. Broken: ONE_PHASE.
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
#define CELLS (N * PHASES)
#define FLAGS (N * N * PHASES)
#include "onesided.pml"
#define SLOT(rank) ((rank) * PHASES + g % PHASES)
#define STAGED(at, who) (((at) * N + (who)) * PHASES + g % PHASES)
#define PEER ((me + p) % N)

proctype Rank(byte me) {
  byte g, p, lane = me;
  for (g : 1 .. ITERATIONS) {
    WRITE(SLOT(me), g);
    for (p : 1 .. N - 1) { RAISE(STAGED(PEER, me), PEER) }
    for (p : 1 .. N - 1) { WAIT(STAGED(me, PEER)) }
    for (p : 1 .. N - 1) { READ(SLOT(PEER)) }
  }
}
#include "start.pml"
