# shellcheck shell=bash
# Starts a Slurm of two nodes with four processors each (slurm.py). The script that sources this has
# `on NODE COMMAND...`, which runs a command on a node, and works in a folder that both can write.
# slurm_nodes: NAME=ADDRESS of both, the script's own first; slurm_machines: those with a /run.
names=("${slurm_nodes[@]%=*}")
head -c 128 /dev/urandom >munge.key
cat >slurm.conf <<CONF
ClusterName=test
SlurmctldHost=${names[0]}
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/pgid
TaskPlugin=task/none
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/%n
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/%n.pid
# As many processors as are asked for, however many the machine has.
SlurmdParameters=config_overrides
NodeName=${names[0]} NodeAddr=${slurm_nodes[0]#*=} Port=7001 CPUs=4
NodeName=${names[1]} NodeAddr=${slurm_nodes[1]#*=} Port=7002 CPUs=4
PartitionName=all Nodes=${names[0]},${names[1]} Default=YES
CONF
# Nothing here uses a group of this plugin's; the default asks for a mounted file system of them.
echo CgroupPlugin=cgroup/v1 >cgroup.conf
export SLURM_CONF=$PWD/slurm.conf
for name in "${slurm_machines[@]}"; do
  on "$name" mkdir -p /run/munge /run/slurm/state "${names[@]/#//run/slurm/}"
  on "$name" install --mode=600 "$PWD/munge.key" /run/munge/key
  on "$name" munged --force --key-file=/run/munge/key --log-file=/run/munge/log \
    --seed-file=/run/munge/seed
done
slurmctld -D &>slurm.log &
for name in "${names[@]}"; do
  on "$name" slurmd -D -f "$SLURM_CONF" -N "$name" &>>slurm.log &
done
trap '[ $? -eq 0 ] || cat slurm.log' EXIT # the status stays as it was

for _ in {1..300}; do
  idle=$(sinfo --noheader --states=idle --format=%D 2>/dev/null || true)
  if [ "$idle" = 2 ]; then break; fi
  sleep 0.1
done
[ "$idle" = 2 ]
