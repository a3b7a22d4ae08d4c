#!/usr/bin/env bash
# A Ray of two nodes on this machine: trains a job with two workers, kills a node in mid-run, shows the result, cleans up.
#
#   pip install 'cordee[ray]'
#   examples/cluster/ray.sh [FOLDER FOR THE RUN]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
run=${1:-$(mktemp -d)/run}
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
temporary=$(mktemp -d /tmp/ray-XXXX)
pids=()

clean_up() {
    for pid in "${pids[@]}"; do
        pkill -KILL -P "$pid" 2>/dev/null || true  # the raylet and what belongs to it: children of this shell's children
        kill -KILL "$pid" 2>/dev/null || true
    done
    rm -rf "$temporary"
}
trap clean_up EXIT

# A token for this Ray alone: nobody else can use it, and a token in ~/.ray, which Ray would ask for, does not matter.
head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$temporary/token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$temporary/token"
export RAY_worker_niceness=0  # Ray's default of 15 leaves workers next to nothing beside anything else on this machine

node() {  # one CPU and one folder each, as on hosts of their own; --block keeps the daemons below this shell
    ray start "$@" --temp-dir="$temporary/${#pids[@]}" --num-cpus=1 --node-ip-address=127.0.0.1 --disable-usage-stats --block >"$temporary/node-${#pids[@]}.log" 2>&1 &
    pids+=($!)
}

await_nodes() {  # until Ray counts so many
    until [ "$(ray status --address="127.0.0.1:$port" 2>/dev/null | grep -c '1 node_')" -ge "$1" ]; do
        kill -0 "${pids[-1]}" 2>/dev/null || { echo "a node did not start:"; tail -n 20 "$temporary/node-$((${#pids[@]} - 1)).log"; exit 1; }
        sleep 0.5
    done
}

echo "starting two nodes (half a minute) ..."
node --head --port="$port" --include-dashboard=false
await_nodes 1
node --address="127.0.0.1:$port"
await_nodes 2

cordee train "$here/job.toml" --engine ray --set cluster.connect="127.0.0.1:$port" --run-dir "$run" --set training.epochs=400 &
training=$!
until grep -qs '"type":"step"' "$run/events.jsonl"; do
    kill -0 "$training" || { echo "the run did not start"; exit 1; }
    sleep 0.2
done
sleep 3
echo "killing the second node ..."
pkill -KILL -P "${pids[1]}" || true
kill -KILL "${pids[1]}" || true
wait "$training"
echo "what the run recorded: who was lost, and which workers trained from which step on"
grep -E '"type":"(worker_lost|generation|run_ended)"' "$run/events.jsonl" | cut -c1-200
