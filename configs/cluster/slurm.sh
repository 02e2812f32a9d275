#!/usr/bin/env bash
# A run of 16 nodes with 8 MI300X each, a process a GPU:
#
#   sbatch configs/cluster/slurm.sh --config=configs/zaya1_8b.py --config.run_folder=/shared/runs/zaya1_8b
#
# Sixteen nodes are used and one more is held: a node that dies, or whose hardware fails, is left out, and the rest
# begin anew within the same allocation. Give `zaya train`'s words; all of them reach it. `zaya aegis status
# /shared/runs/zaya1_8b` says where the run is; with ZAYA_WEBHOOK set, whoever it leads to is told what needs a human.
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
: "${ZAYA_MIN_NODES:=$ZAYA_NODES}"
# Compiled programs are kept where all nodes see them, so that a new attempt compiles nothing.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$PWD/compiled}
# Not by `source`: values have spaces, and no quotes.
while IFS= read -r line; do
    if [[ $line == [A-Z]* ]]; then
        export "${line?}"
    fi
done < <(cat "$ZAYA_CLUSTER/rocm.env" "$ZAYA_CLUSTER/$ZAYA_NICS.env")

# In the shell's place: SLURM's word that time is up comes to it, and goes on to all tasks.
exec zaya supervise --engine=slurm --nodes="$ZAYA_NODES" \
    --min-nodes="$ZAYA_MIN_NODES" --rules="$ZAYA_CLUSTER/rules.toml" -- train "$@"
