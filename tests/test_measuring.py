"""Measuring: memory by part, check, tune.

Run: python -m pytest tests/test_measuring.py
"""
import functools
import math
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
import torch
import torch._inductor.config
from torch import nn

import train_unet as tu
from conftest import TINY, as_words
from helpers import WORDS, dataset, fresh, inspect, save

pytestmark = pytest.mark.usefixtures('one_thread')


def test_check_with_resume_auto_and_no_run_yet_looks_at_the_network_of_initial_weights(two, capsys):
    """What train makes of the same words; check took the usual network, as if something were resumed."""
    how = {key: value for key, value in TINY.items() if key not in ('encoder', 'decoder_channels')}
    assert tu.check(**how, data=str(two[1]), initial_weights=str(two[0]), resume='auto') == 0
    assert re.search("^  encoder +'tu-test_five_convs'", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.skipif(sys.platform != 'linux', reason='other platforms import the script anew in a worker')
def test_check_tells_how_fast_images_load_without_the_start_of_the_workers(small_set, capsys, monkeypatch):
    """On Windows that takes longer than the measurement: one image per second was told of any set."""
    iterator, clock, asked = torch.utils.data.dataloader._BaseDataLoaderIter, time.monotonic, []
    following = iterator.__next__
    monkeypatch.setattr(iterator, '__next__', lambda batches: asked.append(1) or following(batches))
    monkeypatch.setattr(time, 'monotonic', lambda: clock() + 1000 * bool(asked))       # the first batch takes so long
    assert tu.check(**TINY | {'num_workers': 1}, data=str(small_set)) == 0
    assert float(re.search(r'loading: (\S+) images/s', capsys.readouterr().out)[1]) > 0.1      # 0.01 with its start


def settled(**changes):
    """A settled config for 64 x 64 images, without data."""
    config, _, _ = tu.resolve_config(None, {**TINY, 'image_size': [64, 64], 'num_classes': 2, 'mean': [100.0],
                                            'std': [50.0], 'image_dtype': 'uint8', **changes})
    return config


# --- memory by part -------------------------------------------------------------------


def really_saved(model, config, dtype):
    """Bytes that autograd keeps in a real step, counted apart from the code under test."""
    model.train().to(memory_format=torch.channels_last)
    images = torch.randint(0, 255, (config['batch_size'], 3, 64, 64), dtype=torch.uint8)
    target = torch.randint(0, 2, (config['batch_size'], 64, 64))
    known = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with torch.autocast('cpu', dtype=getattr(torch, dtype), enabled=dtype != 'float32'):
            logits = model(images)
        tu.SegmentationLoss(config).losses(logits.float(), target).sum()
    return sum(s.nbytes() for pointer, s in storages.items() if pointer not in known)


@pytest.mark.parametrize('network, dtype', [
    ({}, 'float32'), ({}, 'bfloat16'), ({'architecture': 'FPN'}, 'bfloat16'), ({'encoder': 'mobilenet_v2'}, 'float32'),
    ({'architecture': 'Segformer'}, 'bfloat16')], ids=str)
def test_estimated_activations_are_those_of_a_real_step(network, dtype):
    config = settled(**network)
    estimate, model = tu.estimate_memory(config, dtype), tu.build_model(config)
    assert estimate['activations'] == pytest.approx(really_saved(model, config, dtype), rel=0.1)
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert estimate['weights'] == estimate['gradients'] == weights and estimate['optimizer states'] == 2 * weights


def test_measured_parts_are_those_of_the_estimate(small_set):
    """Real tensors of a real step: every part within 10 % of what was estimated without allocating."""
    train_data, config = dataset(small_set)
    tu.settle_statistics(config, train_data)
    state = fresh(config, tu.build_model(config))
    window = [tu.collate([train_data[index] for index in range(config['batch_size'])])]
    loss_fn = tu.SegmentationLoss(config)
    tu.guarded_step(state, window, loss_fn, config)
    measured = tu.measure_memory(state, window[0], loss_fn)
    estimated = tu.estimate_memory(config, 'float32')
    for part in ('weights', 'gradients', 'optimizer states', 'averaged weights', 'activations'):
        assert measured[part] == pytest.approx(estimated[part], rel=0.1) and measured[part] > 1e5


@pytest.mark.parametrize('optimizer, momentum', [('SGD', 0.0), ('SGD', 0.9), ('RMSprop', 0.9), ('Adagrad', 0.9),
                                                 ('ASGD', 0.9), ('AdamW', 0.9), ('Rprop', 0.9)])
def test_the_estimate_knows_what_each_optimizer_keeps(monkeypatch, optimizer, momentum):
    monkeypatch.setattr(tu, 'saved_bytes', lambda *_: (0, 0))          # of activations
    config = settled(optimizer=optimizer, momentum=momentum, learning_rate=0.01, ema_decay=None, loss='ce+dice')
    parts = tu.estimate_memory(config, 'float32')
    model = tu.build_model(config)
    made = tu.build_optimizer(model, config, torch.device('cpu'))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    kept = sum(t.numel() * t.element_size() for state in made.state.values() for t in state.values()
               if torch.is_tensor(t) and t.numel() > 1)
    assert abs(parts['optimizer states'] - kept) < 0.05 * parts['weights']


def test_checkpointing_lowers_the_estimate():
    plain, lean = (tu.estimate_memory(settled(activation_checkpointing=on), 'float32')['activations']
                   for on in (False, True))
    assert lean < 0.7 * plain


def test_memory_is_estimated_for_networks_that_fake_tensors_cannot_build():
    parts = tu.estimate_memory(settled(encoder='mit_b0'), 'float32')
    assert parts['activations'] > parts['weights'] / 4 > 0


def test_the_estimate_leaves_the_random_numbers_of_gpus_alone(monkeypatch):
    """Under fake tensors torch 2.6 cannot put them back."""
    def refuse(*_):
        raise AssertionError('Please convert all Tensors to FakeTensors first')
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'get_rng_state', refuse)
    assert tu.estimate_memory(settled(), 'float32')['activations'] > 0


# --- check ----------------------------------------------------------------------------


def test_check_says_what_training_would_use(small_set, capsys):
    assert tu.check(**TINY, data=str(small_set)) == 0
    printed = capsys.readouterr().out
    for words in ('12 pairs (10 train, 2 val)', '255 -> 1 foreground', 'memory of one step',
                  'Mixed precision: off (float32), because use_amp=False', 'images/s', 'ready: python',
                  'first batch: image (4, 3, 32, 32) torch.uint8'):
        assert words in printed
    assert printed.index('settings:') < printed.index('12 pairs') < printed.index('ready: python')     # seen last
    page = np.array(PIL.Image.open('runs/check/samples.png'))
    assert (page == tu.INVENTED).all(-1).sum() > 1000                  # the outlines of the masks


def test_check_draws_the_batch_that_training_would(small_set, capsys):
    """Where few images show foreground, more of the first batch do."""
    for path in sorted((small_set / 'masks').iterdir())[:-1]:
        save(path, np.zeros((40, 40)))
    assert tu.check(**TINY, data=str(small_set), val_fraction=0.0, oversample_foreground=1.0, seed=0) == 0
    assert 'with the classes [0, 1]' in capsys.readouterr().out
    page = np.array(PIL.Image.open('runs/check/samples.png'))
    assert (page == tu.INVENTED).all(-1).sum() > 500                   # outlines in all four


def test_what_resizing_costs_the_masks_is_told_before_and_after_a_training(tmp_path, monkeypatch, capsys, caplog):
    """A block of 16 x 16 survives at half the size, 64 single pixels do not: 256 of 320 are what can be found."""
    monkeypatch.chdir(tmp_path)
    for n in range(6):
        mask = np.zeros((64, 64))
        mask[32:48, 4 * n:4 * n + 16] = 255
        mask[:32:4, :32:4] = 255
        save(tmp_path / f'set/masks/{n}.png', mask)
        save(tmp_path / f'set/images/{n}.png', mask / 2 + n)
    words = ['data=set', *as_words(TINY | {'image_size': 32, 'num_epochs': 1})]
    told = 'resized to 32 x 32 the masks themselves would score IoU 0.800; a larger image_size'
    for command in (['check', *words], words + ['run_dir=run'], ['evaluate', 'run']):
        caplog.clear()
        assert tu.main(command) == 0
        line, = [record for record in caplog.records if told in record.message]
        assert line.levelname == 'WARNING'
    told = (tu.Path('run') / 'log.txt').read_text()
    for line in ('settings: data=', 'image_size="[32, 32]"', 'Network: Unet with tu-test_five_convs, '):
        assert line in told
    caplog.clear()
    assert tu.main(['check', *words, 'size_policy=crop']) == 0
    assert tu.main(['check', *words, 'image_size=64']) == 0
    assert 'the masks themselves' not in caplog.text


@pytest.mark.parametrize('sizes, processes, told', [
    ((8, 1), 1, '8 images at once x 1 = effective batch 8\n'),
    ((4, 2), 1, '4 images at once x 2 = effective batch 8\n'),
    ((8, 1), 4, '2 images at once x 1 x 4 processes = effective batch 8\n'),
    ((4, 3), 2, '3 images at once x 2 x 2 processes = effective batch 12, more than the 10 training images: these')])
def test_the_batch_is_told_as_each_process_takes_it(small_set, monkeypatch, caplog, sizes, processes, told):
    caplog.set_level('INFO')
    config, data = inspect(small_set, batch_size=sizes[0], accumulation_steps=sizes[1])
    monkeypatch.setattr(tu, 'world', lambda: tu.World(0, processes))
    tu.tell_data(data, config, dict.fromkeys(config, 'default'), {})
    assert f'batch: {told}' in caplog.text


def test_ignored_pixels_cost_the_masks_nothing(tmp_path, monkeypatch, caplog):
    """A rim around each object, as of VOC: what resizing mixes into it is not scored."""
    monkeypatch.chdir(tmp_path)
    mask = np.zeros((64, 64))
    mask[17:47, 17:47], mask[21:43, 21:43] = 255, 1
    for n in range(6):
        save(tmp_path / f'set/masks/{n}.png', mask)
        save(tmp_path / f'set/images/{n}.png', mask / 2 + n)
    assert tu.main(['check', 'data=set', *as_words(TINY | {'image_size': 32})]) == 0
    assert 'the masks themselves' not in caplog.text


def test_check_tells_a_step_that_memory_does_not_hold(small_set, capsys, monkeypatch):
    """For the images there are, not for all that batch_size allows."""
    assert tu.check(**{**TINY, 'data': str(small_set), 'batch_size': 65536}) == 0
    assert 'more than is there' not in capsys.readouterr().out
    monkeypatch.setattr(tu, 'free_memory', lambda: 2**20)
    assert tu.check(**TINY, data=str(small_set)) == 0
    assert 'Note: that is more than is there: ' in capsys.readouterr().out


def test_check_of_a_run_looks_at_its_data_and_settings(own, two, capsys):
    assert tu.main(['check', f'resume={own}', 'num_epochs=9']) == 0
    printed = capsys.readouterr().out
    assert f'data                        {str(two[1])!r}' in printed and "'tu-test_five_convs'" in printed
    assert tu.main(['tune', f'resume={own}']) == 2
    assert 'tune has no use for it' in capsys.readouterr().err
    with pytest.raises(tu.ConfigError, match='resume=.*: tune has no use for it'):
        tu.tune(resume=str(own))


@pytest.mark.parametrize('seconds', ['3', 0, -1, None, True, float('nan')])
def test_tune_wants_a_number_of_seconds(seconds):
    with pytest.raises(tu.ConfigError, match='seconds=.*: must be a number above 0'):
        tu.tune(seconds=seconds)


@pytest.mark.parametrize('run_dir', ['file', 'file/run', 'file/deeper/run'])
def test_check_is_not_ready_where_a_run_cannot_be_written(small_set, tmp_path, capsys, run_dir):
    (tmp_path / 'file').write_text('')
    for command in (['check'], []):
        assert tu.main([*command, f'data={small_set}', f'run_dir={run_dir}', *WORDS]) == 2
        assert 'cannot be written' in capsys.readouterr().err
    assert not (tmp_path / 'runs').exists()


def test_very_large_networks_are_warned_of_float16(small_set, caplog, monkeypatch):
    monkeypatch.setattr(tu, 'VERY_LARGE', 1000)
    typed = {**TINY, 'data': str(small_set), 'use_amp': True, 'amp_dtype': 'float16', 'num_epochs': 1}
    for command in (tu.check, tu.train):
        caplog.clear()
        command(**typed)
        assert caplog.text.count('million parameters: activations of very large networks overflow') == 1


def test_check_and_tune_tell_of_a_batch_that_batchnorm_refuses(small_set, capsys):
    for command in ('check', 'tune'):
        assert tu.main([command, f'data={small_set}', *as_words(TINY | {'batch_size': 1})]) == 2
        assert 'type batch_size=2 or more' in capsys.readouterr().err


@pytest.mark.parametrize('command', [tu.check, functools.partial(tu.tune, seconds=0.1)], ids=['check', 'tune'])
def test_what_a_notebook_has_set_changes_no_check_and_no_tune_and_stays(command, small_set, monkeypatch):
    """Without gradients tune ended in a RuntimeError of torch; by float64 check asked for another image_size."""
    monkeypatch.setattr(nn.Module, 'compile', lambda self: (_ for _ in ()).throw(RuntimeError('no compiler')))
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', False)

    def state():
        return (torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
                torch.backends.cudnn.benchmark, torch.get_rng_state().tolist(), random.getstate(),
                getattr(torch._inductor.config, 'deterministic', None))

    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            before = state()
            assert command(**TINY, data=str(small_set)) == 0
            assert state() == before
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


# --- tune: what it measures and recommends --------------------------------------------


def test_tune_prints_a_table_and_writes_a_preset_that_trains(small_set, capsys, monkeypatch):
    """On a CPU without 16-bit units it measures float32 only, and says so."""
    monkeypatch.setattr(tu, 'cpu_units', frozenset)
    monkeypatch.setattr(nn.Module, 'compile', lambda self: (_ for _ in ()).throw(RuntimeError('no compiler')))
    overrides = {**TINY, 'data': str(small_set), 'image_size': np.array([32, 32])}
    del overrides['use_amp']
    assert tu.tune(seconds=0.1, **overrides) == 0
    printed = capsys.readouterr().out
    assert 'not measured: bfloat16' in printed and 'no compiler' in printed
    line = re.search(r'use it with:  \S+ \S*train_unet.py (.*)', printed)[1]
    assert tu.parse_command(shlex.split(line)).overrides['image_size'] == [32, 32]
    speeds = re.findall(r'^float32\S*.*?(\d+\.\d) +(\d+\.\d\d)x', printed, re.MULTILINE)
    assert len(speeds) == 2 and speeds[0][1] == '1.00'
    assert re.search(r'largest batch_size that fits .*: \d+ \(estimated\)', printed)
    preset = tu.load_preset('runs/tuned.py')
    assert preset['use_amp'] is False and preset['compile_model'] is False
    result = tu.train('runs/tuned.py', **{**overrides, 'num_epochs': 1})
    assert result.best['iou'] >= 0


def uncompiled(model):
    """Stands for nn.Module.compile, and takes no time."""
    model._compiled_call_impl = model._call_impl


def test_tune_recommends_what_is_safe_and_pays_back(small_set, capsys, monkeypatch):
    """float16 would be fastest, but overflows; compiling takes 100 s and saves half a second in each of the two steps
    of an epoch, so it pays back after 100."""
    build, waits, states = tu.build_model, iter([100.0]), {}

    def overflowing(*args):
        model = build(*args)
        model.network.segmentation_head[0].weight.data.mul_(1e6)
        return model

    def seconds(candidate, *_):
        states[candidate.name] = id(candidate.state.model), candidate.state.scaler.is_enabled()
        took = {'float32': 2.0, 'bfloat16': 1.5, 'float16': 0.5}[candidate.dtype] - 0.1 * candidate.channels_last
        return next(waits, took - 0.5) if candidate.compiled else took

    monkeypatch.setattr(tu, 'build_model', overflowing)
    monkeypatch.setattr(tu, 'timed_step', seconds)
    monkeypatch.setattr(tu, 'cpu_units', lambda: frozenset({'bfloat16', 'float16'}))
    monkeypatch.setattr(nn.Module, 'compile', uncompiled)
    typed = {key: value for key, value in TINY.items() if key != 'use_amp'}
    settings = typed | {'data': str(small_set), 'num_epochs': 50, 'init_scale': 1.0}   # float16 is slow on a CPU
    assert tu.tune(seconds=0.1, augment='none', **settings) == 0       # jittered images bring bfloat16's cosine near 0.9
    printed, preset = capsys.readouterr().out, tu.load_preset('runs/tuned.py')
    assert (preset['use_amp'], preset['amp_dtype'], preset['compile_model']) == (True, 'bfloat16', False)
    assert len({states[name][0] for name in states if 'compiled' not in name}) == 2     # what a card must hold
    assert [name for name in states if 'compiled' in name] == [f'{name}, compiled' for name in (
        'bfloat16, channels_last', 'bfloat16', 'float32, channels_last', 'float32')]    # likely winners first
    assert {name for name, (_, scales) in states.items() if scales} == {'float16', 'float16, channels_last'}
    assert 'float16 is unsafe here: network.segmentation_head.0 reaches' in printed
    assert 'refuted here: preset older_gpu asks for float16' in printed
    assert 'compiling took 100 s and pays back after 100 epochs of 10 images' in printed
    assert 'refuted here: preset fast asks for compile; it does not pay back within your 50 epochs' in printed
    state = SimpleNamespace()
    best = tu.Candidate('bfloat16', 'high', True, state, seconds=[1.5])
    compiled = tu.Candidate('bfloat16', 'high', True, state, True, [1.0], compile_seconds=100)
    for epochs, winner in (50, best), (200, compiled):
        assert tu.pick_winner(best, compiled, {'num_epochs': epochs, 'progressive_resizing': 0.0}, 10, 5) is winner
    candidate = lambda dtype, seconds: tu.Candidate(dtype, 'high', True, None, seconds=[seconds])
    assert candidate('bfloat16', 1.0).cost < candidate('float16', 0.98).cost < candidate('bfloat16', 1.02).cost
    slower = tu.Candidate('float32', 'highest', True, state, True, [1.8], compile_seconds=10)
    assert tu.pick_winner(best, slower, {'num_epochs': 1000, 'progressive_resizing': 0.0}, 10, 5) is best
    hardly = tu.Candidate('bfloat16', 'high', True, state, True, [1.4], compile_seconds=1)     # at equal sizes
    clearly = tu.Candidate('bfloat16', 'high', True, state, True, [1.3], compile_seconds=1)
    for one, share, winner in ((hardly, 0.0, hardly), (hardly, 0.18, best), (clearly, 0.18, clearly)):
        assert tu.pick_winner(best, one, {'num_epochs': 1000, 'progressive_resizing': share}, 10, 5) is winner


def test_the_line_that_tune_prints_can_be_typed(capsys):
    """A value with a space is quoted; what the preset file settles is not repeated, under no name."""
    best = tu.Candidate('float32', 'high', True, None, seconds=[1.0])
    hardware = SimpleNamespace(name='a CPU', kind='cpu', memory=2**30)
    typed = {'data': 'my set', 'num_epochs': 3, 'lr': 0.01, 'use_amp': True, 'amp_dtype': 'float16',
             'compile': True, 'tf32_matmul_precision': 'highest', 'channels_last': False,
             'decoder_channels': [16, 12, 8, 8, 8]}
    tu.write_winner(best, hardware, 2, {'loss': 'dice', 'use_amp': True}, typed)
    line = re.search(r'use it with:  \S+ \S*train_unet.py (.*)', capsys.readouterr().out)[1]
    command = tu.parse_command(shlex.split(line))
    assert command.overrides == {'learning_rate': 0.01} | {key: typed[key] for key in ('data', 'num_epochs',
                                                                                     'decoder_channels')}
    preset = tu.load_preset(command.preset)
    assert preset == {'loss': 'dice', 'use_amp': False, 'amp_dtype': 'auto', 'tf32_matmul_precision': 'high',
                      'channels_last': True, 'compile_model': False}


def test_tune_watches_how_long_steps_wait_for_data(small_set, capsys, monkeypatch):
    """Reading an image takes a tenth of a second here, a step next to nothing."""
    read = tu.SegmentationDataset.read
    slowly = lambda self, index: time.sleep(0.1) or read(self, index)
    monkeypatch.setattr(tu.SegmentationDataset, 'read', slowly)
    monkeypatch.setattr(tu, 'cpu_units', frozenset)
    monkeypatch.setattr(nn.Module, 'compile', lambda self: (_ for _ in ()).throw(RuntimeError('no compiler')))
    shares = []
    for cache in (False, True):
        settings = {**TINY, 'data': str(small_set), 'cache_images': cache, 'num_workers': 0}
        assert tu.tune(seconds=0.1, **settings) == 0
        shares += re.findall(r'waiting for data: (\S+)% of the time of 2 steps in float32', capsys.readouterr().out)
    assert float(shares[0]) > max(10, 2 * float(shares[1]))
    broken = lambda *_: (_ for _ in ()).throw(tu.DataError('x.png: cannot be read'))
    os.remove('runs/tuned.py')

    def measured(candidates, *_):
        for candidate in candidates:
            candidate.seconds.append(1.0)
        monkeypatch.setattr(tu.SegmentationDataset, 'read', broken)

    monkeypatch.setattr(tu, 'measure_rounds', measured)
    with pytest.raises(tu.DataError):                                  # a file breaks while it watches
        tu.tune(seconds=0.1, **{**settings, 'cache_images': False})
    assert tu.load_preset('runs/tuned.py')['use_amp'] is False


def test_tune_compares_what_the_same_rounds_have_measured(small_set, capsys, monkeypatch):
    """The machine is four times as slow once the compiler has run: that is not to look like the compiler's work."""
    seen = []

    def has_compiled():
        seen.append(capsys.readouterr().out)
        return 'compiling' in ''.join(seen)

    monkeypatch.setattr(tu, 'cpu_units', frozenset)
    monkeypatch.setattr(tu, 'timed_step', lambda *_: 4.0 if has_compiled() else 1.0)
    monkeypatch.setattr(nn.Module, 'compile', uncompiled)
    assert tu.tune(seconds=0.1, **{**TINY, 'data': str(small_set), 'num_workers': 0}) == 0
    table = ''.join(seen).rpartition('against')[2] + capsys.readouterr().out
    assert set(re.findall(r'^float32.*?([\d.]+)x', table, re.MULTILINE)) == {'1.00'} and 'compiled' in table


# --- tune: which precision is safe ----------------------------------------------------


def test_float16_is_called_unsafe_with_the_layer(small_set):
    """A layer scaled by 1e5 would overflow float16: tune names it and does not recommend the dtype."""
    torch.manual_seed(0)                                               # of other weights the signs may cancel
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 1, 1))
    model[1].weight.data.fill_(1e5)
    model[2].weight.data.fill_(1e-6)
    batch = {'image': torch.ones(2, 3, 8, 8), 'mask': torch.zeros(2, 8, 8, dtype=torch.uint8)}
    loss_fn = tu.SegmentationLoss(settled())
    numbers = tu.examine_numbers(model, settled(), loss_fn, ['bfloat16'], batch)
    assert 'float16 is unsafe here: 1 reaches' in tu.judge("float16", numbers)
    cosine, ratio = numbers['gradients']['bfloat16']
    assert 0.9 < cosine <= 1.0001 and 0.8 < ratio < 1.2


class Block(nn.Module):
    """Its product with 1e6 is no layer of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, images):
        return self.conv(images) * 1e6


@pytest.mark.parametrize('how', ['after a layer', 'before a layer'])
def test_an_overflow_between_two_layers_is_seen(how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))
    if how == 'after a layer':
        model[0].register_forward_hook(lambda module, inputs, output: output * 1e6)
    else:
        model[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1e6,))
    loss_fn = lambda model, batch: model(batch['image']).square().mean((1, 2, 3))
    numbers = tu.examine_numbers(model, settled(), loss_fn, [], {'image': torch.rand(4, 3, 8, 8)})
    assert numbers['layer'] == ('0' if how == 'after a layer' else 'the input of 1')
    assert 'float16 is unsafe here' in tu.judge('float16', numbers)


class Gate(nn.Module):
    def forward(self, images, where, places):
        return images * where


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 1, 1), Gate()

    def forward(self, images):
        return self.gate(self.conv(images), images[:, :1] > 0.5, torch.tensor([70_000]))


def test_numbers_of_places_overflow_nothing():
    loss_fn = lambda model, batch: model(batch['image']).square().mean((1, 2, 3))
    numbers = tu.examine_numbers(Gated(), settled(), loss_fn, [], {'image': torch.rand(4, 3, 8, 8)})
    assert numbers['peak'] < 100


@pytest.mark.parametrize('kept', [None, 'segmentation_head'])
def test_what_float32_takes_in_cannot_overflow_float16(kept):
    torch.manual_seed(0)
    config = settled(encoder='tu-test_resnet', keep_float32=kept)
    model = tu.build_model(config)
    head = next(module for module in model.network.segmentation_head.modules() if isinstance(module, nn.Conv2d))
    head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1e6,))
    head.weight.data.mul_(1e-6)
    batch = {'image': torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8),
             'mask': torch.zeros(2, 64, 64, dtype=torch.uint8)}
    numbers = tu.examine_numbers(model, config, tu.SegmentationLoss(config), [], batch)
    assert bool(tu.judge('float16', numbers)) == (kept is None), numbers


def test_an_overflow_in_a_block_is_seen_that_no_layer_of_it_shows():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))
    loss_fn = lambda model, batch: model(batch['image']).square().mean((1, 2, 3))
    numbers = tu.examine_numbers(model, settled(), loss_fn, [], {'image': torch.rand(4, 3, 8, 8)})
    assert numbers['layer'] == '0' and 'float16 is unsafe here' in tu.judge('float16', numbers)


@pytest.mark.parametrize('kept', [None, 'segmentation_head'])
def test_what_is_kept_in_float32_cannot_overflow_float16(kept):
    torch.manual_seed(0)
    config = settled(encoder='tu-test_resnet', keep_float32=kept, init_scale=1.0)      # float16 is slow on a CPU
    model = tu.build_model(config)
    model.network.segmentation_head[0].weight.data.mul_(1e6)
    batch = {'image': torch.randint(0, 255, (2, 3, 64, 64), dtype=torch.uint8),
             'mask': torch.zeros(2, 64, 64, dtype=torch.uint8)}
    numbers = tu.examine_numbers(model, config, tu.SegmentationLoss(config), ['float16'], batch)
    assert bool(tu.judge('float16', numbers)) == (kept is None)


def test_dropout_does_not_make_a_precision_look_unsafe():
    config = settled(architecture='FPN', encoder='tu-test_resnet', num_classes=2)
    loss_fn = tu.SegmentationLoss(config)
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    batch = {'image': images, 'mask': (images[:, 0] > 127).to(torch.uint8)}
    numbers = tu.examine_numbers(tu.build_model(config), config, loss_fn, ['bfloat16'], batch)
    assert numbers['gradients']['bfloat16'][0] > 0.95


def test_tune_refuses_a_gradient_that_points_elsewhere():
    gradients = {'bfloat16': (0.5, 1.0), 'float16': (0.99, 1.0)}
    numbers = {'peak': 1.0, 'layer': 'a', 'lost': 0.0, 'gradients': gradients}
    assert 'cosine of 0.500' in tu.judge('bfloat16', numbers)
    assert tu.judge('float16', numbers) == tu.judge('float32', numbers) == ''
    assert 'gradient is not finite' in tu.judge('bfloat16', numbers | {'gradients': {'bfloat16': (math.nan, math.nan)}})


# --- tune: want of memory and time ----------------------------------------------------


def test_tune_measures_with_half_the_batch_where_memory_does_not_suffice(small_set, capsys, monkeypatch):
    """A forward pass of more than four images raises what torch raises; a training would halve its batch too."""
    forward = tu.SegmentationModel.forward

    def limited(self, images):
        if len(images) > 4:
            raise torch.OutOfMemoryError('CUDA out of memory.')
        return forward(self, images)

    monkeypatch.setattr(tu.SegmentationModel, 'forward', limited)
    monkeypatch.setattr(tu, 'cpu_units', frozenset)
    monkeypatch.setattr(nn.Module, 'compile', lambda self: (_ for _ in ()).throw(RuntimeError('no compiler')))
    monkeypatch.setattr(tu, 'estimate_memory', lambda config, dtype: {'all': config['batch_size'] * 2**30})
    assert tu.tune(seconds=0.1, **{**TINY, 'batch_size': 8, 'data': str(small_set)}) == 0
    printed = capsys.readouterr().out
    assert 'batch_size 8 -> 4, effective batch unchanged' in printed and 'estimated: all 4096' in printed
    assert tu.load_preset('runs/tuned.py')['use_amp'] is False


@pytest.mark.parametrize('error', [torch.OutOfMemoryError('CUDA out of memory'), MemoryError('Unable to allocate')])
def test_memory_that_ends_outside_of_a_step_is_told_in_words(small_set, capsys, monkeypatch, error):
    def full(model, *_):
        raise error

    monkeypatch.setattr(tu.SegmentationModel, 'to', full)
    assert tu.main(['tune', f'data={small_set}', *WORDS]) == 2
    assert 'one image at a time does not fit into memory either' in capsys.readouterr().err


def test_tune_begins_no_compiling_when_its_time_is_over(small_set, capsys, monkeypatch):
    monkeypatch.setattr(tu, 'cpu_units', frozenset)
    monkeypatch.setattr(tu, 'COMPILE_SECONDS', {'cpu': 0.5})
    monkeypatch.setattr(nn.Module, 'compile', lambda self: time.sleep(1))
    assert tu.tune(seconds=0.1, **TINY, data=str(small_set)) == 0
    printed = capsys.readouterr().out
    assert printed.count('compiling float32') == 1 and 'not compiled, for want of time: float32' in printed
    assert tu.load_preset('runs/tuned.py')['compile_model'] is False


def test_ctrl_c_ends_tune_while_it_compiles(small_set, monkeypatch):
    monkeypatch.setattr(tu, 'cpu_units', frozenset)
    monkeypatch.setattr(nn.Module, 'compile', lambda self: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background deaf
    try:
        with pytest.raises(KeyboardInterrupt):
            tu.tune(seconds=0.1, **TINY, data=str(small_set))
    finally:
        signal.signal(signal.SIGINT, before)


def test_check_calls_no_run_ready_whose_network_or_loss_is_ones_own(small_set, capsys):
    how = TINY | {'num_epochs': 1, 'data': str(small_set)}
    tu.train(model=torch.nn.Conv2d(3, 1, 1), run_dir='net', **how)
    tu.train(loss_fn=lambda model, batch: model(batch['image']).square().mean((1, 2, 3)), run_dir='loss', **how)
    capsys.readouterr()
    for run in ('net', 'loss'):
        assert tu.main(['check', f'resume={run}', 'num_epochs=3']) == 2
        told = capsys.readouterr()
        assert 'go on from Python' in told.err and 'ready: ' not in told.out


def test_check_with_resume_auto_goes_on_with_the_run_that_it_finds(small_set, two, capsys):
    """It forgot that it resumes: an own network was ready, and the run of initial_weights was wanted again."""
    how = TINY | {'num_epochs': 1, 'data': str(small_set)}
    tu.train(model=torch.nn.Conv2d(3, 1, 1), run_dir='net', **how)
    tu.train(initial_weights=shutil.copytree(two[0], 'first'), run_dir='second', **how)
    shutil.rmtree('first')
    capsys.readouterr()
    assert tu.main(['check', 'resume=auto', 'run_dir=net', 'num_epochs=3']) == 2
    told = capsys.readouterr()
    assert 'go on from Python' in told.err and 'ready: ' not in told.out
    assert tu.main(['check', 'resume=auto', 'run_dir=second', 'num_epochs=3']) == 0
    assert re.search('^  encoder .* the run$', capsys.readouterr().out, re.MULTILINE)


def test_check_is_not_ready_for_fewer_epochs_than_are_done(own, capsys):
    assert tu.main(['check', f'resume={own}', 'num_epochs=1']) == 2
    assert 'num_epochs=1: 6 are done already' in capsys.readouterr().err


def test_the_line_of_check_can_be_typed_whatever_python_gave(small_set, capsys):
    assert tu.check(**TINY | {'image_size': np.array([32, 32]), 'mean': [np.float64(90)] * 3}, data=small_set,
                    std=torch.tensor([50.0] * 3), amp_dtype=torch.bfloat16) == 0
    line = re.search(r'ready: \S+ \S*train_unet.py (.*)', capsys.readouterr().out)[1]
    typed = tu.parse_command(shlex.split(line)).overrides
    assert [typed[key] for key in ('image_size', 'mean', 'std', 'amp_dtype')] == [
        [32, 32], [90.0] * 3, [50.0] * 3, 'bfloat16']
