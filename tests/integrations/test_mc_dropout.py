"""MC-Dropout on transformers of Hugging Face and timm as they are: fits, passes by hand, and torch's training mode."""

import pytest
import torch

import credibly as cr
from credibly.core.inputs import call, map_inputs
from credibly.posterior.dropout import draw_masks
from integrations.transformer_networks import bert, distilbert, gpt2, images, labels, tokens, vit

ROWS = 8
NETWORKS = {
    "bert": (bert, tokens, 4, ["bert.encoder.layer.0.attention.self.dropout"]),
    "gpt2": (gpt2, tokens, 3, ["transformer.h.0.attn.attn_dropout"]),
    "distilbert": (distilbert, tokens, 3, ["distilbert.transformer.layer.0.attention.dropout"]),
    "vit": (
        lambda: vit(proj_drop_rate=0.2, attn_drop_rate=0.1),
        images,
        6,
        [f"blocks.{i}.attn.attn_drop" for i in (0, 1)],
    ),
}


def problem_of(net, x):
    return cr.Problem(net, (x, labels(ROWS)), cr.likelihoods.Categorical(), cr.priors.Normal(1.0))


@pytest.mark.parametrize("name", NETWORKS)
def test_fit_and_passes_by_hand(name):
    """One mask per layer and pass, for all rows: the outputs are those of the library's network with hooks."""
    build, rows, sites, uncalled = NETWORKS[name]
    net, x = build(), rows(ROWS)
    posterior = cr.MCDropout(steps=3).fit(problem_of(net, x), seed=0)
    assert len(posterior.rates) == sites
    assert posterior.record.history["dropout_off"]["not called"] == uncalled
    predictive = posterior.predict(x, passes=3, seed=4)
    plan = posterior.plan(x)
    masks = draw_masks(plan.sites, plan.shapes, 3, 4, posterior.theta)
    trained = posterior.module()
    expected = []
    for number in range(3):
        handles = [
            trained.get_submodule(site.name).register_forward_hook(
                lambda _layer, _args, out, mask=masks[site.mask][number]: out * mask
            )
            for site in plan.sites
        ]
        with torch.no_grad():
            expected.append(call(trained, x).softmax(-1))
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(predictive.functions(), torch.stack(expected), rtol=1e-4, atol=1e-5)
    assert not torch.equal(expected[0], expected[1])


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
def test_passes_with_masks_per_row_are_the_librarys_training_mode(name):
    """Moments of one row's probabilities over 3,000 masks; the dropout of attention weights, which stays off, is 0."""
    build, settings = {
        "bert": (bert, {"attention_probs_dropout_prob": 0.0}),
        "gpt2": (gpt2, {"attn_pdrop": 0.0}),
        "vit": (vit, {"proj_drop_rate": 0.2, "drop_rate": 0.1, "pos_drop_rate": 0.1}),
    }[name]
    net = build(**settings)
    x = NETWORKS[name][1](ROWS)
    posterior = cr.MCDropout.from_trained(net, (x, labels(ROWS)), cr.likelihoods.Categorical())
    many = map_inputs(lambda t: t[:1].expand(3000, *t.shape[1:]), x)
    ours = posterior.predict(many, passes=1, seed=1, per_row=True).functions()[0]
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(3)
        theirs = call(net.train(), many).softmax(-1)
    for a, b in ((ours, theirs), ((ours - ours.mean(0)).square(), (theirs - theirs.mean(0)).square())):
        error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
        assert float(((a.mean(0) - b.mean(0)) / error).abs().max()) < 4.5


def test_rates_of_zero_and_stochastic_depth_stay_off_with_a_note(caplog):
    net, x = vit(drop_rate=0.1, drop_path_rate=0.2, attn_drop_rate=0.1), images(ROWS)
    with caplog.at_level("INFO", logger="credibly"):
        posterior = cr.MCDropout(steps=2).fit(problem_of(net, x), seed=0)
    assert posterior.rates == pytest.approx({"head_drop": 0.1})
    off = posterior.record.history["dropout_off"]
    assert "pos_drop" in off["rate 0"]
    assert off["not called"] == ["blocks.0.attn.attn_drop", "blocks.1.attn.attn_drop"]
    assert off["no layer of torch"] == ["blocks.1.drop_path1", "blocks.1.drop_path2"]
    assert "dropout that stays off: pos_drop, " in caplog.text


def test_a_rate_turns_layers_on_that_are_off():
    net, x = vit(), images(ROWS)
    with pytest.raises(cr.InputError, match=r"no dropout layer that is active \(pos_drop, .*: rate 0\).* or rate="):
        cr.MCDropout(steps=2).fit(problem_of(net, x), seed=0)
    named = cr.MCDropout(rate={"head_drop": 0.2}, steps=2).fit(problem_of(net, x), seed=0)
    assert named.rates == pytest.approx({"head_drop": 0.2})
    every = cr.MCDropout.from_trained(net, (x, labels(ROWS)), cr.likelihoods.Categorical(), rate=0.1)
    assert len(every.rates) == 8
    assert set(every.rates.values()) == {0.1}


def test_inserted_before_the_layers_of_gpt2():
    """Its linear layers are `Conv1D`, with the inputs on the first axis of the weight."""
    net, x = gpt2(resid_pdrop=0.0, embd_pdrop=0.0), tokens(ROWS)
    problem = problem_of(net, x)
    posterior = cr.MCDropout(insert="*.mlp.*", rate=0.2, steps=2).fit(problem, seed=0)
    inserted = [name for name in posterior.rates if name.endswith(("c_fc", "c_proj"))]
    assert sorted(inserted) == ["transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj"]
    site = next(s for s in posterior.plan(x).sites if s.name == "transformer.h.0.mlp.c_fc")
    assert (site.weights, site.direct) == (("transformer.h.0.mlp.c_fc.weight",), False)


def test_saving_keeps_what_was_left_off(tmp_path):
    net, x = distilbert(), tokens(ROWS)
    posterior = cr.MCDropout.from_trained(net, (x, labels(ROWS)), cr.likelihoods.Categorical())
    posterior.save(tmp_path / "run")
    again = cr.load(tmp_path / "run", net)
    assert again.rates == posterior.rates
    assert again.record.history["dropout_off"] == posterior.record.history["dropout_off"]
    assert torch.equal(again.predict(x, seed=2).mean, posterior.predict(x, seed=2).mean)
