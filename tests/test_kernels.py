"""What a machine computes the model with: "auto" chooses in the open, compiled equals eager, kernels are pinned."""

import numpy as np
import pytest
import reference
import torch
from conftest import tiny_settings
from test_model import FORMS, make, one_step, tokens
from test_model_sharded import gradients
from torch._dynamo.testing import CompileCounterWithBackend
from workers import run

import model
from kernels import attention, cpu, precision
from store.store import keep_choices

can_compile = pytest.mark.skipif(" " in torch.__file__, reason="torch cannot compile from a path with spaces")


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("form", FORMS)
def test_all_layers_share_one_graph_that_equals_eager(form, mode):
    """Captured whole (no graph break), without the code generator; layers differ in lambda_0 and yet share the graph."""
    results = []
    for compiled in (False, True):
        nova, s = make(attention=form, activation_checkpointing=mode, n_layers=4)
        graphs = CompileCounterWithBackend("aot_eager")
        if compiled:
            torch._dynamo.reset()
            for block in nova.layers:
                block.run = torch.compile(block.body, backend=graphs, fullgraph=True, dynamic=False)
        results.append(one_step(nova, *tokens(s)))
    assert graphs.frame_count == 1
    for a, b in zip(*results, strict=True):
        assert (a - b).norm() <= 1e-5 * a.norm()


@pytest.mark.slow
@can_compile
def test_compiled_blocks_equal_eager_blocks_under_fsdp():
    """The real compiler, two ranks: fused kernels round less often, so within bf16's noise. (With checkpointing and
    float8 besides: test_fp8.py.)"""
    eager = run(gradients, 2, changes={})[0]
    compiled = run(gradients, 2, changes=dict(use_compile=True), deadline=600)[0]
    assert abs(eager[0] - compiled[0]) < 1e-3 * eager[0]
    for n in eager[1]:
        assert np.linalg.norm(eager[1][n] - compiled[1][n]) < 0.03 * np.linalg.norm(eager[1][n]), n


@can_compile
def test_the_compiled_loss_equals_the_eager_one():
    """Elementwise part of the loss: every term on, ignored targets, padded ids; gradients of hidden states and head."""
    torch.manual_seed(0)
    x, w, targets = torch.randn(96, 32), torch.randn(128, 32) / 3, torch.randint(0, 100, (96,))
    targets[::7] = -1
    leaves, results = [t.requires_grad_() for t in (x, w)], []
    for rows_loss in (model.rows_loss, torch.compile(model.rows_loss, fullgraph=True, dynamic=False)):
        loss, each = model.SoftcapCrossEntropy.apply(*leaves, targets, 100, 5.0, 1e-2, 48, rows_loss)
        results.append([loss.detach(), each, *torch.autograd.grad(loss, leaves)])
    assert (results[0][2].norm(dim=1) > 0).sum() == (targets >= 0).sum()
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("wish", [True, "auto"])
def test_a_failing_compiler_is_an_error_or_a_loud_eager_run(monkeypatch, wish):
    nova, s = make(use_compile=wish)
    ids, targets = tokens(s)
    want = nova(ids, targets)[0]
    lines, real = [], torch.compile

    def no_compiler(graph, inputs):
        raise RuntimeError("the compiler says no")

    monkeypatch.setattr(torch, "compile", lambda f, **kw: real(f, backend=no_compiler, **kw))
    precision.compile_blocks(nova, s, lines.append)
    if wish is True:
        with pytest.raises(model.ModelError, match="use_compile=True.*the compiler says no"):
            nova(ids, targets)
    else:
        assert nova.compiled
        assert torch.equal(nova(ids, targets)[0], want) and not nova.compiled
        assert len(lines) == 1 and "FAILED" in lines[0] and "use_compile" in lines[0]


def test_auto_may_still_fall_back_in_a_first_launch_and_never_chooses_again():
    """What a run does with "auto" before it builds: resolved too early, a failing compiler would end the run."""
    for wish, kept in ((("auto", "auto"), ("on", False)), (("off", True), ("off", True))):
        s = tiny_settings(use_fp8=wish[0], use_compile=wish[1])
        keep_choices(s, {"fp8": True, "compile": False})
        assert (s.use_fp8, s.use_compile) == kept, "what was set wins"


def test_choose_says_what_auto_means(monkeypatch):
    auto, fp8, compiled = dict(use_fp8="auto", use_compile="auto"), dict(use_fp8="on"), dict(use_compile=True)

    def chosen(settings, device):
        return precision.choose(tiny_settings(**settings), device)

    for capability, able, wanted in (((9, 0), True, True), ((8, 9), True, False), ((8, 0), False, False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, now=capability: now)
        assert chosen(auto, "cuda")["fp8"] is wanted, 'able to from 8.9 on, but "auto" asks for 9.0'
        if able:
            assert chosen(fp8, "cuda")["fp8"] is True
    with pytest.raises(model.ModelError, match="use_fp8='on'.*sm_80"):
        chosen(fp8, "cuda")
    monkeypatch.setattr(precision.torch, "__file__", "/opt/torch/__init__.py")
    monkeypatch.setattr(precision.shutil, "which", lambda name: None)
    assert chosen(auto, "cpu")["fp8"] is chosen(auto, "cpu")["compile"] is False
    assert any("eager (on a CPU" in r for r in chosen(auto, "cpu")["reasons"])
    with pytest.raises(model.ModelError, match="use_compile=True.*no C"):
        chosen(compiled, "cpu")
    monkeypatch.setattr(precision.shutil, "which", lambda name: "/bin/" + name)
    with monkeypatch.context() as spaced:
        spaced.setattr(precision.torch, "__file__", "/opt/my torch/__init__.py")
        with pytest.raises(model.ModelError, match="path without spaces"):
            chosen(compiled, "cpu")
    assert chosen(compiled, "cpu")["compile"] is True and chosen(auto, "cpu")["compile"] is False
    monkeypatch.setattr(precision.importlib.util, "find_spec", lambda name: name)
    assert chosen(auto, "cuda")["compile"] is True


def test_an_attention_kernel_is_pinned_or_an_error(monkeypatch):
    """The first that works, in a fixed order, everything else switched off; math only where it is allowed."""
    works, switched, lines = set(), {}, []
    switches = {k: lambda on, k=k: switched.update({k: on}) for k in attention.SDPA_SWITCHES}
    monkeypatch.setattr(attention, "SDPA_SWITCHES", switches)
    monkeypatch.setattr(
        attention, "attention_problem", lambda s, device, *form: None if form in works else ""
    )

    def chosen(**changes):
        return attention.choose_attention(tiny_settings(**changes), torch.device("cuda"), lines.append)

    with pytest.raises(model.ModelError, match="attention='diff'.*head_dim=16.*allow_math_attention"):
        chosen()
    assert not switched
    works.add(("flash", False))
    assert chosen() == "padded"
    assert switched == {"flash": True, "cudnn": False, "efficient": False, "math": False}
    assert "flash" in lines[-1] and "keys padded" in lines[-1] and "cudnn" in lines[-1]
    works.add(("cudnn", True))
    assert chosen() == "wide" and switched["cudnn"]
    assert chosen(deterministic=True) == "padded"
    works.clear()
    works.add(("math", False))
    chosen(allow_math_attention=True)
    assert switched["math"] and not switched["flash"]


@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_kernel_that_computes_wrong_is_found_out(monkeypatch, factor):
    s, plain = tiny_settings(), attention.sdpa
    assert attention.attention_problem(s, torch.device("cpu"), "math", False) is None
    wrong = lambda q, *rest: plain(q, *rest) * (factor if q.dtype == torch.bfloat16 else 1)  # noqa: E731
    monkeypatch.setattr(attention, "sdpa", wrong)
    assert "relative error" in attention.attention_problem(s, torch.device("cpu"), "math", False)


# --- kernels for a CPU ---------------------------------------------------------------------------------------


def attention_inputs(form: str, T: int, dtype=torch.float64, B=2, K=2, R=2, D=8):
    """q, k, v of BlockAttention, "diff" the weights of its second map as well, and its scale."""
    streams = 2 if form == "diff" else 1
    maps, d = K * R * (2 if form == "diff_v2" else 1), D // streams
    generator = torch.Generator().manual_seed(3)
    shapes = [(B, T, maps, streams, d), (B, T, K, streams, d), (B, T, K, D), (maps,)][: 2 + streams]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    return [*(t.requires_grad_() for t in made), *[None] * (2 - streams), d**-0.5]


def numpy_attention(q, k, v, second, scale):
    """The same, one softmax per query and map."""
    arrays = [None if t is None else t.detach().double().numpy() for t in (q, k, v, second)]
    (q, k, v, second), out = arrays, np.zeros((*q.shape[:3], v.shape[-1]))
    for b, head in np.ndindex(q.shape[0], q.shape[2]):
        kv = head * k.shape[2] // q.shape[2]
        streams = [reference.attend(q[b, :, head, i], k[b, :, kv, i], v[b, :, kv]) for i in range(q.shape[3])]
        out[b, :, head] = streams[0] if second is None else streams[0] + second[head] * streams[1]
    return out


@pytest.mark.parametrize("T", [1, 64, 150])
@pytest.mark.parametrize("form", FORMS)
def test_block_attention_equals_the_loop_over_queries(form, T):
    """1e-12 in float64; in bf16 within 1e-2, its rounding of scores, probabilities and results."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 1e-2)):
        inputs = attention_inputs(form, T, dtype)
        want = numpy_attention(*inputs)
        error = cpu.BlockAttention.apply(*inputs).detach().double().numpy() - want
        assert np.linalg.norm(error) < tolerance * np.linalg.norm(want), dtype


@pytest.mark.parametrize("form", FORMS)
def test_block_attentions_gradient_is_its_derivative(form, monkeypatch):
    """Against finite differences, over three blocks of which the last is short; then bf16 against float64 at length."""
    with monkeypatch.context() as short:
        short.setattr(cpu, "BLOCK", 3)
        assert torch.autograd.gradcheck(cpu.BlockAttention.apply, attention_inputs(form, 8, B=1))
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        *inputs, scale = attention_inputs(form, 150, dtype)
        y = cpu.BlockAttention.apply(*inputs, scale)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        leaves = [t for t in inputs if t is not None]
        results.append(torch.autograd.grad((y * weight.to(dtype)).sum(), leaves))
    for exact, rounded in zip(*results, strict=True):
        assert (exact - rounded.double()).norm() < 2e-2 * exact.norm()


@pytest.mark.parametrize("scale_shape", [(6,), (2, 6)])
def test_norm_and_rotation_equal_the_reference(scale_shape):
    """Values against numpy in float64, gradients against finite differences; in bf16 one rounding: 2^-9."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 2, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(scale_shape, generator=generator, dtype=torch.float64, requires_grad=True)
    tables = [t.double() for t in model.rope_tables(6, 5, 100.0)]
    normed, turned = cpu.rms_norm(x, scale, model.EPS), cpu.rotate(x, *tables)
    want = reference.rms(x.detach().numpy(), scale.detach().numpy())
    assert np.abs(normed.detach().numpy() - want).max() < 1e-12
    for b, head, stream in np.ndindex(2, 3, 2):
        want_turned = reference.rope(x[b, :, head, stream].detach().numpy(), 100.0)
        assert np.abs(turned[b, :, head, stream].detach().numpy() - want_turned).max() < 1e-6  # fp32 tables
    assert torch.autograd.gradcheck(cpu.rms_norm, (x, scale, model.EPS))
    assert torch.autograd.gradcheck(cpu.rotate, (x, *tables))
    low, low_scale = x.detach().bfloat16(), scale.detach().bfloat16()
    exact = reference.rms(low.double().numpy(), low_scale.double().numpy())
    got = cpu.rms_norm(low, low_scale, model.EPS).double().numpy()
    assert (np.abs(got - exact) <= 2.0**-8 * np.abs(exact) + 1e-9).all()


# --- on a GPU ------------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: kernels not tested")


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", FORMS)
def test_gpu_attention_runs_without_the_math_kernel(form, compiled):
    """The seed's heads (128 channels, 4 query heads a group), bf16 forward and backward within 2e-2 of fp32 math. Compiled,
    the kernels get other strides, of inputs and of gradients, than choose_attention tried."""
    changes = dict(attention=form, d_model=1024, n_heads=8, n_kv_heads=2, ffn_hidden=1024, max_len=512)
    lines, results = [], []
    try:
        for dtype in (torch.float32, torch.bfloat16):
            nova, s = make(dtype, **changes)
            nova = nova.cuda()
            if dtype == torch.bfloat16:
                kernel = attention.choose_attention(s, torch.device("cuda"), lines.append)
                for block in nova.layers:
                    block.attn.kernel = kernel
                assert not torch.backends.cuda.math_sdp_enabled()
                if compiled:
                    precision.compile_blocks(nova, tiny_settings(**changes, use_compile=True), lines.append)
            results.append([t.float() for t in one_step(nova, *(t.cuda() for t in tokens(s)))])
    finally:
        for switch in attention.SDPA_SWITCHES.values():
            switch(True)
    print(lines)
    assert abs(results[0][0] - results[1][0]) < 2e-2 * results[0][0]
    errors = [((a - b).norm() / a.norm()).item() for a, b in zip(*results, strict=True)]
    assert max(errors) < 5e-2 and sum(errors) / len(errors) < 2e-2, errors


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernel", ["flash", "cudnn"])
def test_gpu_kernels_agree_with_math(form, kernel):
    s = tiny_settings(attention=form, d_model=1024, n_heads=8, n_kv_heads=2)
    assert attention.attention_problem(s, torch.device("cuda"), kernel, unequal=False) is None
