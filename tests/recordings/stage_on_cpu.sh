#!/bin/bash
# Records the held-out runs: two ranks on two CPU cores, each with one cause, or none. Usage: stage_on_cpu.sh FOLDER [NAME...].
set -u
folder=$1
shift
wanted=" $* "
here=$(cd "$(dirname "$0")" && pwd)
export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1

record() {
    name=$1 launcher=$2
    shift 2
    if [ "$wanted" != "  " ] && [[ "$wanted" != *" $name "* ]]; then return; fi
    # shellcheck disable=SC2086
    flock /tmp/deepspeed.lock timeout 200 python3 -m zerotop run --headless --recording "$folder/$name" -- \
        $launcher "$here/staged.py" "$@" >"$folder/$name.out" 2>&1
    echo "$name: $?"
}

two="deepspeed --num_gpus 2"
record held-clean-z0 "$two" --stage 0 --width 192 --layers 3 --rows 8 --length 64 --steps 60
record held-clean-uneven "$two" --stage 1 --accumulation 4 --rows 2 --length 96 --uneven 0.5 --steps 40
record held-clean-offload "$two" --stage 2 --offload --width 256 --length 64 --steps 50
record held-stall "$two" --stage 1 --width 160 --layers 3 --length 80 --steps 50 --stall-from 26 --seconds 0.15
record held-straggler "$two" --stage 1 --accumulation 2 --rows 8 --length 64 --steps 36 --slow-from 12 --slow-rank 0 \
    --seconds 0.12
record held-drift "$two" --stage 1 --width 96 --rows 2 --length 64 --steps 90 --drift-from 25 --seconds 0.002
record held-clean-z3 "$two" --stage 3 --offload --accumulation 2 --width 192 --length 64 --rows 2 --steps 80
record held-long "$two" --stage 0 --dtype fp32 --rows 2 --length 96 --layers 3 --steps 50 --long-from 30
record held-there-and-back "$two" --stage 2 --offload --length 64 --steps 60 --slow-from 18 --slow-until 38 --seconds 0.08
record held-grows "$two" --stage 1 --length 64 --steps 50 --grow-from 10 --grow 24
record held-save "$two" --stage 3 --length 64 --steps 30 --save-in 14 --save-seconds 1.5
export OMP_NUM_THREADS=6
record held-crowded "$two" --stage 0 --dtype fp32 --width 512 --rows 8 --length 128 --vocabulary 4000 --steps 24
export OMP_NUM_THREADS=1
record held-restart "bash $here/twice.sh $two" --stage 2 --length 64 --steps 30 --die-in 17 --bad-rank 0
record held-hang "$two" --stage 2 --rows 2 --length 64 --steps 30 --hang-in 11 --bad-rank 0 --seconds 33
# Made after everything was mended by those above.
record unseen-clean "$two" --stage 2 --accumulation 2 --width 224 --layers 1 --rows 6 --length 48 --steps 70
record unseen-clean-fp32 "$two" --stage 1 --dtype fp32 --offload --width 128 --layers 4 --rows 2 --length 96 --uneven 0.2 --steps 60
record unseen-drift "$two" --stage 2 --offload --width 160 --length 64 --steps 110 --drift-from 40 --seconds 0.003
record unseen-grows "$two" --stage 3 --width 192 --length 48 --steps 60 --grow-from 16 --grow 12
record unseen-late-data "$two" --stage 0 --width 192 --rows 2 --length 64 --steps 45 --only-rank 0 --stall-from 22 --seconds 0.2
record unseen-long "$two" --stage 1 --accumulation 3 --width 160 --rows 6 --length 64 --steps 44 --long-from 24
# A rank that is slow within the phases in which ranks gather parameters.
record cpu-slow-cores "$two" --stage 3 --dtype fp32 --layers 1 --width 64 --rows 8 --length 64 --steps 52 --slow-rank 1 --compute-from 18
