"""The BatchNorm policy: which layers are found, the error message, and what each replacement computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from credibly.errors import InputError
from credibly.networks.normalisation import (
    FilterResponseNorm,
    FrozenBatchNorm,
    find_running_statistics,
    refuse_batchnorm,
    replace_batchnorm,
)

LAYERS: list[tuple[Any, tuple[int, ...]]] = [
    (nn.BatchNorm1d, (5, 8)),
    (nn.BatchNorm1d, (5, 8, 6)),
    (nn.BatchNorm2d, (5, 8, 3, 4)),
    (nn.BatchNorm3d, (5, 8, 2, 3, 2)),
    (nn.SyncBatchNorm, (5, 8, 3, 4)),
    (nn.InstanceNorm1d, (5, 8, 6)),
    (nn.InstanceNorm2d, (5, 8, 3, 4)),
]
BYS = ("frozen", "group", "frn")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scrambled(module: nn.Module, seed: int = 0) -> nn.Module:
    """Return the module with random parameters and running statistics, as if trained."""
    g = generator(seed)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                draw = torch.randn(tensor.shape, generator=g, dtype=tensor.dtype)
                tensor.copy_(draw.abs() + 0.5 if name.endswith("running_var") else draw)
    return module


def conv_net() -> nn.Module:
    block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
    return scrambled(
        nn.Sequential(
            nn.Conv2d(2, 8, 3),
            nn.BatchNorm2d(8),
            nn.ModuleDict({"inner": block})["inner"],
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 3),
        )
    )


def images(rows: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 2, 6, 6, generator=generator(7), dtype=dtype)


class Twice(nn.Module):
    """One BatchNorm in two attributes, in a plain list, and used twice; and a bias tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(8)
        self.second = self.first
        self.plain = [self.first]
        self.tied = nn.ParameterList([self.first.bias])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.plain[0](self.second(self.first(x))) + self.tied[0].view(8, 1, 1)
        return out


# Finding and refusing


def test_finds_every_kind_by_name() -> None:
    class Own(nn.BatchNorm2d):
        pass

    net = nn.ModuleDict(
        {
            "a": nn.BatchNorm1d(3),
            "b": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm3d(3)),
            "sync": nn.SyncBatchNorm(3),
            "inst": nn.InstanceNorm2d(3, track_running_stats=True),
            "free": nn.InstanceNorm2d(3),
            "own": Own(3),
            "batch_only": nn.BatchNorm2d(3, track_running_stats=False),
            "group": nn.GroupNorm(1, 3),
            "ln": nn.LayerNorm(3),
        }
    )
    assert find_running_statistics(net) == ["a", "b.1", "sync", "inst", "own", "batch_only"]
    assert find_running_statistics(nn.BatchNorm1d(2)) == [""]
    assert find_running_statistics(nn.Linear(2, 2)) == []
    assert find_running_statistics(Twice()) == ["first"]


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_finds_lazy_layers_before_and_after_their_first_call() -> None:
    net = nn.Sequential(nn.LazyBatchNorm2d(), nn.LazyInstanceNorm2d(), nn.LazyInstanceNorm2d(track_running_stats=False))
    assert find_running_statistics(net) == ["0", "1"]
    with pytest.raises(InputError, match=r"'0' \(LazyBatchNorm2d\) does not know .* channels .*one batch first"):
        replace_batchnorm(net, "frozen")
    net(torch.randn(3, 8, 4, 4, generator=generator()))
    assert find_running_statistics(net) == ["0", "1"]
    assert find_running_statistics(replace_batchnorm(net, "frozen")) == []


def test_refusal_names_layers_reason_and_way_out() -> None:
    net = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(5)))
    with pytest.raises(InputError) as caught:
        refuse_batchnorm(net)
    text = str(caught.value)
    assert caught.value.argument == "net"
    for part in (
        "5 layers keep",
        "'0' (BatchNorm1d), '1' (BatchNorm1d), '2' (BatchNorm1d) and 2 more",
        "other rows",
        "hidden state",
        'credibly.replace_batchnorm(net, "frozen")',
        '"group"',
        '"frn"',
    ):
        assert part in text
    with pytest.raises(InputError, match=r"1 layer keeps batch statistics: the module itself \(BatchNorm2d\)"):
        refuse_batchnorm(nn.BatchNorm2d(3))


@pytest.mark.parametrize("by", BYS)
def test_replaced_network_is_not_refused(by: Any) -> None:
    refuse_batchnorm(replace_batchnorm(conv_net(), by))


# What the replacements compute


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind, shape", LAYERS)
def test_frozen_equals_eval_mode(kind: Any, shape: tuple[int, ...], affine: bool) -> None:
    layer = scrambled(kind(8, affine=affine, track_running_stats=True).double())
    x = 3 + 2 * torch.randn(shape, generator=generator(1), dtype=torch.float64)
    frozen = replace_batchnorm(layer, "frozen")
    expected = layer.eval()(x)
    assert isinstance(frozen, FrozenBatchNorm)
    torch.testing.assert_close(frozen.train()(x), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(frozen.eval()(x), expected, rtol=0, atol=1e-13)
    assert len(list(frozen.parameters())) == (2 if affine else 0)


def test_frozen_equals_eval_mode_in_float32_and_for_a_row_without_batch_axis() -> None:
    layer = scrambled(nn.BatchNorm2d(8)).eval()
    x = torch.randn(6, 8, 5, 5, generator=generator(1))
    torch.testing.assert_close(replace_batchnorm(layer, "frozen")(x), layer(x), rtol=1e-6, atol=1e-6)
    instance = scrambled(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)).eval()
    torch.testing.assert_close(replace_batchnorm(instance, "frozen")(x[0]), instance(x[0]), rtol=1e-6, atol=1e-6)


def test_frozen_keeps_digits_where_the_mean_is_large() -> None:
    layer = nn.BatchNorm1d(1)
    layer.running_mean.fill_(100.0)
    layer.running_var.fill_(1e-4)
    x = 100 + 0.01 * torch.randn(50, 1, generator=generator())
    exact = (x.double() - 100) / (layer.running_var.double() + 1e-5).sqrt()
    torch.testing.assert_close(replace_batchnorm(layer, "frozen")(x).double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "layer, count",
    [
        (nn.BatchNorm2d(16), 8),
        (nn.BatchNorm2d(12), 6),
        (nn.BatchNorm2d(7), 7),
        (nn.BatchNorm2d(11), 1),
        (nn.BatchNorm2d(3), 3),
        (nn.BatchNorm2d(1), 1),
        (nn.BatchNorm1d(64), 8),
        (nn.BatchNorm1d(16), 4),
        (nn.BatchNorm1d(3), 1),
    ],
)
def test_group_count_is_the_largest_that_fits(layer: nn.Module, count: int) -> None:
    new = replace_batchnorm(layer, "group")
    assert isinstance(new, nn.GroupNorm)
    assert new.num_groups == count


def test_group_carries_affine_values_and_eps() -> None:
    layer = scrambled(nn.BatchNorm2d(8, eps=1e-3))
    new = replace_batchnorm(layer, "group", groups=4)
    reference = nn.GroupNorm(4, 8, eps=1e-3)
    reference.load_state_dict(new.state_dict())
    x = torch.randn(5, 8, 3, 3, generator=generator(2))
    assert torch.equal(new(x), reference(x))
    assert torch.equal(new.weight, layer.weight)  # type: ignore[arg-type]
    assert torch.equal(new.bias, layer.bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(4, 8, 5), (4, 8, 3, 4), (4, 8, 2, 3, 2)])
def test_filter_response_norm_is_its_formula(shape: tuple[int, ...]) -> None:
    layer = scrambled(FilterResponseNorm(8, eps=0.1, threshold=True, dtype=torch.float64))
    x = torch.randn(shape, generator=generator(3), dtype=torch.float64)
    state = layer.state_dict()
    for n in range(shape[0]):
        for c in range(8):
            nu2 = sum(float(v) ** 2 for v in x[n, c].flatten()) / x[n, c].numel()
            y = x[n, c] / (nu2 + 0.1) ** 0.5 * state["weight"][c] + state["bias"][c]
            torch.testing.assert_close(layer(x)[n, c], y.clamp(min=float(state["tau"][c])))


def test_filter_response_norm_has_no_threshold_unless_asked() -> None:
    layer = FilterResponseNorm(3)
    assert sorted(dict(layer.named_parameters())) == ["bias", "weight"]
    assert (layer(-torch.ones(2, 3, 4)) < 0).all()
    assert list(FilterResponseNorm(3, affine=False).parameters()) == []


def test_filter_response_norm_refuses_inputs_without_spatial_axes() -> None:
    net = replace_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), "frn")
    with pytest.raises(InputError, match=r'shape \(5, 4\), which has no spatial axis.*"group"\) or "frozen"'):
        net(torch.zeros(5, 3))


def test_rows_interact_before_the_replacement() -> None:
    net, x = conv_net().double(), images(dtype=torch.float64)
    before = net(x)
    x[1] = 2
    assert not torch.allclose(net(x)[0], before[0])


@pytest.mark.parametrize("by", BYS)
@pytest.mark.parametrize("training", [True, False])
def test_rows_no_longer_interact_and_there_is_no_state(by: Any, training: bool) -> None:
    net = replace_batchnorm(conv_net().double(), by).train(training)
    x = images(dtype=torch.float64)
    before, state = net(x), copy.deepcopy(net.state_dict())
    changed = x.clone()
    changed[1] = 100 * changed[1].flip(-1).exp()
    after = net(changed)
    torch.testing.assert_close(after[[0, 2, 3]], before[[0, 2, 3]], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(after[1], before[1])
    torch.testing.assert_close(net(x[:1]), before[:1], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items())


@pytest.mark.parametrize("by", BYS)
def test_vmap_over_stacked_parameters_equals_a_loop(by: Any) -> None:
    net = replace_batchnorm(conv_net().double(), by)
    members = [{k: v.detach() for k, v in scrambled(copy.deepcopy(net), seed).named_parameters()} for seed in (1, 2, 3)]
    stacked = {k: torch.stack([m[k] for m in members]) for k in members[0]}
    x = images(dtype=torch.float64)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(net, parameters, (x,)).tanh().square().sum()

    torch.testing.assert_close(vmap(loss)(stacked), torch.stack([loss(m) for m in members]))
    batched = vmap(grad(loss))(stacked)
    for i, member in enumerate(members):
        for name, value in grad(loss)(member).items():
            torch.testing.assert_close(batched[name][i], value)


@pytest.mark.parametrize("by", BYS)
def test_gradients_are_those_of_finite_differences(by: Any) -> None:
    layer = replace_batchnorm(scrambled(nn.BatchNorm2d(4).double()), by, groups=2)
    x = torch.randn(2, 4, 2, 3, generator=generator(), dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


# How layers are replaced


@pytest.mark.parametrize("by", BYS)
def test_original_is_untouched_and_shares_nothing(by: Any) -> None:
    net = conv_net()
    net[1].weight.requires_grad_(False)  # type: ignore[index]
    net[1].eval()  # type: ignore[index]
    state, names = copy.deepcopy(net.state_dict()), [(n, type(m)) for n, m in net.named_modules()]
    new = replace_batchnorm(net, by)
    assert [n for n, _ in new.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert [p.requires_grad for p in new.parameters()] == [p.requires_grad for p in net.parameters()]
    assert [m.training for m in new.modules()] == [m.training for m in net.modules()]
    with torch.no_grad():
        for tensor in [*new.parameters(), *new.buffers()]:
            tensor.fill_(7)
    assert [(n, type(m)) for n, m in net.named_modules()] == names
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items())


@pytest.mark.parametrize("by", BYS)
def test_shared_layer_is_replaced_by_one_layer(by: Any) -> None:
    net: Any = scrambled(Twice())
    new: Any = replace_batchnorm(net, by)
    assert new.first is new.second is new.plain[0]
    assert new.first is not net.first
    assert new.first.bias is new.tied[0]
    assert len(list(new.parameters())) == 2
    if by == "frozen":
        x = torch.randn(2, 8, 3, 3, generator=generator())
        torch.testing.assert_close(new(x), net.eval()(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by", BYS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtype_is_kept(by: Any, dtype: torch.dtype) -> None:
    new = replace_batchnorm(nn.BatchNorm2d(8).to(dtype), by)
    assert {t.dtype for t in new.state_dict().values()} == {dtype}
    assert new(torch.ones(2, 8, 3, 3, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("by", ["frozen", "frn"])
def test_half_precision_inputs_stay_half_with_float32_weights(by: Any) -> None:
    x = torch.ones(2, 8, 3, 3, dtype=torch.bfloat16)
    assert replace_batchnorm(nn.BatchNorm2d(8), by)(x).dtype == torch.bfloat16


@pytest.mark.parametrize("by", BYS)
def test_device_is_kept(by: Any) -> None:
    new = replace_batchnorm(nn.BatchNorm2d(8, device="meta"), by)
    assert {t.device.type for t in new.state_dict().values()} == {"meta"}


def test_network_without_such_layers_is_simply_copied() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    new = replace_batchnorm(net, "group")
    assert new is not net
    assert all(torch.equal(v, new.state_dict()[k]) for k, v in net.state_dict().items())


def test_print_shows_the_arguments() -> None:
    assert repr(FrozenBatchNorm(4)) == "FrozenBatchNorm(4, eps=1e-05, affine=True)"
    layer = FilterResponseNorm(4, threshold=True)
    assert repr(layer) == "FilterResponseNorm(4, eps=1e-06, affine=True, threshold=True)"


# What is refused


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def parametrized() -> nn.Module:
    layer = nn.BatchNorm2d(4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


@pytest.mark.parametrize(
    "make, by, text",
    [
        (lambda: nn.BatchNorm2d(4, track_running_stats=False), "frozen", r'no running statistics.*"group" or "frn"'),
        (lambda: Activated(4), "frozen", r"\(Activated\) overrides forward, which does more.*by hand"),
        (parametrized, "group", "is parametrized.*remove_parametrizations"),
        (lambda: nn.BatchNorm1d(1), "group", "one channel.*constant"),
        (lambda: nn.BatchNorm1d(2), "layer", "by must be one of 'frozen', 'group', 'frn', got 'layer'"),
        (lambda: "net", "group", "net must be a torch.nn.Module, got str"),
    ],
)
def test_layers_that_cannot_be_replaced(make: Any, by: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        replace_batchnorm(make(), by)


@pytest.mark.parametrize("by", ["group", "frn"])
def test_layer_without_running_statistics_can_be_replaced(by: Any) -> None:
    assert find_running_statistics(replace_batchnorm(nn.BatchNorm2d(4, track_running_stats=False), by)) == []


@pytest.mark.parametrize("groups", [0, -1, 2.0, True, "8"])
def test_bad_groups(groups: Any) -> None:
    with pytest.raises(InputError, match="groups must be a positive integer, got "):
        replace_batchnorm(nn.BatchNorm2d(4), "group", groups=groups)


@pytest.mark.parametrize("kind", [FrozenBatchNorm, FilterResponseNorm])
def test_bad_arguments_of_the_layers(kind: Any) -> None:
    for features in (0, -3, 2.5, True):
        with pytest.raises(InputError, match="num_features must be a positive integer, got "):
            kind(features)
    for eps in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="eps must be a non-negative number, got "):
            kind(3, eps=eps)
    with pytest.raises(InputError, match=r"x must have 1 channels on axis 1, got shape \(2, 3, 4\)"):
        kind(1)(torch.zeros(2, 3, 4))
