# Sourced by init.sh: makes the network links and the verbs devices on them.
#   dummy  rxe0 at 10.77.0.1; packets turn round inside the driver and cannot be lost
#   rails  the same, and rxe1 at 10.77.3.1 on a link of its own, inner1
#   veth   rxe0 at 10.77.1.1 and rxe1 at 10.77.1.2 at the ends of one cable
#   cables the same, and rxe2 at 10.77.4.1 and rxe3 at 10.77.4.2 on another one
#   link   rxe0 at 10.77.2.1 or 10.77.2.2: the cable between two guests
# DRIVER siw in place of rxe names the devices siw0 and siw1.

# Links carry 4200 bytes: the largest payload RoCE knows, 4096, and its headers.
attach() { # LINK ADDRESS NUMBER
  must ip link set "$1" up
  must ip addr add "$2/24" dev "$1"
  must rdma link add "$DRIVER$3" type "$DRIVER" netdev "$1"
}

lose_on() { # LINK
  [ "$LOSS" = 0 ] || must tc qdisc add dev "$1" root netem limit 10000 loss "$LOSS%"
}

# A kernel that owns both ends of a cable would deliver without using it: for packets that leave
# by FROM, this looks into a table that knows only the other end, before the one of own addresses.
by_cable() { # FROM ADDRESS TO PEER_ADDRESS TABLE
  must ip route add "$4" dev "$1" src "$2" table "$5"
  must ip rule add pref "$5" oif "$1" to "$4" lookup "$5"
  must ip neigh replace "$4" lladdr "$(cat "/sys/class/net/$3/address")" dev "$1"
}

# A cable between devices FIRST and SECOND, at NET.1 and NET.2; TABLE and the next are its routes.
cable() { # FIRST SECOND NET TABLE
  must ip link add "veth$1" mtu 4200 type veth peer name "veth$2" mtu 4200
  for setting in rp_filter=0 accept_local=1; do # else own addresses are refused as a source
    for link in all "veth$1" "veth$2"; do
      echo "${setting#*=}" > "/proc/sys/net/ipv4/conf/$link/${setting%=*}"
    done
  done
  attach "veth$1" "$3.1" "$1"
  attach "veth$2" "$3.2" "$2"
  lose_on "veth$1"
  lose_on "veth$2"
  by_cable "veth$1" "$3.1" "veth$2" "$3.2" "$4"
  by_cable "veth$2" "$3.2" "veth$1" "$3.1" $(($4 + 1))
}

by_cables_first() {
  must ip rule add pref 200 lookup local
  must ip rule del pref 0
}

case $MODE in
  dummy)
    ADDRESS=10.77.0.1
    must ip link add inner0 mtu 4200 type dummy
    attach inner0 $ADDRESS 0
    ;;
  rails)
    ADDRESS=10.77.0.1
    must ip link add inner0 mtu 4200 type dummy
    must ip link add inner1 mtu 4200 type dummy
    attach inner0 $ADDRESS 0
    attach inner1 10.77.3.1 1
    ;;
  veth)
    ADDRESS=10.77.1.1
    cable 0 1 10.77.1 101
    by_cables_first
    ;;
  cables)
    ADDRESS=10.77.1.1
    cable 0 1 10.77.1 101
    cable 2 3 10.77.4 103
    by_cables_first
    ;;
  link)
    ADDRESS=10.77.2.$GUEST
    attach vec0 "$ADDRESS" 0
    # Neither command begins before both hosts are there.
    tries=0
    until busybox ping -c 1 -W 1 10.77.2.$((3 - GUEST)) > /dev/null; do
      tries=$((tries + 1))
      [ $tries -lt 30 ] || must false the other guest does not answer
    done
    lose_on vec0
    printf '%s\n' '10.77.2.1 guest1' '10.77.2.2 guest2' >> /etc/hosts
    ;;
esac
[ "$MODE" = link ] || echo "$ADDRESS guest$GUEST" >> /etc/hosts

# The global identifier that stands for the IPv4 address has no fixed place in the table.
ports=/sys/class/infiniband/${DRIVER}0/ports/1
GID_INDEX=$(grep -l '^0000:0000:0000:0000:0000:ffff:' $ports/gids/* 2>/dev/null | head -n 1)
export SOFTROCE_DEVICE="${DRIVER}0" SOFTROCE_GUEST="$GUEST" SOFTROCE_ADDRESS="$ADDRESS"
export SOFTROCE_GID_INDEX="${GID_INDEX##*/}"
