"""Predicting images larger than memory allows: peak memory, speed, and whether tiles leave a seam.

    python tests/benchmarks/large_image.py
    python tests/benchmarks/large_image.py --run runs/x --sides 20000 --photo photo.jpg

Writes tiled, compressed RGB TIFFs (tile by tile, in little memory), predicts each with
`train_unet.py predict` in a process of its own, and tells its peak of resident memory; the first,
small side shows what the program takes at least. One photograph is predicted in tiles and as a
whole: how far the probabilities differ, near the borders of tiles and elsewhere. Without --run a
small network is trained first.
"""
import itertools
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import PIL.Image
import tifffile
import torch
from tqdm import tqdm

from common import (ROOT, base_parser, describe_machine, exit_with, median_and_spread, print_table,
                    save_json, whole_number)
from plain import train_unet
from processes import run_watched

SCRIPT = [sys.executable, str(ROOT / 'train_unet.py')]
NEAR = 8                                                # pixels from a tile's border


def train_small(args, folder):
    """A quick run of its own -> its folder."""
    subprocess.run([*SCRIPT, f'data={args.data}', f'run_dir={folder}', 'size_policy=crop',
                    f'image_size={args.tile}', f'num_epochs={args.epochs}', 'encoder=resnet18',
                    'decoder_channels=[64,32,32,16,16]', f'device={args.device}'], check=True)
    return folder


def write_scan(path, side, photo, tile=512):
    """A side x side RGB TIFF made of random cuts of a photograph, written tile by tile."""
    draw = np.random.default_rng(0)
    rgb = np.asarray(PIL.Image.open(photo).convert('RGB'))
    rgb = np.tile(rgb, (tile // rgb.shape[0] + 2, tile // rgb.shape[1] + 2, 1))
    count = math.ceil(side / tile) ** 2

    def tiles():
        for _ in tqdm(range(count), desc=f'writing {side} x {side}'):
            top, left = (draw.integers(0, length - tile) for length in rgb.shape[:2])
            yield np.ascontiguousarray(rgb[top:top + tile, left:left + tile])

    tifffile.imwrite(path, tiles(), shape=(side, side, 3), dtype=np.uint8, photometric='rgb',
                     tile=(tile, tile), compression='zlib', bigtiff=True)


def measure_scan(side, args, run, photo, folder):
    """A row of the first table."""
    path, found = folder / f'scan{side}.tif', []
    write_scan(path, side, photo)
    command = [*SCRIPT, 'predict', str(run), str(path), '-o', str(folder / 'masks'),
               f'max_image_pixels={max(2 * side ** 2, 512 ** 2)}', f'device={args.device}']
    for _ in tqdm(range(args.rounds), desc=f'predicting {side} x {side}'):
        seconds, peak, code = run_watched(command, stdout=subprocess.DEVNULL)
        if code:
            raise SystemExit(f'{" ".join(command)} ended with {code}')
        found.append((seconds, peak))
    (seconds, spread), (peak, _) = (median_and_spread(values) for values in zip(*found))
    return {'side': side, 'megapixels': side ** 2 / 1e6, 'raw MiB': 3 * side ** 2 / 2**20,
            'file MiB': path.stat().st_size / 2**20, 'peak MiB': peak / 2**20,
            'seconds': seconds, '+-': spread, 'megapixels/s': side ** 2 / 1e6 / seconds}


def choose_photo(model):
    """The largest validation image of a run."""
    pairs = train_unet.find_pairs(model.config)
    files = [path.decode() for path in pairs.images[pairs.rows('val')]]
    return max(files, key=lambda path: math.prod(PIL.Image.open(path).size))


def near_borders(length, tile):
    """Which positions of an axis are near the middle of an overlap, where one tile hands over to the next."""
    begins = train_unet.tile_offsets(length, tile, 0.25)
    borders = [(a + tile + b) // 2 for a, b in itertools.pairwise(begins)]
    at = torch.arange(length)
    return sum(((at >= b - NEAR) & (at < b + NEAR) for b in borders), torch.zeros(length) > 0) > 0


@torch.no_grad()
def measure_seam(model, photo, tile):
    """Rows of the second table: tiles against the whole, near borders of tiles and elsewhere."""
    image = train_unet.as_image(photo, model.config)
    tensor = train_unet.as_tensor(image).to(next(model.parameters()).device)
    size = image.shape[:2]

    def chances(logits):
        return (logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(1))[0].cpu()

    def labels(logits):
        return train_unet.decide(logits[0], size, model.threshold).cpu()

    whole, tiled = model(tensor), train_unet.tiled_logits(model, tensor, (tile, tile))
    changed = labels(whole) != labels(tiled)
    whole, tiled = chances(whole), chances(tiled)
    rows, columns = (near_borders(length, tile) for length in size)
    near = rows[:, None] | columns

    def steps(chance):
        """Mean difference of neighbouring pixels: what a seam would raise."""
        return sum(chance.diff(dim=d, append=chance.narrow(d, -1, 1)).abs() for d in (1, 2)).amax(0)

    difference = (whole - tiled).abs().amax(0)
    return [{'where': name, 'share of pixels': f'{where.float().mean():.1%}',
             'largest difference': difference[where].max().item(),
             'mean difference': f'{difference[where].mean():.2e}',
             'changed labels': f'{changed[where].float().mean():.4%}',
             'step to the neighbour, whole': f'{steps(whole)[where].mean():.5f}',
             'tiled': f'{steps(tiled)[where].mean():.5f}'}
            for name, where in ((f'within {NEAR} pixels of where two tiles meet', near),
                                ('elsewhere', ~near), ('everywhere', near | True)) if where.any()]


def main():
    parser = base_parser(__doc__, rounds=1, seeds=None)
    option = parser.add_argument
    option('--run', help='folder of a trained run with size_policy=crop')
    option('--sides', nargs='+', type=whole_number, default=[1000, 5000, 20_000])
    option('--photo', help="what is shown; the run's largest validation image")
    option('--tile', type=whole_number, default=128, help='image_size of the small training (128)')
    option('--epochs', type=whole_number, default=5, help='of the small training (5)')
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        run = args.run or train_small(args, folder / 'run')
        model = train_unet.load(run, args.device)
        if model.config['size_policy'] != 'crop':
            sys.exit(f'{run}: has size_policy={model.config["size_policy"]}; only a run with crop predicts in tiles')
        photo = args.photo or choose_photo(model)
        tile = args.tile if args.run is None else model.config['image_size'][0]
        seam = measure_seam(model, photo, tile)
        results = {'settings': vars(args), 'scans': [], 'seam': seam, 'photo': Path(photo).name}
        for side in args.sides:
            results['scans'].append(measure_scan(side, args, run, photo, folder))
            path = save_json('large_image', results, args.out, n=args.rounds, seed=0)
    print_table('Predicting a tiled TIFF: the whole program from Enter to exit', results['scans'])
    print_table(f'Tiles of {tile} with a quarter overlap against the whole photograph', seam)
    print(f'\n{describe_machine()}\n{path}')


if __name__ == '__main__':
    exit_with(main)
