#!/usr/bin/env bash
# GRPO of a tiny Qwen3-MoE through verl's own main_ppo with our engines and trainers: two trainers, EP2, and vLLM beside
# them. DEVICE=cuda needs two GPUs; DEVICE=cpu, the default where there are none, needs scripts/setup verl, and docs/verl.md
# says how far it gets: verl 0.9.1 does not know the name of vLLM's CPU build.
# ENTRY=verl takes verl's own entry, with our engines alone. ENTRY=stock takes verl's engines, too.
# SUBMIT=1 submits the job to the Ray cluster at RAY_ADDRESS. Its nodes must see this folder and have PYTHON at the
# same path. SUBMISSION sets the job's id.
# Further arguments are overrides of verl's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

DEVICE="${DEVICE:-$([[ -e /dev/nvidia0 ]] && echo cuda || echo cpu)}"
PYTHON="${PYTHON:-$PWD/.venv-verl/bin/python}" MODEL="${MODEL:-$PWD/models/verl-quickstart-qwen3-moe}"

export HF_HUB_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1
cluster=(ray_kwargs.ray_init.num_cpus=16) # of the Ray that is started; one that runs has its own
if [[ $DEVICE == cpu ]]; then
    # Our CPU platform replaces CUDA. verl asks Ray for GPUs, so Ray is told that there are two. Nothing uses them.
    export VERL_PLATFORM=rl_safe_cpu GLOO_SOCKET_IFNAME=lo
    cluster+=(+ray_kwargs.ray_init.num_gpus=2)
    of_device=(
        actor_rollout_ref.actor.megatron.param_offload=false
        actor_rollout_ref.actor.megatron.optimizer_offload=false
        actor_rollout_ref.rollout.free_cache_engine=false
        +ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM=$VERL_PLATFORM
        +ray_kwargs.ray_init.runtime_env.env_vars.GLOO_SOCKET_IFNAME=$GLOO_SOCKET_IFNAME
    )
else
    # vLLM sleeps while the trainers, on the same GPUs, have their state there.
    of_device=(
        actor_rollout_ref.actor.megatron.param_offload=true
        actor_rollout_ref.actor.megatron.optimizer_offload=true
        actor_rollout_ref.rollout.free_cache_engine=true
        actor_rollout_ref.rollout.gpu_memory_utilization=0.3
    )
fi

[[ -d $MODEL ]] || "$PYTHON" -m rl_safe_workers.models.seeded "$MODEL" '{}' bfloat16

overrides=(
    model_engine=megatron
    algorithm.adv_estimator=grpo
    data.train_files="$PWD/recipes/data/char_class.parquet"
    data.val_files="$PWD/recipes/data/char_class.parquet"
    data.train_batch_size=4
    data.max_prompt_length=64
    data.max_response_length=16
    actor_rollout_ref.model.path="$MODEL"
    actor_rollout_ref.model.use_remove_padding=false
    actor_rollout_ref.actor.ppo_mini_batch_size=4
    actor_rollout_ref.actor.use_dynamic_bsz=false
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.actor.megatron.vanilla_mbridge=true
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=2
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=2
    actor_rollout_ref.rollout.tensor_model_parallel_size=1
    actor_rollout_ref.rollout.enforce_eager=true
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
    reward.custom_reward_function.path="$PWD/rl_safe_workers/driver/inputs/rewards.py"
    reward.custom_reward_function.name=char_class
    trainer.device="$DEVICE"
    trainer.nnodes=1
    trainer.n_gpus_per_node=2
    trainer.total_training_steps=5
    trainer.save_freq=5
    trainer.test_freq=-1
    trainer.val_before_train=false
    trainer.default_local_dir="$PWD/checkpoints/verl_quickstart"
    "trainer.logger=[console]"
    transfer_queue.backend.SimpleStorage.num_data_storage_units=1 # each takes a CPU
    "${of_device[@]}"
)
if [[ "${ENTRY:-}" == stock ]]; then
    main=("$PYTHON" -m verl.trainer.main_ppo "${overrides[@]}")
elif [[ "${ENTRY:-}" == verl ]]; then
    export VERL_USE_EXTERNAL_MODULES=rl_safe_workers.adapters.verl.plugin VERL_ENGINE_VENDOR=rl_safe
    main=("$PYTHON" -m verl.trainer.main_ppo "${overrides[@]}")
else
    main=("$PYTHON" -m rl_safe_workers.adapters.verl.main_ppo +rl_safe=enabled "${overrides[@]}")
fi
if [[ -n "${SUBMIT:-}" ]]; then
    submit=("$PYTHON" -m ray.scripts.scripts job submit --working-dir . --runtime-env ray_configs/verl_runtime_env.yaml)
    [[ -z "${SUBMISSION:-}" ]] || submit+=(--submission-id "$SUBMISSION")
    exec "${submit[@]}" -- env ${VERL_PLATFORM:+VERL_PLATFORM="$VERL_PLATFORM"} HF_HUB_OFFLINE=1 "${main[@]}" "$@"
fi
exec "${main[@]}" "${cluster[@]}" "$@"
