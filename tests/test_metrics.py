"""Metrics: the confusion matrix, and the scores that follow from it.

Run: python -m pytest tests/test_metrics.py
"""
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import train_unet as tu
from helpers import IGNORED

pytestmark = pytest.mark.usefixtures('one_thread')


# --- the confusion matrix -------------------------------------------------------------


@pytest.mark.parametrize('copies', [None, 1, 4, 100])
def test_confusion_matrix_by_hand(copies):
    target = torch.tensor([[0, 1, 1], [2, IGNORED, IGNORED]], dtype=torch.uint8)
    predicted = torch.tensor([[0, 1, 2], [2, 2, 0]])
    assert tu.confusion_matrix(predicted, target, 3, copies).tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 1]]


def test_a_large_image_is_counted_piece_by_piece():
    """A mask of 100 megapixels would take 2.5 GB of the GPU."""
    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            made = function(*args, **(kwargs or {}))
            self.bytes = max(self.bytes, made.nbytes if torch.is_tensor(made) else 0)
            return made

    target = torch.arange(5 * 2**21, dtype=torch.int32).remainder_(5).to(torch.uint8)
    with Largest() as largest:
        counts = tu.confusion_matrix(target, target, 5, 4)
    assert counts.tolist() == torch.diag(target.bincount()).tolist() and largest.bytes <= 8 * 2**23


# --- scores ---------------------------------------------------------------------------


def test_metrics_by_hand_leave_an_absent_class_out():
    counts = torch.tensor([[6, 2, 0, 0], [1, 3, 0, 0], [0, 0, 0, 0], [2, 0, 0, 0]])
    metrics = tu.compute_metrics(counts)
    assert metrics['iou_per_class'][:2] == pytest.approx([6 / 11, 3 / 6])
    assert math.isnan(metrics['iou_per_class'][2]) and math.isnan(metrics['dice_per_class'][2])
    assert metrics['iou_per_class'][3] == 0  # there, and never found: counts
    assert metrics['iou'] == pytest.approx((6 / 11 + 3 / 6 + 0) / 3)
    assert metrics['dice'] == pytest.approx((12 / 17 + 6 / 9 + 0) / 3)
    assert metrics['accuracy'] == pytest.approx(9 / 14)


def test_two_classes_are_scored_by_the_foreground():
    metrics = tu.compute_metrics(torch.tensor([[90, 5], [2, 3]]))
    assert metrics['iou'] == pytest.approx(3 / 10)
    assert metrics['dice'] == pytest.approx(6 / 13)
    assert metrics['mean_iou'] == pytest.approx((90 / 97 + 3 / 10) / 2)
    assert metrics['precision_per_class'][1] == pytest.approx(3 / 8)
    assert metrics['recall_per_class'][1] == pytest.approx(3 / 5)


@pytest.mark.parametrize('num_classes', [2, 5])
def test_the_score_of_one_class_everywhere_is_that_of_such_a_prediction(num_classes):
    target = torch.randint(0, num_classes, (20, 20)).clamp_max(3)      # of five classes the last is absent
    counts = [tu.confusion_matrix(torch.full_like(target, i), target, num_classes) for i in range(num_classes)]
    best = max(tu.compute_metrics(each)['iou'] for each in counts[1 if num_classes == 2 else 0:4])
    assert [tu.compute_metrics(each)['constant_iou'] for each in counts] == pytest.approx([best] * num_classes)


@pytest.mark.parametrize('iou, constant, is_trivial', [
    (0.0038, 0.0024, True), (0.04, 0.001, False), (0.047, 0.00004, False), (0.80, 0.79, True), (0.85, 0.79, False),
    (0.98, 1.0, False), (math.nan, 0.3, False), (0.0, 0.0, False)])
def test_scores_near_that_of_one_class_everywhere(iou, constant, is_trivial):
    assert tu.is_trivial({'iou': iou, 'constant_iou': constant}) == is_trivial
    assert not tu.is_trivial({'iou': iou}) and not tu.is_trivial({'loss': 1.0})        # older runs, losses of one's own


def test_a_class_that_is_never_predicted_has_no_precision():
    counts = torch.tensor([[5, 0, 0], [2, 0, 0], [0, 0, 0]])
    metrics = tu.compute_metrics(counts)
    assert metrics['precision_per_class'][:2] == [5 / 7, 0] and math.isnan(metrics['precision_per_class'][2])
    assert metrics['mean_precision'] == pytest.approx(5 / 14) and metrics['mean_recall'] == 0.5


@pytest.mark.parametrize('num_classes', [2, 5])
def test_metrics_agree_with_scikit_learn(num_classes):
    import sklearn.metrics as sklearn
    target, predicted = torch.randint(0, num_classes, (2, 4, 20, 20))
    target[torch.rand(target.shape) < 0.2] = IGNORED
    counts = sum(tu.confusion_matrix(p, t, num_classes) for p, t in zip(predicted, target))
    metrics = tu.compute_metrics(counts)
    keep = target != IGNORED
    pair, each = (target[keep].numpy(), predicted[keep].numpy()), {'average': None}
    assert counts.tolist() == sklearn.confusion_matrix(*pair).tolist()
    assert metrics['iou_per_class'] == pytest.approx(sklearn.jaccard_score(*pair, **each))
    assert metrics['dice_per_class'] == pytest.approx(sklearn.f1_score(*pair, **each))
    assert metrics['precision_per_class'] == pytest.approx(sklearn.precision_score(*pair, **each))
    assert metrics['recall_per_class'] == pytest.approx(sklearn.recall_score(*pair, **each))
    assert metrics['accuracy'] == pytest.approx(sklearn.accuracy_score(*pair))
