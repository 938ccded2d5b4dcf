#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B with verl, Megatron and vLLM on 8-GPU nodes, of the sizes of verl issue 2238:
#   recipes/verl/qwen3_30b_a3b_megatron.sh                           4 nodes, TP2 EP8
#   NNODES=2 TP=4 PP=2 EP=2 recipes/verl/qwen3_30b_a3b_megatron.sh   2 nodes, TP4 PP2 EP2, the layout of the issue
# PP * EP ranks share the experts' 29 billion parameters, each of 6 bytes: bf16, and a gradient in fp32. That is 43.5 GB a
# rank at PP2 EP2, beside the optimizer's state. EP2 alone would take 87 GB, which is more than an 80 GB GPU has.
# SUBMIT=1 submits it to the Ray cluster of RAY_ADDRESS instead of starting it here. MODEL_PATH, TRAIN_FILES, VAL_FILES and
# CKPTS_DIR say what to train, from where to where; further arguments are overrides of verl's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

NNODES="${NNODES:-4}" EP="${EP:-8}" TP="${TP:-2}" PP="${PP:-1}"
MODEL_PATH="${MODEL_PATH:-Qwen/Qwen3-30B-A3B}"
TRAIN_FILES="${TRAIN_FILES:-$HOME/data/gsm8k/train.parquet}" VAL_FILES="${VAL_FILES:-$HOME/data/gsm8k/test.parquet}"
CKPTS_DIR="${CKPTS_DIR:-$PWD/checkpoints/verl_qwen3_30b_a3b}" # on storage that all nodes share

overrides=(
    model_engine=megatron
    +rl_safe=enabled
    algorithm.adv_estimator=grpo
    data.train_files="$TRAIN_FILES"
    data.val_files="$VAL_FILES"
    data.train_batch_size=256
    data.max_prompt_length=1024
    data.max_response_length=4096
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size="$TP"
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size="$PP"
    actor_rollout_ref.actor.megatron.expert_model_parallel_size="$EP"
    actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
    actor_rollout_ref.actor.megatron.param_offload=true
    actor_rollout_ref.actor.megatron.optimizer_offload=true
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.rollout.tensor_model_parallel_size=4
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8192
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node=8
    trainer.save_freq=20
    trainer.test_freq=-1
    trainer.val_before_train=false
    trainer.total_epochs=1
    trainer.default_local_dir="$CKPTS_DIR"
    trainer.experiment_name="qwen3_30b_a3b_${NNODES}x8_ep${EP}"
    "trainer.logger=[console]"
)
command=(python -m rl_safe_workers.adapters.verl.main_ppo "${overrides[@]}" "$@")
[[ -z "${SUBMIT:-}" ]] || command=(ray job submit --working-dir . --runtime-env ray_configs/verl_runtime_env.yaml -- "${command[@]}")
exec "${command[@]}"
