"""Settings shared by all tests: product files importable, one thread, no network but loopback."""

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
for name in ("HF_TOKEN", "HF_DATASET_REPO", "HF_MODEL_REPO", "DOMAINS", "NOVA_DEBUG", "NOVA_NCCL_SAFE"):
    os.environ.pop(name, None)  # a developer's own environment must not change what is tested

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import settings as settings_module  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def one_rank_group():
    """The one-rank process group that a run under plain python has, and an end for every store of the test."""
    from checkpoint_tools import OPEN

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    for c in list(OPEN):
        c.close()
    dist.destroy_process_group()


@pytest.fixture
def quick_retries(monkeypatch, one_rank_group):
    """Uploads are tried again after milliseconds."""
    monkeypatch.setattr("store.uploads.Uploads.RETRY", (0.01, 0.02))


@pytest.fixture
def server(monkeypatch):
    """A Hub on loopback with a dataset, me/data, and a model repo, me/model."""
    import fake_hub

    with fake_hub.FakeHub() as server:
        for module in ("utils._http", "file_download"):
            monkeypatch.setattr(f"huggingface_hub.{module}.time", fake_hub.Short())
        server.commit("datasets/me/data", fake_hub.DATA)
        server.commit("models/me/model", {"README.md": b"hello"})
        monkeypatch.setenv("HF_TOKEN", fake_hub.WRITE_TOKEN)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setattr("hub.client.FIRST_WAIT", 0.01)
        yield server


def quiet(text):
    """A log that nobody reads."""


def cpu_mesh(world, hsdp=None):
    """A mesh of `world` ranks, or of `hsdp` = (replicas, ranks that share the rows)."""
    shape = hsdp or (world,)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def full(t):
    """A tensor, sharded or not, as a whole one."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach()


def weights(net) -> dict:
    return {n: full(p).clone() for n, p in net.named_parameters()}


def tiny_settings(**changes):
    """A valid small Settings: 2 layers, d 64, 4/2 heads, 64 tokens, vocabulary 257, no compile."""
    values = dict(
        vocab_size=257, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden=128, max_len=64,
        total_steps=20, warmup_steps=2, ctx_warmup_steps=0, sequences_per_step=8, micro_batch=4, loss_chunk=128,
        use_fp8="off", use_compile=False, adamw="fp32", data="python", val_rows=4, eval_rows=4, final_eval_rows=4,
        muon_lr=4e-3, lr=2e-3, sample_tokens=0,
    )  # fmt: skip
    values.update(changes)
    settings = settings_module.Settings()
    for name, value in values.items():
        settings_module.assign(settings, name, value, "test")
    settings_module.check(settings)
    return settings
