"""Seconds until validation is as good as the plain smp recipe gets in a fixed time.

    python tests/benchmarks/time_to_iou.py                     all sets, both contenders, 3 seeds
    python tests/benchmarks/time_to_iou.py --resume            continue after an interruption
    python tests/benchmarks/time_to_iou.py --contender ours --resume --redo     ours again
    python tests/benchmarks/time_to_iou.py --epochs 8          the scores after equally many epochs

plain: smp.Unet resnet34 from scratch, Adam 2e-4 (constant), Dice, batch 16, no augmentation, in a
plain PyTorch loop, for --budget seconds of nothing but training steps: reading the images (all are
decoded and resized beforehand) and scoring after every epoch are off its clock.
ours: train_unet.train with its defaults and image_size=--size: on a CPU another and smaller network
(resnet10t, half the decoder's width), half-size images at first, bfloat16 where the CPU has it.
`--ours encoder=resnet34 decoder_channels=[256,128,64,32,16] progressive_resizing=0 use_amp=False`
adds one that trains plain's network in plain's precision. Its clock is the user's: it runs
from the call of train() and holds looking at the data, building, trying a step, loading, training,
its own validation and its checkpoints. Off the clock are only the imports and the scoring here. A
point of its curve is taken when an epoch is closed, what it saves written (of epochs of a second or
so not each is saved); scored are the weights that its validation looked at (the moving average). It
is stopped after the budget, or when it has reached the plain recipe's final score, whichever is
later, at most after --limit budgets.
The files of a set are read once before either starts: both find them in the page cache. Plain trains
on all sets before ours does on any: in a process where ours has run, memory is kept (mallopt).

Both are judged by score() below, in NumPy, outside of either: validation images at --size, masks by
the nearest pixel, one confusion matrix of the whole set. Two classes: IoU of the foreground, on
isbi_em the mean of both; more: mean over the classes that occur in the masks, 255 left out.
Seconds to target: when the first epoch ended whose weights reach the target (no interpolation); the
target is the median over the seeds of the plain recipe's final score, 'times faster' the budget
over that. The plain curve is not smooth and may pass its final score on its way: 'plain was first
there' tells when, and 'against that' is the ratio to it.
"""
import contextlib
import json
import math
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import (base_parser, data_folder, default_data, describe_hardware, describe_machine, exit_with,
                    hash_program, json_path, lacks, median_and_spread, print_table, save_json, whole_number)
import albumentations  # noqa: F401  (train_unet imports it when it is used: not on the clock)
import cv2
import numpy as np
import segmentation_models_pytorch as smp
import torch
from tqdm import tqdm

import train_unet
from peers import Network

SETS = ('nuclei_dsb2018', 'camvid', 'isbi_em')
MEAN_OF_BOTH = ('isbi_em',)      # two classes that count alike; elsewhere only the foreground does
NEVER = float('inf')
MASK_KINDS = ('.png', '.bmp', '.tif', '.tiff')


def parse_args():
    """The options."""
    parser = base_parser(__doc__, rounds=None, data=False)
    option = parser.add_argument
    option('--data', type=data_folder, default=default_data(), help='the folder that holds the folders of the sets')
    option('--sets', nargs='+', default=list(SETS), help=f'folders in --data ({", ".join(SETS)})')
    option('--size', default='128', help='pixels, 128 or 96x128 (height x width)')
    option('--budget', type=float, default=420, help='seconds of the plain recipe (420)')
    option('--epochs', type=whole_number, help='both train for so many epochs, however long that takes')
    option('--limit', type=float, default=1.5, help='ours may take that many budgets (1.5)')
    option('--contender', choices=('plain', 'ours', 'both'), default='both')
    option('--ours', nargs='*', default=[], metavar='KEY=VALUE',
           help='settings to try instead of the defaults; a contender of its own in the table')
    option('--resume', action='store_true', help='keep what the JSON file has, measure the rest')
    option('--redo', action='store_true', help='with --resume: measure --contender again')
    args = parser.parse_args()
    if not re.fullmatch(r'[1-9]\d*(x[1-9]\d*)?', args.size):
        parser.error(f'--size {args.size}: type pixels, as 128 or 96x128')
    for name in ('budget', 'limit'):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f'--{name} {getattr(args, name):g}: must be above 0, and finite')
    sides = [int(side) for side in args.size.split('x')]
    args.size = [sides[0], sides[-1]]
    args.out = args.out or 'runs/benchmarks/time_to_iou.json'          # where --resume looks for it
    return args


def main():
    """Every set, seed and contender that is not measured yet; the file is written after each."""
    args = parse_args()
    path = json_path('time_to_iou', args.out)
    if path.exists() and not args.resume:
        sys.exit(f'{path} holds results: --resume continues them, --out writes elsewhere')
    for name in [name for name in args.sets if lacks(Path(args.data) / name)]:
        print(f'skipped: {name}, because {lacks(Path(args.data) / name)}')
        args.sets.remove(name)
    if not args.sets:
        sys.exit(f'--data {args.data}: none of the --sets is in there')
    runs = read_runs(path) if path.exists() else []
    for other in sorted({str([run.get(key) for key in where()]) for run in runs} - {str([*where().values()])}):
        print(f'runs in {path} are of another program or machine than this one: {other}')
    label = ' '.join(['ours', *sorted(args.ours)])
    chosen = {'plain': ['plain'], 'ours': [label], 'both': ['plain', label]}[args.contender]
    jobs = [{'set': name, 'contender': contender, 'seed': seed, 'size': args.size,
             'budget': args.budget, 'epochs': args.epochs}
            for contender in chosen for name in args.sets for seed in range(args.seeds)]
    for number, job in enumerate(jobs, 1):
        done = [run for run in runs if all(run.get(key) == value for key, value in job.items())]
        if done and not args.redo:
            continue
        target = find_target(runs, job)
        name = f'{number}/{len(jobs)} {job["set"]}, {job["contender"]}, seed {job["seed"]}'
        with tqdm(total=round(args.budget), desc=name,
                  bar_format='{l_bar}{bar}| {n}/{total} s{postfix}') as bar:
            curve = measure(job, args, target, bar)
        runs = [run for run in runs if run not in done] + [{**job, **where(), 'curve': curve}]
        save_json('time_to_iou', {'settings': vars(args), 'runs': runs}, args.out, n=args.seeds,
                  seed=f'0..{args.seeds - 1}')
    height, width = args.size
    if args.epochs:
        print_table(f'After {args.epochs} epochs at {width} x {height}',
                    [row for name in args.sets for row in rows_of_epochs(runs, name, args)])
        print(f'\n{describe_machine()}\n{path}')
        return
    print_table(f'The plain recipe after {args.budget:g} s at {width} x {height}, and when '
                f'train_unet is as good; medians of the seeds',
                [row for name in args.sets for row in build_rows(runs, name, args)])
    print(f'\n{describe_machine()}\n{path}')


def where():
    """The program and machine of a run, which --resume may find changed."""
    return {'train_unet.py': hash_program(), 'cpu': describe_hardware()['cpu'], 'torch': torch.__version__}


def read_runs(path):
    """The runs of an earlier JSON file."""
    try:
        return json.loads(path.read_text(encoding='utf-8'))['results']['runs']
    except (ValueError, LookupError, TypeError):
        sys.exit(f'{path}: holds no results of this benchmark; --out writes elsewhere')


def measure(job, args, target, bar):
    """One training -> its curve: dicts of seconds, epoch, score, foreground, mean_iou."""
    folder = Path(args.data) / job['set']
    splits = {split: read_split(folder, split, args.size) for split in ('train', 'val')}
    num_classes = max(classes for _, _, classes in splits.values())
    device = train_unet.choose_device(args.device)
    is_mean = num_classes > 2 or job['set'] in MEAN_OF_BOTH

    def judge(model, seconds, epoch):
        found = score(model, splits['val'][:2], num_classes, device)
        point = {'seconds': seconds, 'epoch': epoch, **found,
                 'score': found['mean_iou' if is_mean else 'foreground']}
        bar.n = min(bar.total, round(seconds))
        bar.set_postfix_str(f'epoch {epoch}, IoU {point["score"]:.4f}')
        return point

    if job['contender'] == 'plain':
        return train_plain(splits['train'][:2], num_classes, job, args, device, judge)
    return train_ours(folder, job, args, target, judge)


def find_target(runs, job):
    """Median final score of the plain recipe on the set, size and budget of a job, or None."""
    finals = [run['curve'][-1]['score'] for run in runs if run['contender'] == 'plain'
              and all(run.get(key) == job[key] for key in ('set', 'size', 'budget', 'epochs'))]
    return median_and_spread(finals)[0] if finals else None


# ------------------------------------------------------------------------- data and the judge


def read_split(folder, split, size):
    """images/SPLIT and masks/SPLIT at `size` -> (N, H, W, 3) uint8, (N, H, W) uint8, classes.

    Masks of 0 and 255 have two classes; all others hold class numbers, 255 left out.
    """
    images = sorted((folder / 'images' / split).iterdir())
    masks = {p.stem: p for p in (folder / 'masks' / split).iterdir() if p.suffix in MASK_KINDS}
    size = (size[1], size[0])                                          # cv2 wants the width first
    read = [(cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB),
             cv2.imread(str(masks[path.stem]), cv2.IMREAD_GRAYSCALE)) for path in images]
    pixels = np.stack([cv2.resize(image, size, interpolation=cv2.INTER_AREA) for image, _ in read])
    truth = np.stack([cv2.resize(mask, size, interpolation=cv2.INTER_NEAREST_EXACT)
                      for _, mask in read])
    values = set().union(*(np.unique(mask).tolist() for _, mask in read))
    if values <= {0, 255}:
        return pixels, (truth == 255).astype(np.uint8), 2
    return pixels, truth, max(values - {255}) + 1


def to_images(pixels, device):
    """(B, H, W, 3) uint8 array -> (B, 3, H, W) uint8 tensor."""
    return torch.from_numpy(np.ascontiguousarray(pixels)).to(device).permute(0, 3, 1, 2)


@torch.no_grad()
def score(model, val_pairs, num_classes, device, batch=16):
    """IoU over all pixels of all images -> of the foreground (two classes) and mean of classes."""
    images, masks = val_pairs
    was_training = model.training
    model.eval()
    counts = np.zeros((num_classes, num_classes), np.int64)
    for start in range(0, len(images), batch):
        logits = model(to_images(images[start:start + batch], device)).float().cpu().numpy()
        predicted = logits[:, 0] > 0 if logits.shape[1] == 1 else logits.argmax(1)
        truth = masks[start:start + batch]
        kept = truth != 255
        cells = truth[kept].astype(np.int64) * num_classes + predicted[kept]
        counts += np.bincount(cells, minlength=num_classes ** 2).reshape(counts.shape)
    model.train(was_training)
    hit, present = np.diag(counts), counts.sum(1) > 0
    iou = hit[present] / (counts.sum(0) + counts.sum(1) - hit)[present]
    return {'foreground': float(iou[-1]) if num_classes == 2 else None,
            'mean_iou': float(iou.mean())}


# ------------------------------------------------------------------------- the contenders


class PlainNetwork(Network):
    """... which takes uint8."""

    def __init__(self, num_classes):
        super().__init__(smp.Unet('resnet34', encoder_weights=None, classes=1 if num_classes == 2 else num_classes))

    def forward(self, images):
        return super().forward(images.float() / 255)


def train_plain(train_pairs, num_classes, job, args, device, judge):
    """The plain recipe for the budget, or for --epochs -> curve; the clock counts steps only."""
    images, masks = train_pairs
    torch.manual_seed(job['seed'])
    model = PlainNetwork(num_classes).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    binary = num_classes == 2
    criterion = smp.losses.DiceLoss('binary' if binary else 'multiclass', from_logits=True,
                                    ignore_index=None if binary else 255)
    curve, seconds = [], 0.0
    while len(curve) < args.epochs if args.epochs else seconds < args.budget:
        model.train()
        begun = time.perf_counter() - seconds
        for chosen in torch.randperm(len(images)).split(16):
            target = torch.from_numpy(masks[chosen.numpy()]).long().to(device)
            optimizer.zero_grad()
            logits = model(to_images(images[chosen.numpy()], device))
            loss = criterion(logits, target[:, None] if binary else target)
            loss.backward()
            optimizer.step()
            loss.item()                                                # waits for a GPU
            seconds = time.perf_counter() - begun
            if seconds >= args.budget and not args.epochs:
                break
        curve.append(judge(model, seconds, len(curve) + 1))
    return curve


class Enough(Exception):
    """Ends a training of ours from outside."""


def train_ours(folder, job, args, target, judge):
    """train_unet.train with its defaults -> curve; its own close_epoch is followed by the judge."""
    curve, paused, close_epoch = [], 0.0, train_unet.close_epoch
    begun = time.perf_counter()

    def close_and_judge(state, *rest):
        nonlocal paused
        close_epoch(state, *rest)
        stopped = time.perf_counter()
        seconds = stopped - begun - paused
        with state.evaluated() as model:
            point = judge(model, seconds, state.epoch)
        curve.append({**point, 'is_best': state.best_epoch == state.epoch - 1})
        is_there = target is None or any(point['score'] >= target for point in curve)
        if not args.epochs and seconds >= args.budget * (1 if is_there else args.limit):
            raise Enough
        paused += time.perf_counter() - stopped

    overrides, _ = train_unet.parse_overrides(args.ours)
    settings = {'data': str(folder), 'image_size': args.size, 'seed': job['seed'],
                'device': args.device, 'num_epochs': args.epochs or 'auto', **overrides}
    with tempfile.TemporaryDirectory() as scratch, fresh_cache(scratch):
        train_unet.close_epoch = close_and_judge
        try:
            result = train_unet.train(run_dir=str(Path(scratch) / 'run'), **settings)
            if result.stopped_by:
                sys.exit('stopped; --resume measures the rest')
        except Enough:
            pass
        finally:
            train_unet.close_epoch = close_epoch
    return curve


@contextlib.contextmanager
def fresh_cache(folder):
    """train_unet remembers what it saw of a set; here it looks anew, on the clock."""
    before = os.environ.get('XDG_CACHE_HOME')
    os.environ['XDG_CACHE_HOME'] = str(Path(folder) / 'cache')
    try:
        yield
    finally:
        del os.environ['XDG_CACHE_HOME']
        if before is not None:
            os.environ['XDG_CACHE_HOME'] = before


# ------------------------------------------------------------------------- the table


def build_rows(runs, name, args):
    """One row per contender of a set; a seed that never gets there is later than all others."""
    runs = runs_of(runs, name, args)
    target = find_target(runs, runs[0]) if runs else None
    first = statistics.median_high([seconds_to(run['curve'], target) for run in runs
                                    if run['contender'] == 'plain'] or [NEVER])
    rows = []
    for contender in dict.fromkeys(run['contender'] for run in runs):
        is_plain = contender == 'plain'
        curves = [run['curve'] for run in runs if run['contender'] == contender]
        within = [[point for point in curve if is_plain or point['seconds'] <= args.budget] for curve in curves]
        ends = [points[-1] for points in within if points]
        took = [seconds_to(curve, target) for curve in curves]
        median = args.budget if is_plain else statistics.median_high(took)
        finals, reached = [end['score'] for end in ends], [seconds for seconds in took if seconds < NEVER]
        rows.append({'set': name, 'contender': contender, 'seeds': len(curves),
                     'IoU at the budget': median_and_spread(finals)[0],
                     'lowest': min(finals, default=None), 'highest': max(finals, default=None),
                     'after seconds': median_and_spread(end['seconds'] for end in ends)[0],
                     'best until then': median_and_spread(max(point['score'] for point in points)
                                                          for points in within if points)[0],
                     'seeds that reach it': len(reached),
                     'seconds to target': median if median < NEVER else None,
                     'soonest': min(reached, default=None), 'latest': max(reached, default=None),
                     'times faster': args.budget / median if median < NEVER else None,
                     'plain was first there': first if first < NEVER else None,
                     'against that': first / median if max(first, median) < NEVER else None})
    return rows


def rows_of_epochs(runs, name, args):
    """One row per contender of a set, trained for equally many epochs."""
    rows, runs = [], runs_of(runs, name, args)
    for contender in dict.fromkeys(run['contender'] for run in runs):
        curves = [run['curve'] for run in runs if run['contender'] == contender]
        final, spread = median_and_spread(curve[-1]['score'] for curve in curves)
        rows.append({'set': name, 'contender': contender, 'seeds': len(curves), 'final IoU': final,
                     '+-': spread,
                     'best until then': median_and_spread(max(point['score'] for point in curve)
                                                          for curve in curves)[0],
                     'seconds': median_and_spread(curve[-1]['seconds'] for curve in curves)[0]})
    return rows


def runs_of(runs, name, args):
    """The runs on a set with the size and the budget, or the epochs, of the options."""
    return [run for run in runs if (run['set'], run['size'], run['budget'], run.get('epochs'))
            == (name, args.size, args.budget, args.epochs)]


def seconds_to(curve, target):
    """When the first point reaches the target; NEVER if none does or there is no target."""
    return next((point['seconds'] for point in curve
                 if target is not None and point['score'] >= target), NEVER)


if __name__ == '__main__':
    exit_with(main)
