"""Heads of pretrained networks as their libraries build them: the body is computed once, with the same results."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.core.inputs import call, map_inputs
from credibly.frozen.body import split
from credibly.networks.layout import Layout

pytestmark = pytest.mark.filterwarnings("ignore")
IMAGES = randn(6, 3, 32, 32)
IDS = torch.randint(1, 50, (6, 7), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(6, 7, dtype=torch.int64)
MASK[:, 5:] = 0
TEXT = {"input_ids": IDS, "attention_mask": MASK}
LABELS = torch.arange(6) % 3


def resnet():
    torchvision = pytest.importorskip("torchvision", reason="needs torchvision")
    return torchvision.models.resnet18(num_classes=3).eval()


def vit():
    timm = pytest.importorskip("timm", reason="needs timm")
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=3)


def bert():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=8, num_labels=3, **sizes)
    return transformers.BertForSequenceClassification(config)


def gpt2():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=3, n_head=2, num_labels=3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2ForSequenceClassification(config)


CASES = {
    "ResNet-18, fc": (resnet, IMAGES, "fc.*", "input of fc (512 values per row)"),
    "ResNet-18, a late convolution": (resnet, IMAGES, ("layer4.1.conv2.*", "fc.*"), "input of layer4.1.conv2"),
    "ViT, head": (vit, IMAGES, "head.*", "input of head (192 values per row)"),
    "ViT, last block": (vit, IMAGES, ("blocks.2.mlp.*", "head.*"), "input of blocks.2.mlp.fc1"),
    "BERT, classifier": (bert, TEXT, "classifier.*", "input of classifier (16 values per row)"),
    "BERT, last layer": (bert, TEXT, ("bert.encoder.layer.2.*", "classifier.*"), "input of bert"),
    "GPT-2, score": (gpt2, TEXT, "score.*", "input of score"),
    "GPT-2, last block": (gpt2, TEXT, ("transformer.h.2.*", "score.*"), "input of transformer"),
}


def make(name):
    build, x, random, where = CASES[name]
    torch.manual_seed(0)
    return build(), x, random, where


@pytest.mark.parametrize("name", CASES)
def test_head_of_body_is_the_network(name):
    net, x, random, where = make(name)
    layout = Layout(net, random)
    body = split(layout, layout.module, x)
    assert body.where.startswith(where)
    some = map_inputs(lambda t: t[2:6], x)
    with torch.no_grad():
        assert torch.equal(call(body.head, body(some)), call(layout.module, some))


@pytest.mark.parametrize("name", CASES)
def test_density_and_gradient_are_those_of_the_network(name):
    net, x, random, _ = make(name)
    whole = cr.Problem(net, (x, LABELS), cr.likelihoods.Categorical(), cr.priors.Normal(), random=random)
    if whole.moving:
        net = cr.replace_batchnorm(net, "frozen")
        whole = cr.Problem(net, (x, LABELS), cr.likelihoods.Categorical(), cr.priors.Normal(), random=random)
    part = whole.reduced()
    assert part.whole is whole
    theta = whole.layout.read(whole.layout.module).expand(2, -1)
    mine, theirs = part.log_density_and_grad(theta), whole.log_density_and_grad(theta)
    # Float32 through up to 18 layers, in another memory layout.
    assert torch.allclose(mine.log_density, theirs.log_density, rtol=1e-5)
    assert torch.allclose(mine.gradient, theirs.gradient, atol=1e-4 * float(theirs.gradient.abs().max()))


@pytest.fixture(scope="module")
def trained_resnet():
    torch.manual_seed(0)
    return resnet()


def test_laplace_on_a_resnet_as_it_is():
    trained_resnet = resnet()
    del trained_resnet.layer4, trained_resnet.layer3[1]  # a tenth of the parameters
    trained_resnet.layer4, trained_resnet.fc = nn.Identity(), nn.Linear(256, 3)
    problem = cr.Problem(trained_resnet, (IMAGES, LABELS), cr.likelihoods.Categorical(), cr.priors.Normal())
    posterior = cr.Laplace(start="network", random="last layer", structure="diag").fit(problem, seed=0)
    assert len(posterior.record.history["fixed_statistics"]) == 13
    assert posterior.count == 256 * 3 + 3
    with torch.no_grad():
        expected = trained_resnet(IMAGES)
    assert torch.allclose(posterior.module()(IMAGES), expected, atol=1e-4)
    with pytest.raises(cr.InputError, match="13 layers keep batch statistics"):
        cr.MAP(steps=1).fit(problem)


@pytest.mark.parametrize(
    "method",
    [
        cr.MAP(steps=20, init="network"),
        cr.Laplace(start="network"),
        cr.BayesByBackprop(steps=20),
        cr.HMC(chains=1, warmup=20, draws=3, max_steps=5, init="network", compile=False),
        cr.SGHMC(chains=1, warmup=5, draws=3, thin=1, init="network", step_size=1e-3),
    ],
    ids=lambda method: method.name,
)
def test_a_resnet_head_is_a_linear_model_on_its_features(method, trained_resnet):
    body = cr.replace_batchnorm(trained_resnet, "frozen")
    head, body.fc = body.fc, nn.Identity()
    parts = (cr.likelihoods.Categorical(), cr.priors.Normal())
    ours = cr.Problem(trained_resnet, (IMAGES, LABELS), *parts, random="fc.*")
    features = ours.reduced().x
    with torch.no_grad():
        assert torch.allclose(features, body(IMAGES), atol=1e-5)
    by_hand = cr.Problem(nn.Sequential(head), (features, LABELS), *parts)
    mine, theirs = (method.fit(problem, seed=0) for problem in (ours, by_hand))
    assert torch.equal(mine.predict(IMAGES).mean, theirs.predict(features).mean)


def test_an_ensemble_of_trained_resnets(trained_resnet):
    torch.manual_seed(1)
    nets = [trained_resnet, resnet()]
    nets[1].bn1.running_mean += 0.1
    ensemble = cr.DeepEnsemble.from_trained(nets, (IMAGES, LABELS), cr.likelihoods.Categorical())
    with torch.no_grad():
        expected = torch.stack([net(IMAGES).softmax(-1) for net in nets])
    assert torch.allclose(ensemble.predict(IMAGES).functions(), expected, atol=1e-4)
