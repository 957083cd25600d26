#!/usr/bin/env bash
# hosts.sh FOLDER SCRIPT [apart]: runs a script for bash on node1, in namespaces that `unshare` has
# made, in which `on NODE COMMAND...` starts a command on either host. FOLDER is for files; /run is
# empty. apart: node2 has a network of its own, which a cable joins with node1's: `cable down`.
set -euo pipefail

mount --make-rprivate /
mount -t tmpfs tmpfs /run
ip link set lo up
printf '127.0.0.1 localhost\n' >"$1/hosts"
if [ "${3-}" = apart ]; then
  ip netns add node2
  ip link add cable type veth peer name cable netns node2
  ip address add 198.18.0.1/24 dev cable
  ip link set cable up
  ip -n node2 address add 198.18.0.2/24 dev cable
  ip -n node2 link set cable up
  ip -n node2 link set lo up
fi
for number in 1 2; do
  if [ "${3-}" != apart ]; then ip address add "198.18.0.$number/32" dev lo; fi
  printf '198.18.0.%d node%d\n' "$number" "$number" >>"$1/hosts"
done
mount --bind "$1/hosts" /etc/hosts
hostname node1

on() {
  local node=$1
  shift
  local network=()
  if [ "$node" = node2 ] && [ -e /run/netns/node2 ]; then network=(ip netns exec node2); fi
  # shellcheck disable=SC2016
  "${network[@]}" unshare --uts bash -c 'hostname "$0" && exec "$@"' "$node" "$@"
}

cable() { ip link set cable "$1"; }

# Waits for background jobs by id; fails if one did.
ended() {
  local status=0
  for job in "$@"; do wait "$job" || status=$?; done
  return "$status"
}

cd "$1"
# shellcheck disable=SC1090
source "$2"
