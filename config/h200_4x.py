"""The seed's run on four H200s: the same batch, order and schedule as on eight, twice the micro-steps.

    torchrun --nproc_per_node=4 train_nova.py config/h200_4x.py

plan.py --gpus=4 computes (not measured): 15.6 s a step, 112 GB a GPU; 47.5 hours buy 8.6 B of the 200 B tokens, for $665.
"""

d_model, n_layers, n_heads, n_kv_heads, ffn_hidden, max_len = 4096, 35, 32, 8, 14336, 2048
tie_embeddings = True

use_fp8, fp8_recipe = "auto", "rowwise"
adamw = "8bit"

sequences_per_step = 384
micro_batch = 6  # 16 micro-steps
loss_chunk = 2048  # the head's fp32 gradient is read and written once a chunk
reduce_every_micro_step = True  # hides behind the compute; no unsharded fp32 gradients are held
target_tokens = 200e9
schedule, warmup_steps = "cosine", 4_000

device = "cuda"
job_hours = 47.5
eval_every, ckpt_every, save_minutes, ckpt_keep = 500, 1_000, 30, 2
out_dir = "out/nova_8b"
