/* Everybody sends all to all, and nobody says when it was read: executions alternate between two
 * sets of slots. Broken: ONE_PHASE, NO_FLUSH (the result overwrites what is still sent).
 */
#ifndef N
#define N 3
#endif
#ifdef ONE_PHASE
#define PHASES 1
#else
#define PHASES 2
#endif
#define LANES 1
#define CELLS (N + N * N * PHASES)
#define FLAGS (N * N * PHASES)
#include "onesided.pml"
#define DATA(rank) (rank)
#define PLACE(at, sender) (((at) * N + (sender)) * PHASES + g % PHASES)
#define SLOT(at, sender) (N + PLACE(at, sender))
#define PEER ((me + p) % N)

proctype Rank(byte me) {
  byte g, p, lane = me;
  for (g : 1 .. ITERATIONS) {
    memory[DATA(me)] = g;
    for (p : 1 .. N - 1) { PUT(DATA(me), SLOT(PEER, me), PLACE(PEER, me), PEER) }
    for (p : 1 .. N - 1) { WAIT(PLACE(me, PEER)) }
#ifndef NO_FLUSH
    FLUSH;
#endif
    for (p : 1 .. N - 1) { READ(SLOT(me, PEER)) }
    WRITE(DATA(me), RESULT + g)
  }
}
#include "start.pml"
