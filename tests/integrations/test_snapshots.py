"""Snapshots during the training of Lightning and of transformers, against the weights that training went through."""

import pytest
import torch
from torch import nn

import credibly as cr
from conftest import randn
from credibly.errors import InputError
from credibly.integrations.snapshots import SnapshotCollector

X = randn(24, 4)
Y = (X.sum(1) > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def problem(net=None, likelihood=None, y=Y):
    return cr.Problem(net or network(), (X, y), likelihood or cr.likelihoods.Categorical(), cr.priors.Normal())


def flat(module):
    return torch.cat([p.detach().flatten() for p in module.parameters()]).clone()


def walk(collector, points, net):
    """Let a module go through these points, a snapshot at each."""
    for step, point in enumerate(points, 1):
        torch.nn.utils.vector_to_parameters(point, net.parameters())
        if collector.due(step, len(points), epoch_ends=True):
            collector.add(net, step)


def test_swag_snapshots_have_the_moments_of_the_points():
    collector, net = SnapshotCollector(rank=3, start=2), network()
    points = randn(8, len(flat(net)), seed=5)
    walk(collector, points, net)
    posterior = collector.posterior(problem(net))
    used = points[1:].double()
    torch.testing.assert_close(posterior.loc[0], used.mean(0).float())
    deviations = torch.stack([used[k] - used[: k + 1].mean(0) for k in range(4, 7)])
    variance = used.var(0, correction=0) / 2 + deviations.square().sum(0) / (2 * 2)
    torch.testing.assert_close(posterior.std[0], variance.sqrt().float(), rtol=1e-4, atol=1e-6)
    assert posterior.record.history["snapshot_steps"] == [2, 3, 4, 5, 6, 7, 8]
    assert posterior.predict(X).mean.shape == (24, 2)


def test_draws_are_the_snapshots_and_survive_a_folder(tmp_path):
    collector, net = SnapshotCollector(kind="draws", every=2, start=0.0), network()
    points = randn(6, len(flat(net)), seed=5)
    for step, point in enumerate(points, 1):
        torch.nn.utils.vector_to_parameters(point, net.parameters())
        if collector.due(step, None, epoch_ends=False):
            collector.add(net, step)
    posterior = collector.posterior(problem(net))
    assert torch.equal(posterior.draws[:, 0], points[[1, 3, 5]])
    posterior.save(tmp_path / "run")
    assert torch.equal(cr.load(tmp_path / "run", network()).predict(X).mean, posterior.predict(X).mean)


def test_a_learned_noise_is_fitted_to_the_data():
    net = nn.Linear(4, 1)
    y = net(X).detach().squeeze(1) + 0.3 * randn(24, seed=4)
    given = problem(net, cr.likelihoods.Gaussian("learned"), y)
    collector = SnapshotCollector(kind="draws", start=0)
    collector.add(net, 1)
    posterior = collector.posterior(given)
    residual = float((y - net(X).squeeze(1)).detach().std())
    assert float(posterior.predict(X).aleatoric.mean()) ** 0.5 == pytest.approx(residual, rel=0.3)


def test_prefixes_of_names_are_found_and_other_networks_refused():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.other, self.inner = nn.Linear(3, 3), network()

    collector, wrapped = SnapshotCollector(kind="draws", start=0), Wrapped()
    collector.add(wrapped, 1)
    assert torch.equal(collector.posterior(problem()).draws[0, 0], flat(wrapped.inner))
    other = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    with pytest.raises(InputError, match="not among those that were trained"):
        collector.posterior(problem(other))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kind": "laplace"}, "kind must be one of 'swag', 'draws'"),
        ({"every": 0}, "every must be a positive integer"),
        ({"start": 1.5}, "start must be a fraction"),
        ({"rank": 1}, "rank must be an integer of at least 2"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(InputError, match=message):
        SnapshotCollector(**settings)


def test_too_few_snapshots_and_an_unknown_length_are_refused():
    with pytest.raises(InputError, match="snapshots must be at least 2, got 0"):
        SnapshotCollector().posterior(problem())
    with pytest.raises(InputError, match="start must be a number of steps where the length of training is unknown"):
        SnapshotCollector(start=0.5).due(3, float("inf"), epoch_ends=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["swag", "draws"])
def test_lightning_trains_and_the_callback_collects(kind, tmp_path):
    lightning = pytest.importorskip("lightning")
    seen = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def training_step(self, batch, index):
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def on_train_epoch_end(self):
            seen.append(flat(self.net))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    snapshots = cr.integrations.lightning.Snapshots(kind=kind, start=0.5, rank=2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=8)
    trainer = lightning.Trainer(
        max_epochs=6,
        callbacks=[snapshots],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Module(), loader)
    posterior = snapshots.posterior(problem())
    assert snapshots.steps == [9, 12, 15, 18]
    if kind == "draws":
        assert torch.equal(posterior.draws[:, 0], torch.stack(seen[2:]))
    else:
        torch.testing.assert_close(posterior.loc[0], torch.stack(seen[2:]).mean(0))


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_trains_and_the_callback_collects(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=11,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=6,
        num_labels=2,
    )
    model = transformers.BertForSequenceClassification(config)
    tokens = torch.randint(0, 11, (16, 6), generator=torch.Generator().manual_seed(1))
    labels = (tokens.sum(1) > 30).long()
    rows = [{"input_ids": t, "labels": y} for t, y in zip(tokens, labels)]
    seen = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            seen.append(flat(model))

    snapshots = cr.integrations.transformers.Snapshots(every=2, start=4, kind="draws")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=10,
        per_device_train_batch_size=4,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[snapshots, Watch()]).train()
    given = cr.Problem(model.eval(), ({"input_ids": tokens}, labels), cr.likelihoods.Categorical(), cr.priors.Normal())
    posterior = snapshots.posterior(given)
    assert snapshots.steps == [4, 6, 8, 10]
    assert torch.equal(posterior.draws[:, 0], torch.stack(seen)[[3, 5, 7, 9]])
    last = model(input_ids=tokens).logits.softmax(-1)
    torch.testing.assert_close(posterior.module(3).eval()(input_ids=tokens).logits.softmax(-1), last)
