"""Metrics per class, against scikit-learn and by hand."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import credibly as cr
from credibly.metrics.classes import class_metrics, confusion_matrix, rare_class, summary_of_classes


def predictions(classes=3, rows=200, seed=0):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(classes) * 0.7, size=rows)
    y = np.array([rng.choice(classes, p=one) for one in 0.5 * p + 0.5 / classes])
    return torch.from_numpy(p), torch.from_numpy(y)


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_they_agree_with_scikit_learn(classes):
    p, y = predictions(classes)
    found = class_metrics(p, y)
    answer = p.argmax(-1).numpy()
    precision, recall, f1, rows = sk.precision_recall_fscore_support(y, answer, zero_division=np.nan)
    for mine, theirs in zip((found.precision, found.recall, found.f1, found.rows), (precision, recall, f1, rows)):
        assert mine.numpy() == pytest.approx(theirs)
    assert (confusion_matrix(p, y).numpy() == sk.confusion_matrix(y, answer)).all()
    assert float(found.balanced_accuracy) == pytest.approx(sk.balanced_accuracy_score(y, answer))
    for k in range(classes):
        assert float(found.roc_auc[k]) == pytest.approx(sk.roc_auc_score(y == k, p[:, k]))
        assert float(found.average_precision[k]) == pytest.approx(sk.average_precision_score(y == k, p[:, k]))


def test_a_missed_rare_class():
    """16 of 1,600 rows are cases, 5 of them above one half: the accuracy is 99 % and says nothing."""
    y = torch.zeros(1600, dtype=torch.long)
    y[:16] = 1
    case = torch.full((1600,), 0.005)
    case[:5], case[5:16] = 0.8, 0.2
    p = torch.stack([1 - case, case], 1)
    found = class_metrics(p, y)
    assert found.recall.tolist() == [1.0, 5 / 16]
    assert found.precision.tolist() == pytest.approx([1584 / 1595, 1.0])
    assert found.average_precision[1] == found.roc_auc[1] == 1
    assert rare_class(found) == 1
    assert summary_of_classes(found) == pytest.approx(
        {"balanced_accuracy": (1 + 5 / 16) / 2, "roc_auc": 1.0, "average_precision": 1.0}
    )


def test_absent_and_never_predicted_classes_are_undefined():
    p = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1]])
    found = class_metrics(p, torch.tensor([0, 1]))
    assert found.recall.isnan().tolist() == [False, False, True]
    assert found.precision.isnan().tolist() == [False, True, True]
    assert found.f1.isnan().tolist() == [False, False, True]
    assert float(found.balanced_accuracy) == 0.5
    assert summary_of_classes(class_metrics(p, torch.tensor([0, 0]))) == {}


@pytest.mark.parametrize(
    "p, y, message",
    [
        (torch.rand(3), torch.zeros(3).long(), "probabilities must be a tensor"),
        (torch.rand(3, 2), torch.zeros(2).long(), r"labels must be an integer tensor \(3,\), got \(2,\)"),
        (torch.rand(3, 2), torch.zeros(3), "labels must be an integer tensor"),
        (torch.rand(3, 2), torch.tensor([0, 1, 2]), "labels must be from 0 to 1, got values from 0 to 2"),
        (torch.rand(0, 2), torch.zeros(0).long(), "labels must be from 0 to 1, got none"),
    ],
)
def test_bad_input(p, y, message):
    with pytest.raises(cr.InputError, match=message):
        class_metrics(p, y)
