#!/bin/bash
#SBATCH --job-name=meshwright
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
# One torchrun a node. Two minutes before the end every rank gets SIGTERM, finishes its step and saves; the job is queued
# again, and goes on from the latest checkpoint, also on another number of nodes.
set -uo pipefail

stopping=""
trap 'stopping=yes; kill -TERM "$step"' USR1

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
  train.py --save "$HOME/runs/llama" &
step=$!

wait "$step" # ends early when the signal comes
code=$?
if [ -n "$stopping" ]; then
  wait "$step"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
