#!/usr/bin/env bash
# GRPO with a tiny Qwen3-MoE in ms-swift's Ray mode for three steps, on two GPUs, and a save:
#   recipes/swift/tiny_grpo_ray.sh FOLDER
# Needs ms-swift, Ray, vLLM, Transformer Engine and this package. On CPU, after scripts/setup swift, with the tests'
# stand-ins: PATH="$PWD/.venv-swift/bin:$PATH" DEVICE=cpu recipes/swift/tiny_grpo_ray.sh FOLDER
# PLUGINS= leaves our plugin out. TUNER=full trains all parameters, which stock ms-swift 4.6.0 cannot do here: it
# exports weights from memory that it has freed.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
folder="$(mkdir -p "${1:?give a folder for the model, the data and the checkpoints}" && cd "$1" && pwd)"
python "$root/recipes/swift/tiny_inputs.py" "$folder"

plugins=(${PLUGINS-"$(python -m rl_safe_workers.adapters.swift)"} "$root/recipes/swift/tiny_reward.py")
more=""
if [[ ${DEVICE:-cuda} == cpu ]]; then
    export PYTHONPATH="$root/tests/swift/standins:$root" CUDA_VISIBLE_DEVICES= TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
    export SWIFT_RAY_WEIGHT_BUCKET_MB=4
    plugins=("$root/tests/swift/cpu/cpu_plugin.py" "$root/tests/swift/engine/engine_plugin.py" "${plugins[@]}")
    more="{ddp_backend: gloo, attention_backend: unfused, gradient_accumulation_fusion: false,
        moe_permute_fusion: false, apply_rope_fusion: false, cross_entropy_loss_fusion: false,
        masked_softmax_fusion: false}"
fi

cat >"$folder/job.yaml" <<YAML
<<: ${more:-"{}"}
rlhf_type: grpo
model: $folder/tiny-moe
template: qwen3
use_hf: true
check_model: false
dataset: [$folder/data.jsonl]
output_dir: $folder/out
external_plugins: [$(printf '%s, ' "${plugins[@]}")]
reward_funcs: [brief]
tuner_type: ${TUNER:-lora}
target_modules: [all-linear]
lora_rank: 4
merge_lora: false
save_safetensors: false
num_generations: 2
max_completion_length: 16
offload_model: true
offload_optimizer: true
sleep_level: 1
expert_model_parallel_size: 2
moe_grouped_gemm: true
padding_free: false
micro_batch_size: 1
global_batch_size: 4
train_iters: 3
max_length: 64
lr: 1.0e-3
lr_warmup_fraction: 0.1
save_steps: 3
eval_iters: 0
logging_steps: 1
dataset_num_proc: 1
colocate_groups: [[train, rollout]]
train: {gpus: 2}
rollout:
  gpus: 2
  vllm_tensor_parallel_size: 1
  vllm_gpu_memory_utilization: 0.3
  vllm_max_model_len: 128
  vllm_enforce_eager: true
  # ms-swift 4.6.0 enables LoRA in its engines by default. These then refuse the merged weights of its trainers.
  vllm_enable_lora: false
YAML

export HF_HUB_OFFLINE=1
unset NPROC_PER_NODE NNODES
cd "$folder"
exec megatron rlhf --use_ray true --config job.yaml
