/* GDRAA between two nodes of two ranks: rank i of a node speaks for block i, in two sub-blocks.
 * Inside, blocks go to their holder's slot, and results come back; across, sub-blocks likewise.
 * Broken: NO_FLUSH; NO_DONE (leaves without the mate's block).
 */
#define N 4
#define LANES 1
#define CELLS (N * 4 + N * 3)
#define FLAGS (N * 4)
#include "onesided.pml"
#define NODE (me / 2)
#define PLACE (me % 2)
#define MATE (me ^ 1)
#define TWIN (me ^ 2)  /* in the other node */
/* Sub-block s of block b; slots from the mate (two sub-blocks) and from the twin. */
#define DATA(rank, b, s) ((rank) * 4 + (b) * 2 + (s))
#define SLOT(rank, s) (16 + (rank) * 3 + (s))
/* Flags of a rank: the mate's block; the twin's sub-block, and its result; the mate's result. */
#define FLAG(rank, f) ((rank) * 4 + (f))

proctype Rank(byte me) {
  byte g, b, lane = me;
  for (g : 1 .. ITERATIONS) {
    atomic { for (b : 0 .. 3) { memory[me * 4 + b] = g } };
    PUT_SILENTLY(DATA(me, 1 - PLACE, 0), SLOT(MATE, 0), MATE);
    PUT(DATA(me, 1 - PLACE, 1), SLOT(MATE, 1), FLAG(MATE, 0), MATE);
    WAIT(FLAG(me, 0));
    READ(SLOT(me, 0)); READ(SLOT(me, 1));
    PUT(DATA(me, PLACE, 1 - NODE), SLOT(TWIN, 2), FLAG(TWIN, 1), TWIN);
    WAIT(FLAG(me, 1));
    READ(SLOT(me, 2));
    WRITE(DATA(me, PLACE, NODE), RESULT + g);
    PUT(DATA(me, PLACE, NODE), DATA(TWIN, PLACE, NODE), FLAG(TWIN, 2), TWIN);
    WAIT(FLAG(me, 2));
    PUT_SILENTLY(DATA(me, PLACE, 0), DATA(MATE, PLACE, 0), MATE);
    PUT(DATA(me, PLACE, 1), DATA(MATE, PLACE, 1), FLAG(MATE, 3), MATE);
#ifndef NO_DONE
    WAIT(FLAG(me, 3));
    atomic { for (b : 0 .. 3) { assert(memory[me * 4 + b] == RESULT + g) } };
#endif
#ifndef NO_FLUSH
    FLUSH
#endif
  }
}
#include "start.pml"
