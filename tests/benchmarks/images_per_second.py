"""Images per second of the same training in train_unet and in its peers, side by side.

    pip install -r requirements.txt -r tests/benchmarks/requirements.txt
    python tests/benchmarks/images_per_second.py

Equal for all: smp.Unet from scratch with one output, the same image files, image size, batch,
AdamW, cross-entropy plus Dice, precision, no augmentation (peers.py has each contender). Two figures
each: with loading the files and the IoU of the training batches, and without (tensors in memory, no
metric). Peers run as their documentation tells, and tuned: channels_last, fused AdamW, on a GPU cuDNN's
search for its fastest kernels; plain PyTorch, Lightning and Accelerate with persistent workers (whose
start is not timed anyway), MONAI with its cache and without meta data. Ours runs three times:
'equal' without its moving average of the weights, its gradient clipping and its cache of images,
'default' with all three, and 'auto' also in the precision that it picks unasked on this machine,
where the peers stay in float32, or with --precision bfloat16 train in that as each of them tells.

The clock hangs on torch's own hook after every optimizer step, so that no loop has to be touched.
An epoch warms up; measured is the middle of the second: the steady rate, without starting workers,
validation and checkpoints (time_to_iou.py has those), and without its first and last steps, beside
which workers read nothing because the batches of a short epoch are ready or being waited for.
Each pair of figures is a process of its own, so that threads, allocator and imports of one contender
do not leak into the next; contenders take turns, in another order every round, so that a slow minute
of the machine hits all; ours is in the middle of each round, so that no peer is much more than half a
round away from it. 'ours is faster' is the median over the rounds of the ratio within a round, of
'equal', '+-' the spread of that ratio; 'as it comes' is the ratio of 'auto'.
"""
import dataclasses
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import PIL.Image

from common import (base_parser, count_cores, count_workers, describe_machine, exit_with, median_and_spread,
                    lacks, print_table, save_json, whole_number)
from processes import ask_subprocess
from tqdm import tqdm

AHEAD = 2 * max(2, count_workers())   # batches that DataLoader's workers have ready: two for each
KEEP_MEMORY = {'MALLOC_TRIM_THRESHOLD_': str(2**31 - 1), 'MALLOC_MMAP_THRESHOLD_': str(32 * 2**20)}   # of glibc
NAMES = ('ours', 'plain', 'lightning', 'fastai', 'monai', 'accelerate')


def parse_args():
    """The options."""
    parser = base_parser(__doc__, rounds=5, seeds=None)
    option = parser.add_argument
    option('--encoders', nargs='+', default=['resnet18', 'resnet34'])
    option('--contenders', nargs='+', default=list(NAMES), choices=NAMES)
    option('--size', type=whole_number, default=128, help='pixels (128)')
    option('--batch', type=whole_number, default=8, help='images per step (8)')
    option('--steps', type=whole_number,
           help=f'steps of an epoch, of two epochs; the first and last {AHEAD} do not count; '
                f'of fewer than {2 * AHEAD + 4} only one or two do ({5 * AHEAD}, or all images)')
    option('--precision', default='float32', choices=['float32', 'bfloat16'],
           help='of all but ours, auto (float32); bfloat16 is mixed precision')
    option('--frugal', action='store_true', help='on a CPU, tuned peers also keep freed memory, and read '
           'without workers, as ours does there')
    option('--measure', metavar='JOB', help='internal: this one job, in this process')
    args = parser.parse_args()
    if args.steps == 1:
        parser.error(f'--steps {args.steps}: one step has no rate; type 2 or more')
    return args


def main():
    """Measure in rounds, then tables and JSON."""
    args = parse_args()
    if args.measure:
        return work(json.loads(args.measure))
    if args.device == 'auto':
        args.device = find_device()
    import peers
    names = [name for name in args.contenders if is_installed(name, peers.NEEDS.get(name, []))]
    if args.precision == 'bfloat16' and args.device == 'cpu':
        for name in [name for name in names if name in peers.MIXED_ON_CUDA_ONLY]:
            print(f'skipped: {name}, whose mixed precision is for CUDA alone')
            names.remove(name)
    if not names:
        sys.exit('nothing is left to measure')
    variants = peers.list_variants(names)
    records, failed, total = [], 0, args.rounds * len(args.encoders) * len(variants)
    with tempfile.TemporaryDirectory() as folder, tqdm(total=total, desc='Trainings') as bar:
        data = prepare_data(args, Path(folder) / 'data')
        for number in range(args.rounds):
            for encoder in args.encoders:
                for contender, variant in order(variants, number, args.rounds):
                    bar.set_postfix_str(f'{encoder}, {contender}, {variant}')
                    job = peers.Job(contender, variant, encoder, str(data), args.size, args.batch,
                                    args.steps, args.device, seed=number, dtype=args.precision)
                    job.frugal = args.frugal and job.tuned and args.device == 'cpu'
                    found = measure(job, Path(folder))
                    records, failed = records + found, failed + (not found)
                    sizes = {record['parameters'] for record in records if record['encoder'] == encoder}
                    if len(sizes) > 1:
                        sys.exit(f'the networks differ: {sizes} parameters')
                    path = save_json('images_per_second', {'settings': vars(args), 'runs': records},
                                     args.out, n=args.rounds, seed=f'0..{args.rounds - 1}')
                    bar.update()
    for encoder in args.encoders:
        timed = args.steps - 2 * count_ends(args.steps) - 1
        title = (f'{encoder}, {args.size} x {args.size}, batch {args.batch}, {args.precision}; {timed} of {args.steps} '
                 f'steps timed; medians of {args.rounds} rounds, spread: half the distance between the quartiles')
        print_table(title, build_rows([r for r in records if r['encoder'] == encoder], variants))
    print(f'\n{describe_machine()}\n{path}')
    return int(failed > 0)


def order(variants, number, rounds):
    """The variants in the order of a round: peers around ours, which they are compared with; both begin elsewhere
    each time."""
    ours, others = ([variant for variant in variants if (variant[0] == 'ours') == mine] for mine in (True, False))
    for part in (ours, others):
        turn = number * max(1, len(part) // rounds) % max(1, len(part))
        part[:] = part[turn:] + part[:turn]
    half = len(others) // 2
    return others[:half] + ours + others[half:]


def find_device():
    """The best device that is there."""
    import torch
    return 'cuda' if torch.cuda.is_available() else 'cpu'


def is_installed(name, packages):
    """Whether a contender can run; says so if not."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        print(f'skipped: {name}, because {" and ".join(missing)} is not installed here')
    return not missing


def prepare_data(args, target):
    """A folder with exactly the images of an epoch, the same for all, and a batch to validate."""
    source = Path(args.data)
    if args.data == 'demo':
        import train_unet
        source = Path(train_unet.write_demo(target.parent / 'demo'))
    if lacks(source):
        sys.exit(f'{lacks(source)}: put the set in such folders')
    for split in ('train', 'val'):
        images, masks = (sorted((source / kind / split).iterdir()) for kind in ('images', 'masks'))
        args.steps = args.steps or max(2, min(5 * AHEAD, len(images) // args.batch))
        count = args.batch * (args.steps if split == 'train' else 1)
        if len(images) < count or len(images) != len(masks):
            sys.exit(f'{source}: {len(images)} images and {len(masks)} masks in {split}, '
                     f'{count} are needed; fewer --steps or a smaller --batch')
        for path in masks[:count] if args.data != 'demo' else ():
            if others := {*np.unique(np.asarray(PIL.Image.open(path))).tolist()} - {0, 255}:
                sys.exit(f'{path}: holds {sorted(others)[:5]}; all contenders learn two classes, of masks of 0 and 255')
        for kind, files in (('images', images), ('masks', masks)):
            (target / kind / split).mkdir(parents=True)
            for path in files[:count]:
                shutil.copyfile(path, target / kind / split / path.name)
    return target


def measure(job, folder):
    """One process -> its records; a contender that fails is told and left out of this round."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        try:
            return ask_subprocess(__file__, json.dumps(dataclasses.asdict(job)), cwd=scratch,
                                  env=os.environ | (KEEP_MEMORY if job.frugal else {}))
        except SystemExit as error:
            tqdm.write(f'failed: {job.contender}, {job.variant}: {str(error).strip().splitlines()[-1][:300]}')
            return []


def work(job):
    """Inside the process: the job with files and metrics, then without, as JSON."""
    import peers
    import torch
    torch.set_num_threads(min(torch.get_num_threads(), count_cores()))     # in a container of a few cores, as ours does
    records = []
    for loaded in (True, False):
        torch.manual_seed(job['seed'])
        ready = peers.Job(**{**job, 'loaded': loaded})
        records.append({**dataclasses.asdict(ready), **time_steps(ready, peers)})
    print('\n' + json.dumps(records))


def time_steps(job, peers):
    """Train, reading the clock after every optimizer step -> images/s of the last epoch's middle."""
    import time

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook
    on_gpu, marks, sizes = job.device.startswith('cuda'), [], []
    torch.backends.cudnn.benchmark = job.tuned                         # ours sets it itself

    def note(optimizer, arguments, named):
        if on_gpu:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())
        sizes.append(sum(p.numel() for group in optimizer.param_groups for p in group['params']))

    hook = register_optimizer_step_post_hook(note)
    try:
        peers.CONTENDERS[job.contender](job)
    finally:
        hook.remove()
    expected = peers.EPOCHS * job.steps
    if len(marks) not in (expected, expected + 1):                     # ours tries one step first
        raise RuntimeError(f'{len(marks)} steps instead of {expected}: not the same work')
    if on_gpu:
        torch.cuda.synchronize()
    ahead = count_ends(job.steps)
    first, *others, last = marks[-job.steps:][ahead:job.steps - ahead]
    seconds = first.elapsed_time(last) / 1000 if on_gpu else last - first
    return {'images_per_second': (len(others) + 1) * job.batch / seconds, 'parameters': sizes[-1]}


def count_ends(steps):
    """The first, and as many last, steps of an epoch that do not count: at most all but two."""
    return min(AHEAD, steps // 2 - 1)


def build_rows(records, variants):
    """The table of one encoder."""
    rows = []
    for contender, variant in variants:
        row = {'contender': f'{contender}, {variant}'}
        for loaded, name in ((True, 'from files'), (False, 'in memory')):
            mine, equal, auto = ({r['seed']: r['images_per_second'] for r in records
                                  if (r['contender'], r['variant'], r['loaded']) == (*who, loaded)}
                                 for who in ((contender, variant), ('ours', 'equal'), ('ours', 'auto')))
            median, spread = median_and_spread(mine.values())
            (ratio, its_spread), (as_it_comes, _) = (
                median_and_spread(base[n] / mine[n] for n in mine if n in base) for base in (equal, auto))
            row |= {f'{name}, images/s': median, f'spread{" " * loaded}': spread,
                    f'ours is faster{" " * loaded}': ratio,
                    f'+-{" " * loaded}': its_spread, f'as it comes{" " * loaded}': as_it_comes}
        rows.append(row)
    return rows


if __name__ == '__main__':
    exit_with(main)
