"""Networks as JSON and back: the same keys, shapes, dtype and bits; unknown layers are refused by name both ways."""

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import credibly as cr
from conftest import randn
from credibly.networks import zoo
from credibly.networks.blueprint import DEEPEST, build_network, describe_network, why_not
from credibly.networks.layer_table import LAYERS, TABLE
from credibly.networks.layout import Layout
from credibly.networks.normalisation import FilterResponseNorm, FrozenBatchNorm, replace_batchnorm
from credibly.networks.tabular import PeriodicEmbedding

IMAGE = (2, 4, 6, 6)

# Every layer of the table, with arguments other than the defaults, and the shape of an input.
CASES = [
    (nn.Identity(), (2, 3)),
    (nn.Linear(3, 4, bias=False), (2, 3)),
    (nn.Bilinear(3, 4, 2, bias=False), ((2, 3), (2, 4))),
    (nn.Embedding(7, 3, padding_idx=-1, norm_type=1.5, scale_grad_by_freq=True, sparse=True), "tokens"),
    (nn.Embedding(7, 3, max_norm=0.5), "tokens"),
    (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2, padding_mode="circular"), (2, 4, 9)),
    (nn.Conv2d(4, 6, (3, 5), padding="same", bias=False), IMAGE),
    (nn.Conv3d(2, 3, 2, stride=(1, 2, 1), padding=(1, 0, 1)), (2, 2, 4, 4, 4)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2), (2, 4, 5)),
    (nn.ConvTranspose2d(4, 3, (3, 2), stride=(2, 1), bias=False), IMAGE),
    (nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 3, 3)),
    (nn.MaxPool1d(2, stride=1, padding=1, dilation=2, ceil_mode=True), (2, 4, 9)),
    (nn.MaxPool2d((3, 2), 2), IMAGE),
    (nn.MaxPool3d(2), (2, 2, 4, 4, 4)),
    (nn.AvgPool1d(3, 2, 1, ceil_mode=True, count_include_pad=False), (2, 4, 8)),
    (nn.AvgPool2d((3, 2), 2, 1, divisor_override=5), IMAGE),
    (nn.AvgPool3d(2), (2, 2, 4, 4, 4)),
    (nn.LPPool1d(4, 2), (2, 4, 8)),
    (nn.LPPool2d(2.0, (2, 3), stride=1, ceil_mode=True), IMAGE),
    (nn.LPPool3d(2, 2), (2, 2, 4, 4, 4)),
    (nn.AdaptiveAvgPool1d(3), (2, 4, 8)),
    (nn.AdaptiveAvgPool2d((None, 3)), IMAGE),
    (nn.AdaptiveAvgPool3d((2, 1, 3)), (2, 2, 4, 4, 4)),
    (nn.AdaptiveMaxPool1d(3), (2, 4, 8)),
    (nn.AdaptiveMaxPool2d(2), IMAGE),
    (nn.AdaptiveMaxPool3d((2, 1, 3)), (2, 2, 4, 4, 4)),
    (nn.Dropout(0.2), (2, 3)),
    (nn.Dropout1d(0.2, inplace=True), (2, 3, 4)),
    (nn.Dropout2d(0.2), IMAGE),
    (nn.Dropout3d(0), (2, 2, 4, 4, 4)),
    (nn.AlphaDropout(0.2), (2, 3)),
    (nn.FeatureAlphaDropout(0.2), IMAGE),
    (nn.Flatten(2, 3), IMAGE),
    (nn.Unflatten(1, (2, -1)), IMAGE),
    (nn.ZeroPad1d(2), (2, 4, 3)),
    (nn.ZeroPad2d((0, 1, 2, 3)), IMAGE),
    (nn.ZeroPad3d(1), (2, 2, 4, 4, 4)),
    (nn.ConstantPad1d(1, 0.5), (2, 4, 3)),
    (nn.ConstantPad2d((1, 2, 0, 1), -3), IMAGE),
    (nn.ConstantPad3d(1, 2.0), (2, 2, 4, 4, 4)),
    (nn.ReflectionPad1d((1, 2)), (2, 4, 5)),
    (nn.ReflectionPad2d(1), IMAGE),
    (nn.ReflectionPad3d(1), (2, 2, 4, 4, 4)),
    (nn.ReplicationPad1d((1, 2)), (2, 4, 5)),
    (nn.ReplicationPad2d(1), IMAGE),
    (nn.ReplicationPad3d(1), (2, 2, 4, 4, 4)),
    (nn.CircularPad1d((1, 2)), (2, 4, 5)),
    (nn.CircularPad2d(1), IMAGE),
    (nn.CircularPad3d(1), (2, 2, 4, 4, 4)),
    (nn.PixelShuffle(2), IMAGE),
    (nn.PixelUnshuffle(3), IMAGE),
    (nn.Upsample(scale_factor=(2.0, 1.5), mode="bilinear", align_corners=True, recompute_scale_factor=False), IMAGE),
    (nn.Upsample(size=9), (2, 4, 5)),
    (nn.LayerNorm((4, 6, 6), eps=1e-3, bias=False), IMAGE),
    (nn.LayerNorm(6, elementwise_affine=False), IMAGE),
    (nn.RMSNorm(6, eps=0.1), IMAGE),
    (nn.RMSNorm([6, 6], elementwise_affine=False), IMAGE),
    (nn.GroupNorm(2, 4, eps=0.1), IMAGE),
    (nn.GroupNorm(4, 4, affine=False), IMAGE),
    (nn.LocalResponseNorm(2, 0.1, 0.5, 2.0), IMAGE),
    (nn.InstanceNorm1d(4, eps=0.1, momentum=0.2, affine=True), (2, 4, 5)),
    (nn.InstanceNorm2d(4), IMAGE),
    (nn.InstanceNorm3d(2), (2, 2, 4, 4, 4)),
    (nn.ReLU(inplace=True), (2, 3)),
    (nn.ReLU6(), (2, 3)),
    (nn.SELU(), (2, 3)),
    (nn.SiLU(), (2, 3)),
    (nn.Mish(), (2, 3)),
    (nn.Hardsigmoid(), (2, 3)),
    (nn.Hardswish(), (2, 3)),
    (nn.ELU(0.3), (2, 3)),
    (nn.CELU(0.3), (2, 3)),
    (nn.Sigmoid(), (2, 3)),
    (nn.LogSigmoid(), (2, 3)),
    (nn.Tanh(), (2, 3)),
    (nn.Tanhshrink(), (2, 3)),
    (nn.Softsign(), (2, 3)),
    (nn.Softmax2d(), IMAGE),
    (nn.Softmax(-2), IMAGE),
    (nn.LogSoftmax(1), (2, 3)),
    (nn.Softmin(0), (2, 3)),
    (nn.Softshrink(0.2), (2, 3)),
    (nn.Hardshrink(0.2), (2, 3)),
    (nn.GLU(1), (2, 4)),
    (nn.GELU("tanh"), (2, 3)),
    (nn.LeakyReLU(0.3), (2, 3)),
    (nn.RReLU(0.1, 0.2), (2, 3)),
    (nn.PReLU(4, 0.1), IMAGE),
    (nn.Softplus(2.0, 3), (2, 3)),
    (nn.Hardtanh(-0.5, 0.3), (2, 3)),
    (nn.Threshold(0.1, -7.0), (2, 3)),
    (FilterResponseNorm(4, eps=0.1, threshold=True), IMAGE),
    (FilterResponseNorm(4, affine=False), IMAGE),
    (PeriodicEmbedding(6, [0, 4], frequencies=3, width=2, scale=0.5, limit=3.0), (5, 6)),
    (FrozenBatchNorm(6, eps=0.1, channel_axis=-1), IMAGE),
    (FrozenBatchNorm(4, affine=False), IMAGE),
    (zoo.UnrolledLSTM(3, 5, forget_bias=0.5, sequence=False), (2, 4, 3)),
    (zoo.resnet20_frn(3, 4, "tanh", 2, threshold=False), IMAGE),
    (zoo.cnn_lstm(7, 2, 3, 2, 2, 4, 3, "relu", forget_bias=0), "tokens"),
]


def inputs(shape):
    if shape == "tokens":
        return (torch.arange(12).reshape(2, 6) % 7,)
    shapes = shape if isinstance(shape[0], tuple) else (shape,)
    return tuple(randn(*s, seed=i) for i, s in enumerate(shapes))


def scrambled(net):
    """Fill every parameter and buffer with distinct values (positive, for the variances)."""
    with torch.no_grad():
        for i, tensor in enumerate((*net.parameters(), *net.buffers())):
            tensor.copy_(randn(*tensor.shape, seed=i).abs() + 0.1)
    return net


def through_json(net):
    """Return the network rebuilt from the text of its blueprint, before values are loaded."""
    blueprint = describe_network(net)
    assert blueprint is not None, why_not(net)
    assert why_not(net) is None
    text = json.dumps(blueprint, allow_nan=False, sort_keys=True)
    assert json.loads(text) == blueprint  # plain values only
    return build_network(json.loads(text))


def assert_same(net, x):
    new = through_json(net)
    here, there = net.state_dict(), new.state_dict()
    assert list(there) == list(here)
    assert [(t.shape, t.dtype, t.device.type) for t in there.values()] == [
        (t.shape, t.dtype, "cpu") for t in here.values()
    ]
    assert [n for n, _ in new.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert repr(new) == repr(net)
    new.load_state_dict(here)
    expected = net.eval()(*(v.clone() for v in x))
    assert torch.equal(new.eval()(*(v.clone() for v in x)), expected)


@pytest.mark.parametrize("layer, shape", CASES, ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "")
def test_every_layer_round_trips(layer, shape):
    assert_same(scrambled(layer), inputs(shape))


def test_every_layer_of_the_table_is_tested():
    assert {type(layer) for layer, _ in CASES} == set(TABLE) == set(LAYERS.values())


def test_a_network_of_named_and_nested_modules():
    net = nn.Sequential()
    net.add_module("body", nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), FilterResponseNorm(4), nn.SiLU()))
    net.add_module("empty", nn.Sequential())
    net.add_module("10", nn.Flatten())  # after "body" and before "2": the order is kept, not sorted
    net.add_module("2", nn.Linear(4 * 25, 3))
    assert_same(scrambled(net), (randn(2, 1, 5, 5),))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype_is_part_of_it(dtype):
    net = zoo.mlp(3, (4,), 2).to(dtype)
    assert_same(net, (randn(5, 3).to(dtype),))
    assert {p.dtype for p in through_json(net).parameters()} == {dtype}


def test_zoo_networks_and_replaced_norms_round_trip():
    x = randn(2, 3, 28, 28)
    assert_same(scrambled(zoo.lenet(7, 3)), (x,))
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    for by in ("frozen", "group", "frn"):
        assert_same(replace_batchnorm(plain, by), (x,))


def test_a_layer_used_twice_stays_shared():
    act, shared = nn.Tanh(), nn.Linear(4, 4)
    net = nn.Sequential(nn.Linear(3, 4), act, shared, act, nn.Sequential(shared, act), nn.Linear(4, 1))
    assert_same(net, (randn(5, 3),))
    new = through_json(net)
    assert new[1] is new[3] is new[4][1]
    assert new[2] is new[4][0]
    assert Layout(new).dim == Layout(net).dim == 16 + 20 + 5


def test_numpy_scalars_count_as_numbers():
    net = nn.Sequential(nn.Linear(np.int64(3), int(np.prod([2, 2]))), nn.Dropout(np.float64(0.5)))
    assert_same(net, (randn(5, 3),))


def test_the_module_of_a_layout_can_be_described():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(4, 2)).double()
    layout = Layout(net)
    again = Layout(through_json(layout.module))
    assert again.signature() == layout.signature()
    theta = layout.reinitialised(3, 2)
    assert torch.equal(again.reinitialised(3, 2), theta)
    x = randn(5, 3, dtype=torch.float64)
    assert torch.equal(again.call(theta[0], x), layout.call(theta[0], x))


def test_describing_changes_nothing():
    net, state = zoo.resnet20_frn(3, 1, width=2), torch.get_rng_state()
    before = copy.deepcopy(net.state_dict())
    build_network(describe_network(net))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


def test_building_is_deterministic_with_finite_values():
    blueprint = describe_network(zoo.cnn_lstm(7, 2, 3, 2, 2, 4))
    first, second = build_network(blueprint).state_dict(), build_network(blueprint).state_dict()
    assert all(torch.equal(first[k], second[k]) and first[k].isfinite().all() for k in first)


def test_built_on_the_cpu_whatever_the_default():
    blueprint = describe_network(nn.Linear(2, 3))
    with torch.device("meta"):
        assert build_network(blueprint).weight.device.type == "cpu"


# What cannot be described


class Mine(nn.Module):
    def forward(self, x):
        return x


class Louder(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Row(nn.Sequential):
    pass


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def hooked(register):
    net = zoo.mlp(3)
    register(net[2])
    return net


def parametrised():
    net = zoo.mlp(3)
    nn.utils.parametrize.register_parametrization(net[2], "weight", Doubled())
    return net


def changed(net, path, **attributes):
    for name, value in attributes.items():
        setattr(net.get_submodule(path), name, value)
    return net


def tied():
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[2].weight = net[0].weight
    return net


def blocks_shared():
    net = zoo.resnet20_frn(3, 1, width=2)
    net.blocks[2] = net.blocks[1]
    return net


def with_buffer():
    net = zoo.mlp(3)
    net.register_buffer("shift", torch.zeros(1))
    return net


def deep(levels):
    net = nn.Sequential(nn.Linear(1, 1))
    for _ in range(levels):
        net = nn.Sequential(net)
    return net


def endless():
    net = nn.Sequential(nn.Linear(1, 1))
    net.add_module("again", net)
    return net


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: nn.Sequential(nn.Linear(1, 1), Mine()), r"layer '1' \(Mine\) is not a known layer"),
        (lambda: Mine(), r"the network \(Mine\) is not a known layer"),
        (lambda: nn.Sequential(nn.Sequential(Louder(1, 1))), r"layer '0.0' \(Louder\) is a subclass of a known layer"),
        (lambda: Row(nn.Linear(1, 1)), r"the network \(Row\) is a subclass of a known layer"),
        (lambda: nn.LSTM(2, 3), "LSTM.* is not a known layer"),
        (lambda: nn.Sequential(nn.BatchNorm1d(2)), r"layer '0' \(BatchNorm1d\) is not a known layer"),
        (lambda: hooked(lambda m: m.register_forward_hook(lambda *_: None)), r"layer '2' \(Linear\) has hooks"),
        (lambda: hooked(lambda m: m.register_forward_pre_hook(lambda *_: None)), "'2'.* has hooks"),
        (lambda: hooked(lambda m: m.register_full_backward_hook(lambda *_: None)), "'2'.* has hooks"),
        (parametrised, r"layer '2' \(ParametrizedLinear\) is a subclass of a known layer"),
        (lambda: hooked(lambda m: prune.identity(m, "weight")), "layer '2' .Linear. has"),
        (lambda: changed(zoo.mlp(3), "2", forward=lambda x: x), r"layer '2' \(Linear\) has an attribute forward"),
        (lambda: changed(zoo.mlp(3), "", note=[1, 2]), r"the network \(Sequential\) has an attribute note of its own"),
        (lambda: changed(zoo.mlp(3), "0", out_features=7), "'0'.* does not have the tensors that its arguments give"),
        (lambda: changed(zoo.mlp(3), "0", weight=nn.Parameter(torch.zeros(2, 2))), "'0'.* does not have the tensors"),
        (lambda: changed(zoo.lenet(), "2", return_indices=True), "'2' .MaxPool2d. has an attribute return_indices"),
        (lambda: changed(zoo.lenet(), "0", groups=5), r"'0' \(Conv2d\) cannot be built from its own arguments"),
        (lambda: nn.InstanceNorm1d(3, track_running_stats=True), "has an attribute track_running_stats"),
        (lambda: nn.ConstantPad1d(1, float("inf")), "value = inf, expected a finite number"),
        (lambda: nn.AvgPool2d(2, divisor_override=-1), "divisor_override = -1, expected a positive integer or null"),
        (tied, "2.weight is tied to 0.weight"),
        (blocks_shared, "blocks.2.first.conv.weight is tied to blocks.1.first.conv.weight"),
        (with_buffer, r"the network \(Sequential\) does not have the tensors"),
        (lambda: changed(zoo.resnet20_frn(3, 1, width=2), "", head=nn.Linear(8, 4)), "'head' in the network"),
        (
            lambda: changed(zoo.resnet20_frn(3, 1, width=2), "", act=nn.Tanh()),
            "'act' in the network .* is Tanh, but its arguments give SiLU",
        ),
        (lambda: changed(zoo.resnet20_frn(3, 1, width=2), "blocks.1.act", inplace=True), "'act' in '1' in 'blocks' in"),
        (
            lambda: changed(zoo.cnn_lstm(7, 2), "", extra=nn.Linear(1, 1)),
            "does not have the submodules that its arguments give",
        ),
        (lambda: changed(zoo.cnn_lstm(7, 2), "lstm", forget_bias=0.3), "'lstm' in the network"),
        (lambda: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double()), "float32, float64, but a blueprint has"),
        (lambda: nn.Linear(1, 1, dtype=torch.complex64), "complex64"),
        (lambda: deep(DEEPEST), f"is nested more than {DEEPEST} levels deep"),
        (endless, f"is nested more than {DEEPEST} levels deep"),
    ],
)
def test_unknown_layers_have_no_blueprint(make, text):
    net = make()
    with pytest.raises(AssertionError, match=text):
        through_json(net)
    assert describe_network(net) is None


def test_no_network_at_all():
    with pytest.raises(cr.InputError, match="module must be a torch.nn.Module, got str"):
        describe_network("net")


def test_the_deepest_network_round_trips():
    assert_same(deep(DEEPEST - 2), (randn(2, 1),))


# What cannot be built


def modified(path, value):
    """Return the blueprint of a small network with one entry changed or, for ..., removed."""
    act = nn.SiLU()
    net = nn.Sequential(nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), act), act, nn.Flatten(), nn.Linear(6, 2))
    blueprint = json.loads(json.dumps(describe_network(net)))
    parent = blueprint
    for key in path[:-1]:
        parent = parent[key]
    if value is ...:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return blueprint


CHILDREN = ("network", "children")
CONV = (*CHILDREN, 0, 1, "children", 0, 1)
LINEAR = (*CHILDREN, 3, 1)


@pytest.mark.parametrize(
    "path, value, text",
    [
        (("blueprint",), 2, "version 2, this release reads 1"),
        (("blueprint",), True, "version True"),
        (("blueprint",), ..., "the blueprint was modified: 'blueprint' is missing"),
        (("dtype",), "int8", "dtype 'int8', known are float16"),
        (("dtype",), ["float32"], r"dtype \['float32'\]"),
        (("more",), 1, "the blueprint was modified: 'more' is unknown"),
        (("network",), "nn.Linear", "the network of the blueprint is None, which is not a layer"),
        (("network",), {"kind": "same", "as": ""}, "same as '', but there is no such entry before it"),
        (("network", "kind"), "torch.nn.Sequential", "the network .* is 'torch.nn.Sequential', which is not a layer"),
        (("network", "kind"), ["nn.Linear"], "which is not a layer"),
        (CHILDREN, {"0": 1}, r"children that are not a list of \[name, entry\]"),
        ((*CHILDREN, 1), ["1"], r"children that are not a list of \[name, entry\]"),
        ((*CHILDREN, 1, 0), 1, r"children that are not a list of \[name, entry\]"),
        ((*CHILDREN, 1, 0), "0", "a child named '0', which is empty, has a dot or is a duplicate"),
        ((*CHILDREN, 1, 0), "a.b", "a child named 'a.b'"),
        ((*CHILDREN, 1, 0), "", "a child named ''"),
        ((*CHILDREN, 1, 0), "forward", "the network of the blueprint cannot be built: .*forward"),
        ((*CHILDREN, 1, 1, "as"), "3", "entry '1' of the blueprint is the same as '3', but there is no such"),
        ((*CHILDREN, 1, 1, "as"), ["0.1"], "entry '1' of the blueprint is the same as"),
        ((*CHILDREN, 1, 1, "why"), 1, "entry '1' of the blueprint was modified: 'why' is unknown"),
        ((*LINEAR, "kind"), "os.system", "entry '3' of the blueprint is 'os.system', which is not a layer"),
        ((*LINEAR, "kind"), "nn.Module", "is 'nn.Module', which is not a layer"),
        ((*LINEAR, "kind"), "nn.SiLU", r"entry '3' of the blueprint \(nn.SiLU\) was modified: 'inplace' is missing"),
        ((*LINEAR, "kind"), ..., "is None, which is not a layer"),
        ((*LINEAR, "arguments"), ..., "entry '3' of the blueprint was modified: 'arguments' is missing"),
        ((*LINEAR, "arguments"), [6, 2], r"entry '3' .* \(nn.Linear\) is list, expected an object with in_features"),
        ((*LINEAR, "arguments", "device"), "cuda", "'device' is unknown"),
        ((*LINEAR, "arguments", "bias"), ..., "'bias' is missing"),
        ((*LINEAR, "arguments", "bias"), 1, "has bias = 1, expected true or false"),
        ((*LINEAR, "arguments", "in_features"), "6", "has in_features = '6', expected a positive integer"),
        ((*LINEAR, "arguments", "in_features"), 6.0, "in_features = 6.0"),
        ((*LINEAR, "arguments", "in_features"), True, "in_features = True"),
        ((*LINEAR, "arguments", "in_features"), 0, "in_features = 0"),
        ((*LINEAR, "arguments", "in_features"), 10**40, "in_features = 1000"),
        ((*LINEAR, "arguments", "in_features"), 2**50, "has .* values, more than the limit"),
        ((*LINEAR, "arguments", "out_features"), None, "out_features = None"),
        ((*CONV, "arguments", "kernel_size"), [], r"entry '0.0' of the blueprint \(nn.Conv2d\) has kernel_size = \[\]"),
        ((*CONV, "arguments", "kernel_size"), [3, [3]], "kernel_size"),
        ((*CONV, "arguments", "kernel_size"), [3] * 9, "kernel_size"),
        ((*CONV, "arguments", "padding"), "some", "padding = 'some', expected .* one of same, valid"),
        (
            (*CONV, "arguments", "groups"),
            4,
            r"entry '0.0' of the blueprint \(nn.Conv2d\) cannot be built: out_channels",
        ),
        ((*CONV, "arguments", "kernel_size"), [-3, 3], "cannot be built"),
    ],
)
def test_modified_blueprints_are_refused(path, value, text):
    with pytest.raises(cr.StoreError, match=text):
        build_network(modified(path, value))


@pytest.mark.parametrize("blueprint", [None, [], "nn.Linear", {}, 3])
def test_things_that_are_not_a_blueprint(blueprint):
    with pytest.raises(cr.StoreError, match="the blueprint (is|was modified)"):
        build_network(blueprint)


def test_numbers_that_are_not_finite_are_refused():
    blueprint = describe_network(nn.Dropout(0.5))
    for value in (float("nan"), float("inf"), "0.5", False, 1.5):
        blueprint["network"]["arguments"]["p"] = value
        with pytest.raises(cr.StoreError, match=r"nn.Dropout\) (has p = |cannot be built)"):
            build_network(blueprint)


def test_an_endless_file_is_refused():
    entry = {"kind": "nn.Sequential", "children": []}
    for _ in range(DEEPEST):
        entry = {"kind": "nn.Sequential", "children": [["0", entry]]}
    with pytest.raises(cr.StoreError, match=f"is nested more than {DEEPEST} levels deep"):
        build_network({"blueprint": 1, "dtype": "float32", "network": entry})


def test_unknown_activation_of_a_zoo_network():
    blueprint = describe_network(zoo.cnn_lstm(7, 2))
    blueprint["network"]["arguments"]["activation"] = "__import__"
    with pytest.raises(
        cr.StoreError, match=r"\(zoo.CNNLSTM\) cannot be built: activation must be one of .*got '__import__'"
    ):
        build_network(blueprint)
