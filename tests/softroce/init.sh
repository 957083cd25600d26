#!/bin/sh
# First process of a guest. The host's file tree is its root, read-only; rig.py left three more
# files beside this one: `settings` (sourced here), `device.sh`, and `job`, the command to run.
# ttyS0 carries the job's output, ttyS1 what rig.py has to know, the console everything else.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

halt() {
  sync # folders of the host that are writable here
  exec busybox poweroff -f
}

# A step without which nothing works: says so on the console, which rig.py shows.
must() {
  "$@" && return
  echo "softroce: failed: $*"
  halt
}

folder=$softroce # the kernel hands on what it does not know of its command line
. "$folder/settings"

# The host's tree with everything written kept in memory, made the root of all processes.
new=/mnt/root
must mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/index $new
must mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/index overlay $new
must mount -t proc proc $new/proc
must mount -t sysfs sysfs $new/sys
must mount -t devtmpfs devtmpfs $new/dev
must mount -t tmpfs -o mode=755 tmpfs $new/run
mkdir $new/run/softroce $new/run/lock
cp "$folder/job" "$folder/device.sh" $new/run/softroce/
cd $new
must pivot_root . mnt
cd /
umount -l /mnt

mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t mqueue mqueue /dev/mqueue 2>/dev/null
for link in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do
  ln -sfn "/proc/self/${link#*:}" "/dev/${link%:*}"
done

# rig.py may remove its files now. Raw: the lines must not turn newlines into CR LF.
exec 4> /dev/ttyS0 5> /dev/ttyS1
stty raw -echo < /dev/ttyS0
stty raw -echo < /dev/ttyS1
echo started >&5

printf '%s\n' "$WRITABLE" | while IFS= read -r shared; do
  [ -n "$shared" ] || continue
  mkdir -p "$shared"
  must mount -t hostfs -o "$shared" none "$shared"
done

# perftest looks for the clock rate, which this kernel's cpuinfo does not have.
sed "/^processor/a cpu MHz\t\t: $CPU_MHZ" /proc/cpuinfo > /run/softroce/cpuinfo
mount --bind /run/softroce/cpuinfo /proc/cpuinfo

hostname "guest$GUEST"
ip link set lo up
ulimit -l unlimited # registered memory is locked memory
ulimit -n 65536
. /run/softroce/device.sh

# Through a pipe, as a program's output is in any test, and not to a terminal.
mkfifo /run/softroce/output
cat < /run/softroce/output >&4 4>&- 5>&- &
reader=$!
setsid sh /run/softroce/job < /dev/null > /run/softroce/output 2>&1 4>&- 5>&-
status=$?
for process in /proc/[0-9]*; do # what the job left running would keep the pipe open
  case ${process#/proc/} in
    1 | "$reader") ;;
    *) kill -KILL "${process#/proc/}" ;;
  esac
done 2> /dev/null
wait "$reader"
exec 4>&- # closing waits until the host has read all of it
sync
echo "status $status" >&5
exec 5>&-
halt
