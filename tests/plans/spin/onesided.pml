/* What the models share: memory, notifications, and a network that is as late as it may be.
 *
 * A cell of memory holds the iteration whose contribution it is, or RESULT + iteration, or TORN
 * while somebody writes it. A Put's source is read, its target written, and its flag raised as three
 * events, at any time after it was posted; Puts of one rank to one other are carried in order.
 * A model gives N, LANES, CELLS and FLAGS before it includes this file, and Rank() behind it.
 */
#ifndef ITERATIONS
#define ITERATIONS 2
#endif
#define RESULT 100
#define TORN 255
#define NOTHING 255

byte memory[CELLS];
byte flags[FLAGS];         /* iteration that was raised last */
byte awaited[FLAGS];       /* iteration that was waited for last */
byte unread[N * LANES];    /* Puts of a lane whose source was not read yet */
chan link[N * N] = [4] of { byte, byte, byte, byte, byte };

proctype Link(byte at) {
  byte source, target, flag, iteration, lane, value;
end:
  do
  :: link[at]?source, target, flag, iteration, lane ->
     if
     :: source != NOTHING ->
        atomic { value = memory[source]; unread[lane]-- };
        memory[target] = value
     :: else
     fi;
     atomic {
       if
       :: flag != NOTHING ->
          assert(awaited[flag] == flags[flag]);  /* raised again before it was waited for */
          flags[flag] = iteration
       :: else
       fi
     }
  od
}

/* In a proctype with: byte me (its rank), lane (number among all ranks' lanes), g (iteration). */
#define PUT(source, target, flag, peer) \
  atomic { unread[lane]++; link[me * N + (peer)]!source, target, flag, g, lane }
#define PUT_SILENTLY(source, target, peer) PUT(source, target, NOTHING, peer)
#define RAISE(flag, peer) link[me * N + (peer)]!NOTHING, 0, flag, g, lane
#define WAIT(flag) atomic { flags[flag] == g -> awaited[flag] = g }
#define FLUSH unread[lane] == 0
/* A pass over a slot: it holds this iteration's contribution when it begins, and when it ends. */
#define READ(cell) assert(memory[cell] == g); assert(memory[cell] == g)
#define WRITE(cell, value) memory[cell] = TORN; memory[cell] = value

