"""A real, small Nova on a laptop's CPU in a few minutes: what the big runs do, at 1 M parameters.

    python train_nova.py config/quickstart.py

Text that every Python has (its own library, module documentation, sympy's docstrings, worked arithmetic), as bytes.
"""

data = "python"
d_model, n_layers, n_heads, n_kv_heads, ffn_hidden, max_len = 128, 4, 4, 2, 384, 256
tie_embeddings = False  # 0.17 nats better at this size, at equal parameters

use_compile = False  # compiling takes longer than it saves in a run of minutes
use_fp8 = "off"
adamw = "fp32"

sequences_per_step, micro_batch = 16, 8
total_steps, warmup_steps = 450, 30
schedule, decay_frac = "wsd", 0.3
# Short runs of a small model like higher rates than 4e-4.
muon_lr, lr = 6e-3, 3e-3

log_every, eval_every, ckpt_every = 15, 150, 150
eval_rows, final_eval_rows, val_rows = 16, 32, 32
sample_prompt = "def "
out_dir = "out/quickstart"
