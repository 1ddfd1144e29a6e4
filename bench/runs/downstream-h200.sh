# The figures of docs/finetuning.md and the zero-shot table of docs/evaluation.md, on one H200:
#
#     MODEL=SmolLM2-135M-Instruct.Q4_1.gguf DATA=data TOKENS=corpus TOKENIZER=t5 bash bench/runs/downstream-h200.sh
#
# DATA and TOKENS are as bench/downstream.py has them. Rows that are in a CSV are not made again, but for those of speed.
set -e
: "${MODEL:?}" "${DATA:?}" "${TOKENS:?}" "${TOKENIZER:?}"

python bench/downstream.py commonsense --model "$MODEL" --data "$DATA" --work runs/commonsense --every 10 --epochs 1 \
    --questions 200 --rates 2 --out bench/results/commonsense-h200.csv

python bench/downstream.py mmlu --model "$MODEL" --data "$DATA" --work runs/mmlu --warmup 15 --questions 50 \
    --rates 0 --out bench/results/mmlu-h200.csv

python bench/downstream.py zeroshot --model 130m --data "$DATA" --tokens "$TOKENS" --tokenizer "$TOKENIZER" \
    --work runs/zeroshot --steps 500 --options="--batch-tokens 81920" --out bench/results/zeroshot-h200.csv

# With nothing else on the card; of every tenth example, as above.
python bench/finetune.py --model "$MODEL" --data runs/commonsense/train.jsonl --only trl "apollo, packed, compiled" \
    --out bench/results/finetune-h200.csv
python bench/finetune.py --model "$MODEL" --data runs/commonsense/train.jsonl --recipe commonsense --steps 40 --warm 10 \
    --out bench/results/finetune-h200.csv
