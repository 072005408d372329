"""BatchNorm of trained networks: statistics fixed where nothing trains them, folded into weights, refused elsewhere."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.networks.layout import Layout
from credibly.networks.statistics import folded

X = randn(40, 3)
Y = X.sum(1) + 0.1 * randn(40, seed=1)
LIKELIHOOD = cr.likelihoods.Gaussian(0.5)


def trained(seed=0, affine=True):
    """A network whose running statistics have seen data, in evaluation mode."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU(), nn.Linear(8, 1))
    optimiser = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(20):
        optimiser.zero_grad()
        (net(X).squeeze(1) - Y).square().mean().backward()
        optimiser.step()
    return net.eval()


def problem(net, **kwargs):
    return cr.Problem(net, (X, Y), LIKELIHOOD, cr.priors.Normal(), **kwargs)


def test_laplace_takes_a_trained_network_as_it_is(tmp_path):
    net = trained()
    posterior = cr.Laplace(start="network").fit(problem(net), seed=0)
    with torch.no_grad():
        assert torch.allclose(posterior.predict(X).mean, net(X).squeeze(1), atol=1e-5)
    assert posterior.record.history["fixed_statistics"] == ["1"]
    reference = cr.Laplace(start="network").fit(problem(cr.replace_batchnorm(net, "frozen")), seed=0)
    assert torch.equal(posterior.predict(X).variance, reference.predict(X).variance)
    posterior.save(tmp_path / "run")
    for given in (None, trained(), trained(seed=3).train()):
        assert torch.equal(cr.load(tmp_path / "run", given).predict(X).mean, posterior.predict(X).mean)


@pytest.mark.parametrize("name", ["map", "ensemble", "bbb", "swag", "dropout", "laplace", "hmc", "sghmc"])
def test_methods_that_change_the_weights_are_refused(name):
    with pytest.raises(cr.InputError, match=r"1 layer keeps batch statistics that would change.*replace_batchnorm"):
        cr.METHODS[name]().fit(problem(trained()), seed=0)


def test_a_network_in_training_mode_is_refused_with_its_data():
    with pytest.raises(cr.InputError, match="keeps batch statistics.*replace_batchnorm"):
        problem(trained().train())
    with pytest.raises(cr.InputError, match="keeps batch statistics.*replace_batchnorm"):
        problem(trained().train(), random="0.*")


@pytest.mark.parametrize("mode", [True, False])
def test_statistics_before_all_random_parameters_are_fixed(mode):
    net = trained().train(mode)
    found = problem(net, random="3.*")
    assert found.moving == ()
    posterior = cr.MAP(steps=20).fit(found, seed=0)
    assert posterior.record.history["fixed_statistics"] == ["1"]
    assert posterior.record.history["frozen_body"]["boundary"].startswith("input of 3")
    features = net.eval()[:3](X)
    by_hand = cr.MAP(steps=20).fit(
        cr.Problem(nn.Sequential(net[3]), (features, Y), LIKELIHOOD, cr.priors.Normal()), seed=0
    )
    assert torch.allclose(posterior.draws, by_hand.draws, atol=1e-4)


@pytest.mark.parametrize("affine", [True, False])
def test_folded_statistics_compute_the_same(affine):
    net = trained(affine=affine)
    new = folded(net)
    assert torch.allclose(new(X), net(X), atol=1e-5)
    assert bool((new[1].running_mean == 0).all())
    assert folded(new) is new


class TestFromTrained:
    @pytest.mark.parametrize("affine", [True, False])
    def test_members_predict_what_the_networks_do(self, tmp_path, affine):
        nets = [trained(seed, affine) for seed in range(3)]
        ensemble = cr.DeepEnsemble.from_trained(nets, (X, Y), LIKELIHOOD)
        functions = ensemble.predict(X).functions()
        with torch.no_grad():
            for member, net in zip(functions, nets):
                assert torch.allclose(member, net(X).squeeze(1), atol=1e-5)
        assert ensemble.record.history["from_trained"] is True
        assert (ensemble.record.method, ensemble.record.settings["members"]) == ("ensemble", 3)
        ensemble.save(tmp_path / "run")
        assert torch.equal(cr.load(tmp_path / "run").predict(X).mean, ensemble.predict(X).mean)
        assert torch.equal(cr.load(tmp_path / "run", nets[1]).predict(X).mean, ensemble.predict(X).mean)

    @pytest.mark.parametrize("name", ["mle", "map"])
    def test_a_checkpoint_is_a_point_estimate(self, name):
        net = trained()
        posterior = cr.METHODS[name].from_trained(net, (X, Y), cr.likelihoods.Gaussian())
        with torch.no_grad():
            residual = net(X).squeeze(1) - Y
            assert torch.allclose(posterior.predict(X).mean, net(X).squeeze(1), atol=1e-5)
        assert posterior.record.method == name
        # The mode of the noise is near the root mean square of the residuals: its prior is worth a row or so of 40.
        found = float(posterior.predict(X).aleatoric.sqrt()[0])
        assert found == pytest.approx(float(residual.square().mean().sqrt()), rel=0.1)

    @pytest.mark.parametrize(
        "wrapper",
        [nn.DataParallel, torch.compile, lambda net: nn.Sequential(torch.compile(net[0]), *net[1:])],
        ids=["DataParallel", "compile", "inside"],
    )
    def test_the_modules_inside_wrappers_are_used(self, wrapper):
        nets = [trained(seed) for seed in range(2)]
        expected = cr.DeepEnsemble.from_trained(nets, (X, Y), LIKELIHOOD).draws
        # One network may be wrapped and the other not.
        found = cr.DeepEnsemble.from_trained([wrapper(nets[0]), nets[1]], (X, Y), LIKELIHOOD)
        assert torch.equal(found.draws, expected)
        point = cr.MAP.from_trained(wrapper(nets[0]), (X, Y), LIKELIHOOD)
        assert torch.equal(point.draws[0], expected[0])
        assert torch.equal(Layout(nets[0]).read(wrapper(nets[0])), Layout(nets[0]).read(nets[0]))

    def test_frozen_parameters_stay_fixed_where_they_are_equal(self):
        nets = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]
        nets[1].load_state_dict(nets[0].state_dict())
        for net in nets:
            net[0].requires_grad_(False)
            nn.init.normal_(net[2].weight)
        posterior = cr.DeepEnsemble.from_trained(nets, (X, Y), LIKELIHOOD)
        assert [e.name for e in posterior.layout.entries] == ["2.weight", "2.bias"]
        nn.init.normal_(nets[1][0].bias)
        posterior = cr.DeepEnsemble.from_trained(nets, (X, Y), LIKELIHOOD)
        assert [e.name for e in posterior.layout.entries] == ["0.bias", "2.weight", "2.bias"]
        with torch.no_grad():
            assert torch.allclose(posterior.predict(X).functions()[1], nets[1](X).squeeze(1), atol=1e-6)

    def test_a_frozen_network_is_taken_whole(self):
        posterior = cr.MAP.from_trained(trained().requires_grad_(False), (X, Y), LIKELIHOOD)
        assert posterior.layout.dim == 32 + 16 + 9

    def test_other_architectures_are_refused(self):
        other = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(4, 1))
        with pytest.raises(cr.InputError, match=r"nets\[1\]: its tensor '3.weight' has shape \(1, 4\)"):
            cr.DeepEnsemble.from_trained([trained(), other], (X, Y), LIKELIHOOD)
        with pytest.raises(cr.InputError, match="nets must be a list of one network or more, got Sequential"):
            cr.DeepEnsemble.from_trained(trained(), (X, Y), LIKELIHOOD)
        with pytest.raises(cr.InputError, match="nets must be a list of one network or more, got an empty one"):
            cr.DeepEnsemble.from_trained([], (X, Y), LIKELIHOOD)
        with pytest.raises(cr.InputError, match=r"nets\[0\].* must be a torch.nn.Module"):
            cr.DeepEnsemble.from_trained([3], (X, Y), LIKELIHOOD)
