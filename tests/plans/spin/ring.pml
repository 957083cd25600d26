/* Ring: blocks go round as sums, then as results, which prove the slots free.
 * ONE_WAY: reduce-scatter, with a credit of the right neighbour.
 * Broken: NO_FLUSH; NO_CREDIT (with ONE_WAY).
 */
#ifndef N
#define N 3
#endif
#define LANES 1
#define CELLS (N * N + N * (N - 1))
#define FLAGS (N * (2 * N - 1))
#include "onesided.pml"
#define DATA(rank, block) ((rank) * N + (block) % N)
#define SLOT(rank, hop) (N * N + (rank) * (N - 1) + (hop))
#define SUM(rank, hop) ((rank) * (2 * N - 1) + (hop))
#define RESULTED(rank, hop) ((rank) * (2 * N - 1) + N - 1 + (hop))
#define CREDIT(rank) ((rank) * (2 * N - 1) + 2 * N - 2)
#define LEFT ((me + N - 1) % N)
#define RIGHT ((me + 1) % N)

proctype Rank(byte me) {
  byte g, s, lane = me;
  for (g : 1 .. ITERATIONS) {
    for (s : 0 .. N - 1) { memory[DATA(me, s)] = g }
#if defined(ONE_WAY) && !defined(NO_CREDIT)
    RAISE(CREDIT(LEFT), LEFT);
    WAIT(CREDIT(me));
#endif
    for (s : 0 .. N - 2) {
      PUT(DATA(me, me + 2 * N - 1 - s), SLOT(RIGHT, s), SUM(RIGHT, s), RIGHT);
      WAIT(SUM(me, s));
      READ(SLOT(me, s));
      WRITE(DATA(me, me + 2 * N - 2 - s), (s == N - 2 -> RESULT + g : g))
    }
#ifndef ONE_WAY
    for (s : 0 .. N - 2) {
      PUT(DATA(me, me + N - s), DATA(RIGHT, me + N - s), RESULTED(RIGHT, s), RIGHT);
      WAIT(RESULTED(me, s))
    }
    for (s : 0 .. N - 1) { assert(memory[DATA(me, s)] == RESULT + g) }
#endif
#ifndef NO_FLUSH
    FLUSH;
#endif
    assert(memory[DATA(me, me)] == RESULT + g)
  }
}
#include "start.pml"
