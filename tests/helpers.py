"""Shared by the test files: small sets of images and masks, questions about them, tiny networks and their training."""
import contextlib
import math
import os
import random
import re
import shlex
import signal
import zlib
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest
import scipy.io
import tifffile
import torch
from torch import nn

import train_unet as tu
from conftest import ROOT, TINY, as_words

CPU = torch.device('cpu')
PRESETS = sorted((ROOT / 'configs').glob('*.py'))
IGNORED = 255                                                          # the value of an ignored pixel
WORDS = as_words(TINY)


# --- files -----------------------------------------------------------------------------


def save(path, array, kind=None):
    """Write an array in the format of the suffix; `kind` is the Pillow mode it is put into."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.asarray(array)
    if path.suffix == '.npy':
        np.save(path, array)
    elif path.suffix == '.mat':
        scipy.io.savemat(path, {'groundtruth': array}, do_compression=True)
    elif kind in ('RGB', 'RGBA'):                                      # the array holds 0xRRGGBB
        parts = [array >> 16, array >> 8 & 255, array & 255, np.full_like(array, 255)]
        PIL.Image.fromarray(np.stack(parts[:len(kind)], -1).astype(np.uint8)).save(path)
    elif kind == 'P':
        picture = PIL.Image.fromarray(array.astype(np.uint8))
        picture.putpalette([7 * i % 256 for i in range(768)])          # also turns L into P
        picture.save(path)
    elif kind == '1':
        PIL.Image.fromarray(array.astype(bool)).save(path)
    elif kind == 'I;16':
        PIL.Image.fromarray(array.astype(np.uint16)).save(path)
    else:
        PIL.Image.fromarray(array.astype(np.uint8)).save(path)


def noisy_jpeg(path, mask):
    """A mask as JPEG with the noise of quality 60."""
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(mask.astype(np.uint8)).save(path, quality=60)


def palette_mask(path, numbers, colours):
    """Save numbers (H, W) with a palette of these [(r, g, b), ...]."""
    picture = PIL.Image.fromarray(numbers.astype(np.uint8))
    picture.putpalette(np.array(colours, np.uint8).tobytes())
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)


def deep_colours(path, size=(6, 5), alpha=False):
    """A PNG of 16 bits per colour; -> its values, red first."""
    values = np.random.default_rng(1).integers(0, 65536, (*size, 3 + alpha)).astype(np.uint16)
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), values[..., [2, 1, 0, 3][:3 + alpha]])
    return values


def as_png(path, pixels):
    save(path.with_suffix('.png'), pixels)


def as_float(top):
    """Writes pixels of 8 bits as floats of 0 to `top`."""
    return lambda path, pixels: tifffile.imwrite(path.with_suffix('.tif'), (pixels / 255 * top).astype(np.float32))


# --- sets of images and masks ----------------------------------------------------------


DISC = np.hypot(*np.mgrid[-24:24, -24:24]) < 14                        # (48, 48)


def block(value, row=4):
    """(32, 48) of 0 with a block of a value: a sixth of it."""
    mask = np.zeros((32, 48))
    mask[row:row + 16, 8:24] = value
    return mask


def fill(folder, images, masks):
    """Images of one shade each, but for a pixel, and masks of 0 and 1 under these relative names."""
    for name in images:
        number = zlib.crc32(name.encode())
        picture = np.zeros((8, 8, 3)) + number % 200
        picture[0, 0] = number & 255, number >> 8 & 255, number >> 16 & 255
        save(folder / name, picture)
    for name in masks:
        save(folder / name, np.eye(8, dtype=int))


def objects(folder, names):
    """Masks of 8 x 8 with one row each of 255: the first in row 0, the second in row 1, ..."""
    for row, name in enumerate(names):
        mask = np.zeros((8, 8))
        mask[row] = 255
        save(folder / name, mask)


def coded_set(folder, values, suffix='.png', kind=None, count=3):
    """A set whose masks hold these values in equal stripes."""
    place = np.arange(2 * len(values)).repeat(16).reshape(-1, 16) // 2
    for n in range(count):
        save(folder / f'images/{n}.png', np.zeros((*place.shape, 3)))
        dtype = float if kind is float else np.int32
        save(folder / f'masks/{n}{suffix}', np.array(values, dtype)[place], kind)
    return folder, place


def with_masks(folder, masks, suffix='.png', palette=None):
    """A set of one image for each of these masks, arrays or pictures; returns the folder."""
    for number, mask in enumerate(masks):
        picture = mask if isinstance(mask, PIL.Image.Image) else PIL.Image.fromarray(np.asarray(mask, np.uint8))
        if palette:
            picture.putpalette(palette)
        save(folder / f'images/{number}.png', np.zeros((*picture.size[::-1], 3)) + number)
        (folder / 'masks').mkdir(exist_ok=True)
        picture.save(folder / f'masks/{number}{suffix}')
    return folder


def disc_set(folder, write, count=6):
    """`count` images of 48 x 48; write(number) makes each mask."""
    for number in range(count):
        save(folder / f'images/{number}.png', np.zeros((48, 48, 3)))
        write(number)
    return folder


def eyes(folder, count=20, swapped=0, radii=(6, 6), shown=20):
    """`count` images of two alike discs: class 1 on the left (in the first `swapped` right), class 2 on the other side
    (in the first `shown`) -> the folder."""
    draw, (y, x) = np.random.default_rng(0), np.mgrid[:40, :40]
    for number in range(count):
        discs = [(y - draw.uniform(12, 28)) ** 2 + (x - draw.uniform(*span)) ** 2 < radius ** 2
                 for span, radius in zip(((8, 12), (28, 32)), radii)]
        mask = discs[0] + 2 * discs[1] * (number < shown)
        save(folder / f'masks/{number}.png', mask[:, ::-1] if number < swapped else mask)
        save(folder / f'images/{number}.png', draw.integers(0, 90, (40, 40, 3)) + 120 * (mask > 0)[..., None])
    return folder


def noisy_reds(folder):
    """Colour masks, the upper half red, the lower black, each with noise -> the folder."""
    draw = np.random.default_rng(0)
    for number in range(4):
        mask = np.zeros((40, 40, 3), np.int64)
        mask[:20] = (240, 10, 10)
        save(folder / 'masks' / f'{number}.png', mask + draw.integers(0, 12, mask.shape))
        save(folder / 'images' / f'{number}.png', draw.integers(0, 255, (40, 40, 3)))
    return folder


def two_kinds(folder, first, second):
    """Ten pictures, of which five are written by each function (path without suffix, pixels)."""
    for number in range(10):
        pixels = np.random.default_rng(number).integers(0, 255, (32, 32)).astype(np.uint8)
        (folder / 'images').mkdir(parents=True, exist_ok=True)
        (first if number % 2 else second)(folder / f'images/{number}', pixels)
        save(folder / f'masks/{number}.png', 255 * (pixels > 127))
    return folder


# --- what is found in a set, and what is asked -----------------------------------------


def inspect(folder, **overrides):
    """-> (config, Data) as every command gets them."""
    config, _, _ = tu.resolve_config(None, {'data': str(folder), **overrides})
    return config, tu.inspect_data(config)


def dataset(folder, split='train', **overrides):
    """The SegmentationDataset that training would use, and its settled config."""
    wish = {**TINY, 'data': str(folder), **overrides}
    config, sources, _ = tu.resolve_config(None, wish)
    config, _, _, data, _ = tu.prepare(config, sources, CPU)
    return tu.SegmentationDataset(data, split, config, split == 'train'), config


def partners(data, folder):
    """{image: mask} relative to the folder."""
    names = [[os.path.relpath(os.fsdecode(p), folder) for p in side]
             for side in (data.pairs.images, data.pairs.masks)]
    return dict(zip(*names))


def names_of(data, split):
    """Stems of one split."""
    return {Path(os.fsdecode(data.pairs.images[row])).stem for row in data.pairs.rows(split)}


def split_sizes(data):
    """How many images are for training, validation and testing."""
    return [len(data.pairs.rows(split)) if np.any(data.pairs.splits == number) else 0
            for number, split in enumerate(tu.SPLITS)]


def mask_of(data, config, stem):
    """The class ids of the image with this stem."""
    images = [Path(os.fsdecode(path)).stem for path in data.pairs.images]
    path = os.fsdecode(data.pairs.masks[images.index(stem)])
    return data.coding.encode(tu.read_mask(path, config), path)


def ask(folder, **overrides):
    """The DataError of looking at a folder."""
    with pytest.raises(tu.DataError) as caught:
        inspect(folder, **overrides)
    return caught.value


def typed(text):
    """Overrides as the command line reads them from what an error message offers."""
    return tu.parse_overrides(shlex.split(text))[0]


def offered(error, start):
    """The first key=value in an error message that begins like `start`, quotes included."""
    words = re.findall(r"""\w+=(?:"[^"]*"|'[^']*'|[^\s"',;]+)""", str(error))
    found = [word for word in words if word.startswith(start)]
    assert found, f'{start} is not offered in:\n{error}'
    return found[0]


def typed_lines(error):
    """The lines to type that an error offers, without the counts."""
    return [line.strip().split('   (')[0] for line in error.problems if line.startswith('    ')]


# --- training on images ----------------------------------------------------------------


SMALL = {**TINY, 'run_dir': 'run', 'data': 'set', 'learning_rate': 0.01}


# --- training a network on data of one's own -------------------------------------------


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


def batch_of(*indices):
    return torch.utils.data.default_collate([Samples(32)[i] for i in indices])


def network(norm=True, dropout=0.0):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1),
                         nn.BatchNorm2d(6) if norm else nn.Identity(), nn.ReLU(),
                         nn.Dropout(dropout), nn.Conv2d(6, 1, 3, padding=1))


def squares(model, batch):
    return (model(batch['image']) - batch['target']).square().mean((1, 2, 3))


OWN = dict(device='cpu', use_amp=False, batch_size=4, num_epochs=3, learning_rate=0.01, num_workers=0, run_dir='run')
PLAIN = dict(OWN, ema_decay=None, optimizer='SGD', early_stopping_patience=None)


def train_own(model=None, loss_fn=squares, **changes):
    """Three windows an epoch, and the usual optimizer and moving average."""
    return tu.train(model=network() if model is None else model, loss_fn=loss_fn,
                    train_data=Samples(12), val_data=Samples(4), **{**OWN, **changes})


def train(model=None, train_data=None, val_data=None, loss_fn=squares, **changes):
    """Two windows an epoch, and nothing but SGD."""
    return tu.train(model=network() if model is None else model, loss_fn=loss_fn,
                    train_data=Samples() if train_data is None else train_data,
                    val_data=Samples(5, seed=1) if val_data is None else val_data,
                    **{**PLAIN, **changes})


@contextlib.contextmanager
def in_threads(number):
    """Torch computes in so many threads: a test in 1, so what is trained before it too, for bits to be equal."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    yield
    torch.set_num_threads(before)


def settings(**changes):
    return {**tu.CONFIG, 'learning_rate': 0.01, 'ema_decay': 0.9, 'grad_clip': None, **changes}


def fresh(config, model=None, dtype='float32'):
    """The state of a run before its first step."""
    return tu.build_state(model or network(), config, tu.Precision(dtype, 'high', ''), CPU)


# --- what disturbs a training ----------------------------------------------------------


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


def stopping_at(model, call):
    """SIGTERM in this training pass of the model; the smoke test's is the first."""
    at_training_call(model[0], lambda number: number == call, lambda output: os.kill(os.getpid(), signal.SIGTERM))
    return model


def noisy_squares(model, batch):
    """A loss that draws random numbers, as a diffusion network's does, from every generator."""
    noise = 0.1 * torch.randn_like(batch['image'])
    if torch.is_grad_enabled():
        noise = noise * (1 + random.random() + np.random.default_rng(np.random.randint(99)).random()
                         + np.random.rand())
    return (model(batch['image'] + noise) - batch['target']).square().mean((1, 2, 3))


def stop_at(call, loss=noisy_squares, number=signal.SIGTERM, times=1):
    """A loss that sends a signal to this process at one of its calls (1 and 2: the smoke test)."""
    calls = []

    def loss_fn(model, batch):
        calls.append(1)
        for _ in range(times if len(calls) == call else 0):
            os.kill(os.getpid(), number)
        return loss(model, batch)
    loss_fn.calls = calls
    return loss_fn


class Harm:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ('touch harmed',)


def lives(pid):
    """Whether a process is at work; one that has ended, but that nobody has waited for, is not."""
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- what a training leaves ------------------------------------------------------------


def last():
    """What the run in ./run saved."""
    return torch.load('run/last.pt', weights_only=True)


@contextlib.contextmanager
def edited(path):
    """What a checkpoint holds, to be changed; it is saved again."""
    saved = tu.load_checkpoint(path)
    yield saved
    tu.save_checkpoint(Path(path), saved)


def log_text():
    return Path('run/log.txt').read_text()


def events(history):
    return [row['event'] for row in history if row['event']]


TIMES = {'seconds', 'images_per_second', 'peak_memory_gib'}


def final(folder='run'):
    """What must be equal to the bit: weights, their average, optimizer, history without times."""
    saved = torch.load(f'{folder}/last.pt', weights_only=True)
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in saved['history']]
    keys = ('model', 'average', 'optimizer', 'scaler', 'dtype', 'batch_size', 'epoch', 'window', 'step',
            'best_score', 'best_epoch', 'bad')
    return {key: saved[key] for key in keys} | {'history': rows}


def assert_same(a, b, where=''):
    """Nested dicts, lists and tensors, equal to the bit."""
    if torch.is_tensor(a):
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        [assert_same(a[key], b[key], f'{where} {key}') for key in a]
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        [assert_same(x, y, f'{where} {i}') for i, (x, y) in enumerate(zip(a, b))]
    else:
        assert a == b or a != a and b != b, where
