#!/usr/bin/env bash
# Two network namespaces of this machine as two hosts: trains a job across them, and ends the second host in mid-run.
# Needs root and iproute2.
#
#   examples/cluster/namespaces.sh [FOLDER FOR THE RUN]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
run=${1:-$(mktemp -d)/run}
first=cordee-$$-1 second=cordee-$$-2
pids=()

clean_up() {
    trap - EXIT
    for pid in "${pids[@]}"; do kill -KILL "$pid" 2>/dev/null || true; done
    ip netns del "$first" 2>/dev/null || true
    ip netns del "$second" 2>/dev/null || true
}
trap clean_up EXIT

ip netns add "$first"
ip netns add "$second"
ip link add "c$$a" netns "$first" type veth peer name "c$$b" netns "$second"
ip -n "$first" addr add 10.77.0.1/24 dev "c$$a"
ip -n "$second" addr add 10.77.0.2/24 dev "c$$b"
for name in "$first c$$a" "$second c$$b"; do
    # shellcheck disable=SC2086
    set -- $name
    ip -n "$1" link set lo up
    ip -n "$1" link set "$2" up
done

# What a scheduler would set. Without the secret the run is refused: the hosts are on a network.
CORDEE_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
CORDEE_JOB_ID=namespaces-$$
export CORDEE_SECRET CORDEE_JOB_ID WORLD_SIZE=2 MASTER_ADDR=10.77.0.1

RANK=0 ip netns exec "$first" cordee train "$here/job.toml" --engine env --run-dir "$run" &
pids+=($!)
RANK=1 ip netns exec "$second" cordee train "$here/job.toml" --engine env --run-dir "$run" &
pids+=($!)
until grep -qs '"type":"step"' "$run/events.jsonl"; do
    kill -0 "${pids[0]}" || { echo "the run did not start"; exit 1; }
    sleep 0.2
done
sleep 2
echo "the second host is lost ..."
kill -KILL "${pids[1]}"
code=0
wait "${pids[0]}" || code=$?
echo "what the run recorded: who was lost, and which workers trained from which step on"
grep -E '"type":"(worker_lost|generation|run_ended)"' "$run/events.jsonl" | cut -c1-200
exit "$code"
