"""Text from a model: the key/value cache gives the tokens that whole contexts give."""

import contextlib

import pytest
import torch
from conftest import tiny_settings

import data
import sample
from model import ModelError, Nova, init_weights

FORMS = {
    "diff": dict(attention="diff"),
    "diff_v2": dict(attention="diff_v2", attn_gate=True),
    "standard": dict(attention="standard", n_kv_heads=1),
    "untied": dict(tie_embeddings=False, n_kv_heads=4),
}


def random_model(**changes):
    """A model whose attention matters: weights ten times those of a fresh one."""
    torch.manual_seed(0)
    s = tiny_settings(max_len=16, **changes)
    model = Nova(s)
    init_weights(model, s)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    return model.eval()


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_cached_logits_are_those_of_the_whole_context(changes):
    """Position by position; not for one token only: an empty prefix, a prefill, and every length up to max_len."""
    model = random_model(**changes)
    ids = torch.randint(257, (2, 16))
    with torch.no_grad():
        whole = model(ids)
        for prefill in (1, 7, 16):
            caches = [sample.Cache(16) for _ in model.layers]
            steps = [model(ids[:, :prefill], caches=caches)]
            steps += [model(ids[:, i : i + 1], caches=caches) for i in range(prefill, 16)]
            torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("prompt", [1, 5, 16, 40])
@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_the_same_tokens_with_and_without_a_cache(changes, prompt, temperature):
    """Also past max_len, where the newer half of the context goes on."""
    model, ids = random_model(**changes), torch.randint(257, (prompt,)).tolist()
    options = dict(n_tokens=40, max_len=16, device="cpu", temperature=temperature, top_k=20, seed=3)
    plain = sample.generate(model, ids, **options)
    assert len(plain) == 40 and (temperature == 0 or len(set(plain)) > 20)
    assert sample.generate(model, ids, cached=True, **options) == plain
    for pad in (5, 16):
        assert sample.generate(model, ids, pad=pad, **options) == plain


def test_a_cache_takes_one_position_at_a_time_and_no_more_than_max_len():
    model = random_model()
    ids, caches = torch.zeros(1, 16, dtype=torch.int64), [sample.Cache(16) for _ in model.layers]
    with torch.no_grad():
        for length, problem in ((15, None), (2, "15 cached"), (1, None), (1, "16 cached")):
            with pytest.raises(ModelError, match=problem) if problem else contextlib.nullcontext():
                model(ids[:, :length], caches=caches)


def test_without_a_tokenizer_or_with_nonsense_it_says_so(tmp_path, monkeypatch, capsys):
    model = random_model()
    read = {"ids": data.Tokenizer({"vocab_size": 257}), "text": data.Tokenizer({"tokenizer": "bytes"})}
    monkeypatch.setattr(sample, "load", lambda path: (model, model.settings, read[path]))
    with pytest.raises(SystemExit, match="no tokenizer"):
        sample.main(["ids"])
    sample.main(["text", "--tokens=2"])  # an empty prompt: the start of a document
    with pytest.raises(SystemExit) as e:
        sample.main(["here", "--temperature=-1"])
    assert e.value.code == 2 and "must not be negative" in capsys.readouterr().err


def test_next_token_draws_from_the_likeliest_only():
    logits, generator = torch.tensor([0.0, 5.0, 4.0, -1.0]), torch.Generator().manual_seed(0)
    assert sample.next_token(logits, 0, 2, generator) == 1
    for temperature, top_k, drawn in ((1.0, 2, {1, 2}), (50.0, 0, {0, 1, 2, 3})):
        assert {sample.next_token(logits, temperature, top_k, generator) for _ in range(100)} == drawn
