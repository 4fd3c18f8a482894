"""The seed's run on one machine with eight H200s: its model, batch, schedule and limits.

    HF_DATASET_REPO=you/tokens HF_MODEL_REPO=you/nova HF_TOKEN=hf_… \
    torchrun --nproc_per_node=8 train_nova.py config/h200_8x.py

The seed called this model 10B. Its sizes give 7.90 B parameters (tied); config/h200_8x_10b.py is a true 10 B.
plan.py computes (not measured): 7.8 s a step, 100 GB a GPU; 47.5 hours buy 17.2 B of the 200 B tokens, for $1,330.
"""

# The model: settings.py's defaults are the seed's sizes, written out here because they are what this file is.
d_model, n_layers, n_heads, n_kv_heads, ffn_hidden, max_len = 4096, 35, 32, 8, 14336, 2048
tie_embeddings = True

# float8: published gains on an 8B model are +10 % (rowwise) and +25 % (tensorwise with float8 all-gather, which Nova
# does not use). "auto" uses it on sm_90 and newer. `python -m bench gpu` measures whether it pays on the machine at hand.
use_fp8, fp8_recipe = "auto", "rowwise"
adamw = "8bit"  # saves 0.4 GB per GPU against fp32

sequences_per_step = 384  # the seed's 6 x 8 x 8: 786,432 tokens
micro_batch = 6
loss_chunk = 2048  # the head's fp32 gradient is read and written once a chunk
reduce_every_micro_step = True  # hides behind the compute; no unsharded fp32 gradients are held
target_tokens = 200e9  # 254,314 steps
schedule, warmup_steps = "cosine", 4_000

device = "cuda"
job_hours = 47.5  # one launch: ends saved and resumable; give the same command again to go on
eval_every, ckpt_every, save_minutes, ckpt_keep = 500, 1_000, 30, 2
out_dir = "out/nova_8b"
