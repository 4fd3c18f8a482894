"""A mid-size Nova that one H200 or H100 trains in a day: 0.45 B parameters, 9 B tokens (20 a parameter).

    HF_DATASET_REPO=you/tokens python train_nova.py config/one_gpu_day.py

plan.py --gpus=1 computes (not measured): 3.17 s a step, 41 GB a GPU, 15 hours at 59 % MFU; at 37 % it takes the whole
day. max_hours is the run's budget: on a slower GPU the decay is moved, so that the run ends decayed, on fewer tokens.
"""

d_model, n_layers, n_heads, n_kv_heads, ffn_hidden, max_len = 1536, 14, 12, 4, 4096, 2048
tie_embeddings = True

sequences_per_step = 256  # 524,288 tokens
micro_batch = 16
loss_chunk = 2048  # the head's fp32 gradient is read and written once a chunk
target_tokens = 9e9  # 17,167 steps
schedule, warmup_steps, decay_frac = "wsd", 500, 0.2

device = "cuda"
max_hours = 24
eval_every, ckpt_every, save_minutes, ckpt_keep = 500, 2_000, 30, 2
out_dir = "out/one_gpu_day"
