"""Scale: many images, several processes, large images.

    python tests/benchmarks/scale.py

first      seconds to the first batch and memory of each process, at 1,000 to 100,000 images (links
           to a few files that the script draws): train_unet's pairing, checks, data set and loader,
           with cold and warm cache, against a plain Dataset of lists of paths
processes  images per second of training with 1 and 2 processes (torchrun, gloo on a CPU)
size       seconds per image of a training step, against the side of the images
"""
import argparse
import csv
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from tqdm import tqdm

from common import (ROOT, base_parser, count_cores, describe_machine, exit_with, median_and_spread, print_table,
                    save_json, whole_number)
from plain import OurData, Ours, PathDataset, read_batches
from processes import ask_subprocess, proportional


def draw_files(folder, count, side, different=16):
    """images/ and masks/ of `count` names, all links to a few drawn discs -> the folder."""
    draw, (y, x) = np.random.default_rng(0), np.mgrid[:side, :side] / side - 0.5
    for kind in ('images', 'masks'):
        (folder / kind).mkdir(parents=True)
    for number in range(min(different, count)):
        disc = y ** 2 + x ** 2 < draw.uniform(0.1, 0.4) ** 2
        image = draw.integers(0, 90, (side, side, 3)) + 100 * disc[..., None]
        for kind, array in (('images', image), ('masks', disc * 255)):
            PIL.Image.fromarray(array.astype(np.uint8)).save(folder / kind / f'{number:06d}.png')
    for number in range(different, count):
        for kind in ('images', 'masks'):
            first, name = (folder / kind / f'{n:06d}.png' for n in (number % different, number))
            try:
                os.link(first, name)
            except OSError:                                            # no links here, or too many
                name.symlink_to(first.name)
    return folder


def measure(name, args):
    """Seconds to the first batch, then memory, as JSON for the process that asked."""
    begun = time.perf_counter()
    if name == 'plain':
        paths = [sorted(str(path) for path in (Path(args.data) / kind).iterdir())
                 for kind in ('images', 'masks')]
        batches = read_batches(PathDataset(*paths, (64, 64)), 8, args.workers)
    else:
        batches = OurData(data=args.data, image_size=64, num_workers=args.workers,
                          cache_images=False, device='cpu').windows
    next(batches)
    seconds = time.perf_counter() - begun
    for _ in range(args.batches):
        next(batches)
    workers = [proportional(child.pid) for child in torch.multiprocessing.active_children()]
    print(json.dumps({'seconds': seconds, 'main': proportional(),
                      'worker': max(workers, default=0)}))


def measure_first(args, folder):
    """Rows of the first table."""
    rows = []
    for count in args.counts:
        data = draw_files(folder / str(count), count, 64)
        for name in ('plain', 'ours, cold', 'ours, warm'):
            found = []
            for number in tqdm(range(args.rounds), desc=f'{count} images, {name}'):
                cache = folder / f'cache-{count}-{number}'         # warm finds what cold left
                found.append(ask_subprocess(
                    __file__, name, f'--data={data}', f'--workers={args.workers}',
                    f'--batches={args.batches}', cwd=folder,
                    env={**os.environ, 'XDG_CACHE_HOME': str(cache)}))
            median = {key: median_and_spread(one[key] for one in found) for key in found[0]}
            rows.append({'images': count, 'loader': name, 'first batch s': median['seconds'][0],
                         '+-': median['seconds'][1], 'main MiB': median['main'][0] / 2**20,
                         'each worker MiB': median['worker'][0] / 2**20})
    return rows


def measure_processes(args, folder):
    """Rows of the second table: one epoch after a first one that fills the caches."""
    found, cores = [], count_cores()
    data = draw_files(folder / 'processes', args.images, args.size)
    too_few = args.device == 'auto' and torch.cuda.device_count() < max(args.processes)
    device = 'cpu' if too_few else args.device
    for count in tqdm(args.processes * args.rounds, desc='1 and more processes'):
        run = Path(tempfile.mkdtemp(dir=folder))
        command = [sys.executable, '-m', 'torch.distributed.run', '--standalone',
                   f'--nproc_per_node={count}', str(ROOT / 'train_unet.py'), f'data={data}',
                   f'run_dir={run}', 'num_epochs=2', f'image_size={args.size}',
                   f'device={device}', f'encoder={args.encoder}']
        threads = {'OMP_NUM_THREADS': str(max(1, cores // count))}
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder,
                              env={**os.environ, **threads})
        if done.returncode:
            raise SystemExit(f'{" ".join(command)} failed:\n{done.stderr[-2000:]}')
        with open(run / 'history.csv', newline='') as file:
            speeds = [row['images_per_second'] for row in csv.DictReader(file)]
        found.append((count, float(speeds[-1])))
    rows = []
    for count in args.processes:
        speed, spread = median_and_spread(s for n, s in found if n == count)
        rows.append({'processes': count, 'threads each': max(1, cores // count),
                      'images/s': speed, '+-': spread})
    for row in rows:
        row['against the first'] = row['images/s'] / rows[0]['images/s']
    return rows


def measure_size(args, folder):
    """Rows of the third table, sizes in interleaved rounds."""
    data = draw_files(folder / 'sizes', 64, max(args.sizes))
    ours = {side: Ours(data=str(data), image_size=side, encoder=args.encoder, batch_size=args.batch,
                       device=args.device) for side in args.sizes}
    for one in ours.values():                                          # later epochs have the images in memory
        for _ in range(one.sampler.num_windows):
            next(one.windows)
    times = {side: [] for side in ours}
    for number in tqdm(range(args.rounds + 1), desc='sizes'):
        for side, one in ours.items():
            begun = time.perf_counter()
            images = one.step()
            float(one.state.totals['images'])                          # waits for the device
            times[side] += [(time.perf_counter() - begun) / images] * (number > 0)
    rows = []
    for side, seconds in times.items():
        median, spread = median_and_spread(seconds)
        rows.append({'side': side, 'ms per image': 1000 * median, '+-': 1000 * spread,
                     'ns per pixel': 1e9 * median / side ** 2, 'images/s': 1 / median})
    return rows


PARTS = {'first': measure_first, 'processes': measure_processes, 'size': measure_size}


def main():
    parser = base_parser(__doc__, rounds=3, seeds=None, data=False)
    option = parser.add_argument
    option('--parts', nargs='+', choices=PARTS, default=list(PARTS))
    option('--counts', nargs='+', type=whole_number, default=[1000, 10_000, 40_000, 100_000])
    option('--workers', type=functools.partial(whole_number, least=0), default=2,
           help='loader processes in part first (2)')
    option('--batches', type=whole_number, default=50, help='batches before memory is read (50)')
    option('--processes', nargs='+', type=whole_number, default=[1, 2])
    option('--images', type=whole_number, default=160, help='images in part processes (160)')
    option('--sizes', nargs='+', type=whole_number, default=[64, 128, 256, 512])
    option('--size', type=whole_number, default=128, help='side of the images in part processes (128)')
    option('--batch', type=whole_number, default=4, help='images per step in part size (4)')
    option('--encoder', default='resnet18')
    option('--measure', metavar='NAME', help='internal: one loader, in this process, of --data')
    option('--data', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure, args)
    titles = {'first': f'Time to the first batch, and memory after {args.batches} batches of 8 at '
                       f'64 x 64 (PSS), {args.workers} workers',
              'processes': f'Several processes, Unet {args.encoder}, {args.size} x {args.size}',
              'size': f'Cost against image size, Unet {args.encoder}, batch {args.batch}'}
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ['XDG_CACHE_HOME'] = os.path.join(folder, 'cache')
        for part in args.parts:
            tables[part] = PARTS[part](args, Path(folder))
            path = save_json('scale', {'settings': vars(args), **tables}, args.out, n=args.rounds)
    for part, rows in tables.items():
        print_table(f'{titles[part]}, medians of {args.rounds}', rows)
    print(f'\n{describe_machine()}\n{path}')


if __name__ == '__main__':
    exit_with(main)
