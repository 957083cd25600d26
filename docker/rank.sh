#!/bin/sh
# One rank of a job whose ranks are containers: takes the first number that is free in /job, which
# they share, then runs the program given.
set -eu
rank=0
until mkdir "/job/rank.$rank" 2>/dev/null; do
  rank=$((rank + 1))
  if [ "$rank" -ge "$PGASDL_SIZE" ]; then
    echo "rank.sh: all $PGASDL_SIZE ranks of /job are taken, or /job is not writable" >&2
    exit 1
  fi
done
export PGASDL_RANK="$rank"
exec "$@"
