"""Text from a Nova: `python sample.py out/quickstart --prompt "def " --tokens 200 --temperature 0.8 --top_k 50 --seed 1`.

Reads the exported weights of a run, or its newest checkpoint, or an export folder. The same seed gives the same text.
"""

from launch import entry

if __name__ == "__main__":
    entry.prepare()

import argparse
import itertools
import os
import sys

import torch


def next_token(logits: torch.Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One id drawn from logits (V,); temperature 0 is greedy, top_k 0 keeps all ids."""
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.float().cpu() / temperature
    if 0 < top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))


class Cache:
    """One layer's keys (B, T, K, streams, D/streams), normed and rotated, and values (B, T, K, D) so far, T <= max_len."""

    def __init__(self, max_len: int):
        self.max_len, self.length = max_len, 0

    def __call__(self, k, v):
        """Append; return all of them."""
        if self.length == 0:
            self.k, self.v = (t.new_empty(t.shape[0], self.max_len, *t.shape[2:]) for t in (k, v))
        begin, self.length = self.length, self.length + k.shape[1]
        self.k[:, begin : self.length], self.v[:, begin : self.length] = k, v
        return self.k[:, : self.length], self.v[:, : self.length]


@torch.no_grad()
def generate(model, ids, n_tokens, max_len, device, temperature=0.8, top_k=50, seed=0, pad=1, cached=False):
    """`n_tokens` ids that continue `ids` (at least one). The context is the last `max_len` ids at first; when it is full
    the newer half goes on, at position 0 again.

    pad: fill the context up to a multiple of `pad`, at most max_len, which changes nothing before: a new graph, or on a
    CPU new kernels, for every length cost time and memory. cached: keep keys and values, so that a token costs one
    position and not the whole context.
    Never stops early: under FSDP every rank must call the model equally often, so all ranks call this alike.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, prompt = list(ids), len(ids)
    begin, caches = max(0, prompt - max_len), None
    for _ in range(n_tokens):
        if len(ids) - begin > max_len:
            begin, caches = len(ids) - (max_len + 1) // 2, None
        context = ids[begin:]
        last = len(context) - 1
        if caches:
            context, last = context[-1:], 0
        elif cached:
            caches = [Cache(max_len) for _ in model.layers]
        room = min(-len(context) % pad, max_len - len(context))
        context = torch.tensor([context + [0] * room], device=device)  # (1, T)
        ids.append(next_token(model(context, caches=caches)[0, last], temperature, top_k, generator))
    return ids[prompt:]


def text(model, prompt: str, tokenizer, n_tokens: int, max_len: int, device, **options) -> str:
    """`prompt` and what continues it, up to an end of document; `options` of generate. Without a prompt: a new document."""
    ids = tokenizer.encode(prompt) or [tokenizer.eot or 0]
    ids = generate(model, ids, n_tokens, max_len, device, **options)
    return prompt + tokenizer.decode(itertools.takewhile(lambda i: i != tokenizer.eot, ids))


def load(path: str):
    """(model in evaluation mode, settings, tokenizer) from a run folder, an export, or a checkpoint folder."""
    import data
    from model import Nova
    from settings import FIELDS, Settings
    from store import read_export, read_model

    exports = [p for p in (path, f"{path}/export") if os.path.exists(f"{p}/config.json")]
    config, tensors = read_export(exports[0]) if exports else read_model(path)
    settings = Settings(**{k: v for k, v in config["settings"].items() if k in FIELDS})
    settings.use_fp8, settings.use_compile = "off", False  # fp32, which every machine has
    model = Nova(settings)
    model.load_state_dict(tensors, strict=True)
    files = (f"{path}/tokenizer.json", f"{path}/export/tokenizer.json")
    file = next((f for f in files if os.path.exists(f)), None)
    return model.eval(), settings, data.Tokenizer(config["tokenizer"], file)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="run folder (out/quickstart), export folder or checkpoint folder")
    parser.add_argument("--prompt", default="", help="text to continue; empty: start of a document")
    parser.add_argument("--tokens", type=int, default=300, help="tokens to generate")
    parser.add_argument("--samples", type=int, default=1, help="texts to generate")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy")
    parser.add_argument("--top_k", type=int, default=50, help="draw among the k likeliest ids; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    if arguments.temperature < 0 or arguments.tokens < 0 or arguments.top_k < 0:
        parser.error("--temperature, --tokens and --top_k must not be negative")
    try:
        model, settings, tokenizer = load(arguments.path)
    except (OSError, RuntimeError, ValueError) as e:
        sys.exit(f"sample.py: {e}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    if tokenizer.kind == "ids":
        sys.exit(f"sample.py: {arguments.path}: its data named no tokenizer, so there is no text to read")
    options = dict(temperature=arguments.temperature, top_k=arguments.top_k, cached=True)
    where, first = (settings.max_len, device), arguments.seed
    for seed in range(first, first + arguments.samples):
        print("-" * 40 + "\n" if seed > first else "", end="")
        print(text(model, arguments.prompt, tokenizer, arguments.tokens, *where, seed=seed, **options))


if __name__ == "__main__":
    main()
