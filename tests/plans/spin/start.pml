/* Included last: everybody begins. */
init {
  byte i;
  atomic {
    for (i : 0 .. N * N - 1) {
      if
      :: i / N != i % N -> run Link(i)
      :: else
      fi
    }
    for (i : 0 .. N - 1) { run Rank(i) }
  }
}
