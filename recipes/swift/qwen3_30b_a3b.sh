#!/usr/bin/env bash
# ms-swift's examples/megatron/moe/qwen3_moe.sh, two nodes of eight GPUs, with one argument more: --external_plugins.
# Start it on every node with NODE_RANK, MASTER_ADDR and MASTER_PORT set. RL_SAFE_SWIFT may hold settings.
set -euo pipefail

export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' NNODES="${NNODES:-2}" NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
exec megatron sft \
    --external_plugins "$(python -m rl_safe_workers.adapters.swift)" \
    --model Qwen/Qwen3-30B-A3B-Base \
    --save_safetensors true \
    --dataset 'liucong/Chinese-DeepSeek-R1-Distill-data-110k-SFT' \
    --load_from_cache_file true \
    --split_dataset_ratio 0.01 \
    --pipeline_model_parallel_size 2 \
    --expert_model_parallel_size 8 \
    --moe_permute_fusion true \
    --moe_grouped_gemm true \
    --moe_shared_expert_overlap true \
    --moe_aux_loss_coeff 1e-3 \
    --micro_batch_size 1 \
    --global_batch_size 16 \
    --packing true \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --num_train_epochs 3 \
    --finetune true \
    --cross_entropy_loss_fusion true \
    --lr 1e-5 \
    --lr_warmup_fraction 0.05 \
    --min_lr 1e-6 \
    --output_dir megatron_output/Qwen3-30B-A3B-Base \
    --eval_steps 200 \
    --save_steps 200 \
    --max_length 8192 \
    --dataloader_num_workers 8 \
    --dataset_num_proc 8 \
    --no_save_optim true \
    --no_save_rng true \
    --sequence_parallel true \
    --attention_backend flash
