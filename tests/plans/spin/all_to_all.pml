/* Blocks from everybody to everybody: a credit for the slot, a flush before a block is overwritten.
 * Broken: NO_CREDIT; NO_FLUSH.
 */
#ifndef N
#define N 3
#endif
#define LANES 1
#define CELLS (2 * N * N)
#define FLAGS (2 * N * N)
#include "onesided.pml"
#define DATA(rank, block) ((rank) * N + (block))
#define SLOT(rank, sender) (N * N + (rank) * N + (sender))
#define HERE(at, sender) ((at) * 2 * N + (sender))
#define CREDIT(at, who) ((at) * 2 * N + N + (who))
#define PEER ((me + p) % N)

proctype Rank(byte me) {
  byte g, p, lane = me;
  for (g : 1 .. ITERATIONS) {
    for (p : 1 .. N - 1) { memory[DATA(me, PEER)] = g }
#ifndef NO_CREDIT
    for (p : 1 .. N - 1) { RAISE(CREDIT(PEER, me), PEER) }
#endif
    for (p : 1 .. N - 1) {
#ifndef NO_CREDIT
      WAIT(CREDIT(me, PEER));
#endif
      PUT(DATA(me, PEER), SLOT(PEER, me), HERE(PEER, me), PEER)
    }
#ifndef NO_FLUSH
    FLUSH;
#endif
    for (p : 1 .. N - 1) {
      WAIT(HERE(me, PEER));
      READ(SLOT(me, PEER));
      WRITE(DATA(me, PEER), RESULT + g)
    }
  }
}
#include "start.pml"
