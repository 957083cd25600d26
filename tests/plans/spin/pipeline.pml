/* A chain in two chunks and two lanes: chunk 0 comes down while chunk 1 still goes up.
 * Broken: NO_FLUSH; NO_RESULT (a rank's way up does not end with waiting for the result).
 */
#ifndef N
#define N 3
#endif
#define CHUNKS 2
#define LANES 2
#define CELLS (2 * N * CHUNKS)
#define FLAGS (2 * N * CHUNKS)
#include "onesided.pml"
#define DATA(rank, k) ((rank) * CHUNKS + (k))
#define SLOT(rank, k) (N * CHUNKS + (rank) * CHUNKS + (k))
#define UP(rank, k) ((rank) * CHUNKS + (k))
#define DOWN(rank, k) (N * CHUNKS + (rank) * CHUNKS + (k))
byte begun[N];  /* the last execution that began, and lanes that ended in all */
byte ended[N];

proctype Up(byte me) {
  byte g, k, lane = 2 * me;
  for (g : 1 .. ITERATIONS) {
    begun[me] == g;
    for (k : 0 .. CHUNKS - 1) {
      if
      :: me < N - 1 -> WAIT(UP(me, k)); READ(SLOT(me, k))
      :: else
      fi;
      if
      :: me > 0 -> PUT(DATA(me, k), SLOT(me - 1, k), UP(me - 1, k), me - 1)
      :: else ->
         WRITE(DATA(0, k), RESULT + g);
         PUT(DATA(0, k), DATA(1, k), DOWN(1, k), 1)
      fi
    }
#ifndef NO_FLUSH
    if :: me == 0 -> FLUSH :: else fi;
#endif
    ended[me]++
  }
}

proctype Down(byte me) {
  byte g, k, lane = 2 * me + 1;
  for (g : 1 .. ITERATIONS) {
    begun[me] == g;
#ifndef NO_RESULT
    for (k : 0 .. CHUNKS - 1) {
      WAIT(DOWN(me, k));
      assert(memory[DATA(me, k)] == RESULT + g);
      if
      :: me < N - 1 -> PUT(DATA(me, k), DATA(me + 1, k), DOWN(me + 1, k), me + 1)
      :: else
      fi
    }
#endif
#ifndef NO_FLUSH
    FLUSH;
#endif
    ended[me]++
  }
}

proctype Rank(byte me) {
  byte g, k;
  atomic { run Up(me); if :: me > 0 -> run Down(me) :: else fi };
  for (g : 1 .. ITERATIONS) {
    atomic { for (k : 0 .. CHUNKS - 1) { memory[DATA(me, k)] = g }; begun[me] = g };
    ended[me] == g * (me -> 2 : 1);
    atomic { for (k : 0 .. CHUNKS - 1) { assert(memory[DATA(me, k)] == RESULT + g) } }
  }
}
#include "start.pml"
