#!/usr/bin/env bash
# pair.sh SCRIPT: runs a script for bash on guest1 of a pair, in which `on NODE COMMAND...` runs a
# command on either guest; guest2 serves (far.sh) until the script has ended. The current folder is
# $MAILBOX, which has the secret of the jobs.
set -euo pipefail
far=$(dirname "$(realpath "$0")")/far.sh

on() {
  local node=$1
  shift
  if [ "$node" = guest1 ]; then "$@"; else "$far" "$node" "${@@Q}"; fi
}

trap 'touch "$MAILBOX/end"' EXIT
for node in guest1 guest2; do
  on "$node" install --mode=600 "$MAILBOX/secret" "$PGASDL_SECRET_FILE"
done
# In a shell of its own: a script may set a trap.
(
  # shellcheck disable=SC1090
  source "$1"
)
