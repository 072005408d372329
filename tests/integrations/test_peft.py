"""Adapters of peft as problems: what is random, every method, Laplace by brute force, and storage."""

import math

import pytest
import torch
from torch.func import functional_call, jacrev
from torch.nn.attention import SDPBackend, sdpa_kernel

import credibly as cr
from integrations.transformer_networks import CLASSES, bert, gpt2, labels, tokens

peft = pytest.importorskip("peft")
ROWS, RANK, DRAWS = 12, 2, 150
X, Y = tokens(ROWS), labels(ROWS)
METHODS = {
    "map": cr.MAP(steps=4),
    "laplace": cr.Laplace(steps=4),
    "last layer": cr.Laplace(steps=4, random="last layer"),
    "bbb": cr.BayesByBackprop(steps=4),
    "swag": cr.SWAG(steps=4, iterates=3, rank=2, every=1),
    "ensemble": cr.DeepEnsemble(members=2, steps=4),
    "sghmc": cr.SGHMC(chains=1, warmup=4, draws=2, init="network"),
    "hmc": cr.HMC(chains=2, warmup=20, draws=2, trajectory_length=0.02, max_steps=3, init="network"),
}


def adapted(build=bert, **settings):
    targets = {bert: ["query", "value"], gpt2: ["c_attn"]}[build]
    transposed = {"fan_in_fan_out": True} if build is gpt2 else {}
    lora = peft.LoraConfig(
        task_type="SEQ_CLS", r=RANK, lora_alpha=4, target_modules=targets, lora_dropout=0.1, **transposed
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return peft.get_peft_model(build(**settings), lora)


@pytest.fixture(scope="module")
def net():
    return adapted()


@pytest.fixture(scope="module")
def problem(net):
    return cr.peft.problem(net, (X, Y))


def with_some_weights(net, seed=0):
    """A copy whose lora_B, which starts at zero, has other values."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return net


def test_the_adapter_and_the_head_are_random(net, problem):
    lora = 2 * 2 * RANK * 8  # A and B of query and value, width 8
    assert problem.dim == lora + CLASSES * 8 + CLASSES
    assert problem.dim == sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert set(cr.peft.adapter_parameters(net)) == {e.name for e in problem.layout.entries}


def test_the_outputs_are_the_models_logits_under_any_adapter(net, problem):
    """Computed by the model itself, with the labels as a user of transformers passes them."""
    theta = 0.3 * torch.randn(problem.dim, generator=torch.Generator().manual_seed(3))
    model = adapted().eval()
    model.load_state_dict(problem.layout.write(theta).state_dict())
    with torch.no_grad():
        expected = model(**X, labels=Y)
    found = problem.log_likelihood_rows(theta.unsqueeze(0), problem.x, problem.y)
    assert float(-found.mean()) == pytest.approx(float(expected.loss), rel=1e-5)
    assert not torch.equal(expected.logits, net(**X).logits)


def test_data_as_transformers_has_it(net, problem):
    """A dict with the labels inside, a BatchEncoding, and lists of a tokenizer."""
    transformers = pytest.importorskip("transformers")
    fingerprint = problem.fingerprint()
    batch = transformers.BatchEncoding({**X, "labels": Y})
    lists = {name: value.tolist() for name, value in X.items()}
    for data in ({**X, "labels": Y}, {**X, "label": Y}, batch, (lists, Y.tolist())):
        assert cr.peft.problem(net, data).fingerprint() == fingerprint


def test_the_likelihood_follows_the_configuration():
    assert isinstance(cr.peft.problem(adapted(), (X, Y)).likelihood, cr.likelihoods.Categorical)
    real = adapted(problem_type="regression")
    real.config.num_labels = 1
    targets = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(0))
    assert isinstance(cr.peft.problem(real, (X, targets)).likelihood, cr.likelihoods.Gaussian)
    several = cr.peft.problem(adapted(problem_type="multi_label_classification"), (X, (targets > 0).float()))
    assert isinstance(several.likelihood, cr.likelihoods.Bernoulli)
    chosen = cr.peft.problem(adapted(), (X, targets), cr.likelihoods.Gaussian(0.5), cr.priors.Normal(0.1))
    assert chosen.likelihood.scale == 0.5


@pytest.mark.parametrize("name", METHODS)
def test_every_method(name, problem):
    posterior = METHODS[name].fit(problem, seed=0, progress=False)
    p = posterior.predict(X)
    assert p.probabilities.shape == (ROWS, CLASSES)
    assert bool(torch.isfinite(p.log_prob(Y)).all())


def test_mc_dropout_takes_the_rates_of_the_adapter():
    kept = cr.peft.problem(adapted(), (X, Y), dropout=True)
    posterior = cr.MCDropout(steps=3).fit(kept, seed=0, progress=False)
    assert sum("lora_dropout" in name for name in posterior.rates) == 2
    sampled = cr.SGHMC(chains=1, warmup=4, draws=2).fit(kept, seed=0, progress=False)
    off = sampled.record.history["dropout_off"]["evaluation mode"]
    assert sum("lora_dropout" in name for name in off) == 2


def test_members_of_an_ensemble_start_apart(problem):
    """B and the bias of the head start at zero in all of them; A and the head differ."""
    starts = problem.layout.reinitialised(0, 3)
    for entry in problem.layout.entries:
        values = starts[:, entry.start : entry.stop]
        differ = not torch.equal(values[0], values[1])
        assert differ == (
            entry.name.endswith(("lora_A.default.weight", "default.weight")) and "lora_B" not in entry.name
        )


@pytest.mark.parametrize("build", [bert, gpt2])
def test_laplace_is_the_brute_force_gauss_newton_matrix(build):
    """P = sum_i J_i' (diag(p) - p p') J_i + prior, with Jacobians of the model's logits by torch.func, in float64."""
    net = with_some_weights(adapted(build).double().eval())
    problem = cr.peft.problem(net, (X, Y), prior=cr.priors.Normal(0.7))
    theta = problem.layout.read(net)
    posterior = cr.Laplace(start=theta, structure="full").fit(problem, seed=0, progress=False)
    names = [e.name for e in problem.layout.entries]
    values = {name: p.detach() for name, p in net.named_parameters() if name in names}
    # Plain matrix products: the fused attention has no rule for several gradients at once.
    with sdpa_kernel(SDPBackend.MATH):
        jacobian = jacrev(lambda v: functional_call(net, v, args=(), kwargs=X).logits)(values)
    flat = torch.cat([jacobian[name].reshape(ROWS, CLASSES, -1) for name in names], -1)
    with torch.no_grad():
        p = net(**X).logits.softmax(-1)
    fisher = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    precision = torch.einsum("nkd,nkl,nle->de", flat, fisher, flat) + torch.eye(problem.dim).double() / 0.7**2
    torch.testing.assert_close(posterior.covariance(), torch.linalg.inv(precision), rtol=1e-6, atol=1e-8)
    # The linearised predictive: the covariance of a row's logits is J P^-1 J'.
    joint = posterior.predict(X, joint=True, draws=DRAWS, seed=1)
    outputs = joint.source.outputs(joint.x, 0, DRAWS)
    expected = torch.einsum("nkd,de,nke->nk", flat, torch.linalg.inv(precision), flat)
    # The variance of a variance of S normal draws is 2 v^2 / S.
    assert float(((outputs.var(0) / expected - 1).abs() / math.sqrt(2 / DRAWS)).max()) < 4.5


def test_kronecker_factors_cover_the_adapter(problem):
    posterior = cr.Laplace(start=problem.layout.read(with_some_weights(adapted()))).fit(problem, progress=False)
    kinds = {block.source.split(".")[-2]: block.kind for block in posterior.precision_blocks}
    assert kinds == {"lora_A": "kron", "lora_B": "kron", "modules_to_save": "kron"}
    assert posterior.count == problem.dim


def test_saving_and_loading(problem, net, tmp_path):
    posterior = cr.Laplace(steps=4).fit(problem, seed=0, progress=False)
    posterior.save(tmp_path / "run")
    again = cr.load(tmp_path / "run", adapted())
    assert torch.equal(again.predict(X).probabilities, posterior.predict(X).probabilities)
    model = posterior.module()
    model.save_pretrained(tmp_path / "adapter")
    read = peft.PeftModel.from_pretrained(bert(), tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(read(**X).logits, model.eval()(**X).logits)


def test_temperature_scaling_of_any_posterior(problem):
    posterior = cr.MAP(steps=4).fit(problem, seed=0, progress=False)
    scaled = posterior.calibrate(X, Y, probabilities="temperature")
    plain, mapped = posterior.predict(X), scaled.predict(X)
    assert float(mapped.log_prob(Y).mean()) >= float(plain.log_prob(Y).mean())
    assert torch.equal(mapped.probabilities.argmax(-1), plain.probabilities.argmax(-1))


@pytest.mark.parametrize(
    "model, data, message",
    [
        (lambda: bert(), (X, Y), "model: is a BertForSequenceClassification without an adapter.*get_peft_model"),
        (lambda: 3, (X, Y), "model must be a model with an adapter of peft, got int"),
        (lambda: adapted().requires_grad_(False), (X, Y), "an adapter without trainable parameters.*is_trainable=True"),
        (adapted, X, r"data: is a dict without labels \(input_ids, attention_mask\).*add \"labels\""),
    ],
    ids=["no adapter", "no model", "frozen", "no labels"],
)
def test_refusals(model, data, message):
    with pytest.raises(cr.InputError, match=message):
        cr.peft.problem(model(), data)
