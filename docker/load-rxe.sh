#!/bin/sh
# Makes a soft-RoCE device on this host; running it again changes nothing.
#   sudo docker/load-rxe.sh [-n rxe0] [NETDEVICE]     default: the default route's device
#   sudo docker/load-rxe.sh --undo [-n rxe0]
set -eu

name=rxe0
undo=
net=
while [ $# -gt 0 ]; do
  case $1 in
    --undo) undo=yes ;;
    -n)
      name=${2:?-n needs a name}
      shift
      ;;
    -h | --help)
      sed -n 's/^# \{0,1\}//p' "$0" | sed -n '2,4p'
      exit 0
      ;;
    -*)
      echo "load-rxe.sh: unknown option $1" >&2
      exit 2
      ;;
    *) net=$1 ;;
  esac
  shift
done

fail() {
  echo "load-rxe.sh: $*" >&2
  exit 1
}

for program in ip rdma; do
  command -v "$program" >/dev/null || fail "no program $program (Debian: apt-get install iproute2)"
done
[ "$(id -u)" -eq 0 ] || fail "needs root"
# The network device below a soft-RoCE device; other kinds have no such file.
parent=/sys/class/infiniband/$name/parent

another() {
  for file in /sys/class/infiniband/*/parent; do
    if [ -e "$file" ] && [ "$(cat "$file")" = "$net" ]; then
      basename "$(dirname "$file")"
    fi
  done
}

if [ -n "$undo" ]; then
  if [ -e "$parent" ]; then
    rdma link delete "$name"
    echo "$name is gone"
  elif [ -e "/sys/class/infiniband/$name" ]; then
    fail "$name is no soft-RoCE device"
  fi
  # Others may have devices of their own, or the driver is part of the kernel: then it stays.
  set -- /sys/class/infiniband/*/parent
  if [ ! -e "$1" ] && grep -q '^rdma_rxe ' /proc/modules 2>/dev/null; then
    modprobe -r rdma_rxe
  fi
  exit 0
fi

if [ -z "$net" ]; then
  net=$(ip -o route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p;q')
  [ -n "$net" ] || fail "no default route: name a network device"
fi
[ -e "/sys/class/net/$net" ] || fail "no network device $net"

if [ -e "$parent" ]; then
  on=$(cat "$parent")
  [ "$on" = "$net" ] || fail "$name is there already, on $on: --undo first, or another -n"
elif [ -e "/sys/class/infiniband/$name" ]; then
  fail "$name is there already, and is no soft-RoCE device: choose another -n"
else
  [ -z "$(another)" ] || fail "$net has a soft-RoCE device already: $(another)"
  modprobe rdma_rxe 2>/dev/null || true # fails where it is part of the kernel
  rdma link add "$name" type rxe netdev "$net" ||
    fail "no soft-RoCE device on $net: this kernel seems to have no module rdma_rxe"
  modprobe ib_uverbs 2>/dev/null || true
fi
rdma link show "$name/1"
