#!/usr/bin/env bash
# hosts.sh FOLDER SCRIPT: runs a script for bash on node1, in namespaces that `unshare` has made, in
# which `on NODE COMMAND...` starts a command on either host. FOLDER is for files; /run is empty.
set -euo pipefail

mount --make-rprivate /
mount -t tmpfs tmpfs /run
ip link set lo up
printf '127.0.0.1 localhost\n' >"$1/hosts"
for number in 1 2; do
  ip address add "198.18.0.$number/32" dev lo
  printf '198.18.0.%d node%d\n' "$number" "$number" >>"$1/hosts"
done
mount --bind "$1/hosts" /etc/hosts
hostname node1

on() {
  local node=$1
  shift
  # shellcheck disable=SC2016
  unshare --uts bash -c 'hostname "$0" && exec "$@"' "$node" "$@"
}

# Waits for background jobs by id; fails if one did.
ended() {
  local status=0
  for job in "$@"; do wait "$job" || status=$?; done
  return "$status"
}

cd "$1"
# shellcheck disable=SC1090
source "$2"
