#!/usr/bin/env bash
# A Spark of a master and two workers on this machine: trains a job with two workers, kills an executor in mid-run, shows
# the result, cleans up. Needs Java 17.
#
#   pip install 'cordee[spark]'
#   examples/cluster/spark.sh [FOLDER FOR THE RUN]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
run=${1:-$(mktemp -d)/run}
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
SPARK_HOME=$(python -c 'import pathlib, pyspark; print(pathlib.Path(pyspark.__file__).parent)')
PYSPARK_PYTHON=$(command -v python)
export SPARK_HOME PYSPARK_PYTHON SPARK_LOCAL_IP=127.0.0.1
temporary=$(mktemp -d /tmp/spark-XXXX)
pids=()

clean_up() {
    for pid in "${pids[@]}"; do
        pkill -KILL -P "$pid" 2>/dev/null || true  # executors: children of this shell's children
        kill -KILL "$pid" 2>/dev/null || true
    done
    rm -rf "$temporary"
}
trap clean_up EXIT

daemon() {
    "$SPARK_HOME/bin/spark-class" "org.apache.spark.deploy.$@" >"$temporary/daemon-${#pids[@]}.log" 2>&1 &
    pids+=($!)
}

await_line() {  # until the log of a daemon has a text
    until grep -qs "$2" "$temporary/daemon-$1.log"; do
        kill -0 "${pids[$1]}" 2>/dev/null || { echo "a daemon did not start:"; tail -n 20 "$temporary/daemon-$1.log"; exit 1; }
        sleep 0.5
    done
}

echo "starting a master and two workers (half a minute) ..."
daemon master.Master --host 127.0.0.1 --port "$port" --webui-port 0
await_line 0 "elected leader"
for number in 1 2; do
    daemon worker.Worker --host 127.0.0.1 --cores 1 --memory 1g --webui-port 0 --work-dir "$temporary/$number" "spark://127.0.0.1:$port"
done
for number in 1 2; do
    await_line "$number" "Successfully registered"
done

cordee train "$here/job.toml" --engine spark --set cluster.connect="spark://127.0.0.1:$port" --run-dir "$run" --set training.epochs=400 &
training=$!
until grep -qs '"type":"step"' "$run/events.jsonl"; do
    kill -0 "$training" || { echo "the run did not start"; exit 1; }
    sleep 0.2
done
sleep 3
echo "killing the executor of the second worker ..."
pkill -KILL -P "${pids[2]}"
wait "$training"
echo "what the run recorded: who was lost, and which workers trained from which step on"
grep -E '"type":"(worker_lost|generation|run_ended)"' "$run/events.jsonl" | cut -c1-200
