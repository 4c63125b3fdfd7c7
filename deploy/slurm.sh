#!/usr/bin/env bash
#SBATCH --job-name=foretrace-distill
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=12:00:00
#SBATCH --requeue
# A Ray cluster on the nodes of a Slurm job, and one command on it. All nodes need foretrace[ray] and the
# folder of --out. After a failure or the time limit, submit it again to resume.
set -euo pipefail

command=${*:-foretrace distill meta-llama/Llama-3.1-8B --engine vllm --states 4096 --sequences 10M \
    --out /shared/llama-hmm --on ray --gpus-per-worker 1}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RAY_ADDRESS="${nodes[0]}:6379"

srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" ray start --head --port=6379 --block &
for _ in $(seq 60); do
    ray status >/dev/null 2>&1 && break
    sleep 2
done
if [ "${#nodes[@]}" -gt 1 ]; then
    others=$(IFS=,; echo "${nodes[*]:1}")
    srun --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) --nodelist="$others" \
        ray start --address="$RAY_ADDRESS" --block &
fi
sleep 10  # the nodes join; later ones are not used unless --workers asks for them
$command
