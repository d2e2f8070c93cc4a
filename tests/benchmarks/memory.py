"""Peak memory of training: the presets low_memory and fast against the plain smp loop.

    python tests/benchmarks/memory.py --data demo --encoder resnet34 --size 256

Each contender trains a few real steps, data loading included, in a process of its own: the same
network, the same images, the same effective batch; ours has read all training images once, and kept
those that it keeps. On a CPU the peak of resident memory is told, and apart from it what the imported
libraries alone take; on a GPU what torch allocated there.
"""
import json
from unittest import mock

import torch
from tqdm import tqdm

from common import (base_parser, describe_machine, exit_with, median_and_spread, print_table,
                    save_json, whole_number)
from plain import OurData, Ours, Plain, read_batches, train_unet
from processes import ask_subprocess, peak_resident, resident

NETWORK = {'decoder_channels': [256, 128, 64, 32, 16]}   # smp's own, for all
CONTENDERS = ('plain', 'default', 'fast', 'fast-eager', 'low_memory')


def count_passes(name):
    """The forward passes that a contender takes an effective batch in."""
    preset = name.partition('-')[0]
    if preset in ('plain', 'default'):
        return 1
    return train_unet.load_preset(preset).get('accumulation_steps', 1)


def build(name, args):
    """One contender: 'plain', 'default' or a preset; '-eager' leaves out the compiler."""
    settings = {'data': args.data, 'device': args.device, 'image_size': args.size}
    if name == 'plain':
        with mock.patch.object(train_unet, 'keep_freed_memory'):       # ours alone does that
            found = OurData(cache_images=False, **settings)            # only to find the files
        dataset = found.as_paths()
        return Plain(read_batches(dataset, args.batch), found.device, dataset.num_classes,
                     encoder_name=args.encoder, **NETWORK)
    preset, _, eager = name.partition('-')
    passes = count_passes(name)
    eager = {'compile_model': False} if eager else {}
    return Ours(None if preset == 'default' else preset, encoder=args.encoder, **NETWORK, **eager,
                **settings, batch_size=args.batch // passes, accumulation_steps=passes)


def measure(name, args):
    """Train a few steps and print the peak, as JSON, for the process that asked."""
    imported = resident()
    contender = build(name, args)
    if isinstance(contender, OurData):                                 # as in a later epoch: images it keeps are there
        for _ in range(contender.sampler.num_windows):
            next(contender.windows)
    for number in range(args.steps):
        contender.step()
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        if on_gpu and number == 0 and args.steps > 1:                  # with cuDNN's search for the fastest kernels
            torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_resident()
    print(json.dumps({'peak': peak, 'imported': 0 if on_gpu else imported}))


def main():
    parser = base_parser(__doc__, rounds=3, seeds=None)
    option = parser.add_argument
    option('--encoder', default='resnet34', help='encoder of the U-Net (resnet34)')
    option('--size', type=whole_number, default=256, help='side of the images (256)')
    option('--batch', type=whole_number, default=8, help='effective batch, low_memory in 4 passes (8)')
    option('--steps', type=whole_number, default=3, help='steps of each contender (3)')
    option('--contenders', nargs='+', default=CONTENDERS,
           help='plain, default, any preset, with -eager never compiled')
    option('--measure', metavar='NAME', help='internal: one contender, in this process')
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure, args)
    for name in args.contenders:
        if args.batch % count_passes(name):                            # or its step would be of fewer images
            parser.error(f'--batch={args.batch}: {name} takes a batch in {count_passes(name)} passes; '
                         'type a multiple')
    words = [f'--{key}={getattr(args, key)}'
             for key in ('data', 'device', 'encoder', 'size', 'batch', 'steps')]
    found = {name: [] for name in args.contenders}
    for name in tqdm(args.contenders * args.rounds, desc='contenders'):
        found[name].append(ask_subprocess(__file__, name, *words))
        # each time: gpu.py may end it before the last
        path = save_json('memory', {'settings': vars(args), 'bytes': found}, args.out, n=args.rounds)

    medians = {name: {key: median_and_spread(one[key] for one in ones) for key in ones[0]}
               for name, ones in found.items()}
    rows = []
    for name, median in medians.items():
        (peak, spread), (imported, _) = median['peak'], median['imported']
        row = {'contender': name, 'peak MiB': peak / 2**20, '+-': spread / 2**20,
               'libraries': imported / 2**20, 'without them': (peak - imported) / 2**20}
        if 'plain' in medians:
            plain, libraries = (medians['plain'][key][0] for key in ('peak', 'imported'))
            row |= {'of plain': f'{peak / plain:.0%}',
                    'of plain, without': f'{(peak - imported) / max(1, plain - libraries):.0%}'}
        rows.append(row)
    print_table(f'Peak memory, Unet {args.encoder}, {args.size} x {args.size}, effective batch '
                f'{args.batch}, medians of {args.rounds}', rows)
    print(f'\n{describe_machine()}\n{path}')


if __name__ == '__main__':
    exit_with(main)
