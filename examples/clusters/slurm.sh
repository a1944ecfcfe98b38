#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Trains CONFIG on two nodes of eight GPUs: sbatch slurm.sh CONFIG [--set ...]. Each task of srun is a rank.
#SBATCH --job-name=stretto
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=12:00:00
# Two minutes before the time limit, the ranks save and end. A job that is preempted is queued again, and resumes.
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Not by `| head`: with pipefail, a list that is still being written would end the job.
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

rank='export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID; exec "$@"'
srun --kill-on-bad-exit=1 bash -c "$rank" rank stretto train "$@" --set train.resume=latest
