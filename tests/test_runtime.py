"""Runtime: what the machine has, and the precision that follows from it.

Run: python -m pytest tests/test_runtime.py
"""
import ast
import contextlib
import itertools
import os
import platform
import re
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_unet
from conftest import FORKS
from helpers import dataset, in_threads, train
from train_unet import CONFIG, ConfigError, Hardware, apply_tf32, build_scaler, choose_device, cpu_units, cuda_units
from train_unet import detect_hardware, resolve_precision


def card(name, *capability):
    return Hardware('cuda', name, capability, cuda_units(name, capability), 8 * 2**30)


H100 = card('NVIDIA H100 80GB HBM3', 9, 0)
A100 = card('NVIDIA A100-SXM4-40GB', 8, 0)
RTX4090 = card('NVIDIA GeForce RTX 4090', 8, 9)
RTX2080 = card('NVIDIA GeForce RTX 2080 Ti', 7, 5)
V100 = card('Tesla V100-SXM2-16GB', 7, 0)
GTX1660 = card('NVIDIA GeForce GTX 1660 SUPER', 7, 5)
GTX1080 = card('NVIDIA GeForce GTX 1080', 6, 1)
MPS = Hardware('mps', 'Apple GPU', units=frozenset({'float16'}))
CPU_BF16 = Hardware('cpu', 'CPU with 16 threads', units=frozenset({'bfloat16'}))
CPU_AMX = Hardware('cpu', 'CPU with 16 threads', units=frozenset({'bfloat16', 'float16'}))
CPU_PLAIN = Hardware('cpu', 'CPU with 4 threads')
MACHINES = {'H100': H100, 'A100': A100, 'RTX 4090': RTX4090, 'RTX 2080 Ti': RTX2080, 'V100': V100,
            'GTX 1660': GTX1660, 'GTX 1080': GTX1080, 'MPS': MPS, 'CPU bf16': CPU_BF16,
            'CPU amx': CPU_AMX, 'CPU plain': CPU_PLAIN}


def decide(machine, typed=(), **wish):
    return resolve_precision({**CONFIG, **wish}, MACHINES.get(machine, machine), typed or wish)


# --- the precision: the table ---------------------------------------------------------


@pytest.mark.parametrize('machine, use_amp, amp_dtype, dtype, warning', [
    ('H100', 'auto', 'auto', 'bfloat16', None),
    ('A100', 'auto', 'auto', 'bfloat16', None),
    ('RTX 4090', 'auto', 'auto', 'bfloat16', None),
    ('RTX 2080 Ti', 'auto', 'auto', 'float16', None),
    ('V100', 'auto', 'auto', 'float16', None),
    ('GTX 1660', 'auto', 'auto', 'float32', None),
    ('GTX 1080', 'auto', 'auto', 'float32', None),
    ('MPS', 'auto', 'auto', 'float32', None),
    ('CPU bf16', 'auto', 'auto', 'bfloat16', None),
    ('CPU amx', 'auto', 'auto', 'bfloat16', None),
    ('CPU plain', 'auto', 'auto', 'float32', None),
    ('H100', True, 'auto', 'bfloat16', None),
    ('V100', True, 'auto', 'float16', None),
    ('GTX 1660', True, 'auto', 'float32', 'no units that make mixed precision faster; falling back to float32'),
    ('GTX 1080', True, 'auto', 'float32', 'no units that make mixed precision faster; falling back to float32'),
    ('MPS', True, 'auto', 'float16', None),
    ('CPU plain', True, 'auto', 'bfloat16', 'ten times slower'),
    ('H100', True, 'bfloat16', 'bfloat16', None),
    ('RTX 2080 Ti', True, 'bfloat16', 'float16', 'falling back to float16 with a gradient scaler'),
    ('V100', 'auto', 'bfloat16', 'float16', 'falling back to float16 with a gradient scaler'),
    ('MPS', True, 'bfloat16', 'float16', 'falling back to float16 with a gradient scaler'),
    ('GTX 1660', True, 'bfloat16', 'float32', 'falling back to float32'),
    ('GTX 1080', True, 'bfloat16', 'float32', 'falling back to float32'),
    ('CPU plain', True, 'bfloat16', 'bfloat16', 'no bfloat16 units'),
    ('H100', True, 'float16', 'float16', 'native bfloat16, which is as fast and cannot overflow'),
    ('RTX 4090', 'auto', 'float16', 'float16', 'native bfloat16'),
    ('V100', True, 'float16', 'float16', None),
    ('GTX 1660', True, 'float16', 'float32', 'falling back to float32'),
    ('GTX 1080', True, 'float16', 'float32', 'falling back to float32'),
    ('CPU bf16', True, 'float16', 'float16', 'no float16 units'),
    ('H100', False, 'auto', 'float32', None),
    ('H100', False, 'bfloat16', 'float32', 'no effect with use_amp=False'),
    ('CPU plain', False, 'float16', 'float32', 'no effect with use_amp=False'),
])
def test_decision(machine, use_amp, amp_dtype, dtype, warning):
    precision = decide(machine, use_amp=use_amp, amp_dtype=amp_dtype)
    assert precision.dtype == dtype
    assert len(precision.warnings) == (warning is not None)
    assert warning is None or warning in precision.warnings[0]


@pytest.mark.parametrize('name, capability, units', [
    ('Tesla T4', (7, 5), {'float16'}), ('Quadro RTX 4000', (7, 5), {'float16'}),
    ('NVIDIA T1000 8GB', (7, 5), set()), ('NVIDIA T400 4GB', (7, 5), set()),
    ('Quadro T2000 with Max-Q Design', (7, 5), set()), ('NVIDIA GeForce MX450', (7, 5), set()),
    ('NVIDIA GeForce GTX 1650', (7, 5), set()), ('NVIDIA GeForce GTX 1060 6GB', (6, 1), set()),
    ('Tesla P100-PCIE-16GB', (6, 0), set()), ('NVIDIA TITAN V', (7, 0), {'float16'}),
    ('NVIDIA GeForce RTX 3050', (8, 6), {'bfloat16', 'float16', 'tf32'}),
    ('NVIDIA B200', (10, 0), {'bfloat16', 'float16', 'tf32'}),
])
def test_units_of_cards(name, capability, units):
    assert cuda_units(name, capability) == units


def test_the_settings_of_a_precision_ask_for_it():
    hardware = train_unet.Hardware('cpu', 'a CPU', units=frozenset({'float16', 'bfloat16'}))
    for dtype in ('float32', 'bfloat16', 'float16'):
        config = {**train_unet.CONFIG, **train_unet.amp_settings(dtype)}
        assert train_unet.resolve_precision(config, hardware).dtype == dtype


# --- the precision: what holds for every wish on every machine ------------------------


GRID = list(itertools.product((True, False, 'auto'), ('auto', 'bfloat16', 'float16'), MACHINES))


def decisions(grid=GRID):
    """Each wish of the grid, and the precision that follows from it -> [((use_amp, amp_dtype, machine), Precision)]."""
    return [(wish, decide(wish[2], use_amp=wish[0], amp_dtype=wish[1])) for wish in grid]


def test_float16_and_nothing_else_is_scaled():
    for wish, precision in decisions():
        scaler = build_scaler(precision.dtype, CONFIG, torch.device('cpu'))
        assert scaler.is_enabled() == (precision.dtype == 'float16'), wish


def test_a_gpu_never_gets_a_dtype_without_units():
    for wish, precision in decisions([wish for wish in GRID if not wish[2].startswith('CPU')]):
        assert precision.dtype in MACHINES[wish[2]].units | {'float32'}, wish


def test_every_wish_that_is_not_met_is_warned_about():
    for (use_amp, amp_dtype, machine), precision in decisions():
        other = amp_dtype not in ('auto', precision.dtype)
        off = use_amp is True and precision.dtype == 'float32'
        slow = precision.dtype not in MACHINES[machine].units | {'float32'}
        told = any(f'amp_dtype={amp_dtype}' in w.replace("'", '') or f'use_amp={use_amp}' in w
                   for w in precision.warnings)
        assert told or not (other or off or slow), (use_amp, amp_dtype, machine)


def test_use_amp_false_is_always_float32():
    for wish, precision in decisions([wish for wish in GRID if wish[0] is False]):
        assert precision.dtype == 'float32', wish


def test_every_decision_has_a_reason():
    for wish, precision in decisions():
        names = 'use_amp', 'amp_dtype', MACHINES[wish[2]].name
        assert any(name in precision.reason for name in names), wish


@pytest.mark.parametrize('machine', MACHINES)
def test_the_defaults_warn_of_nothing(machine):
    assert resolve_precision(CONFIG, MACHINES[machine], typed=()).warnings == ()


# --- the precision: settings without effect, or with an unexpected one ----------------


@pytest.mark.parametrize('machine, settings, warning', [
    ('A100', {'tf32_matmul_precision': 'high'}, 'next to no effect under bfloat16 autocast'),
    ('A100', {'tf32_matmul_precision': 'highest'}, None),
    ('A100', {'tf32_matmul_precision': None}, None),
    ('A100', {'tf32_matmul_precision': 'high', 'use_amp': False}, None),
    ('V100', {'tf32_matmul_precision': 'high'}, 'Tesla V100-SXM2-16GB has no TF32'),
    ('MPS', {'tf32_matmul_precision': 'medium'}, 'Apple GPU has no TF32'),
    ('CPU plain', {'tf32_matmul_precision': 'medium'}, 'has no TF32'),
    ('CPU bf16', {'tf32_matmul_precision': 'high', 'use_amp': False}, 'has no TF32'),
    ('CPU bf16', {'tf32_matmul_precision': 'medium', 'use_amp': False}, 'allows float32 matrix products in bf'),
    ('A100', {'init_scale': 1024.0}, 'init_scale: no effect, only float16 is scaled'),
    ('A100', {'growth_factor': 4.0, 'backoff_factor': 0.25, 'growth_interval': 10},
     'growth_factor, backoff_factor, growth_interval: no effect'),
    ('GTX 1080', {'growth_interval': 100}, 'this run uses float32'),
    ('V100', {'init_scale': 1024.0}, None),
    ('A100', {'momentum': 0.9}, 'momentum: no effect, only SGD is given it'),
    ('A100', {'momentum': 0.9, 'optimizer': 'sgd'}, None),
    ('A100', {'weight_decay': 0.1, 'optimizer': 'Rprop'}, 'weight_decay: no effect, Rprop finds the length'),
    ('A100', {'grad_clip': 0.5, 'optimizer': 'rprop'}, 'grad_clip: no effect'),
    ('A100', {'weight_decay': 0.1}, None),
    ('A100', {'keep_float32': 'segmentation_head', 'use_amp': False}, 'keep_float32: no effect'),
    ('A100', {'keep_float32': 'segmentation_head'}, None),
    ('A100', {'tf32_matmul_precision': 'high', 'keep_float32': 'encoder'}, None),
])
def test_typed_settings_without_effect_are_told(machine, settings, warning):
    warnings = decide(machine, **settings).warnings
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]


def test_a_config_that_was_edited_is_warned_about_too():
    """It names no key as typed: what differs from the delivered value is a wish."""
    config = {**CONFIG, 'tf32_matmul_precision': 'medium', 'init_scale': 2.0, 'architecture': 'FPN',
              'decoder_channels': [64, 32, 16, 8, 4]}
    said = '\n'.join(resolve_precision(config, A100, typed={'batch_size'}).warnings)
    assert said.count('no effect') == 3 and 'growth_factor' not in said
    assert resolve_precision(config, A100).warnings == ()              # a run that is used, not trained


def test_what_counts_as_delivered_is_what_config_says():
    assert train_unet.AS_DELIVERED.items() <= CONFIG.items()


@pytest.mark.parametrize('machine, parameters, warned', [
    ('V100', 200_000_001, True), ('V100', 200_000_000, False), ('A100', 10**9, False),
])
def test_float16_with_a_very_large_network_is_warned_about(caplog, machine, parameters, warned):
    network = torch.nn.Module()
    network.weight = torch.nn.Parameter(torch.empty(parameters, device='meta'))
    train_unet.warn_of_size(network, decide(machine))
    assert ('activations of very large networks' in caplog.text) == warned


def test_tf32_is_handed_on():
    assert decide('A100', tf32_matmul_precision='highest').tf32 == 'highest'


# --- what the hardware is -------------------------------------------------------------


def fake_card(monkeypatch, name, major, minor, hip=None, arch=''):
    seen = SimpleNamespace(name=name, major=major, minor=minor, total_memory=5 * 2**30, gcnArchName=arch)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: seen)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda including_emulation=True:
                        hip is not None or including_emulation)        # as torch answers
    monkeypatch.setattr(torch.version, 'hip', hip)


@pytest.mark.parametrize('name, major, minor, units', [
    ('Tesla T4', 7, 5, {'float16'}), ('NVIDIA GeForce GTX 1660 Ti', 7, 5, set()),
    ('NVIDIA A10G', 8, 6, {'bfloat16', 'float16', 'tf32'}),
])
def test_a_card_is_read_from_its_properties(monkeypatch, name, major, minor, units):
    fake_card(monkeypatch, name, major, minor)
    assert detect_hardware(torch.device('cuda:0')) == Hardware('cuda', name, (major, minor),
                                                               frozenset(units), 5 * 2**30)


def test_gloo_serves_gpus_where_there_is_no_nccl(monkeypatch):
    """As on Windows."""
    asked = []
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setattr(train_unet, 'choose_device', lambda wish: torch.device('cuda'))
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    monkeypatch.setattr(train_unet.dist, 'init_process_group', lambda backend, timeout: asked.append(backend))
    monkeypatch.setattr(train_unet.atexit, 'register', asked.append)
    for has_nccl, wanted in ((False, ['gloo', train_unet.leave_processes]), (True, ['cpu:gloo,cuda:nccl'])):
        asked.clear()
        monkeypatch.setattr(train_unet.dist, 'is_nccl_available', lambda: has_nccl)
        train_unet.join_processes({**train_unet.CONFIG, 'batch_size': 8, 'accumulation_steps': 1})
        assert asked == wanted


@pytest.mark.parametrize('arch, native', [
    ('gfx90a:sramecc+:xnack-', True), ('gfx942', True), ('gfx1100', True), ('gfx1201', True), ('gfx908', True),
    ('gfx1030', False), ('gfx1010', False), ('gfx906:sramecc+:xnack-', False), ('gfx90c', False)])
def test_amd_tells_native_bfloat16_by_its_architecture(monkeypatch, arch, native):
    fake_card(monkeypatch, 'AMD', 9, 0, hip='6.3', arch=arch)
    assert detect_hardware(torch.device('cuda')).units == ({'bfloat16', 'float16'} if native else {'float16'})


@pytest.mark.parametrize('version, units', [('2.6.0', set()), ('2.8.0', {'float16'})])   # the scaler wanted float64
def test_apple_has_float16(monkeypatch, version, units):
    monkeypatch.setattr(torch, '__version__', torch.torch_version.TorchVersion(version))
    monkeypatch.setattr(torch.mps, 'recommended_max_memory', lambda: 7 * 2**30)
    assert detect_hardware(torch.device('mps')) == Hardware(
        'mps', 'Apple GPU', units=frozenset(units), memory=7 * 2**30)


@pytest.mark.parametrize('capabilities, cpuinfo, units', [
    ({'avx512_bf16': True, 'avx2': True}, '', {'bfloat16'}),
    ({'amx_bf16': True, 'amx_fp16': True}, '', {'bfloat16', 'float16'}),
    ({'sve_bf16': True}, '', set()),                                   # of which oneDNN computes no gradients fast
    ({'avx512_bf16': False, 'avx2': True, 'l2_cache_size': 1}, '', set()),
    ({}, 'flags\t\t: fpu avx2 avx512_bf16 avx512_fp16\n', {'bfloat16'}),
    ({}, 'Features\t: asimd svebf16 bf16\n', set()),
    ({}, 'flags : avx512f no_bf16_at_all\n', set()),
    ({'amx_bf16': True}, None, {'bfloat16'}),
    ({}, None, set()),
])
def test_cpu_units_come_from_torch_and_cpuinfo(monkeypatch, capabilities, cpuinfo, units):
    def read(path, **_):
        if cpuinfo is None:
            raise FileNotFoundError(path)
        return cpuinfo
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: capabilities, raising=False)
    monkeypatch.setattr(train_unet.Path, 'read_text', read)
    assert cpu_units() == units


def test_units_that_nothing_would_use_do_not_count(monkeypatch):
    monkeypatch.setattr(torch.cpu, 'get_capabilities', lambda: {'avx512_bf16': True}, raising=False)
    assert 'bfloat16' in cpu_units()
    monkeypatch.setattr(torch.backends.mkldnn, 'is_available', lambda: False)
    assert cpu_units() == set()


def test_the_cpu_is_detected_with_its_units(monkeypatch):
    monkeypatch.setattr(train_unet, 'cpu_units', lambda: frozenset({'bfloat16'}))
    monkeypatch.setattr(train_unet, 'free_memory', lambda: 3 * 2**30)
    hardware = detect_hardware(torch.device('cpu'))
    assert (hardware.kind, hardware.units, hardware.memory) == ('cpu', {'bfloat16'}, 3 * 2**30)


# --- the device -----------------------------------------------------------------------


def fake_devices(monkeypatch, cuda, mps):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, 'is_available', lambda: mps)


@pytest.mark.parametrize('cuda, mps, wish, device', [
    (1, True, 'auto', 'cuda'), (0, True, 'auto', 'mps'), (0, False, 'auto', 'cpu'),
    (1, False, 'cpu', 'cpu'), (2, False, 'cuda:1', 'cuda:1'),
])
def test_the_device_is_the_wish_or_the_fastest(monkeypatch, cuda, mps, wish, device):
    fake_devices(monkeypatch, cuda, mps)
    assert choose_device(wish) == torch.device(device)


@pytest.mark.parametrize('cuda, wish, told', [
    (0, 'cuda', 'only cpu'), (0, 'mps', 'only cpu'), (2, 'cuda:2', 'only cuda:0, cuda:1, cpu'),
])
def test_a_device_that_is_not_there_is_a_config_error(monkeypatch, cuda, wish, told):
    fake_devices(monkeypatch, cuda, mps=False)
    with pytest.raises(ConfigError, match=told):
        choose_device(wish)


@pytest.mark.parametrize('fault, told', [
    ('CUDA error: no kernel image is available for execution on the device', 'no kernel image is available'),
    ('CUDA out of memory. Tried to allocate 2.00 MiB', 'if others hold its memory'),
    ('CUDA error: device-side assert triggered', 'cannot be used (RuntimeError: CUDA error: device-side')])
@pytest.mark.parametrize('use', ['prepare', 'load'])
def test_a_gpu_that_cannot_be_used_is_told(monkeypatch, tmp_path, use, fault, told):
    """A build for CUDA 13 knows no V100 any more, yet calls it available."""
    def refuse(*size, device=None, **named):
        if device is not None and torch.device(device).type == 'cuda':
            raise RuntimeError(fault)
        return zeros(*size, device=device, **named)

    zeros, chosen = torch.zeros, []
    model = train_unet.build_model({**CONFIG, 'encoder': 'tu-test_resnet', 'decoder_channels': [8] * 5, 'mean': [0.0],
                                    'std': [1.0], 'num_classes': 2, 'image_size': [32, 32]})
    train_unet.save_checkpoint(tmp_path / 'best.pt', train_unet.describe_model(model, model.config, model.state_dict()))
    fake_devices(monkeypatch, 2, False)                                # what is imported by now asks the real ones
    monkeypatch.setattr(torch, 'zeros', refuse)
    monkeypatch.setattr(torch.cuda, 'device', lambda device: chosen.append(device) or contextlib.nullcontext())
    config, sources, _ = train_unet.resolve_config(None, {'device': 'cuda:1'})
    with pytest.raises(train_unet.UserError, match=re.escape(told)) as caught:
        if use == 'prepare':
            train_unet.prepare(config, sources, choose_device('cuda:1'), own_data=True)
        else:
            train_unet.load(tmp_path, 'cuda:1')
    assert 'device=cuda:1' in str(caught.value) and 'type device=cpu' in str(caught.value)
    assert chosen == [torch.device('cuda:1')]


def test_a_gpu_that_cudnn_does_not_know_is_told_before_the_training(monkeypatch):
    """A GTX 1080: some builds of torch have kernels for it, but their cuDNN has none."""
    def refuse(*_):
        raise RuntimeError('cuDNN: no kernels for compute capability 6.1')

    zeros = torch.zeros
    monkeypatch.setattr(torch, 'zeros', lambda *size, device: zeros(*size))
    monkeypatch.setattr(torch.cuda, 'device', lambda device: contextlib.nullcontext())
    monkeypatch.setattr(train_unet, 'cpu_quota', torch.get_num_threads)
    train_unet.set_up_device(torch.device('cuda'))
    monkeypatch.setattr(torch.nn.functional, 'conv2d', refuse)
    with pytest.raises(ConfigError, match='capability 6.1.*install a build of torch .* or type device=cpu'):
        train_unet.set_up_device(torch.device('cuda'))


@pytest.mark.parametrize('system, release, free, asked', [
    ('linux', '6.1.0', 5, []), ('win32', '11', 5, [0.75]), ('win32', '11', 8, [1.0]),
    ('linux', '5.15.90.1-microsoft-standard-WSL2', 5, [0.75])])
def test_on_windows_a_gpu_is_used_up_to_its_own_memory(monkeypatch, system, release, free, asked):
    """Beyond it NVIDIA's driver goes on in main memory, many times slower, and no allocation fails."""
    zeros, limits = torch.zeros, []
    monkeypatch.setattr(torch, 'zeros', lambda *size, device: zeros(*size))
    monkeypatch.setattr(torch.cuda, 'device', lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda: (free * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, 'memory_reserved', lambda: 2**30)
    monkeypatch.setattr(torch.cuda, 'set_per_process_memory_fraction', limits.append)
    monkeypatch.setattr(train_unet, 'cpu_quota', torch.get_num_threads)
    monkeypatch.setattr(train_unet.sys, 'platform', system)
    monkeypatch.setattr(platform, 'release', lambda: release)
    train_unet.set_up_device(torch.device('cuda'))
    assert limits == asked


@pytest.mark.parametrize('wish, has_cuda, warned', [('auto', None, True), ('cpu', None, False),
                                                    ('auto', '12.8', False)])
def test_a_gpu_that_this_pytorch_cannot_use_is_told(monkeypatch, tmp_path, caplog, wish, has_cuda, warned):
    """pip brings PyTorch without CUDA on Windows."""
    driver = tmp_path / 'nvidia-smi'
    driver.write_text('#!/bin/sh\n')
    driver.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}{os.pathsep}{os.environ["PATH"]}')
    monkeypatch.setattr(torch.version, 'cuda', has_cuda)
    config, sources, _ = train_unet.resolve_config(None, {'device': wish})
    train_unet.prepare(config, sources, torch.device('cpu'), own_data=True)
    assert ('built without CUDA' in caplog.text) == warned


@pytest.mark.parametrize('settings, searches', [({}, True), ({'deterministic': True}, False),
                                                ({'size_policy': 'crop'}, False)])
def test_cudnn_searches_for_its_fastest_kernels_where_all_images_have_one_size(monkeypatch, small_set, settings,
                                                                               searches):
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', not searches)
    dataset(small_set, **settings)
    assert torch.backends.cudnn.benchmark == searches
    monkeypatch.setattr(torch.version, 'hip', '6.4')                   # AMD's search takes minutes
    dataset(small_set, **settings)
    assert not torch.backends.cudnn.benchmark


# --- TF32 -----------------------------------------------------------------------------


NEW_API = hasattr(torch.backends.cudnn, 'conv')


def tf32_settings():
    return [torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn,
            torch.backends.mkldnn.matmul]


@pytest.fixture
def tf32_restored():
    parts = [torch.backends, torch.backends.cudnn, *tf32_settings()]   # the wider ones first
    before = [part.fp32_precision for part in parts]
    yield
    torch.set_float32_matmul_precision('highest')
    torch.backends.cudnn.allow_tf32 = True
    for part, value in zip(parts, before):
        part.fp32_precision = value


@pytest.mark.skipif(not NEW_API, reason='fp32_precision came with torch 2.9')
@pytest.mark.parametrize('setting, cuda, cpu', [
    ('highest', 'ieee', 'ieee'), ('high', 'tf32', 'tf32'), ('medium', 'tf32', 'bf16'),
])
def test_tf32_reaches_products_and_convolutions(tf32_restored, setting, cuda, cpu):
    for part in tf32_settings():                                       # start from the opposite
        part.fp32_precision = 'tf32' if cuda == 'ieee' else 'ieee'
    apply_tf32(setting)
    assert [part.fp32_precision for part in tf32_settings()] == [cuda, cuda, cuda, cpu]


@pytest.mark.skipif(not NEW_API, reason='fp32_precision came with torch 2.9')
@pytest.mark.parametrize('own', ['', '.cudnn', '.mkldnn'])
def test_highest_switches_off_what_was_set_for_all_parts_at_once(tf32_restored, own):
    exec(f"torch.backends{own}.fp32_precision = {'tf32' if own == '.cudnn' else 'bf16'!r}")
    apply_tf32('highest')
    assert torch.backends.mkldnn.conv.fp32_precision == 'ieee'
    assert [part.fp32_precision for part in tf32_settings()] == ['ieee'] * 4


WIDER = ['', '.cudnn'] if NEW_API else []
READ = """
import os, sys, torch, warnings
import train_unet
with open('said', 'w') as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
cudnn = torch.backends.cudnn
for own in {own!r}:
    if os.fork():                                                      # each in a process of its own
        os.wait()
        continue
    exec(own)
    for setting in ('highest', 'medium', 'high', None, 'highest'):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            train_unet.apply_tf32(setting)
        with cudnn.flags(enabled=True, allow_tf32=cudnn.allow_tf32):
            print(torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32)
    sys.exit()
"""


def test_the_old_flags_can_still_be_read_and_say_the_same(forks):
    """torch 2.9 refuses the old flags after a new one was set otherwise; its own compiler reads them on a GPU. Nothing
    that sets them raises a warning, and None changes nothing."""
    own = ['pass', *(f'torch.backends{part}.fp32_precision = "tf32"' for part in WIDER)]
    process = FORKS.Process(target=exec, args=(READ.format(own=own), {}))
    process.start()
    process.join(120)
    exact, tf32 = 'highest False False', ['medium True True', 'high True True', 'high True True']
    assert Path('said').read_text().splitlines() == len(own) * [exact, *tf32, exact]


@pytest.mark.skipif(not NEW_API, reason='fp32_precision came with torch 2.9')
@pytest.mark.parametrize('own', ['ieee', 'tf32'])
def test_tf32_none_leaves_the_setting_of_pytorch(tf32_restored, own):
    for part in tf32_settings():
        part.fp32_precision = own
    apply_tf32(None)
    assert [part.fp32_precision for part in tf32_settings()] == [own] * 4


@pytest.mark.parametrize('setting, allowed', [('highest', False), ('high', True),
                                              ('medium', True)])
def test_tf32_on_older_torch_uses_the_old_flags(monkeypatch, setting, allowed):
    asked = []
    cudnn, cuda = SimpleNamespace(allow_tf32=None), SimpleNamespace(matmul=SimpleNamespace())
    monkeypatch.setattr(train_unet, 'torch', SimpleNamespace(
        backends=SimpleNamespace(cudnn=cudnn, cuda=cuda),
        set_float32_matmul_precision=asked.append))
    apply_tf32(setting)
    assert (asked, cudnn.allow_tf32) == ([setting], allowed)


# --- cores ----------------------------------------------------------------------------


@pytest.mark.parametrize('allowed, processes, cores', [(16, None, 16), (16, '4', 4), (2, '8', 1)])
def test_processes_on_one_machine_share_the_cores_they_may_run_on(monkeypatch, allowed, processes, cores):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(allowed)), raising=False)
    monkeypatch.delenv('LOCAL_WORLD_SIZE', raising=False)
    if processes:
        monkeypatch.setenv('LOCAL_WORLD_SIZE', processes)
    assert train_unet.num_cores() == cores


@pytest.fixture
def two_threads():
    with in_threads(2):
        yield


V1 = '/sys/fs/cgroup/cpu/cpu.cfs_quota_us', '/sys/fs/cgroup/cpu/cpu.cfs_period_us'


@pytest.mark.parametrize('names, text, cores, threads', [
    (['/sys/fs/cgroup/cpu.max'], '150000 100000', 1, 1), (['/sys/fs/cgroup/cpu.max'], '20000 100000', 1, 1),
    (['/sys/fs/cgroup/cpu.max'], '300000 100000', 3, 2), (['/sys/fs/cgroup/cpu.max'], 'max 100000', 16, 2),
    (V1, '150000 100000', 1, 1), (V1, '300000 100000', 3, 2), (V1, '-1 100000', 16, 2), ([], '', 16, 2)])
def test_a_container_keeps_only_so_many_cores_busy(monkeypatch, two_threads, names, text, cores, threads):
    """The limit that docker --cpus sets, read where the kernel tells it: cgroup v2 in one file, v1 in two."""
    def read(path, *how, **named):
        if not str(path).startswith('/sys/fs/cgroup/cpu'):
            return usual(path, *how, **named)
        if str(path) not in told:
            raise FileNotFoundError(path)
        return told[str(path)] + '\n'

    told = dict(zip(names, [text] if len(names) < 2 else text.split()))
    usual = Path.read_text
    monkeypatch.setattr(Path, 'read_text', read)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(16)), raising=False)
    monkeypatch.delenv('LOCAL_WORLD_SIZE', raising=False)
    config, sources, _ = train_unet.resolve_config(None, {'use_amp': False})
    _, hardware, *_ = train_unet.prepare(config, sources, torch.device('cpu'), own_data=True)
    assert (train_unet.num_cores(), torch.get_num_threads()) == (cores, threads)
    assert hardware.name == f'CPU with {train_unet.counted(threads, "thread")}'


def test_a_trained_model_keeps_to_the_limit_of_a_container(monkeypatch, two_threads, tmp_path):
    model = train_unet.build_model({**CONFIG, 'encoder': 'tu-test_resnet', 'decoder_channels': [8] * 5, 'mean': [0.0],
                                    'std': [1.0], 'num_classes': 2, 'image_size': [32, 32]})
    train_unet.save_checkpoint(tmp_path / 'best.pt', train_unet.describe_model(model, model.config, model.state_dict()))
    monkeypatch.setattr(train_unet, 'cpu_quota', lambda: 1)
    train_unet.load(tmp_path)
    assert torch.get_num_threads() == 1


# --- memory ---------------------------------------------------------------------------


JOB, OLD_JOB = '/sys/fs/cgroup/slurm/job_7', '/sys/fs/cgroup/memory/slurm/job_7'


@pytest.mark.parametrize('place, files', [
    ('0::/slurm/job_7/step_0', {f'{JOB}/memory.max': 16, f'{JOB}/memory.current': 3}),
    ('5:memory:/slurm/job_7/step_0', {f'{OLD_JOB}/memory.limit_in_bytes': 16, f'{OLD_JOB}/memory.usage_in_bytes': 3}),
    ('0::/', {'/sys/fs/cgroup/memory.max': 16, '/sys/fs/cgroup/memory.current': 3})])
def test_the_memory_of_a_job_is_what_its_limit_leaves(monkeypatch, place, files):
    """A container sees its own limit at the top, SLURM's jobs lie below it: a cache was made for the whole node."""
    told = {'/proc/meminfo': f'MemAvailable:  {400 * 2**20} kB', '/proc/self/cgroup': f'{place}\n',
            os.path.dirname([*files][0]) + '/memory.stat': f'inactive_file 7\ntotal_inactive_file {2 * 2**30}\n'}
    told |= {name: f'{size * 2**30}\n' for name, size in files.items()}

    def read(path, *how, **named):
        if str(path) not in told:
            raise FileNotFoundError(path)
        return told[str(path)]

    monkeypatch.setattr(Path, 'read_text', read)
    assert train_unet.free_memory() == 15 * 2**30


def test_free_memory_of_windows_is_asked_of_windows(monkeypatch):
    """No /proc and no sysconf there: MEMORYSTATUSEX, whose third number of 64 bits is what is free."""
    def tell(status):
        assert status[0] & 0xffffffff == 64                            # its size, or Windows refuses
        status[2] = 5 * 2**30
        return 1

    def refuse(*_, **__):
        raise FileNotFoundError
    monkeypatch.setattr(Path, 'read_text', refuse)
    monkeypatch.delattr(os, 'sysconf')
    assert train_unet.free_memory() == 0
    kernel = SimpleNamespace(GlobalMemoryStatusEx=tell)
    monkeypatch.setattr(train_unet.ctypes, 'windll', SimpleNamespace(kernel32=kernel), raising=False)
    assert train_unet.free_memory() == 5 * 2**30


@pytest.mark.parametrize('limit, used', [('memory.max', 'memory.current'),        # cgroup v2, and v1
                                         ('memory/memory.limit_in_bytes', 'memory/memory.usage_in_bytes')])
def test_files_that_a_container_has_read_do_not_count_as_used(monkeypatch, limit, used):
    """They lie in the memory of its limit until it is wanted for something else."""
    def read(path, *_, **__):
        if str(path) not in told:
            raise FileNotFoundError
        return told[str(path)]

    limit, used, rest = (f'/sys/fs/cgroup/{name}' for name in (limit, used, limit.split('.')[0] + '.stat'))
    told = {limit: str(8 * 2**30), used: str(7 * 2**30), '/proc/meminfo': 'MemAvailable: 99999999 kB',
            rest: f'anon 5\nfile 9\ninactive_file {5 * 2**30}\nactive_file 1\n'}
    monkeypatch.setattr(Path, 'read_text', read)
    assert train_unet.free_memory() == 6 * 2**30
    told[limit] = 'max' if limit.endswith('max') else str(2**63 - 4096)
    assert train_unet.free_memory() == 99999999 * 1024


def test_memory_of_apple_gpus_ends_before_they_swap(monkeypatch):
    limits = []
    monkeypatch.setattr(torch.mps, 'set_per_process_memory_fraction', limits.append)
    monkeypatch.setenv('PYTORCH_MPS_HIGH_WATERMARK_RATIO', '0.0')
    train_unet.set_up_device(torch.device('mps'))
    monkeypatch.delenv('PYTORCH_MPS_HIGH_WATERMARK_RATIO')
    train_unet.set_up_device(torch.device('mps'))
    assert limits == [1.0]
    assert train_unet.is_out_of_memory(RuntimeError('Invalid buffer size: 9.75 GB'))
    assert train_unet.is_out_of_memory(RuntimeError('std::bad_alloc'))


def count_page_faults(output):
    """In a process of its own: page faults of five times 12 tensors of 16 MiB, as it is and with the setting."""
    counts, use = [], lambda: [torch.ones(2 ** 22) for _ in range(12)] and None
    for begin in (lambda: None, train_unet.keep_freed_memory):
        begin()
        use()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(5):
            use()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    Path(output).write_text(str(counts))


def test_a_training_on_a_cpu_keeps_the_memory_that_tensors_free(tmp_path, forks, monkeypatch):
    calls = []
    monkeypatch.setattr(train_unet, 'keep_freed_memory', lambda: calls.append(1))
    train(num_epochs=1)
    assert calls
    if platform.libc_ver()[0] != 'glibc':
        pytest.skip('mallopt is of glibc')
    process = FORKS.Process(target=count_page_faults, args=(str(tmp_path / 'out'),))
    process.start()
    process.join(60)
    without, kept = ast.literal_eval((tmp_path / 'out').read_text())
    assert kept < without / 5


@pytest.mark.parametrize('machine, dtype, tf32, answer', [
    ('RTX 2080 Ti', 'float16', 'high', True), ('RTX 2080 Ti', 'float32', 'high', False),
    ('A100', 'float32', 'high', True), ('A100', 'float32', None, True), ('A100', 'float32', 'highest', False),
    ('A100', 'bfloat16', 'highest', True), ('GTX 1080', 'float32', 'high', False), ('MPS', 'float16', 'high', False),
    ('CPU plain', 'float32', 'highest', True)])
def test_images_lie_in_channels_last_where_convolutions_are_faster_so(monkeypatch, caplog, machine, dtype, tf32,
                                                                      answer):
    """PyTorch's maintainers expect a gain on GPUs from Tensor Cores alone (issue 44943)."""
    monkeypatch.setattr(train_unet, 'detect_hardware', lambda device: MACHINES[machine])
    monkeypatch.setattr(train_unet, 'resolve_precision', lambda *_: train_unet.Precision(dtype, tf32, ''))
    caplog.set_level('INFO')
    for typed in (None, True, False):
        config, sources, _ = train_unet.resolve_config(None, {} if typed is None else {'channels_last': typed})
        settled = train_unet.prepare(config, sources, torch.device('cpu'), own_data=True)[0]['channels_last']
        assert settled is (answer if typed is None else typed)
    assert caplog.text.count('channels_last = False  (faster on Tensor Cores alone') == (not answer)


def test_an_error_that_is_caught_meets_no_other_machine_before_the_end(monkeypatch):
    """A script that goes on met them twice, the second time in vain."""
    met = []
    for name, value in {'TORCHELASTIC_RUN_ID': 'x', 'WORLD_SIZE': '2', 'LOCAL_WORLD_SIZE': '1'}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda *_, **__: met.append(1))
    with pytest.raises(train_unet.UserError, match='unknown key'):
        train_unet.train(nonsense=1)
    assert not met
    train_unet.atexit.unregister(train_unet.meet_late)


def test_the_tests_see_no_gpu_of_the_machine():
    """What is loaded by 'auto' would be on another device than what was trained on the CPU."""
    assert os.environ['CUDA_VISIBLE_DEVICES'] == '-1' and not torch.cuda.is_available()
