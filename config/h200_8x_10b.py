"""A true 10 B on eight H200s: the seed's width with the depth that its name promised.

44 layers instead of 35 and a head of its own, everything else as in h200_8x.py.
plan.py computes (not measured): 9.76 s a step, 91 GB a GPU; 47.5 hours buy 13.8 B of the 200 B tokens, for $1,330.
"""

d_model, n_layers, n_heads, n_kv_heads, ffn_hidden, max_len = 4096, 44, 32, 8, 14336, 2048
tie_embeddings = False

use_fp8, fp8_recipe = "auto", "rowwise"
adamw = "8bit"

sequences_per_step = 384
micro_batch = 4  # 12 micro-steps of 4 cost 0.2 % against 8 of 6 and leave room for the deeper model
loss_chunk = 2048  # the head's fp32 gradient is read and written once a chunk
reduce_every_micro_step = True  # hides behind the compute; no unsharded fp32 gradients are held
target_tokens = 200e9
schedule, warmup_steps = "cosine", 4_000

device = "cuda"
job_hours = 47.5
eval_every, ckpt_every, save_minutes, ckpt_keep = 500, 1_000, 30, 2
out_dir = "out/nova_10b"
