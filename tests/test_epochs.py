"""The loop: windows, epochs, evaluation. Data workers and files that fail, the best epoch, and what is shown.

Run: python -m pytest tests/test_epochs.py
"""
import errno
import fcntl
import functools
import io
import math
import multiprocessing
import os
import pickle
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
from torch import nn

import train_unet as tu
from conftest import TINY, draw_set
from helpers import CPU, OWN, PLAIN, SMALL, WORDS, Samples, assert_same, at_training_call, dataset, events, last
from helpers import in_threads, log_text, network, out_of_memory, squares, stop_at, train, train_own

pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture
def two_minutes():
    """A run that hangs fails instead."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail('it hangs'))
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# --- windows --------------------------------------------------------------------------


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


# --- progressive resizing -------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.uint8, torch.float32])
def test_half_the_size_is_the_mean_of_images_and_invents_no_class(dtype):
    images = torch.randint(0, 256, (2, 3, 9, 12)).to(dtype).contiguous(memory_format=torch.channels_last)
    masks = torch.tensor([0, 7, 255], dtype=torch.uint8)[torch.randint(0, 3, (2, 9, 12))]
    small = tu.at_half_size({'image': images, 'mask': masks, 'index': torch.arange(2)}, CPU)
    assert small['image'].shape == (2, 3, 4, 6) and small['mask'].shape == (2, 4, 6)
    assert small['image'].dtype == dtype and small['mask'].dtype == torch.uint8 and small['index'].tolist() == [0, 1]
    assert small['image'].is_contiguous(memory_format=torch.channels_last)
    assert set(small['mask'].unique().tolist()) <= {0, 7, 255}
    even = tu.at_half_size({'image': images[:, :, :8], 'mask': masks[:, :8]}, CPU)
    assert torch.equal(small['mask'], even['mask']) and torch.equal(small['image'], even['image'])     # 9 rows or 8
    even = even['image'].float()
    mean = images[:, :, :8].float().unflatten(2, (4, 2)).unflatten(4, (6, 2)).mean((3, 5))
    assert (even - mean).abs().max() <= (0.5 if dtype == torch.uint8 else 1e-4)


def test_masks_of_half_the_size_stay_where_their_images_are():
    """The nearest of two pixels is always the second one, if nobody sees to it."""
    at = torch.arange(64.)
    centres = torch.rand(60, 2, generator=torch.Generator().manual_seed(0)) * 20 + 22
    discs = (at[:, None] - centres[:, 0, None, None]) ** 2 + (at - centres[:, 1, None, None]) ** 2 < 100
    small = tu.at_half_size({'image': 255.0 * discs[:, None], 'mask': discs.byte()}, CPU)
    rows, columns = torch.meshgrid(at[:32], at[:32], indexing='ij')
    place = lambda weight: [(weight * axis).sum((1, 2)) / weight.sum((1, 2)) for axis in (rows, columns)]
    shifts = [image - mask for image, mask in zip(place(small['image'][:, 0]), place(small['mask'].float()))]
    assert max(abs(float(shift.mean())) for shift in shifts) < 0.03


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


@pytest.mark.parametrize('num_epochs, done', [(4, 3), (20, 6), (100, 22), (1000, 42)])
def test_the_first_fifth_of_a_run_does_not_end_it(num_epochs, done):
    """Five images make a step of an epoch: such a run was over after 21 steps, before it found anything."""
    def never_better(model, batch):
        return squares(model, batch) if torch.is_grad_enabled() else torch.ones(len(batch['image']))

    result = train(loss_fn=never_better, num_epochs=num_epochs, early_stopping_patience=2)
    assert len(result.history) == done and 'small images' not in log_text()


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


# --- evaluation -----------------------------------------------------------------------


def test_an_image_left_out_of_validation_does_not_dilute_its_loss(small_set):
    config = {**tu.CONFIG, **SMALL, 'image_size': [32, 32], 'image_dtype': 'uint8', 'skip_broken': True, 'mean': [0.0],
              'std': [255.0], 'num_classes': 2, 'cache_images': False}
    found = tu.inspect_data(config)
    dataset = tu.SegmentationDataset(found, 'val', config, is_training=False)
    model, losses = tu.build_model(config), []
    for broken in (False, True):
        if broken:
            open(dataset.name(0), 'w').close()
        loader = tu.build_loader(dataset, config, torch.device('cpu'), batch_size=1)
        metrics = tu.evaluate_model(model, loader, tu.SegmentationLoss(config), 'float32')
        losses.append(metrics['loss'])
    assert metrics['broken'] == [0] and abs(losses[1] / losses[0] - 1) < 0.2


def test_a_validation_that_overflows_float16_steps_down_and_is_judged_again():
    model = network(norm=False)                                        # x 100,000 in evaluation only, then back
    model[0].register_forward_hook(lambda module, inputs, output: output if module.training else output * 1e5)
    model[-1].register_forward_hook(lambda module, inputs, output: output if module.training else output * 1e-5)
    result = train(model, num_epochs=3, init_scale=8.0, **tu.amp_settings('float16'))
    assert ['validation is not finite in float16' in event for event in events(result.history)] == [True]
    rows = [row for row in result.history if not row['event']]
    assert all(math.isfinite(row['val_loss']) for row in rows)
    assert rows[-1]['precision'] in ('bfloat16', 'float32') and rows[-1]['loss_scale'] is None


@pytest.mark.parametrize('count, most', [(3, 1), (5, 2), (7, 2), (8, 1)])
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


def test_out_of_memory_in_the_tiles_of_validation_is_told(tmp_path):
    """Tiles went through one by one, after a failure each time, and neither the log nor the history knew."""
    def hook(module, inputs):
        if isinstance(module, tu.SegmentationModel) and not module.training and len(inputs[0]) > 1:
            raise torch.OutOfMemoryError('CUDA out of memory (a test)')

    settings = dict(data=draw_set(tmp_path / 'data', size=80), size_policy='crop', num_epochs=1, progressive_resizing=0)
    usual = tu.train(**{**TINY, **settings}, run_dir='usual')
    with nn.modules.module.register_module_forward_pre_hook(hook):
        cut = tu.train(**{**TINY, **settings}, run_dir='cut')
    assert [row['event'].split(':')[0] for row in cut.history] == ['out of memory in validation', '']
    assert not events(usual.history) and 'out of memory in validation' in Path('cut/log.txt').read_text()
    assert cut.best['iou'] == pytest.approx(usual.best['iou'])


def test_masks_as_high_as_a_batch_is_long_are_cut_between_images(tmp_path):
    """Each mask was cut by its rows, and half of them were held against the wrong images."""
    for number in range(9):
        split, random = 'val' if number else 'train', np.random.default_rng(number)
        for kind, shape in (('images', (8, 12, 3)), ('masks', (8, 12))):
            path = tmp_path / kind / split / f'{number}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(255 * random.integers(0, 2, shape, np.uint8)).save(path)
    data, config = dataset(tmp_path, 'val', mean=100.0, std=100.0)
    loader, model = tu.build_loader(data, config, CPU, batch_size=8), tu.build_model(config)
    judge = functools.partial(tu.evaluate_model, model, loader, tu.SegmentationLoss(config), 'float32')
    usual = judge()
    out_of_memory(model, lambda _, size, calls: size > 4)
    cut = judge()
    assert (usual.pop('cut'), cut.pop('cut')) == (False, True) and 0 < usual['iou'] < 1
    assert all(cut[key] == pytest.approx(value) for key, value in usual.items())


def test_a_batch_that_does_not_fit_on_its_way_to_the_device_is_halved_in_validation(monkeypatch):
    real, sizes = torch.Tensor.to, []

    def to(tensor, *where, **how):
        if 'non_blocking' in how and tensor.ndim and not torch.is_grad_enabled():
            sizes.append(len(tensor))
            if sizes[-1] > 2:
                raise torch.OutOfMemoryError('CUDA out of memory')
        return real(tensor, *where, **how)

    monkeypatch.setattr(torch.Tensor, 'to', to)
    assert train_own(num_epochs=1).history[-1]['val_loss'] > 0 and {4, 2} <= set(sizes)


def test_one_image_of_validation_that_does_not_fit_is_told_in_words():
    def loss_fn(model, batch):
        if not torch.is_grad_enabled():
            raise torch.OutOfMemoryError('CUDA out of memory')
        return squares(model, batch)

    with pytest.raises(tu.UserError, match='one image at a time does not fit') as caught:
        train_own(loss_fn=loss_fn)
    assert caught.value.title == 'out of memory'


def test_what_was_trained_is_saved_before_a_long_validation(monkeypatch):
    """Each training pass takes 100 s here, by a clock that jumps; nothing is saved for ten minutes otherwise."""
    model, clock, found = network(), time.monotonic, []
    passed = at_training_call(model[0], lambda call: False, None)
    monkeypatch.setattr(time, 'monotonic', lambda: clock() + 100 * len(passed))
    model[0].register_forward_hook(lambda module, *_: None if module.training else found.append(last()))
    train(model, val_data=Samples(4), num_epochs=2)
    assert [(saved['epoch'], saved['window']) for saved in found[1:]] == [(0, 2), (1, 2)]


# --- the best epoch, and early stopping -----------------------------------------------


def test_the_best_epoch_is_kept_and_a_run_without_progress_stops():
    model = network()
    at_training_call(model, lambda call: call > 5,  # from then on it learns nonsense
                     lambda output: output + 100 * output.detach().sign())
    result = train(model, num_epochs=15, early_stopping_patience=3, learning_rate=0.003)
    rows = [row for row in result.history if not row['event']]
    best = min(rows, key=lambda row: row['val_loss'])
    assert len(rows) == best['epoch'] + 3 < 15
    assert result.best['epoch'] == best['epoch']
    loader = torch.utils.data.DataLoader(Samples(5, seed=1), 4)
    again = tu.evaluate_model(result.model, loader, squares, 'float32')['loss']
    assert again == pytest.approx(best['val_loss'])


def test_a_long_run_says_how_long_it_will_take():
    """After the first epoch of a million, each of some hundredths of a second; a short one has nothing to say."""
    train(num_epochs=10**6, early_stopping_patience=1, learning_rate=1e-30)
    assert re.search(r'Epoch 1/.* \| \d+ min left$', log_text(), re.MULTILINE)
    train(num_epochs=2, run_dir='short')
    assert 'left' not in Path('short/log.txt').read_text()


def test_epochs_of_small_images_tell_the_least_that_is_left(small_set, monkeypatch):
    row = tu.epoch_row
    monkeypatch.setattr(tu, 'epoch_row', lambda *given: row(*given) | {'seconds': 600.0})
    settings = SMALL | {'progressive_resizing': 0.5, 'num_epochs': 5, 'image_size': 64, 'data': str(small_set)}
    tu.train(**settings)
    lines = re.findall(r'Epoch \d/5 .*', log_text())                   # the third is half of it on small images
    assert [re.findall(r'(over )?\d+ min left', line) for line in lines] == [['over ']] * 3 + [[''], []]


def test_a_run_that_stops_early_names_the_setting():
    train(num_epochs=10**6, early_stopping_patience=1, learning_rate=1e-30)
    assert 'Early stopping: no better for 1 epoch (early_stopping_patience)' in log_text()


def test_a_score_that_is_never_a_number_still_leaves_a_best_model():
    def loss_fn(model, batch):  # no foreground in truth or prediction: IoU is NaN
        return squares(model, batch), torch.tensor([[len(batch['image']), 0], [0, 0]])

    result = train(loss_fn=loss_fn)
    assert math.isnan(result.history[-1]['val_iou'])
    assert (result.run_dir / 'best.pt').exists() and result.best


def test_nothing_to_find_and_nothing_found_is_better_than_a_false_alarm():
    """Validation images without foreground: IoU is 0 while some is invented, then NaN."""
    def loss_fn(model, batch):
        invented = len(batch['image']) * (loss_fn.calls < 4)
        loss_fn.calls += not model.training
        return squares(model, batch), torch.tensor([[len(batch['image']) - invented, invented], [0, 0]])
    loss_fn.calls = -2                                                 # the smoke test's
    result = train(loss_fn=loss_fn, num_epochs=5)
    ious = [row['val_iou'] for row in result.history]
    assert ious[0] == 0 and math.isnan(ious[-1])
    assert result.best['epoch'] == 5                                   # not the first of them, which has learnt least


def test_a_loss_may_be_a_method_which_takes_no_attributes():
    class Criterion:
        def loss(self, model, batch):
            return squares(model, batch)

    assert train(loss_fn=Criterion().loss).history[-1]['val_loss'] > 0


def test_where_nothing_can_be_scored_the_last_weights_are_kept():
    """All pixels of the validation samples are ignored: that is no full score."""
    result = train(loss_fn=lambda model, batch: (squares(model, batch), torch.zeros(2, 2, dtype=torch.long)))
    assert result.best['epoch'] == result.history[-1]['epoch'] == 3


def test_a_run_stopped_after_the_last_step_of_an_epoch_knows_how_fast_it_was():
    loss_fn = stop_at(2 + 1, squares)                                  # the only window; 1, 2: smoke test
    train(loss_fn=loss_fn, batch_size=8)
    assert last()['window'] == 1
    row = train(resume='run', run_dir='auto', batch_size=8).history[0]
    assert row['epoch'] == 1 and row['images_per_second'] > 0          # its seconds are rounded, and may be 0.0


def test_with_nan_in_a_validation_sample_the_last_weights_are_kept(caplog):
    result = train(val_data=Samples(5, broken=[3]))
    assert 'The validation loss is not finite' in caplog.text
    assert result.best['epoch'] == 3                                   # not the first, which no score prefers


@pytest.mark.usefixtures('each_epoch_saved')
def test_best_weights_ask_for_the_precision_that_the_run_ended_with():
    """The first layer's output is above what float16 holds, the last one undoes it; float16 is given up."""
    model, calls = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1)), []

    def enlarge(module, inputs, output):
        calls.append(module.training)
        return output * 1e5 if module.training and sum(calls) > 5 else output

    model[0].register_forward_hook(enlarge)
    model[2].register_forward_pre_hook(
        lambda module, inputs: (inputs[0] / 1e5,) if module.training and sum(calls) > 5 else None)
    result = train(model, val_data=Samples(), num_epochs=6, init_scale=8.0, max_bad_steps=2,
                   **tu.amp_settings('float16'))
    rows = [row for row in result.history if not row['event']]
    assert rows[0]['precision'] == 'float16' != rows[-1]['precision'] and result.best['epoch'] == 6
    for name in ('best.pt', 'last.pt'):
        config = tu.load_checkpoint(f'run/{name}')['config']
        asked = {key: config[key] for key in ('use_amp', 'amp_dtype')}
        assert asked == tu.amp_settings(rows[-1]['precision'])


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
    result = train(model, batch_size=8, num_epochs=12, early_stopping_patience=3, max_bad_steps=5,
                   **tu.amp_settings('float16'))
    assert sum('precision float16 -> ' in event for event in events(result.history)) == 1
    assert result.history[-1]['precision'] != 'float16' and result.best['epoch'] > 5


# --- the history ----------------------------------------------------------------------


def test_an_epoch_without_a_sound_step_has_no_loss():
    """float16 gradients that overflow until the scale is found: 2^40 needs more steps than the epoch has."""
    result = train(num_epochs=20, use_amp=True, amp_dtype='float16', init_scale=2.0 ** 24, batch_size=8)
    losses = [row['train_loss'] for row in result.history if not row['event']]
    assert math.isnan(losses[0]) and losses[-1] > 0


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


# --- data workers that die or hang ----------------------------------------------------


class Deadly(Samples):
    """Kills the worker that reads number 5, once."""
    signal = signal.SIGKILL

    def __getitem__(self, index):
        if index == 5 and torch.utils.data.get_worker_info() and not os.path.exists('killed'):
            open('killed', 'w').close()
            os.kill(os.getpid(), self.signal)
        return super().__getitem__(index)


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


@pytest.fixture(scope='module')
def calm(tmp_path_factory):
    """The result of a run whose workers nothing happens to. Not to be changed."""
    with in_threads(1):
        return train(None, Samples(12), run_dir=str(tmp_path_factory.mktemp('calm') / 'run'))


@pytest.mark.parametrize('data, loss_fn', [
    (Deadly, squares), (Samples, kill(0, training=True)), (Samples, kill(1, training=False)),
    (Samples, kill(0, training=False)), (Samples, kill(1, training=True))],
    ids=['reading', 'train worker in training', 'val worker in validation',
         'train worker in validation', 'val worker in training'])
def test_a_worker_that_is_killed_is_replaced(data, loss_fn, two_minutes, calm):
    result = train(None, data(12), loss_fn=loss_fn, num_workers=2)
    assert os.path.exists('killed')
    assert_same(result.model.state_dict(), calm.model.state_dict())


def test_a_worker_that_is_killed_while_it_hands_over_a_batch_is_replaced(calm, monkeypatch):
    rebuild = torch.multiprocessing.reductions.rebuild_storage_fd      # asks the worker for the memory of a batch

    @functools.wraps(rebuild)
    def cut_off(*given):
        if Path('run/history.csv').exists() and not Path('cut').exists():
            Path('cut').touch()
            raise ConnectionResetError('Connection reset by peer')
        return rebuild(*given)

    monkeypatch.setattr('torch.multiprocessing.reductions.rebuild_storage_fd', cut_off)
    result = train(None, Samples(12), num_workers=1)
    assert os.path.exists('cut')
    assert_same(result.model.state_dict(), calm.model.state_dict())


def workers():
    """Process ids of the data workers; multiprocessing still lists one whose end torch interrupted."""
    return [child.pid for child in multiprocessing.active_children() if tu.Path(f'/proc/{child.pid}').exists()]


def kill_a_worker():
    """And wait, because torch raises wherever the main process is when it hears of it."""
    os.kill(workers()[0], signal.SIGKILL)
    time.sleep(0.5)


@pytest.mark.usefixtures('each_epoch_saved')
@pytest.mark.parametrize('name', ['best.pt', 'last.pt', 'history.csv'])
def test_a_worker_that_is_killed_while_an_epoch_is_saved_costs_nothing(name, two_minutes, calm, monkeypatch):
    real, killed = os.replace, []

    def replace(source, target):
        if str(target) == f'run/{name}' and workers() and not killed:
            killed.append(1)
            kill_a_worker()
        real(source, target)

    monkeypatch.setattr(os, 'replace', replace)
    result = train(None, Samples(12), num_workers=2)
    assert killed and [row['epoch'] for row in result.history] == [1, 2, 3]
    assert_same(result.model.state_dict(), calm.model.state_dict())
    assert tu.load_last('run')[0]['epoch'] == 3 and result.best['epoch'] == calm.best['epoch']


class Frozen(Deadly):
    """Freezes it, as a network drive that is gone does: it hears no request to end either."""
    signal = signal.SIGSTOP


def test_a_worker_that_hangs_is_replaced(two_minutes, hasty, calm, monkeypatch):
    monkeypatch.setattr(tu, 'WORKER_TIMEOUT', 2)
    result = train(None, Frozen(12), num_workers=2)
    assert os.path.exists('killed') and not workers()
    assert_same(result.model.state_dict(), calm.model.state_dict())


def test_where_memory_runs_out_no_start_of_workers_is_blamed(monkeypatch):
    class Greedy(Samples):
        seen = 0

        def __getitem__(self, index):
            self.seen += 1
            if self.seen > 4 + 8:                                      # after the smoke test
                raise MemoryError
            return super().__getitem__(index)

    monkeypatch.setattr(sys, 'platform', 'darwin')
    with pytest.raises(tu.UserError, match='out of memory') as caught:
        train(train_data=Greedy())
    assert 'fewer num_workers' in str(caught.value) and 'keep Datasets' not in str(caught.value)


@pytest.fixture
def forked(monkeypatch):
    """Workers are forked, whatever sys.platform says."""
    usual = multiprocessing.context._default_context                   # from Python 3.14 on it is not that of darwin
    monkeypatch.setattr(usual, '_actual_context', multiprocessing.get_context('fork'))


def test_workers_that_always_die_end_the_run(two_minutes, forked):
    def loss_fn(model, batch):
        if workers() and torch.is_grad_enabled():
            kill_a_worker()
        return squares(model, batch)

    with pytest.raises(tu.UserError, match='DataLoader worker(.|\n)*fewer num_workers'):
        train(None, Samples(24), loss_fn=loss_fn, num_workers=1)
    assert (tu.Path('run') / 'log.txt').read_text().count('starting the workers again') == 3
    assert tu.load_last('run')[0]['step'] >= 3                         # every step that was done is saved


def test_a_worker_that_dies_in_each_of_five_epochs_ends_nothing(two_minutes, forked):
    """In a week of training as many may, each for a reason of its own."""
    calls = []

    def loss_fn(model, batch):
        if workers() and torch.is_grad_enabled():
            calls.append(1)
            if len(calls) % 3 == 2:                                    # of three windows in an epoch
                kill_a_worker()
        return squares(model, batch)

    result = train(None, Samples(12), loss_fn=loss_fn, num_workers=1, num_epochs=5)
    assert log_text().count('starting the workers again (1 of 3)') == len(result.history) == 5


@pytest.mark.parametrize('error, platform, advice', [
    (BlockingIOError(errno.EAGAIN, 'Resource temporarily unavailable'), 'linux', 'fewer num_workers'),
    (RuntimeError('Too many open files. Communication with the workers is no longer'), 'darwin',
     'keep Datasets in a .py file')], ids=['linux', 'darwin'])
def test_workers_that_cannot_be_started_are_tried_again_and_end_the_run_with_a_checkpoint(
        error, platform, advice, forked, calm, monkeypatch):
    """Processes, memory or open files have run out: it said  a file: Resource temporarily unavailable."""
    def begin(*given):                                                 # not in what is tried before the training
        refused[:] = [error] * times
        return fit(*given)

    def start(process):
        if refused:
            raise refused.pop()
        return usual(process)

    fit, usual, refused, times = tu.fit, multiprocessing.process.BaseProcess.start, [], 2
    monkeypatch.setattr(sys, 'platform', platform)
    monkeypatch.setattr(tu, 'fit', begin)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, 'start', start)
    assert_same(train(None, Samples(12), num_workers=1, run_dir='twice').model.state_dict(), calm.model.state_dict())
    times = 4
    with pytest.raises(tu.UserError, match=f'the data workers die(.|\\n)*{advice}'):
        train(None, Samples(12), num_workers=1)
    assert os.path.exists('run/last.pt')


def test_only_want_of_processes_memory_or_open_files_is_of_the_workers(monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, 'Input/output error')

    assert all(tu.workers_failed(OSError(number, '')) for number in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE))
    assert tu.workers_failed(RuntimeError('received 0 items of ancdata'))
    assert not any(tu.workers_failed(OSError(number, '')) for number in (errno.EIO, errno.ENOSPC, errno.EACCES))
    monkeypatch.setattr(tu, 'train_epoch', fail)
    with pytest.raises(OSError, match='Input/output'):
        train(None, Samples(12), num_workers=1)


def test_workers_end_with_what_they_serve_and_are_not_blamed_where_there_are_none():
    loader = torch.utils.data.DataLoader(range(9), num_workers=1, persistent_workers=True)
    with pytest.raises(KeyError), tu.served_by(loader):
        next(iter(loader))
        raise KeyError
    assert not multiprocessing.active_children()
    with pytest.raises(EOFError), tu.served_by(torch.utils.data.DataLoader(range(9))):
        raise EOFError


@pytest.mark.skipif(sys.platform != 'linux', reason='shared memory is /dev/shm')
def test_a_batch_for_which_shared_memory_has_no_room_ends_its_worker_at_once(monkeypatch, capfd):
    """It was lost, with a traceback, and the run waited 300 seconds for it, four times."""
    def fail(*how):
        raise RuntimeError('unable to allocate shared memory(shm): No space left on device (28)')
    monkeypatch.setattr(torch.UntypedStorage, '_share_fd_cpu_', fail)
    monkeypatch.setattr(tu, 'WORKER_TIMEOUT', 30)
    with pytest.raises(tu.UserError, match='exited unexpectedly'):
        train(None, Samples(12), num_workers=1)
    said = capfd.readouterr().err
    assert 'cannot hand over its batch: RuntimeError: unable' in said and 'Traceback' not in said


class Fatal(Samples):
    """Its worker dies at the first sample, in what is tried before the training."""

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL if torch.utils.data.get_worker_info() else 0)
        return super().__getitem__(index)


def test_a_worker_that_dies_before_the_first_step_ends_the_run_with_advice(two_minutes):
    with pytest.raises(tu.UserError, match='the data workers die(.|\n)*fewer num_workers'):
        train(None, Fatal(12), num_workers=1)


@pytest.mark.parametrize('error', [AttributeError("Can't pickle local object 'f.<locals>.Own'"),
                                   AttributeError("Can't get local object 'f.<locals>.Own'"),      # Python 3.13
                                   TypeError("cannot pickle '_io.BufferedReader' object"),
                                   pickle.PicklingError("Can't pickle <function <lambda>>")])
def test_a_dataset_that_no_worker_can_import_is_told_on_windows_and_macos(error, monkeypatch):
    """Workers are not forked there; the error is that of Python when it pickles the Dataset for one."""
    def refuse(process):
        raise error

    monkeypatch.setattr(sys, 'platform', 'darwin')
    monkeypatch.setattr(multiprocessing.Process, 'start', refuse)
    with pytest.raises(tu.UserError, match='keep Datasets in a .py file(.|\n)*or type num_workers=0'):
        train(None, Samples(12), num_workers=1)


def test_a_child_process_that_ends_is_no_worker_that_died():
    def loss_fn(model, batch):
        subprocess.run(['true'], check=True)
        return squares(model, batch)

    train_own(loss_fn=loss_fn, num_workers=1)
    assert 'starting the workers again' not in log_text()


def test_a_process_that_ignores_its_children_may_start_one_in_a_step():
    def loss_fn(model, batch):
        subprocess.run(['false'], check=False)
        return squares(model, batch)

    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert len(train(loss_fn=loss_fn, num_epochs=1).history) == 1
    finally:
        signal.signal(signal.SIGCHLD, before)


# --- files that break during the run --------------------------------------------------


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
        result = tu.train(model=model, data=str(small_set), **{**PLAIN, **quiet, **changes})
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
def test_a_file_that_breaks_ends_the_run_and_is_named(breaking, happen, num_workers):
    with pytest.raises(tu.DataError) as error:
        breaking(happen, num_workers=num_workers)
    assert re.search(r'/images/\d\d\d\.png: cannot be read', str(error.value))
    assert last()['epoch'] == 1                                        # what was done is kept
    assert "train_unet.train(resume='run', ...) and the network" in str(error.value)       # it is one's own
    assert 'skip_broken=True leaves out files that cannot be read' in log_text()


@pytest.mark.parametrize('num_workers', [0, 1])
def test_a_file_that_breaks_is_left_out_counted_and_listed_if_allowed(breaking, num_workers):
    result, path, waits = breaking(cut, num_workers=num_workers, skip_broken=True)
    assert [row['epoch'] for row in result.history] == [1, 2, 3]
    end = (result.run_dir / 'log.txt').read_text().splitlines()[-4:]
    assert [line for line in end if f'left out 2 times, because it or its mask could not be read: {path}' in line]
    assert last()['left_out'] == {str(path): 2}
    if not num_workers:
        assert len(waits) == 2                                         # three attempts, and in the next epoch one


def test_a_broken_validation_image_ends_the_run_before_it_begins(small_set):
    """It is not in the first batch; its header is whole."""
    config = {**SMALL, 'val_fraction': 0.5, 'batch_size': 2}
    pairs = tu.inspect_data(tu.CONFIG | config).pairs
    path = Path(os.fsdecode(pairs.images[pairs.rows('val')[-1]]))
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(tu.DataError, match=f'{path.name}: cannot be read'):
        tu.train(**config)
    assert not os.path.exists(config['run_dir'])


def test_an_epoch_without_a_sound_step_is_not_praised(small_set):
    """One step an epoch, whose gradient overflows in the first one."""
    settings = {**SMALL, 'batch_size': 12, 'num_epochs': 2, 'use_amp': True, 'amp_dtype': 'float16'}
    tu.train(**settings, init_scale=1e12, backoff_factor=1e-9)
    first, second = [line for line in log_text().splitlines() if ' Epoch ' in line]
    assert 'no sound step' in first and 'best so far' not in first and 'no sound step' not in second


def test_a_file_that_came_back_is_waited_for_again(small_set, monkeypatch, caplog):
    waits = []
    monkeypatch.setattr(time, 'sleep', waits.append)
    config, _, _ = tu.resolve_config(None, {**SMALL, 'skip_broken': True, 'image_size': [32, 32], 'mean': [0.0]})
    config |= {'image_dtype': 'uint8', 'cache_images': True}
    data = tu.SegmentationDataset(tu.inspect_data(config), 'val', config, is_training=False)
    path = Path(data.name(0))
    content = path.read_bytes()
    left_out = []
    for written in (b'', b'', content, b''):
        path.write_bytes(written)
        data.kept.clear()
        left_out.append(data[0]['_left_out'])
        left_out.append(len(waits))
    assert left_out == [True, 2, True, 2, False, 2, True, 4]
    assert caplog.text.count('left out: ') == 2                        # not again at each reading
    path.write_bytes(content)
    assert not data[0]['_left_out']                                    # what was left out is not kept


def test_pixels_that_are_not_finite_are_not_waited_for(tmp_path, monkeypatch):
    """A thousand tiles with NaN took ten minutes of an epoch."""
    monkeypatch.setattr(time, 'sleep', lambda seconds: pytest.fail('waits'))
    for number in range(4):
        for kind in ('images', 'masks'):
            (tmp_path / kind).mkdir(exist_ok=True)
        np.save(tmp_path / f'images/{number}.npy', np.full((32, 32, 3), number / 4, np.float32))
        np.save(tmp_path / f'masks/{number}.npy', np.eye(32, dtype=np.uint8))
    config, _, _ = tu.resolve_config(None, {'data': str(tmp_path), 'skip_broken': True, 'image_size': 32, 'mean': 0})
    config |= {'image_dtype': 'float32'}
    data = tu.SegmentationDataset(tu.inspect_data(config), 'train', config, is_training=False)
    np.save(data.name(0), np.full((32, 32, 3), np.nan, np.float32))
    assert data[0]['_left_out'] and not data[1]['_left_out']


@pytest.mark.parametrize('num_epochs', [9, 2])                         # it vanishes in the second
def test_a_set_that_vanishes_ends_the_run_in_words(breaking, num_epochs):
    """With skip_broken every image is left out: no loss at all, which is not divergence."""
    with pytest.raises(tu.DataError, match='none of the 2 validation images can be read any more, such as .*images/'):
        breaking(lambda path: shutil.rmtree(path.parent), skip_broken=True, num_epochs=num_epochs)
    assert last()['epoch'] == 1 and 'not finite' not in log_text()     # what was done is kept


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


def test_a_file_that_breaks_costs_no_step():
    class Breaking(Samples):
        def __getitem__(self, index):
            calls.append(1)
            if len(calls) == 30:
                raise tu.DataError('x.png: broken')
            return super().__getitem__(index)

    calls = []
    with pytest.raises(tu.DataError):
        tu.train(model=network(), loss_fn=squares, train_data=Breaking(12), val_data=Samples(4), **OWN)
    assert tu.load_last('run')[0]['step'] >= 6                         # 4 of the trial, 12 an epoch


def test_a_validation_file_that_breaks_is_left_out_counted_and_named(small_set, caplog):
    settings = {**SMALL, 'num_epochs': 3, 'skip_broken': True, 'cache_images': False}
    real, epochs = tu.evaluate_model, []

    def evaluate(*args, **named):
        epochs.append(1)
        if len(epochs) == 3:                                           # the smoke test is the first
            broken.write_bytes(b'')
        return real(*args, **named)

    dataset = tu.inspect_data({**tu.CONFIG, **settings}).pairs
    broken = tu.Path(os.fsdecode(dataset.images[dataset.rows('val')[0]]))
    tu.evaluate_model = evaluate
    try:
        result = tu.train(**settings)
    finally:
        tu.evaluate_model = real
    assert [row['epoch'] for row in result.history] == [1, 2, 3] and result.history[-1]['val_iou'] > 0
    assert f'left out 2 times, because it or its mask could not be read: {broken}' in caplog.text


@pytest.mark.parametrize('kind', [tu.cv2.error, tu.A.augmentations.crops.transforms.CropSizeError])
def test_an_image_that_a_pipeline_fails_on_is_named_and_the_run_saved(small_set, monkeypatch, capsys, kind):
    """OpenCV's errors are of no common kind; here a transform raises one in the second epoch."""
    import albumentations
    mirror, calls = albumentations.HorizontalFlip.__call__, []

    def fail(self, *args, **named):
        calls.append(1)
        if len(calls) > 4 + 10 + 3:                                    # smoke test, epoch 1
            raise kind('not of this kind (a test)')
        return mirror(self, *args, **named)

    monkeypatch.setattr(albumentations.HorizontalFlip, '__call__', fail)
    assert tu.main([f'data={small_set}', 'run_dir=run', *WORDS]) == 2
    told, name = capsys.readouterr().err, kind.__name__
    assert re.search(fr'images/\d+\.png: augment=default fails on it in epoch 2: {name}: .*not of this kind', told)
    assert last()['epoch'] == 1


def test_what_a_worker_could_not_read_is_one_clear_line():
    """torch wraps the traceback of a worker around the message."""
    error = tu.DataError(['/a/b.jpg: cannot be read: OSError: truncated', 'another line'])
    wrapped = torch._utils.ExceptionWrapper((type(error), error, error.__traceback__), 'in DataLoader worker process 0')
    with pytest.raises(tu.DataError) as caught:
        wrapped.reraise()
    assert str(caught.value) == str(error)


# --- bars, screen and log -------------------------------------------------------------


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


def test_a_console_that_is_no_file_shows_bars(monkeypatch):
    """As those of some editors, which call themselves a terminal."""
    console = io.StringIO()
    console.isatty = lambda: True
    monkeypatch.setattr(sys, 'stderr', console)
    assert list(tu.progress(range(3), 3, 'Epoch 1 [train]')) == [0, 1, 2] and 'Epoch 1 [train]' in console.getvalue()


def test_a_clock_that_stands_still_ends_no_training(monkeypatch):
    """That of Windows ticks every 16 ms, and a tiny network takes less for its first steps."""
    console = io.StringIO()
    console.isatty = lambda: True
    monkeypatch.setattr(sys, 'stderr', console)
    monkeypatch.setattr(time, 'monotonic', lambda: 7.0)
    assert train(num_epochs=1).best['loss'] > 0


def test_a_kernel_that_is_only_imported_shows_no_bars(monkeypatch):
    """As whoever starts a notebook from Python has imported it."""
    monkeypatch.setitem(sys.modules, 'ipykernel', sys)
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    assert tu.progress(range(3), 3, 'three').disable


def test_a_service_without_a_screen_trains(monkeypatch):
    monkeypatch.setattr(sys, 'stderr', None)
    monkeypatch.setattr(sys, 'stdout', None)
    assert train(num_epochs=1).best['loss'] > 0


def test_a_screen_of_ones_own_that_can_write_alone_suffices(monkeypatch):
    """As people send what is printed to a log."""
    class Screen:
        lines = []
        write, flush = lines.append, staticmethod(lambda: None)

    monkeypatch.setattr(sys, 'stderr', Screen())
    monkeypatch.setattr(sys, 'stdout', Screen())
    assert train(num_epochs=1).best['loss'] > 0 and 'Best: epoch 1' in ''.join(Screen.lines)


@pytest.mark.parametrize('error', [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
                                   RuntimeError("reentrant call inside <_io.BufferedWriter name='<stderr>'>")])
def test_a_screen_that_is_gone_ends_no_training(monkeypatch, error):
    """A full disk behind stdout, as when slurm.out lies on it; also what the handler of a signal writes, be it while a
    bar is written."""
    class Full(io.TextIOBase):
        def write(self, text):
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(sys, 'stdout', Full())
        patch.setattr(sys, 'stderr', Full())
        result = train_own(loss_fn=stop_at(4))
    assert result.stopped_by == signal.SIGTERM and tu.load_last('run')[0]['step'] == 2


def test_lines_of_the_log_file_are_clean():
    with tu.Run('run'):
        tu.log.warning('left out: \x1b[31mred\n2026-01-01 00:00:00 Best: epoch 9')
    [line] = tu.Path('run/log.txt').read_text().splitlines()
    assert '\x1b' not in line and r'\n2026' in line


def test_a_score_that_was_lost_again_is_told_at_the_end():
    def loss_fn(model, batch):
        is_first = not os.path.exists('run/history.csv')
        return squares(model, batch), torch.tensor([[8, 0], [0, 8]] if is_first else [[8, 8], [7, 1]])

    train_own(loss_fn=loss_fn, num_epochs=2)
    assert 'what was learnt by epoch 1 was lost again (best.pt has it)' in log_text()


def test_equal_scores_keep_the_first_epoch():
    scores = iter([9.0, 3.0, 3.0, 3.0])

    def scripted(model, batch):
        return squares(model, batch) if torch.is_grad_enabled() else torch.full((len(batch['image']),), next(scores))

    assert train(val_data=Samples(4), loss_fn=scripted, num_epochs=3).best['epoch'] == 1


def test_not_every_file_that_was_left_out_is_told_at_the_end(tmp_path, caplog):
    state = SimpleNamespace(left_out={f'{n}.png': 1 for n in range(50)})
    tu.tell_end(state, SimpleNamespace(folder=tmp_path, asked=0), True, False)
    assert caplog.text.count('could not be read') == 10 and 'and 40 more' in caplog.text


@pytest.mark.parametrize('threads, times', [(2, 1), (1, 0)])
def test_cores_that_other_programs_keep_busy_are_told_once(threads, times):
    """Two threads wait for each other there, and make 5 images per second where one makes 30. A rest plays them."""
    def loss_fn(model, batch):
        time.sleep(0.2 * torch.is_grad_enabled())
        return squares(model, batch)

    with in_threads(threads):
        train(None, Samples(24), loss_fn=loss_fn, num_epochs=2)
    assert log_text().count('Begun anew with OMP_NUM_THREADS=1') == times
