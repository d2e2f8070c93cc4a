"""The loop: one step, as a transaction. What is not finite is undone, what does not fit into memory is done in parts.

Run: python -m pytest tests/test_step.py
"""
import ast
import contextlib
import copy
import dataclasses
import gc
import itertools
import math
import os
import random
import re
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import train_unet as tu
from helpers import PLAIN, Samples, assert_same, at_training_call, batch_of, events, fresh, in_threads, last
from helpers import log_text, network, out_of_memory, settings, squares, train, train_own

pytestmark = pytest.mark.usefixtures('one_thread')


def everything(state):
    """A copy of all that a step may change."""
    return copy.deepcopy({'model': state.model.state_dict(), 'average': state.weights(),
                          'optimizer': state.optimizer.state_dict(), 'totals': state.totals})


# --- a window in parts ----------------------------------------------------------------


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


def test_a_step_leaves_no_tensor_to_the_garbage_collector():
    """It comes now and then; until it does, each batch would stay on the GPU."""
    state = fresh(settings(batch_size=4), network(norm=False))
    while gc.collect():                                                # once is not enough for what an end sets free
        pass
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        tu.guarded_step(state, [batch_of(0, 1, 2, 3)], squares, settings())
        gc.collect()
        left = [value for value in gc.garbage if torch.is_tensor(value)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not left


@pytest.mark.parametrize('batch_size, accumulation_steps', [(4, 2), (2, 4), (3, 3)])
def test_a_run_does_not_depend_on_how_its_windows_are_split(batch_size, accumulation_steps):
    effective = batch_size * accumulation_steps  # 20 images: the last window is short
    weights = [train(network(norm=False), Samples(20), batch_size=size, accumulation_steps=steps,
                     run_dir=f'{size}').model.state_dict()
               for size, steps in ((effective, 1), (batch_size, accumulation_steps))]
    for a, b in zip(*(w.values() for w in weights)):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('dtype', ['float32', 'float16'])
def test_the_norm_is_that_of_the_unscaled_gradient_and_the_clip_limits_it(dtype):
    window = [batch_of(*range(8))]
    exact = tu.train_step(fresh(settings()), window, squares, settings()).norm
    state = fresh(settings(init_scale=64.0), dtype=dtype)
    result = tu.train_step(state, window, squares, settings(grad_clip=0.01))
    clipped = torch.cat([p.grad.flatten() for p in state.model.parameters()]).norm()
    assert result.norm.item() == pytest.approx(exact.item(), rel=0.02)
    assert clipped.item() == pytest.approx(0.01, rel=1e-3)


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


@pytest.mark.parametrize('momentum, waits', [(0.9, 1), (0.0, 0)])
def test_sgd_asks_for_its_step_only_before_it_has_a_state(momentum, waits, monkeypatch):
    """What is asked waits for a GPU: once, or never where there will be no state."""
    config = {**tu.CONFIG, 'encoder': 'tu-test_resnet', 'decoder_channels': [8] * 5, 'mean': [0.0], 'std': [1.0],
              'num_classes': 2, 'image_size': [32, 32], 'image_dtype': 'uint8', 'learning_rate': 0.01,
              'ema_decay': None, 'optimizer': 'SGD', 'momentum': momentum, 'progressive_resizing': 0.0}
    state = fresh(config, tu.build_model(config))
    batch, asked, item = {'image': torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
                          'mask': torch.ones(2, 32, 32, dtype=torch.uint8)}, [], torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, 'item', lambda value: asked.append(value.dtype) or item(value))
    before = state.parts.parameters[0].detach().clone()
    for _ in range(3):
        tu.guarded_step(state, [batch], tu.SegmentationLoss(config), config)
    assert asked.count(torch.bool) == waits and not torch.equal(before, state.parts.parameters[0])


# --- batches of any form --------------------------------------------------------------


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


def test_a_batch_of_two_samples_is_cut_between_them_not_between_its_fields():
    first, second = tu.split_batch((torch.arange(2.0), ['a', 'b']), 1)
    assert (first[0].tolist(), first[1], second[0].tolist(), second[1]) == ([0.0], ['a'], [1.0], ['b'])


def test_float64_reaches_no_apple_gpu():
    """It has none: a data set of NumPy's usual numbers would end there."""
    class Heard(torch.Tensor):
        def to(self, *how, **named):
            heard.append(how)
            return self

    heard = []
    for dtype in (torch.float64, torch.float32, torch.int64):
        tu.to_device([torch.zeros(2, dtype=dtype).as_subclass(Heard)], torch.device('mps'))
    assert [dtype for _, dtype in heard] == [torch.float32, torch.float32, torch.int64]


# --- precision inside a step ----------------------------------------------------------


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
    floats = [value for values in (state.model.state_dict(), state.weights(),
                                   *state.optimizer.state.values())
              for value in values.values() if value.is_floating_point()]
    floats += [p.grad for p in state.model.parameters()]
    assert seen == {'conv': getattr(torch, dtype), 'logits': torch.float32, 'losses': torch.float32}
    assert {value.dtype for value in floats} == {torch.float32}
    assert result.loss.dtype == result.norm.dtype == torch.float32
    assert not result.bad


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


def test_a_loss_reaches_layers_of_any_name():
    """Networks within networks are often called model."""
    net = nn.ModuleDict({name: nn.Conv2d(1, 1, 1) for name in ('model', 'plain', 'dtype')})
    seen = tu.UnderAutocast(net, 'float32')
    assert [seen.model, seen.plain, seen.dtype] == [*net.values()]


def test_a_loss_may_keep_a_copy_of_the_model_as_its_teacher():
    teachers = []

    def loss_fn(model, batch):
        teachers.append(copy.deepcopy(model))
        return (model(batch['image']) - teachers[0](batch['image']).detach()).square().mean((1, 2, 3))

    model = network()
    assert not tu.run_loss(loss_fn, model.eval(), 'float32', batch_of(0, 1))[0].any()
    assert teachers[0][0] is not model[0]


# --- steps that are not finite are undone ---------------------------------------------


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


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_step_that_spoils_a_running_variance_is_undone(dtype):
    """The square of 1e25 is more than float32 can hold: the variance becomes infinite, while the loss stays finite."""
    model = network()
    at_training_call(model[0], lambda call: call == 4, lambda output: output * 1e25)
    result = train(model, **tu.amp_settings(dtype))
    assert events(result.history) == ['skipped a step: loss, statistics or gradient not finite']
    assert all(torch.isfinite(value).all() for value in last()['model'].values())


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_a_skipped_step_is_counted_and_told(dtype):
    model = network()
    at_training_call(model[0], lambda call: call == 1 + 3, lambda output: output * math.nan)
    result = train(model, init_scale=8.0, **tu.amp_settings(dtype))
    rows = [row for row in result.history if not row['event']]
    assert [row['step'] for row in rows] == [2, 4, 6]
    assert [row['skipped_steps'] for row in rows] == [0, 1, 1]
    assert events(result.history) == ['skipped a step: loss, statistics or gradient not finite']
    assert last()['step'] == 6 and all(math.isfinite(row['train_loss']) for row in rows)


@pytest.mark.parametrize('untold, words', [(1, 'a step'), (3, '3 steps')])
def test_what_was_not_finite_is_told_though_it_is_looked_at_later(untold, words):
    """On a GPU the counters are read every 20 steps; the last of them was sound."""
    config = settings()
    state = fresh(config)
    state.bad = {'untold': torch.tensor(untold), 'run': torch.tensor(0)}
    tu.look(state, [], squares, config, None, None)
    tu.look(state, [], squares, config, None, None)
    assert events(state.history) == [f'skipped {words}: loss, statistics or gradient not finite']


def test_the_step_of_a_sample_with_nan_is_skipped_in_each_epoch():
    result = train(train_data=Samples(broken=[5]), num_epochs=2)
    assert result.history[-1]['skipped_steps'] == 2


# --- float16: its scale, and a safer precision ----------------------------------------


def test_float16_looks_for_its_scale_without_a_fuss():
    result = train(init_scale=2.0 ** 24, num_epochs=12, max_bad_steps=2, optimizer='AdamW',
                   **tu.amp_settings('float16'))
    assert events(result.history) == []  # gradients overflow at first, losses do not
    assert result.history[0]['skipped_steps'] > 0
    assert result.history[-1]['precision'] == 'float16'
    assert result.history[-1]['val_loss'] < result.history[0]['val_loss']


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


def test_float16_gradients_count_once_the_scale_has_fallen_below_one():
    model, calls = network(), []
    model[4].weight.register_hook(
        lambda g: calls.append(1) or (g * math.nan if len(calls) <= 6 else g))
    result = train(model, init_scale=4.0, max_bad_steps=2, **tu.amp_settings('float16'))       # 4, 2, 1, 0.5, 0.25
    told = events(result.history)
    assert '2 unsound steps in a row in float16' in told[-1] and all('skipped' in event for event in told[:-1])
    assert [row['step'] for row in result.history if not row['event']] == [2, 4, 6]


@pytest.mark.usefixtures('each_epoch_saved')
def test_float16_that_overflows_steps_down_and_trains_on():
    def growing():
        """A network that multiplies by 100,000 from step 6 on, then divides: too much for float16 alone."""
        model = network(norm=False)
        calls = at_training_call(model[0], lambda call: call > 5, lambda output: output * 1e5)
        model[4].register_forward_pre_hook(
            lambda m, inputs: (inputs[0] / 1e5,) if m.training and len(calls) > 5 else None)
        return model

    exact = train(growing(), num_epochs=6, run_dir='exact')
    result = train(growing(), num_epochs=6, init_scale=8.0, max_bad_steps=2, **tu.amp_settings('float16'))
    assert sum('precision float16 -> ' in event for event in events(result.history)) == 1
    rows = [row for row in result.history if not row['event']]
    assert rows[0]['precision'] == 'float16' and rows[-1]['precision'] in ('bfloat16', 'float32')
    assert [row['epoch'] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]['val_loss'] < rows[0]['val_loss']
    assert rows[-1]['val_loss'] == pytest.approx(exact.history[-1]['val_loss'], rel=0.01)
    assert rows[-1]['step'] == 12 and not last()['scaler']


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
    result = train(net, Masked(), Masked(5), loss_fn, max_bad_steps=2, num_epochs=6, **tu.amp_settings('float16'))
    assert any('float16 -> ' in event for event in events(result.history))


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


# --- runs that are never finite -------------------------------------------------------


def test_statistics_that_overflow_are_named(small_set):
    """The variance of 1e30 is beyond float32, the normalised values are not."""
    model = network()
    norm = next(name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))
    model.get_submodule(norm).register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1e30,))
    with pytest.raises(tu.TrainingDiverged, match=rf'statistics of a norm \({norm}.running_var\)'):
        train(model=model, max_bad_steps=2)


def test_a_run_that_is_never_finite_ends_with_layer_and_files(small_set):
    class Scaled(nn.Module):
        def forward(self, images):
            return images.float() / 255

    model = nn.Sequential(Scaled(), *network())
    at_training_call(model[2], lambda call: call > 2, lambda output: output * math.nan)
    settled = {**PLAIN, 'image_size': 32, 'num_epochs': 5, 'max_bad_steps': 3, 'grad_clip': 0.5}
    with pytest.raises(tu.TrainingDiverged) as error:
        tu.train(model=model, data=str(small_set), **settled)
    text = str(error.value)
    assert '3 steps in a row' in text and 'float32' in text
    assert ', a lower grad_clip (now 0.5) or other data may help' in text
    assert 'the output of network.2 (BatchNorm2d)' in text
    images = re.findall('in the batch: (.*)', text)
    assert images and all(os.path.exists(image) for image in images)
    assert "import train_unet; print(train_unet.replay('run/bad_batch.pt'))" in text
    written = log_text()                       # all of it, with the line that goes on
    assert all(line.strip() in written for line in text.splitlines())
    assert text.endswith("mended? It goes on with:  train_unet.train(resume='run', ...) and the network, loss and data "
                         'of before')
    batch = torch.load('run/bad_batch.pt', weights_only=True)['window']
    assert batch[0]['image'].shape[1:] == (3, 32, 32) and batch[0]['image'].dtype == torch.uint8
    for value in last()['model'].values():
        assert torch.isfinite(value).all()


class Nothing(nn.Module):
    """A layer that gives NaN."""

    def forward(self, images):
        return images * math.nan


@pytest.mark.parametrize('thing', [Path('x.png'), lambda: None], ids=['not loaded', 'not saved'])
def test_a_replay_that_would_be_refused_is_not_offered(thing):
    class Named(Samples):
        @staticmethod
        def collate_fn(samples):
            return torch.utils.data.default_collate(samples) | {'of': [thing] * len(samples)}

    with pytest.raises(tu.TrainingDiverged, match='the output of 1') as error:
        train(nn.Sequential(nn.Conv2d(3, 1, 1), Nothing()), Named(), Named(5))
    assert 'replay' not in str(error.value)


def test_nan_in_every_step_of_a_short_run_is_no_success():
    with pytest.raises(tu.TrainingDiverged, match='the output of 1 \\(Nothing\\)'):
        train(model=nn.Sequential(nn.Conv2d(3, 1, 1), Nothing()), num_epochs=1)


def test_a_gradient_that_is_never_finite_is_told_from_a_forward_pass():
    model = network()
    model[4].weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(tu.TrainingDiverged, match='finite forward, so it is the gradient'):
        train(model, num_epochs=5)


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
        train(None, data, kind(Samples(4)), loss_fn, batch_size=8, max_bad_steps=1, **tu.amp_settings(dtype))
    assert 'not finite' in str(error.value) and 'no precision helps' in str(error.value)


def test_minus_infinity_in_an_image_is_named_too(caplog):
    data = Samples(8)
    data.images[5, 0, 0, 0] = -math.inf
    with pytest.raises(tu.DataError, match='sample 5: holds values that are not finite'):
        train(None, data, Samples(4), batch_size=8, max_bad_steps=1)


@pytest.mark.parametrize('weight', [torch.tensor(math.nan), torch.full((9,), math.nan)])
def test_what_a_batch_holds_once_and_is_not_finite_ends_the_run_in_words(weight):
    class Weighted(Samples):
        def collate_fn(self, samples):
            return torch.utils.data.default_collate(samples) | {'weight': weight}

    with pytest.raises(tu.TrainingDiverged, match='not finite'):
        train(train_data=Weighted(), val_data=Weighted(5),
              loss_fn=lambda model, batch: squares(model, batch) * batch['weight'].sum())


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_what_is_not_finite_after_memory_ran_out_is_still_diagnosed(dtype):
    """More than two images never fit; from the fourth step on one layer overflows float16, or gives NaN in float32."""
    model = network()
    out_of_memory(model[0], lambda module, images, call: images > 2)
    factor = 1e5 if dtype == 'float16' else math.nan
    at_training_call(model[1], lambda call: call > 12, lambda output: output * factor)
    settled = {'batch_size': 4, 'max_bad_steps': 2, 'num_epochs': 6, **tu.amp_settings(dtype)}
    if dtype == 'float16':
        assert any('precision float16 -> bfloat16' in event or 'precision float16 -> float32' in event
                   for event in events(train(model, **settled).history))
    else:
        with pytest.raises(tu.TrainingDiverged, match='the output of 1'):
            train(model, **settled)


def test_the_history_of_a_run_that_diverged_holds_what_was_tried():
    calls = itertools.count()
    with pytest.raises(tu.TrainingDiverged):
        train(loss_fn=lambda model, batch: squares(model, batch) * (math.nan if next(calls) > 8 else 1))
    assert 'not finite' in Path('run/history.csv').read_text()


def test_replay_runs_the_saved_batch_once_more():
    model = network()
    at_training_call(model[1], lambda call: call > 2, lambda output: output * math.nan)
    with pytest.raises(tu.TrainingDiverged):
        train(model, num_epochs=5)
    again = network()
    at_training_call(again[2], lambda call: True, lambda output: output * math.nan)
    for path in ('run/bad_batch.pt', 'run', tu.Path('run')):
        assert tu.replay(path, again, squares) == 'first not finite: the output of 2 (ReLU)'
    assert 'all layers are finite' in tu.replay('run/bad_batch.pt', network(), squares)


@pytest.mark.parametrize('path, told', [
    ('nix.pt', 'nix.pt: there is no such file'), ('run', 'bad_batch.pt: there is no such file'),
    ('run/best.pt', 'holds no batch'), ('run/last.pt', 'holds no batch')])
def test_what_holds_no_batch_is_not_replayed(path, told):
    train(network(), num_epochs=1)
    with pytest.raises(tu.UserError, match=told):
        tu.replay(path, network(), squares)


def test_a_network_whose_train_returns_nothing_is_replayed_too():
    class Held(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)

    model = Held(nn.Conv2d(3, 1, 1), Nothing())
    with pytest.raises(tu.TrainingDiverged, match='train_unet.replay'):
        train(model=model)
    assert 'the output of 1' in tu.replay('run/bad_batch.pt', model, squares)


def test_replay_of_a_network_of_ones_own_asks_for_it():
    model = nn.Sequential(nn.Conv2d(3, 1, 1), Nothing())
    with pytest.raises(tu.TrainingDiverged, match='train_unet.replay'):
        train(model=model)
    with pytest.raises(tu.UserError, match='give model and loss_fn too'):
        tu.replay('run/bad_batch.pt')


def test_the_line_that_replays_is_python_whatever_the_folder_is_called():
    """On Windows a path has backslashes."""
    folder = 'it\'s \\new'
    with pytest.raises(tu.TrainingDiverged) as error:
        train(nn.Sequential(nn.Conv2d(3, 1, 1), Nothing()), run_dir=folder)
    path, = re.findall(r'replay\((.*)\)\)', str(error.value))
    assert ast.literal_eval(path) == str(Path(folder) / 'bad_batch.pt')


# --- out of memory --------------------------------------------------------------------


@pytest.fixture(scope='module')
def calm(tmp_path_factory):
    """The weights of a run that has memory enough; without clipping, which hid gradients of another scale."""
    run = str(tmp_path_factory.mktemp('calm') / 'run')
    with in_threads(1):
        return [*train(network(norm=False), grad_clip=None, run_dir=run).model.parameters()]


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_experiment(calm):
    epoch_2 = 1 + 2  # training calls: smoke test, two windows
    model = network(norm=False)
    counted = at_training_call(model, lambda call: False, None)
    out_of_memory(model[0],
                  lambda m, count, calls: m.training and len(counted) >= epoch_2 and count > 2)
    result = train(model, grad_clip=None)
    rows = [row for row in result.history if not row['event']]
    assert events(result.history) == ['out of memory: batch_size 4 -> 2, effective batch unchanged']
    assert [row['batch_size'] for row in rows] == [4, 2, 2]
    assert [row['step'] for row in rows] == [2, 4, 6]
    for a, b in zip(result.model.parameters(), calm):
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


def test_out_of_memory_in_the_very_first_step_is_in_the_history():
    model = network()
    out_of_memory(model[0], lambda m, count, calls: m.training and count > 2)
    result = train(model)
    assert events(result.history) == ['out of memory: batch_size 4 -> 2, effective batch unchanged']
    assert {row['batch_size'] for row in result.history if not row['event']} == {2}
    assert last()['batch_size'] == 2


def test_memory_that_the_cpu_really_does_not_have():
    def greedy(module, inputs, output):
        if len(output) > 2:
            torch.empty(2 ** 60, dtype=torch.uint8)

    state = fresh(settings(batch_size=4))
    state.model[0].register_forward_hook(greedy)
    tu.guarded_step(state, [batch_of(0, 1, 2, 3)], squares, settings())
    assert state.batch_size == 2


@pytest.mark.parametrize('words', ['CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`',
                                   'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":838',
                                   'cuDNN error: CUDNN_STATUS_ALLOC_FAILED', 'miopenStatusAllocFailed',
                                   'cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED',
                                   'GET was unable to find an engine to execute this computation',
                                   'could not create a primitive',     # oneDNN
                                   'upsample_nearest_nhwc only supports grad_output tensors with less than INT_MAX '
                                   'elements, but got [256, 32, 512, 512]',
                                   'the output is too large for the channels_last CUDA kernel launch'])
def test_libraries_that_get_no_memory_are_understood(words):
    assert tu.is_out_of_memory(RuntimeError(words))


@pytest.mark.parametrize('error', [RuntimeError('cuDNN error: CUDNN_STATUS_ALLOC_FAILED'),
                                   MemoryError('Unable to allocate 9.00 GiB for an array')])        # NumPy's
def test_libraries_that_get_no_memory_halve_the_batch_too(error):
    def loss_fn(model, batch):
        losses = squares(model, batch)
        if len(losses) > 2:
            raise error
        return losses

    assert train_own(loss_fn=loss_fn, num_epochs=1).history[-1]['batch_size'] == 2


def test_another_runtime_error_is_not_taken_for_memory():
    model = network()
    at_training_call(model[0], lambda call: call == 2, lambda output: torch.ones(1) @ torch.ones(2))
    with pytest.raises(RuntimeError, match='size'):
        train(model)


def test_a_kernel_that_this_cpu_lacks_is_not_taken_for_memory():
    """An LSTM in float16: the advice was a smaller image_size."""
    assert not tu.is_out_of_memory(RuntimeError(
        'could not create a primitive descriptor for the LSTM forward propagation primitive'))


def test_one_image_that_does_not_fit_ends_with_advice():
    model = network()
    out_of_memory(model[0], lambda m, count, calls: m.training)
    with pytest.raises(tu.UserError, match='out of memory(.|\n)*smaller image_size'):
        train(model)


def test_a_batchnorm_that_refuses_one_image_is_the_floor():
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(6),
                          nn.Conv2d(6, 1, 1))
    out_of_memory(model[0], lambda m, count, calls: m.training and count > 1)
    with pytest.raises(tu.UserError, match='out of memory'):           # not BatchNorm's ValueError
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


# --- out of memory inside the update --------------------------------------------------


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


@pytest.mark.usefixtures('each_epoch_saved')
def test_out_of_memory_inside_the_update_goes_back_to_the_last_checkpoint(failing_optimizer, calm):
    failing_optimizer(lambda step: step == 1 + 2 + 2)  # smoke test, epoch 1, the second of epoch 2
    result = train(network(norm=False), grad_clip=None)
    rows = [row for row in result.history if not row['event']]
    assert events(result.history) == ['out of memory inside the optimizer step: batch_size 4 -> 2']
    assert [row['val_loss'] is None for row in result.history] == [bool(row['event']) for row in result.history]
    assert [row['step'] for row in rows] == [2, 4, 6]
    assert [row['batch_size'] for row in rows] == [4, 2, 2]
    for a, b in zip(result.model.parameters(), calm):
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


def test_going_back_keeps_the_precision_that_was_found_to_work(failing_optimizer):
    """The checkpoint before the first step knows the other one alone, in which the next step ended the run."""
    def refuse(module, inputs, output):
        if output.dtype == torch.bfloat16:
            raise TypeError('no kernel for it (a test)')

    model = network()
    model[0].register_forward_hook(refuse)
    failing_optimizer(lambda step: step == 2)                          # the first of epoch 1; 1 is the smoke test's
    result = train(model, **tu.amp_settings('bfloat16'))
    assert len(events(result.history)) == 2 and 'a step fails in bfloat16' in events(result.history)[0]
    assert {row['precision'] for row in result.history if not row['event']} == {'float32'}


def test_going_back_keeps_the_precision_that_was_typed_at_a_resume(failing_optimizer):
    train(num_epochs=1)
    failing_optimizer(lambda step: step == 2)
    result = train(num_epochs=2, resume='run', run_dir='auto', **tu.amp_settings('bfloat16'))
    assert len(events(result.history)) == 1 and result.history[-1]['precision'] == 'bfloat16'


def test_out_of_memory_inside_every_update_ends_with_advice(failing_optimizer):
    steps = failing_optimizer(lambda step: step > 1)
    with pytest.raises(tu.UserError, match='out of memory'):
        train()
    assert len(steps) < 20
    assert all((weight != 9).any() for weight in last()['weights'].values())


# --- torch.compile --------------------------------------------------------------------


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


class Replay:
    """A model's call as CUDA graphs do it: the results of each backward pass lie where those of the last one did."""

    def __init__(self, model):
        self.model, self.parameters = model, [*model.parameters()]
        self.places = [torch.empty_like(parameter) for parameter in self.parameters]

    def __call__(self, images):
        class Replayed(torch.autograd.Function):
            @staticmethod
            def forward(context, *_):
                return self.model._call_impl(images)

            @staticmethod
            def backward(context, gradient):
                with torch.enable_grad():
                    found = torch.autograd.grad(self.model._call_impl(images), self.parameters, gradient)
                torch._foreach_copy_(self.places, found)
                return tuple(place.detach() for place in self.places)

        return Replayed.apply(*self.parameters)


@pytest.mark.parametrize('count', [1, 2, 3])
def test_a_window_adds_up_gradients_that_the_next_pass_would_write_over(count):
    """Autograd keeps the first gradient as it gets it, and adds the others to that."""
    gradients, windows = [], [[batch_of(*range(4 * n, 4 * n + 4)) for n in range(count)], [batch_of(0, 1, 2, 3)]]
    for replays in False, True:
        state = fresh(settings(batch_size=4), Wrapped(network(norm=False)))
        state.model._compiled_call_impl = Replay(state.model) if replays else None
        for window in windows[::-1]:                                   # another step lies behind
            tu.train_step(state, window, squares, settings())
        gradients.append([p.grad.clone() for p in state.model.parameters()])
    for a, b in zip(*gradients):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope='module')
def weights_without_compiler(tmp_path_factory):
    """Those that the epochs of a network that is not compiled arrive at."""
    with in_threads(1):
        return train(Wrapped(), run_dir=str(tmp_path_factory.mktemp('plain') / 'run')).model.state_dict()


@pytest.mark.parametrize('broken_compile', [
    refuse_to_compile, compile_in_vain, compile_what_fails_backward, refuse_as_a_broken_library_does,
    compile_what_fails_in_validation, compile_what_triton_refuses, compile_with_too_little_memory,
    compile_what_a_broken_program_compiles])
def test_a_network_that_does_not_compile_trains_without(broken_compile, monkeypatch, weights_without_compiler):
    monkeypatch.setitem(sys.modules, 'triton.errors', None)            # put back at the end
    monkeypatch.setattr(nn.Module, 'compile', broken_compile)
    result = train(Wrapped(), compile_model=True)
    log = (result.run_dir / 'log.txt').read_text()
    assert 'torch.compile does not work here' in log and '(a test)' in log
    assert_same(result.model.state_dict(), weights_without_compiler)
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


def is_of_any_length(inputs):
    """Of a compiled graph: torch writes a number for a length that it has met once, a symbol for one that changed."""
    return any(isinstance(size, torch.SymInt) for size in inputs)


def test_a_compiler_that_fails_in_mid_run_is_left_and_the_step_replayed(calm, monkeypatch):
    """torch compiles anew for half a batch, once memory runs out; its own machinery raises what the backend does."""
    passes = []

    def backend(graph, inputs):
        if is_of_any_length(inputs):
            raise RuntimeError('no code for such sizes (a test)')

        def run(*inputs):
            passes.append(torch.is_grad_enabled())
            if passes.count(True) == 4:
                raise torch.OutOfMemoryError('CUDA out of memory (a test)')
            return graph.forward(*inputs)
        return run

    compiles = nn.Module.compile
    monkeypatch.setattr(nn.Module, 'compile', lambda model: compiles(model, backend=backend))
    result = train(Wrapped(network(norm=False)), compile_model=True, grad_clip=None)
    log = log_text()
    assert log.index('Compiled in') < log.index('torch.compile does not work here') and '(a test)' in log
    assert events(result.history) == ['out of memory: batch_size 4 -> 2, effective batch unchanged']
    for a, b in zip(result.model.parameters(), calm):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_last_batch_of_an_epoch_is_not_compiled(monkeypatch):
    """Compiling for it would take as long as at the start, and its code for any length would run all later batches."""
    lengths = []

    def backend(graph, inputs):
        assert not is_of_any_length(inputs)

        def run(*inputs):
            lengths.extend(len(value) for value in inputs if torch.is_tensor(value) and value.shape[1:] == (3, 8, 8))
            return graph.forward(*inputs)
        return run

    sets = dict(train_data=Samples(14), val_data=Samples(7), batch_size=4)     # leftovers of 2 and 3
    plain = train(Wrapped(), run_dir='plain', **sets)
    compiles = nn.Module.compile
    monkeypatch.setattr(nn.Module, 'compile', lambda model: compiles(model, backend=backend))
    result = train(Wrapped(), compile_model=True, **sets)
    assert lengths == [4] * (2 + 3 * (3 + 1)) and 'does not work here' not in log_text()
    result.model(torch.zeros(1, 3, 8, 8))                              # what is returned is not compiled either
    assert len(lengths) == 14
    assert_same(result.model.state_dict(), plain.model.state_dict())


@pytest.mark.parametrize('first', [1, 4])
def test_a_compiled_model_that_runs_out_of_memory_is_replayed_and_stays_compiled(first, calm, monkeypatch):
    """In the first step, also the probe of compiling, and in the second epoch; raised by the compiled graph."""
    passes, compiles = [], nn.Module.compile

    def backend(graph, inputs):
        def run(*inputs):
            images = next(value for value in inputs if torch.is_tensor(value) and value.shape[1:] == (3, 8, 8))
            passes.append(len(images))
            if torch.is_grad_enabled() and len(images) > 2 and sum(n > 2 for n in passes) >= first:
                raise torch.OutOfMemoryError('CUDA out of memory (a test)')
            return graph.forward(*inputs)
        return run

    monkeypatch.setattr(nn.Module, 'compile', lambda model: compiles(model, backend=backend))
    result = train(Wrapped(network(norm=False)), compile_model=True, grad_clip=None)
    assert events(result.history) == ['out of memory: batch_size 4 -> 2, effective batch unchanged']
    assert 'does not work here' not in (result.run_dir / 'log.txt').read_text()
    rows = [row for row in result.history if not row['event']]
    assert [row['step'] for row in rows] == [2, 4, 6] and len(passes) > 6
    for a, b in zip(result.model.parameters(), calm):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_only_what_keeps_no_result_of_an_earlier_step_runs_as_cuda_graphs(monkeypatch):
    """The results of one lie where those of the next will: a loss or a network of the user's may keep one."""
    seen = []
    monkeypatch.setattr(nn.Module, 'compile', lambda model, **how: seen.append(how))
    config = settings(encoder='tu-test_resnet', num_classes=2, image_size=[64, 64], image_dtype='uint8',
                      decoder_channels=[16, 12, 8, 8, 8], mean=[9.0] * 3, std=[9.0] * 3, weight_decay=0.01,
                      progressive_resizing=0.0)
    derived = type('Keeping', (tu.SegmentationLoss,), {})(config)
    loss_fn, ours = tu.SegmentationLoss(config), fresh(config, tu.build_model(config))
    own = fresh(config, tu.SegmentationModel(tu.build_network(config), config, is_own=True))
    gpu = types.SimpleNamespace(model=ours.model, average=None, device=torch.device('cuda'))
    cases = [(gpu, loss_fn, {}, True), (ours, loss_fn, {}, False), (gpu, squares, {}, False),
             (types.SimpleNamespace(**vars(gpu) | {'model': own.model}), loss_fn, {}, False),
             (types.SimpleNamespace(**vars(gpu) | {'model': Wrapped()}), loss_fn, {}, False),
             (types.SimpleNamespace(**vars(gpu) | {'average': ours.average}), loss_fn, {'size_policy': 'crop'}, True),
             (gpu, loss_fn, {'size_policy': 'crop'}, False),
             (gpu, loss_fn, {'activation_checkpointing': True}, False), (gpu, derived, {}, False),
             (gpu, loss_fn, {'progressive_resizing': 0.2}, False)]
    for state, loss, changes, _ in cases:
        tu.try_to_compile(state, loss, {**config, **changes})
    thread = threading.Thread(target=tu.try_to_compile, args=(gpu, loss_fn, config))
    thread.start()
    thread.join()                                                      # torch has no memory for graphs there
    monkeypatch.setattr(torch.version, 'hip', '6.4')                   # not measured on AMD's
    tu.try_to_compile(gpu, loss_fn, config)
    monkeypatch.setattr(torch.version, 'hip', None)
    monkeypatch.setattr(tu, 'world', lambda: tu.World(0, 2))
    tu.try_to_compile(gpu, loss_fn, config)
    assert seen == [{'mode': 'reduce-overhead'} if graphs else {} for *_, graphs in cases] + [{}] * 3


@pytest.mark.parametrize('graphs, steps', [(True, 3), (False, 1)])
def test_cuda_graphs_are_made_before_training_begins(graphs, steps, monkeypatch):
    """Only the steps after the first one record them: a want of memory there would come in mid-run."""
    calls = []

    def compiled(images):
        calls.append(model.training)
        return model._call_impl(images)

    model = Wrapped(network(norm=False))
    monkeypatch.setattr(tu, 'can_replay', lambda *_: graphs)
    monkeypatch.setattr(nn.Module, 'compile', lambda model, **_: setattr(model, '_compiled_call_impl', compiled))
    monkeypatch.setattr(tu.Run, 'agree', lambda *_: calls.append('a step of the first epoch'))
    train(model, compile_model=True)
    assert calls[:calls.index('a step of the first epoch') - 1].count(True) == steps


def test_a_last_batch_that_does_not_fit_beside_cuda_graphs_makes_no_other_smaller(monkeypatch):
    """It runs eager, and a graph gives no memory back; the others have theirs."""
    seen, sets = [], dict(train_data=Samples(10), val_data=Samples(4))

    def compiled(images):
        if model.training:
            seen.append(len(images))
            if len(images) == 2:
                raise torch.OutOfMemoryError('CUDA out of memory.')
        return model._call_impl(images)

    model = Wrapped(network(norm=False))
    monkeypatch.setattr(nn.Module, 'compile', lambda model, **_: setattr(model, '_compiled_call_impl', compiled))
    resets = []
    monkeypatch.setattr(torch._dynamo, 'reset', lambda: resets.append(len(seen)))
    result = train(model, compile_model=True, **sets)
    assert events(result.history) and seen[-6:] == [4, 4, 2, 2, 1, 1]
    assert {*resets} <= {0, len(seen)}                                 # nor is anything compiled anew for it


@pytest.mark.parametrize('lengths, is_odd', [([10, 10], False), ([12], False), ([4], True)])
def test_out_of_memory_frees_the_code_of_usual_windows_whatever_their_length(lengths, is_odd, monkeypatch):
    """20 images are 10 and 10 where batch_size is 16; an odd window runs eager."""
    model, failed, resets = network(norm=False), [], []
    model.compile(backend='eager')
    monkeypatch.setattr(torch._dynamo, 'reset', lambda: resets.append(1))

    def loss_fn(model, batch):
        if not failed:
            failed.append(1)
            raise torch.OutOfMemoryError('CUDA out of memory.')
        return squares(model, batch)

    config = settings(batch_size=16)
    windows = [batch_of(*range(length)) for length in lengths]
    with tu.compiles_nothing(model, is_odd):
        tu.guarded_step(fresh(config, model), windows, loss_fn, config, is_odd=is_odd)
    assert failed and bool(resets) != is_odd


def test_an_update_without_memory_leaves_no_verdict_on_the_optimizer(monkeypatch):
    """The fused kernels of a later first step would skip it, without a word."""
    def starve():
        raise torch.OutOfMemoryError('CUDA out of memory.')

    config = settings()
    state = fresh(config, network(norm=False))
    tu.guarded_step(state, [batch_of(0, 1)], squares, config)
    monkeypatch.setattr(state.optimizer, 'step', starve)
    with pytest.raises(tu.Rewind):
        tu.guarded_step(state, [batch_of(0, 1)], squares, config)
    assert not hasattr(state.optimizer, 'found_inf') and not hasattr(state.optimizer, 'grad_scale')


@pytest.mark.parametrize('fault', [None, tu.UserError, RuntimeError, torch.OutOfMemoryError])
def test_what_was_compiled_is_freed_once_it_is_of_no_use(fault, monkeypatch):
    """torch keeps it with the code of the network, and CUDA graphs their memory with it. After the training, also one
    that a fault ends; when compiling is given up; and when memory runs out, before fewer images are tried."""
    kept, alive, at, compiles = [], [], [], nn.Module.compile
    is_compilers = fault in (RuntimeError, torch.OutOfMemoryError)

    def backend(graph, inputs):
        def run(*values):
            if is_compilers and len(alive) > 5 and torch.is_grad_enabled() and not at:
                at.append(len(alive))
                raise fault('a test')
            return graph.forward(*values)
        kept.append(weakref.ref(run))
        return run

    def loss(model, batch):
        gc.collect()
        alive.append([number for number, one in enumerate(kept) if one() is not None])
        if len(alive) == 5 and fault is tu.UserError:
            raise fault('a test')
        return squares(model, batch)

    monkeypatch.setattr(nn.Module, 'compile', lambda model: compiles(model, backend=backend))
    gc.collect()
    gc.freeze()                                                        # the loss looks for what comes from here on
    with pytest.raises(fault) if fault is tu.UserError else contextlib.nullcontext():
        train(Wrapped(network(norm=False)), compile_model=True, loss_fn=loss)
    gc.collect()
    assert alive[4] and not [one for one in kept if one() is not None]
    if is_compilers:                                                   # training went on, with the same window
        assert alive[at[0] - 1] and not alive[at[0]] and len(alive) > at[0] + 2


def test_the_sixth_compiled_training_of_a_process_is_compiled_too(monkeypatch):
    """torch keeps what it compiled for one line of code, also of networks that are gone, and from the ninth on (here:
    the fifth) it runs eager and says nothing."""
    graphs, compiles = [], nn.Module.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(nn.Module, 'compile', lambda model: compiles(model, backend=backend))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(cache_size_limit=4):
        for number in range(6):
            before = len(graphs)
            width = 3 + number                                         # never the same network again
            layers = nn.Sequential(nn.Conv2d(3, width, 1), nn.ReLU(), nn.Conv2d(width, 1, 1))
            train(Wrapped(layers), compile_model=True, num_epochs=1, train_data=Samples(4), run_dir=f'run{number}')
            assert len(graphs) > before, f'training {number} was not compiled'


def test_going_back_keeps_the_images_that_a_resume_was_told_of(failing_optimizer, caplog):
    train(num_epochs=1)
    failing_optimizer(lambda step: step == 2)
    for epochs in (2, 3):
        train(val_data=Samples(6, seed=1), num_epochs=epochs, resume='run', run_dir='auto')
    assert caplog.text.count('not those this run began with') == 1


def test_memory_of_numpy_that_ends_inside_the_update_goes_back_too():
    steps = []

    def hook(*_):
        steps.append(1)
        if len(steps) == 4:
            raise MemoryError('Unable to allocate')

    handle = register_optimizer_step_pre_hook(hook)
    try:
        result = train(network(norm=False))
    finally:
        handle.remove()
    assert events(result.history) == ['out of memory inside the optimizer step: batch_size 4 -> 2']
