#!/bin/bash
# Build shards on many nodes with three SLURM jobs: inspect the files, run an array of N parts with one node each, and join.
# Run in a shell with the environment active, with a folder that all nodes share:
#     SBATCH_TIMELIMIT=4:00:00 launch/shards.sh 16 build clips.csv shards --held_out 0.01
# SBATCH_ACCOUNT and SBATCH_PARTITION set account and partition. Rerun the command to do what is missing.
set -euo pipefail
[[ ${1-} =~ ^[1-9][0-9]*$ && ${2-} =~ ^(build|prepare)$ ]] ||
    { echo "error: expected a number of parts, then build or prepare with options; found: $*" >&2; exit 2; }
num_parts=$1 words=("${@:2}") command="clap-shards ${words[*]@Q}"

queue() {  # options of this part, then options of sbatch
    sbatch --parsable --nodes=1 --exclusive --mem=0 --kill-on-invalid-dep=yes "${@:2}" <<< "#!/bin/bash"$'\n'"exec $command $1"
}
look=$(queue "--part 0/$num_parts" --job-name=shards-look)
parts=$(queue "--part \$SLURM_ARRAY_TASK_ID/$num_parts" --job-name=shards --array="1-$num_parts" --dependency="afterok:${look%%;*}")
queue "--join $num_parts" --job-name=shards-join --dependency="afterany:${parts%%;*}"
