"""The physical limit of a training step, the share that training reaches, and where the rest goes.

    python tests/benchmarks/limit.py --data demo --encoder resnet34 --size 256

The limit is the longer of two times, as if the other were hidden behind it: FLOPs of one real step
(counted by torch) over the fastest convolution this machine shows, which moves its own bytes
meanwhile, and the bytes that must move at least (each activation kept for the backward pass and its
gradient written and read once; weights and optimizer states) over the measured memory bandwidth.
Beside it the bytes that the operators really read and write, one after the other: no limit.
The profile gives each part its own time: of the CPU, or of the kernels on a GPU.
"""
import contextlib
import functools
import re
import time
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from common import (base_parser, describe_machine, exit_with, median_and_spread, print_table,
                    save_json, show, whole_number)
from plain import Ours, train_unet

SHAPES = [(64, 64, 64), (128, 128, 32), (256, 256, 16), (512, 512, 8),
          (64, 32, 128)]                                # channels in and out, side


def seconds_of(function, device, rounds, is_short=False):
    """Median seconds of a call, the device waited for; on a GPU short ones are called 50 times between two waits."""
    wait = torch.cuda.synchronize if device.type == 'cuda' else lambda: None
    calls = 50 if is_short and device.type == 'cuda' else 1
    times = []
    for _ in range(rounds + 1):
        wait()
        begun = time.perf_counter()
        for _ in range(calls):
            function()
        wait()
        times.append((time.perf_counter() - begun) / calls)
    return median_and_spread(times[1:])[0]


def measure_convolutions(device, dtypes, batch, rounds):
    """FLOP/s of 3x3 convolutions, forward alone and with backward, in both layouts -> rows."""
    rows = []
    for dtype in dtypes:
        for width, out, side in tqdm(SHAPES, desc=f'convolutions, {dtype}'):
            row = {'convolution': f'{width} -> {out}, {side} x {side}, {dtype}'}
            for name, layout in (('NCHW', torch.contiguous_format),
                                 ('channels_last', torch.channels_last)):
                how = {'device': device, 'dtype': getattr(torch, dtype)}
                conv = torch.nn.Conv2d(width, out, 3, padding=1, bias=False, **how)
                conv = conv.to(memory_format=layout)
                x = torch.randn(batch, width, side, side, **how).to(memory_format=layout)
                x.requires_grad_()
                flops = 2 * 9 * width * out * batch * side ** 2
                gradient = torch.ones_like(conv(x))
                with torch.no_grad():
                    row[name] = flops / seconds_of(lambda: conv(x), device, rounds, True) / 1e9

                def forward_and_backward():
                    x.grad = conv.weight.grad = None                   # adding to those of the last call is no part
                    conv(x).backward(gradient)

                both = seconds_of(forward_and_backward, device, rounds, True)
                row[f'{name}, with backward'] = 3 * flops / both / 1e9
            rows.append(row)
    return rows


def measure_bandwidth(device, rounds, count=2 ** 26):
    """Bytes per second of a copy and a triad (a = b + 2 c), on arrays no cache holds -> dict."""
    a, b, c = (torch.ones(count, device=device) for _ in range(3))
    triad = functools.partial(torch.add, b, c, alpha=2, out=a)
    return {'copy': 8 * count / seconds_of(lambda: a.copy_(b), device, rounds, True),
            'triad': 12 * count / seconds_of(triad, device, rounds, True)}


class ByteCounter(TorchDispatchMode):
    """Adds up the bytes that operators read and write, in place too; views move nothing."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view and function.overloadpacket._qualified_op_name != 'aten::detach':
            self.bytes += bytes_moved(function, args, kwargs or {}, out)
        return out


def bytes_moved(function, args, kwargs, out):
    """What one operator reads and writes, after its schema."""
    size = lambda value: sum(x.numel() * x.element_size() for x in tree_leaves(value)
                             if torch.is_tensor(x))
    schema, total = function._schema, 0
    given = {argument.name: value for argument, value in zip(schema.arguments, args)} | kwargs
    for argument in schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_only_written = argument.is_out or re.search(r'copy_|zero_|fill_', schema.name)
        is_read = not (is_written and is_only_written)
        is_written &= argument.name != 'grads'                         # which unscaling alone changes
        total += (is_read + is_written) * size(given.get(argument.name))
    fresh = [value for value, told in zip(out if len(schema.returns) > 1 else [out], schema.returns)
             if told.alias_info is None]
    return total + size(fresh)


def count_work(ours):
    """FLOPs and bytes of one step -> (FLOPs, bytes at least, bytes as run)."""
    window, config = next(ours.windows), ours.config
    with FlopCounterMode(display=False) as flops:
        train_unet.train_step(ours.state, window, ours.loss_fn, config)
    ours.state.scaler = train_unet.build_scaler(ours.state.dtype, config, ours.state.device)   # it has unscaled once
    with ByteCounter() as moved:
        train_unet.guarded_step(ours.state, window, ours.loss_fn, config)
    parts = train_unet.estimate_memory(config, ours.state.dtype)
    passes = config['accumulation_steps']
    # an activation and its gradient: written and read; weights: read in both passes, gradients
    # written, read, AdamW reads and writes weight and two states; the average is read and written
    least = 4 * parts['activations'] * passes + parts['weights'] * (2 * passes + 2 + 6)
    return flops.get_total_flops(), least + 2 * parts['averaged weights'], moved.bytes


REGIONS = ('data', 'loss and metrics', 'optimizer')     # these own whatever runs inside them
PARTS = {                                               # operators, from the innermost outwards
    'convolution': r'conv|addmm|::mm|bmm|matmul|linear',
    'normalisation': r'_norm|norm_',
    'resampling': r'upsample|pool|interpolate',
    'activation': r'relu|threshold|silu|gelu|sigmoid|hardswish|mul_?$',
    'copies and layout': r'copy_|::cat|contiguous|clone|::to$|_to_copy|pad|slice|narrow|'
                         r'stack|empty|zero|fill_|index|Memcpy|Memset',
    'sums of branches': r'::add_?$|::sub|::div|AccumulateGrad',
}


def recorded(name, function):
    """The function, its time under this name in the profile."""
    def wrapped(*args, **kwargs):
        with torch.profiler.record_function(name):
            return function(*args, **kwargs)
    return wrapped


@contextlib.contextmanager
def named_regions(ours):
    """While open, data, loss and optimizer of the real step carry their names in a profile."""
    places = [(ours.loss_fn, 'losses', 1), (train_unet, 'confusion_matrix', 1),
              (train_unet, 'commit', 2), (train_unet, 'Snapshot', 2),
              (torch.nn.utils, 'clip_grad_norm_', 2)]
    with contextlib.ExitStack() as stack:
        for owner, name, region in places:
            if hasattr(owner, name):
                wrapped = recorded(REGIONS[region], getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield


def profile(ours, steps, on_gpu):
    """Milliseconds of each part in a step -> (parts, milliseconds of a whole profiled step)."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] * on_gpu
    step = train_unet.guarded_step
    with named_regions(ours), torch.profiler.profile(activities=kinds) as profiler:
        begun = time.perf_counter()
        for _ in tqdm(range(steps), desc='profile'):
            window = recorded('data', next)(ours.windows)
            step(ours.state, window, ours.loss_fn, ours.config)
        if on_gpu:
            torch.cuda.synchronize()
        wall = time.perf_counter() - begun
    parts = dict.fromkeys([*PARTS, *REGIONS], 0.0)
    chains = [chain_of(event) for event in profiler.events()
              if event.device_type == torch.autograd.DeviceType.CPU]
    of_loss = {chain[0].sequence_nr for chain in chains if name_region(chain) == REGIONS[1]} - {-1}
    for chain in chains:
        part, event = part_of(chain, of_loss), chain[0]
        if on_gpu and part and not getattr(event, 'is_user_annotation', False):
            parts[part] += event.self_device_time_total / 1000 / steps
        elif part and not on_gpu:
            parts[part] += event.self_cpu_time_total / 1000 / steps
    rest = 'Python and waiting' if on_gpu else 'Python and other'
    parts[rest] = wall / steps * 1000 - sum(parts.values())
    return parts, wall / steps * 1000


def chain_of(event):
    """An event and all that it ran inside, the innermost first."""
    chain = [event]
    while chain[-1].cpu_parent is not None:
        chain.append(chain[-1].cpu_parent)
    return chain


def name_region(chain):
    """The region of REGIONS that an event ran in, or None."""
    return next((event.name for event in chain if event.name in REGIONS), None)


def part_of(chain, of_loss):
    """The row of the table that an event belongs to, or None.

    A backward node carries the number of its forward operator; `of_loss` are those of the loss.
    """
    if 'evaluate_function' in chain[-1].name and chain[-1].sequence_nr in of_loss:
        return REGIONS[1]
    return name_region(chain) or next((part for event in chain for part, words in PARTS.items()
                                       if re.search(words, event.name)), None)


def main():
    parser = base_parser(__doc__, rounds=10, seeds=None)
    option = parser.add_argument
    option('--encoder', default='resnet34', help='encoder of the U-Net (resnet34)')
    option('--size', type=whole_number, default=256, help='side of the images (256)')
    option('--batch', type=whole_number, default=8, help='images per step (8)')
    option('--dtype', default='auto', choices=['auto', 'float32', 'bfloat16', 'float16'])
    args = parser.parse_args()
    amp = {} if args.dtype == 'auto' else train_unet.amp_settings(args.dtype)
    ours = Ours(data=args.data, encoder=args.encoder, image_size=args.size, batch_size=args.batch,
                device=args.device, **amp)
    device, dtype = ours.state.device, ours.state.dtype
    ours.step()                                                        # warm: kernels, caches
    for _ in range(ours.sampler.num_windows):                          # later epochs have the images in memory
        next(ours.windows)
    rates = measure_convolutions(device, sorted({'float32', dtype}), args.batch, args.rounds)
    fastest = max(value for row in rates for name, value in row.items()
                  if name != 'convolution' and row['convolution'].endswith(dtype)) * 1e9
    bandwidth = measure_bandwidth(device, args.rounds)
    flops, least, moved = count_work(ours)
    step = median_and_spread([seconds_of(ours.step, device, 1)
                              for _ in tqdm(range(args.rounds), desc='training steps')])
    best = max(bandwidth.values())
    compute, memory, as_run = flops / fastest, least / best, moved / best
    parts, wall = profile(ours, min(args.rounds, 5), device.type == 'cuda')

    def row(what, seconds, amount='', rate=''):
        return {'what': what, 'amount': amount, 'rate': rate, 'seconds': seconds,
                'share of the step': f'{seconds / step[0]:.0%}'}

    speed = f'{best / 1e9:.1f} GB/s'
    print_table('Convolutions, GFLOP/s', rates)
    print_table('The limit of one step', [
        row('convolutions at the fastest rate', compute, f'{flops / 1e9:.0f} GFLOP',
            f'{fastest / 1e9:.0f} GFLOP/s'),
        row('bytes that must move', memory, f'{least / 2**20:.0f} MiB', speed),
        row('the limit: the longer of the two', max(compute, memory)),
        row('bytes as the operators move them', as_run, f'{moved / 2**20:.0f} MiB', speed),
        row(f'training ({dtype})', step[0], f'{args.batch} images',
            f'{args.batch / step[0]:.1f} images/s')])
    print_table('Where a step goes', [
        {'part': name, 'ms per step': value, 'share': f'{value / wall:.1%}'}
        for name, value in sorted(parts.items(), key=lambda item: -item[1])])
    print(f'\nA profiled step takes {wall:.0f} ms, an unprofiled one {step[0] * 1000:.0f} '
          f'(half the quartile distance {show(step[1] * 1000)}).\n{describe_machine()}')
    results = {'settings': vars(args), 'dtype': dtype, 'convolutions': rates,
               'bytes_per_second': bandwidth, 'flops': flops, 'bytes_at_least': least,
               'bytes_as_run': moved, 'step_seconds': step, 'profile_ms': parts,
               'limit_seconds': {'convolutions': compute, 'bytes': memory, 'as_run': as_run},
               'profiled_step_ms': wall}
    print(save_json('limit', results, args.out, n=args.rounds, seed=0))


if __name__ == '__main__':
    exit_with(main)
