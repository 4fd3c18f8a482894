"""Several machines of eight H200s (HSDP): weights sharded inside a machine, replicated across machines.

    torchrun --nnodes=8 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 --rdzv_id=nova \
        train_nova.py config/h200_multinode.py

out_dir must be on a file system that all machines share; the start-up checks it.
plan.py --gpus=64 computes (not measured): 1.18 s a step, 96 GB a GPU; 47.5 hours buy 114 B of the 200 B tokens, for $10,640.
"""

d_model, n_layers, n_heads, n_kv_heads, ffn_hidden, max_len = 4096, 35, 32, 8, 14336, 2048
tie_embeddings = True

use_fp8, fp8_recipe = "auto", "rowwise"
adamw = "8bit"

shard_size = 8  # ranks that share one copy of the weights: one machine, so that gathers stay on NVLink
sequences_per_step = 384  # 64 GPUs: one micro-step of 6
micro_batch = 6
loss_chunk = 2048  # the head's fp32 gradient is read and written once a chunk
reduce_every_micro_step = True  # hides behind the compute; no unsharded fp32 gradients are held
target_tokens = 200e9
schedule, warmup_steps = "cosine", 4_000

device = "cuda"
job_hours = 47.5
eval_every, ckpt_every, save_minutes, ckpt_keep = 500, 1_000, 30, 2
out_dir = "out/nova_8b"
