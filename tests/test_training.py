"""Training: a network, loss and data of one's own, run folders, what is tried first and what is left behind, notebooks.

Run: python -m pytest tests/test_training.py
"""
import contextlib
import copy
import functools
import gc
import importlib.util
import json
import logging
import math
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import weakref
from collections import UserDict
from pathlib import Path

import albumentations as A
import numpy as np
import PIL.Image
import pytest
import segmentation_models_pytorch as smp
import timm
import torch
import torch.nn.functional as F
from torch import nn

import train_unet as tu
from conftest import ENOUGH, ROOT, TINY, draw_set, draw_three
from helpers import OWN, PLAIN, SMALL, WORDS, Harm, Samples, assert_same, batch_of, edited, final, in_threads, last
from helpers import log_text, network, noisy_squares, squares, stop_at, stopping_at, train, train_own

pytestmark = pytest.mark.usefixtures('one_thread')


# --- a network of one's own -----------------------------------------------------------


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
    """A small ResNet, without its shrinking stem: the images are 8 x 8. One layer in bfloat16, slow on many CPUs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 4))
    if dtype == 'float32':
        model = timm.create_model('test_resnet', num_classes=4, in_chans=1)
        model.conv1, model.maxpool = nn.Conv2d(1, model.bn1.num_features, 3, padding=1), nn.Identity()

    def loss_fn(model, batch):
        images, labels = batch
        logits = model(images)
        return (F.cross_entropy(logits, labels, reduction='none'),
                tu.confusion_matrix(logits.argmax(1), labels, 4))

    result = train(model, Classes(32, 0), Classes(16, 1), loss_fn, batch_size=8, num_epochs=6,
                   optimizer='AdamW', **tu.amp_settings(dtype))
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
                   optimizer='AdamW', ema_decay=0.9, **tu.amp_settings(dtype))
    assert result.history[-1]['precision'] == dtype
    assert result.history[-1]['train_loss'] < 0.75 * result.history[0]['train_loss']


OWN_RUN = {'num_epochs': 2, 'image_size': 64, 'augment': 'none', 'num_workers': 0, 'val_fraction': 0.2,
           'run_dir': 'own', 'ema_decay': None, 'learning_rate': 0.01}


def own_network(in_channels=3, classes=1):
    return nn.Sequential(nn.Conv2d(in_channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, classes, 3, padding=1))


def test_a_network_of_ones_own_trains_on_a_folder_and_is_loaded_again(small_set):
    """It sees normalised float32 images, as the network of the config does; the same weights give the same mask."""
    seen, network = [], own_network()
    before = [p.clone() for p in network.parameters()]
    network.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0].dtype, inputs[0].max().item())))
    result = tu.train(model=network, data=str(small_set), **OWN_RUN)
    assert {dtype for dtype, _ in seen} == {torch.float32} and max(most for _, most in seen) < 10
    assert 'encoder' not in Path('own/log.txt').read_text()
    assert not any(torch.equal(old, new) for old, new in zip(before, network.parameters()))
    assert all(p.grad is None for p in network.parameters())           # a user's own backward() would add to them
    image = sorted((small_set / 'images').iterdir())[0]
    again = tu.load('own', model=own_network())
    assert (again.predict(image) == result.model.predict(image)).all()
    with pytest.raises(tu.UserError, match="load.'own/best.pt', model=NETWORK"):
        tu.load('own')
    with pytest.raises(tu.UserError, match='makes no model; give the network as it was given to train, wrapped or not'):
        tu.load('own', model=nn.DataParallel(own_network()))
    with pytest.raises(tu.UserError, match="model='unet': must be a network"):
        tu.load('own', model='unet')
    with pytest.raises(tu.UserError, match='resumed from Python, by model=NETWORK'):
        tu.train(resume='own', num_epochs=3)
    more = tu.train(model=own_network(), resume='own', num_epochs=3)
    assert [row['epoch'] for row in more.history if not row['event']] == [1, 2, 3]


def test_complex_weights_are_loaded_as_they_were_trained(small_set):
    """A filter in the frequency domain (FFC, FNO) keeps its imaginary part."""
    class Filter(nn.Conv2d):
        def __init__(self):
            super().__init__(3, 1, 1)
            self.filter = nn.Parameter(torch.full((64, 33), 1 + 1j))

        def forward(self, images):
            return super().forward(torch.fft.irfft2(torch.fft.rfft2(images) * self.filter))

    result = tu.train(model=Filter(), data=str(small_set), **OWN_RUN)
    assert torch.equal(tu.load('own', model=Filter()).network.filter, result.model.network.filter)


class Several(nn.Module):
    """As torchvision's networks answer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 1)

    def forward(self, images):
        return {'out': self.conv(images)}


class Deep(nn.Conv2d):
    """As monai's DynUNet with deep supervision: in training its answers are stacked."""

    def forward(self, images):
        logits = super().forward(images)
        return torch.stack([logits, logits], 1) if self.training else logits


class Levels(nn.Conv2d):
    def forward(self, images):
        return [super().forward(images)][1]


class Decided(nn.Conv2d):
    def forward(self, images):
        return super().forward(images).argmax(1, keepdim=True)


@pytest.mark.parametrize('network, words', [
    (Several(), 'gives a dict; wanted are the logits alone'),
    (own_network(classes=2), r'gives \(1, 2, 64, 64\).*2 classes want logits \(1, 1, 64, 64\), one channel'),
    (own_network(in_channels=1), r'cannot take normalised float32 images \(1, 3, 64, 64\).*type in_channels=1'),
    (nn.Conv2d(3, 1, 65), r'cannot take normalised float32 images \(1, 3, 64, 64\).*if that is the size type'),
    (nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(8, 1, 1)), 'have 8 channels, but got 16.*if that is the size type'),
    (Levels(3, 1, 1), 'cannot take normalised.*IndexError: list index out of range'),
    (Deep(3, 1, 1), r'gives a tensor \(\d, 2, 1, 64, 64\), torch.float32; wanted are the logits alone'),
    (own_network().append(nn.Sigmoid()), 'ends in a sigmoid or softmax; wanted are the logits before it'),
    (Decided(3, 2, 1), r'gives a tensor \(1, 1, 64, 64\), torch.int64; wanted are the logits alone'),
])
def test_a_network_of_ones_own_that_does_not_fit_the_data_is_refused_in_words(small_set, network, words):
    with pytest.raises(tu.ConfigError, match=words):
        tu.train(model=network, data=str(small_set), **OWN_RUN)
    assert not os.path.exists('own')


def half_size(end):
    """A network at half the size, whose logits are enlarged after `end`."""
    return nn.Sequential(nn.AvgPool2d(2), own_network(), end, nn.Upsample(scale_factor=2, mode='bilinear'))


class Clamped(nn.Sequential):
    def forward(self, images):
        return super().forward(images).sigmoid().clamp(1e-4, 1 - 1e-4)


@pytest.mark.parametrize('network', [half_size(nn.Sigmoid()), Clamped(*own_network()),
                                     own_network().append(nn.Sigmoid())])
def test_chances_in_place_of_logits_are_refused_also_of_an_edited_build_network(small_set, monkeypatch, network):
    """As brain-segmentation-pytorch's U-Net ends: it trained, and learnt nothing, without a word."""
    monkeypatch.setattr(tu, 'build_network', lambda config: network)
    for model, saves in ((None, False), (network, False), (network, True)):
        with pytest.raises(tu.ConfigError, match='ends in a sigmoid or softmax; wanted are the logits before it'):
            tu.train(model=model, data=str(small_set), activation_checkpointing=saves, **OWN_RUN)


def test_logits_that_are_enlarged_are_not_taken_for_chances(small_set):
    assert len(tu.train(model=half_size(nn.Identity()), data=str(small_set), **OWN_RUN).history) == 2


@pytest.mark.parametrize('after', [
    lambda x: x[..., :3], lambda x: x.view(1, 2, 16), lambda x: x.permute(0, 2, 3, 1), lambda x: x[None].squeeze(0),
    lambda x: F.interpolate(x, 8).clamp(0, 1), torch.Tensor.double])
def test_chances_are_seen_through_what_only_moves_them(after):
    logits = torch.zeros(1, 2, 4, 4, requires_grad=True)
    assert all(tu.ends_in_chances(after(chances)) for chances in (logits.sigmoid(), logits.softmax(1)))
    others = logits * 1, logits * logits.sigmoid(), logits.log_softmax(1), logits.tanh(), logits.detach()
    assert not any(tu.ends_in_chances(after(other)) for other in others)


def test_an_edited_build_network_goes_by_its_own_name(small_set, monkeypatch):
    monkeypatch.setattr(tu, 'build_network', lambda config: own_network())
    tu.train(data=str(small_set), **OWN_RUN)
    assert 'Network: your own, Sequential' in Path('own/log.txt').read_text()
    with pytest.raises(tu.UserError, match='format=smp: is for networks of smp, which this one is not'):
        tu.export('own', format='smp')
    assert tu.export('own', format='pt2') == 0
    given = smp.Unet('tu-test_resnet', encoder_weights=None, in_channels=1)
    with pytest.raises(tu.ConfigError, match='  your own, Unet: cannot take'):
        tu.train(model=given, data=str(small_set), **OWN_RUN | {'run_dir': 'other'})
    monkeypatch.setattr(tu, 'build_network', lambda config: own_network(in_channels=1))
    with pytest.raises(tu.ConfigError, match='  your own, Sequential: cannot take'):
        tu.train(data=str(small_set), **OWN_RUN | {'run_dir': 'other'})


class Supervised(nn.Module):
    """Deep supervision: in training also logits of half the size, and what kind of image it is."""

    def __init__(self):
        super().__init__()
        self.body, self.seen = own_network(), []

    def forward(self, images):
        logits = self.body(images)
        if not self.training:
            return logits
        self.seen.append(images.shape)
        return {'out': logits, 'aux': [F.avg_pool2d(logits, 2)], 'kinds': images.new_zeros(len(images), 8)}


def test_several_outputs_in_training_reach_a_loss_of_ones_own_without_their_padding(small_set):
    model, shapes = Supervised(), []

    def loss_fn(network, batch):
        found = network(batch['image'])
        if not torch.is_tensor(found):
            shapes.append((found['out'].shape[-2:], found['aux'][0].shape[-2:], found['kinds'].shape[1]))
            found = found['out'] + F.interpolate(found['aux'][0], found['out'].shape[-2:])
        return F.binary_cross_entropy_with_logits(found[:, 0], batch['mask'].float(), reduction='none').mean((1, 2))

    tu.train(model=model, loss_fn=loss_fn, data=str(small_set), **OWN_RUN | {'image_size': (51, 51)})
    assert {shape[-2:] for shape in model.seen} == {(64, 64)} and {*shapes} == {((51, 51), (26, 26), 8)}
    with pytest.raises(tu.ConfigError, match='gives a dict.*in training it may give all parts, to a loss_fn'):
        tu.train(model=Supervised(), data=str(small_set), **OWN_RUN | {'run_dir': 'other'})


class Joined(nn.Conv2d):
    def forward(self, images):
        return super().forward(images).repeat(1, 4 if self.training else 1, 1, 1)


def test_other_channels_in_training_are_for_a_loss_of_ones_own(small_set):
    """They ended in IndexError."""
    with pytest.raises(tu.ConfigError, match='gives 4 channels in training; wanted: 1, as in eval mode'):
        tu.train(model=Joined(3, 1, 1), data=str(small_set), **OWN_RUN)


class Standardised(nn.Conv2d):
    """Weight standardisation, as it is often written."""

    def forward(self, images):
        weight = self.weight / self.weight.view(self.weight.size(0), -1).std(1).view(-1, 1, 1, 1)
        return F.conv2d(images, weight, self.bias, padding=1)


def test_a_view_that_channels_last_forbids_is_told(small_set):
    """The line that is offered works for the same network too, whose weights have been in that layout."""
    network = nn.Sequential(Standardised(3, 4, 3), nn.ReLU(), Standardised(4, 1, 3))
    with pytest.raises(tu.ConfigError, match=r'view size.*; type channels_last=False, or write .reshape'):
        tu.train(model=network, data=str(small_set), **OWN_RUN | {'channels_last': True})
    assert len(tu.train(model=network, data=str(small_set), **OWN_RUN | {'channels_last': False}).history) == 2


def test_logits_of_a_quarter_of_the_size_are_told_how_to_grow(small_set):
    with pytest.raises(tu.ConfigError, match=r'gives \(1, 5, 64, 64\)[^;]*; 2 classes want[^;]*$'):
        tu.train(model=own_network(classes=5), data=str(small_set), **OWN_RUN)
    with pytest.raises(tu.ConfigError, match=r'gives \(1, 1, 16, 16\).*; enlarge them by F.interpolate'):
        tu.train(model=nn.Sequential(nn.AvgPool2d(4), own_network()), data=str(small_set), **OWN_RUN)


def lazy():
    return nn.Sequential(nn.LazyConv2d(4, 3, padding=1), nn.ReLU(), nn.LazyConv2d(1, 1))


def test_lazy_layers_are_refused_until_they_know_their_sizes(small_set):
    for train_it in (lambda: train_own(lazy()), lambda: tu.train(model=lazy(), data=str(small_set), **OWN_RUN)):
        with pytest.raises(tu.UserError, match='has lazy layers.*run one batch through it first'):
            train_it()
    known = lazy()
    known(torch.rand(1, 3, 64, 64))
    assert len(tu.train(model=known, data=str(small_set), **OWN_RUN).history) == 2


class OfOneSize(nn.Module):
    """A vision transformer of patches of 14 pixels, with positions for one size, which is no multiple of 32."""
    def __init__(self):
        super().__init__()
        self.body = timm.create_model('vit_tiny_patch16_224', patch_size=14, img_size=70, depth=1, num_classes=0)
        self.head = nn.Conv2d(192, 1, 1)

    def forward(self, images):
        tokens = self.body.forward_features(images)[:, 1:]
        return F.interpolate(self.head(tokens.mT.unflatten(2, (5, 5))), images.shape[-2:])


def test_a_network_of_ones_own_may_want_a_size_that_is_no_multiple_of_32(small_set):
    result = tu.train(model=OfOneSize(), data=str(small_set), **OWN_RUN | {'image_size': 70, 'num_epochs': 1})
    image = sorted((small_set / 'images').iterdir())[0]
    assert (tu.load('own', model=OfOneSize()).predict(image) == result.model.predict(image)).all()


class Reading(nn.Sequential):
    """Reads what hooks keep."""
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 1))
        self.kept = {}

    def forward(self, images):
        self[0](images)
        return functools.reduce(lambda maps, layer: layer(maps), [*self][1:], self.kept['first'])


def with_a_function(way):
    """A network whose forward is a function put onto it, as to take one output of several."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 1))
    forward = network.forward
    if way == 'a hook that fills what forward reads':
        network = Reading()
        kept = network.kept
        network[0].register_forward_hook(lambda module, inputs, output: kept.update(first=output))
    elif way == 'compiled':
        return torch.compile(network, backend='eager')
    elif way == 'compiled in place':
        network.compile(backend='eager')
    elif way == 'a parametrization':
        nn.utils.parametrizations.weight_norm(network[0])
    elif way == 'a lock':
        network.lock = threading.Lock()                                # as loggers and SummaryWriter hold one
    elif way == 'an output with its graph':
        network.kept = [network(torch.rand(1, 3, 64, 64))]             # as MONAI's DynUNet for deep supervision
    else:
        network.forward = functools.partial(lambda images, scale: forward(images) * scale, scale=1)
    return network


@pytest.mark.parametrize('way', ['a closure', 'a hook that fills what forward reads', 'compiled', 'compiled in place',
                                 'a parametrization', 'a lock', 'an output with its graph'])
def test_any_network_is_averaged(small_set, way):
    """A copy, which held the average before, computed with what functions in it lead to, or could not be made."""
    network, seen = with_a_function(way), []
    name, weight = next((f'network.{name}', weight) for name, weight in network.named_parameters())
    network.register_forward_pre_hook(
        lambda module, _: None if module.training else seen.append(weight.detach().clone()))
    result = tu.train(model=network, data=str(small_set), **OWN_RUN | {'ema_decay': 0.9, 'batch_size': 10})
    saved = tu.load_last('own')[0]
    average, own = (saved[key][name] for key in ('average', 'model'))
    assert sum(torch.equal(value, average) for value in seen) and not any(torch.equal(value, own) for value in seen)
    counts = [count for key, count in saved['model'].items() if key.endswith('num_batches_tracked')]
    assert counts == [saved['step'] + (way == 'an output with its graph')]         # validation shows it no batches
    best = tu.load_checkpoint('own/best.pt')['weights']
    assert result.model.training is False and torch.equal(weight.data, best[name])         # the given network has them


@pytest.mark.parametrize('decay', [0.9, None])
def test_averaged_weights_are_validated_without_compiled_code(small_set, monkeypatch, decay):
    """CUDA graphs are of the sizes of training alone."""
    calls = []

    def compiling(model, **how):
        model._compiled_call_impl = lambda *given: calls.append(model.training) or model._call_impl(*given)

    monkeypatch.setattr(nn.Module, 'compile', compiling)
    tu.train(model=own_network(), data=str(small_set), **OWN_RUN | {'ema_decay': decay, 'compile_model': True})
    assert any(calls) and all(calls) == bool(decay)


@pytest.mark.parametrize('is_notebook', [False, True])
def test_a_third_ctrl_c_ends_a_process_but_no_notebook(monkeypatch, is_notebook):
    """The second one takes a while to end the workers; one more by default ends all that a kernel holds."""
    shell = types.SimpleNamespace(user_ns={}, user_ns_hidden={}, displayhook=types.SimpleNamespace())
    if is_notebook:
        monkeypatch.setitem(sys.modules, 'IPython', types.SimpleNamespace(get_ipython=lambda: shell))
    calls, seen = [], []

    def loss_fn(model, batch):
        calls.append(1)
        if len(calls) == 5:                                            # the trial is over
            os.kill(os.getpid(), signal.SIGINT)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            finally:
                seen.append(signal.getsignal(signal.SIGINT))
        return squares(model, batch)

    with pytest.raises(KeyboardInterrupt):
        train_own(loss_fn=loss_fn)
    assert len(seen) == 1 and (seen[0] is not signal.SIG_DFL) == is_notebook


def test_a_network_that_was_trained_before_is_told(small_set, caplog):
    """In a loop over folds the later ones have seen what validates them."""
    network, settings = own_network(), OWN_RUN | {'num_epochs': 1}
    with pytest.raises(ZeroDivisionError):                             # nothing was learnt
        tu.train(model=network, data=str(small_set), loss_fn=lambda model, batch: 1 / 0, **settings)
    tu.train(model=network, data=str(small_set), **settings)
    tu.train(model=network, data=str(small_set), resume='own', num_epochs=2)
    assert 'an earlier training' not in caplog.text
    tu.train(model=network, data=str(small_set), **settings | {'run_dir': 'again', 'fold': 1})
    assert 'model: begins where an earlier training left it' in caplog.text


class Merging(nn.Conv2d):
    """In eval mode one weight is added to another, as loralib's layers do."""
    is_merged = False

    def __init__(self):
        super().__init__(3, 1, 1)
        self.low = nn.Parameter(torch.zeros(1, 3, 1, 1))

    def train(self, mode=True):
        if self.is_merged == mode:
            self.weight.data += -self.low.data if mode else self.low.data
        self.is_merged = not mode
        return super().train(mode)

    def forward(self, images):
        return F.conv2d(images, self.weight + (0 if self.is_merged else self.low), self.bias)


@pytest.mark.parametrize('decay', [0.5, None])
def test_a_network_that_merges_weights_in_eval_mode(small_set, decay):
    network, seen = Merging(), []
    network.register_forward_pre_hook(
        lambda module, _: None if module.training else seen.append(module.weight.detach().clone()))
    tu.train(model=network, data=str(small_set), **OWN_RUN | {'ema_decay': decay})
    saved = tu.load_last('own')[0]
    validated = saved['average' if decay else 'model']
    wanted = validated['network.weight'] + validated['network.low']
    assert min((value - wanted).abs().max() for value in seen) < 1e-6 < validated['network.low'].abs().max()
    assert_same(saved['weights'], validated)
    assert torch.equal(tu.load('own', model=Merging()).network.weight, network.weight)     # merged both, once


class Rushing(nn.Module):
    """In eval mode it keeps what follows from its weights, as timm's TinyViT and EfficientFormer do."""
    def __init__(self, stale=()):
        super().__init__()
        self.body, self.level, self.kept, self.stale = own_network(), nn.Parameter(torch.zeros(1)), None, stale

    def train(self, mode=True):
        self.kept = None if mode else self.kept
        return super().train(mode)

    def forward(self, images):
        level = self.level.sin()
        if not self.training:
            self.kept = level if self.kept is None else self.kept
            self.stale.append(not torch.equal(self.kept, level))
            level = self.kept
        return self.body(images) + level


@pytest.mark.parametrize('decay', [0.5, None])
def test_what_a_network_keeps_in_eval_mode_is_not_of_other_weights(decay, small_set):
    stale, settings = [], OWN_RUN | {'ema_decay': decay, 'num_epochs': 6, 'learning_rate': 0.3}
    result = tu.train(model=Rushing(stale), data=str(small_set), **settings)
    result.model.predict(sorted((small_set / 'images').iterdir())[0])
    assert result.best['epoch'] < 6                                    # whose weights came back after the last one
    assert len(stale) > 3 and not any(stale)


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


def test_volumes_are_no_obstacle(tmp_path):
    """A network of 3-D convolutions has no channels_last of four dimensions."""
    net = torch.nn.Sequential(torch.nn.Conv3d(1, 2, 3, padding=1), torch.nn.Flatten())
    data = [{'x': torch.randn(1, 4, 4, 4)} for _ in range(8)]
    result = tu.train(model=net, train_data=data, val_data=data, num_epochs=1, device='cpu', use_amp=False,
                      run_dir=str(tmp_path / 'run'), loss_fn=lambda model, batch: model(batch['x']).square().mean(1))
    assert len(result.history) == 1


def test_a_network_of_16_bits_gets_float32_weights(caplog):
    result = train(model=network().bfloat16(), num_epochs=1)
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    assert 'they are now' in caplog.text


def test_a_network_of_16_bits_is_loaded_with_the_weights_that_were_trained(small_set):
    """As transformers gives one; they were rounded to bfloat16 without a word."""
    result = tu.train(model=own_network().bfloat16(), data=str(small_set), **OWN_RUN)
    again = tu.load('own', model=own_network().bfloat16())
    assert all(torch.equal(old, new) for old, new in zip(result.model.parameters(), again.parameters(), strict=True))


def test_a_buffer_whose_elements_share_their_memory_trains():
    model = network()
    model.register_buffer('scale', torch.ones(1).expand(4))
    result = train(model, ema_decay=0.9, num_epochs=1)
    assert len(result.history) == 1 and torch.equal(result.model.scale, torch.ones(4))


def test_the_model_of_a_result_can_be_trained_on():
    first = train(num_epochs=1, ema_decay=0.9)
    start = {key: value.clone() for key, value in first.model.state_dict().items()}
    second = train(first.model, num_epochs=1, ema_decay=0.9, run_dir='again')
    assert any(not torch.equal(start[key], value) for key, value in second.model.state_dict().items())


class Thresholding(nn.Module):
    """Its layers have the names that a network of ours uses for other things."""

    def __init__(self):
        super().__init__()
        self.pixels, self.coding, self.threshold = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 1, 1), nn.Threshold(0, 0)

    def forward(self, images):
        return self.coding(self.threshold(self.pixels(images)))


def test_layers_of_ones_own_network_may_have_any_name(small_set):
    assert len(train(Thresholding(), num_epochs=1).history) == 1
    tu.train(model=Thresholding(), data=str(small_set), **OWN_RUN)
    again = tu.load('own', model=Thresholding())
    assert again.threshold == 0.5 and isinstance(again.network.threshold, nn.Threshold)


def test_a_second_stage_has_the_settings_it_was_given(small_set):
    words = {**TINY, 'data': str(small_set), 'num_epochs': 1}
    first = tu.train(**words, run_dir='first', mean=0.0)
    second = tu.train(**{**words, 'image_size': 64}, run_dir='second', model=first.model, mean=100.0)
    assert second.model.config['image_size'] == [64, 64]
    assert second.model.mean.flatten().tolist() == [100.0] * 3
    image = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    assert (tu.load('second').predict(image) == second.model.predict(image)).all()


def test_a_second_stage_is_a_run_like_any_other_without_naming_the_network_again(small_set):
    words = {'data': str(small_set), 'num_epochs': 1, 'use_amp': False}
    tu.train(**TINY | words, run_dir='first')
    second = tu.train(**words, image_size=32, run_dir='second', model=tu.load('first'))
    assert second.model.config['encoder'] == TINY['encoder'] and not second.model.is_own
    image = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    assert (tu.load('second').predict(image) == second.model.predict(image)).all()
    assert len(tu.train(resume='second', num_epochs=2).history) == 2


def test_an_image_that_breaks_before_the_first_step_is_told_with_the_way_out(small_set):
    for path in (small_set / 'images').iterdir():
        path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(tu.DataError, match='cannot be read') as error:
        tu.train(**TINY, data=str(small_set), mean=100.0, std=50.0, run_dir='broken')     # not measured before
    assert 'skip_broken=True leaves out files that cannot be read' in error.value.problems


def test_a_network_without_weights_to_train_is_refused_in_words():
    with pytest.raises(tu.UserError, match='has no weights to train'):
        train(network().requires_grad_(False))


def test_an_exported_network_that_knows_no_training_is_refused_in_words(small_set):
    exported = torch.export.export(own_network().eval(), (torch.zeros(1, 3, 64, 64),)).module()
    with pytest.raises(tu.UserError, match='model: cannot be trained .*: give the network that it was made of'):
        tu.train(model=exported, data=str(small_set), **OWN_RUN)


def test_a_model_that_is_no_network_is_told():
    for wrong in ('unet', tu.nn.Conv2d):
        with pytest.raises(tu.UserError, match='must be a network'):
            tu.train(model=wrong, data='set')


# --- a loss of one's own --------------------------------------------------------------


def test_a_loss_of_ones_own_may_ask_the_model_for_its_parameters():
    seen = set()

    def loss_fn(model, batch):
        seen.add(model.training)
        penalty = sum(weight.square().sum() for weight in model.parameters())
        return (model(batch['image']) - batch['target']).square().mean((1, 2, 3)) + 1e-3 * penalty

    train(network(), loss_fn=loss_fn, num_epochs=1)
    assert seen == {True, False}


@pytest.mark.parametrize('wrong', [
    lambda losses: losses.mean(), lambda losses: losses[:, None], lambda losses: losses[:-1],
    lambda losses: losses.mean().item(), lambda losses: None],
    ids=['mean', 'column', 'too few', 'float', 'None'])
def test_a_loss_of_the_wrong_shape_is_told_clearly(wrong):
    with pytest.raises(TypeError, match=r'one loss per sample.*flatten\(1\).mean\(1\).*loss.expand'):
        train(loss_fn=lambda model, batch: wrong(squares(model, batch)))


@pytest.mark.parametrize('counts', [{'a': 1}, 3, torch.zeros(4), torch.zeros(2, 3), np.eye(2)])
def test_counts_of_another_form_are_the_callers_mistake(counts):
    with pytest.raises(TypeError, match='confusion matrix, a tensor'):
        train(loss_fn=lambda model, batch: (squares(model, batch), counts))


@pytest.mark.parametrize('names, told', [(['a', 'b'], 'class 2 '), (['a', 'b', 'c'], 'c ')])
def test_names_of_fewer_classes_than_a_loss_counts_end_no_run(names, told, caplog):
    result = train(loss_fn=lambda model, batch: (squares(model, batch), torch.eye(3).long()), class_names=names,
                   num_epochs=1)
    assert result.best['epoch'] == 1 and f'{told:18} IoU 1.000' in caplog.text


@pytest.mark.parametrize('wrong', [nn.MSELoss(), nn.CrossEntropyLoss(reduction='none'), nn.MSELoss, 'dice',
                                   F.cross_entropy, smp.losses.DiceLoss('binary'),
                                   lambda logits, target: F.mse_loss(logits, target),
                                   lambda pred, y, weight=None: (pred - y).abs().mean(),
                                   lambda y_true, y_pred: y_true, lambda net_output, gt: gt, lambda x, y: y])
def test_a_loss_that_takes_no_model_is_refused_with_what_to_write_instead(wrong):
    with pytest.raises(tu.UserError, match=r"lambda model, batch: loss\(model\(batch\['x'\]\)"):
        train(loss_fn=wrong)
    assert not Path('run').exists()


def test_what_is_written_instead_of_a_loss_of_smp_trains_on_a_folder(small_set):
    """A batch of CONFIG's data has no x and y, and such a loss no reduction."""
    loss, settings = smp.losses.DiceLoss('binary'), {**TINY, 'data': str(small_set), 'num_epochs': 1}
    with pytest.raises(tu.UserError) as error:
        tu.train(loss_fn=loss, **settings)
    advice = str(error.value).partition(' is 255): ')[2]
    assert len(tu.train(loss_fn=eval(advice, {'loss': loss}), **settings).history) == 1


def test_the_mask_that_a_loss_is_told_to_take_of_two_classes_has_the_shape_of_the_logits():
    """A Dice of one's own, p * y, made (B, B, H, W) of (B, 1, H, W) and (B, H, W), and trained without a word."""
    with pytest.raises(tu.UserError) as error:
        tu.train(loss_fn=lambda pred, target: (pred.sigmoid() * target).sum(), data='set')
    told = re.search(r'of two classes[^;]*(batch[^;]*);', str(error.value))[1]
    mask = eval(told, {'batch': {'mask': torch.ones(2, 8, 8, dtype=torch.uint8)}})
    assert (mask.shape, mask.dtype) == ((2, 1, 8, 8), torch.float32)


def test_what_is_written_instead_of_a_loss_of_smp_trains_on_data_of_ones_own():
    loss, data = smp.losses.DiceLoss('binary'), [{'x': torch.rand(3, 8, 8), 'y': torch.ones(1, 8, 8)}] * 4
    with pytest.raises(tu.UserError) as error:
        train(loss_fn=loss)
    advice = str(error.value).partition('make it a part of one: ')[2]
    assert len(train(None, data, data, eval(advice, {'loss': loss}), num_epochs=1).history) == 1


def binary(model, batch):
    """Takes 255 for a target: the more of it, the better foreground."""
    return F.binary_cross_entropy_with_logits(model(batch['image']), batch['mask'][:, None].float(),
                                              reduction='none').mean((1, 2, 3))


def binary_of_the_known(model, batch):
    known = batch['mask'][:, None] != 255
    truth = batch['mask'][:, None].float() * known
    each = F.binary_cross_entropy_with_logits(model(batch['image']), truth, reduction='none') * known
    return each.mean((1, 2, 3))


def of_classes(**settings):
    def loss_fn(model, batch):
        logits = model(batch['image'])
        return F.cross_entropy(torch.cat([0 * logits, logits], 1), batch['mask'].long(), reduction='none',
                               **settings).mean((1, 2))
    return loss_fn


def binary_in_place(model, batch):
    logits, ignored = model(batch['image']), batch['mask'][:, None] == 255
    logits[ignored] = 0
    truth = batch['mask'][:, None].float().masked_fill(ignored, 0.5)
    return F.binary_cross_entropy_with_logits(logits, truth, reduction='none').mean((1, 2, 3))


def certainty(model, batch):
    """Looks at no mask."""
    return -model(batch['image']).sigmoid().sub(0.5).square().mean((1, 2, 3))


def of_five(model, batch):
    """Compares the images of a batch, as contrastive losses do."""
    assert len(batch['mask']) == 5 or not torch.is_grad_enabled()
    return binary_of_the_known(model, batch)


def test_a_loss_on_masks_with_ignored_pixels_is_told_of_them(small_set, tmp_path, caplog):
    """No mask of the first set holds 255, but augmentation brings some in; up to 25 epochs it mirrors only."""
    told, settings = "loss_fn: batch['mask'] is 255", TINY | {'num_epochs': 1}
    tu.train(data=str(small_set), loss_fn=binary, **settings | {'augment': 'default'})
    assert told not in caplog.text
    tu.train(data=str(small_set), loss_fn=binary_of_the_known, **settings | {'augment': 'strong', 'run_dir': 'strong'})
    assert told in caplog.text
    caplog.clear()
    settings |= {'augment': 'none', 'mask_values': {0: 0, 1: 1, 2: 255}, 'run_dir': 'three'}
    tu.train(data=str(draw_three(tmp_path / 'set')), loss_fn=binary, **settings)
    assert told in caplog.text


def test_a_loss_that_fails_at_what_is_ignored_fails_at_the_start(small_set):
    """On a GPU it would end the process in mid-run, by an assertion on the device."""
    with pytest.raises(IndexError, match='Target 255 is out of bounds'):
        tu.train(data=str(small_set), loss_fn=of_classes(), augment='strong', **TINY)
    assert not [*tu.Path('runs').glob('*')]


@pytest.mark.parametrize('end', [lambda x: (x > 0).float(), torch.Tensor.detach])
def test_a_loss_without_a_gradient_is_told(end):
    with pytest.raises(tu.UserError, match='the loss has no gradient, as of >'):
        train_own(loss_fn=lambda model, batch: end(squares(model, batch)))


@pytest.mark.parametrize('counts', [False, True])
@pytest.mark.parametrize('teaches', [False, True])
def test_weights_that_only_the_loss_knows_are_told(teaches, counts, caplog):
    """Kendall's weights of the losses in a closure were never trained, without a word."""
    weight = nn.Parameter(torch.ones(1))

    def loss_fn(model, batch):
        factor = weight.detach() if teaches else weight
        losses = squares(model, batch) * factor.exp()
        return (losses, torch.eye(2).long()) if counts else losses

    train_own(loss_fn=loss_fn)
    assert ('loss_fn: reaches 1 parameter outside of the model, which are not trained here' in caplog.text) != teaches


class Own(nn.MSELoss):
    """A loss that builds on one of torch's."""

    def forward(self, model, batch):
        return F.mse_loss(model(batch['image']), batch['target'], reduction='none').mean((1, 2, 3))


def test_a_training_is_as_quiet_as_the_user_wants(caplog):
    tu.log.setLevel('ERROR')
    try:
        train(num_epochs=1)
        assert tu.log.level == logging.ERROR and not caplog.text
    finally:
        tu.log.setLevel('INFO')


def test_a_loss_of_ones_own_may_inherit_from_one_of_torchs():
    assert len(train(loss_fn=Own(), num_epochs=1).history) == 1


def test_a_loss_may_count_in_the_model_and_ask_for_its_layers():
    def counting(model, batch):
        model.asked += 1
        assert isinstance(model[0], nn.Conv2d)
        return squares(model, batch)

    model = network()
    model.asked = 0
    train(model, loss_fn=counting)
    assert model.asked > 4 and 'asked' not in vars(model[0])


@pytest.mark.parametrize('wrap', [lambda net: net.eval(), lambda net: nn.Sequential(net.eval())])
def test_a_network_that_comes_in_eval_mode_is_trained(wrap):
    """As load() gives it, alone or inside another one: its norms learn from the first step on."""
    model, modes = wrap(network()), []
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
    norm.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    before = norm.running_mean.clone()
    train(model, num_epochs=1)
    assert modes[0] and not torch.equal(norm.running_mean, before)


# --- data of one's own ----------------------------------------------------------------


def test_settings_of_data_network_and_loss_are_told_to_do_nothing_for_ones_own(caplog):
    data = [torch.rand(3, 8, 8) for _ in range(4)]
    tu.train(model=own_network(), train_data=data, val_data=data, run_dir='own', num_epochs=1, image_size=32,
             augment='strong', loss='dice', oversample_foreground=0.5, num_workers=0,
             loss_fn=lambda model, batch: model(batch).mean((1, 2, 3)), class_names=['a', 'b'])
    assert 'image_size, augment, loss, oversample_foreground: no effect' in caplog.text
    assert 'class_names:' not in caplog.text                           # they name the classes that loss_fn counts


def test_settings_that_a_network_or_loss_of_ones_own_replaces_are_told_to_do_nothing(small_set, caplog):
    result = tu.train(data=str(small_set), model=own_network(), class_weights='auto', architecture='MAnet',
                      **TINY | {'num_epochs': 1, 'encoder_weights': 'imagenet'})
    assert 'Note: architecture, encoder, encoder_weights, decoder_channels: no effect' in caplog.text
    mean = tu.load(result.run_dir, 'cpu', model=own_network()).config['mean']   # measured, not the encoder's
    assert mean != pytest.approx([123.675, 116.28, 103.53], abs=0.1)
    caplog.clear()
    tu.train(data=str(small_set), loss_fn=lambda model, batch: model(batch['image']).square().mean((1, 2, 3)),
             loss='focal', class_weights='auto', **TINY | {'num_epochs': 1})
    assert 'Note: loss, class_weights: no effect' in caplog.text
    caplog.clear()
    tu.train(data=str(small_set), loss_fn=lambda model, batch: model(batch['image']).square().mean((1, 2, 3)),
             **TINY | {'num_epochs': 1})
    assert 'learning_rate = ' in caplog.text and 'loss = ' not in caplog.text


@pytest.mark.usefixtures('each_epoch_saved')
def test_a_run_with_a_loss_of_ones_own_goes_on_with_that_loss_alone(small_set, caplog, capsys):
    def loss_fn(model, batch):
        if (folder / 'best.pt').exists():                               # after an epoch
            os.kill(os.getpid(), signal.SIGTERM)
        return model(batch['image']).square().mean((1, 2, 3))

    folder = small_set.parent / 'run'
    result = tu.train(data=str(small_set), loss_fn=loss_fn, run_dir=str(folder), **TINY)
    assert f"Continue with:  train_unet.train(resume={str(result.run_dir)!r}, ...) and the network, loss" in caplog.text
    assert tu.main([f'resume={result.run_dir}']) == 2
    assert 'was trained by a loss of your own: go on from Python' in capsys.readouterr().err
    tu.train(resume=str(folder), loss_fn=lambda model, batch: model(batch['image']).square().mean((1, 2, 3)))
    with edited(folder / 'last.pt') as saved:
        del saved['own_loss']                                          # of an older run nobody knows
    assert tu.main([f'resume={folder}', 'num_epochs=3']) == 0


def test_a_loss_derived_from_ours_is_ones_own_too(small_set, capsys):
    loss_fn = type('Halved', (tu.SegmentationLoss,), {'losses': lambda self, *both: super(
        type(self), self).losses(*both) / 2})(tu.CONFIG | {'num_classes': 2})
    result = tu.train(data=str(small_set), loss_fn=loss_fn, **TINY | {'num_epochs': 1})
    assert tu.main([f'resume={result.run_dir}', 'num_epochs=2']) == 2
    assert 'was trained by a loss of your own: go on from Python' in capsys.readouterr().err


@pytest.mark.parametrize('model, share', [(None, 0.18), (nn.Identity(), 0.0)])
def test_only_a_network_of_ones_own_has_one_size(model, share):
    config, why = {**tu.CONFIG, 'progressive_resizing': 0.18}, {'progressive_resizing': 'sooner good on a CPU'}
    tu.settle_for_own(model, squares, config, dict.fromkeys(config, 'default'), why)
    assert config['progressive_resizing'] == share and bool(why) == bool(share)


class Words(torch.utils.data.Dataset):
    """Samples of different lengths, in a mapping that is no dict, and so are the batches: transformers' Mask2Former
    notebooks return what the image processor made of the samples from their collate_fn."""
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return UserDict(x=torch.ones(index + 1))

    @staticmethod
    def collate_fn(samples):
        assert all(type(sample) is dict for sample in samples)
        return UserDict(x=nn.utils.rnn.pad_sequence([sample['x'] for sample in samples], batch_first=True))


def test_a_data_set_may_bring_its_collate_fn_and_any_mapping():
    result = train(nn.Linear(1, 1), Words(), Words(),
                   lambda model, batch: model(batch['x'].sum(1, keepdim=True)).square().mean(1), num_epochs=1)
    assert len(result.history) == 1


@pytest.mark.parametrize('hide', [lambda data: torch.utils.data.Subset(data, range(8)),
                                  lambda data: torch.utils.data.ConcatDataset([data, data]),
                                  lambda data: torch.utils.data.random_split(data, [8, 0])[0]])
def test_a_collate_fn_is_found_inside_a_part_of_a_data_set(hide):
    result = train(nn.Linear(1, 1), hide(Words()), hide(Words()),
                   lambda model, batch: model(batch['x'].sum(1, keepdim=True)).square().mean(1), num_epochs=1)
    assert len(result.history) == 1


class Twice(Samples):
    """Two views of each image in one batch, as contrastive losses compare them."""

    @staticmethod
    def collate_fn(samples):
        return torch.utils.data.default_collate([*samples, *samples])


def test_a_batch_is_what_collate_fn_makes_of_it():
    """Cut at batch_size, no image would meet its other view."""
    lengths = []

    def counting(model, batch):
        lengths.append((model.training, len(batch['image'])))
        return squares(model, batch)

    train(train_data=Twice(), val_data=Twice(4), loss_fn=counting, batch_size=4, num_epochs=1)
    assert set(lengths) == {(True, 8), (False, 8)}


class Meta(torch.Tensor):
    """As MONAI's MetaTensor: what is computed from it is of its kind, which no checkpoint may hold."""


class Metas(Samples):
    def __getitem__(self, index):
        return super().__getitem__(index) | {'image': self.images[index].as_subclass(Meta)}


def test_a_run_on_tensors_of_another_class_can_be_resumed():
    train(train_data=Metas(), val_data=Metas(5), num_epochs=1)
    assert last()['epoch'] == 1                                        # torch.load refused it
    assert len(train(train_data=Metas(), val_data=Metas(5), num_epochs=2, resume='run', run_dir='auto').history) == 2


def test_a_model_of_an_earlier_run_is_trained_on_data_of_ones_own(small_set):
    """No picture shows these, and evaluate does not know them."""
    tu.train(**TINY | {'num_epochs': 1}, data=str(small_set), run_dir='first')
    data = [{'image': torch.randint(256, (3, 32, 32), dtype=torch.uint8)} for _ in range(4)]
    tu.train(model=tu.load('first', 'cpu'), train_data=data, val_data=data, tensorboard=True,
             loss_fn=lambda model, batch: model(batch['image']).square().mean((1, 2, 3)), **OWN | {'num_epochs': 1})
    assert 'Everything is in' in log_text() and 'evaluate' not in log_text()


def test_the_size_policy_cuts_no_batch_of_ones_own(caplog):
    lengths = []
    train(val_data=Samples(4), loss_fn=lambda *both: lengths.append(len(both[1]['image'])) or squares(*both),
          num_epochs=1, size_policy='crop')
    assert {*lengths} == {4}
    for epochs in (1, 2):
        train(num_epochs=epochs, size_policy='crop', run_dir='again', resume='auto')
    assert "size_policy: '" not in caplog.text                         # 'resize' -> 'crop' may change the result


class Boxes(Samples):
    """Images of several sizes with several boxes each, joined as torchvision's detectors take them."""

    def __getitem__(self, index):
        return torch.ones(3, 8, 8 + index), {'boxes': torch.ones(1 + index % 3, 4)}

    @staticmethod
    def collate_fn(samples):
        return tuple(zip(*samples))


def test_a_batch_of_lists_has_as_many_samples_as_they_are_long():
    """The first tensor is an image there, as long as it has colours."""
    def loss_fn(model, batch):
        images, targets = batch
        return torch.stack([model(image[None]).square().mean() + len(target['boxes'])
                            for image, target in zip(images, targets, strict=True)])

    result = train(network(), Boxes(), Boxes(6), loss_fn, num_epochs=1)
    assert 1 < result.history[0]['val_loss'] < 5


@pytest.mark.parametrize('count', [2, 3, 4])                           # as many as there are colours, too
def test_a_batch_of_lists_is_cut_between_samples(count):
    pieces = tu.split_batch(Boxes.collate_fn([Boxes()[i] for i in range(count)]), 1)
    assert [[tuple(image.shape) for image in images] for images, _ in pieces] == [[(3, 8, 8 + i)] for i in range(count)]
    assert [len(targets[0]['boxes']) for _, targets in pieces] == [1 + i % 3 for i in range(count)]


def test_a_batch_of_lists_of_crops_has_as_many_samples_as_each_tensor_has_rows():
    """Two global and six local crops, as self-supervised training joins them."""
    crops = [torch.ones(4, 3, 8, 8)] * 2, [torch.ones(4, 3, 4, 4)] * 6
    assert tu.batch_length(crops) == 4
    assert [len(tensor) for tensor in sum(tu.split_batch(crops, 2)[1], [])] == [2] * 8


def test_a_run_of_longer_batches_that_diverges_names_its_samples():
    """Which of the views is which collate_fn alone knows: all samples of the batch are named."""
    lost = lambda model, batch: squares(model, batch) * (math.nan if run_has_begun() else 1)
    run_has_begun = Path('run/config.py').exists
    with pytest.raises(tu.TrainingDiverged) as error:
        train(train_data=Twice(), val_data=Twice(4), loss_fn=lost, max_bad_steps=2)
    assert len(re.findall('in the batch: sample [0-7]', str(error.value))) == 4

    class Torn(Twice):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            return sample | {'image': sample['image'] * math.nan} if index == 5 and run_has_begun() else sample

    with pytest.raises(tu.DataError, match='one of .*sample 5.* not finite'):
        train(train_data=Torn(), val_data=Twice(4), max_bad_steps=1, run_dir='other', batch_size=8)


class Frozen(nn.Sequential):
    """Its norm stays in eval mode, whoever asks."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


@pytest.mark.parametrize('change, told', [(lambda net: net[1].eval(), True), (lambda net: net.eval(), False),
                                          (lambda net: None, False)])
@pytest.mark.parametrize('kind', [nn.Sequential, Frozen])
def test_parts_in_eval_mode_that_are_trained_all_the_same_are_told(kind, change, told, caplog):
    """It is what most loops do; who froze a norm may not have meant it."""
    net = kind(*network())
    change(net)
    before = net[1].running_mean.clone()
    train(net, num_epochs=1)
    assert ('came with parts in eval mode' in caplog.text) == (told and kind is nn.Sequential)
    assert torch.equal(net[1].running_mean, before) == (kind is Frozen)


def test_parts_in_eval_mode_are_told_on_a_folder_of_images_too(small_set, caplog):
    net = network()
    net[1].eval()
    tu.train(model=net, data=str(small_set), **{**PLAIN, 'num_epochs': 1, 'image_size': 32})
    assert 'came with parts in eval mode' in caplog.text


def test_a_batch_without_a_tensor_is_told():
    class Numbers(Samples):
        collate_fn = staticmethod(lambda samples: {'names': [sample['index'] for sample in samples]})

    with pytest.raises(tu.UserError, match='there is no tensor in this dict; collate_fn must give'):
        train(train_data=Numbers())
    assert not Path('run').exists()


class Augmented(Samples):
    """Images that albumentations changes at random, by generators of its own."""

    def __init__(self, count=8):
        super().__init__(count)
        self.change = A.Compose([A.GaussNoise(p=1)])

    def __getitem__(self, index):
        return self.change(image=np.full((8, 8, 3), 0.5, np.float32))['image']


class AugmentedByName(Augmented):
    """The pipeline stands in a dict, with that of validation."""

    def __init__(self, count=8):
        super().__init__(count)
        self.changes = {'train': A.Compose([A.GaussNoise(p=1)]), 'val': None}

    change = property(lambda self: self.changes['train'], lambda self, value: None)


@pytest.mark.parametrize('hide', [lambda data: data, lambda data: torch.utils.data.Subset(data, range(8)),
                                  lambda data: AugmentedByName()], ids=['plain', 'in a Subset', 'in a dict'])
def test_albumentations_in_a_data_set_draw_by_the_seed_and_not_by_the_worker(hide):
    """Each worker has a copy of their generators: eight of them would draw eight times the same."""
    drawn = []
    for workers, seed in ((0, 0), (2, 0), (0, 1)):
        data = tu.Plain(hide(Augmented()), seed)
        loader = tu.build_loader(data, {**tu.CONFIG, 'num_workers': workers}, torch.device('cpu'), batch_size=2)
        drawn.append(torch.cat([*loader]))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert len({image.numpy().tobytes() for image in drawn[0]}) == 8


def test_transforms_of_one_data_set_do_not_draw_the_same():
    """Two flips would come together always, or never."""
    class Flipped(Samples):
        def __init__(self):
            super().__init__(64)
            self.across, self.down = A.HorizontalFlip(p=0.5), A.VerticalFlip(p=0.5)

        def __getitem__(self, index):
            image = np.arange(4).reshape(2, 2)
            for flip in (self.across, self.down):
                image = flip(image=image)['image']
            return torch.tensor(image[0, 0])

    assert {*tu.Plain(Flipped(), 0).__getitems__([*range(64)]).tolist()} == {0, 1, 2, 3}


def noise_of(package):
    """A transform that draws as MONAI's do, whose class says that it comes from a package; 8 samples, each changed."""
    class Noise:
        def __init__(self):
            self.draw = np.random.RandomState(0)

        def set_random_state(self, seed=None, state=None):
            assert isinstance(seed, int) and state is None
            self.draw = np.random.RandomState(seed)

    class Noisy(Samples):
        def __init__(self):
            super().__init__()
            self.transform = Noise()

        def __getitem__(self, index):
            return self.images[0] + float(self.transform.draw.normal())

    Noise.__module__ = package
    return Noisy()


def test_transforms_of_monai_draw_by_the_seed_too_and_those_of_ones_own_are_left_alone():
    drawn = {}
    for workers in (0, 2):
        loader = tu.build_loader(tu.Plain(noise_of('monai.transforms'), 0), {**tu.CONFIG, 'num_workers': workers},
                                 torch.device('cpu'), batch_size=2)
        drawn[workers] = torch.cat([*loader])
    assert torch.equal(drawn[0], drawn[2]) and len(drawn[0][:, 0, 0, 0].unique()) == 8
    data = noise_of('mine')
    data.transform.set_random_state = None                             # would fail if it were asked
    assert len(tu.Plain(data, 0).__getitems__([0, 1])) == 2


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('error', [EOFError('no more'), RuntimeError('no fit'), ConnectionError('no network'),
                                   tu.cv2.error('no file'), StopIteration('no end')])
def test_an_error_of_a_data_set_is_not_taken_for_a_workers(workers, error, caplog, hasty):
    class Torn(Samples):
        def __getitem__(self, index):
            if os.path.exists('run/history.csv'):
                raise error
            return super().__getitem__(index)

    with pytest.raises(tu.DataError, match=fr'sample \d: {type(error).__name__}: {error}'):
        train(train_data=Torn(), num_epochs=3, num_workers=workers)
    assert 'starting the workers again' not in caplog.text


def test_a_data_set_may_say_itself_what_is_wrong():
    class Strict(Samples):
        def __getitem__(self, index):
            raise tu.DataError('mine: is empty')

    with pytest.raises(tu.DataError) as caught:
        train(train_data=Strict())
    assert caught.value.problems[0] == 'mine: is empty'


@pytest.mark.parametrize('dtype', [torch.float16, torch.float64])
def test_samples_of_any_floating_point_precision_train(dtype):
    class Stored(Samples):
        def __getitem__(self, i):
            return super().__getitem__(i) | {'image': self.images[i].to(dtype), 'target': self.targets[i].to(dtype)}

    result = train(network(), Stored(), Stored(5), num_epochs=1)
    assert math.isfinite(result.history[0]['train_loss'])


@pytest.mark.parametrize('first', [torch.arange(3), torch.ones(3, dtype=torch.complex64)])
def test_samples_take_the_precision_of_the_weights_not_of_what_comes_first(first):
    model = network()
    model.register_parameter('table', nn.Parameter(first, requires_grad=False))
    seen = []
    model.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0].dtype))
    assert next(model.parameters()) is model.table
    train(model, num_epochs=1)
    assert set(seen) == {torch.float32}


class Lazily(torch.utils.data.Dataset):
    """Records of a file that is opened when the first one is asked for, as HDF5 and zip files usually are."""
    file = None

    def __init__(self, path, count=64):
        self.path, self.count = path, count
        np.arange(count, dtype=np.float32).tofile(path)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.file = self.file or open(self.path, 'rb', buffering=0)
        self.file.seek(index * 4)
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


def test_the_rate_for_data_of_ones_own_follows_the_stated_rule():
    for words, rate in ({}, 2e-3), ({'batch_size': 32}, 4e-3), ({'optimizer': 'SGD', 'batch_size': 16}, 0.04):
        assert tu.settle_own({**tu.CONFIG, **words})['learning_rate'] == rate


@pytest.mark.parametrize('given, told', [(['train_data'], 'model and val_data and loss_fn'),
                                         (['train_data', 'val_data', 'model'], 'give loss_fn too')])
def test_what_is_missing_for_data_of_ones_own_is_said(given, told):
    own = {'model': torch.nn.Linear(1, 1), 'train_data': [0], 'val_data': [0], 'loss_fn': len}
    with pytest.raises(tu.UserError, match=told):
        tu.train(**{name: own[name] for name in given})


@pytest.mark.parametrize('wrong', [{'train_data': iter([1])}, {'val_data': []}, {'train_data': Samples(0)}])
def test_data_that_cannot_be_asked_or_is_empty_is_refused_in_words(wrong):
    with pytest.raises(tu.UserError, match='map-style Dataset'):
        train(**wrong)


def test_a_preset_that_cannot_save_memory_on_data_of_ones_own_says_so(caplog):
    train(num_epochs=1)
    assert 'activation_checkpointing' not in caplog.text
    train(preset='low_memory', num_epochs=1, run_dir='other')
    assert re.search('activation_checkpointing.*: no effect', caplog.text)


def test_what_takes_a_run_takes_the_result_too(small_set):
    result = tu.train(**{**TINY, 'data': str(small_set), 'num_epochs': 1})
    for config in (tu.resolve_config(result)[0], tu.load(result).config):
        assert config['decoder_channels'] == TINY['decoder_channels']


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

    for data in ({'train_data': torch.utils.data.DataLoader(Samples())}, {'val_data': Endless()}, {'val_data': 'set'}):
        with pytest.raises(tu.UserError, match=f'{[*data][0]}: .* of a DataLoader give its .dataset'):
            train(**data)
    assert not Path('run').exists()


def test_runs_on_data_sets_of_ones_own_are_not_taken_for_others(small_set, capsys):
    words = {**PLAIN, 'run_dir': 'auto'}
    train(stopping_at(network(), 4), **{**words, 'num_epochs': 3})
    with pytest.raises(tu.UserError, match='give run_dir too'):
        train(**words, resume='auto')
    with pytest.raises(tu.UserError, match='go on from Python, with what it began with'):
        tu.train(resume='runs/run-1')
    for words in ('check resume=runs/run-1', 'check --preset runs/run-1', 'tune --preset runs/run-1'):
        assert tu.main(words.split()) == 2
        assert 'runs/run-1: was trained on data sets of your own: go on from Python' in capsys.readouterr().err
    assert tu.find_resume({**tu.CONFIG, 'resume': 'auto'}, False) is None     # the demo, or another set
    assert train(run_dir='auto', resume='runs/run-1').stopped_by == 0


# --- tried before the first step ------------------------------------------------------


def test_the_smoke_test_leaves_no_trace(monkeypatch):
    train_own(network(dropout=0.5), noisy_squares)
    monkeypatch.setattr(tu, 'smoke_test', lambda state, *args: args[-2].save(state, args[-3]))
    train_own(network(dropout=0.5), noisy_squares, run_dir='without')
    assert_same(final(), final('without'))


class Spectral(nn.Conv2d):
    """Channels of a convolution become complex (LaMa's FFC does that): torch has no such thing of bfloat16."""

    def forward(self, images):
        maps = super().forward(images)
        return torch.fft.ifft2(torch.complex(maps, maps)).real


def test_a_network_without_kernels_for_16_bits_trains_in_float32():
    result = train(Spectral(3, 1, 1), use_amp=True, amp_dtype='bfloat16', num_epochs=1)
    assert re.search('a step fails in bfloat16 .*: precision bfloat16 -> float32', result.history[0]['event'])
    assert tu.load_checkpoint('run/last.pt')['dtype'] == 'float32' and len(result.history) == 2


class ByNumPy(nn.Conv2d):
    """NumPy knows no bfloat16: TypeError."""

    def forward(self, images):
        maps = super().forward(images)
        return maps * torch.from_numpy(maps.detach().numpy().mean((2, 3), keepdims=True))


class Asserts(nn.Conv2d):
    def forward(self, images):
        maps = super().forward(images)
        assert maps.dtype == torch.float32
        return maps


@pytest.mark.parametrize('kind', [ByNumPy, Asserts])
def test_whatever_fails_in_16_bits_alone_trains_in_float32(kind):
    result = train(kind(3, 1, 1), use_amp=True, amp_dtype='bfloat16', num_epochs=1)
    assert re.search('a step fails in bfloat16 .*: precision bfloat16 -> float32', result.history[0]['event'])


def test_a_loss_that_fails_in_every_precision_is_not_put_down_to_one(caplog):
    with pytest.raises(RuntimeError, match='size of tensor'):
        train(loss_fn=lambda model, batch: model(batch['image']) - torch.ones(3, 5), use_amp=True, amp_dtype='bfloat16')
    assert 'a step fails' not in caplog.text
    texts = iter(['the first of them', 'the second'])

    def failing(model, batch):
        raise TypeError(next(texts))

    with pytest.raises(TypeError, match='the first of them'):
        train(loss_fn=failing, use_amp=True, amp_dtype='bfloat16', run_dir='other')


def test_an_error_of_a_loss_keeps_its_cause():
    def loss_fn(model, batch):
        try:
            {}['key']
        except KeyError as error:
            raise TypeError('of the loss') from error

    for amp in ({'use_amp': False}, {'use_amp': True, 'amp_dtype': 'bfloat16'}):
        with pytest.raises(TypeError, match='of the loss') as raised:
            train(loss_fn=loss_fn, **amp, run_dir=str(amp['use_amp']))
        assert isinstance(raised.value.__cause__, KeyError)


def test_an_error_of_a_data_set_in_a_worker_names_the_line():
    class Bad(Samples):
        def __getitem__(self, index):
            return {}['key']

    with pytest.raises(tu.DataError, match=r"sample \d+: KeyError: 'key' \(.*test_training.py, line \d+\)"):
        train(train_data=Bad(12), num_workers=1)


def test_a_constant_loss_is_not_taken_for_too_little_memory():
    """After memory ran out once the micro-batch was halved, down to one image."""
    steps = []

    def loss_fn(model, batch):
        losses = squares(model, batch)
        steps.append(1)
        if len(steps) == 5:                                            # after the trial
            raise RuntimeError('CUDA out of memory')
        return torch.zeros(len(losses)) if len(steps) > 6 and torch.is_grad_enabled() else losses

    with pytest.raises(tu.UserError, match='the loss has no gradient'):
        train_own(loss_fn=loss_fn)


@pytest.mark.parametrize('error', [MemoryError('no more'), RuntimeError('CUDA out of memory')])
def test_a_data_set_without_memory_is_not_taken_for_broken(error):
    with pytest.raises(type(error)) as raised, tu.naming(lambda: 'sample 1'):
        raise error
    assert raised.value is error


def test_samples_that_make_no_batch_are_named():
    class Ragged(Samples):
        def __getitem__(self, index):
            return {'image': torch.zeros(3, 8 + index, 8), 'target': torch.zeros(1, 8, 8)}

    for keys in ([3, 4], [(1, 3), (1, 4)]):                            # of validation and of training
        with pytest.raises(tu.DataError, match='samples 3, 4 make no batch: RuntimeError: stack expects'):
            tu.Plain(Ragged(12), seed=0).__getitems__(keys)


def test_the_smoke_test_takes_a_whole_batch_of_validation():
    class TwoSizes(Samples):
        def __getitem__(self, index):
            side = 8 + 4 * (index % 2)
            return {'image': torch.zeros(3, side, side), 'target': torch.zeros(1, side, side)}

    calls = []
    with pytest.raises(tu.DataError, match='samples 0, 1, 2, 3 make no batch: RuntimeError: stack expects.*collate_fn'):
        tu.train(model=network(), loss_fn=lambda *args: calls.append(1) or squares(*args), train_data=Samples(12),
                 val_data=TwoSizes(4), **OWN)
    assert not calls                                                   # nothing was trained before that was seen


def test_a_validation_that_fails_ends_the_run_before_it_begins():
    calls = []

    def loss_fn(model, batch):
        calls.append(torch.is_grad_enabled())
        if not calls[-1]:
            raise ZeroDivisionError('in validation (a test)')
        return squares(model, batch)

    model, before = network(), copy.deepcopy(network().state_dict())
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with pytest.raises(ZeroDivisionError):
        train_own(model, loss_fn=loss_fn)
    assert calls == [True, False]
    assert_same(model.state_dict(), before)                            # the next try begins where this one did
    assert torch.equal(torch.rand(3), wanted)


def test_the_error_of_a_trial_is_told_though_the_folder_vanishes():
    def loss_fn(model, batch):
        shutil.rmtree('run')
        raise ZeroDivisionError('of theirs')

    with pytest.raises(ZeroDivisionError):
        train_own(loss_fn=loss_fn)


def test_an_assertion_that_fails_on_a_gpu_is_told_as_it_is(monkeypatch):
    """Nothing works there afterwards: going back to a safer precision ended in an error for each of the weights."""
    def loss_fn(model, batch):
        raise RuntimeError('CUDA error: device-side assert triggered')

    def go_back(*args, **changes):
        raise RuntimeError('Error(s) in loading state_dict')

    monkeypatch.setattr(tu, 'go_back', go_back)
    with pytest.raises(RuntimeError, match='device-side'):
        train_own(loss_fn=loss_fn, use_amp=True, amp_dtype='bfloat16')


def test_a_disk_that_is_full_at_the_start_is_told_as_it_is(monkeypatch):
    """There is nothing to go back to."""
    def full(*_):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(tu, 'save_checkpoint', full)
    with pytest.raises(tu.UserError, match='could not be written'):
        train_own()


def test_a_training_that_fails_in_its_middle_leaves_the_network_where_it_was():
    model, calls = network(), []

    def loss_fn(model, batch):
        calls.append(torch.is_grad_enabled())
        if sum(calls) == 1 + 3 + 2:                                    # trial, epoch 1, second step of epoch 2
            raise ZeroDivisionError
        return squares(model, batch)

    with pytest.raises(ZeroDivisionError):
        train_own(model, loss_fn=loss_fn)
    saved = tu.load_last('run')[0]['model']
    assert any(not torch.equal(value, saved[name]) for name, value in model.state_dict().items() if 'weight' in name)


def test_parameters_of_whole_numbers_are_no_other_precision(caplog):
    model = network()
    model.steps = nn.Parameter(torch.arange(3), requires_grad=False)
    train_own(model, num_epochs=1)
    assert 'not float32' not in caplog.text


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_an_edited_build_network_may_give_another_precision(small_set, monkeypatch, dtype):
    monkeypatch.setattr(tu, 'build_network', lambda config: own_network().to(dtype))
    result = tu.train(data=str(small_set), **OWN_RUN | {'num_epochs': 1})
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float64])
def test_a_network_in_another_precision_is_converted_before_it_is_tried(small_set, caplog, dtype):
    """With activation_checkpointing it was told to take another image_size."""
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(*sizes, 3, padding=1), nn.ReLU()) for sizes in ((3, 4), (4, 1))))
    tu.train(model=net.to(dtype), data=str(small_set), **OWN_RUN | {'num_epochs': 1}, activation_checkpointing=True)
    assert 'they are now' in caplog.text
    loaded = tu.load('own', model=copy.deepcopy(net).to(dtype))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


class OddState(nn.Conv2d):
    """A layer whose state cannot be read back without running code."""

    def get_extra_state(self):
        return Harm()

    def set_extra_state(self, state):
        pass


def test_a_checkpoint_that_could_not_be_resumed_ends_the_run_before_it_begins():
    loss_fn = stop_at(99, squares)
    with pytest.raises(tu.UserError, match='more than tensors and plain values, which could run code: not loaded'):
        train_own(nn.Sequential(OddState(3, 1, 1)), loss_fn)
    assert len(loss_fn.calls) <= 2 and not os.path.exists('harmed')


def test_one_image_that_batchnorm_refuses_is_told_in_words():
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))
    with pytest.raises(tu.UserError, match='type batch_size=2'):
        train(model=model, batch_size=1)


def test_small_images_under_crop_are_padded_or_tried_before_training(tmp_path):
    """A network of one's own, as PAN, takes 128 x 128, but not the 64 x 64 that validation shows of images that small;
    for PAN these are padded."""
    words = TINY | {'image_size': 128, 'size_policy': 'crop', 'num_epochs': 1, 'data': str(draw_set(tmp_path / 'set'))}
    own = nn.Sequential(nn.Conv2d(3, 1, 1), nn.ReflectionPad2d(70), nn.AvgPool2d(141, 1))
    with pytest.raises(tu.ConfigError, match='cannot take .* or size_policy=resize'):
        tu.train(**words, model=own)
    words |= {'architecture': 'PAN', 'encoder': 'tu-test_resnet'}
    assert tu.check(**words) == 0
    assert 0 <= tu.train(**words).best['iou'] <= 1


# --- run folders ----------------------------------------------------------------------


def test_a_folder_of_the_users_is_not_removed_nor_overwritten(small_set, tmp_path):
    mine = tmp_path / 'mine'
    mine.mkdir()
    (mine / 'log.txt').write_text('notes')
    with pytest.raises(tu.UserError):
        tu.train(**{**SMALL, 'data': 'nowhere', 'run_dir': str(mine)})
    assert 'notes' in (mine / 'log.txt').read_text()
    (mine / 'config.py').write_text('SECRET = 1')
    with pytest.raises(tu.UserError, match='config.py: would be overwritten'):
        tu.train(**{**SMALL, 'run_dir': str(mine)})
    assert (mine / 'config.py').read_text() == 'SECRET = 1'


@pytest.mark.parametrize('folder', ['', 'images'])
@pytest.mark.parametrize('command', ['train', 'check'])
def test_a_run_is_not_written_among_the_images(small_set, command, folder, capsys):
    there = sorted(os.listdir(small_set / folder))
    assert tu.main([command, f'data={small_set}', f'run_dir={small_set / folder}', *WORDS]) == 2
    assert 'a run wants a folder of its own' in capsys.readouterr().err
    assert sorted(os.listdir(small_set / folder)) == there


def test_a_run_may_be_written_into_a_folder_of_its_own_beside_the_images(small_set):
    assert tu.main(['check', f'data={small_set}', f'run_dir={small_set / "runs"}', *WORDS]) == 0


@pytest.mark.parametrize('command', ['train', 'check'])
def test_a_folder_that_holds_a_run_is_refused_with_a_line_that_can_be_typed(two, tmp_path, command, capsys):
    run = shutil.copytree(two[0], tmp_path / 'my run')
    assert tu.main([command, f'data={two[1]}', f'run_dir={run}', 'device=cpu']) == 2
    line, = re.findall(r'holds a run already; (.*) continues it', capsys.readouterr().err)
    assert tu.parse_overrides(shlex.split(line)) == ({'resume': str(run)}, [])


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


def test_who_comes_second_leaves_the_run_of_the_first_alone(two, tmp_path, monkeypatch):
    """Both saw no folder of that name; the other made it a moment sooner."""
    from filelock import FileLock
    run, real = tmp_path / 'run', tu.choose_run_dir
    lock = FileLock(str(run / '.lock'))

    def choose(*how):
        run.mkdir()
        lock.acquire()
        for name in ('config.py', 'last.pt', 'log.txt'):
            (run / name).write_text('of the other')
        return real(*how)

    monkeypatch.setattr(tu, 'choose_run_dir', choose)
    with pytest.raises(tu.UserError, match='is in use by'):
        tu.train(**ENOUGH, data=str(two[1]), run_dir=str(run))
    lock.release()
    assert (run / 'last.pt').read_text() == (run / 'config.py').read_text() == 'of the other'


def test_ctrl_c_before_the_first_step_leaves_no_trace():
    class Slow(Samples):
        def __getitem__(self, index):
            os.kill(os.getpid(), signal.SIGINT)
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        train(train_data=Slow())
    assert not os.path.exists('run')


def test_a_mistake_in_a_loss_leaves_no_trace_and_no_folder_in_use():
    """Mended, the same line works."""
    with pytest.raises(KeyError):
        train(loss_fn=lambda model, batch: batch['mistyped'])
    assert not os.path.exists('run')
    train(num_epochs=1)


def test_a_home_folder_is_written_as_a_tilde(small_set, tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    result = tu.train(data=str(small_set), run_dir='~/mine', **{**TINY, 'num_epochs': 1})
    assert result.run_dir == tmp_path / 'mine' and tu.load('~/mine').config['num_classes'] == 2
    assert tu.train(resume='~/mine', num_epochs=2).history[-1]['epoch'] == 2
    assert tu.main(['evaluate', '~/mine']) == 0


def test_a_pipeline_is_found_from_another_folder(small_set, tmp_path, monkeypatch):
    import albumentations
    (tmp_path / 'a.json').write_text(json.dumps(albumentations.HorizontalFlip(p=1.0).to_dict()))
    result = tu.train(data=str(small_set), augment='a.json', run_dir=str(tmp_path / 'run'),
                      **{**TINY, 'num_epochs': 1})
    (tmp_path / 'elsewhere').mkdir()
    monkeypatch.chdir(tmp_path / 'elsewhere')
    again = tu.train(str(result.run_dir / 'config.py'), run_dir=str(tmp_path / 'again'))
    assert again.history[-1]['train_loss'] == result.history[-1]['train_loss']


# --- what a training leaves behind ----------------------------------------------------


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


def test_a_training_leaves_cudnn_as_the_caller_has_it(small_set, monkeypatch):
    """Else each size that a notebook shows to a network afterwards is searched for, for seconds."""
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', False)
    tu.train(data=small_set, **TINY | {'num_epochs': 1})
    assert not torch.backends.cudnn.benchmark


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


@pytest.mark.parametrize('call', [1, 4])                               # in the smoke test, in training
def test_a_mistake_keeps_no_network_once_its_error_is_gone(call):
    """Else the next try has the network and the step of this one beside its own on the GPU."""
    def mistaken(model, batch):
        calls.append(1)
        if len(calls) == call:
            raise TypeError('a mistake')
        return squares(model, batch)

    gc.disable()
    try:
        for number in range(2):                                        # what the first one imports leaves cycles
            calls, model = [], network()
            alive = weakref.ref(model)
            with contextlib.suppress(TypeError):
                train(model, loss_fn=mistaken, run_dir=f'run-{number}')
            del model
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize('use', [tu.check, tu.tune])
def test_a_command_that_is_interrupted_leaves_nothing_in_its_frames(use, small_set, monkeypatch):
    """tune's networks, with the states of their optimizers, are the most that a notebook could keep."""
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tu, 'warn_of_size', interrupted)               # the networks are made by then
    with pytest.raises(KeyboardInterrupt) as caught:
        use(data=str(small_set), **TINY)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    below = frames[[frame.f_code.co_name for frame in frames].index(use.__name__):]
    assert len(below) > 1 and not any(frame.f_locals for frame in below)


def test_what_a_run_leaves_in_a_cycle_is_gone_before_the_gpu_is_freed(monkeypatch):
    class Cycle:
        def __init__(self):
            self.itself = self

    def loss_fn(model, batch):
        left.append(weakref.ref(Cycle()))
        return squares(model, batch)

    left, alive = [], []
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 0)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    monkeypatch.setattr(torch.cuda, 'empty_cache', lambda: alive.append(sum(ref() is not None for ref in left)))
    gc.disable()
    try:
        train_own(loss_fn=loss_fn, num_epochs=1)
    finally:
        gc.enable()
    assert left and alive == [0]


# --- several trainings in one process, scripts that workers import --------------------


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


def test_a_script_that_a_worker_imports_is_told_where_to_train(tmp_path, monkeypatch):
    """Where workers are spawned each of them runs the script: it would train again in every one. Python still says in
    which process it does, and we heed it."""
    (tmp_path / 'mine.py').write_text(
        'import multiprocessing\n'
        'if __name__ == "__mp_main__":\n'
        '    print(multiprocessing.current_process()._inheriting)\n'
        'if __name__ == "__main__":\n'
        '    worker = multiprocessing.get_context("spawn").Process(target=print)\n'
        '    worker.start()\n'
        '    worker.join()\n')
    done = subprocess.run([sys.executable, 'mine.py'], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ('True\n\n', '')              # the last of them is what the worker prints
    monkeypatch.setattr(multiprocessing.current_process(), '_inheriting', True, raising=False)
    with pytest.raises(tu.UserError, match="put what trains below if __name__ == '__main__':"):
        tu.train(num_epochs=1, data='nowhere')


# --- pictures and curves of a run -----------------------------------------------------


def test_pictures_that_cannot_be_drawn_cost_no_training(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)        # an installation that is broken
    assert train(num_epochs=1).best['loss'] > 0
    assert 'the pictures could not be written: import of matplotlib.figure halted' in log_text()


def test_a_backend_that_matplotlib_does_not_know_costs_no_training(monkeypatch):
    """MPLBACKEND=nonsense: the result was lost after the last epoch."""
    def refuse(*_, **__):
        raise ValueError("Key backend: 'nonsense' is not a valid value for backend")

    monkeypatch.setattr('matplotlib.figure.Figure.subplots', refuse)
    assert train(num_epochs=1).best['loss'] > 0 and 'the pictures could not be written' in log_text()


def test_pictures_that_find_no_memory_cost_no_training(small_set, monkeypatch):
    """NumPy's error is none of torch's: the result was lost after the last epoch."""
    def full(*_):
        raise MemoryError('Unable to allocate 9.00 GiB for an array')

    monkeypatch.setattr(tu, 'colour_errors', full)
    assert tu.train(**{**SMALL, 'num_epochs': 1}).is_saved
    assert 'the pictures could not be written: Unable to allocate' in log_text() and 'Everything is in' in log_text()


def test_pictures_find_enough_memory_too(small_set, monkeypatch):
    real = tu.SegmentationModel.forward

    def forward(self, images):
        if len(images) > 2:
            raise torch.OutOfMemoryError('CUDA out of memory')
        return real(self, images)

    monkeypatch.setattr(tu.SegmentationModel, 'forward', forward)
    assert (tu.train(**{**SMALL, 'num_epochs': 1}).run_dir / 'samples.png').exists()


@pytest.mark.parametrize('kind', ['TypeError', 'AttributeError'])
def test_a_tensorboard_that_is_broken_is_told_in_a_line(tmp_path, monkeypatch, kind):
    (tmp_path / 'tensorboard.py').write_text(f"raise {kind}('Descriptors cannot be created directly.')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if re.match(r'(torch\.utils\.)?tensorboard\b', name)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(tu.UserError, match='tensorboard=True: .*Descriptors .*: type  pip install -U tensorboard'):
        train(num_epochs=1, tensorboard=True)


def test_tensorboard_gets_curves_and_pictures(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    data = draw_set(tmp_path / 'set', count=8)
    drawn, draw = [], tu.draw_samples
    monkeypatch.setattr(tu, 'draw_samples', lambda model, *given: drawn.append(model.training) or draw(model, *given))
    tu.train(**TINY | {'num_epochs': 2}, data=str(data), run_dir=str(tmp_path / 'run'), tensorboard=True)
    assert len(drawn) > 1 and not any(drawn)                           # not by the statistics of a batch
    events = EventAccumulator(str(tmp_path / 'run' / 'tensorboard'))
    events.Reload()
    assert {'train_loss', 'val_loss', 'val_iou', 'lr'} <= set(events.Tags()['scalars'])
    assert len(events.Scalars('val_iou')) == 2 and events.Images('samples')[0].width > 400


@pytest.mark.parametrize('error', [MemoryError, torch.OutOfMemoryError])
def test_pictures_for_tensorboard_that_find_no_memory_end_no_training(small_set, monkeypatch, error):
    def full(*_):
        raise error('Unable to allocate 9.00 GiB for an array')

    monkeypatch.setattr(tu, 'draw_samples', full)
    assert len(tu.train(**{**SMALL, 'num_epochs': 2}, tensorboard=True).history) == 2
    assert 'tensorboard could not be saved: Unable to allocate' in log_text()


def test_the_pictures_for_tensorboard_are_not_compiled(tmp_path, monkeypatch):
    """That would take minutes in mid-run, and a fault of the compiler would end the run."""
    compiles, where = nn.Module.compile, []

    def backend(graph, inputs):
        where.append([frame.name for frame in traceback.extract_stack()])
        return graph.forward

    monkeypatch.setattr(nn.Module, 'compile', lambda model, **_: compiles(model, backend=backend))
    monkeypatch.setattr(tu, 'build_network', lambda config: nn.Conv2d(3, 1, 1))        # it is traced in no time
    data = draw_set(tmp_path / 'set', count=8)
    tu.train(**TINY | {'num_epochs': 2, 'ema_decay': None}, data=str(data), run_dir=str(tmp_path / 'run'),
             tensorboard=True, compile_model=True)
    assert where and not [names for names in where if tu.draw_samples.__name__ in names]


def test_tensorboard_that_is_not_installed_is_said_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, 'torch.utils.tensorboard', None)
    data = draw_set(tmp_path / 'set', count=8)
    with pytest.raises(tu.UserError, match='pip install -U tensorboard'):
        tu.train(**TINY, data=str(data), run_dir=str(tmp_path / 'run'), tensorboard=True)


# --- notebooks ------------------------------------------------------------------------


NOTEBOOK = TINY | {'num_epochs': 1, 'compile_model': False}
# The stop button of Jupyter sends SIGINT to the kernel; here once an epoch is done.
INTERRUPTED = """
import os, signal, threading, time
def stop():
    while not os.path.exists('long/history.csv'):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=stop).start()
result = train_unet.train(data='set', {tiny}, run_dir='long', early_stopping_patience=None)
print('stopped by', int(result.stopped_by), 'after', len(result.history), result.best['epoch'])
""".replace('{tiny}', '**dict({tiny}) | dict(num_epochs=10 ** 5)')
MODELS = 'import gc; gc.collect(); print(sum(isinstance(x, train_unet.SegmentationModel) for x in gc.get_objects()))'


def test_the_notebook_lines_of_the_readme_run(tmp_path):
    """In a real kernel, twice; pictures appear; a second run does not keep the first one's memory."""
    import nbclient
    import nbformat
    draw_set(tmp_path / 'set', count=8)
    block = re.search(r'## In a notebook\s+```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)[1]
    tiny = ', '.join(f'{k}={v!r}' for k, v in NOTEBOOK.items())
    block = block.replace("num_epochs=5", tiny).replace("'PATH'", "'set'").replace('photo.jpg', 'set/images/001.png')
    lines = [line for line in block.splitlines() if line.strip()]
    assert len(lines) == 4
    setup = f'import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]; import small_encoder'
    interrupted = INTERRUPTED.format(tiny=tiny)
    forgets = f'del result; train_unet.forget_shown(); {MODELS}'       # as train begins, in the cell after that shown
    cells = [setup, *lines[:3], MODELS, *lines[1:3], MODELS, *lines[2:], 'print(mask.shape)', 'result', forgets,
             interrupted, "print('and on')"]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    where = {'metadata': {'path': str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=200, kernel_name='python3', resources=where).execute()
    outputs = [output for cell in book.cells for output in cell.get('outputs', [])]
    assert sum('val loss' in output.get('data', {}).get('text/html', '') for output in outputs) == 4   # the history
    shown = [output for output in outputs if 'text/html' in output.get('data', {})]
    assert sum('data:image/png;base64' in output['data']['text/html'] for output in shown) == 4
    said = [''.join(output.get('text', '') for output in cell.outputs if output.get('name') == 'stdout')
            for cell in book.cells]
    assert '(40, 40)' in said[-5] and 'stopped by 2 after' in said[-2] and 'and on' in said[-1]
    assert said[4] == said[7] and int(said[4]) >= 1 and int(said[-3]) == 0


def test_results_are_forgotten_where_a_notebook_has_a_variable_of_its_own_called_out(monkeypatch):
    shell = types.SimpleNamespace(user_ns={'Out': 3, '_oh': {1: tu.Result([], {}, None, Path())}}, user_ns_hidden={},
                                  displayhook=types.SimpleNamespace())
    monkeypatch.setattr(tu, 'running_shell', lambda: shell)
    with pytest.raises(tu.ConfigError):
        tu.train(num_epohcs=1)                                         # costs no result
    assert shell.user_ns['_oh'][1]
    tu.forget_shown()
    assert shell.user_ns == {'Out': 3, '_oh': {1: ''}}


def test_a_module_that_is_loaded_again_says_each_line_once(monkeypatch, capsys):
    """As in a notebook, after CONFIG was edited. A copy of it: the other tests keep the one they have."""
    monkeypatch.setattr(tu.log, 'handlers', list(tu.log.handlers))
    spec = importlib.util.spec_from_file_location('again', tu.__file__)
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, 'again', again)                   # where dataclasses look
    spec.loader.exec_module(again)
    again.log.warning('one line')
    assert again.log is tu.log and capsys.readouterr().out == 'one line\n'


def test_a_model_of_the_module_before_it_was_loaded_again_is_refused():
    """It would be taken for a network of one's own, and its images normalised twice (IoU 0.947, then 0.000)."""
    old = type('SegmentationModel', (nn.Conv2d,), {'__module__': tu.__name__})
    with pytest.raises(tu.UserError, match=r'before importlib.reload.*train_unet.load'):
        tu.train(model=old(3, 1, 1), data='nowhere')


MIXED = {'num_epochs': 2, 'use_amp': True, 'amp_dtype': 'bfloat16', 'train_data': Samples(12), 'val_data': Samples(4)}


@pytest.fixture(scope='module')
def usual_training(tmp_path_factory):
    """What a training leaves where a notebook has set nothing."""
    folder = str(tmp_path_factory.mktemp('usual') / 'run')
    with in_threads(1):
        train(network(), run_dir=folder, **MIXED)
    return final(folder)


@contextlib.contextmanager
def with_default(change, value, usual):
    change(value)
    yield
    change(usual)


@pytest.mark.parametrize('setting', [
    torch.no_grad, torch.inference_mode,
    functools.partial(with_default, torch.set_default_dtype, torch.float64, torch.float32),
    functools.partial(with_default, torch.set_default_device, 'meta', None),
    *(functools.partial(torch.autocast, 'cpu', torch.float16, enabled) for enabled in (True, False))],
    ids=['no_grad', 'inference_mode', 'float64', 'device', 'autocast', 'autocast off'])
def test_what_a_notebook_has_set_changes_no_training(setting, tmp_path, usual_training):
    """An open autocast keeps weights in 16 bits until it closes: each step would have met those of the first."""
    model = network()

    def state():
        return (torch.is_grad_enabled(), torch.is_autocast_enabled('cpu'), torch.is_autocast_cache_enabled(),
                torch.get_default_dtype(), torch.empty(0).device)

    with setting():
        before = state()
        train(model, run_dir=str(tmp_path / 'inside'), **MIXED)
        assert state() == before
    assert_same(usual_training, final(tmp_path / 'inside'))


def test_a_run_writes_down_its_split_as_a_list_that_can_be_trained_on(small_set):
    first = tu.train(**TINY | {'num_epochs': 1}, data=str(small_set), seed=3)
    again = tu.train(**TINY | {'num_epochs': 1}, data=str(first.run_dir / 'split.csv'), seed=4)
    read = lambda result: sorted((result.run_dir / 'split.csv').read_text().splitlines())
    assert read(first) == read(again) and sum(line.endswith(',val') for line in read(first)) == 2
    assert re.search(r'Network: .*, 0\.\d+ million', (first.run_dir / 'log.txt').read_text())
    same = tu.train(preset=str(first.run_dir), data=str(first.run_dir / 'split.csv'), seed=5)    # as README types it
    assert read(same) == read(first) and same.model.config['encoder'] == TINY['encoder']


def test_a_loss_of_ones_own_gets_images_and_masks_of_the_data_of_config(tmp_path):
    """As README says: uint8 images, and masks of class ids."""
    seen = []

    def loss_fn(model, batch):
        images, masks = batch['image'], batch['mask']
        seen.append((images.shape[1:], masks.shape[1:], {*masks.unique().tolist()}))
        return F.binary_cross_entropy_with_logits(model(images)[:, 0], masks.float(), reduction='none').mean((1, 2))

    tu.train(**TINY, data=str(draw_set(tmp_path / 'set', count=8)), run_dir=str(tmp_path / 'run'), loss_fn=loss_fn)
    height, width = tu.load(tmp_path / 'run').config['image_size']
    assert seen and all(case == ((3, height, width), (height, width), {0, 1}) for case in seen)


@pytest.mark.parametrize('epochs, words', [(1, 'two steps'), (30, '5 % of the run'),
                                           (100_000, '10,000 steps')])
def test_the_reason_for_the_moving_average_is_true_of_short_runs_too(small_set, epochs, words):
    config, sources, _ = tu.resolve_config(None, TINY | {'data': str(small_set), 'num_epochs': epochs})
    *_, why = tu.prepare(config, sources, tu.torch.device('cpu'))
    assert why['ema_decay'] == f'averages over {words}'


def test_the_moving_average_counts_the_steps_that_are_run(tmp_path):
    """12 images in batches of 8 are two steps."""
    words = {'data': str(draw_set(tmp_path / 'set', count=15)), 'num_epochs': 100, 'batch_size': 8}
    config, sources, _ = tu.resolve_config(None, TINY | words)
    config, *_, data, _ = tu.prepare(config, sources, tu.torch.device('cpu'))
    assert len(data.pairs.rows('train')) == 12 and config['ema_decay'] == 1 - 20 / 200


# --- how a network begins -------------------------------------------------------------


def first_bias(data, **changes):
    """The bias of the last layer before anything is learnt."""
    config, sources, _ = tu.resolve_config(None, TINY | {'data': str(data)} | changes)
    config, _, _, data, _ = tu.prepare(config, sources, torch.device('cpu'))
    tu.settle_statistics(config, tu.SegmentationDataset(data, 'train', config, is_training=False))
    return tu.choose_model(None, config, data).network.segmentation_head[0].bias.detach()


def blocks(folder, side, empty=0):
    """Give all masks a block of side x side, the first `empty` of them none -> the folder."""
    for number, path in enumerate(sorted((folder / 'masks').iterdir())):
        mask = np.zeros((40, 40), np.uint8)
        mask[5:5 + side, number:number + side] = 255 * (number >= empty)
        PIL.Image.fromarray(mask).save(path)
    return folder


@pytest.mark.parametrize('architecture, side, share', [
    ('Unet', 8, 64 / 1600), ('FPN', 8, 64 / 1600), ('Unet', 2, 0.01)])
def test_a_fresh_network_predicts_a_rare_foreground_as_often_as_it_occurs(small_set, architecture, side, share):
    """At least in a hundredth of the pixels."""
    bias = first_bias(blocks(small_set, side), architecture=architecture)
    assert bias.sigmoid().tolist() == pytest.approx([share], rel=1e-4)


def test_a_training_begins_with_the_share_of_a_rare_foreground_and_with_ones_own_network_as_it_came(small_set):
    still = TINY | {'data': str(blocks(small_set, 8)), 'num_epochs': 1, 'learning_rate': 1e-30}
    trained_bias = lambda **model: tu.train(**still, **model).model.network.segmentation_head[0].bias.detach()
    assert trained_bias().sigmoid().tolist() == pytest.approx([64 / 1600], rel=1e-4)
    network = tu.build_network(tu.load('runs/set-1').config)
    torch.nn.init.constant_(network.segmentation_head[0].bias, 7)
    assert trained_bias(model=network).tolist() == pytest.approx([7])


@pytest.mark.parametrize('classes', [2, 3])
@pytest.mark.parametrize('bias, is_moved', [(15.0, True), (-15.0, True), (0.0, False)])
def test_a_network_of_another_task_begins_with_the_shares_of_the_classes(two, three, caplog, classes, bias, is_moved):
    """One of cracks, 1.6 % of the pixels, learnt nothing of membranes, 78 %: IoU 0.000 in eight epochs, now 0.80."""
    model = tu.load((two if classes == 2 else three)[0], 'cpu')
    tu.last_bias(model).data[-1] += bias
    before = copy.deepcopy(model.state_dict())
    state = tu.TrainState(model.train(), None, None)
    state.average = state.parts.copy()
    data = tu.SegmentationDataset(tu.inspect_data(model.config), 'train', model.config, is_training=False)
    batch = tu.collate([data[row] for row in range(8)])
    tu.match_shares(state, [batch])
    assert_same(state.weights(), model.state_dict())                   # the average begins there too
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    truth = torch.bincount(batch['mask'].flatten(), minlength=classes) / batch['mask'].numel()
    with torch.no_grad():
        logits = model.train()(batch['image'])
    found = logits.softmax(1).mean((0, 2, 3)) if classes > 2 else logits.sigmoid().mean()[None]
    assert (found / truth[-len(found):] - 1).abs().max() < (0.1 if is_moved else 0.5)
    assert moved == ({'network.segmentation_head.0.bias'} if is_moved else set())
    assert ('last layer' in caplog.text) == is_moved


@pytest.mark.parametrize('is_other', [True, False])
def test_a_run_from_another_task_moves_the_last_biases_once(two, tmp_path, caplog, is_other):
    data = draw_set(tmp_path / 'set', values=(255, 0)) if is_other else two[1]
    how = {key: value for key, value in TINY.items() if key not in ('encoder', 'decoder_channels')}
    how |= {'learning_rate': 1e-12, 'run_dir': 'run', 'data': str(data), 'initial_weights': str(two[0])}
    tu.train(**how)
    assert caplog.text.count('last layer: its biases are set') == is_other
    tu.train(resume='run', num_epochs=3)
    assert caplog.text.count('last layer: its biases are set') == is_other


@pytest.mark.parametrize('bias, share, begins', [
    (0, 0.05, 0.05), (0, 0.005, 0.01), (0, 0.2, 0.5), (-200, 0.05, 0.05), (0, None, 0.5)],
    ids=['too often', 'rarer than it may be', 'within a factor of three', 'never', 'all is ignored'])
def test_the_share_at_which_a_network_of_two_classes_begins(two, bias, share, begins):
    model = tu.load(two[0], 'cpu').train()
    model.network.segmentation_head[0].weight.data.zero_()
    tu.last_bias(model).data.fill_(bias)
    mask = torch.full((2, 400, 400), 255 if share is None else 0, dtype=torch.uint8)
    mask[0, :, :int(800 * (share or 0))] = 1
    images = torch.zeros(2, 3, 400, 400, dtype=torch.uint8)
    tu.match_shares(tu.TrainState(model, None, None), [{'image': images, 'mask': mask}])
    assert tu.last_bias(model).sigmoid().item() == pytest.approx(begins, rel=1e-2)


@pytest.mark.parametrize('found, is_moved', [(0.0012, False), (0.004, False), (0.2, True), (0.0001, True)])
def test_a_tiny_foreground_that_is_found_too_often_is_not_made_more_frequent(found, is_moved):
    """Shown on 0.1 % of the pixels and found on 0.4 %, it was raised to 1 %."""
    truth = torch.zeros(10_000, dtype=torch.long)
    truth[:10] = 1
    logits = torch.tensor([0.0, math.log(found / (1 - found))]).expand(len(truth), 2)
    assert bool(tu.shift_to_shares(logits, truth)) == is_moved


@pytest.mark.parametrize('share, is_moved', [(0.02, True), (0.005, False)])
def test_a_rare_class_that_is_little_known_is_no_sign_of_another_task(three, share, is_moved):
    """A network of 11 classes at IoU 0.478 that went on with the same images began at 0.44 to 0.475, because it did not
    know the one of 0.3 %."""
    model = tu.load(three[0], 'cpu').train()
    images = torch.randint(0, 256, (2, 3, 400, 400), dtype=torch.uint8)
    with torch.no_grad():
        mask = model(images).argmax(1).byte()
        mask[mask == 2] = 0
        mask[0, :, :int(800 * share)] = 2
        tu.last_bias(model)[2] -= 20
        found = model(images).softmax(1).mean((0, 2, 3))
        tu.last_bias(model)[:2] -= (found[:2] / torch.stack([(mask == k).float().mean() for k in (0, 1)])).log()
    before = tu.last_bias(model).clone()
    tu.match_shares(tu.TrainState(model, None, None), [{'image': images, 'mask': mask}])
    assert torch.equal(tu.last_bias(model), before) != is_moved


def test_shares_are_looked_at_where_a_network_goes_on_with_our_loss(two, monkeypatch):
    calls, how = [], {'data': str(two[1]), 'num_epochs': 1}
    monkeypatch.setattr(tu, 'match_shares', lambda state, batches: calls.append(sum(len(b['image']) for b in batches)))
    first = tu.train(**TINY | how)
    how |= {key: value for key, value in TINY.items() if key not in ('encoder', 'decoder_channels', 'num_epochs')}
    assert not calls
    tu.train(model=first.model, **how)
    tu.train(model=first.model, loss_fn=lambda model, batch: model(batch['image']).flatten(1).mean(1), **how)
    assert len(calls) == 1 and calls[0] > TINY['batch_size']


def test_a_head_without_biases_of_its_own_goes_on_too(small_set):
    """Biases of a layer before the last were taken for those of the classes: 16 of them ended with a RuntimeError."""
    network = smp.Unet(TINY['encoder'], encoder_weights=None, decoder_channels=[8] * 5)
    network.segmentation_head = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 1, 1, bias=False))
    how = {key: value for key, value in TINY.items() if key not in ('encoder', 'decoder_channels')} | {'num_epochs': 1}
    first = tu.train(data=str(small_set), model=network, **how)
    assert tu.last_bias(first.model) is None
    assert len(tu.train(data=str(draw_set(small_set, values=(255, 0))), model=first.model, **how).history) == 1


def test_a_class_that_few_images_show_is_left_as_it_was(three):
    model = tu.load(three[0], 'cpu')
    tu.last_bias(model).data[1] += 9
    state = tu.TrainState(model.train(), None, None)
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8)
    mask = torch.zeros(4, 64, 64, dtype=torch.uint8)
    mask[:, :8], mask[:, -8:] = 1, 255
    before = state.model(images).softmax(1).mean((0, 2, 3))[2].item()
    tu.match_shares(state, [{'image': images, 'mask': mask}])
    assert state.model(images).softmax(1).mean((0, 2, 3))[2].item() == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize('values', [(1, 2), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12)])
def test_a_fresh_network_predicts_each_of_several_rare_classes_as_often_as_it_occurs(small_set, values):
    """At least in a hundredth of the pixels, of more than ten classes less: together a tenth at most."""
    for path in (small_set / 'masks').iterdir():
        mask = np.zeros((40, 40), np.uint8)
        mask[:8, :8] = 1
        for value in values[1:]:
            mask[20, 3 * value] = value                                # one pixel
        PIL.Image.fromarray(mask).save(path)
    shares = first_bias(small_set).softmax(0).tolist()
    least = min(0.01, 0.1 / len(values))
    assert shares == pytest.approx([1 - 0.04 - least * (len(values) - 1), 0.04] + [least] * (len(values) - 1), rel=1e-4)


@pytest.mark.parametrize('rows, begins', [((3, 3, 3), True), ((3, 5, 3), False), ((3,) * 7, False)])
def test_several_classes_of_which_each_is_rare_begin_a_network_as_often_as_they_occur(small_set, rows, begins):
    """Steel with three kinds of defects on an eighth of its pixels: one of them stayed unfound in short runs. Not where
    a class is frequent, or class 0 no background."""
    for path in (small_set / 'masks').iterdir():
        classes = np.repeat(np.arange(len(rows) + 1), (40 - sum(rows), *rows))
        PIL.Image.fromarray(np.tile(classes.astype(np.uint8), (40, 1)).T.copy()).save(path)
    shares = np.array([40 - sum(rows), *rows]) / 40
    expected = shares if begins else np.full(len(shares), 1 / len(shares))
    assert first_bias(small_set).softmax(0).tolist() == pytest.approx(expected.tolist(), rel=1e-4)


def test_the_most_frequent_class_need_not_be_0_for_rare_ones_to_begin_as_often_as_they_occur(small_set):
    """Slices of a fly's nerve cord: cells, 255, are 74 % of the pixels, and come last where mask_values counts up."""
    for path in (small_set / 'masks').iterdir():
        PIL.Image.fromarray(np.tile(np.repeat(np.uint8([0, 1, 2]), (3, 3, 34)), (40, 1)).T.copy()).save(path)
    assert first_bias(small_set).softmax(0).tolist() == pytest.approx([3 / 40, 3 / 40, 34 / 40], rel=1e-4)


def test_an_edited_network_that_ends_in_another_convolution_begins_as_it_came(small_set, monkeypatch):
    usual = tu.build_network

    def edited(config):
        network = usual(config)
        network.segmentation_head.append(nn.Conv2d(1, 7, 1))
        network.segmentation_head.append(nn.Conv2d(7, 1, 1, bias=False))
        return network

    monkeypatch.setattr(tu, 'build_network', edited)
    assert first_bias(blocks(small_set, 8)).tolist() == pytest.approx([0], abs=1e-9)


@pytest.mark.parametrize('side, empty, share', [(14, 0, 0.9), (8, 2, 0.0)])
def test_a_frequent_foreground_or_one_that_many_images_lack_changes_no_beginning(small_set, side, empty, share):
    told = first_bias(blocks(small_set, side, empty), oversample_foreground=share).tolist()
    assert told == pytest.approx([0], abs=1e-9)


def test_a_rare_foreground_that_ten_of_twelve_images_show_begins_a_network(small_set):
    """Between a half and nine tenths neither rule applied, and it was never found."""
    told = first_bias(blocks(small_set, 8, empty=2), val_fraction=0.0).tolist()
    share = 10 / 12 * 8 * 8 / 40 ** 2
    assert told == pytest.approx([math.log(share / (1 - share))], abs=1e-3)


@pytest.mark.parametrize('share, bias', [*((share, math.log(0.03 / 0.97)) for share in (0.9, 0.5)), (0.3, 0)])
def test_where_images_with_a_rare_foreground_come_more_often_a_network_begins_with_it(small_set, share, bias):
    """Else it learnt to find none, in one of two runs."""
    blocks(small_set, 12, empty=8)                                     # a third of the images show 9 % of theirs
    told = first_bias(small_set, val_fraction=0.0, oversample_foreground=share).tolist()
    assert told == pytest.approx([bias], abs=1e-6)


def test_a_refused_command_leaves_nothing_in_its_frames(small_set, monkeypatch):
    def refused(*_):
        try:
            raise ValueError('inner')
        except ValueError:
            raise tu.UserError('no')

    monkeypatch.setattr(tu, 'warn_of_size', refused)
    with pytest.raises(tu.UserError) as caught:
        tu.check(data=str(small_set), **TINY)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    below = frames[[frame.f_code.co_name for frame in frames].index('check'):]
    assert len(below) > 1 and not any(frame.f_locals for frame in below) and caught.value.__context__ is None


def test_a_bad_batch_of_tensors_of_another_class_can_be_replayed():
    class Nothing(nn.Module):
        def forward(self, images):
            return images * math.nan

    model = nn.Sequential(nn.Conv2d(3, 1, 1), Nothing())
    with pytest.raises(tu.TrainingDiverged, match='train_unet.replay'):
        train(model, Metas(), Metas(5))
    assert 'the output of 1' in tu.replay('run/bad_batch.pt', model, squares)


def test_a_network_of_ones_own_is_not_sent_to_evaluate(small_set):
    tu.train(model=nn.Conv2d(3, 1, 3, padding=1), **SMALL | {'num_epochs': 1})
    assert 'Everything is in' in log_text() and 'Next: ' not in log_text()


def test_a_resume_offers_nothing_that_it_refuses(small_set, caplog):
    for path in [*small_set.glob('*/*.png')]:
        path.rename(path.with_name(f'v{int(path.stem) // 4}_{path.name}'))
    tu.train(**TINY | {'num_epochs': 1}, data=str(small_set), run_dir='run')
    assert 'group_pattern=' in caplog.text
    caplog.clear()
    tu.train(resume='run', num_epochs=2)
    assert 'group_pattern=' not in caplog.text


def test_the_split_of_a_fold_is_repeated_by_the_line_that_its_refusal_offers(small_set):
    run = tu.train(**TINY | {'num_epochs': 1}, data=str(small_set), fold=2).run_dir
    how = {'preset': str(run), 'data': str(run / 'split.csv'), 'num_epochs': 1}
    with pytest.raises(tu.ConfigError, match='type fold=0') as told:
        tu.train(**how)
    again = tu.train(**how, **tu.parse_overrides(re.findall(r'type (fold=\d)', str(told.value)))[0])
    assert (again.run_dir / 'split.csv').read_text() == (run / 'split.csv').read_text()


def test_counts_keep_no_graph():
    """Rounding has a gradient, of zeros: the maps of all steps of an epoch stayed in memory."""
    def loss_fn(model, batch):
        found = model(batch['image']).sigmoid().round()
        hit, missed = (found * found).sum(), (found * (1 - found)).sum()
        return squares(model, batch), torch.stack([hit, missed, missed, hit]).view(2, 2)

    losses, counts = tu.run_loss(loss_fn, network(), 'float32', batch_of(0, 1, 2))
    assert losses.requires_grad and counts.shape == (2, 2) and not counts.requires_grad


def test_a_second_stage_computes_as_its_own_settings_say(small_set):
    words, kinds = {**TINY, 'data': str(small_set), 'num_epochs': 1}, (tu.Float32, tu.Checkpointed)
    first = tu.train(**words, run_dir='first', keep_float32='segmentation_head', activation_checkpointing=True)
    assert {kind for module in first.model.modules() for kind in kinds if isinstance(module, kind)} == {*kinds}
    second = tu.train(**words, run_dir='second', model=first.model)
    assert not [module for module in second.model.modules() if isinstance(module, kinds)]


def test_weights_that_share_memory_keep_it_in_the_layout_of_the_network(small_set):
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1), nn.Conv2d(3, 1, 3, padding=1))
    network[1].weight = nn.Parameter(network[0].weight.data.transpose(0, 1))
    tu.train(model=network, data=str(small_set), **OWN_RUN | {'channels_last': False})
    assert network[1].weight.data_ptr() == network[0].weight.data_ptr()


class Conditioned(nn.Module):
    """Its norm is told which domain the images are of."""
    class Norm(nn.BatchNorm2d):
        def forward(self, maps, domain=None):
            return super().forward(maps) + (domain or 0)

    def __init__(self, *words):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 6, 3, padding=1), self.Norm(6), nn.Conv2d(6, 1, 1)
        self.words = words

    def forward(self, images):
        maps = self.first(images)
        return self.last(self.norm(maps, *self.words) if self.words else self.norm(maps=maps))


@pytest.mark.parametrize('words', [(2,), (None,), ()])
def test_a_norm_of_ones_own_may_take_more_than_maps(small_set, words):
    assert len(tu.train(model=Conditioned(*words), data=str(small_set), **OWN_RUN).history) == 2


def test_a_loss_whose_annotations_cannot_be_evaluated_is_taken():
    """From Python 3.14 on their names may be imported for a type checker alone: inspect raised NameError."""
    class Loss:
        @property
        def __signature__(self):
            raise NameError("name 'Batch' is not defined")

        def __call__(self, model, batch):
            return squares(model, batch)

    assert not tu.is_criterion(Loss())


@pytest.mark.parametrize('words', [
    'unable to allocate shared memory(shm) for file </torch_7_1_0>: No space left on device (28)',
    "Couldn't open shared file mapping: <torch_7_1_0>, error code: <1455>"])
def test_too_little_shared_memory_is_not_taken_for_samples_of_other_shapes(words):
    class Large(Samples):
        def collate_fn(self, samples):                                 # what torch's own raises in a worker
            raise RuntimeError(words)

    with pytest.raises(tu.DataError, match='samples 3, 4 make no batch.*too little shared memory') as caught:
        tu.Plain(Large(12), seed=0).__getitems__([3, 4])
    assert 'of one shape' not in str(caught.value)


@pytest.mark.parametrize('typed, told', [({'data': 'set'}, True), ({}, False)])
def test_data_beside_datasets_of_ones_own_is_told(tmp_path, monkeypatch, caplog, typed, told):
    monkeypatch.chdir(tmp_path)
    train(**typed)
    assert ('data: no effect beside train_data' in caplog.text) is told
