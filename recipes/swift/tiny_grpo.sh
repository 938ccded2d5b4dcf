#!/usr/bin/env bash
# GRPO with a tiny Qwen3-MoE for five steps, vLLM on the same two GPUs, and a save: recipes/swift/tiny_grpo.sh FOLDER
# Needs ms-swift, vLLM, Transformer Engine and this package. On CPU, with the tests' stand-ins, after scripts/setup swift:
#   PATH="$PWD/.venv-swift/bin:$PATH" DEVICE=cpu recipes/swift/tiny_grpo.sh FOLDER
# PLUGINS= leaves our plugin out.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
folder="${1:?give a folder for the model, the data and the checkpoints}"
python "$root/recipes/swift/tiny_inputs.py" "$folder"

plugins=(${PLUGINS-"$(python -m rl_safe_workers.adapters.swift)"} "$root/recipes/swift/tiny_reward.py")
options=()
if [[ ${DEVICE:-cuda} == cpu ]]; then
    # Stand-ins for Transformer Engine, triton and vLLM, and shims for calls of CUDA.
    export PYTHONPATH="$root/tests/swift/standins:$root" CUDA_VISIBLE_DEVICES= TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
    plugins=("$root/tests/swift/cpu/cpu_plugin.py" "$root/tests/swift/engine/engine_plugin.py" "${plugins[@]}")
    options=(--ddp_backend gloo --attention_backend unfused --gradient_accumulation_fusion false
        --moe_permute_fusion false --apply_rope_fusion false --cross_entropy_loss_fusion false
        --masked_softmax_fusion false)
fi

export HF_HUB_OFFLINE=1 NPROC_PER_NODE=2
settings='{"release_comms": true}'
export RL_SAFE_SWIFT="${RL_SAFE_SWIFT:-$settings}"
exec megatron rlhf --rlhf_type grpo \
    --model "$folder/tiny-moe" --template qwen3 --use_hf true --check_model false \
    --dataset "$folder/data.jsonl" --output_dir "$folder/out" \
    --external_plugins "${plugins[@]}" --reward_funcs brief \
    --vllm_mode colocate --sleep_level 1 --vllm_gpu_memory_utilization 0.3 --vllm_max_model_len 128 \
    --vllm_enforce_eager true --offload_model true --offload_optimizer true \
    --num_generations 2 --max_completion_length 16 \
    --expert_model_parallel_size 2 --moe_grouped_gemm true --padding_free false \
    --micro_batch_size 1 --global_batch_size 4 --train_iters 5 --max_length 64 \
    --lr 1e-3 --lr_warmup_fraction 0.1 --save_steps 5 --eval_iters 0 --logging_steps 1 --dataset_num_proc 1 \
    "${options[@]}"
