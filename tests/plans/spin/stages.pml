/* Broadcast in two stages, in lanes of their own, a credit for each: the naive design, in which a
 * rank is ready for the second stage when the first is here. From rank 0 to all others.
 * Broken: NO_CREDIT; NO_FLUSH (the first stage needs none: the second one's credit answers it).
 */
#ifndef N
#define N 3
#endif
#define STAGES 2
#define LANES 2
#define CELLS (N * STAGES)
#define FLAGS (2 * N * STAGES)
#include "onesided.pml"
#define DATA(rank, k) ((rank) * STAGES + (k))
#define HERE(rank, k) ((rank) * STAGES + (k))
#define CREDIT(child, k) (N * STAGES + (child) * STAGES + (k))
byte begun[N];  /* the last execution that began, and lanes that ended in all */
byte ended[N];

proctype Stage(byte me; byte k) {
  byte g, p, lane = STAGES * me + k;
  for (g : 1 .. ITERATIONS) {
    begun[me] == g;
    if
    :: me == 0 ->
       for (p : 1 .. N - 1) {
#ifndef NO_CREDIT
         WAIT(CREDIT(p, k));
#endif
         PUT(DATA(0, k), DATA(p, k), HERE(p, k), p)
       }
#ifndef NO_FLUSH
       if :: k == STAGES - 1 -> FLUSH :: else fi
#endif
    :: else ->
#ifndef NO_CREDIT
       if :: k == 0 -> RAISE(CREDIT(me, 0), 0) :: else fi;
#endif
       WAIT(HERE(me, k));
#ifndef NO_CREDIT
       if :: k + 1 < STAGES -> RAISE(CREDIT(me, k + 1), 0) :: else fi
#endif
    fi;
    ended[me]++
  }
}

proctype Rank(byte me) {
  byte g, k;
  atomic { run Stage(me, 0); run Stage(me, 1) };
  for (g : 1 .. ITERATIONS) {
    atomic {
      for (k : 0 .. STAGES - 1) { memory[DATA(me, k)] = (me -> TORN : g) }
      begun[me] = g
    };
    ended[me] == g * STAGES;
    for (k : 0 .. STAGES - 1) { READ(DATA(me, k)) }
  }
}
#include "start.pml"
