#!/usr/bin/env bash
# A run of 16 nodes with 8 MI300X each, a process a GPU:
#
#   sbatch configs/cluster/slurm.sh --config=configs/zaya1_8b.py --config.run_folder=/shared/runs/zaya1_8b
#
# Sixteen nodes are used and one more is held: whoever stands still or dies is left out, and the rest begin anew
# within the same allocation. Give `zaya train`'s words; all of them reach it.
#SBATCH --job-name=zaya
#SBATCH --nodes=17
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=7-00:00:00
# A node that fails takes its own tasks along, and not the job.
#SBATCH --no-kill
# SLURM begins the job anew when it is preempted or its script's node fails; the run goes on from its checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# Ten minutes before the end of its time the run is told to save.
#SBATCH --signal=B:TERM@600
set -uo pipefail

: "${ZAYA_CLUSTER:=configs/cluster}"
: "${ZAYA_NICS:=pollara}"
: "${ZAYA_NODES:=16}"
: "${ZAYA_RESTARTS:=50}"
# Compiled programs are kept where all nodes see them, so that a new attempt compiles nothing.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/compiled}
# Not by `source`: values have spaces, and no quotes.
while IFS= read -r line; do
    if [[ $line == [A-Z]* ]]; then
        export "${line?}"
    fi
done < <(cat "$ZAYA_CLUSTER/rocm.env" "$ZAYA_CLUSTER/$ZAYA_NICS.env")

# Exit codes of zaya: 0 is done, 2 is what the user must mend, 65 is damage, 75 was asked to stop.
readonly DONE=0 MISTAKE=2 DAMAGE=65 REQUEUE=75
asked=0
step=0

# SLURM speaks to this script alone; all tasks must hear it, and all stop behind one step. Not by a signal to
# srun, which would give them KillWait's seconds, too few for a large state.
tell() {
    asked=1
    if ((step)); then
        scancel --signal=TERM "$SLURM_JOB_ID"
    fi
}
trap tell TERM

# Nodes of this allocation that answer now, as many as are wanted; the spare ones stand last.
find_nodes() {
    scontrol show hostnames "$SLURM_JOB_NODELIST" | while read -r node; do
        state=$(sinfo --noheader --nodes="$node" --format=%t | head -n 1)
        case $state in
            *down* | *drain* | *drng* | *fail* | *'*') echo "$node is $state: left out" >&2 ;;
            *) echo "$node" ;;
        esac
    done | head -n "$ZAYA_NODES" | paste -sd,
}

for ((attempt = 0; attempt <= ZAYA_RESTARTS; attempt++)); do
    nodes=$(find_nodes)
    count=$(tr ',' '\n' <<<"$nodes" | wc -l)
    echo "attempt $attempt: $count nodes: $nodes"
    # All tasks end when one does: without it the others would wait in a collective. The step before may hold
    # its GPUs still, where a node of it has died: they are shared with it.
    srun --nodes="$count" --ntasks-per-node="$SLURM_NTASKS_PER_NODE" --nodelist="$nodes" \
        --ntasks="$((SLURM_NTASKS_PER_NODE * count))" --overlap --kill-on-bad-exit=1 --wait=30 zaya train "$@" &
    step=$!
    # A trapped signal ends wait early; the step is waited for to its end.
    wait "$step"
    code=$?
    while kill -0 "$step" 2>/dev/null; do
        wait "$step"
        code=$?
    done
    step=0
    case $code in
        "$DONE") exit 0 ;;
        "$MISTAKE" | "$DAMAGE") exit "$code" ;;
    esac
    if ((asked)); then
        # Saved: the rest belongs to the next allocation.
        scontrol requeue "$SLURM_JOB_ID"
        exit "$REQUEUE"
    fi
    echo "attempt $attempt ended with code $code; beginning anew"
    sleep 5
done
exit "$code"
