/* Halving and doubling on three ranks: level 0 halves 0, 1 | 2 (1 has no partner and gives its part
 * to 2 as well), level 1 halves 0 | 1. Messages of doubling answer those of halving.
 * ONE_WAY: reduce-scatter, with credits. Broken: NO_FLUSH; NO_CREDIT (with ONE_WAY).
 */
#define N 3
#define LANES 1
#define CELLS (3 * N + 4 * N)
#define FLAGS (7 * N)
#include "onesided.pml"
#define DATA(rank, block) ((rank) * 3 + (block))
/* Slots of a rank: 0, 1 from a partner at level 0 (two blocks), 2 from a giver, 3 at level 1. */
#define SLOT(rank, s) (9 + (rank) * 4 + (s))
/* Flags of a rank: 0, 1, 2 as slots 0, 2, 3; 3, 4 results of levels 0 and 1; 5, 6 credits. */
#define FLAG(rank, f) ((rank) * 7 + (f))
#if defined(ONE_WAY) && !defined(NO_CREDIT)
#define FREE(peer, level) RAISE(FLAG(peer, 5 + level), peer)
#define CREDIT(level) WAIT(FLAG(me, 5 + level))
#else
#define FREE(peer, level) skip
#define CREDIT(level) skip
#endif

proctype Rank(byte me) {
  byte g, b, lane = me;
  for (g : 1 .. ITERATIONS) {
    for (b : 0 .. 2) { memory[DATA(me, b)] = g }
    if
    :: me == 2 -> FREE(0, 0); FREE(1, 0)
    :: me == 1 -> FREE(0, 1)
    :: me == 0 -> FREE(2, 0); FREE(1, 1)
    fi;
    /* Level 0: blocks 0 and 1 are one message: the flag is behind both. */
    if
    :: me == 2 ->
       CREDIT(0);
       PUT_SILENTLY(DATA(2, 0), SLOT(0, 0), 0);
       PUT(DATA(2, 1), SLOT(0, 1), FLAG(0, 0), 0);
       WAIT(FLAG(2, 0)); WAIT(FLAG(2, 1));
       READ(SLOT(2, 0)); READ(SLOT(2, 2));
       WRITE(DATA(2, 2), RESULT + g)
    :: me == 1 ->
       CREDIT(0);
       PUT(DATA(1, 2), SLOT(2, 2), FLAG(2, 1), 2);
       CREDIT(1);
       PUT(DATA(1, 0), SLOT(0, 3), FLAG(0, 2), 0);
       WAIT(FLAG(1, 2));
       READ(SLOT(1, 3));
       WRITE(DATA(1, 1), RESULT + g)
    :: me == 0 ->
       CREDIT(0);
       PUT(DATA(0, 2), SLOT(2, 0), FLAG(2, 0), 2);
       WAIT(FLAG(0, 0));
       READ(SLOT(0, 0)); READ(SLOT(0, 1));
       CREDIT(1);
       PUT(DATA(0, 1), SLOT(1, 3), FLAG(1, 2), 1);
       WAIT(FLAG(0, 2));
       READ(SLOT(0, 3));
       WRITE(DATA(0, 0), RESULT + g)
    fi;
#ifndef ONE_WAY
    if
    :: me == 0 ->
       PUT(DATA(0, 0), DATA(1, 0), FLAG(1, 4), 1); WAIT(FLAG(0, 4));
       PUT_SILENTLY(DATA(0, 0), DATA(2, 0), 2);
       PUT(DATA(0, 1), DATA(2, 1), FLAG(2, 3), 2); WAIT(FLAG(0, 3))
    :: me == 1 ->
       PUT(DATA(1, 1), DATA(0, 1), FLAG(0, 4), 0); WAIT(FLAG(1, 4)); WAIT(FLAG(1, 3))
    :: me == 2 ->
       PUT(DATA(2, 2), DATA(0, 2), FLAG(0, 3), 0);
       PUT(DATA(2, 2), DATA(1, 2), FLAG(1, 3), 1);
       WAIT(FLAG(2, 3))
    fi;
    for (b : 0 .. 2) { assert(memory[DATA(me, b)] == RESULT + g) }
#endif
#ifndef NO_FLUSH
    FLUSH;
#endif
    assert(memory[DATA(me, me)] == RESULT + g)
  }
}
#include "start.pml"
