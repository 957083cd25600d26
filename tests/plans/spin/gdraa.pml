/* GDRAA: each owner's result is the proof that its slots are free.
 * ONE_WAY: reduce-scatter, where nothing comes back and credits are needed instead.
 * PRIVATE: no peer reaches data; results come to slots, of which an owner's next scatter says more.
 * Broken: NO_FLUSH, NO_CREDIT (with ONE_WAY), NO_WAIT (leaves without others' results).
 */
#ifndef N
#define N 3
#endif
#define LANES 1
#define CELLS (3 * N * N)
#define FLAGS (2 * N * N)
#include "onesided.pml"
#define DATA(rank, block) ((rank) * N + (block))
#define SLOT(owner, sender) (N * N + (owner) * N + (sender))
#ifdef PRIVATE
#define RESULT_OF(at, owner) (2 * N * N + (at) * N + (owner))
#else
#define RESULT_OF(at, owner) DATA(at, owner)
#endif
#define SCATTERED(owner, sender) ((owner) * 2 * N + (sender))
#define REDUCED(at, owner) ((at) * 2 * N + N + (owner))
#define PEERS(p) p : 1 .. N - 1
#define PEER ((me + p) % N)

proctype Rank(byte me) {
  byte g, p, lane = me;
  for (g : 1 .. ITERATIONS) {
    for (p : 0 .. N - 1) { memory[DATA(me, p)] = g }
#if defined(ONE_WAY) && !defined(NO_CREDIT)
    for (PEERS(p)) { RAISE(REDUCED(PEER, me), PEER) }
#endif
    for (PEERS(p)) {
#if defined(ONE_WAY) && !defined(NO_CREDIT)
      WAIT(REDUCED(me, PEER));
#endif
      PUT(DATA(me, PEER), SLOT(PEER, me), SCATTERED(PEER, me), PEER)
    }
    for (PEERS(p)) { WAIT(SCATTERED(me, PEER)) }
    for (PEERS(p)) { READ(SLOT(me, PEER)) }
    WRITE(DATA(me, me), RESULT + g);
#ifndef ONE_WAY
    for (PEERS(p)) { PUT(DATA(me, me), RESULT_OF(PEER, me), REDUCED(PEER, me), PEER) }
#ifndef NO_WAIT
    for (PEERS(p)) { WAIT(REDUCED(me, PEER)) }
#endif
#ifdef PRIVATE
    for (PEERS(p)) {
      assert(memory[RESULT_OF(me, PEER)] == RESULT + g);
      WRITE(DATA(me, PEER), RESULT + g)
    }
#endif
#ifndef NO_WAIT
    for (p : 0 .. N - 1) { assert(memory[DATA(me, p)] == RESULT + g) }
#endif
#endif
#ifndef NO_FLUSH
    FLUSH;
#endif
    assert(memory[DATA(me, me)] == RESULT + g)
  }
}
#include "start.pml"
