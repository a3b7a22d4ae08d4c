#!/usr/bin/env bash
# A Slurm cluster of two nodes on this machine: trains a job with srun, requeues it in mid-run, and shows that it resumed.
#
#   apt-get install slurm-wlm munge
#   examples/cluster/slurm.sh                       # the demonstration
#   examples/cluster/slurm.sh srun -N2 hostname     # any command, with the cluster's configuration in the environment
#
# Everything is in a temporary folder, on ports of its own, and is stopped and removed at the end. `cordee` must be on
# the PATH. Both nodes are this machine: MASTER_ADDR is 127.0.0.1, which real nodes do not need.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d /tmp/cordee-slurm.XXXXXX)
first_port=${CORDEE_SLURM_PORT:-17001}
pids=()

stop() {
    trap - EXIT INT TERM
    scancel --user="$(id -un)" --quiet 2>/dev/null || true
    for _ in $(seq 100); do [ -z "$(squeue --noheader 2>/dev/null)" ] && break; sleep 0.1; done
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    for _ in $(seq 50); do
        alive=0
        for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null && alive=1; done
        [ "$alive" = 0 ] && break
        sleep 0.1
    done
    for pid in "${pids[@]}"; do kill -9 "$pid" 2>/dev/null || true; done
    for process in /proc/[0-9]*; do # what looks after a job outlives the daemons
        if [[ $(cat "$process/comm" 2>/dev/null) = slurmstepd ]] && grep -qa "SLURM_CONF=$folder/" "$process/environ" 2>/dev/null; then
            kill -9 "${process#/proc/}" 2>/dev/null || true
        fi
    done
    rm -rf "$folder"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# Each user has keys of their own: munged proves to the daemons who asks.
chmod 755 "$folder"
mkdir -m 700 "$folder/munge" "$folder/state" "$folder/spool1" "$folder/spool2"
dd if=/dev/urandom bs=1 count=1024 of="$folder/munge/key" status=none
chmod 400 "$folder/munge/key"

user=$(id -un)
cat > "$folder/slurm.conf" <<CONF
ClusterName=cordee
SlurmctldHost=$(hostname)(127.0.0.1)
SlurmctldPort=$first_port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=1
NodeName=node1 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((first_port + 1)) CPUs=2 State=UNKNOWN
NodeName=node2 NodeHostname=$(hostname) NodeAddr=127.0.0.1 Port=$((first_port + 2)) CPUs=2 State=UNKNOWN
PartitionName=main Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$folder/slurm.conf

munged --foreground --force --key-file="$folder/munge/key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" --seed-file="$folder/munge/seed" \
    > "$folder/munged.out" 2>&1 &
pids+=($!)
for _ in $(seq 50); do [ -S "$folder/munge.socket" ] && break; sleep 0.1; done
slurmctld -D > "$folder/slurmctld.out" 2>&1 &
pids+=($!)
for node in node1 node2; do
    slurmd -D -N "$node" > "$folder/slurmd-$node.out" 2>&1 &
    pids+=($!)
done
for _ in $(seq 100); do
    [ "$(sinfo --noheader --format=%D --states=idle 2>/dev/null || true)" = 2 ] && break
    sleep 0.1
done
if [ "$(sinfo --noheader --format=%D --states=idle 2>/dev/null || true)" != 2 ]; then
    echo "the nodes did not come up:" >&2
    tail -n 5 "$folder"/*.log "$folder"/*.out >&2 || true
    exit 1
fi

# What all processes of a launch share: with it they know each other, and nobody else can take part.
umask 077
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$folder/secret"
export CORDEE_SECRET_FILE=$folder/secret MASTER_ADDR=127.0.0.1
umask 022

if [ $# -gt 0 ]; then
    "$@"
    exit
fi

echo "two nodes are up:"
sinfo --Node
export CORDEE_RUNS=$folder/runs
cat > "$folder/job.sh" <<SCRIPT
#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --output=$folder/job.log --open-mode=append
srun --kill-on-bad-exit=0 cordee train "$here/job.toml" --engine env \
    --set checkpoint.every_steps=20
SCRIPT
job=$(sbatch --parsable "$folder/job.sh")
echo "job $job trains; it is requeued when it has a checkpoint"
until compgen -G "$folder/runs/*/checkpoints/step-*" > /dev/null; do
    state=$(squeue --noheader --job="$job" --format=%T 2>/dev/null || true)
    case "$state" in
        PENDING | CONFIGURING | RUNNING) sleep 0.2 ;;
        *) echo "the job ended without a checkpoint; it printed:"; cat "$folder/job.log"; exit 1 ;;
    esac
done
scontrol requeue "$job"
# Slurm lets a requeued job wait for two minutes.
for _ in $(seq 100); do scontrol update JobId="$job" StartTime=now 2>/dev/null && break; sleep 0.2; done
while state=$(squeue --noheader --job="$job" --format=%T 2>/dev/null || true); do
    case "$state" in PENDING | CONFIGURING | RUNNING | COMPLETING | REQUEUED) sleep 0.2 ;; *) break ;; esac
done
echo "what the job printed, both times:"
cat "$folder/job.log"
cordee runs "$folder/runs"
cordee doctor --run "$folder"/runs/*
