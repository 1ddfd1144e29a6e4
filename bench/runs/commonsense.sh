#!/bin/sh
# The paper's commonsense table for one model: fine-tune with every method at three learning rates, and score the best
# by validation loss on the eight sets.
#
#   bench/runs/commonsense.sh MODEL DATA OUT [OPTIONS ...]
#   bench/runs/commonsense.sh SmolLM2-135M-Instruct.Q4_1.gguf data runs/commonsense
#   bench/runs/commonsense.sh SmolLM2-135M-Instruct.Q4_1.gguf data runs/short --steps 1000 --seed 1
#
# DATA holds commonsense/train.jsonl.zst and commonsense/test/*; OPTIONS go to every `apollo finetune`. What is there
# already is not repeated: the same command goes on where it was stopped.
set -eu
model=$1 data=$2 out=$3
shift 3

tune() { # NAME METHOD "RATES" [OPTIONS ...]
    name=$1 method=$2 rates=$3
    shift 3
    # shellcheck disable=SC2086
    apollo finetune --model "$model" --data "$data/commonsense/train.jsonl.zst" --out "$out/$name" --auto-resume \
        --recipe commonsense --method "$method" --lr $rates "$@"
    apollo eval "$out/$name" --tasks commonsense --task-data "$data"
}

# The paper's learning rate in the middle, or its two of AdamW and one below.
projected="1e-4 3e-4 1e-3"
adamw="1e-5 2e-5 5e-5"

tune adamw adamw "$adamw" "$@"
tune adamw-full adamw "$adamw" --targets all --others adamw "$@"
tune lora lora "$projected" "$@"
tune dora dora "$projected" "$@"
tune galore galore "$projected" "$@"
tune fira fira "$projected" "$@"
tune apollo-svd apollo-svd "$projected" "$@"
tune apollo apollo "$projected" "$@"
tune apollo-mini apollo-mini "$projected" "$@"
tune apollo-mini-int8 apollo-mini "$projected" --int8 layers "$@"
tune artemis artemis "3e-5 1e-4 3e-4" "$@"
