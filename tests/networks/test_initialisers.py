"""New initial values come from the initialisers that the modules of a network bring along."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.core.rng import global_stream
from credibly.networks.layout import Layout
from credibly.networks.normalisation import FilterResponseNorm, FrozenBatchNorm


class Conv1D(nn.Module):
    """As in transformers: a linear layer with a weight of shape (in, out), and no initialiser of its own."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(0.02 * torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class Pretrained(nn.Module):
    """As in transformers: one `_init_weights(module)` for every module of a model."""

    def __init__(self, initializer_range=0.02):
        super().__init__()
        self.config = SimpleNamespace(initializer_range=initializer_range)
        self.embed, self.norm = nn.Embedding(300, 8), nn.LayerNorm(8)
        self.mix, self.head = Conv1D(16, 8), nn.Linear(16, 2)
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
            module.weight.data.normal_(0.0, self.config.initializer_range)
        if isinstance(module, (nn.Linear, Conv1D)):
            module.bias.data.zero_()
        if isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(1.0)
            module.bias.data.zero_()

    def forward(self, x):
        return self.head(torch.relu(self.mix(self.norm(self.embed(x).mean(1)))))


class Adapted(nn.Module):
    """As in peft: a layer with low-rank adapters, which `reset_lora_parameters` initialises by a given rule."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, 3, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(3, base_layer.out_features, bias=False)})
        self.lora_embedding_A = nn.ParameterDict({})

    def reset_lora_parameters(self, adapter_name, init_lora_weights):
        if init_lora_weights is False:
            return
        if init_lora_weights is True:
            nn.init.kaiming_uniform_(self.lora_A[adapter_name].weight, a=math.sqrt(5))
        elif init_lora_weights.lower() == "gaussian":
            nn.init.normal_(self.lora_A[adapter_name].weight, std=1 / 3)
        else:
            raise ValueError(init_lora_weights)
        nn.init.zeros_(self.lora_B[adapter_name].weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class PeftModel(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.model = Pretrained()
        self.model.head = Adapted(self.model.head)
        self.peft_config = {"default": SimpleNamespace(init_lora_weights=rule)}

    def forward(self, x):
        return self.model(x)


class Bare(nn.Module):
    """Parameters without an initialiser."""

    def __init__(self):
        super().__init__()
        self.matrix, self.gain = nn.Parameter(3 * randn(40, 30, seed=1)), nn.Parameter(torch.ones(200))
        self.shift, self.slope = nn.Parameter(torch.zeros(200)), nn.Parameter(torch.tensor(2.0))
        self.inner = nn.Linear(30, 1)

    def forward(self, x):
        return self.inner(x @ self.matrix) * self.slope + (self.gain + self.shift).mean()


def values(layout, theta):
    return layout.split(torch.cat([theta, theta.new_zeros(len(theta), layout.dim - layout.network_dim)], -1))[0]


def tokens(count=8):
    return torch.arange(count * 5).reshape(count, 5) % 300


def test_plain_layers_are_reset_in_order_from_one_stream():
    """Bit-for-bit the values of `reset_parameters` in the order of the layers."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Sequential(nn.Flatten(), nn.Linear(8, 3)), nn.Linear(3, 1))
    layout = Layout(net)
    found = layout.reinitialised(5, 2)
    for member in range(2):
        with global_stream(5, "initialise", member):
            for part in (net[0], net[2][1], net[3]):
                part.reset_parameters()
        assert torch.equal(found[member], layout.read(net))
    assert layout.start_rules["perturbed"] == []


def test_the_initialiser_of_an_enclosing_model_has_the_last_word():
    layout = Layout(Pretrained())
    theta = layout.reinitialised(0, 2)
    found = values(layout, theta)
    assert layout.start_rules == {"own initialiser": [e.name for e in layout.entries], "perturbed": []}
    for name in ("embed.weight", "mix.weight"):
        assert float(found[name].std()) == pytest.approx(0.02, rel=0.15)
        assert not bool((found[name][0] == found[name][1]).any())  # members have nothing in common
    assert torch.equal(found["norm.weight"], torch.ones(2, 8))
    assert all(not bool(found[n].any()) for n in ("norm.bias", "mix.bias", "head.bias"))


def test_the_closest_model_initialises_a_module():
    class Composite(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = Pretrained(0.3), nn.Linear(2, 50)

        def _init_weights(self, module):
            if isinstance(module, nn.Linear):
                nn.init.constant_(module.weight, 7.0)

        def forward(self, x):
            return self.out(self.inner(x))

    layout = Layout(Composite())
    found = values(layout, layout.reinitialised(0, 1))
    assert bool((found["out.weight"] == 7).all())
    assert float(found["inner.embed.weight"].std()) == pytest.approx(0.3, rel=0.1)
    assert float(found["inner.head.weight"].abs().max()) < 2


def test_a_parent_is_reset_after_its_children():
    """nn.MultiheadAttention sets the bias of its output layer to zero; the layer alone would draw it."""
    layout = Layout(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    found = values(layout, layout.reinitialised(0, 1))
    assert not bool(found["self_attn.out_proj.bias"].any())
    assert not bool(found["self_attn.in_proj_bias"].any())
    assert float(found["self_attn.in_proj_weight"].abs().max()) <= math.sqrt(6 / (8 + 24))


@pytest.mark.parametrize("rule", [True, "gaussian", False, "pissa"])
def test_adapters_follow_the_rule_of_their_configuration(rule):
    net = PeftModel(rule)
    layout = Layout(net, random="*lora*")
    theta = layout.reinitialised(0, 60)
    found = values(layout, theta)
    a, b = found["model.head.lora_A.default.weight"], found["model.head.lora_B.default.weight"]
    given_a, given_b = (net.model.head.lora_A["default"].weight, net.model.head.lora_B["default"].weight)
    if rule == "pissa":  # depends on the adapted weights, so the given values are the only hint
        assert len(layout.start_rules["perturbed"]) == 2
        torch.testing.assert_close(a.mean(0), given_a.detach(), rtol=0, atol=0.05)
        torch.testing.assert_close(b.mean(0), given_b.detach(), rtol=0, atol=0.1)
        assert not torch.equal(a[0], a[1])
        return
    assert layout.start_rules["perturbed"] == []
    assert float(a.std()) == pytest.approx(1 / 3 if rule == "gaussian" else 16**-0.5 / math.sqrt(3), rel=0.1)
    assert bool(b.any()) == (rule is False)
    if rule is False:
        assert float(b.std()) == pytest.approx(3**-0.5 / math.sqrt(3), rel=0.1)


def test_parameters_without_an_initialiser_are_perturbed():
    net = Bare()
    layout = Layout(net)
    found = values(layout, layout.reinitialised(0, 2))
    assert layout.start_rules == {
        "own initialiser": ["inner.weight", "inner.bias"],
        "perturbed": ["matrix", "gain", "shift", "slope"],
    }
    noise = (found["matrix"] - net.matrix).detach()
    assert float(noise.std()) == pytest.approx(1.5, rel=0.1)
    assert abs(float((noise[0] * noise[1]).mean())) < 0.3  # independent between members
    for name, centre, width in (("gain", 1.0, 0.02), ("shift", 0.0, 0.02)):
        assert float(found[name].mean()) == pytest.approx(centre, abs=0.005)
        assert float(found[name].std()) == pytest.approx(width, rel=0.15)
    assert 0 < float((found["slope"] - 2).abs().max()) < 0.2
    assert torch.equal(layout.reinitialised(0, 1, first=1)[0], layout.reinitialised(0, 2)[1])


def test_the_caller_s_generator_and_network_are_untouched():
    net = PeftModel(True)
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.random.get_rng_state()
    Layout(net).reinitialised(0, 2)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_the_normalisations_of_this_package_are_reset():
    frn, frozen = FilterResponseNorm(4, threshold=True), FrozenBatchNorm(4)
    for part in (frn, frozen):
        for parameter in part.parameters():
            nn.init.uniform_(parameter, 3, 4)
        layout = Layout(part)
        found = values(layout, layout.reinitialised(0, 1))
        assert layout.start_rules["perturbed"] == []
        assert all(bool((v == float(name == "weight")).all()) for name, v in found.items())


def test_fan_in_of_transposed_weights():
    fans = {e.name: e.fan_in for e in Layout(Pretrained()).entries}
    assert fans["mix.weight"] == 8
    assert fans["head.weight"] == 16
    assert fans["embed.weight"] == fans["mix.bias"] == 1
    prior = cr.priors.Normal(1.0, fan_in=True)
    problem = cr.Problem(
        Pretrained(), data=(tokens(), torch.arange(8) % 2), likelihood=cr.likelihoods.Categorical(), prior=prior
    )
    std = problem.layout.split(problem.prior.std)[0]
    assert float(std["mix.weight"].min()) == float(std["mix.weight"].max()) == pytest.approx(8**-0.5)


def test_the_record_says_where_the_starts_come_from(tmp_path):
    x, y = randn(12, 40), randn(12, seed=1)
    problem = cr.Problem(Bare(), data=(x, y), likelihood=cr.likelihoods.Gaussian(0.5), prior=cr.priors.Normal())
    expected = problem.layout.start_rules
    posterior = cr.DeepEnsemble(members=2, steps=2).fit(problem, seed=0)
    posterior.save(tmp_path / "run")
    assert cr.load(tmp_path / "run", Bare()).record.history["initialisers"] == expected
    fits = [
        cr.MAP(steps=2, init="fresh"),
        cr.BayesByBackprop(members=2, steps=2),
        cr.Laplace(steps=2, init="fresh", structure="diag"),
        cr.SGLD(chains=2, draws=2, warmup=2, init="fresh"),
    ]
    for method in fits:
        assert method.fit(problem, seed=0, progress=False).record.history["initialisers"] == expected
    for method in (cr.MAP(steps=2), cr.DeepEnsemble(members=2, steps=2, init="prior")):
        assert "initialisers" not in method.fit(problem, seed=0, progress=False).record.history


def test_members_of_an_ensemble_start_there():
    problem = cr.Problem(
        Pretrained(),
        data=(tokens(), torch.arange(8) % 2),
        likelihood=cr.likelihoods.Categorical(),
        prior=cr.priors.Normal(),
    )
    posterior = cr.DeepEnsemble(members=3, steps=1, lr=1e-12).fit(problem, seed=0)
    torch.testing.assert_close(posterior.draws[:, 0], problem.layout.reinitialised(0, 3), rtol=0, atol=1e-6)
    assert float(posterior.draws.abs().max()) == pytest.approx(1.0)  # the gains; an embedding of torch would reach 3


def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    bert = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=200, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
    )
    gpt = transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(vocab_size=200, n_embd=16, n_layer=1, n_head=2, pad_token_id=0)
    )
    for net in (bert, gpt):
        layout = Layout(net)
        found, given = values(layout, layout.reinitialised(0, 2)), dict(net.named_parameters())
        assert layout.start_rules["perturbed"] == []
        for name, value in found.items():
            std = float(given[name].detach().std(correction=0))
            assert float(value[0].std(correction=0)) == pytest.approx(std, rel=0.4)
            assert not torch.equal(value[0], value[1]) or std == 0
    assert {e.name: e.fan_in for e in Layout(gpt).entries}["transformer.h.0.attn.c_attn.weight"] == 16


def test_adapters_of_peft():
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    gpt = transformers.GPT2ForSequenceClassification(
        transformers.GPT2Config(vocab_size=200, n_embd=16, n_layer=1, n_head=2, pad_token_id=0)
    )
    net = peft.get_peft_model(gpt, peft.LoraConfig(r=4, target_modules=["c_attn", "wte"], fan_in_fan_out=True))
    layout = Layout(net, random="*lora*")
    found = values(layout, layout.reinitialised(0, 2))
    assert layout.start_rules["perturbed"] == []
    for name, value in found.items():
        zero = "lora_B" in name or "lora_embedding_A" in name
        assert bool(value.any()) != zero
    fans = {e.name: e.fan_in for e in layout.entries}
    assert [fan for name, fan in fans.items() if "lora_embedding_A" in name] == [1]
