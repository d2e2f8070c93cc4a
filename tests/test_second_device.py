"""The whole program on a device that is no CPU, without a GPU: the CPU computes, but mixing the tensors of both raises.

It is built from second_device.cpp (a minute), with a C++ compiler and ninja.
Run: python -m pytest tests -m device
"""
import shutil
import types

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, as_words, draw_set

import train_unet as tu

pytestmark = [pytest.mark.device,
              pytest.mark.skipif(torch.__version__ < (2, 15), reason='written against the headers of torch 2.15'),
              pytest.mark.skipif(not shutil.which('c++') or not shutil.which('ninja'),
                                 reason='no C++ compiler, or no ninja')]
ON_GPU = {**TINY, 'device': 'auto', 'use_amp': 'auto'}


@pytest.fixture(scope='module')
def device():
    """The built device -> how often it has been waited for."""
    from torch.utils.cpp_extension import load
    built = load('second_device', [str(ROOT / 'tests/second_device.cpp')], extra_cflags=['-O1', '-w'])
    torch.utils.rename_privateuse1_backend('gpu')
    module = types.ModuleType('torch.gpu')
    answers = {'is_available': True, 'is_initialized': True, 'device_count': 1, 'current_device': 0,
               'synchronize': None, '_is_in_bad_fork': False, 'manual_seed_all': None,
               'get_amp_supported_dtype': [torch.bfloat16, torch.float16]}
    for name, answer in answers.items():
        setattr(module, name, lambda *_, answer=answer: answer)
    module.get_rng_state, module.set_rng_state = lambda *_: torch.get_rng_state(), lambda *_: None
    torch._register_device_module('gpu', module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return built.waits


@pytest.fixture(autouse=True)
def machine(device, tmp_path, monkeypatch):
    """A machine whose first device is this one, and which says it is an A100."""
    real = tu.detect_hardware
    units = frozenset({'bfloat16', 'float16', 'tf32'})
    monkeypatch.setattr(tu, 'choose_device', lambda wish: torch.device('cpu' if wish == 'cpu' else 'gpu:0'))
    monkeypatch.setattr(tu, 'detect_hardware', lambda device: real(device) if device.type == 'cpu' else
                        tu.Hardware('cuda', 'A100', (8, 0), units, 80 << 30))
    draw_set(tmp_path / 'set')


def train(**settings):
    return tu.train(**{**ON_GPU, 'data': 'set', **settings})


def main(line):
    """The command line in this process -> exit code."""
    return tu.main(line.split() + (as_words(ON_GPU) if 'data=' in line else []))


def hooked(monkeypatch, spoil):
    """Every network trained from here on: spoil(number of the training forward pass, input, output) -> output."""
    real, passes = tu.build_model, []

    def build_model(*rest, **named):
        model = real(*rest, **named)
        model.register_forward_hook(lambda module, inputs, output: spoil(passes, inputs[0], output)
                                    if module.training and not passes.append(1) else output)
        return model

    monkeypatch.setattr(tu, 'build_model', build_model)


def test_the_device_refuses_to_mix():
    with pytest.raises(RuntimeError, match='two devices'):
        torch.ones(2, device='gpu') + torch.ones(2)


def test_the_losses_are_those_of_the_cpu():
    there, here = (train(use_amp=False, device=device).history for device in ('auto', 'cpu'))
    for name in ('train_loss', 'val_loss', 'val_iou'):
        assert [row[name] for row in there] == pytest.approx([row[name] for row in here], rel=0.01), name


@pytest.mark.parametrize('settings', [
    {'amp_dtype': 'float16'}, {'size_policy': 'crop', 'activation_checkpointing': True, 'num_workers': 2},
    {'class_weights': 'auto', 'loss': 'focal+dice', 'accumulation_steps': 2, 'optimizer': 'SGD'},
    {'ema_decay': None, 'augment': 'strong', 'cache_images': False}], ids=str)
def test_training_continues_where_it_was(settings):
    first = train(**settings)
    assert first.history[-1]['precision'] == settings.get('amp_dtype', 'bfloat16')
    again = tu.train(resume=first.run_dir, num_epochs=3)
    assert len(again.history) == 3 and np.isfinite(again.history[-1]['val_loss'])
    elsewhere = tu.train(resume=first.run_dir, num_epochs=4, device='cpu', use_amp=False)
    assert len(elsewhere.history) == 4 and np.isfinite(elsewhere.history[-1]['val_loss'])


def test_every_command(capsys):
    assert main('check data=set') == 0
    assert main('train data=set run_dir=run') == 0
    for line in ('evaluate run', 'predict run set/images -o out save=probability tta=True', 'export run format=smp'):
        assert main(line) == 0, capsys.readouterr().err
    assert 'bfloat16' in capsys.readouterr().out
    mask = tu.load('run').predict(torch.zeros(3, 40, 50, dtype=torch.uint8))
    assert mask.shape == (40, 50)


def test_out_of_memory_is_survived(monkeypatch, capsys):
    def spoil(passes, images, output):
        if len(passes) > 8 and len(images) > 2:
            raise torch.OutOfMemoryError('made by the test')
        return output
    hooked(monkeypatch, spoil)
    result = train(num_epochs=6)
    assert 'batch_size 4 -> 2' in capsys.readouterr().out and result.history[-1]['epoch'] == 6


def test_overflow_is_survived(monkeypatch, capsys):
    hooked(monkeypatch, lambda passes, images, output: output * torch.nan if 8 < len(passes) < 15 else output)
    result = train(num_epochs=6, amp_dtype='float16')
    assert 'float16 -> bfloat16' in capsys.readouterr().out
    assert result.history[-1]['precision'] == 'bfloat16' and np.isfinite(result.history[-1]['val_loss'])


def test_a_step_waits_once_where_no_optimizer_is_fused(device, tmp_path):
    counts = []
    for count in (10, 40):                                             # 2 and 8 steps
        draw_set(tmp_path / f'set{count}', count)
        before = device()
        train(data=f'set{count}', num_epochs=1)
        counts.append(device() - before)
    assert counts[1] - counts[0] == 8 - 2


@pytest.mark.parametrize('fault', [torch.OutOfMemoryError('made by the test'),
                                   RuntimeError('upsample_nearest_nhwc only supports grad_output tensors with less '
                                                'than INT_MAX elements, but got [256, 32, 512, 512]')],
                         ids=['full', 'index'])
def test_tune_tries_sizes_and_writes_its_preset_where_float16_wins(monkeypatch, capsys, fault):
    monkeypatch.setattr(tu, 'detect_hardware',
                        lambda device: tu.Hardware('cuda', 'T4', (7, 5), frozenset({'float16'}), 16 << 30))
    monkeypatch.setattr(tu, 'measure_rounds', lambda candidates, *_: [
        candidate.seconds.append(1 + (candidate.dtype != 'float16')) for candidate in candidates])
    monkeypatch.setattr(tu, 'compile_all', lambda *_: [])

    def spoil(passes, images, output):
        if len(images) >= 16:
            raise fault
        return output
    hooked(monkeypatch, spoil)
    sound = {'encoder': 'tu-test_resnet'}                              # whose gradient float16 keeps at this size
    assert tu.tune(seconds=1, **{**ON_GPU, 'data': 'set', 'batch_size': 2, **sound}) == 0
    out = capsys.readouterr().out
    assert 'largest batch_size that fits into 16 GiB: 8 (tried)' in out and 'best here: float16' in out
    assert tu.load_preset('runs/tuned.py')['amp_dtype'] == 'float16'
