"""Steps, healing, and training of a network of one's own.

Run: python -m pytest tests/test_loop.py
"""
import ast
import copy
import dataclasses
import fcntl
import io
import itertools
import math
import multiprocessing
import os
import platform
import pty
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import traceback
import types
import weakref
from collections import UserDict
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from conftest import FORKS, TINY
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import train_unet as tu

CPU = torch.device('cpu')
OWN = dict(device='cpu', use_amp=False, batch_size=4, num_epochs=3, learning_rate=0.01,
           num_workers=0, run_dir='run', ema_decay=None, optimizer='SGD',
           early_stopping_patience=None)


pytestmark = pytest.mark.usefixtures('one_thread')


class Samples(torch.utils.data.Dataset):
    """Small float images with a map to learn; names are numbered."""

    def __init__(self, count=8, seed=0, broken=()):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(count, 3, 8, 8, generator=generator)
        self.targets = self.images.mean(1, keepdim=True) * 2 + 1
        self.images[list(broken)] = math.nan

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {'image': self.images[index], 'target': self.targets[index], 'index': index}


def network(norm=True, dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1),
                         nn.BatchNorm2d(6) if norm else nn.Identity(), nn.ReLU(),
                         nn.Dropout(dropout), nn.Conv2d(6, 1, 3, padding=1))


def squares(model, batch):
    return (model(batch['image']) - batch['target']).square().mean((1, 2, 3))


def batch_of(*indices):
    return torch.utils.data.default_collate([Samples(32)[i] for i in indices])


def settings(**changes):
    return {**tu.CONFIG, 'learning_rate': 0.01, 'ema_decay': 0.9, 'grad_clip': None, **changes}


def fresh(config, model=None, dtype='float32'):
    return tu.build_state(model or network(), config, tu.Precision(dtype, 'high', ''), CPU)


def train(model=None, train_data=None, val_data=None, loss_fn=squares, **changes):
    return tu.train(model=network() if model is None else model, loss_fn=loss_fn,
                    train_data=Samples() if train_data is None else train_data,
                    val_data=Samples(5, seed=1) if val_data is None else val_data,
                    **{**OWN, **changes})


def last():
    """What the run in ./run saved."""
    return torch.load('run/last.pt', weights_only=True)


def assert_same(a, b):
    """Nested dicts, lists and tensors, equal to the bit."""
    if torch.is_tensor(a):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        [assert_same(a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        [assert_same(x, y) for x, y in zip(a, b)]
    else:
        assert a == b


def everything(state):
    """A copy of all that a step may change."""
    return copy.deepcopy({'model': state.model.state_dict(), 'average': state.average.state_dict(),
                          'optimizer': state.optimizer.state_dict(), 'totals': state.totals})


def at_training_call(module, wanted, change):
    """A forward hook that changes the output of the chosen training calls, counted from 1."""
    calls = []

    def hook(module, inputs, output):
        if module.training:
            calls.append(1)
            if wanted(len(calls)):
                return change(output)
    module.register_forward_hook(hook)
    return calls


def out_of_memory(module, when):
    """A forward hook that runs out of memory when told so; the calls are counted."""
    calls = []

    def hook(module, inputs, output):
        calls.append(len(output))
        if when(module, len(output), len(calls)):
            raise torch.OutOfMemoryError('CUDA out of memory (a test)')
    module.register_forward_hook(hook)
    return calls


def amp(dtype):
    return {'use_amp': False} if dtype == 'float32' else {'use_amp': True, 'amp_dtype': dtype}


def events(history):
    return [row['event'] for row in history if row['event']]


# --- gradients, learning rate, moving average ---

@pytest.mark.parametrize('sizes, micro', [
    ((4, 4), 4), ((2, 2, 2, 2), 2), ((3, 3, 2), 3), ((8,), 3), ((8,), 1)])
def test_the_gradient_does_not_depend_on_how_a_window_is_split(sizes, micro):
    gradients, results = [], []
    for parts, most in ((8,), 8), (sizes, micro):
        state = fresh(settings(batch_size=most), network(norm=False))
        begins = [sum(parts[:i]) for i in range(len(parts))]
        window = [batch_of(*range(begin, begin + size)) for begin, size in zip(begins, parts)]
        results.append(tu.train_step(state, window, squares, settings()))
        gradients.append([p.grad for p in state.model.parameters()])
    assert results[0].images == results[1].images == 8
    assert results[0].loss.item() == pytest.approx(results[1].loss.item(), rel=1e-5)
    for a, b in zip(*gradients):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('batch_size, accumulation_steps', [(4, 2), (2, 4), (3, 3)])
def test_a_run_does_not_depend_on_how_its_windows_are_split(batch_size, accumulation_steps):
    effective = batch_size * accumulation_steps  # 20 images: the last window is short
    weights = [train(network(norm=False), Samples(20), batch_size=size, accumulation_steps=steps,
                     run_dir=f'{size}').model.state_dict()
               for size, steps in ((effective, 1), (batch_size, accumulation_steps))]
    for a, b in zip(*(w.values() for w in weights)):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('warmup', [0, 0.1, 0.5])
def test_learning_rate_rises_in_a_line_and_falls_as_a_cosine(warmup):
    config = {'learning_rate': 2.0, 'warmup_fraction': warmup}
    rates = [tu.lr_at_step(step, 100, config) for step in range(101)]
    peak = round(100 * warmup)
    assert rates[:peak] == pytest.approx([2 * (step + 1) / peak for step in range(peak)])
    assert rates[peak] == max(rates) == 2
    assert rates[peak + (100 - peak) // 2] == pytest.approx(2 * 0.505)
    assert all(a > b for a, b in zip(rates[peak:], rates[peak + 1:]))
    assert rates[100] == pytest.approx(0.02)


def test_the_learning_rate_of_each_step_reaches_the_optimizer():
    rates = []
    handle = register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append({group['lr'] for group in optimizer.param_groups}))
    with_warmup = dict(warmup_fraction=0.5, num_epochs=2)
    try:
        train(**with_warmup)
    finally:
        handle.remove()
    assert rates[-4:] == [{tu.lr_at_step(step, 4, {**OWN, **with_warmup})} for step in range(4)]


def test_moving_average_by_hand():
    config = settings(ema_decay=0.3)
    state = fresh(config, network(norm=False))
    expected = [p.detach().clone() for p in state.model.parameters()]
    for step in range(5):
        state.step = step
        tu.guarded_step(state, [batch_of(step, 8, 9)], squares, config)
        decay = min(0.3, (1 + step) / (10 + step))                     # 0.1, 0.18, 0.25, 0.3, 0.3
        expected = [decay * e + (1 - decay) * p.detach()
                    for e, p in zip(expected, state.model.parameters())]
    for a, b in zip(state.average.parameters(), expected):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
        assert a.requires_grad and a.grad is None                      # it may be trained on: a second stage


def test_a_statistic_under_two_names_is_averaged_once():
    model = network()
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    model.register_buffer('running_mean', norm.running_mean)
    state = fresh(settings(ema_decay=0.9), model)
    assert not norm.running_mean.any()
    tu.guarded_step(state, [batch_of(0, 1)], squares, settings(ema_decay=0.9))
    assert norm.running_mean.any() and torch.allclose(state.average.running_mean, 0.9 * norm.running_mean)


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_the_norm_is_that_of_the_unscaled_gradient_and_the_clip_limits_it(dtype):
    window = [batch_of(*range(8))]
    exact = tu.train_step(fresh(settings()), window, squares, settings()).norm
    state = fresh(settings(init_scale=64.0), dtype=dtype)
    result = tu.train_step(state, window, squares, settings(grad_clip=0.01))
    clipped = torch.cat([p.grad.flatten() for p in state.model.parameters()]).norm()
    assert result.norm.item() == pytest.approx(exact.item(), rel=0.02)
    assert clipped.item() == pytest.approx(0.01, rel=1e-3)


# --- precision inside a step ---

@pytest.mark.parametrize('dtype, scaled', [
    ('float32', False), ('bfloat16', False), ('float16', True)])
def test_only_float16_is_scaled(dtype, scaled):
    assert fresh(settings(), dtype=dtype).scaler.is_enabled() is scaled


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16'])
def test_what_is_float32_in_a_step_and_what_is_not(dtype):
    state, seen = fresh(settings(init_scale=8.0), dtype=dtype), {}
    state.model[0].register_forward_hook(lambda m, inputs, output: seen.update(conv=output.dtype))

    def loss_fn(model, batch):
        logits = model(batch['image'])
        losses = (logits - batch['target']).square().mean((1, 2, 3))
        seen.update(logits=logits.dtype, losses=losses.dtype)
        return losses

    result = tu.guarded_step(state, [batch_of(*range(4))], loss_fn, settings())
    floats = [value for values in (state.model.state_dict(), state.average.state_dict(),
                                   *state.optimizer.state.values())
              for value in values.values() if value.is_floating_point()]
    floats += [p.grad for p in state.model.parameters()]
    assert seen == {'conv': getattr(torch, dtype), 'logits': torch.float32, 'losses': torch.float32}
    assert {value.dtype for value in floats} == {torch.float32}
    assert result.loss.dtype == result.norm.dtype == torch.float32
    assert not result.bad


# --- steps that are not finite ---

OPTIMIZERS = [('AdamW', True), ('SGD', False), ('RMSprop', False)]


def break_forward(state):
    """The next training pass has a NaN in front of the BatchNorm."""
    broken = []

    def hook(module, inputs, output):
        if not broken:
            broken.append(1)
            return output * math.nan
    state.model[0].register_forward_hook(hook)


def break_gradient(state):
    """The next backward pass has a NaN in one gradient; the loss is finite."""
    broken = []
    parameter = state.model[4].weight
    parameter.register_hook(lambda g: broken.append(1) or g * math.nan if not broken else g)


@pytest.mark.parametrize('optimizer, fused', OPTIMIZERS)
@pytest.mark.parametrize('fault', [break_forward, break_gradient])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_an_unsound_step_leaves_every_bit_as_it_was(optimizer, fused, fault, dtype):
    config = settings(optimizer=optimizer)
    state = fresh(config, dtype=dtype)
    assert all(bool(group.get('fused')) is fused for group in state.optimizer.param_groups)
    for i in range(2):
        tu.guarded_step(state, [batch_of(i, i + 1, i + 2)], squares, config)
    before = everything(state)
    fault(state)
    result = tu.guarded_step(state, [batch_of(6, 7), batch_of(8, 9)], squares, config)
    assert result.bad and int(state.bad['total']) == 1
    assert_same(everything(state), before)
    assert not tu.guarded_step(state, [batch_of(6, 7)], squares, config).bad


@pytest.fixture
def uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True)                           # fills torch.empty with NaN
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize('optimizer', ['AdamW', 'SGD', 'RMSprop', 'Adagrad', 'Adam', 'NAdam'])
@pytest.mark.parametrize('fault', [break_forward, break_gradient])
def test_an_unsound_first_step_leaves_no_trace(optimizer, fault, uninitialised_memory_is_nan):
    config = settings(optimizer=optimizer)
    clean, broken = fresh(config), fresh(config)
    fault(broken)
    tu.guarded_step(broken, [batch_of(0, 1)], squares, config)
    for state in (clean, broken):
        for i in range(2):
            tu.guarded_step(state, [batch_of(i, i + 1, i + 2)], squares, config)
    assert_same(everything(broken), everything(clean))


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_a_skipped_step_is_counted_and_told(dtype):
    model = network()
    at_training_call(model[0], lambda call: call == 1 + 3, lambda output: output * math.nan)
    result = train(model, init_scale=8.0, **amp(dtype))
    rows = [row for row in result.history if not row['event']]
    assert [row['step'] for row in rows] == [2, 4, 6]
    assert [row['skipped_steps'] for row in rows] == [0, 1, 1]
    assert events(result.history) == ['skipped a step: loss, statistics or gradient not finite']
    assert last()['step'] == 6 and all(math.isfinite(row['train_loss']) for row in rows)


def log_text():
    return Path('run/log.txt').read_text()


def test_a_run_that_is_never_finite_ends_with_layer_and_files(small_set):
    class Scaled(nn.Module):
        def forward(self, images):
            return images.float() / 255

    model = nn.Sequential(Scaled(), *network())
    at_training_call(model[2], lambda call: call > 2, lambda output: output * math.nan)
    settled = {**OWN, 'image_size': 32, 'num_epochs': 5, 'max_bad_steps': 3}
    with pytest.raises(tu.TrainingDiverged) as error:
        tu.train(model=model, data=str(small_set), **settled)
    text = str(error.value)
    assert '3 steps in a row' in text and 'float32' in text
    assert 'the output of network.2 (BatchNorm2d)' in text
    images = re.findall('in the batch: (.*)', text)
    assert images and all(os.path.exists(image) for image in images)
    assert "train_unet.replay('run/bad_batch.pt')" in text
    written = log_text()                       # all of it, with the line that goes on
    assert all(line.strip() in written for line in text.splitlines())
    assert text.endswith('mended? It goes on with:  python train_unet.py resume=run')
    batch = torch.load('run/bad_batch.pt', weights_only=True)['window']
    assert batch[0]['image'].shape[1:] == (3, 32, 32) and batch[0]['image'].dtype == torch.uint8
    for value in last()['model'].values():
        assert torch.isfinite(value).all()


def test_replay_runs_the_saved_batch_once_more():
    model = network()
    at_training_call(model[1], lambda call: call > 2, lambda output: output * math.nan)
    with pytest.raises(tu.TrainingDiverged):
        train(model, num_epochs=5)
    again = network()
    at_training_call(again[2], lambda call: True, lambda output: output * math.nan)
    assert tu.replay('run/bad_batch.pt', again, squares) == 'first not finite: the output of 2 (ReLU)'
    assert 'all layers are finite' in tu.replay('run/bad_batch.pt', network(), squares)


def test_the_step_of_a_sample_with_nan_is_skipped_in_each_epoch():
    result = train(train_data=Samples(broken=[5]), num_epochs=2)
    assert result.history[-1]['skipped_steps'] == 2


def test_a_gradient_that_is_never_finite_is_told_from_a_forward_pass():
    model = network()
    model[4].weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(tu.TrainingDiverged, match='finite forward, so it is the gradient'):
        train(model, num_epochs=5)


def test_float16_that_overflows_steps_down_and_trains_on():
    def growing():
        """A network that multiplies by 100,000 from step 6 on, then divides: too much for float16 alone."""
        model = network(norm=False)
        calls = at_training_call(model[0], lambda call: call > 5, lambda output: output * 1e5)
        model[4].register_forward_pre_hook(
            lambda m, inputs: (inputs[0] / 1e5,) if m.training and len(calls) > 5 else None)
        return model

    exact = train(growing(), num_epochs=6, run_dir='exact')
    result = train(growing(), num_epochs=6, init_scale=8.0, max_bad_steps=2, **amp('float16'))
    assert sum('precision float16 -> ' in event for event in events(result.history)) == 1
    rows = [row for row in result.history if not row['event']]
    assert rows[0]['precision'] == 'float16' and rows[-1]['precision'] in ('bfloat16', 'float32')
    assert [row['epoch'] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]['val_loss'] < rows[0]['val_loss']
    assert rows[-1]['val_loss'] == pytest.approx(exact.history[-1]['val_loss'], rel=0.01)
    assert rows[-1]['step'] == 12 and not last()['scaler']


def test_float16_looks_for_its_scale_without_a_fuss():
    result = train(init_scale=2.0 ** 24, num_epochs=12, max_bad_steps=2, optimizer='AdamW',
                   **amp('float16'))
    assert events(result.history) == []  # gradients overflow at first, losses do not
    assert result.history[0]['skipped_steps'] > 0
    assert result.history[-1]['precision'] == 'float16'
    assert result.history[-1]['val_loss'] < result.history[0]['val_loss']


def test_float16_gradients_count_once_the_scale_has_fallen_below_one():
    model, calls = network(), []
    model[4].weight.register_hook(
        lambda g: calls.append(1) or (g * math.nan if len(calls) <= 6 else g))
    result = train(model, init_scale=4.0, max_bad_steps=2, **amp('float16'))       # 4, 2, 1, 0.5, 0.25
    told = events(result.history)
    assert '2 unsound steps in a row in float16' in told[-1] and all('skipped' in event for event in told[:-1])
    assert [row['step'] for row in result.history if not row['event']] == [2, 4, 6]


def tuples(dataset):
    """The same as (image, target), as TensorDataset and torchvision give it."""
    return torch.utils.data.TensorDataset(dataset.images, dataset.targets)


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float32'])
@pytest.mark.parametrize('kind', [copy.copy, tuples])
def test_a_nan_in_an_image_is_named_as_such_and_not_as_overflow(kind, dtype):
    data = kind(Samples(8, broken=[5]))
    loss_fn = squares if isinstance(data, Samples) else lambda model, batch: \
        (model(batch[0]) - batch[1]).square().mean((1, 2, 3))
    with pytest.raises(tu.DataError, match=r'\b5\b') as error:  # its number in the data set
        train(None, data, kind(Samples(4)), loss_fn, batch_size=8, max_bad_steps=1, **amp(dtype))
    assert 'not finite' in str(error.value) and 'no precision helps' in str(error.value)


def test_minus_infinity_in_an_image_is_named_too(caplog):
    data = Samples(8)
    data.images[5, 0, 0, 0] = -math.inf
    with pytest.raises(tu.DataError, match='sample 5: holds values that are not finite'):
        train(None, data, Samples(4), batch_size=8, max_bad_steps=1)


def test_patience_does_not_end_a_run_before_its_bad_steps_are_counted():
    """One step in each epoch, none of them sound, and patience for three epochs."""
    model = network()
    at_training_call(model[1], lambda call: True, lambda output: output * math.nan)
    with pytest.raises(tu.TrainingDiverged):
        train(model, batch_size=8, num_epochs=12, early_stopping_patience=3, max_bad_steps=5)


def test_patience_begins_anew_in_a_safer_precision():
    model = network(norm=False)
    at_training_call(model[0], lambda call: True, lambda output: output * 1e6)
    model[4].register_forward_pre_hook(lambda module, inputs: (inputs[0] / 1e6,) if module.training else None)
    result = train(model, batch_size=8, num_epochs=12, early_stopping_patience=3, max_bad_steps=5, **amp('float16'))
    assert sum('precision float16 -> ' in event for event in events(result.history)) == 1
    assert result.history[-1]['precision'] != 'float16' and result.best['epoch'] > 5


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_step_that_spoils_a_running_variance_is_undone(dtype):
    """The square of 1e25 is more than float32 can hold: the variance becomes infinite, while the loss stays finite."""
    model = network()
    at_training_call(model[0], lambda call: call == 4, lambda output: output * 1e25)
    result = train(model, **amp(dtype))
    assert events(result.history) == ['skipped a step: loss, statistics or gradient not finite']
    assert all(torch.isfinite(value).all() for value in last()['model'].values())


# --- out of memory ---

def test_out_of_memory_halves_the_micro_batch_and_keeps_the_experiment():
    epoch_2 = 1 + 2  # training calls: smoke test, two windows
    model, calm = network(norm=False), train(network(norm=False), run_dir='calm')
    counted = at_training_call(model, lambda call: False, None)
    out_of_memory(model[0],
                  lambda m, count, calls: m.training and len(counted) >= epoch_2 and count > 2)
    result = train(model)
    rows = [row for row in result.history if not row['event']]
    assert events(result.history) == ['out of memory: batch_size 4 -> 2, effective batch unchanged']
    assert [row['batch_size'] for row in rows] == [4, 2, 2]
    assert [row['step'] for row in rows] == [2, 4, 6]
    for a, b in zip(result.model.parameters(), calm.model.parameters()):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)  # 2 + 2 rounds differently from 4


def test_a_replay_is_the_step_of_a_smaller_micro_batch_to_the_bit():
    config, window = settings(batch_size=4), [batch_of(0, 1, 2, 3), batch_of(4, 5, 6, 7)]
    small = fresh({**config, 'batch_size': 2}, network(dropout=0.5))
    healed = fresh(config, network(dropout=0.5))
    calls = out_of_memory(healed.model[0], lambda m, count, calls: count > 2 and calls > 1)
    def noisy(model, batch):
        return squares(model, batch) * (random.random() + np.random.rand())

    for state in (small, healed):
        tu.seed_everything(3)                                          # of dropout, and of the loss
        tu.guarded_step(state, window, noisy, config)
    assert calls == [4, 4, 2, 2, 2, 2]
    assert healed.batch_size == 2
    assert_same(everything(healed), everything(small))
    assert healed.model[1].num_batches_tracked == 4


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_out_of_memory_after_the_backward_pass_is_replayed_too(dtype, monkeypatch):
    config, real, calls = settings(batch_size=4, init_scale=8.0), nn.utils.clip_grad_norm_, []

    def failing_once(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError('CUDA out of memory (a test)')
        return real(*args, **kwargs)

    monkeypatch.setattr(nn.utils, 'clip_grad_norm_', failing_once)
    state = fresh(config, dtype=dtype)
    result = tu.guarded_step(state, [batch_of(0, 1, 2, 3)], squares, config)
    assert state.batch_size == 2 and not result.bad


def test_memory_that_the_cpu_really_does_not_have():
    def greedy(module, inputs, output):
        if len(output) > 2:
            torch.empty(2 ** 60, dtype=torch.uint8)

    state = fresh(settings(batch_size=4))
    state.model[0].register_forward_hook(greedy)
    tu.guarded_step(state, [batch_of(0, 1, 2, 3)], squares, settings())
    assert state.batch_size == 2


def test_another_runtime_error_is_not_taken_for_memory():
    model = network()
    at_training_call(model[0], lambda call: call == 2, lambda output: torch.ones(1) @ torch.ones(2))
    with pytest.raises(RuntimeError, match='size'):
        train(model)


def test_out_of_memory_in_the_very_first_step_is_in_the_history():
    model = network()
    out_of_memory(model[0], lambda m, count, calls: m.training and count > 2)
    result = train(model)
    assert events(result.history) == ['out of memory: batch_size 4 -> 2, effective batch unchanged']
    assert {row['batch_size'] for row in result.history if not row['event']} == {2}
    assert last()['batch_size'] == 2


def test_one_image_that_does_not_fit_ends_with_advice():
    model = network()
    out_of_memory(model[0], lambda m, count, calls: m.training)
    with pytest.raises(tu.UserError, match='out of memory(.|\n)*smaller image_size'):
        train(model)


@pytest.mark.parametrize('head', [[], [nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(6)]])  # the second refuses one image
def test_memory_that_ends_a_run_costs_no_step(head):
    def build():
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), *copy.deepcopy(head), nn.Conv2d(6, 1, 1))

    def means(model, batch):
        return (model(batch['image']).mean((1, 2, 3)) - batch['target'].mean((1, 2, 3))).square()

    calm, greedy = train(build(), loss_fn=means, run_dir='calm'), build()
    counted = at_training_call(greedy, lambda call: False, None)
    out_of_memory(greedy[0], lambda m, count, calls: m.training and len(counted) >= 1 + 2 + 1 and count > bool(head))
    with pytest.raises(tu.UserError, match='one image at a time does not fit'):
        train(greedy, loss_fn=means)
    assert last()['step'] == 3                                         # in mid-epoch: the second step of epoch 2 failed
    resumed = train(build(), loss_fn=means, resume='run', run_dir='auto')
    assert_same(resumed.model.state_dict(), calm.model.state_dict())


def test_a_batchnorm_that_refuses_one_image_is_the_floor():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(6),
                          nn.Conv2d(6, 1, 1))
    out_of_memory(model[0], lambda m, count, calls: m.training and count > 1)
    with pytest.raises(tu.UserError, match='out of memory'):           # not BatchNorm's ValueError
        train(model)


@pytest.mark.parametrize('count', [3, 4, 5, 7, 8])
@pytest.mark.parametrize('most', [1, 2])
def test_out_of_memory_in_validation(count, most):
    model = network()
    out_of_memory(model[0], lambda m, size, calls: not m.training and size > most)
    data, by_hand = Samples(count, seed=1), network()
    result = train(model, val_data=data, batch_size=8, num_epochs=1)
    by_hand.load_state_dict(torch.load('run/best.pt', weights_only=True)['weights'])
    batch = torch.utils.data.default_collate([data[i] for i in range(count)])
    exact = squares(by_hand.eval(), batch).mean().item()
    assert result.best['loss'] == pytest.approx(exact, rel=1e-5)
    assert [row['event'].split(':')[0] for row in result.history] == ['out of memory in validation', '']


@pytest.fixture
def failing_optimizer():
    """Makes optimizer steps run out of memory, by their number; the first is the smoke test's."""
    handles, steps = [], []

    def fail(when):
        def hook(optimizer, args, kwargs):
            steps.append(1)
            if len(steps) > 50:
                pytest.fail('the run goes round in circles')
            if when(len(steps)):
                optimizer.param_groups[0]['params'][0].data.fill_(9)   # half updated
                raise torch.OutOfMemoryError('CUDA out of memory (a test)')
        handles.append(register_optimizer_step_pre_hook(hook))
        return steps
    yield fail
    [handle.remove() for handle in handles]


def test_out_of_memory_inside_the_update_goes_back_to_the_last_checkpoint(failing_optimizer):
    calm = train(network(norm=False), run_dir='calm')
    failing_optimizer(lambda step: step == 1 + 2 + 2)  # smoke test, epoch 1, the second of epoch 2
    result = train(network(norm=False))
    rows = [row for row in result.history if not row['event']]
    assert events(result.history) == ['out of memory inside the optimizer step']
    assert [row['step'] for row in rows] == [2, 4, 6]
    assert [row['batch_size'] for row in rows] == [4, 2, 2]
    for a, b in zip(result.model.parameters(), calm.model.parameters()):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_going_back_holds_nothing_of_the_update_that_failed(monkeypatch):
    steps, temporaries, held, real = [], [], [], tu.load_checkpoint

    def hook(optimizer, args, kwargs):
        steps.append(1)
        if len(steps) == 5:
            temporary = torch.zeros(1000)
            temporaries.append(weakref.ref(temporary))
            raise torch.OutOfMemoryError('CUDA out of memory (a test)')

    def load_checkpoint(*rest):
        held.extend(temporary() is not None for temporary in temporaries)
        return real(*rest)

    monkeypatch.setattr(tu, 'load_checkpoint', load_checkpoint)
    handle = register_optimizer_step_pre_hook(hook)
    train(network(norm=False))
    handle.remove()
    assert held and not any(held)


def test_out_of_memory_inside_the_very_first_update(failing_optimizer):
    failing_optimizer(lambda step: step == 1)  # AdamW allocates its state there
    result = train()
    assert [row['step'] for row in result.history if not row['event']] == [2, 4, 6]
    assert len(events(result.history)) == 1


def test_out_of_memory_inside_every_update_ends_with_advice(failing_optimizer):
    steps = failing_optimizer(lambda step: step > 1)
    with pytest.raises(tu.UserError, match='out of memory'):
        train()
    assert len(steps) < 20
    assert all((weight != 9).any() for weight in last()['weights'].values())


# --- torch.compile ---

def failing_backend(graph, inputs):
    raise RuntimeError('no compiler on this machine (a test)')


def refuse_to_compile(model, *args, **kwargs):
    raise RuntimeError('torch.compile is not supported here (a test)')


def compile_in_vain(model, real=nn.Module.compile):
    return real(model, backend=failing_backend)


def compile_what_fails_backward(model):
    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            raise RuntimeError('no kernel for the backward pass (a test)')

    model._compiled_call_impl = lambda *inputs: Fail.apply(model._call_impl(*inputs))


class Wrapped(nn.Module):
    """torch 2.6 compiles no nn.Sequential."""

    def __init__(self, layers=None):
        super().__init__()
        self.layers = layers or network(dropout=0.5)

    def forward(self, images):
        return self.layers(images)


def refuse_as_a_broken_library_does(model):
    raise ImportError('libtriton.so: cannot open shared object file (a test)')


def compile_what_triton_refuses(model):
    class TritonError(Exception):
        """Stands for Triton's own, which is no RuntimeError."""

    def compiled(*inputs):
        raise TritonError('out of resource: shared memory (a test)')

    module = types.ModuleType('triton.errors')
    module.TritonError = TritonError
    sys.modules['triton.errors'] = module
    model._compiled_call_impl = compiled


def compile_what_a_broken_program_compiles(model):
    def compiled(*inputs):
        raise subprocess.CalledProcessError(1, 'ptxas (a test)')

    model._compiled_call_impl = compiled


def compile_with_too_little_memory(model):
    """That of the compiler's own process: a smaller batch would not help."""
    def compiled(*inputs):
        raise torch._inductor.exc.CppCompileError(['g++', 'x.cpp'], 'cc1plus: out of memory (a test)')

    import torch._inductor.exc
    model._compiled_call_impl = compiled


def compile_what_fails_in_validation(model):
    def compiled(*inputs):
        if not model.training:
            raise RuntimeError('no graph for evaluation (a test)')
        return model._call_impl(*inputs)

    model._compiled_call_impl = compiled


@pytest.mark.parametrize('broken_compile', [
    refuse_to_compile, compile_in_vain, compile_what_fails_backward, refuse_as_a_broken_library_does,
    compile_what_fails_in_validation, compile_what_triton_refuses, compile_with_too_little_memory,
    compile_what_a_broken_program_compiles])
def test_a_network_that_does_not_compile_trains_without(broken_compile, monkeypatch):
    monkeypatch.setitem(sys.modules, 'triton.errors', None)            # put back at the end
    plain = train(Wrapped(), run_dir='plain')
    monkeypatch.setattr(nn.Module, 'compile', broken_compile)
    result = train(Wrapped(), compile_model=True)
    log = (result.run_dir / 'log.txt').read_text()
    assert 'torch.compile does not work here' in log and '(a test)' in log
    assert_same(result.model.state_dict(), plain.model.state_dict())
    assert not events(result.history)


@pytest.mark.parametrize('error', [ValueError, OSError, RuntimeError, KeyError])
def test_an_error_of_the_users_loss_is_none_of_the_compiler(error, monkeypatch):
    calls = []

    def loss(model, batch):
        calls.append(1)
        losses = squares(model, batch)
        if len(calls) == 8:                                            # once: the replay would pass
            raise error('label out of range (a test)')
        return losses

    monkeypatch.setattr(nn.Module, 'compile', lambda model: setattr(model, '_compiled_call_impl', model._call_impl))
    with pytest.raises(error, match='a test'):
        train(Wrapped(), loss_fn=loss, compile_model=True)
    assert len(calls) == 8 and 'torch.compile does not work' not in log_text()


def test_a_compiler_that_fails_in_validation_changes_no_random_number(monkeypatch):
    def noisy(model, batch):
        noise = torch.rand(len(batch['image']))
        return squares(model, batch) + noise

    calls = []

    def fail_once(model):
        def compiled(images):
            calls.append(model.training)
            if calls.count(False) == 4:
                raise RuntimeError('no code for it (a test)')
            return model._call_impl(images)
        model._compiled_call_impl = compiled

    plain = train(Wrapped(), loss_fn=noisy, run_dir='plain')
    monkeypatch.setattr(nn.Module, 'compile', fail_once)
    result = train(Wrapped(), loss_fn=noisy, compile_model=True)
    assert 'torch.compile does not work here' in log_text()
    assert [row['val_loss'] for row in result.history] == [row['val_loss'] for row in plain.history]


@pytest.mark.parametrize('is_training', [True, False], ids=['training', 'validation'])
def test_a_compiler_that_fails_in_mid_run_is_left_and_the_step_replayed(is_training, monkeypatch):
    """torch compiles anew for a size it has not met; its own machinery raises what the backend does."""
    def backend(graph, inputs):                                        # a leftover of two or three images, of 14
        if torch.is_grad_enabled() == is_training and any(isinstance(size, torch.SymInt) for size in inputs):
            raise RuntimeError('no code for such sizes (a test)')
        return graph.forward

    sets = dict(train_data=Samples(14), val_data=Samples(7), batch_size=4)
    plain = train(Wrapped(), run_dir='plain', **sets)
    compiles = nn.Module.compile
    monkeypatch.setattr(nn.Module, 'compile', lambda model: compiles(model, backend=backend))
    result = train(Wrapped(), compile_model=True, **sets)
    log = log_text()
    assert log.index('Compiled in') < log.index('torch.compile does not work here') and '(a test)' in log
    assert_same(result.model.state_dict(), plain.model.state_dict())
    assert not events(result.history)


@pytest.mark.parametrize('first', [1, 4])
def test_a_compiled_model_that_runs_out_of_memory_is_replayed_and_stays_compiled(first, monkeypatch):
    """In the first step, which is also the probe of compiling, and in the second epoch; raised by the compiled graph."""
    passes, compiles = [], nn.Module.compile

    def backend(graph, inputs):
        def run(*inputs):
            images = next(value for value in inputs if torch.is_tensor(value) and value.shape[1:] == (3, 8, 8))
            passes.append(len(images))
            if torch.is_grad_enabled() and len(images) > 2 and sum(n > 2 for n in passes) >= first:
                raise torch.OutOfMemoryError('CUDA out of memory (a test)')
            return graph.forward(*inputs)
        return run

    calm = train(network(norm=False), run_dir='calm')
    monkeypatch.setattr(nn.Module, 'compile', lambda model: compiles(model, backend=backend))
    result = train(Wrapped(network(norm=False)), compile_model=True)
    assert events(result.history) == ['out of memory: batch_size 4 -> 2, effective batch unchanged']
    assert 'does not work here' not in (result.run_dir / 'log.txt').read_text()
    rows = [row for row in result.history if not row['event']]
    assert [row['step'] for row in rows] == [2, 4, 6] and len(passes) > 6
    for a, b in zip(result.model.parameters(), calm.model.parameters()):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_tenth_compiled_training_of_a_process_is_compiled_too(monkeypatch):
    """torch keeps what it compiled for one line of code, also of networks that are gone, and from the ninth on it runs
    eager and says nothing."""
    graphs, compiles = [], nn.Module.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, 'compile', lambda model: compiles(model, backend=backend))
    for number in range(10):
        before = len(graphs)
        width = 3 + number                                             # never the same network again
        layers = nn.Sequential(nn.Conv2d(3, width, 1), nn.ReLU(), nn.Conv2d(width, 1, 1))
        train(Wrapped(layers), compile_model=True, num_epochs=1, train_data=Samples(4), run_dir=f'run{number}')
        assert len(graphs) > before, f'training {number} was not compiled'


def test_a_failed_training_leaves_nothing_in_its_frames():
    """A notebook keeps the last error, with it every frame, and so the network on the GPU."""
    class Breaks(Samples):
        def __getitem__(self, index):
            if index == 7:
                raise tu.DataError('number 7 is broken')
            return super().__getitem__(index)

    with pytest.raises(tu.DataError) as caught:
        train(train_data=Breaks())
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    below = frames[[frame.f_code.co_name for frame in frames].index('run_training'):]
    assert len(below) > 3 and not any(frame.f_locals for frame in below)


@pytest.mark.parametrize('momentum, waits', [(0.9, 1), (0.0, 0)])
def test_sgd_asks_for_its_step_only_before_it_has_a_state(momentum, waits, monkeypatch):
    """What is asked waits for a GPU: once, or never where there will be no state."""
    config = {**tu.CONFIG, 'encoder': 'tu-test_resnet', 'decoder_channels': [8] * 5, 'mean': [0.0], 'std': [1.0],
              'num_classes': 2, 'image_size': [32, 32], 'image_dtype': 'uint8', 'learning_rate': 0.01, 'ema_decay': None,
              'optimizer': 'SGD', 'momentum': momentum, 'progressive_resizing': 0.0}
    state = fresh(config, tu.build_model(config))
    batch, asked, item = {'image': torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
                          'mask': torch.ones(2, 32, 32, dtype=torch.uint8)}, [], torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, 'item', lambda value: asked.append(value.dtype) or item(value))
    before = state.parts.parameters[0].detach().clone()
    for _ in range(3):
        tu.guarded_step(state, [batch], tu.SegmentationLoss(config), config)
    assert asked.count(torch.bool) == waits and not torch.equal(before, state.parts.parameters[0])


def test_pictures_that_cannot_be_drawn_cost_no_training(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)        # an installation that is broken
    assert train(num_epochs=1).best['loss'] > 0
    assert 'the pictures could not be written: import of matplotlib.figure halted' in log_text()


# --- a network, loss and data of one's own ---

def test_the_caller_draws_on_as_if_no_training_had_been():
    model = network()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    calm = random.random(), np.random.rand(), torch.rand(1).item()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    train(model, num_epochs=1)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == calm


@pytest.mark.parametrize('before', [True, False])
@pytest.mark.parametrize('deterministic', [True, False])
def test_a_training_leaves_deterministic_algorithms_as_the_caller_has_them(before, deterministic):
    seen = []

    def loss_fn(model, batch):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return squares(model, batch)

    torch.use_deterministic_algorithms(before)
    try:
        train(num_epochs=1, deterministic=deterministic, loss_fn=loss_fn)
        assert torch.are_deterministic_algorithms_enabled() == before and set(seen) == {before or deterministic}
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_model_of_a_result_can_be_trained_on():
    first = train(num_epochs=1, ema_decay=0.9)
    start = {key: value.clone() for key, value in first.model.state_dict().items()}
    second = train(first.model, num_epochs=1, ema_decay=0.9, run_dir='again')
    assert any(not torch.equal(start[key], value) for key, value in second.model.state_dict().items())


def test_a_second_stage_has_the_settings_it_was_given(small_set):
    words = {**TINY, 'data': str(small_set), 'num_epochs': 1}
    first = tu.train(**words, run_dir='first', mean=0.0)
    second = tu.train(**{**words, 'image_size': 64}, run_dir='second', model=first.model, mean=100.0)
    assert second.model.config['image_size'] == [64, 64]
    assert second.model.mean.flatten().tolist() == [100.0] * 3
    image = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    assert (tu.load('second').predict(image) == second.model.predict(image)).all()


class Lazily(torch.utils.data.Dataset):
    """Records of a file that is opened when the first one is asked for, as HDF5 and zip files usually are."""
    file = None

    def __init__(self, path, count=64):
        self.path, self.count = path, count
        np.repeat(np.arange(count, dtype=np.float32), 300_000).tofile(path)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.file = self.file or open(self.path, 'rb', buffering=0)
        self.file.seek(index * 1_200_000)
        time.sleep(0.002)                                              # where another worker may seek
        return {'wanted': torch.tensor(float(index)), 'read': torch.from_numpy(np.frombuffer(self.file.read(4),
                                                                                             np.float32).copy())}


def test_workers_do_not_share_a_file_that_a_data_set_opens_when_it_is_asked(tmp_path):
    wrong = []

    def loss_fn(model, batch):
        wrong.append(int((batch['read'][:, 0] != batch['wanted']).sum()))
        return model(batch['read'] * 0).square().mean(1)

    data = Lazily(tmp_path / 'records')
    train(nn.Linear(1, 1), data, data, loss_fn, num_epochs=3, num_workers=2)
    assert len(wrong) > 3 * 2 * 16 and sum(wrong) == 0


class Words(torch.utils.data.Dataset):
    """Samples of different lengths, in a mapping that is no dict."""
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return UserDict(x=torch.ones(index + 1))

    @staticmethod
    def collate_fn(samples):
        assert all(type(sample) is dict for sample in samples)
        return {'x': nn.utils.rnn.pad_sequence([sample['x'] for sample in samples], batch_first=True)}


def test_a_data_set_may_bring_its_collate_fn_and_any_mapping():
    result = train(nn.Linear(1, 1), Words(), Words(),
                   lambda model, batch: model(batch['x'].sum(1, keepdim=True)).square().mean(1), num_epochs=1)
    assert len(result.history) == 1


@pytest.mark.parametrize('first', [torch.arange(3), torch.ones(3, dtype=torch.complex64)])
def test_samples_take_the_precision_of_the_weights_not_of_what_comes_first(first):
    model = network()
    model.register_parameter('table', nn.Parameter(first, requires_grad=False))
    seen = []
    model.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0].dtype))
    assert next(model.parameters()) is model.table
    train(model, num_epochs=1)
    assert set(seen) == {torch.float32}


def test_a_network_without_weights_to_train_is_refused_in_words():
    with pytest.raises(tu.UserError, match='has no weights to train'):
        train(network().requires_grad_(False))


def test_what_the_loop_cannot_train_is_refused_before_anything_is_written():
    weighted = nn.Module()
    weighted.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(tu.UserError, match='weights of its own'):
        train(loss_fn=weighted)
    with pytest.raises(tu.UserError, match='weights of its own'):
        tu.train(loss_fn=weighted)                                     # and a network of ours

    class Endless(torch.utils.data.IterableDataset):
        def __len__(self):
            return 8

        def __iter__(self):
            return iter(Samples())

    for data in ({'train_data': torch.utils.data.DataLoader(Samples())}, {'val_data': Endless()}):
        with pytest.raises(tu.UserError, match=f'{[*data][0]}: .* of a DataLoader give its .dataset'):
            train(**data)
    assert not Path('run').exists()


def test_runs_on_data_sets_of_ones_own_are_not_taken_for_others(small_set):
    words = {**OWN, 'run_dir': 'auto'}
    train(stop_at(network(), 4), **{**words, 'num_epochs': 3})
    with pytest.raises(tu.UserError, match='give run_dir too'):
        train(**words, resume='auto')
    with pytest.raises(tu.UserError, match='go on from Python, with what it began with'):
        tu.train(resume='runs/run-1')
    assert tu.find_resume({**tu.CONFIG, 'resume': 'auto'}) is None     # the demo, or another set
    assert train(run_dir='auto', resume='runs/run-1').stopped_by == 0

class Classes(torch.utils.data.Dataset):
    """Images with a bright quarter, and which quarter it is."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(count) % 4
        self.images = torch.rand(count, 1, 8, 8, generator=generator)
        for image, label in zip(self.images, self.labels):
            image[:, label // 2 * 4:label // 2 * 4 + 4, label % 2 * 4:label % 2 * 4 + 4] += 1

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_same_loop_trains_a_classifier(dtype):
    """A small ResNet, without its shrinking stem: the images are 8 x 8."""
    torch.manual_seed(0)
    model = timm.create_model('test_resnet', num_classes=4, in_chans=1)
    model.conv1, model.maxpool = nn.Conv2d(1, model.bn1.num_features, 3, padding=1), nn.Identity()

    def loss_fn(model, batch):
        images, labels = batch
        logits = model(images)
        return (F.cross_entropy(logits, labels, reduction='none'),
                tu.confusion_matrix(logits.argmax(1), labels, 4))

    result = train(model, Classes(32, 0), Classes(16, 1), loss_fn, batch_size=8, num_epochs=6,
                   optimizer='AdamW', **amp(dtype))
    assert result.history[-1]['precision'] == dtype
    assert result.history[-1]['val_loss'] < 0.5 * result.history[0]['val_loss']
    assert result.best['accuracy'] > 0.9


class Denoiser(nn.Module):
    """A U-Net of two levels that is told the timestep."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(1, 16)
        self.enter, self.down = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, 2, 1)
        self.up, self.leave = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(32, 1, 3, padding=1)

    def forward(self, x, *, t):
        x = F.silu(self.enter(x) + self.time(t.float()[:, None] / 50)[..., None, None])
        low = F.silu(self.up(F.silu(self.down(x))))
        return self.leave(torch.cat([x, F.interpolate(low, scale_factor=2.0)], 1))


def denoising_loss(model, batch):
    """Ho et al. 2020: predict the noise that was mixed in."""
    t = torch.randint(1, 50, (len(batch),), device=batch.device)
    keep = torch.cos(t / 50 * math.pi / 2).square().view(-1, 1, 1, 1)
    noise = torch.randn_like(batch)
    guess = model(keep.sqrt() * batch + (1 - keep).sqrt() * noise, t=t)
    return (guess - noise).square().mean((1, 2, 3))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_the_same_loop_trains_a_diffusion_network(dtype):
    torch.manual_seed(0)
    images = torch.utils.data.Subset(Classes(64, 0).images * 2 - 1, range(64))  # plain tensors
    result = train(Denoiser(), images, images, denoising_loss, batch_size=16, num_epochs=15,
                   optimizer='AdamW', ema_decay=0.9, **amp(dtype))
    assert result.history[-1]['precision'] == dtype
    assert result.history[-1]['train_loss'] < 0.75 * result.history[0]['train_loss']


@pytest.mark.parametrize('wrong', [
    lambda losses: losses.mean(), lambda losses: losses[:, None], lambda losses: losses[:-1],
    lambda losses: losses.mean().item(), lambda losses: None],
    ids=['mean', 'column', 'too few', 'float', 'None'])
def test_a_loss_of_the_wrong_shape_is_told_clearly(wrong):
    with pytest.raises(TypeError, match='one loss per sample'):
        train(loss_fn=lambda model, batch: wrong(squares(model, batch)))


# --- epochs ---

class Deadly(Samples):
    """Kills the worker that reads number 5, once."""
    signal = signal.SIGKILL

    def __getitem__(self, index):
        if index == 5 and torch.utils.data.get_worker_info() and not os.path.exists('killed'):
            open('killed', 'w').close()
            os.kill(os.getpid(), self.signal)
        return super().__getitem__(index)


class Frozen(Deadly):
    """Freezes it, as a network drive that is gone does: it hears no request to end either."""
    signal = signal.SIGSTOP


def kill(which, training):
    """A loss that kills a worker of the train (0) or val (1) loader, in training or validation."""
    def loss_fn(model, batch):
        workers = sorted(multiprocessing.active_children(), key=lambda worker: worker.pid)
        pairs = [workers[:2], workers[2:]]  # those of validation are started later
        if pairs[which] and torch.is_grad_enabled() is training and not os.path.exists('killed'):
            open('killed', 'w').close()
            os.kill(pairs[which][0].pid, signal.SIGKILL)
            time.sleep(0.5)                                            # torch raises in here
        return squares(model, batch)
    return loss_fn


@pytest.fixture
def two_minutes():
    """A run that hangs fails instead."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail('it hangs'))
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize('data, loss_fn', [
    (Deadly, squares), (Samples, kill(0, training=True)), (Samples, kill(1, training=False)),
    (Samples, kill(0, training=False)), (Samples, kill(1, training=True))],
    ids=['reading', 'train worker in training', 'val worker in validation',
         'train worker in validation', 'val worker in training'])
def test_a_worker_that_is_killed_is_replaced(data, loss_fn, two_minutes):
    calm = train(None, Samples(12), run_dir='calm')
    result = train(None, data(12), loss_fn=loss_fn, num_workers=2)
    assert os.path.exists('killed')
    assert_same(result.model.state_dict(), calm.model.state_dict())


def test_a_worker_that_hangs_is_replaced(two_minutes, hasty, monkeypatch):
    monkeypatch.setattr(tu, 'WORKER_TIMEOUT', 2)
    calm = train(None, Samples(12), run_dir='calm')
    result = train(None, Frozen(12), num_workers=2)
    assert os.path.exists('killed') and not workers()
    assert_same(result.model.state_dict(), calm.model.state_dict())


class CutOff(Samples):
    def __getitem__(self, index):
        if Path('run/history.csv').exists() and not Path('cut').exists():
            Path('cut').touch()
            raise ConnectionResetError('Connection reset by peer')
        return super().__getitem__(index)


def test_a_worker_that_is_killed_while_it_hands_over_a_batch_is_replaced():
    calm = train(None, Samples(12), run_dir='calm')
    result = train(None, CutOff(12))
    assert os.path.exists('cut')
    assert_same(result.model.state_dict(), calm.model.state_dict())


def workers():
    """Process ids of the data workers; multiprocessing still lists one whose end torch interrupted."""
    return [child.pid for child in multiprocessing.active_children() if tu.Path(f'/proc/{child.pid}').exists()]


def kill_a_worker():
    """And wait, because torch raises wherever the main process is when it hears of it."""
    os.kill(workers()[0], signal.SIGKILL)
    time.sleep(0.5)


def test_an_error_of_ones_own_data_in_a_worker_is_no_death(two_minutes):
    class Buggy(Samples):
        def __getitem__(self, index):
            if os.path.exists('run/history.csv'):
                raise RuntimeError('shapes do not fit (a test)')
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match=r'shapes do not fit \(a test\)'):
        train(None, Buggy(12), num_workers=1)
    assert 'starting the workers again' not in log_text()


def test_a_run_that_ends_in_its_first_epoch_leaves_no_empty_table(two_minutes):
    def loss_fn(model, batch):
        steps.append(torch.is_grad_enabled())
        if sum(steps) > 2:                                             # the first one is the smoke test's
            raise RuntimeError('of the loss (a test)')
        return squares(model, batch)

    steps = []
    with pytest.raises(RuntimeError, match='of the loss'):
        train(None, Samples(12), loss_fn=loss_fn)
    assert 'run' in os.listdir() and 'history.csv' not in os.listdir('run')


def test_workers_that_always_die_end_the_run(two_minutes):
    def loss_fn(model, batch):
        if workers() and torch.is_grad_enabled():
            kill_a_worker()
        return squares(model, batch)

    with pytest.raises(tu.UserError, match='DataLoader worker'):
        train(None, Samples(12), loss_fn=loss_fn, num_workers=1)
    assert (tu.Path('run') / 'log.txt').read_text().count('starting the workers again') == 3
    assert tu.load_last('run')[0]['step'] >= 3                         # every step that was done is saved


@pytest.mark.parametrize('name', ['best.pt', 'last.pt', 'history.csv'])
def test_a_worker_that_is_killed_while_an_epoch_is_saved_costs_nothing(name, two_minutes, monkeypatch):
    calm, real, killed = train(None, Samples(12), run_dir='calm'), os.replace, []

    def replace(source, target):
        if str(target) == f'run/{name}' and workers() and not killed:
            killed.append(1)
            kill_a_worker()
        real(source, target)

    monkeypatch.setattr(os, 'replace', replace)
    signal.alarm(20)                                                   # it takes one
    result = train(None, Samples(12), num_workers=2)
    assert killed and [row['epoch'] for row in result.history] == [1, 2, 3]
    assert_same(result.model.state_dict(), calm.model.state_dict())
    assert tu.load_last('run')[0]['epoch'] == 3 and result.best['epoch'] == calm.best['epoch']


# --- files that break during the run ---

@pytest.fixture
def breaking(small_set, monkeypatch):
    """A run on files; when its second epoch begins, something happens to one training image."""
    waits, sleep = [], time.sleep
    monkeypatch.setattr(time, 'sleep', lambda seconds: waits.append(seconds) or sleep(seconds / 100))

    def run(happen, **changes):
        data = tu.SegmentationDataset
        chosen = [small_set / 'images' / '003.png']
        real, begun = data.__getitem__, []

        def get(self, key):
            if isinstance(key, tuple) and key[0] == 1 and not begun:
                begun.append(happen(chosen[0]))
            return real(self, key)

        monkeypatch.setattr(data, '__getitem__', get)
        quiet = {'val_fraction': 0.2, 'cache_images': False, 'augment': 'none', 'image_size': 32}
        rows = tu.find_pairs({**tu.CONFIG, 'data': str(small_set)})
        if str(chosen[0]) not in map(os.fsdecode, rows.images[rows.rows('train')]):
            chosen[0] = tu.Path(os.fsdecode(rows.images[rows.rows('train')][0]))
        model = nn.Sequential(Bytes(), *network())
        result = tu.train(model=model, data=str(small_set), **{**OWN, **quiet, **changes})
        return result, chosen[0], waits
    return run


class Bytes(nn.Module):
    def forward(self, images):
        return images.float() / 255


def cut(path):
    path.write_bytes(path.read_bytes()[:100])


FAULTS = [lambda path: path.unlink(missing_ok=True), cut, lambda path: path.write_bytes(b'')]


@pytest.mark.parametrize('happen, num_workers', [*zip(FAULTS, [0, 0, 0]), (cut, 1)],
                         ids=['vanishes', 'is cut', 'is empty', 'is cut, in a worker'])
def test_a_file_that_breaks_is_tried_three_times_and_named(breaking, happen, num_workers):
    with pytest.raises(tu.DataError) as error:
        breaking(happen, num_workers=num_workers)
    assert re.search(r'/images/\d\d\d\.png: cannot be read', str(error.value))
    assert last()['epoch'] == 1                                        # what was done is kept
    assert 'python train_unet.py resume=run' in str(error.value)
    assert 'skip_broken=True leaves out files that cannot be read' in log_text()


@pytest.mark.parametrize('num_workers', [0, 1])
def test_a_file_that_breaks_is_left_out_counted_and_listed_if_allowed(breaking, num_workers):
    result, path, waits = breaking(cut, num_workers=num_workers, skip_broken=True)
    assert [row['epoch'] for row in result.history] == [1, 2, 3]
    end = (result.run_dir / 'log.txt').read_text().splitlines()[-4:]
    assert [line for line in end if f'left out 2 times, because it or its mask could not be read: {path}' in line]
    assert last()['left_out'] == {str(path): 2}
    if not num_workers:
        assert len(waits) == 2 * 2                                     # three attempts in two epochs


def test_a_file_that_comes_back_is_read(breaking, monkeypatch):
    """As on a network drive: two attempts fail, the third does not."""
    import PIL.Image
    real, failed = PIL.Image.open, []

    def happen(broken):
        def flaky(path, *args, **kwargs):
            if str(path) == str(broken) and len(failed) < 2:
                failed.append(path)
                raise OSError(5, 'Input/output error')
            return real(path, *args, **kwargs)
        monkeypatch.setattr(PIL.Image, 'open', flaky)

    result, _, waits = breaking(happen)
    assert len(failed) == len(waits) == 2 and len(result.history) == 3 and not last()['left_out']


@pytest.mark.parametrize('batch_size, accumulation_steps', [(4, 1), (2, 3), (3, 1)])
def test_every_image_is_seen_once_per_epoch_in_a_new_order(batch_size, accumulation_steps):
    seen = []

    def loss_fn(model, batch):
        if torch.is_grad_enabled():
            seen.extend(batch['index'].tolist())
        return squares(model, batch)

    train(None, Samples(10), loss_fn=loss_fn, batch_size=batch_size,
          accumulation_steps=accumulation_steps)
    epochs = [seen[-30:-20], seen[-20:-10], seen[-10:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_best_epoch_is_kept_and_a_run_without_progress_stops():
    model = network()
    at_training_call(model, lambda call: call > 5,  # from then on it learns nonsense
                     lambda output: output + 100 * output.detach().sign())
    result = train(model, num_epochs=20, early_stopping_patience=3, learning_rate=0.003)
    rows = [row for row in result.history if not row['event']]
    best = min(rows, key=lambda row: row['val_loss'])
    assert len(rows) == best['epoch'] + 3 < 20
    assert result.best['epoch'] == best['epoch']
    loader = torch.utils.data.DataLoader(Samples(5, seed=1), 4)
    again = tu.evaluate(result.model, loader, squares, 'float32')['loss']
    assert again == pytest.approx(best['val_loss'])


def test_a_score_that_is_never_a_number_still_leaves_a_best_model():
    def loss_fn(model, batch):  # no foreground in truth or prediction: IoU is NaN
        return squares(model, batch), torch.tensor([[len(batch['image']), 0], [0, 0]])

    result = train(loss_fn=loss_fn)
    assert math.isnan(result.history[-1]['val_iou'])
    assert (result.run_dir / 'best.pt').exists() and result.best


# --- found by reading the issues against the code -------------------------------------


def test_a_compiled_network_is_not_the_one_made_for_export(monkeypatch):
    """On torch 2.7 to 2.13 torch.compiler.is_exporting() is true inside torch.compile too."""
    monkeypatch.setattr(torch.compiler, 'is_exporting', lambda: True, raising=False)
    monkeypatch.setattr(tu, 'pad_by_index', None)
    config = {**tu.CONFIG, 'num_classes': 2, 'mean': [0.0], 'std': [1.0], 'encoder': 'tu-test_resnet',
              'decoder_channels': [8] * 5, 'image_size': [40, 40]}
    model = tu.build_model(config).eval()
    assert model(torch.zeros(1, 3, 40, 40)).shape == (1, 1, 40, 40)


def test_volumes_are_no_obstacle(tmp_path):
    """A network of 3-D convolutions has no channels_last of four dimensions."""
    net = torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3, padding=1), torch.nn.Flatten())
    data = [{'x': torch.randn(1, 4, 4, 4)} for _ in range(8)]
    result = tu.train(model=net, train_data=data, val_data=data, num_epochs=1, device='cpu', use_amp=False,
                      run_dir=str(tmp_path / 'run'), loss_fn=lambda model, batch: model(batch['x']).square().mean(1))
    assert len(result.history) == 1


@pytest.mark.parametrize('given, told', [(['train_data'], 'model and val_data and loss_fn'),
                                         (['train_data', 'val_data', 'model'], 'give loss_fn too')])
def test_what_is_missing_for_data_of_ones_own_is_said(given, told):
    own = {'model': torch.nn.Linear(1, 1), 'train_data': [0], 'val_data': [0], 'loss_fn': len}
    with pytest.raises(tu.UserError, match=told):
        tu.train(**{name: own[name] for name in given})


def test_the_rate_for_data_of_ones_own_follows_the_stated_rule():
    for words, rate in ({}, 2e-3), ({'batch_size': 32}, 4e-3), ({'optimizer': 'SGD', 'batch_size': 16}, 0.04):
        assert tu.settle_own({**tu.CONFIG, **words})['learning_rate'] == rate


def test_what_a_worker_could_not_read_is_one_clear_line():
    """torch wraps the traceback of a worker around the message."""
    error = tu.DataError(['/a/b.jpg: cannot be read: OSError: truncated', 'another line'])
    wrapped = torch._utils.ExceptionWrapper((type(error), error, error.__traceback__), 'in DataLoader worker process 0')
    with pytest.raises(tu.DataError) as caught:
        wrapped.reraise()
    assert str(caught.value) == str(error)


def test_class_weights_travel_to_the_device_once():
    """A copy from the host in each step would wait for the device."""
    loss_fn = tu.SegmentationLoss({**tu.CONFIG, 'num_classes': 2, 'image_size': [4, 4]}, torch.ones(2))
    loss_fn.losses(torch.zeros(1, 1, 4, 4, device='meta'), torch.zeros(1, 4, 4, dtype=torch.long, device='meta'))
    assert loss_fn.class_weights.device.type == 'meta'


# --- what an audit by running found ---

class Nothing(nn.Module):
    """A layer that gives NaN."""

    def forward(self, images):
        return images * math.nan


def test_nan_in_every_step_of_a_short_run_is_no_success():
    with pytest.raises(tu.TrainingDiverged, match='the output of 1 \\(Nothing\\)'):
        train(model=nn.Sequential(nn.Conv2d(3, 1, 1), Nothing()), num_epochs=1)


def test_an_epoch_without_a_sound_step_has_no_loss():
    """float16 gradients that overflow until the scale is found: 2^40 needs more steps than the epoch has."""
    result = train(num_epochs=20, use_amp=True, amp_dtype='float16', init_scale=2.0 ** 24, batch_size=8)
    losses = [row['train_loss'] for row in result.history if not row['event']]
    assert math.isnan(losses[0]) and losses[-1] > 0


class Missing(Samples):
    """Half of the targets are missing: NaN, which the loss leaves out."""

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.targets[::2, :, :4] = math.nan


def known_squares(model, batch):
    known = ~batch['target'].isnan()
    difference = torch.where(known, model(batch['image']) - batch['target'].nan_to_num(), 0)
    return difference.square().sum((1, 2, 3)) / known.sum((1, 2, 3))


class Large(nn.Module):
    """A layer whose output float16 cannot hold."""

    def forward(self, images):
        return images * 1e6 / 1e6


def test_nan_that_the_loss_leaves_out_is_not_to_blame():
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Large(), nn.Conv2d(8, 1, 1))
    result = train(model=model, train_data=Missing(), val_data=Missing(4), loss_fn=known_squares, num_epochs=4,
                   use_amp=True, amp_dtype='float16', max_bad_steps=2)
    assert 'precision float16 -> ' in ' '.join(row['event'] for row in result.history)
    assert result.history[-1]['train_loss'] > 0


def test_with_nan_in_a_validation_sample_the_last_weights_are_kept(caplog):
    result = train(val_data=Samples(5, broken=[3]))
    assert 'The validation loss is not finite' in caplog.text
    assert result.best['epoch'] == 3                                   # not the first, which no score prefers


@pytest.mark.parametrize('wrong', [{'train_data': iter([1])}, {'val_data': []}, {'train_data': Samples(0)}])
def test_data_that_cannot_be_asked_or_is_empty_is_refused_in_words(wrong):
    with pytest.raises(tu.UserError, match='map-style Dataset'):
        train(**wrong)


def test_one_image_that_batchnorm_refuses_is_told_in_words():
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))
    with pytest.raises(tu.UserError, match='type batch_size=2'):
        train(model=model, batch_size=1)


def test_a_network_of_16_bits_gets_float32_weights(caplog):
    result = train(model=network().bfloat16(), num_epochs=1)
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    assert 'they are now' in caplog.text


@pytest.mark.parametrize('weight', [torch.tensor(math.nan), torch.full((9,), math.nan)])
def test_what_a_batch_holds_once_and_is_not_finite_ends_the_run_in_words(weight):
    class Weighted(Samples):
        def collate_fn(self, samples):
            return torch.utils.data.default_collate(samples) | {'weight': weight}

    with pytest.raises(tu.TrainingDiverged, match='not finite'):
        train(train_data=Weighted(), val_data=Weighted(5),
              loss_fn=lambda model, batch: squares(model, batch) * batch['weight'].sum())


def test_ctrl_c_before_the_first_step_leaves_no_trace():
    class Slow(Samples):
        def __getitem__(self, index):
            os.kill(os.getpid(), signal.SIGINT)
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        train(train_data=Slow())
    assert not os.path.exists('run')


def test_the_history_of_a_run_that_diverged_holds_what_was_tried():
    calls = itertools.count()
    with pytest.raises(tu.TrainingDiverged):
        train(loss_fn=lambda model, batch: squares(model, batch) * (math.nan if next(calls) > 8 else 1))
    assert 'not finite' in Path('run/history.csv').read_text()


def test_a_run_that_was_not_there_for_a_moment_is_not_removed(monkeypatch):
    train(num_epochs=1)
    there, exists = os.listdir('run'), os.path.exists
    monkeypatch.setattr(os.path, 'exists', lambda path: path != 'run' and exists(path))        # a drive wakes up
    with pytest.raises(tu.UserError, match='holds a run already'):
        train(num_epochs=1)
    assert os.listdir('run') == there


@pytest.mark.parametrize('make', [lambda path: path.symlink_to('nowhere'), Path.touch], ids=['dangling', 'file'])
def test_a_runs_folder_that_cannot_be_is_told(make, monkeypatch):
    make(Path('runs'))
    monkeypatch.setattr(tu.itertools, 'count', lambda first: range(first, 99))         # it was tried for ever
    with pytest.raises(tu.UserError, match="run_dir='runs/run-1': cannot be written: "):
        train(run_dir='auto')


def test_a_buffer_whose_elements_share_their_memory_trains():
    model = network()
    model.register_buffer('scale', torch.ones(1).expand(4))
    result = train(model, ema_decay=0.9, num_epochs=1)
    assert len(result.history) == 1 and torch.equal(result.model.scale, torch.ones(4))


@pytest.mark.parametrize('names, told', [(['a', 'b'], 'class 2 '), (['a', 'b', 'c'], 'c ')])
def test_names_of_fewer_classes_than_a_loss_counts_end_no_run(names, told, caplog):
    result = train(loss_fn=lambda model, batch: (squares(model, batch), torch.eye(3).long()), class_names=names,
                   num_epochs=1)
    assert result.best['epoch'] == 1 and f'{told:18} IoU 1.000' in caplog.text


@pytest.mark.parametrize('counts', [{'a': 1}, 3, torch.zeros(4), torch.zeros(2, 3)])
def test_counts_of_another_form_are_the_callers_mistake(counts):
    with pytest.raises(TypeError, match='confusion matrix'):
        train(loss_fn=lambda model, batch: (squares(model, batch), counts))


def test_replay_of_a_network_of_ones_own_asks_for_it():
    model = nn.Sequential(nn.Conv2d(3, 1, 1), Nothing())
    with pytest.raises(tu.TrainingDiverged, match='train_unet.replay'):
        train(model=model)
    with pytest.raises(tu.UserError, match='give model and loss_fn too'):
        tu.replay('run/bad_batch.pt')


def test_momentum_is_for_sgd_alone():
    config = settings(optimizer='RMSprop')
    assert fresh(config).optimizer.defaults['momentum'] == 0
    assert fresh({**config, 'optimizer': 'SGD'}).optimizer.defaults['momentum'] == 0.9


# --- networks and batches as people have them ----------------------------------------


class Flat(nn.Module):
    """A classifier that counts on the memory layout of its input's convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(256, 1)

    def forward(self, images):
        features = self.conv(images)
        return self.last(features.view(len(features), -1))[:, :, None, None]


def test_a_network_that_flattens_with_view_trains_with_the_defaults():
    torch.manual_seed(0)
    result = train(Flat(), Samples(12), channels_last=True)
    assert len(result.history) == 3


class Late(nn.Module):
    """One of its layers is not used, and gets no gradient, in the first passes."""

    def __init__(self):
        super().__init__()
        self.first, self.late, self.passes = nn.Conv2d(3, 1, 1), nn.Conv2d(1, 1, 1), 0

    def forward(self, images):
        self.passes += self.training
        features = self.first(images)
        return self.late(features) if self.passes > 3 else features


@pytest.mark.parametrize('optimizer', ['SGD', 'AdamW'])
def test_a_layer_that_is_used_late_stops_no_optimizer(optimizer):
    torch.manual_seed(0)
    assert len(train(Late(), Samples(12), optimizer=optimizer).history) == 3


def test_the_average_copies_a_buffer_that_holds_infinity():
    model = network()
    model.register_buffer('mask', torch.full((3, 3), -math.inf))
    state = fresh(settings(), model)
    tu.guarded_step(state, [batch_of(0, 1)], squares, settings())
    assert torch.equal(state.average.mask, model.mask)


def test_norms_of_any_shape_and_embeddings_do_not_decay():
    model = nn.ModuleDict({'norm': nn.LayerNorm([4, 8, 8]), 'table': nn.Embedding(5, 3), 'linear': nn.Linear(3, 3)})
    optimizer = tu.build_optimizer(model, settings(optimizer='AdamW'), CPU)
    assert [len(group['params']) for group in optimizer.param_groups] == [1, 4]


@pytest.mark.parametrize('batch, sizes', [
    ((torch.arange(4), ['a', 'b', 'c', 'd']), [2, 2]),
    ({'x': torch.arange(4), 'size': [torch.arange(4), torch.arange(4)]}, None),
    ({'in': {'x': torch.arange(4)}, 'name': ['a', 'b', 'c', 'd'], 'scale': torch.tensor(3.0)}, None)], ids=range(3))
def test_batches_of_any_form_are_cut_between_samples(batch, sizes):
    first, second = tu.split_batch(batch, 2)
    if sizes:
        assert [len(part) for part in first] == sizes and second[1] == ['c', 'd']
    elif 'size' in batch:
        assert [len(part) for part in second['size']] == [2, 2] and second['size'][0].tolist() == [2, 3]
    else:
        assert second['in']['x'].tolist() == [2, 3] and second['name'] == ['c', 'd'] and second['scale'] == 3


def test_a_buffer_that_forward_replaces_is_put_back_too():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 1, 1)
            self.register_buffer('mean', torch.zeros(1))

        def forward(self, images):
            out = self.conv(images)
            self.mean = 0.9 * self.mean + 0.1 * out.detach().mean().reshape(1)
            return out - self.mean

    state = fresh(settings(), Running())
    tu.guarded_step(state, [batch_of(0, 1)], squares, settings())
    before = state.model.mean.clone()
    bad = batch_of(2, 3)
    bad['image'][:] = math.nan
    assert tu.guarded_step(state, [bad], squares, settings()).bad
    assert torch.equal(state.model.mean, before)


@pytest.mark.parametrize('untold, words', [(1, 'a step'), (3, '3 steps')])
def test_what_was_not_finite_is_told_though_it_is_looked_at_later(untold, words):
    """On a GPU the counters are read every 20 steps; the last of them was sound."""
    config = settings()
    state = fresh(config)
    state.bad = {'untold': torch.tensor(untold), 'run': torch.tensor(0)}
    tu.look(state, [], squares, config, None, None)
    tu.look(state, [], squares, config, None, None)
    assert events(state.history) == [f'skipped {words}: loss, statistics or gradient not finite']


def test_a_batch_of_two_samples_is_cut_between_them_not_between_its_fields():
    first, second = tu.split_batch((torch.arange(2.0), ['a', 'b']), 1)
    assert (first[0].tolist(), first[1], second[0].tolist(), second[1]) == ([0.0], ['a'], [1.0], ['b'])


# --- found by trying issue "precision" sentence by sentence ---

@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_what_is_not_finite_after_memory_ran_out_is_still_diagnosed(dtype):
    """More than two images never fit; from the fourth step on one layer overflows float16, or gives NaN in float32."""
    model = network()
    out_of_memory(model[0], lambda module, images, call: images > 2)
    factor = 1e5 if dtype == 'float16' else math.nan
    at_training_call(model[1], lambda call: call > 12, lambda output: output * factor)
    settled = {'batch_size': 4, 'max_bad_steps': 2, 'num_epochs': 6, **amp(dtype)}
    if dtype == 'float16':
        assert any('precision float16 -> bfloat16' in event or 'precision float16 -> float32' in event
                   for event in events(train(model, **settled).history))
    else:
        with pytest.raises(tu.TrainingDiverged, match='the output of 1'):
            train(model, **settled)


def test_a_lost_loss_does_not_lower_the_loss_scale():
    """The scale cannot make a loss NaN: only a gradient that overflows halves it."""
    config = settings(use_amp=True, amp_dtype='float16', init_scale=64.0)
    model = network()
    state = fresh(config, model, 'float16')
    at_training_call(model[0], lambda call: call in (2, 3), lambda output: output * math.nan)
    for _ in range(4):
        tu.guarded_step(state, [batch_of(0, 1)], squares, config)
    assert state.scaler.get_scale() == 64.0 and int(state.bad['run']) == 0 and int(state.bad['total']) == 2
    model[0].weight.register_hook(lambda gradient: gradient * math.inf)
    tu.guarded_step(state, [batch_of(0, 1)], squares, config)
    assert state.scaler.get_scale() == 32.0


def test_a_network_kept_in_float32_can_be_given_again_and_take_numbers_first():
    class Scaled(nn.Conv2d):
        def forward(self, factor, images):
            return factor * super().forward(images)

    net = nn.Sequential(nn.Conv2d(3, 3, 1))
    for _ in range(2):
        tu.keep_float32(net, '0')
    net.scaled = Scaled(3, 1, 1)
    tu.keep_float32(net, 'scaled')
    with torch.autocast('cpu', torch.bfloat16):
        assert net.scaled(2, net[0](torch.ones(1, 3, 4, 4))).dtype == torch.float32


def test_an_object_of_ones_own_reaches_the_network_as_it_is():
    @dataclasses.dataclass
    class Input:
        image: torch.Tensor
        mask: torch.Tensor = dataclasses.field(init=False, default=None)

    given = Input(torch.ones(1, 3, 4, 4))
    given.mask = torch.zeros(1)
    model, seen = network(), []
    model.forward = lambda one, scale: seen.append((one, scale.dtype))
    tu.UnderAutocast(model, 'float32')(given, scale=torch.ones(1, dtype=torch.float64))
    assert seen[0][0] is given and seen[0][1] == torch.float32


def test_an_output_that_is_a_dataclass_reaches_the_loss_in_float32():
    @dataclasses.dataclass
    class Out:
        logits: torch.Tensor
        names: list
        shape: tuple = dataclasses.field(init=False)

        def __post_init__(self):
            self.shape = self.logits.shape

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 1, 1)

        def forward(self, images):
            return Out(self.conv(images), ['a'])

    out = tu.UnderAutocast(Net(), 'bfloat16')(torch.ones(1, 3, 4, 4))
    assert out.logits.dtype == torch.float32 and out.names == ['a'] and out.shape == (1, 1, 4, 4)


def test_minus_infinity_in_a_batch_may_be_meant():
    """An additive mask of attention: what overflows float16 then is no fault of the data."""
    class Masked(Samples):
        def __getitem__(self, i):
            return super().__getitem__(i) | {'mask': torch.tensor([0.0, -math.inf])}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.network, self.scores = network(), nn.Identity()

        def forward(self, images, mask):
            weights = self.scores(mask + 1.0).softmax(-1).sum(-1)
            return self.network(images) * weights[:, None, None, None]

    def loss_fn(model, batch):
        return (model(batch['image'], batch['mask']) - batch['target']).square().mean((1, 2, 3))

    net = Net()
    at_training_call(net.network[1], lambda call: call > 6, lambda output: output * 1e5)
    result = train(net, Masked(), Masked(5), loss_fn, max_bad_steps=2, num_epochs=6, **amp('float16'))
    assert any('float16 -> ' in event for event in events(result.history))


def test_a_validation_that_overflows_float16_steps_down_and_is_judged_again():
    model = network(norm=False)                                        # x 100,000 in evaluation only, then back
    model[0].register_forward_hook(lambda module, inputs, output: output if module.training else output * 1e5)
    model[-1].register_forward_hook(lambda module, inputs, output: output if module.training else output * 1e-5)
    result = train(model, num_epochs=3, init_scale=8.0, **amp('float16'))
    assert ['validation is not finite in float16' in event for event in events(result.history)] == [True]
    rows = [row for row in result.history if not row['event']]
    assert all(math.isfinite(row['val_loss']) for row in rows)
    assert rows[-1]['precision'] in ('bfloat16', 'float32') and rows[-1]['loss_scale'] is None


# --- progressive resizing ---

@pytest.mark.parametrize('dtype', [torch.uint8, torch.float32])
def test_half_the_size_is_the_mean_of_images_and_invents_no_class(dtype):
    images = torch.randint(0, 256, (2, 3, 9, 12)).to(dtype).contiguous(memory_format=torch.channels_last)
    masks = torch.tensor([0, 7, 255], dtype=torch.uint8)[torch.randint(0, 3, (2, 9, 12))]
    small = tu.at_half_size({'image': images, 'mask': masks, 'index': torch.arange(2)}, CPU)
    assert small['image'].shape == (2, 3, 4, 6) and small['mask'].shape == (2, 4, 6)
    assert small['image'].dtype == dtype and small['mask'].dtype == torch.uint8 and small['index'].tolist() == [0, 1]
    assert small['image'].is_contiguous(memory_format=torch.channels_last)
    assert set(small['mask'].unique().tolist()) <= {0, 7, 255}
    even = tu.at_half_size({'image': images[:, :, :8], 'mask': masks[:, :8]}, CPU)['image'].float()
    mean = images[:, :, :8].float().unflatten(2, (4, 2)).unflatten(4, (6, 2)).mean((3, 5))
    assert (even - mean).abs().max() <= (0.5 if dtype == torch.uint8 else 1e-4)


def test_the_first_steps_see_small_images_and_a_resume_knows_which(small_set):
    """Half of 2 x 2 steps; cut within the small ones. What is tried before the first step is of full size."""
    def sides(**changes):
        seen = []
        note = lambda module, inputs: seen.append(inputs[0].shape[-1]) \
            if isinstance(module, tu.SegmentationModel) and module.training else None
        with nn.modules.module.register_module_forward_pre_hook(note):
            tu.train(**TINY | {'data': str(small_set), 'progressive_resizing': 0.5, 'batch_size': 5} | changes)
        return seen

    def stop(module, inputs):
        if isinstance(module, tu.SegmentationModel) and module.training and inputs[0].shape[-1] == 16:
            os.kill(os.getpid(), signal.SIGTERM)

    assert sides(run_dir='whole') == [32, 16, 16, 32, 32]
    with nn.modules.module.register_module_forward_pre_hook(stop):
        assert sides(run_dir='cut') == [32, 16]
    assert sides(resume='cut') == [32, 16, 32, 32]
    whole, cut = (torch.load(f'{run}/last.pt', weights_only=True)['model'] for run in ('whole', 'cut'))
    assert all(torch.equal(whole[key], cut[key]) for key in whole)


def test_epochs_of_small_images_do_not_stop_a_run_early(small_set, caplog):
    """No epoch is better than the first; 4 of 8 are of small images, and patience is 2."""
    def never_better(model, batch):
        losses, counts = segmentation(model, batch)
        return losses, counts if torch.is_grad_enabled() else torch.tensor([[9, 1], [1, 9]])

    segmentation = tu.SegmentationLoss(tu.CONFIG | {'num_classes': 2})
    settings = TINY | {'data': str(small_set), 'num_epochs': 8, 'early_stopping_patience': 2}
    for share, epochs in [(0.5, 6), (0, 3)]:
        result = tu.train(loss_fn=never_better, **settings, progressive_resizing=share, run_dir=f'run{epochs}')
        assert len(result.history) == epochs and result.best['epoch'] == 1
    assert caplog.text.count('no better, on small images') == 3


def test_a_network_that_takes_one_size_is_not_given_another(small_set):
    class OneSize(nn.Module):
        def __init__(self, side=64):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, side, side))

        def forward(self, images):
            return (images.mean(1) * self.scale)[:, None]

    typed = dict(TINY, data=str(small_set), image_size=64, run_dir='run')
    with pytest.raises(tu.ConfigError, match=r'cannot take .*\(1, 3, 32, 32\) .*; or progressive_resizing=0'):
        tu.train(model=OneSize(), progressive_resizing=0.5, **typed)
    tu.train(model=OneSize(128), **typed | {'image_size': 128, 'encoder': 'auto', 'num_epochs': 1})


def test_a_process_that_ignores_its_children_may_start_one_in_a_step():
    def loss_fn(model, batch):
        subprocess.run(['false'], check=False)
        return squares(model, batch)

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert len(train(loss_fn=loss_fn, num_epochs=1).history) == 1
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize('dtype', [torch.float16, torch.float64])
def test_samples_of_any_floating_point_precision_train(dtype):
    class Stored(Samples):
        def __getitem__(self, i):
            return super().__getitem__(i) | {'image': self.images[i].to(dtype), 'target': self.targets[i].to(dtype)}

    result = train(network(), Stored(), Stored(5), num_epochs=1)
    assert math.isfinite(result.history[0]['train_loss'])


def test_a_loss_of_ones_own_may_ask_the_model_for_its_parameters():
    seen = set()

    def loss_fn(model, batch):
        seen.add(model.training)
        penalty = sum(weight.square().sum() for weight in model.parameters())
        return (model(batch['image']) - batch['target']).square().mean((1, 2, 3)) + 1e-3 * penalty

    train(network(), loss_fn=loss_fn, num_epochs=1)
    assert seen == {True, False}


# --- what a second look at lost runs found ---

def stop_at(model, call):
    """SIGTERM in this training pass of the model; the smoke test's is the first."""
    at_training_call(model[0], lambda number: number == call, lambda output: os.kill(os.getpid(), signal.SIGTERM))
    return model


def test_a_best_epoch_that_the_disk_did_not_take_is_not_lost_by_a_resume(monkeypatch):
    """Epoch 2 is the best, and the disk takes last.pt but not best.pt; the run is stopped in epoch 3."""
    replace, scores = os.replace, iter([9.0, 3.0, 1.0, 9.0, 2.0])      # smoke test, epoch 1, 2; smoke test, epoch 3

    def full(source, target):
        if str(target).endswith('best.pt') and Path('run/history.csv').exists():
            raise OSError(28, 'No space left on device')
        replace(source, target)

    def scripted(model, batch):
        return squares(model, batch) if torch.is_grad_enabled() else torch.full((len(batch['image']),), next(scores))

    monkeypatch.setattr(os, 'replace', full)
    stopped = train(stop_at(network(), 1 + 2 + 2 + 1), val_data=Samples(4), loss_fn=scripted)
    assert stopped.stopped_by == signal.SIGTERM and not stopped.is_saved
    assert torch.load('run/best.pt', weights_only=True)['epoch'] == 1
    monkeypatch.setattr(os, 'replace', replace)
    resumed = train(val_data=Samples(4), loss_fn=scripted, resume='run', run_dir='auto')
    best = torch.load('run/best.pt', weights_only=True)
    assert (best['epoch'], best['metrics']['loss'], resumed.best['epoch']) == (2, 1.0, 2)
    assert last()['unsaved'] is None


def test_a_folder_that_another_run_has_taken_is_left_to_it(caplog):
    """Somebody deletes the folder, and another run begins there."""
    model = network()

    def take(output):
        shutil.rmtree('run')
        os.mkdir('run')
        Path('run/.holder').write_text('process 7 on another')

    at_training_call(model[0], lambda call: call == 1 + 2 + 1, take)
    assert not train(model).is_saved and 'is in use by process 7 on another' in caplog.text
    assert {path.name for path in Path('run').iterdir()} == {'.holder'}


@pytest.mark.parametrize('call', [30, 45])
def test_a_signal_while_a_sample_is_seeded_leaves_the_random_numbers_alone(call, monkeypatch):
    """Dropout draws from the generator that a sample of one's own is given a seed for."""
    calm, seeded, seed = train(network(dropout=0.5), run_dir='calm'), [], np.random.seed

    def interrupted(number):
        seeded.append(number)
        seed(number)
        if len(seeded) == call:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(np.random, 'seed', interrupted)
    assert train(network(dropout=0.5)).stopped_by == signal.SIGTERM
    resumed = train(network(dropout=0.5), resume='run', run_dir='auto')
    assert_same(resumed.model.state_dict(), calm.model.state_dict())


@pytest.mark.parametrize('error', [MemoryError('too much'), torch.OutOfMemoryError('CUDA out of memory (a test)')])
def test_memory_that_ends_where_nothing_can_be_halved_costs_no_step(error):
    class Greedy(Samples):
        seen = 0

        def __getitem__(self, index):
            self.seen += 1
            if self.seen == 4 + 8 + 4 + 1:                             # smoke test, epoch 1, a step of epoch 2
                raise error
            return super().__getitem__(index)

    with pytest.raises(tu.UserError) as caught:
        train(train_data=Greedy())
    assert caught.value.title == 'out of memory' and last()['step'] == 3


def test_an_image_that_was_left_out_takes_no_weight_from_the_others():
    def known(model, batch):
        return squares(model, batch) * ~batch['_left_out'] if '_left_out' in batch else squares(model, batch)

    gradients = []
    for window in [batch_of(0, 1, 2)], [batch_of(0, 1, 2, 3) | {'_left_out': torch.tensor([False] * 3 + [True])}]:
        state = fresh(settings(), network(norm=False))
        result = tu.train_step(state, window, known, settings())
        gradients.append(tu.flat(p.grad for p in state.model.parameters()))
        assert result.images == 3
    torch.testing.assert_close(*gradients)


def test_what_was_trained_is_saved_before_a_long_validation(monkeypatch):
    """Each training pass takes 100 s here, by a clock that jumps; nothing is saved for ten minutes otherwise."""
    model, clock, found = network(), time.monotonic, []
    passed = at_training_call(model[0], lambda call: False, None)
    monkeypatch.setattr(time, 'monotonic', lambda: clock() + 100 * len(passed))
    model[0].register_forward_hook(lambda module, *_: None if module.training else found.append(last()))
    train(model, val_data=Samples(4), num_epochs=2)
    assert [(saved['epoch'], saved['window']) for saved in found[1:]] == [(0, 2), (1, 2)]



def count_page_faults(output):
    """In a process of its own: page faults of 20 times 12 tensors of 16 MiB, as it is and with the setting."""
    counts, use = [], lambda: [torch.ones(2 ** 22) for _ in range(12)] and None
    for begin in (lambda: None, tu.keep_freed_memory):
        begin()
        use()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            use()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    Path(output).write_text(str(counts))


def test_a_training_on_a_cpu_keeps_the_memory_that_tensors_free(tmp_path, forks, monkeypatch):
    calls = []
    monkeypatch.setattr(tu, 'keep_freed_memory', lambda: calls.append(1))
    train(num_epochs=1)
    assert calls
    if platform.libc_ver()[0] != 'glibc':
        pytest.skip('mallopt is of glibc')
    process = FORKS.Process(target=count_page_faults, args=(str(tmp_path / 'out'),))
    process.start()
    process.join(60)
    without, kept = ast.literal_eval((tmp_path / 'out').read_text())
    assert kept < without / 5


def test_a_terminal_that_tells_no_width_shows_bars_too(monkeypatch):
    """As that of docker run -t does where nobody is attached."""
    reader, writer = pty.openpty()                                     # 0 columns until somebody sets them
    os.set_blocking(reader, False)
    with open(writer, 'w', closefd=False) as terminal:
        monkeypatch.setattr(sys, 'stderr', terminal)
        assert list(tu.progress(range(3), 3, 'Epoch 1 [train]')) == [0, 1, 2]
    assert b'Epoch 1 [train]' in os.read(reader, 4096)
    os.close(reader), os.close(writer)


@pytest.mark.parametrize('columns', [80, 40])
def test_80_columns_hold_all_that_a_bar_tells(columns, monkeypatch):
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack('HHHH', 24, columns, 0, 0))
    os.set_blocking(reader, False)
    model = network()
    state = tu.TrainState(model, torch.optim.SGD(model.parameters(), 3.4e-4), None, dtype='bfloat16',
                          totals={'loss': 5.8, 'images': 10, 'counts': torch.tensor([[5, 1], [2, 12]])})
    with open(writer, 'w', closefd=False) as terminal:
        monkeypatch.setattr(sys, 'stderr', terminal)
        bar = tu.progress(range(210), 210, 'Epoch 10 [train]')
        bar.n = 12
        bar.set_postfix_str(tu.live_numbers(state, 39.04))
    time.sleep(0.3)                                                    # until the terminal has passed it on
    shown = os.read(reader, 9999).decode().split('\r')[-1].split('\n')[0]
    assert len(shown) <= columns and shown.startswith('Epoch 10 [train] 12/210, loss 0.580')
    if columns == 80:
        assert shown.startswith('Epoch 10 [train] 12/210, loss 0.580 IoU 0.800 lr 3.4e-04 39.0 images/s bfloat16')
    os.close(reader), os.close(writer)


def test_a_service_without_a_screen_trains(small_set, monkeypatch):
    monkeypatch.setattr(sys, 'stderr', None)
    monkeypatch.setattr(sys, 'stdout', None)
    assert train(num_epochs=1).best['loss'] > 0


def test_a_console_that_is_no_file_shows_bars(monkeypatch):
    """As those of some editors, which call themselves a terminal."""
    console = io.StringIO()
    console.isatty = lambda: True
    monkeypatch.setattr(sys, 'stderr', console)
    assert list(tu.progress(range(3), 3, 'Epoch 1 [train]')) == [0, 1, 2] and 'Epoch 1 [train]' in console.getvalue()


def test_an_image_that_a_pipeline_fails_on_is_named_and_the_run_saved(small_set, monkeypatch, capsys):
    """OpenCV's errors are of no common kind; here a transform raises one in the second epoch."""
    import albumentations
    mirror, calls = albumentations.HorizontalFlip.__call__, []

    def fail(self, *args, **named):
        calls.append(1)
        if len(calls) > 4 + 10 + 3:                                    # smoke test, epoch 1
            raise tu.cv2.error('not of this kind (a test)')
        return mirror(self, *args, **named)

    monkeypatch.setattr(albumentations.HorizontalFlip, '__call__', fail)
    words = [f'{key}={value}'.replace(' ', '') for key, value in TINY.items()]
    assert tu.main([f'data={small_set}', 'run_dir=run', *words]) == 2
    told = capsys.readouterr().err
    assert re.search(r'images/\d+\.png: augment=default fails on it in epoch 2: error: .*not of this kind', told)
    assert last()['epoch'] == 1


class Joining(nn.Module):
    """A branch that gets its first gradient in the second step."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.steps = nn.Conv2d(3, 1, 3, padding=1), nn.Conv2d(3, 1, 1), 0

    def forward(self, images):
        self.steps += self.training
        return self.first(images) + (self.second(images) if self.steps > 3 or not self.training else 0)


@pytest.mark.parametrize('optimizer', ['SGD', 'AdamW'])
def test_a_network_of_ones_own_may_have_branches_that_join_in_later(small_set, optimizer):
    model = Joining()
    before = model.second.weight.detach().clone()
    tu.train(model=model, data=str(small_set), **{**TINY, 'optimizer': optimizer, 'learning_rate': 0.01})
    assert not torch.equal(model.second.weight, before)
    assert tu.has_idle_parameters(tu.build_model({**tu.CONFIG, 'num_classes': 2, 'image_size': [32, 32], 'mean': [0.0],
                                                  'std': [1.0], 'image_dtype': 'uint8'}, Joining()))


def test_two_trainings_at_once_in_one_process_are_refused():
    """They would draw from the same random numbers."""
    told = []

    def loss_fn(model, batch):
        if not told:
            with pytest.raises(tu.UserError, match='another training is at work in this process') as error:
                train(run_dir='other')
            told.append(error)
        return squares(model, batch)

    train(loss_fn=loss_fn, num_epochs=1)
    assert told and not os.path.exists('other')
    train(run_dir='afterwards', num_epochs=1)
