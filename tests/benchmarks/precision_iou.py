"""Do bfloat16 and float32 reach the same IoU? Trains both from the same seeds and compares.

    python tests/benchmarks/precision_iou.py --data demo
    python tests/benchmarks/precision_iou.py --data nuclei_dsb2018 --size 256 --encoder resnet34

The real program trains in a process of its own, seed by seed and precision by precision; the score
is the best validation IoU that it reports; '+-' is the standard error of the difference from the
first precision, seed by seed: a difference of its size says nothing. The defaults are small (a tiny
network on small images of the demo), because a CPU without bfloat16 units takes several times longer
for it.
"""
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time

from common import (ROOT, base_parser, describe_machine, exit_with, print_table, save_json,
                    whole_number)
from tqdm import tqdm

PRECISIONS = {'float32': ['use_amp=False', 'tf32_matmul_precision=highest'],
              'bfloat16': ['use_amp=True', 'amp_dtype=bfloat16'],
              'float16': ['use_amp=True', 'amp_dtype=float16']}


def train(settings, folder):
    """Run the program to its end -> (best validation IoU, seconds, the precisions of its epochs)."""
    command = [sys.executable, str(ROOT / 'train_unet.py'), *settings, f'run_dir={folder}']
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f'{" ".join(command)} failed:\n{done.stderr[-2000:]}')
    with open(os.path.join(folder, 'history.csv'), newline='') as file:
        rows = [row for row in csv.DictReader(file) if row['val_iou']]
    return (max(float(row['val_iou']) for row in rows), time.perf_counter() - begun,
            sorted({row['precision'] for row in rows}))


def standard_error(values):
    """Of the mean; '-' of less than two values."""
    return f'{statistics.stdev(values) / len(values) ** 0.5:.4f}' if len(values) > 1 else '-'


def main():
    parser = base_parser(__doc__, rounds=None, seeds=10, data='demo')
    option = parser.add_argument
    option('--encoder', default='tu-test_resnet', help='half a million weights by default')
    option('--decoder', default='[32,16,16,8,8]', help='channels of the decoder')
    option('--size', type=whole_number, default=64, help='side of the images (64)')
    option('--epochs', type=whole_number, default=8)
    option('--precisions', nargs='+', choices=PRECISIONS, default=['float32', 'bfloat16'])
    option('--within', type=float, default=0.005, help='largest difference of the means (0.005)')
    option('settings', nargs='*', help='more settings of the training: key=value')
    args = parser.parse_args()
    common = [f'data={args.data}', f'device={args.device}', f'encoder={args.encoder}',
              f'decoder_channels={args.decoder}', f'image_size={args.size}',
              f'num_epochs={args.epochs}', *args.settings]
    found, first = {name: [] for name in args.precisions}, args.precisions[0]
    jobs = [(name, seed) for seed in range(args.seeds) for name in args.precisions]
    with tempfile.TemporaryDirectory() as folder:
        for name, seed in tqdm(jobs, desc='trainings'):
            settings = [*common, *PRECISIONS[name], f'seed={seed}']
            found[name].append(train(settings, os.path.join(folder, f'{name}-{seed}')))
            path = save_json('precision_iou', {'settings': vars(args), 'iou_seconds_precisions': found},
                             args.out, n=args.seeds, seed=list(range(args.seeds)))
    means = {name: statistics.mean(iou for iou, *_ in runs) for name, runs in found.items()}
    print_table(f'Best validation IoU of {args.epochs} epochs, {" ".join(common)}', [
        {'precision': name, **{f'seed {seed}': f'{iou:.4f}' for seed, (iou, *_) in enumerate(runs)},
         'mean IoU': f'{means[name]:.4f}', f'minus {first}': f'{means[name] - means[first]:+.4f}',
         '+-': standard_error([a - b for (a, *_), (b, *_) in zip(runs, found[first])]),
         'seconds each': statistics.median(seconds for _, seconds, _ in runs)}
        for name, runs in found.items()])
    same = all(abs(mean - means[first]) <= args.within for mean in means.values())
    verdict = f'Equal within {args.within}' if same else f'NOT equal within {args.within}'
    verdict = verdict if len(means) > 1 else 'One precision alone: nothing was compared'
    others = {name: precisions for name, runs in found.items() for *_, precisions in runs if precisions != [name]}
    if others:                                                         # no such units, or healed
        verdict, same = f'NOT comparable: what was to train in these precisions trained in {others}', False
    print(f'\n{verdict}\n{describe_machine()}\n{path}')
    return None if same else verdict


if __name__ == '__main__':
    exit_with(main)
