"""Checkpoints and resume: the same seed, files that survive, and going on to the bit.

Run: python -m pytest tests/test_checkpoints.py
"""
import builtins
import contextlib
import copy
import errno
import fcntl
import gc
import json
import math
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import stat
import subprocess
import threading
import time
import weakref
import zipfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

import train_unet as tu
from conftest import TINY, as_words, draw_set, start_script
from helpers import OWN, SMALL, Harm, Samples, assert_same, at_training_call, edited, final, in_threads, last, log_text
from helpers import network, noisy_squares, out_of_memory, squares, stop_at, stopping_at, train, train_own

pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """{number of epochs: the folder of a run of SMALL that is done}. Not to be changed."""
    folder = tmp_path_factory.mktemp('trained')
    data = str(draw_set(folder / 'set'))
    return {epochs: tu.train(**SMALL | {'num_epochs': epochs, 'data': data, 'run_dir': str(folder / f'run-{epochs}')}
                             ).run_dir for epochs in (1, 2)}


@pytest.fixture
def run_of_one(trained):
    """run/: one epoch of SMALL."""
    return shutil.copytree(trained[1], 'run')


@pytest.fixture
def run_of_two(trained):
    """run/: two epochs of SMALL."""
    return shutil.copytree(trained[2], 'run')


@pytest.fixture(scope='module')
def toys(tmp_path_factory):
    """{number of epochs: the folder of a run of train_own that is done}. Not to be changed."""
    folder = tmp_path_factory.mktemp('toys')
    with in_threads(1):
        return {epochs: train_own(num_epochs=epochs, run_dir=str(folder / f'run-{epochs}')).run_dir
                for epochs in (1, 3)}


@pytest.fixture
def toy_of_one(toys):
    """run/: one epoch of train_own."""
    return shutil.copytree(toys[1], 'run')


@pytest.fixture
def toy_of_three(toys):
    """run/: three epochs of train_own."""
    return shutil.copytree(toys[3], 'run')


class Start:
    """The real script in a process of its own."""

    def __init__(self, **settings):
        self.process = start_script(settings, 'output.txt')

    def until_saved(self, times, folder='run'):
        """Wait until last.pt has been replaced so often; True if it is still running."""
        seen, path, begun = set(), f'{folder}/last.pt', time.monotonic()
        while len(seen) < times and self.process.is_alive() and time.monotonic() - begun < 120:
            try:
                seen.add(os.stat(path).st_mtime_ns)
            except FileNotFoundError:
                pass
            time.sleep(0.002)
        return self.process.is_alive()

    def end(self, number=None):
        """Send a signal, if one is given, and wait -> exit code."""
        if number is not None:
            os.kill(self.process.pid, number)
        try:
            self.process.join(120)
            return self.process.exitcode
        finally:
            self.process.kill()


THIRTY_STEPS = SMALL | {'num_epochs': 10, 'checkpoint_minutes': 0.0}


def content(step):
    return {'format': 1, 'step': step, 'config': {}, 'weights': {},
            'model': {'ones': torch.full((1000,), float(step))}}


OLD, NEW = content(1), content(2)


@pytest.fixture
def saved(tmp_path):
    """A folder with a checkpoint and the one before it."""
    folder = tmp_path / 'saved'
    tu.save_checkpoint(folder / 'last.pt', content(0))
    tu.save_checkpoint(folder / 'last.pt', OLD)
    return folder


def patch_call(monkeypatch, name, instead):
    """Replace os.fsync, os.replace or the opening of a file for writing; returns nothing."""
    real = builtins.open if name == 'open' else getattr(os, name)

    def call(*args, **kwargs):
        writes = name != 'open' or 'w' in str((*args, kwargs.get('mode', ''))[1:2])
        return instead(real, *args, **kwargs) if writes else real(*args, **kwargs)
    monkeypatch.setattr(builtins if name == 'open' else os, name, call)


def damage(path, kind):
    whole = bytearray(path.read_bytes())
    if kind == 'flipped in a tensor':
        whole[whole.find(torch.ones(100).numpy().tobytes()) + 50] ^= 1
    elif kind == 'flipped at the end':
        whole[-30] ^= 1
    path.write_bytes({'cut': whole[:len(whole) // 2], 'empty': b'', 'text': b'not a checkpoint',
                      'an empty archive': b'PK\x05\x06' + bytes(18)}.get(kind, bytes(whole)))


def patch_last(change):
    """last.pt with something changed in it."""
    saved = torch.load('run/last.pt', weights_only=True)
    change(saved)
    tu.save_checkpoint(tu.Path('run/last.pt'), saved)
    tu.Path('run/previous.pt').unlink()


# --- the same seed gives the same weights ---------------------------------------------


def test_a_seed_decides_every_bit_whatever_the_number_of_workers(small_set):
    runs = [tu.train(**SMALL | dict(run_dir=name, num_workers=workers, seed=seed, augment='strong'))
            for name, workers, seed in (('a', 0, 0), ('b', 2, 0), ('c', 0, 1))]
    assert_same(final('a'), final('b'))
    first = [run.model.state_dict()['network.segmentation_head.0.weight'] for run in runs]
    assert not torch.equal(first[0], first[2])


def test_training_moves_every_weight(small_set, run_of_one, monkeypatch):
    monkeypatch.setattr(tu, 'fit', lambda *_: None)
    tu.train(**SMALL | {'num_epochs': 1, 'run_dir': 'start'})
    start = torch.load('start/last.pt', weights_only=True)
    end = torch.load('run/last.pt', weights_only=True)
    assert start['step'] == 0 and end['step'] == 3
    unmoved = {key for key, value in end['model'].items()
               if torch.equal(value, start['model'][key])}
    assert unmoved == {'mean', 'std'}


# --- signals --------------------------------------------------------------------------


@pytest.fixture
def undisturbed(small_set):
    """The end of a run that nothing happened to."""
    tu.train(**THIRTY_STEPS | {'run_dir': 'undisturbed', 'checkpoint_minutes': 10.0})
    return final('undisturbed')


def test_a_signal_ends_the_run_with_a_checkpoint_and_its_exit_code(forks, undisturbed):
    settings = THIRTY_STEPS
    for number, times in (signal.SIGTERM, 6), (signal.SIGINT, 4):      # the last one that is there counts too
        run = Start(**settings)
        assert run.until_saved(times), open('output.txt').read()[-3000:]
        assert run.end(number) == 128 + number
        assert 0 < tu.load_last('run')[0]['step'] < 30
        settings = {'resume': 'run'}
    output = open('output.txt').read()
    assert output.count('resume=run') == 2 and 'Traceback' not in output
    tu.train(resume='run')
    assert_same(final(), undisturbed)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_each_signal_finishes_the_step_and_saves_at_once(number):
    """SIGUSR1 is what SLURM sends before its time limit. The result so far is returned."""
    loss_fn = stop_at(4, number=number)
    result = train_own(loss_fn=loss_fn)
    assert len(loss_fn.calls) == 4                                     # the step at work and no other
    assert result.stopped_by == number and result.run_dir == tu.Path('run')
    assert tu.load_last('run')[0]['step'] == 2
    assert "Continue with:  train_unet.train(resume='run', ...) and the network" in log_text()     # it is one's own


def test_main_exits_with_128_and_the_number_of_the_signal(small_set, monkeypatch):
    real, calls = tu.SegmentationLoss.__call__, []

    def loss_fn(self, model, batch):
        calls.append(1)
        if len(calls) == 4:                                            # 1 and 2 are the smoke test
            os.kill(os.getpid(), signal.SIGUSR1)
        return real(self, model, batch)

    monkeypatch.setattr(tu.SegmentationLoss, '__call__', loss_fn)
    assert tu.main(as_words(SMALL)) == 128 + signal.SIGUSR1
    assert len(calls) == 4 and tu.load_last('run')[0]['step'] == 2     # the step at work was finished and saved


def test_a_second_signal_leaves_at_once_and_cleans_up(toys):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    loss_fn = stop_at(5, number=signal.SIGINT, times=2)
    with pytest.raises(KeyboardInterrupt):
        train_own(loss_fn=loss_fn)
    assert len(loss_fn.calls) == 5                                     # the step was not finished
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert tu.load_last('run')[0]['step'] == 0                         # of the smoke test
    train_own(resume='run', run_dir='auto')                            # the lock is free again
    assert_same(final(), final(toys[3]))


@pytest.mark.parametrize('first', [signal.SIGTERM, signal.SIGUSR1])
def test_a_sigterm_after_a_signal_does_not_lose_the_step(first):
    """SLURM sends both; make and a shell's trap send one twice."""
    def loss_fn(model, batch):
        if len(inner.calls) == 4 - 1:
            os.kill(os.getpid(), first)
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(model, batch)

    inner = stop_at(None)
    assert train_own(loss_fn=loss_fn).stopped_by == first
    assert tu.load_last('run')[0]['step'] == 2


def test_a_signal_before_there_is_anything_to_save_leaves_at_once(monkeypatch):
    draw_set('set', count=400, size=8)
    real, seen = tu.Image.open, []

    def slow(path, **how):
        seen.append(path)
        if len(seen) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.005)
        return real(path, **how)

    monkeypatch.setattr(tu.Image, 'open', slow)
    words = as_words(SMALL)
    assert tu.main(words) == 143
    assert len(seen) < 1200 and not os.path.exists('run/last.pt')      # of 1,600: eight threads finish what they began


def test_a_signal_to_the_whole_job_reaches_workers_too_and_loses_no_step(toys):
    """SLURM and systemd signal every process of a job; not from within it, which torch tells."""
    def loss_fn(model, batch):
        calls.append(1)
        if len(calls) == 3 + 4 + 1:                                    # the second step of epoch 2
            job = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]
            subprocess.run(['kill', '-TERM', *map(str, job)], check=True)
            time.sleep(0.5)                                            # torch raises in here
        return squares(model, batch)

    calls = []
    result = train_own(loss_fn=loss_fn, num_workers=2)
    assert result.stopped_by == signal.SIGTERM and tu.load_last('run')[0]['step'] == 5
    train_own(resume='run', run_dir='auto')
    assert_same(final(), final(toys[3]))


class Hanging(Samples):
    """From the second epoch on, a sample never comes."""

    def __init__(self, *args):
        super().__init__(*args)
        self.asked = multiprocessing.Value('i', 0)

    def __getitem__(self, index):
        self.asked.value += 1
        if self.asked.value > 30:                                      # two samples of the smoke test, 12 an epoch
            time.sleep(600)
        return super().__getitem__(index)


def wait_for(condition, seconds=60):
    """Until the condition holds."""
    begun = time.monotonic()
    while not condition() and time.monotonic() - begun < seconds:
        time.sleep(0.05)


def test_a_signal_does_not_wait_for_a_worker_that_hangs(hasty):
    data, begun = Hanging(12), time.monotonic()
    ring = threading.Thread(target=lambda: (wait_for(lambda: data.asked.value > 30), time.sleep(1),
                                            os.kill(os.getpid(), signal.SIGTERM)))
    ring.start()
    result = tu.train(model=network(), loss_fn=squares, train_data=data, val_data=Samples(4),
                      **{**OWN, 'num_workers': 1, 'num_epochs': 9})
    ring.join()
    assert result.stopped_by == signal.SIGTERM and time.monotonic() - begun < 60
    assert tu.load_last('run')[0]['step'] >= 3


def test_a_signal_does_not_wait_for_a_worker_that_hangs_in_validation(hasty):
    data, begun = Hanging(12), time.monotonic()
    ring = threading.Thread(target=lambda: (wait_for(lambda: data.asked.value > 30), time.sleep(1),
                                            os.kill(os.getpid(), signal.SIGTERM)))
    ring.start()
    result = tu.train(model=network(), loss_fn=squares, train_data=Samples(12), val_data=data,
                      **{**OWN, 'num_workers': 1, 'num_epochs': 9})
    ring.join()
    assert result.stopped_by == signal.SIGTERM and time.monotonic() - begun < 60
    saved = tu.load_last('run')[0]                                     # 4 + 12 + 12 samples, then it hangs
    assert (saved['epoch'], saved['window']) == (2, 3)


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


def test_a_signal_while_the_pictures_are_drawn_gives_its_exit_code(small_set, monkeypatch):
    real = tu.draw_curves
    monkeypatch.setattr(tu, 'draw_curves', lambda *args: (os.kill(os.getpid(), signal.SIGTERM), real(*args)))
    assert tu.train(**{**SMALL, 'num_epochs': 1}).stopped_by == signal.SIGTERM


def test_a_terminal_that_is_closed_ends_no_training():
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), signal.SIGHUP)
        return squares(model, batch)

    before = signal.signal(signal.SIGHUP, lambda *_: pytest.fail('the signal was not ignored'))
    try:
        assert not train_own(loss_fn=loss_fn).stopped_by
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN   # as it was
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_is_not_pythons_is_left_to_its_owner(monkeypatch):
    """Where a program embeds Python, as R does, its own handler of SIGINT is None here: None cannot be put back."""
    usual, usual_set, calls = signal.getsignal, signal.signal, []
    monkeypatch.setattr(signal, 'getsignal', lambda number: None if number == signal.SIGINT else usual(number))
    monkeypatch.setattr(signal, 'signal', lambda number, handler: (
        calls.append(number) if number == signal.SIGINT else usual_set(number, handler)))
    train_own()
    assert not calls


# --- resuming gives what the undisturbed run gives ------------------------------------


@pytest.fixture(scope='module')
def noisy(tmp_path_factory):
    """{number of workers: the end of a run that draws random numbers, and that nothing happened to}."""
    folder = tmp_path_factory.mktemp('noisy')
    with in_threads(1):
        return {workers: final(train_own(network(dropout=0.5), noisy_squares, num_workers=workers,
                                         run_dir=str(folder / str(workers))).run_dir) for workers in (0, 1)}


# The calls 3, 4, 5 are windows, 6 is validation, 7, 8, 9 are windows again.
@pytest.mark.parametrize('call, step, workers', [(4, 2, 0), (5, 3, 0), (6, 3, 0), (9, 6, 0), (5, 3, 1)])
def test_random_numbers_go_on_where_they_were(call, step, workers, noisy):
    """Without workers Python's are drawn anew for each sample; with one they are nobody else's."""
    result = train_own(network(dropout=0.5), stop_at(call), num_workers=workers)
    assert result.stopped_by == signal.SIGTERM and tu.load_last('run')[0]['step'] == step
    train_own(network(dropout=0.5), noisy_squares, resume='run', run_dir='auto')
    assert_same(final(), noisy[workers])


def test_validation_draws_nothing_that_training_would_miss():
    """Stopped in mid-validation: what it drew from Python and NumPy was drawn in vain."""
    def loss_fn(model, batch):
        return noisy_squares(model, batch) * (1 + random.random() + np.random.rand())

    train_own(loss_fn=loss_fn, run_dir='undisturbed')
    train_own(loss_fn=stop_at(6, loss_fn))
    train_own(loss_fn=loss_fn, resume='run', run_dir='auto')
    assert_same(final(), final('undisturbed'))


class Drawing(Samples):
    """Augmented at random, as people write it."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        noise = torch.rand(1) + random.random() + np.random.rand()
        return {**sample, 'image': sample['image'] + 0.1 * noise}


@pytest.mark.parametrize('workers', [0, 1])
def test_a_random_data_set_of_ones_own_resumes_to_the_bit(workers):
    def run(folder, **changes):
        return tu.train(model=network(), train_data=Drawing(12), val_data=Samples(4),
                        **{**OWN, 'loss_fn': squares, 'num_workers': workers, 'run_dir': folder, **changes})

    run('calm')
    run('run', loss_fn=stop_at(8, squares))
    run('run', resume='run')
    assert_same(final('run')['model'], final('calm')['model'])


class Mixed(Samples):
    """Mixup, drawn while a batch is joined."""

    def collate_fn(self, samples):
        batch = torch.utils.data.default_collate(samples)
        share = torch.rand(()) * random.random() * np.random.rand()
        return batch | {'image': batch['image'] * share + batch['image'].flip(0) * (1 - share)}


def test_what_is_drawn_while_a_batch_is_joined_is_the_same_after_a_resume_and_with_workers():
    def run(name, **changes):
        sets = dict(train_data=Mixed(12), val_data=Mixed(4), ema_decay=None, model=network(dropout=0.5))
        return tu.train(**{**OWN, 'loss_fn': squares, 'run_dir': name, **sets, **changes})

    run('plain')
    run('workers', num_workers=2)
    run('cut', num_workers=2, loss_fn=stop_at(5, squares))
    run('cut', num_workers=2, resume='cut')
    for name in ('workers', 'cut'):
        assert_same(final('plain'), final(name))


class Opening(nn.Module):
    """It looks further the longer it is trained: two scales begin at zero, as those of residual branches do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.near = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.far, self.last = nn.Conv2d(8, 8, 3, padding=8, dilation=8), nn.Conv2d(8, 1, 1)
        self.scales = nn.Parameter(torch.zeros(2, 8, 1, 1))

    def forward(self, images):
        maps = torch.tanh(self.first(images.float() / 64 - 1))
        return self.last(maps + self.scales[0] * self.near(maps + 100 * self.scales[1] * self.far(maps)))


def test_a_resume_scores_tiles_as_the_run_does(tmp_path):
    """How far a network reaches decides the weights of its tiles, and is measured anew."""
    how = dict(data=str(draw_set(tmp_path / 'set', size=150)), size_policy='crop', image_size=64, batch_size=2,
               num_epochs=2, use_amp=False, device='cpu', ema_decay=None, learning_rate=0.03)
    whole = tu.train(model=Opening(), run_dir='whole', **how)
    with pytest.MonkeyPatch.context() as patch:
        close = tu.close_epoch
        patch.setattr(tu, 'close_epoch', lambda *all: (close(*all), os.kill(os.getpid(), signal.SIGTERM)))
        assert tu.train(model=Opening(), run_dir='run', **how).stopped_by == signal.SIGTERM
    resumed = tu.train(model=Opening(), resume='run')
    assert len(resumed.history) == len(whole.history) == 2
    assert_same(final('run'), final('whole'))


@pytest.mark.parametrize('settings', [
    {'use_amp': True, 'amp_dtype': 'float16', 'growth_interval': 2, 'init_scale': 64.0},
    {'use_amp': True, 'amp_dtype': 'bfloat16', 'batch_size': 2, 'accumulation_steps': 2},
    {'optimizer': 'SGD', 'grad_clip': None}, {'ema_decay': 0.9}], ids=str)
def test_whatever_a_step_depends_on_comes_with_a_resume(settings):
    """The scale of float16 and its counter, momentum, a window of two passes."""
    train_own(run_dir='undisturbed', **settings)
    train_own(loss_fn=stop_at(5 * settings.get('accumulation_steps', 1), squares), **settings)
    assert 0 < tu.load_last('run')[0]['step'] < 9
    train_own(resume='run', **settings | {'run_dir': 'auto'})
    assert_same(final(), final('undisturbed'))


def test_checkpoints_hold_the_averaged_weights_that_were_validated():
    train_own(num_epochs=1, ema_decay=0.9)
    saved = tu.load_checkpoint('run/last.pt')
    assert any(not torch.equal(value, saved['model'][name]) for name, value in saved['average'].items())
    for weights in (saved['weights'], tu.load_checkpoint('run/best.pt')['weights']):
        assert_same(weights, saved['average'])


def test_another_memory_layout_at_a_resume_keeps_the_momentum(run_of_one):
    before = torch.load('run/last.pt', weights_only=True)['optimizer']['state']
    calls = []

    def stop(optimizer, *_):
        calls.append([{k: v.clone() for k, v in kept.items()} for kept in optimizer.state.values()])

    hook = register_optimizer_step_pre_hook(stop)
    tu.train(resume='run', num_epochs=2, channels_last=False)
    hook.remove()
    momentum = [kept['exp_avg'] for kept in calls[-3]]                 # of the first real step
    assert sum(m.is_contiguous() for m in momentum) == len(momentum) and len(before) == len(momentum)
    assert all(m.any() and torch.equal(m, before[number]['exp_avg']) for number, m in enumerate(momentum))


def test_what_healing_arrived_at_comes_with_a_resume():
    train_own(num_epochs=1, use_amp=True, amp_dtype='float16')
    path = tu.Path('run/last.pt')
    saved = tu.load_checkpoint(path)
    healed = {'dtype': 'float32', 'batch_size': 2, 'config': saved['config'] | tu.amp_settings('float32')}
    tu.save_checkpoint(path, saved | healed)
    result = tu.train(model=network(), loss_fn=squares, train_data=Samples(12), val_data=Samples(4),
                      resume='run', num_epochs=2)
    assert [row['precision'] for row in result.history] == ['float16', 'float32']
    assert [row['batch_size'] for row in result.history] == [4, 2]
    told = (result.run_dir / 'log.txt').read_text().partition('Continuing')[2]
    assert 'use_amp' not in told and 'step 3, with 2 images at once' in told


def test_a_resumed_training_does_not_keep_the_tensors_of_its_checkpoint(monkeypatch):
    """They took the memory of the weights four times over, once per process, to the end."""
    train_own(num_epochs=1, ema_decay=0.9)
    load_last, fit, seen, alive = tu.load_last, tu.fit, [], []

    def load(folder):
        saved, path = load_last(folder)
        large = [saved[key] for key in ('model', 'average', 'weights')]        # the optimizer takes its own
        seen.extend(weakref.ref(value) for value in pytree.tree_leaves(large) if torch.is_tensor(value))
        return saved, path

    def look(*args):
        gc.collect()
        alive.extend(reference for reference in seen if reference() is not None)
        return fit(*args)

    monkeypatch.setattr(tu, 'load_last', load)
    monkeypatch.setattr(tu, 'fit', look)
    train_own(num_epochs=2, ema_decay=0.9, resume='run', run_dir='auto')
    assert seen and not alive


def test_a_config_py_that_is_written_again_leaves_to_the_machine_what_was():
    def loss_fn(model, batch):
        if os.path.exists('run/best.pt'):
            Path('run/config.py').unlink(missing_ok=True)
        return squares(model, batch)

    train_own(loss_fn=loss_fn, num_epochs=2, num_workers='auto')
    assert tu.load_preset('run/config.py')['num_workers'] == 'auto'


def test_early_stopping_counts_on_over_a_resume():
    """Validation is best in the first epoch; patience is 3; the run is cut in the third."""
    def worse(model, batch):
        return squares(model, batch) * 0 + (1 if torch.is_grad_enabled() else next(levels))

    for cut in (None, 3 + 2 * 4 + 1):
        levels = iter(range(99))
        loss_fn = stop_at(cut, worse) if cut else worse
        train_own(loss_fn=loss_fn, num_epochs=8, early_stopping_patience=3,
                  run_dir='run' if cut else 'undisturbed')
    assert len(final()['history']) == 2
    train_own(loss_fn=worse, resume='run', run_dir='auto', num_epochs=8)
    assert [row['epoch'] for row in final()['history']] == [1, 2, 3, 4]
    assert [row['epoch'] for row in final('undisturbed')['history']] == [1, 2, 3, 4]


def test_a_resumed_run_uses_the_threads_it_was_begun_with_says_so_and_gives_them_back(caplog):
    train_own()
    torch.set_num_threads(2)
    seen = set()
    train_own(resume='run', run_dir='auto', num_epochs=4,
              loss_fn=lambda model, batch: seen.add(torch.get_num_threads()) or squares(model, batch))
    assert seen == {1} and torch.get_num_threads() == 2
    assert 'The run goes on with its 1 thread, for the same results' in caplog.text


def test_random_states_of_more_gpus_than_there_are_are_put_back_on_those(monkeypatch):
    states, put = tu.random_states(), {}
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'set_rng_state', lambda state, device: put.update({device: state}))
    for count in (1, 3):
        tu.set_random_states(states | {'cuda': [f'of GPU {number}' for number in range(count)]})
        assert put == {number: f'of GPU {number}' for number in range(min(count, 2))}


@pytest.mark.parametrize('began_on, told', [('cpu', 'The run used 3 threads'), ('cuda', '')])
def test_threads_beyond_the_cores_of_this_process_are_not_set(toy_of_one, monkeypatch, began_on, told):
    """A machine may have them, but a container, or torchrun's other processes, leave this one two."""
    patch_last(lambda saved: saved.update(threads=3))
    patch_last(lambda saved: saved['random'].update(cuda=[]) if began_on == 'cuda' else None)
    monkeypatch.setattr(os, 'cpu_count', lambda: 64)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: {0, 1}, raising=False)
    seen = set()
    train_own(resume='run', run_dir='auto', num_epochs=2,
              loss_fn=lambda model, batch: seen.add(torch.get_num_threads()) or squares(model, batch))
    assert 3 not in seen and told in log_text() and ('The run used' in log_text()) == bool(told)


def test_a_resumed_run_keeps_its_tuned_threshold(own, two):
    tu.store_threshold(own, 0.7, tu.load(own))
    assert tu.train(resume=str(own)).model.threshold == 0.7


def test_a_finished_run_without_best_pt_is_not_sent_to_evaluate(own, caplog):
    tu.train(resume=str(own))
    assert 'Next:' in caplog.text
    caplog.clear()
    (own / 'best.pt').unlink()
    tu.train(resume=str(own))
    assert 'Everything is in' in caplog.text and 'Next:' not in caplog.text


def test_a_resume_without_best_pt_keeps_the_best_from_there_on(run_of_two, caplog):
    os.remove('run/best.pt')
    result = tu.train(resume='run', num_epochs=3)
    assert 'best.pt is gone' in caplog.text
    assert os.path.exists('run/best.pt') and result.best['epoch'] == 3


def test_a_resumed_run_ends_well_though_its_best_file_is_damaged(run_of_two):
    damage(tu.Path('run/best.pt'), 'cut')
    result = tu.train(resume='run')  # nothing better comes: it was done
    assert [row['epoch'] for row in result.history] == [1, 2]
    told = (result.run_dir / 'log.txt').read_text()
    assert 'best.pt is damaged' in told and 'Next:' not in told.rpartition('best.pt is damaged')[2]


# --- settings at a resume -------------------------------------------------------------


def test_a_free_setting_may_change_without_a_word(toys):
    train_own(loss_fn=stop_at(4, squares))
    result = train_own(resume='run', run_dir='auto', num_workers=2, checkpoint_minutes=0.0)
    assert 'change the result' not in (result.run_dir / 'log.txt').read_text()
    assert_same(final(), final(toys[3]))


def test_a_setting_that_defines_the_run_cannot_change_on_resume(run_of_two):
    for change in ({'encoder': 'resnet18'}, {'seed': 1}, {'optimizer': 'SGD'}, {'val_fraction': 0.5},
                   {'architecture': 'FPN'}, {'in_channels': 1}, {'num_classes': 3}, {'mean': 9.0},
                   {'decoder_channels': [8] * 5}, {'ema_decay': None}, {'group_pattern': '.'}):
        with pytest.raises(tu.ConfigError, match=f'{[*change][0]}=.*cannot change on resume'):
            tu.train(resume='run', **change)
    with pytest.raises(tu.ConfigError, match='initial_weights=run begins with its weights'):
        tu.train(resume='run', num_classes=3)                          # what somebody wants who found one class more
    with pytest.raises(tu.ConfigError, match='initial_weights=run begins with its weights'):
        tu.train(resume='run', mask_values={255: 1})
    with pytest.raises(tu.ConfigError) as caught:
        tu.train(resume='run', seed=5)
    assert 'initial_weights' not in str(caught.value)
    assert len(final()['history']) == 2


def test_a_run_can_be_made_longer(run_of_two):
    result = tu.train(resume='run', num_epochs=4)
    assert [row['epoch'] for row in result.history] == [1, 2, 3, 4]
    log = (result.run_dir / 'log.txt').read_text()
    assert 'num_epochs: 2 -> 4 may change the result of the run' in log


def test_fewer_epochs_than_are_done_are_refused_at_a_resume(run_of_two):
    with pytest.raises(tu.UserError, match='num_epochs=1: 2 are done already'):
        tu.train(resume='run', num_epochs=1)
    assert tu.train(resume='run', num_epochs=2).history                # the same line once more is fine


def test_a_preset_is_not_dropped_on_resume(run_of_two):
    with open('longer.py', 'w') as file:
        file.write("config = {'num_epochs': 3}\n")
    assert len(tu.train('longer.py', resume='run').history) == 3


@pytest.mark.parametrize('change', [{'weight_decay': 0.5}, {'momentum': 0.5}])
def test_what_is_changed_on_resume_is_at_work(change):
    first = dict(optimizer='SGD', ema_decay=None)
    train_own(num_epochs=1, **first)
    shutil.copytree('run', 'copy')
    train_own(resume='run', run_dir='auto', num_epochs=2)
    train_own(resume='copy', run_dir='auto', num_epochs=2, **change)
    [(key, value)] = change.items()
    assert final('copy')['optimizer']['param_groups'][0][key] == value
    assert not torch.equal(final()['model']['0.weight'], final('copy')['model']['0.weight'])


def test_what_does_nothing_at_a_resume_is_not_said_to_change_the_result(run_of_one):
    ask = lambda **typed: tu.resume_config(tu.Path('run'), None, typed)[2]
    assert ask(encoder_weights='imagenet') == ['encoder_weights: no effect, the run has weights']
    assert ask(mask_pattern='{stem}.png', image_pattern='{stem}.png') == []
    assert ask(weight_decay=0.1) == ['weight_decay: 0.01 -> 0.1 may change the result of the run']


def test_a_run_that_goes_on_for_longer_has_no_small_images_once_more(run_of_two):
    """A finished run went back to images of half the size."""
    patch_last(lambda saved: saved['config'].update(progressive_resizing=0.5))
    ask = lambda **typed: tu.resume_config(tu.Path('run'), None, typed)[0]['progressive_resizing']
    assert ask(num_epochs=8) == 0.125 and ask() == ask(num_workers=0) == 0.5
    assert ask(num_epochs=8, progressive_resizing=0.75) == 0.75 and ask(num_epochs=8, progressive_resizing=0.5) == 0.5
    assert ask(num_epochs=2) == 0.5
    patch_last(lambda saved: saved['config'].update(num_epochs=8))
    assert ask(num_epochs=4) == 0.5                                    # fewer than it was to have
    patch_last(lambda saved: [saved['config'].update(num_epochs=2), saved['config'].pop('progressive_resizing')])
    assert ask(num_epochs=8) == 'auto'                                 # of an earlier version
    patch_last(lambda saved: saved['config'].update(progressive_resizing=0.5))
    sides, small = [], tu.at_half_size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tu, 'at_half_size', lambda batch, device: sides.append(1) or small(batch, device))
        tu.train(resume='run', num_epochs=6)
    assert not sides


def test_words_at_a_resume_that_mean_what_the_run_has(run_of_one):
    """The optimizer was another one, and amp_dtype, which nobody typed, without effect."""
    patch_last(lambda saved: [saved['config'].update(optimizer='SGD'), saved['asked'].update(
        use_amp=True, amp_dtype='bfloat16')])
    config, _, notes = tu.resume_config(tu.Path('run'), None, {'optimizer': 'sgd', 'use_amp': False})
    assert config['optimizer'] == 'SGD' and len(notes) == 1 and notes[0].startswith('use_amp: True -> False')
    wish = tu.resolve_precision(config, tu.detect_hardware(torch.device('cpu')))
    assert wish.dtype == 'float32' and not [note for note in wish.warnings if 'amp_dtype' in note]


def test_class_weights_typed_at_a_resume_are_taken(run_of_one):
    config, _, notes = tu.resume_config(tu.Path('run'), None, {'class_weights': 'auto', 'early_stopping_patience': 3})
    assert config['class_weights'] == 'auto' and len(notes) == 2
    assert all('change the result' in note for note in notes)


def test_the_loss_of_older_runs_on_data_of_ones_own_is_no_change(run_of_one):
    """'auto', which nothing settled there."""
    with edited('run/last.pt') as saved:
        saved['config']['loss'] = 'auto'
    for typed in {}, {'loss': 'auto'}:
        config, sources, notes = tu.resume_config(tu.Path('run'), None, typed)
        assert (config['loss'], sources['loss'], notes) == ('ce+dice', 'default', [])


def test_the_effective_batch_stays_what_it_was(toy_of_one):
    for size, told in ((8, 'stay 4 on resume'), (3, 'stay 4 on resume'),
                       (2, 'stay 4 on resume; with batch_size=2 type accumulation_steps=2')):
        with pytest.raises(tu.ConfigError) as error:
            train_own(resume='run', run_dir='auto', batch_size=size)
        assert error.value.problems[0].endswith(told)
    train_own(resume='run', run_dir='auto', batch_size=2, accumulation_steps=2)


def test_typing_the_device_that_is_taken_anyway_changes_nothing(run_of_one):
    patch_last(lambda saved: saved['config'].update(device='auto'))
    path = tu.Path('run/config.py')
    path.write_text(path.read_text().replace("'device': 'cpu'", "'device': 'auto'"))
    config, sources, notes = tu.resume_config(tu.Path('run'), None, {'device': 'cpu'})
    assert config['device'] == 'cpu' and sources['device'] == 'you' and notes == []


def test_the_device_of_a_run_can_be_left_to_the_machine(own):
    settings = own / 'config.py'
    settings.write_text(settings.read_text().replace("'device': 'cpu'", "'device': 'cuda:1'"))
    assert tu.resume_config(own, None, {'device': 'auto'})[0]['device'] == 'auto'


@pytest.mark.parametrize('words', [{'mean': 127.5, 'std': 58}, {'num_classes': 'auto', 'ema_decay': 'auto'}], ids=str)
def test_the_same_line_once_more_goes_on(small_set, words):
    settings = {**SMALL, **words, 'resume': 'auto'}
    tu.train(**{**settings, 'num_epochs': 1})
    assert len([row for row in tu.train(**{**settings, 'num_epochs': 2}).history if not row['event']]) == 2


def test_the_same_line_once_more_keeps_what_healing_arrived_at():
    """batch_size=4 typed for the start and again for the resume, as in a job that SLURM starts again."""
    def loss_fn(model, batch):
        if len(batch['image']) > 2 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError('CUDA out of memory')
        return squares(model, batch)

    train_own(loss_fn=loss_fn, num_epochs=1)
    result = train_own(loss_fn=squares, num_epochs=2, resume='auto')
    assert [row['batch_size'] for row in result.history if not row['event']] == [2, 2]


def test_another_run_dir_at_a_resume_is_refused(run_of_one):
    with pytest.raises(tu.UserError, match="run_dir='other': a resumed run stays where it is"):
        tu.train(resume='run', run_dir='other')


def test_a_first_loss_scale_typed_at_a_resume_is_refused(toy_of_one):
    """The scale of the checkpoint was taken, with a note that the typed one may change the result."""
    with pytest.raises(tu.ConfigError, match='init_scale=1024.0: cannot change on resume'):
        train_own(resume='run', run_dir='auto', num_epochs=2, init_scale=1024.0)


def test_a_refused_resume_leaves_the_settings_of_the_run_alone(small_set, toy_of_one):
    before = tu.Path('run/config.py').read_text()
    with pytest.raises(tu.UserError, match='does not belong'):
        tu.train(resume='run', data='set', num_epochs=3, device='cpu')  # without the network it was given
    assert tu.Path('run/config.py').read_text() == before


def test_a_finished_run_keeps_the_settings_it_was_trained_with_and_says_what_goes_on(caplog, toy_of_one):
    before, rate = tu.Path('run/config.py').read_text(), last()['config']['learning_rate']
    train_own(resume='run', run_dir='auto', num_epochs=1, learning_rate=0.5)
    assert tu.Path('run/config.py').read_text() == before
    assert last()['config']['learning_rate'] == rate != 0.5
    assert 'num_epochs=2 or more goes on' in caplog.text and 'Continuing' not in caplog.text


@pytest.mark.parametrize('error', [KeyboardInterrupt, tu.OneTooLarge('')])
def test_a_resume_that_ends_before_a_step_leaves_the_settings_of_the_run_alone(toy_of_one, caplog, error):
    """The next one went on at the rate that this one had typed, without a word."""
    def ends(model, batch):
        raise error

    before, rate = tu.Path('run/config.py').read_text(), last()['config']['learning_rate']
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        train_own(resume='run', run_dir='auto', num_epochs=2, learning_rate=0.5, loss_fn=ends)
    assert tu.Path('run/config.py').read_text() == before and last()['config']['learning_rate'] == rate
    train_own(resume='run', run_dir='auto', num_epochs=2, learning_rate=0.5, loss_fn=squares)
    assert last()['config']['learning_rate'] == 0.5 and "'learning_rate': 0.5" in tu.Path('run/config.py').read_text()


def test_a_resume_that_ends_before_a_step_leaves_precision_and_loss_alone(small_set):
    """The next one went on "at which healing had arrived", or was refused for a loss that had made no step."""
    def ends(model, batch):
        raise KeyboardInterrupt

    tu.train(**SMALL | {'num_epochs': 1, 'use_amp': False})
    with pytest.raises(KeyboardInterrupt):
        tu.train(resume='run', num_epochs=2, use_amp=True, amp_dtype='bfloat16', batch_size=2, accumulation_steps=2,
                 loss_fn=ends)
    saved = last()
    assert (saved['dtype'], saved['batch_size'], saved['own_loss'], saved['asked']['use_amp']) == \
        ('float32', SMALL['batch_size'], False, False)
    assert tu.train(resume='run', num_epochs=2).history[-1]['precision'] == 'float32'
    assert 'healing had arrived' not in log_text()


def test_a_resume_that_healed_in_its_trial_alone_leaves_the_settings_of_the_run_alone():
    class Stopping(Samples):
        def __getitem__(self, index):
            if 'out of memory: batch_size' in log_text():              # after the trial
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__getitem__(index)

    train(num_epochs=1)
    model = network()
    out_of_memory(model[0], lambda module, count, calls: module.training and count > 2)
    stopped = train(model, Stopping(), num_epochs=2, learning_rate=0.5, resume='run', run_dir='auto')
    assert stopped.stopped_by == signal.SIGTERM and stopped.is_saved
    assert last()['config']['learning_rate'] == 0.01


def test_a_resume_that_fails_before_the_first_best_epoch_keeps_the_checkpoints():
    def ends(model, batch):
        raise KeyboardInterrupt

    stopped = train(stopping_at(network(), 1 + 1), num_epochs=2)       # in epoch 1
    assert stopped.stopped_by and not os.path.exists('run/best.pt')
    with pytest.raises(KeyboardInterrupt):
        train(resume='run', run_dir='auto', num_epochs=2, loss_fn=ends)
    assert len(train(resume='run', run_dir='auto', num_epochs=2).history) == 2


def test_a_start_that_fails_beside_a_best_pt_of_before_removes_nothing(tmp_path):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run/best.pt').write_bytes(b'of before')
    with pytest.raises(tu.UserError, match='best.pt: would be overwritten'):
        train_own(loss_fn=lambda model, batch: 1 / 0)
    assert (tmp_path / 'run/best.pt').read_bytes() == b'of before'


def test_a_best_pt_that_is_left_alone_is_not_written_over(run_of_two):
    """Where space is short last.pt, which nobody needs any more, is deleted, and the line typed once more."""
    before, data = Path('run/best.pt').read_bytes(), tu.load_preset('run/config.py')['data']
    for name in ('last.pt', 'previous.pt'):
        Path('run', name).unlink(missing_ok=True)
    for words in {}, {'resume': 'auto'}:
        with pytest.raises(tu.UserError, match='best.pt: would be overwritten'):
            tu.train(**SMALL | {'data': data} | words)
    assert Path('run/best.pt').read_bytes() == before


def test_a_list_of_the_users_is_not_written_over(small_set):
    pairs = '\n'.join(f'set/images/{n:03d}.png,set/masks/{n:03d}.png' for n in range(8))
    Path('split.csv').write_text(f'image,mask\n{pairs}\n')
    with pytest.raises(tu.UserError, match='split.csv: would be overwritten'):
        tu.train(**SMALL | {'num_epochs': 1, 'data': 'split.csv', 'run_dir': '.'})
    assert Path('split.csv').read_text().count('\n') == 9


def test_the_same_augmentation_file_typed_once_more_is_no_change(small_set, caplog):
    Path('flip.json').write_text(json.dumps(tu.A.to_dict(tu.A.HorizontalFlip())))
    for epochs in (1, 2):
        tu.train(**SMALL | {'num_epochs': epochs, 'augment': 'flip.json', 'resume': 'auto', 'data': str(small_set)})
    assert last()['epoch'] == 2 and 'augment: ' not in caplog.text


def test_a_resume_that_meets_the_broken_file_again_leaves_the_settings_of_the_run_alone():
    """Not in the window that is tried before the training, which is the first of the first epoch."""
    class Breaking(Samples):
        def __getitem__(self, index):
            if index == broken and os.path.exists('run/history.csv'):  # from the second epoch on
                raise ValueError('cut off')
            return super().__getitem__(index)

    sampler = tu.WindowSampler(8, tu.CONFIG | OWN)
    tried, sampler.epoch = {*sampler.windows()[0].tolist()}, 1
    broken = next(index for index in sampler.windows()[0].tolist() if index not in tried)
    for words in {}, {'resume': 'run', 'run_dir': 'auto', 'learning_rate': 0.5}:
        with pytest.raises(tu.DataError, match=f'sample {broken}: cut off'):
            train(train_data=Breaking(), num_epochs=2, **words)
        assert last()['config']['learning_rate'] == OWN['learning_rate'] and last()['epoch'] == 1


def test_a_last_checkpoint_that_is_deleted_at_the_end_is_written_again(monkeypatch):
    real = tu.Run.write

    def write(run, name, content):
        done = real(run, name, content)
        if name == 'history.csv' and len(content.splitlines()) == 3 and os.path.exists('run/last.pt'):
            os.unlink('run/last.pt')
        return done

    monkeypatch.setattr(tu.Run, 'write', write)
    assert train_own(num_epochs=2).is_saved and last()['epoch'] == 2


def test_a_start_that_fails_in_a_folder_that_was_there_can_be_tried_again():
    os.mkdir('run')
    tu.Path('run/mine.txt').write_text('kept')
    with pytest.raises(ZeroDivisionError):
        train_own(loss_fn=lambda model, batch: 1 / 0)
    assert not [*tu.Path('run').glob('*.pt')] and os.path.exists('run/mine.txt')
    assert len(train_own(num_epochs=1).history) == 1


def test_settings_of_the_machine_are_found_anew_at_a_resume(run_of_one):
    """Images that fitted into one machine's memory may not fit into the next one's."""
    assert last()['config']['cache_images'] is True and last()['config']['num_workers'] == 0
    config = tu.resume_config(tu.Path('run'), None, {'num_epochs': 2})[0]
    assert config['cache_images'] == 'auto' and config['num_workers'] == SMALL.get('num_workers', 'auto')
    assert tu.load_preset('run/config.py')['cache_images'] == 'auto'   # nor into that of another set
    assert tu.resume_config(tu.Path('run'), None, {'cache_images': False})[0]['cache_images'] is False


def test_a_torn_config_is_replaced_by_that_of_the_checkpoint():
    train_own(num_epochs=2)
    text = tu.Path('run/config.py').read_text()
    tu.Path('run/config.py').write_text(text[:len(text) // 2])
    assert train_own(resume='run', run_dir='auto', num_epochs=3).history[-1]['epoch'] == 3
    assert tu.load_preset('run/config.py')['num_epochs'] == 3          # whole again


def test_a_checkpoint_with_a_key_that_is_no_more_goes_on(run_of_one):
    patch_last(lambda saved: saved['config'].update(of_an_older_version=1))
    assert tu.resume_config(tu.Path('run'), None, {'num_epochs': 2})[0]['num_epochs'] == 2


def test_a_run_of_a_time_when_each_image_came_once_goes_on_so(run_of_one):
    patch_last(lambda saved: saved['config'].pop('oversample_foreground'))
    assert tu.resume_config(tu.Path('run'), None, {'num_epochs': 2})[0]['oversample_foreground'] == 0
    patch_last(lambda saved: saved['config'].pop('mirror'))
    assert tu.resume_config(tu.Path('run'), None, {'num_epochs': 2})[0]['mirror'] is True


# --- data and network at a resume -----------------------------------------------------


def test_other_images_than_the_run_began_with_are_told(small_set, caplog):
    tu.train(**{**SMALL, 'num_epochs': 1})
    tu.train(resume='run', num_epochs=2)
    assert 'not those this run began with' not in caplog.text
    for kind in ('images', 'masks'):
        shutil.copy(f'set/{kind}/003.png', f'set/{kind}/903.png')
    tu.train(resume='run', num_epochs=3)
    assert 'not those this run began with' in caplog.text


def test_other_pixels_in_files_of_the_same_size_are_told(small_set, caplog, capsys):
    for path in tu.Path('set/images').glob('*.png'):                   # as uncompressed TIFF, NumPy and PPM files are
        tu.Image.open(path).convert('RGB').save(path.with_suffix('.bmp'))
        path.unlink()
    tu.train(**{**SMALL, 'num_epochs': 1})
    shutil.copytree('set', 'other')
    for path in tu.Path('other/images').glob('*.bmp'):
        tu.ImageOps.invert(tu.Image.open(path)).save(path)
    assert tu.main(['evaluate', 'run', 'data=set']) == 0
    assert 'These are the images of this run' in capsys.readouterr().out
    assert tu.main(['evaluate', 'run', 'data=other']) == 0
    assert 'These are the images of this run' not in capsys.readouterr().out
    shutil.rmtree('set')
    shutil.copytree('other', 'set')
    tu.train(resume='run', num_epochs=2)
    assert 'not those this run began with' in caplog.text


def test_corrected_masks_and_an_edited_augmentation_file_are_told(small_set, caplog):
    write = lambda chance: tu.Path('flip.json').write_text(json.dumps(tu.A.to_dict(tu.A.HorizontalFlip(p=chance))))
    write(0.5)
    tu.train(**{**SMALL, 'num_epochs': 1, 'augment': 'flip.json'})
    tu.train(resume='run', num_epochs=2)
    assert 'not those this run began with' not in caplog.text
    write(1.0)
    tu.train(resume='run', num_epochs=3)
    assert 'not those this run began with' in caplog.text
    caplog.clear()
    mask = np.array(tu.Image.open('set/masks/003.png'))
    mask[:9] = mask.max() - mask[:9]
    tu.Image.fromarray(mask).save('set/masks/003.png')
    tu.train(resume='run', num_epochs=4)
    assert 'not those this run began with' in caplog.text


def test_a_resume_of_moved_data_wants_its_place(own, two, tmp_path, capsys):
    assert tu.main([f'resume={own}', 'num_epochs=7', f'data={tmp_path / "gone"}']) == 2
    assert 'there is no such folder' in capsys.readouterr().err
    assert tu.main([f'resume={own}', 'num_epochs=7', f'data={two[1]}']) == 0


def test_a_run_whose_data_have_moved_is_told_what_to_type(run_of_one):
    shutil.copytree(tu.load_preset('run/config.py')['data'], 'set')
    tu.train(resume='run', data='set', num_epochs=2)
    os.rename('set', 'elsewhere')
    with pytest.raises(tu.UserError, match='set: is not there; if it has moved type data=NEW_PLACE too'):
        tu.train(resume='run', num_epochs=3)
    assert len(tu.train(resume='run', num_epochs=3, data='elsewhere').history) == 3


def test_the_home_of_moved_data_may_be_typed_as_usual(own, two, monkeypatch):
    monkeypatch.setenv('HOME', str(two[1].parent))
    config, _, notes = tu.resume_config(own, None, {'data': f'~/{two[1].name}'})
    assert config['data'] == str(two[1]) and not notes


def test_weights_of_another_network_are_refused_with_the_way_to_give_it(run_of_one):
    tu.save_checkpoint(tu.Path('run/last.pt'), tu.load_checkpoint('run/last.pt') | {'model': {'x': torch.ones(1)}})
    with pytest.raises(tu.UserError, match='one with a network of your own is resumed from Python'):
        tu.train(resume='run', num_epochs=2)


def test_another_network_of_ones_own_is_refused_with_what_to_give(toy_of_three):
    with pytest.raises(tu.UserError, match='does not belong to this run.*\n.*give the network that it began with'):
        train_own(model=torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1)), resume='run', num_epochs=9)


def test_a_run_whose_data_moved_is_not_told_that_its_result_changes(run_of_one, caplog):
    """What the images hold is compared; their path changes nothing."""
    data = tu.load_preset('run/config.py')['data']
    shutil.copytree(data, 'moved')
    tu.train(resume='run', data='moved', num_epochs=2)
    assert 'change the result' not in caplog.text.replace('num_epochs: 1 -> 2 may change the result', '')
    for path in tu.Path('moved').glob('images/*'):
        PIL.Image.fromarray(255 - np.asarray(PIL.Image.open(path))).save(path)
    tu.train(resume='run', num_epochs=3)
    assert 'images' in caplog.text and 'not those' in caplog.text, caplog.text


def test_a_best_pt_that_stays_the_best_is_evaluated_where_the_data_are_by_now(run_of_one, monkeypatch):
    """No epoch was better after data=NEW_PLACE: evaluate, which reads best.pt, looked in the old place."""
    shutil.copytree(tu.load_preset('run/config.py')['data'], 'moved')
    monkeypatch.setattr(tu, 'score_of', lambda metrics: -1.0)
    tu.train(resume='run', data='moved', class_names=['ground', 'disc'], num_epochs=2)
    assert tu.load_checkpoint(Path('run/best.pt'))['epoch'] == 1
    found = tu.evaluate('run')
    assert found['data'] == os.path.abspath('moved') and found['classes'] == ['ground', 'disc']


def test_a_resume_leaves_the_lines_of_its_split_that_were_edited(run_of_one):
    """As README offers: another run is trained on that list. Where the data have moved it is written anew."""
    edited = Path('run/split.csv').read_text().replace(',val', ',test')
    Path('run/split.csv').write_text(edited)
    tu.train(resume='run', num_epochs=2)
    assert Path('run/split.csv').read_text() == edited
    shutil.copytree(tu.load_preset('run/config.py')['data'], 'moved')
    tu.train(resume='run', data='moved', num_epochs=3)
    assert f'{os.path.abspath("moved")}{os.sep}' in Path('run/split.csv').read_text()
    for kind in ('images', 'masks'):                                   # nor where there are fewer by now
        os.remove(f'moved/{kind}/000.png')
    tu.train(resume='run', num_epochs=4)
    assert '000.png' not in Path('run/split.csv').read_text()
    os.remove('run/split.csv')
    tu.train(resume='run', num_epochs=5)
    assert 'moved' in Path('run/split.csv').read_text()


def test_renamed_folders_that_are_typed_at_a_resume_are_in_its_split(small_set):
    """The names of the images are the same: what split.csv named was gone."""
    tu.train(**TINY | {'num_epochs': 1}, data=str(small_set), run_dir='run')
    for old, new in {'images': 'pics', 'masks': 'drawn'}.items():
        (small_set / old).rename(small_set / new)
    tu.train(resume='run', images='pics', masks='drawn', num_epochs=2)
    assert tu.train(**TINY | {'num_epochs': 1}, data='run/split.csv').is_saved


def test_a_resume_with_as_many_epochs_as_are_done_trains_none(run_of_one):
    with edited('run/last.pt') as saved:
        saved['config']['num_epochs'] = 5
    assert len(tu.train(resume='run', num_epochs=1).history) == 1


def test_a_number_of_epochs_done_that_is_none_is_told(run_of_one):
    with edited('run/last.pt') as saved:
        saved['epoch'] = 'three'
    with pytest.raises(tu.UserError, match="does not belong to this run: TypeError: epoch='three'"):
        tu.train(resume='run', num_epochs=2)


def test_broken_files_that_a_resume_leaves_out_are_left_out_by_evaluate(small_set, monkeypatch):
    tu.train(**TINY | {'num_epochs': 1}, data=str(small_set), run_dir='run')
    first = tu.evaluate('run')['images'][0]['file']
    monkeypatch.setattr(tu, 'score_of', lambda metrics: -1.0)
    Path(first).write_bytes(b'none')
    tu.train(resume='run', skip_broken=True, num_epochs=2)
    assert first not in [row['file'] for row in tu.evaluate('run')['images']]


# --- which run is resumed -------------------------------------------------------------


def test_auto_starts_continues_and_does_not_continue_what_is_done(toys):
    auto = {'resume': 'auto', 'run_dir': 'run'}
    train_own(loss_fn=stop_at(4, squares), **auto)
    assert tu.load_last('run')[0]['step'] == 2
    train_own(**auto)
    assert_same(final(), final(toys[3]))
    again = train_own(**auto)                                          # SLURM starts a finished job anew: it is done
    assert_same(final(), final(toys[3]))
    assert [row['epoch'] for row in again.history] == [row['epoch'] for row in final()['history']]


def test_a_run_that_stopped_early_is_done_for_resume_auto(small_set):
    settings = {**SMALL, 'run_dir': 'auto', 'num_epochs': 30, 'early_stopping_patience': 1, 'learning_rate': 1e-9}
    result = tu.train(**settings)
    assert len(result.history) < 30
    assert tu.find_resume({**tu.CONFIG, **settings, 'resume': 'auto'}, False) is None
    tu.train(resume=result)                                            # what to type is told, not where it continues
    told = (result.run_dir / 'log.txt').read_text().rpartition('Network:')[2]
    assert 'has ended: a larger early_stopping_patience, or None, goes on' in told and 'Continuing' not in told
    tu.train(resume=result, num_epochs=len(result.history))            # both of them hold
    told = (result.run_dir / 'log.txt').read_text().rpartition('Network:')[2]
    assert f'has ended: num_epochs={len(result.history) + 1} or more and a larger early_stopping_patience' in told


def test_resume_auto_finds_a_run_that_died_between_two_renames(run_of_two):
    os.replace('run/last.pt', 'run/previous.pt')
    path = tu.Path('run/config.py')                                    # as if it had not been done
    path.write_text(path.read_text().replace("'num_epochs': 2", "'num_epochs': 4"))
    assert tu.find_resume({**tu.CONFIG, 'resume': 'auto', 'run_dir': 'run'}, False) == tu.Path('run')


def test_epochs_that_only_config_names_do_not_reopen_a_finished_run(run_of_one, monkeypatch):
    """A run goes on with its own settings: with more epochs in CONFIG each start found it finished."""
    shutil.copytree('run', 'runs/set-1')
    words = {**tu.CONFIG, 'data': tu.load_preset('run/config.py')['data'], 'num_epochs': 9, 'resume': 'auto'}
    assert tu.find_resume(words, False) is None and tu.find_resume(words, True) == tu.Path('runs/set-1')
    monkeypatch.setitem(tu.CONFIG, 'num_epochs', 2)
    fresh_run = SMALL | {'data': words['data'], 'run_dir': 'auto', 'resume': 'auto'}
    fresh_run.pop('num_epochs', None)
    result = tu.train(**fresh_run)
    assert result.run_dir == tu.Path('runs/set-2') and len(result.history) == 2


def test_auto_goes_on_with_the_run_that_trained_last_whatever_its_name(run_of_one):
    """evaluate and predict write into the folder of an older run."""
    words = {**tu.CONFIG, 'data': tu.load_preset('run/config.py')['data'], 'num_epochs': 9, 'resume': 'auto'}
    for number, name in enumerate(('runs/set-1', 'runs/seed2')):       # README types run_dir=runs/seed2
        shutil.copytree('run', name)
        for path in tu.Path(name).glob('*.pt'):
            os.utime(path, (1e9 + number, 1e9 + number))
    tu.Path('runs/set-1/metrics.json').write_text('{}')                # so this folder changed last
    os.utime('runs/set-1')
    assert tu.find_resume(words, True) == tu.Path('runs/seed2')
    tu.Path('runs/other').mkdir()
    tu.Path('runs/other/last.pt').write_bytes(b'of another program')
    assert tu.find_resume(words, True) == tu.Path('runs/seed2')


def test_a_run_has_the_whole_name_of_its_folder_of_data():
    draw_set(tu.Path('survey 2024.06'))
    result = tu.train(**SMALL | {'data': 'survey 2024.06', 'run_dir': 'auto', 'num_epochs': 1})
    assert result.run_dir == tu.Path('runs/survey_2024_06-1')


def test_auto_reads_no_checkpoint_of_other_data(run_of_one, monkeypatch):
    shutil.copytree('run', 'runs/set-1')
    monkeypatch.setattr(tu, 'load_last', None)
    assert tu.find_resume({**tu.CONFIG, 'data': 'other', 'resume': 'auto'}, False) is None


def test_auto_goes_on_however_the_data_is_typed(small_set):
    os.mkdir('elsewhere')
    words = {**SMALL, 'run_dir': 'auto', 'resume': 'auto'}
    first = tu.train(**words | {'num_epochs': 1}).run_dir
    for way in ('./set', 'set/', str(small_set)):
        assert tu.find_resume({**tu.CONFIG, **words, 'num_epochs': 2, 'data': way}, True) == first
    again = tu.train(**words | {'num_epochs': 2, 'data': 'elsewhere/../set'})      # more epochs than it has
    assert again.run_dir == first and len(again.history) == 2
    assert 'change the result' not in (first / 'log.txt').read_text().replace('num_epochs: 1 -> 2 may change', '')


def test_auto_goes_on_though_the_config_is_torn(run_of_one):
    data = tu.load_preset('run/config.py')['data']
    first = shutil.copytree('run', tu.Path('runs/set-1'))
    (first / 'config.py').write_text((first / 'config.py').read_text()[:200])
    result = tu.train(**SMALL | {'data': data, 'run_dir': 'auto', 'resume': 'auto', 'num_epochs': 2})
    assert result.run_dir == first and [row['epoch'] for row in result.history] == [1, 2]


def test_a_torn_config_of_another_run_is_no_hindrance(run_of_one):
    """Its checkpoint names its data too; what has no log is of another program."""
    shutil.copytree('run', 'runs/other-1')
    tu.Path('runs/other-1/config.py').write_text('config = {')
    words = {**tu.CONFIG, 'data': 'set', 'resume': 'auto', 'num_epochs': 9}
    assert tu.find_resume(words, False) is None
    os.unlink('runs/other-1/log.txt')
    for path in tu.Path('runs/other-1').glob('*.pt'):
        path.write_bytes(b'of another program')
    assert tu.find_resume(words, False) is None


def test_auto_does_not_go_on_with_an_older_run_where_the_newest_is_damaged(run_of_one):
    for name in ('runs/set-1', 'runs/set-2'):
        shutil.copytree('run', name)
    for path in tu.Path('runs/set-2').glob('*.pt'):
        path.write_bytes(b'torn')
    os.utime('runs/set-1', (1, 1))
    data = tu.load_preset('run/config.py')['data']
    with pytest.raises(tu.UserError, match='runs/set-2/.*is damaged'):
        tu.train(resume='auto', data=data, num_epochs=9)


def test_a_run_on_the_demo_set_goes_on_where_the_set_is_gone():
    tu.write_demo(tu.DEMO_FOLDER, num_train=4, num_val=2)
    settings = {**SMALL, 'data': 'demo', 'run_dir': 'auto', 'num_epochs': 1}
    assert tu.train(**settings).run_dir == tu.Path('runs/demo-1')
    found = tu.find_resume({**tu.CONFIG, 'data': 'demo', 'num_epochs': 2, 'resume': 'auto'}, True)
    assert found == tu.Path('runs/demo-1') and tu.resume_config(found, None, {})[0]['data'] == 'demo'


def test_a_run_goes_on_from_any_folder(run_of_one, tmp_path, monkeypatch):
    monkeypatch.chdir('/')
    assert len(tu.train(resume=str(tmp_path / 'run'), num_epochs=2).history) == 2
    assert tu.main(['evaluate', str(tmp_path / 'run')]) == 0


def test_a_file_of_a_run_given_to_resume_means_its_folder(run_of_one, tmp_path):
    assert len(tu.train(resume=str(tmp_path / 'run' / 'last.pt'), num_epochs=2).history) == 2


# --- a checkpoint is there at any time ------------------------------------------------


def count_calls(name, folder):
    """How often one save makes a call."""
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch_call(patch, name,
                   lambda real, *args, **kwargs: calls.append(1) or real(*args, **kwargs))
        tu.save_checkpoint(folder / 'last.pt', OLD)
    return len(calls)


class HalfWritten:
    """A file that takes half of what it is given, then finds the disk full."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, content):
        self.file.write(bytes(content)[:len(content) // 2])
        raise OSError(errno.ENOSPC, 'No space left on device')


@pytest.mark.parametrize('name', ['fsync', 'replace', 'open'])
def test_a_call_that_fails_leaves_a_checkpoint(name, saved, monkeypatch):
    for number in range(count_calls(name, saved)):
        calls, of_folders = [], []                                     # Samba and others cannot fsync a folder

        def instead(real, *args, **kwargs):
            calls.append(1)
            if len(calls) != number + 1:
                return real(*args, **kwargs)
            if name == 'open':
                return HalfWritten(real(*args, **kwargs))
            of_folders.extend([1] * (name == 'fsync' and stat.S_ISDIR(os.fstat(args[0]).st_mode)))
            raise OSError(errno.EIO, 'Input/output error')

        with monkeypatch.context() as patch:
            patch_call(patch, name, instead)
            is_of_folder = name == 'fsync' and number > 0              # that of the file comes first
            with contextlib.nullcontext() if is_of_folder else pytest.raises(OSError):
                tu.save_checkpoint(saved / 'last.pt', NEW)
        assert len(of_folders) == is_of_folder
        assert tu.load_last(saved)[0]['step'] in ((2,) if of_folders else (1, 2))
        tu.save_checkpoint(saved / 'last.pt', OLD)                     # and the next save works
        assert tu.load_last(saved)[0]['step'] == 1
    assert not list(saved.glob('.*')) and calls


@pytest.mark.parametrize('name', ['fsync', 'replace', 'open'])
@pytest.mark.parametrize('moment', ['before', 'after'])
def test_dying_at_any_call_leaves_a_checkpoint(name, moment, saved):
    for number in range(count_calls(name, saved)):
        child = os.fork()
        if not child:
            calls = []

            def die(real, *args, **kwargs):
                calls.append(1)
                if moment == 'after':
                    answer = real(*args, **kwargs)
                if len(calls) == number + 1:
                    os._exit(9)
                return answer if moment == 'after' else real(*args, **kwargs)

            patch_call(pytest.MonkeyPatch(), name, die)
            tu.save_checkpoint(saved / 'last.pt', NEW)
            os._exit(0)
        assert os.waitpid(child, 0)[1] >> 8 == 9
        assert tu.load_last(saved)[0]['step'] in (1, 2)
        tu.save_checkpoint(saved / 'last.pt', OLD)


def test_a_crash_between_two_renames_costs_nothing(toy_of_three):
    """last.pt has become previous.pt, the newer one is still called last.new."""
    newer = torch.load('run/last.pt', weights_only=True)
    os.replace('run/last.pt', 'run/last.new')
    torch.save(newer | {'epoch': 1}, 'run/previous.pt')
    assert tu.load_last('run')[0]['epoch'] == newer['epoch'] > 1


def test_a_file_is_on_the_disk_before_it_takes_the_place_of_the_old_one(tmp_path, monkeypatch):
    calls = []

    def fsync(real, number):
        found = os.fstat(number)
        calls.append('folder' if stat.S_ISDIR(found.st_mode) else f'file of {found.st_size}')
        real(number)

    def replace(real, source, target):
        assert open(target).read() == 'old' and open(source).read() == 'new'
        calls.append('rename')
        real(source, target)

    (tmp_path / 'history.csv').write_text('old')
    patch_call(monkeypatch, 'fsync', fsync)
    patch_call(monkeypatch, 'replace', replace)
    tu.write_file(tmp_path / 'history.csv', b'new')
    assert calls == ['file of 3', 'rename', 'folder']                  # nothing is left in a buffer
    assert (tmp_path / 'history.csv').read_text() == 'new'


def test_a_checkpoint_has_its_name_on_the_disk_when_it_is_saved(tmp_path, monkeypatch):
    calls = []

    def fsync(real, number):
        calls.append('fsync of the folder' if stat.S_ISDIR(os.fstat(number).st_mode) else 'fsync')
        real(number)

    patch_call(monkeypatch, 'fsync', fsync)
    patch_call(monkeypatch, 'replace', lambda real, *names: (calls.append(os.path.basename(names[1])), real(*names)))
    tu.save_checkpoint(tmp_path / 'last.pt', OLD)
    assert calls == ['fsync', 'last.new', 'fsync of the folder', 'last.pt', 'fsync of the folder']


def test_every_file_of_a_run_that_matters_takes_the_place_of_a_whole_one(monkeypatch):
    replaced, opened = set(), set()

    def opening(real, path, *rest, **named):
        opened.add(os.path.basename(str(path)))
        return real(path, *rest, **named)

    patch_call(monkeypatch, 'replace', lambda real, *names: (replaced.add(os.path.basename(names[1])), real(*names)))
    patch_call(monkeypatch, 'open', opening)
    train_own()
    whole = {'config.py', 'history.csv', 'last.pt', 'previous.pt', 'best.pt'}
    assert whole <= replaced and not whole & opened


@pytest.mark.usefixtures('each_epoch_saved')
def test_a_checkpoint_of_an_epoch_comes_after_its_line_in_the_log(monkeypatch):
    seen = []

    def replaced(real, source, target):
        real(source, target)
        if os.path.basename(target) == 'last.pt':
            seen.append((tu.load_last('run')[0]['epoch'], tu.Path('run/log.txt').read_text().count('Epoch ')))

    patch_call(monkeypatch, 'replace', replaced)
    train_own(num_epochs=3)
    assert {epoch for epoch, _ in seen} == {0, 1, 2, 3} and all(epoch == lines for epoch, lines in seen)


@pytest.mark.parametrize('spoil', [
    lambda whole: whole[:-200],
    lambda whole: whole[:len(whole) // 2] + bytes(9) + whole[len(whole) // 2 + 9:]],
    ids=['cut', 'changed'])
def test_a_disk_that_lies_does_not_cost_the_checkpoint_before(spoil, saved, monkeypatch):
    """What was written is not what was given, and no call says so: it is read back before it counts."""
    real = builtins.open

    class Lying(HalfWritten):
        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            self.file.write(spoil(bytes(content)))

    monkeypatch.setattr(builtins, 'open', lambda *args, **kwargs: Lying(real(*args, **kwargs))
                        if args[1:2] == ('wb',) else real(*args, **kwargs))
    with pytest.raises(OSError, match='damaged'):
        tu.save_checkpoint(saved / 'last.pt', NEW)
    assert_same(tu.load_checkpoint(saved / 'last.pt'), OLD)


def test_left_overs_of_a_save_that_was_killed_go_away(toy_of_one):
    tu.Path('run/.last.new.4711.tmp').write_bytes(bytes(100))
    tu.Path('run/mine.tmp').write_bytes(b'of the user')
    train_own(resume='run', run_dir='auto', num_epochs=2)
    assert [path.name for path in tu.Path('run').iterdir() if path.name.endswith('.tmp')] == ['mine.tmp']


# --- a full disk, a folder that is gone -----------------------------------------------


@pytest.fixture
def disk(monkeypatch):
    """Set disk['full'] and no file can be written safely any more, disk['closed'] and none opened."""
    state = {'full': False, 'closed': False}

    def fsync(real, number):
        if state['full']:
            raise OSError(errno.ENOSPC, 'No space left on device')
        real(number)

    def open_file(real, *args, **kwargs):
        if state['closed']:
            raise OSError(errno.EROFS, 'Read-only file system')
        return real(*args, **kwargs)

    patch_call(monkeypatch, 'fsync', fsync)
    patch_call(monkeypatch, 'open', open_file)
    return state


def test_a_disk_that_is_full_from_the_start_is_told_before_training(disk):
    disk['full'] = True
    with pytest.raises(tu.UserError, match='(?s)cannot start.*No space left on device'):
        train_own()


def fill_at(disk, begin, end=math.inf, validation=(1, 1, 1), trouble='full'):
    """A loss that fills the disk (or closes it) between two of its calls; validation is multiplied per epoch."""
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        disk[trouble] = begin <= len(calls) < end
        if torch.is_grad_enabled() or len(calls) < 3:                  # 1 and 2 are the smoke test
            return squares(model, batch)
        return squares(model, batch) * validation[(len(calls) - 3) // 4]
    return loss_fn


@pytest.mark.usefixtures('each_epoch_saved')
@pytest.mark.parametrize('trouble, told', [('full', 'No space left on device'),
                                           ('closed', 'Read-only file system')])
def test_a_disk_that_takes_nothing_stops_no_training(disk, trouble, told):
    result = train_own(loss_fn=fill_at(disk, 3 + 4, trouble=trouble))  # after smoke test and epoch 1
    assert len(result.history) == 3
    log = (result.run_dir / 'log.txt').read_text()
    assert log.count('could not be saved') == 1 and told in log        # of three files
    assert tu.load_last('run')[0]['epoch'] == 1
    assert result.best['epoch'] == 3                                   # not on the disk, but not lost either


@pytest.mark.parametrize('seconds, least, most', [(5, 4, 10), (50, 30, 70)])
def test_short_epochs_are_not_each_saved_and_lose_nothing(monkeypatch, seconds, least, most):
    """By a clock of its own: each fsync takes a second, each epoch five, of which saving would be over a third. Long
    ones are saved before their validation and at their end."""
    clock, saved, fsync, replace = [0.0], [], os.fsync, os.replace

    def slow(file):
        clock[0] += 1
        fsync(file)

    def replacing(source, target):
        saved.extend([Path(target).name] * str(target).endswith('.pt'))
        replace(source, target)

    def loss_fn(model, batch):
        clock[0] += seconds * (torch.is_grad_enabled() if seconds > 5 else not torch.is_grad_enabled())
        return squares(model, batch)

    monkeypatch.setattr(time, 'monotonic', lambda: clock[0])
    undisturbed = train_own(num_epochs=30, run_dir='undisturbed')      # no time passes: each epoch is saved
    monkeypatch.setattr(os, 'fsync', slow)
    monkeypatch.setattr(os, 'replace', replacing)
    result = train_own(loss_fn=loss_fn, num_epochs=30)
    assert least <= saved.count('last.pt') <= most and 'best so far, saved best.pt' in log_text()
    assert saved.count('best.pt') <= (10 if seconds == 5 else 30)
    assert ('best so far\n' in log_text()) == (seconds == 5) and tu.load_last('run')[0]['epoch'] == 30
    assert_same(tu.load_last('run')[0]['model'], tu.load_last('undisturbed')[0]['model'])
    assert result.best == undisturbed.best and result.best['epoch'] == torch.load('run/best.pt')['epoch']


def test_memory_that_is_short_for_a_checkpoint_ends_no_training(monkeypatch):
    real, calls = torch.save, []

    def save(*content):
        calls.append(content)
        if len(calls) == 4:
            raise MemoryError
        return real(*content)

    monkeypatch.setattr(torch, 'save', save)
    result = train_own()
    assert len(result.history) == 3 and tu.load_last('run')[0]['epoch'] == 3
    assert log_text().count('could not be saved: out of memory') == 1


@pytest.mark.parametrize('validation, best', [
    ((0.1, 1, 10), 1), ((10, 0.1, 1), 2), ((10, 1, 0.1), 3)])
def test_a_disk_with_space_again_gets_everything(disk, validation, best):
    result = train_own(loss_fn=fill_at(disk, 3, 3 + 4, validation))    # full in epoch 1
    assert len(result.history) == 3 and tu.load_last('run')[0]['epoch'] == 3
    assert result.best['epoch'] == best
    assert result.best['loss'] == min(row['val_loss'] for row in result.history)


@pytest.mark.usefixtures('each_epoch_saved')
def test_a_last_save_that_fails_is_tried_again(disk, monkeypatch):
    """No space while the last epoch is closed, until the last of its files; then there is some again."""
    found = []

    def opening(real, path, *rest, **named):
        if disk['full'] and 'history.csv' in str(path):
            disk['full'] = False
            found.append(tu.load_last('run')[0]['epoch'])
        return real(path, *rest, **named)

    patch_call(monkeypatch, 'open', opening)
    result = train_own(loss_fn=fill_at(disk, 2 + 3 * 4), num_epochs=3)             # the last validation
    assert found == [2] and 'could not be saved' in log_text()
    assert tu.load_last('run')[0]['epoch'] == 3 and result.best['epoch'] == 3 and result.is_saved
    assert tu.load_checkpoint('run/best.pt')['epoch'] == 3


def test_a_disk_that_stays_full_is_told_at_the_end(small_set, monkeypatch):
    words = as_words(SMALL)
    real, calls = os.fsync, []

    def fsync(file):
        calls.append(1)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file)

    monkeypatch.setattr(os, 'fsync', fsync)
    assert tu.main([*words, 'num_epochs=4']) == 1
    [told] = [line for line in (tu.Path('run') / 'log.txt').read_text().splitlines() if 'NOT there' in line]
    assert told.endswith('resume=run')


def test_best_weights_that_no_disk_took_are_told_with_the_reason_once(caplog):
    def in_the_way(model, batch):
        os.makedirs('run/best.pt', exist_ok=True)
        return squares(model, batch)

    assert not train_own(loss_fn=in_the_way).is_saved
    [told] = [line for line in caplog.messages if 'could not be saved' in line]
    [end] = [line for line in caplog.messages if 'NOT there' in line]
    assert 'Is a directory' in told and 'Is a directory' in end


@pytest.mark.usefixtures('each_epoch_saved')
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
    stopped = train(stopping_at(network(), 1 + 2 + 2 + 1), val_data=Samples(4), loss_fn=scripted)
    assert stopped.stopped_by == signal.SIGTERM and not stopped.is_saved
    assert torch.load('run/best.pt', weights_only=True)['epoch'] == 1
    monkeypatch.setattr(os, 'replace', replace)
    resumed = train(val_data=Samples(4), loss_fn=scripted, resume='run', run_dir='auto')
    best = torch.load('run/best.pt', weights_only=True)
    assert (best['epoch'], best['metrics']['loss'], resumed.best['epoch']) == (2, 1.0, 2)
    assert last()['unsaved'] is None


@pytest.mark.usefixtures('each_epoch_saved')
def test_a_best_epoch_ahead_of_last_pt_is_not_replaced_by_worse_ones(monkeypatch):
    """The disk took best.pt of epoch 3, but not the larger last.pt; the resume stops after epoch 2."""
    replace, scores = os.replace, iter([9.0, 3.0, 3.5, 1.0, 9.0, 2.0, 9.0])    # trial, epochs 1 to 3; trial, epoch 2

    def full(source, target):
        if str(target).endswith('last.new') and Path('run/history.csv').exists():
            raise OSError(28, 'No space left on device')
        replace(source, target)

    def scripted(model, batch):
        return squares(model, batch) if torch.is_grad_enabled() else torch.full((len(batch['image']),), next(scores))

    monkeypatch.setattr(os, 'replace', full)
    assert not train(val_data=Samples(4), loss_fn=scripted, num_epochs=3).is_saved
    monkeypatch.setattr(os, 'replace', replace)
    assert (last()['epoch'], tu.load_checkpoint('run/best.pt')['epoch']) == (1, 3)
    resumed = train(val_data=Samples(4), loss_fn=scripted, num_epochs=2, resume='run', run_dir='auto')
    best = tu.load_checkpoint('run/best.pt')
    assert (best['epoch'], best['metrics']['loss'], resumed.best['epoch'], last()['best_epoch']) == (3, 1.0, 3, 2)
    assert 'small images' not in log_text()


@pytest.mark.usefixtures('each_epoch_saved')
def test_a_best_epoch_ahead_of_last_pt_is_not_replaced_by_one_that_waited(monkeypatch):
    """Epoch 2 is in last.pt alone, the better epoch 3 in best.pt alone."""
    replace, scores = os.replace, iter([9.0, 3.0, 2.0, 1.0, 9.0, 1.5])         # trial, epochs 1 to 3; trial, epoch 3

    def full(source, target):
        lines = Path('run/history.csv').read_text().count('\n') if Path('run/history.csv').exists() else 0
        if (lines, Path(target).name) == (2, 'best.pt') or lines > 2 and Path(target).name == 'last.new':
            raise OSError(28, 'No space left on device')
        replace(source, target)

    def scripted(model, batch):
        return squares(model, batch) if torch.is_grad_enabled() else torch.full((len(batch['image']),), next(scores))

    monkeypatch.setattr(os, 'replace', full)
    assert not train(val_data=Samples(4), loss_fn=scripted, num_epochs=3).is_saved
    monkeypatch.setattr(os, 'replace', replace)
    assert (last()['unsaved']['epoch'], tu.load_checkpoint('run/best.pt')['epoch']) == (2, 3)
    resumed = train(val_data=Samples(4), loss_fn=scripted, num_epochs=3, resume='run', run_dir='auto')
    best = tu.load_checkpoint('run/best.pt')
    assert (best['epoch'], best['metrics']['loss'], resumed.best['epoch']) == (3, 1.0, 3)


def test_a_best_epoch_for_which_memory_ran_out_is_the_best_after_a_resume(monkeypatch):
    scores, real = iter([9.0, 3.0, 2.0, 9.0, 2.0, 5.0]), copy.deepcopy       # trial, epochs 1, 2; trial, epochs 2, 3

    def scripted(model, batch):
        return squares(model, batch) if torch.is_grad_enabled() else torch.full((len(batch['image']),), next(scores))

    def full(value, *memo):
        if isinstance(value, dict) and 'weights' in value and Path('run/history.csv').exists():
            raise MemoryError('no more')
        return real(value, *memo)

    with monkeypatch.context() as patch, pytest.raises(tu.UserError, match='out of memory'):
        patch.setattr(copy, 'deepcopy', full)
        train(val_data=Samples(4), loss_fn=scripted)
    resumed = train(val_data=Samples(4), loss_fn=scripted, resume='run', run_dir='auto')
    assert [row['epoch'] for row in resumed.history] == [1, 2, 3] and resumed.best['epoch'] == 2


def test_a_data_set_that_catches_every_exception_does_not_catch_a_signal():
    class Careful(Samples):
        def __getitem__(self, index):
            try:
                asked.append(index)
                if len(asked) == 10:                                   # 4 in the smoke test, 4 in the first step
                    os.kill(os.getpid(), signal.SIGINT)
                return super().__getitem__(index)
            except Exception as error:
                raise RuntimeError('cannot be read') from error

    asked = []
    assert train(train_data=Careful()).stopped_by == signal.SIGINT and last()['step'] == 1


def test_a_drive_that_is_gone_hides_no_error_and_keeps_no_signal(monkeypatch):
    """Path.exists raises there; the lock was never given back."""
    def gone(path, **_):
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    class Breaking(Samples):
        def __getitem__(self, index):
            if os.path.exists('run/history.csv'):                      # in the second epoch
                monkeypatch.setattr(Path, 'exists', gone)
                raise ValueError('cut off')
            return super().__getitem__(index)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(tu.DataError, match='cut off'):
        train(train_data=Breaking())
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_drive_that_is_gone_as_a_start_fails_keeps_no_later_training_out(monkeypatch):
    def gone(path, pattern, real=Path.glob, **named):
        if pattern == 'b*.pt':
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return real(path, pattern, **named)

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Path, 'glob', gone)
        train_own(loss_fn=lambda model, batch: 1 / 0)
    assert train_own(run_dir='other', num_epochs=1).is_saved


def test_an_interrupt_while_a_failed_start_is_cleaned_up_keeps_no_later_training_out(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, 'rmtree', interrupt)
        train_own(loss_fn=lambda model, batch: 1 / 0)
    assert train_own(run_dir='other', num_epochs=1).is_saved


@pytest.mark.usefixtures('each_epoch_saved')
@pytest.mark.parametrize('returns', [False, True])
@pytest.mark.parametrize('gone', ['a file is there', 'nothing is there'])
def test_a_folder_that_vanishes_stops_no_training(gone, returns, capsys):
    """As a network drive does, in the second epoch; it may come back in the third."""
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        if len(calls) == 3 + 4:
            os.rename('run', 'kept')
            if gone == 'a file is there':
                open('run', 'w').close()
        if len(calls) == 3 + 8 and returns:
            if os.path.isdir('run'):
                shutil.rmtree('run')
            elif os.path.exists('run'):
                os.unlink('run')
            os.rename('kept', 'run')
        return squares(model, batch)

    result = train_own(loss_fn=loss_fn)
    assert len(result.history) == 3
    if gone == 'a file is there':
        assert 'could not be saved' in capsys.readouterr().out
    folder = 'run' if returns or gone == 'nothing is there' else 'kept'
    assert tu.load_last(folder)[0]['epoch'] == (1 if folder == 'kept' else 3)
    assert os.path.exists(f'{folder}/best.pt') and os.path.exists(f'{folder}/history.csv')
    if folder == 'run':
        assert tu.load_checkpoint(tu.Path('run/best.pt'))['epoch'] == result.best['epoch']


def test_a_folder_that_vanished_can_be_resumed_all_the_same():
    real, calls = squares, []

    def loss_fn(model, batch):
        calls.append(1)
        if len(calls) == 8:
            shutil.rmtree('run')
        return real(model, batch)

    train_own(loss_fn=loss_fn)
    assert tu.load_preset('run')['num_epochs'] == 3
    assert train_own(resume='run', run_dir='auto', num_epochs=4).history[-1]['epoch'] == 4


# --- one run per folder ---------------------------------------------------------------


def test_a_folder_in_use_is_refused_until_its_process_is_gone(forks, small_set):
    run = Start(**THIRTY_STEPS | {'num_epochs': 1000, 'num_workers': 2})
    try:
        assert run.until_saved(3), open('output.txt').read()[-3000:]
        with pytest.raises(tu.UserError, match=f'in use by process {run.process.pid} on '):
            tu.train(resume='run', num_epochs=3)
        assert {'last.pt', 'last.new'} & {*os.listdir('run')}          # it saves meanwhile, by renaming
    finally:
        run.end(signal.SIGKILL)  # .lock and .holder stay behind
    done = tu.load_last('run')[0]['epoch']
    result = tu.train(resume='run', num_epochs=done + 1)
    assert result.history[-1]['epoch'] == done + 1


def test_a_refused_start_leaves_signals_and_folder_as_they_were():
    os.mkdir('run')
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with open('run/.lock', 'w') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(tu.UserError, match='in use'):
            train_own()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert os.listdir('run') == ['.lock']


@pytest.mark.parametrize('number', [errno.ENOLCK, errno.ENOTSUP])
def test_a_network_drive_whose_server_gives_no_locks_takes_runs_too(monkeypatch, number):
    """NFS without lockd: it "cannot be written: No locks available"."""
    def refuse(lock, *how, **named):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr('filelock.FileLock.acquire', refuse)
    assert train_own().is_saved


def test_a_lock_that_cannot_be_made_for_another_reason_is_told(monkeypatch):
    def refuse(lock, *how, **named):
        raise OSError(errno.EROFS, 'Read-only file system')

    monkeypatch.setattr('filelock.FileLock.acquire', refuse)
    with pytest.raises(tu.UserError, match='cannot be written: Read-only file system'):
        train_own()


def test_a_folder_that_a_full_disk_kept_from_being_held_is_not_kept_locked(monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    gc.disable()
    try:
        with monkeypatch.context() as patch, pytest.raises(tu.UserError, match='No space left'):
            patch.setattr(Path, 'write_bytes', full)
            train_own()
        assert train_own().is_saved
    finally:
        gc.enable()


def test_a_computer_of_any_name_may_train(monkeypatch):
    """Windows writes text in the code page of the system, which may lack the letters of the computer's name."""
    real = Path.write_text
    monkeypatch.setattr('socket.gethostname', lambda: '\u041f\u041a-\u0418\u0432\u0430\u043d')
    monkeypatch.setattr(Path, 'write_text', lambda path, text, encoding='cp1252': real(path, text, encoding))
    assert train_own().is_saved


def test_who_holds_a_folder_is_told_whatever_it_is_written_in():
    os.mkdir('run')
    Path('run/.holder').write_bytes('process 7 on J\u00fcrgen-PC'.encode('cp1252'))
    with open('run/.lock', 'w') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(tu.UserError, match='in use by process 7 on J.rgen-PC'):
            train_own()


def test_a_drive_that_knows_no_locks_takes_runs_all_the_same(monkeypatch):
    """What older versions of filelock raise where flock is not implemented."""
    def refuse(lock, *how, **named):
        raise NotImplementedError('FileSystem does not appear to support flock')

    monkeypatch.setattr('filelock.FileLock.acquire', refuse)
    assert train_own().is_saved
    Path('run/.holder').write_text('process 7 on another')             # is not said to be in use without a lock
    assert train_own(resume='run', run_dir='auto', num_epochs=4).history[-1]['epoch'] == 4


@pytest.mark.parametrize('place', ['zipfile.ZipFile.testzip', 'torch.load'])
def test_a_drive_that_fails_at_a_checkpoint_is_told_with_its_name(monkeypatch, place, toy_of_three):
    """A sound file was called no checkpoint of this program, or only the error was told."""
    def fail(*how, **named):
        raise OSError(errno.EIO, 'Input/output error')
    monkeypatch.setattr(place, fail)
    with pytest.raises(OSError, match='^run/best.pt: cannot be read: Input/output error$'):
        tu.load_checkpoint('run/best.pt')


def test_a_drive_that_fails_as_the_lock_is_given_back_does_not_undo_the_run(monkeypatch):
    """The command ended with 2 and 'a file: Input/output error' after all was saved."""
    from filelock import FileLock
    real = FileLock.release
    def give_back(lock, *how, **named):
        real(lock, *how, **named)
        raise OSError(errno.EIO, 'Input/output error')
    monkeypatch.setattr('filelock.FileLock.release', give_back)
    assert train_own().is_saved


def test_a_folder_that_holds_a_run_is_neither_continued_nor_written_over_by_accident(run_of_two):
    before, data = final(), tu.load_preset('run/config.py')['data']
    with pytest.raises(tu.UserError, match='holds a run already; resume=run continues it'):
        tu.train(**SMALL | {'num_epochs': 3, 'seed': 1, 'data': data})             # no word of resume
    assert_same(final(), before)


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


@pytest.mark.usefixtures('each_epoch_saved')
def test_the_best_epoch_of_a_run_that_took_the_folder_is_not_returned():
    train(num_epochs=1, run_dir='other')
    model = network()

    def take(output):                                                  # in the second epoch
        shutil.rmtree('run')
        shutil.copytree('other', 'run')
        Path('run/.holder').write_text('process 7 on another')

    at_training_call(model[0], lambda call: call == 1 + 2 + 1, take)
    scores = iter([9.0, 1.0, 2.0])                                     # the trial, then epoch 1, the best

    def scripted(model, batch):
        return squares(model, batch) if torch.is_grad_enabled() else torch.full((len(batch['image']),), next(scores))

    assert train(model, val_data=Samples(4), loss_fn=scripted, num_epochs=2).best == {}


def test_memory_that_runs_out_at_the_end_gives_the_folder_back(monkeypatch):
    """A notebook had to be restarted: the lock and the signals stayed taken."""
    real, before = tu.state_dict, signal.getsignal(signal.SIGINT)

    def full(*given):
        if Path('run/history.csv').exists():
            raise MemoryError('no more')
        return real(*given)

    monkeypatch.setattr(tu, 'state_dict', full)
    with pytest.raises((MemoryError, tu.UserError)):
        train(num_epochs=3)
    monkeypatch.setattr(tu, 'state_dict', real)
    assert signal.getsignal(signal.SIGINT) is before
    assert train(num_epochs=3, resume='run', run_dir='auto').is_saved


# --- damaged files --------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['flipped in a tensor', 'flipped at the end', 'cut', 'empty',
                                  'text', 'an empty archive'])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(kind, saved, caplog):
    damage(saved / 'last.pt', kind)
    loaded, path = tu.load_last(saved)
    assert loaded['step'] == 0 and path.name == 'previous.pt'
    assert 'last.pt' in caplog.text and 'trying the one before it' in caplog.text


def test_any_flipped_byte_is_noticed_or_changes_nothing(saved):
    path = saved / 'last.pt'
    whole = path.read_bytes()
    directory = len(whole) - 900                                       # of the zip file
    for position in [*range(0, directory, 61), *range(directory, len(whole), 3)]:
        for bit in (1, 8):
            spoiled = bytearray(whole)
            spoiled[position] ^= bit
            path.write_bytes(spoiled)
            try:
                loaded = tu.load_checkpoint(path)
            except OSError:
                continue
            assert_same(loaded, OLD, f'position {position} of {len(whole)}')


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(toys):
    """The step between the two is trained again."""
    train_own(loss_fn=stop_at(5, squares), checkpoint_minutes=0.0)
    assert tu.load_last('run')[0]['step'] == 3
    damage(tu.Path('run/last.pt'), 'cut')
    assert tu.load_last('run')[0]['step'] == 2
    train_own(loss_fn=stop_at(3, squares), checkpoint_minutes=0.0, resume='run', run_dir='auto')
    assert 'run/last.pt is damaged' in log_text()
    assert tu.load_checkpoint(Path('run/previous.pt'))['step'] == 2 and os.path.exists('run/damaged.pt')
    train_own(resume='run', run_dir='auto')
    assert_same(final(), final(toys[3]))


@pytest.mark.parametrize('program', [
    b'.', b'0.', b'\x80\x02(t.', b'\x80\x02N\x85R.', b'\x80\x02h\x05.', b'\xff', b'',
    b'\x80\x02]N\x86Q.', b'\x80\x02K\x01K\x02s.', b'\x80\x02X\xff\xff\xff\x7f.',
    b'\x80\x02G\x00.', b'\x80\x02M}\x05Q.'])
def test_a_checkpoint_with_a_broken_pickle_is_damaged_and_no_traceback(program, saved):
    with zipfile.ZipFile(saved / 'last.pt', 'w') as file:
        for name, content in (('data.pkl', program), ('byteorder', b'little'), ('version', b'3\n')):
            file.writestr(f'archive/{name}', content)
    assert tu.load_last(saved)[0]['step'] == 0


# --- hostile and senseless files ------------------------------------------------------


@pytest.fixture(params=['in torch.save', 'as a pickle'])
def hostile(request):
    """Writes a file that runs a command when it is unpickled."""
    def write(path):
        if request.param == 'in torch.save':
            torch.save({'weights': Harm(), 'config': Harm(), 'step': 1}, path)
        else:
            with open(path, 'wb') as file:
                pickle.dump(Harm(), file)
    yield write
    assert not os.path.exists('harmed')


def test_a_hostile_checkpoint_is_refused_and_not_run(hostile, run_of_two):
    for name in ('last.pt', 'previous.pt'):
        hostile(f'run/{name}')
    with pytest.raises(tu.UserError, match='last.pt(.|\n)*a new run with:  initial_weights=run$'):
        tu.train(resume='run')


def test_a_hostile_model_is_refused_and_not_run(hostile):
    os.mkdir('run')
    hostile('run/best.pt')
    with pytest.raises(tu.UserError, match='best.pt'):
        tu.load('run')


@pytest.mark.parametrize('foreign', [{'a': 1}, [1, 2], torch.ones(3)], ids=type)
def test_a_file_of_another_program_is_told_apart(foreign, run_of_one):
    for name in ('last.pt', 'previous.pt', 'best.pt'):
        torch.save(foreign, f'run/{name}')
    with pytest.raises(tu.UserError):
        tu.load('run')
    with pytest.raises(tu.UserError):
        tu.train(resume='run')


@pytest.mark.parametrize('change', [
    {'model': {}}, {'model': 5}, {'dtype': 5}, {'random': None}, {'optimizer': {}}, {'optimizer': 'x'},
    {'epoch': 'x'}, {'threads': None}, {'history': None, 'totals': 3}])
def test_a_last_file_of_something_else_is_refused_in_one_line(change, toy_of_three):
    saved = torch.load('run/last.pt', weights_only=True) | change
    torch.save(saved, 'run/last.pt')
    for name in ('previous.pt', 'last.new'):
        tu.Path('run', name).unlink(missing_ok=True)
    with pytest.raises(tu.UserError, match='run/last.pt'):
        train_own(resume='run', run_dir='auto', num_epochs=9)


def of_optimizer(value):
    return lambda saved: saved['optimizer']['state'][0].update(exp_avg=value)


@pytest.mark.parametrize('change', [
    of_optimizer(torch.zeros(1)), of_optimizer('x'), lambda saved: saved.update(random=-1),
    lambda saved: saved.update(config=5)], ids=range(4))
def test_a_checkpoint_that_makes_no_sense_is_refused_in_one_line(change, run_of_one, capsys):
    patch_last(change)
    assert tu.main(['resume=run', 'num_epochs=3']) == 2
    assert 'cannot resume' in capsys.readouterr().err


@pytest.mark.parametrize('crafted', [
    {'epoch': -3}, {'window': -5}, {'step': -10}, {'batch_size': 0}, {'dtype': 'float64'}, {'dtype': ['float32']},
    {'history': [1, 2]}, {'history': [{'x': 1}]}, {'history': [{'event': '', 'epoch': 'x', 'train_loss': 1.0}]},
    {'history': [{'event': '', 'epoch': 9, 'train_loss': None}]}], ids=str)
def test_senseless_counters_in_a_checkpoint_are_refused(crafted, toy_of_one):
    tu.save_checkpoint(tu.Path('run/last.pt'), tu.load_checkpoint('run/last.pt') | crafted)
    with pytest.raises(tu.UserError, match='does not belong to this run'):
        train_own(resume='run', run_dir='auto', num_epochs=2)


@pytest.mark.parametrize('scores', [{'iou': 'high'}, {'iou': 0.5, 'dice': 0.5, 'iou_per_class': [0.5] * 3}, [0.5]])
def test_scores_that_are_no_numbers_do_not_end_a_resume_with_a_traceback(scores, run_of_two, caplog):
    saved = tu.load_checkpoint('run/best.pt')
    tu.save_checkpoint(tu.Path('run/best.pt'), saved | {'metrics': scores})
    assert tu.train(resume='run').best == {}
    assert 'the last weights are returned instead' in caplog.text


def test_a_best_file_that_fits_in_part_changes_no_weight(run_of_two, caplog):
    saved = tu.load_checkpoint('run/best.pt')
    weights = {name: value.fill_(7) for name, value in saved['weights'].items()}
    last = [*weights][-1]
    tu.save_checkpoint(tu.Path('run/best.pt'), saved | {'weights': weights | {last: torch.ones(9, 9)}})
    model = tu.train(resume='run').model
    assert 'the last weights are returned instead' in caplog.text
    assert_same(model.state_dict(), tu.load_last('run')[0]['weights'])


def test_a_compressed_checkpoint_is_refused_before_it_is_unpacked(toy_of_one):
    with zipfile.ZipFile('run/last.pt') as whole, zipfile.ZipFile('bomb.pt', 'w', zipfile.ZIP_DEFLATED) as bomb:
        for name in whole.namelist():
            bomb.writestr(name, whole.read(name))
        bomb.writestr('zeros', bytes(10**7))
    with pytest.raises(OSError, match='may be a bomb'):
        tu.load_checkpoint('bomb.pt')


def test_a_checkpoint_that_would_never_end_is_refused(toy_of_one, monkeypatch):
    saved = tu.load_last('run')[0]
    bomb = [0]
    for _ in range(34):
        bomb = [bomb, bomb]
    saved['history'][0]['event'] = bomb
    tu.save_checkpoint(tu.Path('run/last.pt'), saved)
    tu.Path('run/previous.pt').unlink()
    assert tu.refuse_explosion.__defaults__ == (10**7,)                # which take seconds
    monkeypatch.setattr(tu.refuse_explosion, '__defaults__', (10**5,))
    with pytest.raises(tu.UserError, match='one inside the other'):
        tu.load_last('run')


@pytest.mark.parametrize('place', [2 ** 30, -1])
def test_a_random_state_beyond_its_end_is_refused(toy_of_one, place):
    """NumPy trusts the place, and would read other memory."""
    saved = tu.load_last('run')[0]
    kind, keys, _, *rest = saved['random']['numpy']
    saved['random']['numpy'] = (kind, keys, place, *rest)
    tu.save_checkpoint(tu.Path('run/last.pt'), saved)
    with pytest.raises(tu.UserError, match='counters make no sense'):
        train_own(resume='run', run_dir='auto', num_epochs=2)


def test_links_in_a_run_folder_are_not_written_through(run_of_one, tmp_path):
    (tmp_path / 'profile').write_text('mine')
    (tmp_path / 'run' / 'log.txt').unlink()
    (tmp_path / 'run' / 'log.txt').symlink_to(tmp_path / 'profile')
    with pytest.raises(tu.UserError, match='log.txt: is no file of ours'):
        tu.train(resume='run', num_epochs=2)
    assert (tmp_path / 'profile').read_text() == 'mine'


def test_pipes_in_run_folders_are_not_waited_for(small_set):
    tu.train(**SMALL | {'num_epochs': 1, 'run_dir': 'runs/set-1'})
    os.remove('runs/set-1/config.py')
    os.mkfifo('runs/set-1/config.py')
    assert len(tu.train(resume='runs/set-1', num_epochs=2).history) == 2
    assert tu.train(**SMALL | {'num_epochs': 1, 'run_dir': 'auto', 'resume': 'auto'}).run_dir.name == 'set-2'
    os.mkdir('mine')
    os.mkfifo('mine/config.py')
    with pytest.raises(tu.UserError, match='config.py: would be overwritten'):
        tu.train(**SMALL | {'run_dir': 'mine'})


def test_a_pipe_in_a_run_folder_is_not_waited_for(toy_of_one):
    os.unlink('run/log.txt')
    os.mkfifo('run/log.txt')
    with pytest.raises(tu.UserError, match='is no file'):
        train_own(resume='run', run_dir='auto', num_epochs=2)


def test_a_resume_that_ends_before_a_step_leaves_the_loss_scale_alone():
    def ends(model, batch):
        raise KeyboardInterrupt

    train(num_epochs=1, init_scale=8.0, **tu.amp_settings('float16'))
    scale = last()['scaler']
    with pytest.raises(KeyboardInterrupt):
        train(resume='run', run_dir='auto', num_epochs=2, use_amp=False, loss_fn=ends)
    assert last()['scaler'] == scale != {}


def test_a_history_csv_of_the_users_is_not_written_over():
    Path('run').mkdir()
    Path('run/history.csv').write_text('mine')
    with pytest.raises(tu.UserError, match='history.csv: would be overwritten'):
        train()
