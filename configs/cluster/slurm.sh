#!/usr/bin/env bash
# A run on 16 nodes with 8 MI300X each, one process per GPU:
#
#   sbatch configs/cluster/slurm.sh --config=configs/zaya1_8b.py --config.run_folder=/shared/runs/zaya1_8b
#
# The allocation has 17 nodes: 16 run and one is a spare. A node that dies or whose hardware fails is excluded, and
# the others restart within the same allocation. All arguments are passed to `zaya train`. `zaya aegis status
# /shared/runs/zaya1_8b` reports the progress. Set ZAYA_WEBHOOK to receive a message when a person must act.
#SBATCH --job-name=zaya
#SBATCH --nodes=17
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=7-00:00:00
# A failed node ends only its own tasks, not the job.
#SBATCH --no-kill
# SLURM requeues the job if it is preempted or the node of this script fails; the run resumes from its checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
# Ten minutes before the time limit, SLURM sends SIGTERM, and the run saves a checkpoint.
#SBATCH --signal=B:TERM@600
set -uo pipefail

: "${ZAYA_CLUSTER:=configs/cluster}"
: "${ZAYA_NICS:=pollara}"
: "${ZAYA_NODES:=16}"
: "${ZAYA_MIN_NODES:=$ZAYA_NODES}"
# A shared folder, so that restarts reuse compiled programs.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/compiled}
# `source` would fail: the values contain spaces and have no quotes.
while IFS= read -r line; do
    if [[ $line == [A-Z]* ]]; then
        export "${line?}"
    fi
done < <(cat "$ZAYA_CLUSTER/rocm.env" "$ZAYA_CLUSTER/$ZAYA_NICS.env")

# `exec`, so that the supervisor receives SLURM's SIGTERM at the time limit and forwards it to all tasks.
exec zaya supervise --engine=slurm --nodes="$ZAYA_NODES" \
    --min-nodes="$ZAYA_MIN_NODES" --rules="$ZAYA_CLUSTER/rules.toml" -- train "$@"
