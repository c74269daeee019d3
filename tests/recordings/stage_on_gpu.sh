#!/bin/bash
# Records the staged causes that need a GPU. Usage: stage_on_gpu.sh FOLDER. Each run takes about 20 s.
set -u
folder=$1
here=$(cd "$(dirname "$0")" && pwd)
size="--width 1024 --layers 8 --vocabulary 32000 --length 512 --rows 8 --steps 40"

record() {
    name=$1
    shift
    # shellcheck disable=SC2086
    timeout 90 python3 -m zerotop run --headless --recording "$folder/$name" -- \
        python3 -m deepspeed.launcher.runner --num_gpus 1 "$here/staged.py" $size "$@" >"$folder/$name.out" 2>&1
    echo "$name: $?"
}

record gpu-leak --leak-from 15
record gpu-long --long-from 20
record gpu-slow --slow-from 20 --seconds 0.05
python3 -c "import torch, time; kept = torch.empty(20 << 30, dtype=torch.uint8, device='cuda'); time.sleep(600)" &
other=$!
sleep 8
record gpu-others
kill $other
record gpu-clean
