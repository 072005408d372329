"""Steps on the module itself: the same weights as steps on the flat vector, and the settings that only they have."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.errors import InputError
from credibly.inference.sampling import module_langevin, sgmcmc
from credibly.inference.training import iterates, loop, module_rules, module_step
from credibly.likelihoods import Categorical, Gaussian

f64 = torch.float64
X = randn(40, 3, 6, 6, dtype=f64)
Y = (X.mean((1, 2, 3)) > 0).long()


class Tied(nn.Module):
    """A small convolutional network with tied weights, an unused layer and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.GroupNorm(2, 4)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.unused = nn.Linear(2, 2)
        self.gain = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        h = self.norm(self.first(x)).relu().mean((2, 3)) * self.gain
        return self.head(self.b(torch.tanh(self.a(h))))


def problem(likelihood=None, prior=None, y=Y, **kwargs):
    torch.manual_seed(3)
    net = Tied().to(f64)
    return cr.Problem(net, (X, y), likelihood or Categorical(), prior or cr.priors.Normal(0.7, fan_in=True), **kwargs)


@pytest.fixture
def by_module(monkeypatch):
    """Make every network large; return the steps that were made."""
    made = []

    class Watched(module_step.ModuleStep):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    def switch(on):
        made.clear()
        monkeypatch.setattr(module_step, "LARGE", 1 if on else 10**9)
        monkeypatch.setattr(iterates, "LARGE", 1 if on else 10**9)
        monkeypatch.setattr(iterates, "CHUNK", 16)
        monkeypatch.setattr(loop, "ModuleStep", Watched)
        return made

    return switch


CASES = {
    "map": (cr.MAP(steps=12, batch_size=16, compile=False), {}),
    "all rows": (cr.MAP(steps=8, batch_size=40, compile=False), {}),
    "mle, sgd": (cr.MLE(steps=12, batch_size=16, optimiser="sgd", lr=0.05, compile=False), {}),
    "plain sgd": (cr.MAP(steps=12, batch_size=16, optimiser="sgd", momentum=0.0, lr=0.05, compile=False), {}),
    "clipped": (cr.MAP(steps=12, batch_size=16, clip_norm=0.1, warmup=3, compile=False), {}),
    "moved prior": (cr.MAP(steps=12, batch_size=16, compile=False), {"prior": cr.priors.Normal(0.5, loc=0.3)}),
    "laplace prior": (cr.MAP(steps=12, batch_size=16, compile=False), {"prior": cr.priors.Laplace(0.5)}),
    "two priors": (
        cr.MAP(steps=12, batch_size=16, compile=False),
        {"prior": {"head.*": cr.priors.StudentT(), "*": cr.priors.Normal(2.0)}},
    ),
    "tempered, weighted": (
        cr.MAP(steps=12, batch_size=16, compile=False),
        {"temperature": 0.3, "sample_weight": torch.linspace(0.5, 2, 40)},
    ),
    "head alone": (cr.MAP(steps=12, batch_size=16, compile=False), {"random": "head.*"}),
    "learned noise": (
        cr.MAP(steps=12, batch_size=16, compile=False),
        {"likelihood": Gaussian("learned"), "y": randn(40, 2, dtype=f64)},
    ),
    "validation": (cr.MAP(steps=30, batch_size=8, validation=0.25, patience=2, lr=0.1, compile=False), {}),
    "ensemble": (cr.DeepEnsemble(members=3, steps=12, batch_size=16, compile=False), {}),
    "bootstrap": (cr.DeepEnsemble(members=2, steps=12, batch_size=16, bootstrap=True, compile=False), {}),
    "rotated": (
        cr.DeepEnsemble(members=3, steps=30, batch_size=8, validation=0.25, patience=2, lr=0.1, compile=False),
        {},
    ),
    "anchored": (
        cr.DeepEnsemble(members=2, steps=12, batch_size=16, anchored=True, compile=False),
        {"likelihood": Gaussian(0.4), "y": randn(40, 2, dtype=f64)},
    ),
    "swag": (cr.SWAG(steps=12, batch_size=8, sgd_lr=0.01, every=3, iterates=4, rank=3, compile=False), {}),
    "swag, averages": (cr.SWAG(steps=12, batch_size=8, every=3, iterates=4, rank=3, compile=False), {}),
}


def flat(posterior):
    return posterior.draws if hasattr(posterior, "draws") else posterior.phi


@pytest.mark.parametrize("case", CASES)
def test_module_steps_equal_flat_steps(case, by_module):
    method, options = CASES[case]
    assert not by_module(False)
    reference = method.fit(problem(**options), seed=1)
    made = by_module(True)
    found = method.fit(problem(**options), seed=1)
    assert made
    torch.testing.assert_close(flat(found), flat(reference), rtol=1e-7, atol=1e-9)
    history, expected = found.record.history, reference.record.history
    assert history["step"] == expected["step"]
    torch.testing.assert_close(torch.tensor(history["validation"]), torch.tensor(expected["validation"]))
    if case != "rotated":  # members that have stopped keep their last loss
        torch.testing.assert_close(torch.tensor(history["loss"]), torch.tensor(expected["loss"]))
        for name, values in expected["parts"].items():
            torch.testing.assert_close(torch.tensor(history["parts"][name]), torch.tensor(values))


def test_parameters_change_in_the_backward_pass_where_that_is_safe(by_module):
    """No gradient of the whole network is held then; a network whose backward pass reads old weights is found."""

    class Detached(Tied):
        def forward(self, x):
            # The product's backward pass reads the gain after the gain has its gradient, which comes from the sum.
            h = self.norm(self.first(x)).relu().mean((2, 3)) * self.gain.detach()
            return self.head(h) * self.gain.sum()

    made = by_module(True)
    cr.MAP(steps=2, batch_size=16).fit(problem())
    assert made[-1].in_backward
    assert all(leaf.grad is None for leaf in made[-1].leaves.leaves)
    net = Detached().to(f64)
    changed = cr.Problem(net, (X, Y), Categorical(), cr.priors.Normal())
    by_module(False)
    reference = cr.MAP(steps=5, batch_size=16, compile=False).fit(changed)
    made = by_module(True)
    found = cr.MAP(steps=5, batch_size=16, compile=False).fit(changed)
    assert not made[-1].in_backward
    torch.testing.assert_close(found.draws, reference.draws, rtol=1e-7, atol=1e-9)


def test_the_network_of_the_problem_is_not_changed(by_module):
    by_module(True)
    given = problem()
    before = {name: p.clone() for name, p in given.layout.module.named_parameters()}
    cr.MAP(steps=3, batch_size=16).fit(given)
    for name, p in given.layout.module.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None


@pytest.mark.parametrize("accumulate", [3, 40])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulated_gradients_are_those_of_the_batch(accumulate, clip):
    settings = {"steps": 10, "batch_size": 16, "clip_norm": clip, "compile": False}
    whole = cr.MAP(**settings).fit(problem(sample_weight=torch.linspace(0.5, 2, 40)))
    parts = cr.MAP(**settings, accumulate=accumulate).fit(problem(sample_weight=torch.linspace(0.5, 2, 40)))
    torch.testing.assert_close(parts.draws, whole.draws, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("case", ["map", "mle, sgd", "plain sgd", "two priors", "clipped", "ensemble"])
def test_updates_of_several_parameters_at_a_time_are_the_same(case, by_module, monkeypatch):
    method, options = CASES[case]
    by_module(True)
    one_by_one = method.fit(problem(**options), seed=1)
    monkeypatch.setitem(module_rules.BUCKETS, "cpu", 100)
    torch.testing.assert_close(method.fit(problem(**options), seed=1).draws, one_by_one.draws, rtol=1e-12, atol=0)


def plain_loop(make, steps, factors=None):
    """MAP of the problem by a plain loop on all rows; `make` returns the optimiser of a network."""
    torch.manual_seed(3)
    net = Tied().to(f64)
    rule = make(net)
    rates = [group["lr"] for group in rule.param_groups]
    for t in range(steps):
        for group, rate in zip(rule.param_groups, rates):
            group["lr"] = rate * (1 if factors is None else factors[t])
        rule.zero_grad()
        log_lik = -nn.functional.cross_entropy(net(X), Y, reduction="sum")
        log_prior = sum(torch.distributions.Normal(0.0, 0.7).log_prob(w).sum() for w in net.parameters())
        (-(log_lik + log_prior) / 40).backward()
        rule.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def own(p):
    return torch.optim.AdamW(p, lr=0.01, weight_decay=0.3)


def test_an_optimiser_of_the_users_is_that_of_a_plain_loop():
    given = problem(prior=cr.priors.Normal(0.7))
    expected = plain_loop(lambda net: own(net.parameters()), 8, [1 - t / 8 for t in range(8)])
    found = cr.MAP(steps=8, batch_size=40, optimiser=own, schedule="linear").fit(given)
    torch.testing.assert_close(found.draws[0, 0], expected)
    assert found.record.settings["optimiser"].endswith("test_module_step.own")
    several = cr.DeepEnsemble(members=2, steps=8, batch_size=40, optimiser=own, schedule="linear", init="network")
    torch.testing.assert_close(several.fit(given).draws[:, 0], expected.expand(2, -1))


@pytest.mark.parametrize("optimiser", ["adam", torch.optim.Adam])
def test_learning_rate_groups_are_those_of_a_plain_loop(optimiser):
    def make(net):
        head, others = [], []
        for name, p in net.named_parameters():
            (head if name.startswith("head") else others).append(p)
        return torch.optim.Adam([{"params": head, "lr": 0.05}, {"params": others, "lr": 0.001}])

    settings = {"steps": 8, "batch_size": 40, "schedule": "constant", "lr": {"head.*": 0.05, "*": 0.001}}
    found = cr.MAP(**settings, optimiser=optimiser).fit(problem(prior=cr.priors.Normal(0.7)))
    torch.testing.assert_close(found.draws[0, 0], plain_loop(make, 8))
    assert found.record.settings["lr"] == {"head.*": 0.05, "*": 0.001}


def test_a_callback_sees_the_network_and_stops_training():
    seen = []

    def watch(state):
        seen.append((state.step, state.loss, state.theta, state.network()))
        return state.step >= 6

    posterior = cr.MAP(steps=20, batch_size=16, callback=watch).fit(problem())
    assert [step for step, *_ in seen] == [1, 2, 3, 4, 5, 6]
    assert posterior.record.history["steps"] == 6
    assert [list(loss) for _, loss, _, _ in seen] == posterior.record.history["loss"]
    torch.testing.assert_close(seen[-1][2], posterior.draws[:, 0])
    assert not torch.equal(seen[0][2], seen[-1][2])
    torch.testing.assert_close(seen[-1][3](X).softmax(-1), posterior.predict(X).mean)


def test_mixed_precision_trains_as_full_precision_does_to_its_rounding(by_module):
    """bfloat16 has 8 bits: after a few steps weights differ by about that fraction of the steps."""
    x, y = X.float(), Y
    torch.manual_seed(3)
    net = Tied()
    fits = []
    for precision in (None, "bf16"):
        given = cr.Problem(net, (x, y), Categorical(), cr.priors.Normal(), precision=precision)
        made = by_module(True)
        fits.append(cr.MAP(steps=10, batch_size=40, lr=1e-3).fit(given).draws[0, 0])
        assert made
    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    moved = float((fits[0] - start).norm())
    assert 0 < float((fits[0] - fits[1]).norm()) < 0.2 * moved


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"accumulate": 0}, "accumulate must be a positive integer, got 0"),
        ({"lr": {}}, "lr must have at least one pattern"),
        ({"lr": {"head.*": -1.0}}, r"lr\['head.\*'\] must be a positive number"),
        ({"callback": 3}, "callback must be a function"),
        ({"optimiser": "lion"}, "optimiser must be one of 'adam', 'sgd'"),
        ({"lr": {"head.*": 0.1}}, "no pattern matches parameter"),
        ({"lr": {"tail.*": 0.1, "*": 0.1}}, "'tail.*' matches no parameter"),
        ({"optimiser": lambda p: "adam"}, "must return a torch.optim.Optimizer, got str"),
        ({"optimiser": lambda p: torch.optim.SGD(p[:1], lr=0.1)}, "must optimise the parameters that it is given"),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_settings_that_cannot_be_used_are_refused(settings, message):
    with pytest.raises(InputError, match=message.replace("'tail.*'", r"'tail\.\*'")):
        cr.MAP(steps=3, **settings).fit(problem())


@pytest.mark.parametrize(
    "settings, name",
    [({"accumulate": 2}, "accumulate"), ({"lr": {"*": 0.1}}, "lr"), ({"optimiser": torch.optim.SGD}, "optimiser")],
    ids=["accumulate", "lr", "optimiser"],
)
def test_methods_without_module_steps_refuse_their_settings(settings, name):
    with pytest.raises(InputError, match=f"{name} must be .* for this method or prior"):
        cr.BayesByBackprop(steps=3, **settings).fit(problem())


@pytest.mark.parametrize("method", [cr.SGHMC, cr.SGLD], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "prior", [cr.priors.Normal(0.7, fan_in=True), cr.priors.Laplace(0.5)], ids=["normal", "laplace"]
)
@pytest.mark.parametrize("batch", [16, 40])
def test_chains_on_the_module_are_those_on_the_flat_vector(method, prior, batch, monkeypatch):
    sampler = method(
        chains=2, draws=5, warmup=4, thin=2, batch_size=batch, step_size=1e-3, init="fresh", preconditioner="prior"
    )
    reference = sampler.fit(problem(prior=prior, temperature=0.5), seed=2)
    made = []

    class Watched(module_langevin.ModuleLangevin):
        def __call__(self, *args):
            made.append(1)
            super().__call__(*args)

    monkeypatch.setattr(module_langevin, "LARGE", 1)
    monkeypatch.setattr(module_langevin, "ModuleLangevin", Watched)
    monkeypatch.setattr(sgmcmc, "LARGE", 1)
    found = sampler.fit(problem(prior=prior, temperature=0.5), seed=2)
    assert len(made) == 2 * (4 + 5 * 2)
    torch.testing.assert_close(found.draws, reference.draws, rtol=1e-7, atol=1e-9)
    for name, values in reference.statistics.items():
        torch.testing.assert_close(found.statistics[name], values)
