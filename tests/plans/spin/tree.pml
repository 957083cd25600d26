/* Trees, of any shape, one chunk: up into slots at the parent, the result down into place.
 * CHAIN: a chain instead of a binomial tree. REDUCE: up only. BROADCAST: down only.
 * Broken: NO_FLUSH; NO_CREDIT (with REDUCE or BROADCAST).
 */
#ifndef N
#define N 3
#endif
#define LANES 1
#define CELLS (2 * N)
#define FLAGS (3 * N)
#include "onesided.pml"
#ifdef CHAIN
#define PARENT(node) ((node) - 1)
#else
#define PARENT(node) ((node) & ((node) - 1))
#endif
#define CHILD(c) (c > me && PARENT(c) == me)
#define DATA(rank) (rank)
#define SLOT(child) (N + (child))
#define UP(child) (child)
#define DOWN(child) (N + (child))
#define CREDIT(child) (2 * N + (child))
#define CHILDREN(body) for (c : 1 .. N - 1) { if :: CHILD(c) -> body :: else fi }

proctype Rank(byte me) {
  byte g, c, lane = me;
  for (g : 1 .. ITERATIONS) {
#ifdef BROADCAST
    memory[DATA(me)] = (me -> TORN : RESULT + g);  /* the others': whatever the application likes */
#ifndef NO_CREDIT
    if :: me > 0 -> RAISE(CREDIT(me), PARENT(me)) :: else fi;
    CHILDREN(WAIT(CREDIT(c)));
#endif
#else
    memory[DATA(me)] = g;
#if defined(REDUCE) && !defined(NO_CREDIT)
    CHILDREN(RAISE(CREDIT(c), c));
    if :: me > 0 -> WAIT(CREDIT(me)) :: else fi;
#endif
    CHILDREN(WAIT(UP(c)));
    CHILDREN(READ(SLOT(c)));
    if
    :: me > 0 -> PUT(DATA(me), SLOT(me), UP(me), PARENT(me))
    :: else -> WRITE(DATA(me), RESULT + g)
    fi;
#endif
#ifndef REDUCE
    if :: me > 0 -> WAIT(DOWN(me)) :: else fi;
    CHILDREN(PUT(DATA(me), DATA(c), DOWN(c), c));
#endif
#ifndef NO_FLUSH
    FLUSH;
#endif
#ifndef REDUCE
    assert(memory[DATA(me)] == RESULT + g)
#endif
  }
}
#include "start.pml"
