#!/usr/bin/env bash
# Trains a tiny Qwen3-MoE for four steps with ms-swift, at expert parallelism 2, and saves: recipes/swift/tiny.sh FOLDER
# Needs ms-swift and this package: on two GPUs with Transformer Engine; on CPU, after scripts/setup swift,
#   PATH="$PWD/.venv-swift/bin:$PATH" DEVICE=cpu recipes/swift/tiny.sh FOLDER
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
folder="${1:?give a folder for the model, the data and the checkpoints}"
python "$root/recipes/swift/tiny_inputs.py" "$folder"

plugins=("$(python -m rl_safe_workers.adapters.swift)")
options=(--attention_backend unfused) # needs no flash-attn
if [[ ${DEVICE:-cuda} == cpu ]]; then
    # The tests' stand-ins for Transformer Engine and triton, and shims for calls of CUDA.
    export PYTHONPATH="$root/tests/swift/standins:$root" CUDA_VISIBLE_DEVICES= TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
    plugins=("$root/tests/swift/cpu/cpu_plugin.py" "${plugins[@]}")
    options=(--ddp_backend gloo --attention_backend unfused --gradient_accumulation_fusion false
        --moe_permute_fusion false --apply_rope_fusion false --cross_entropy_loss_fusion false
        --masked_softmax_fusion false)
fi

export HF_HUB_OFFLINE=1 NPROC_PER_NODE=2
exec megatron sft \
    --model "$folder/tiny-moe" --template qwen3 --use_hf true --check_model false \
    --dataset "$folder/data.jsonl" --output_dir "$folder/out" \
    --external_plugins "${plugins[@]}" \
    --expert_model_parallel_size 2 --moe_grouped_gemm true --padding_free false \
    --micro_batch_size 1 --global_batch_size 4 --train_iters 4 --max_length 64 \
    --lr 1e-3 --lr_warmup_fraction 0.1 --save_steps 4 --eval_iters 0 --logging_steps 1 \
    "${options[@]}"
