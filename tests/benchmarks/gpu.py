"""Everything that needs a GPU, in one bounded call; nothing is downloaded.

    python tests/benchmarks/gpu.py --data nuclei_dsb2018 --iou-data nuclei_dsb2018 camvid
    python tests/benchmarks/gpu.py --device cpu --quick        the same in small, without a GPU

Unet with resnet34 at 512 x 512. Parts, in this order (--parts chooses):
    speed       images/s of a few batches that are loaded already: train_unet, also as preset fast
                (compiled), both without folded decoder blocks too, the plain smp loop as written and
                tuned (channels_last, fused Adam, cuDNN's search), Lightning likewise if installed;
                both precisions
    host        a small step (8 images of --iou-size): its time, that of the host to start it, and
                how often it waits for the GPU
    memory      peak of each preset against the plain loop
    limit       the measured bfloat16 and float32 rates, the share training reaches, the profile
    largest     the largest batch in one pass: plain float32, ours, ours with low_memory
    oom         memory really runs out in a training: the healing, and what it changes
    overflow    a layer scaled by 1e5 really overflows float16: the healing, and what it changes
    tune        train_unet.py tune
    iou         float32 against bfloat16 on each of --iou-data
float32 is what torch does unasked, TF32 in convolutions; in part iou it is without TF32. Whatever does
not fit into --minutes is stopped or skipped, and says so; the JSON file is written after each part.
All parts take longer than nine minutes; these fit: `--parts speed host limit`, `--parts memory largest
oom overflow`, `--parts tune` (its compiling alone may take six) and `--parts iou`, which needs --seeds 1
for two sets.
(Seen on an H100 in a virtual machine: each process takes 15 to 20 s before its first step, a
compiled one 70 to 95 s more.)
"""
import argparse
import contextlib
import functools
import gc
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from tqdm import tqdm

from common import (ROOT, base_parser, default_data, describe_machine, exit_with,
                    median_and_spread, print_table, save_json, whole_number)
from plain import OurData, Ours, Plain, read_batches, train_unet
from processes import ask_subprocess, run_within

HERE = Path(__file__).resolve().parent


TIME_IS_UP = 'stopped: the time is up'
FAULTS = []                                                            # of the part that runs now


def run_script(script, *words, left):
    """Another benchmark of this folder, within the seconds left -> its results so far; FAULTS tells what is missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'results.json'
        command = [sys.executable, str(HERE / script), *map(str, words), f'--out={path}']
        try:
            done = run_within(command, left, stderr=subprocess.PIPE)
            if done.returncode:
                FAULTS.append(f'failed: {Path(script).name}: {last_line(done.stderr)}')
        except subprocess.TimeoutExpired:
            FAULTS.append(TIME_IS_UP)
        return json.loads(path.read_text())['results'] if path.exists() else 'no results'


def last_line(text):
    """The end of what a program said before it failed."""
    return (text or '').strip().rpartition('\n')[2] or 'failed without a word'


def common_words(args, data=None):
    """What the other benchmarks are told alike."""
    return ['--data', data or args.data, '--device', args.device, '--encoder', args.encoder]


def measure_limit(args, left):
    """limit.py in both precisions."""
    words = [*common_words(args), '--size', args.size, '--batch', args.batch,
             '--rounds', args.rounds, '--dtype']
    return {dtype: run_script('limit.py', *words, dtype, left=left / 2)
            for dtype in ('float32', *['bfloat16'] * (not args.quick))}


FEW = 4                                                                # batches that part speed goes round in


def loaded(batches):
    """The first few of them, again and again: what is measured then is training alone."""
    return itertools.cycle([*itertools.islice(batches, FEW)])


class Timed:
    """A contender of measure_speed that takes steps one by one."""

    def __init__(self, contender):
        self.contender = contender

    def speed(self, steps):
        """Images per second of some steps, the device waited for, after one more."""
        self.contender.step()
        wait_for_device()
        images, begun = 0, time.perf_counter()
        for _ in range(steps):
            images += self.contender.step()
        wait_for_device()
        return images / (time.perf_counter() - begun)


def wait_for_device():
    """What was sent to a GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Lightning:
    """The plain network, loss and optimizer in Lightning's Trainer; three steps warm it up."""

    def __init__(self, plain, batch):
        import lightning
        self.plain, self.batch, self.lightning = plain, batch, lightning
        self.precision = {'float32': '32-true'}.get(str(plain.dtype)[6:], 'bf16-mixed')

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.network = plain.model

            def training_step(self, batch, _):
                return plain.loss(self.network(batch[0].contiguous(memory_format=plain.layout)), batch[1])

            def configure_optimizers(self):
                return plain.optimizer

        class Clock(lightning.Callback):
            """The time after the third step and after the last."""

            def on_train_batch_end(self, trainer, *_):
                if trainer.global_step in (3, trainer.max_steps):
                    wait_for_device()
                    self.times.append(time.perf_counter())

        self.module, self.clock = Module(), Clock()

    def speed(self, steps):
        """Images per second of some steps after those that warm up."""
        self.clock.times = []
        trainer = self.lightning.Trainer(
            max_steps=steps + 3, precision=self.precision, devices=1, logger=False, benchmark=self.plain.is_tuned,
            accelerator={'cuda': 'gpu'}.get(self.plain.device.type, 'cpu'), callbacks=[self.clock],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(self.module, self.plain.batches)
        begun, done = self.clock.times
        return steps * self.batch / (done - begun)


def settings_of(args, **more):
    """The equal part of all trainings of ours."""
    return {'data': args.data, 'device': args.device, 'encoder': args.encoder,
            'image_size': args.size, 'decoder_channels': [256, 128, 64, 32, 16], **more}


def build_plain(args, dtype, is_tuned=False):
    """The plain loop on the same files, loaded by as many processes as ours; perhaps with what a
    skilled user adds."""
    found = OurData(**settings_of(args, cache_images=False))
    dataset = found.as_paths()
    batches = read_batches(dataset, args.batch, found.config['num_workers'],
                           found.device.type == 'cuda')
    return Plain(loaded(batches), found.device, dataset.num_classes, dtype, is_tuned,
                 encoder_name=args.encoder)


def build_ours(args, preset=None, folds=True, **settings):
    """Ours; `folds`: with decoder blocks that convolve before they enlarge, where that pays."""
    ours = Ours(preset, **settings_of(args, batch_size=args.batch, **settings))
    train_unet.fold_upsampling(ours.state.model, folds)
    ours.windows = loaded(ours.windows)
    train_unet.stop_workers(ours.loader)
    return Timed(ours)


def build_contenders(args):
    """{name: what builds it}: each is built when its first round comes, for the time may not last."""
    dtypes = ['float32'] if args.quick and args.device == 'cpu' else ['float32', 'bfloat16']
    build, partial = {}, functools.partial
    for dtype in dtypes:
        build[f'train_unet, {dtype}'] = partial(build_ours, args, **train_unet.amp_settings(dtype))
        for words, is_tuned in ('', False), (', tuned', True):
            loop = partial(build_plain, args, dtype, is_tuned)
            build[f'plain smp loop, {dtype}{words}'] = lambda loop=loop: Timed(loop())
            if importlib.util.find_spec('lightning'):
                build[f'Lightning, {dtype}{words}'] = lambda loop=loop: Lightning(loop(), args.batch)
    if args.device == 'cuda':                                          # unasked on a CPU only
        build['train_unet, bfloat16, not folded'] = partial(
            build_ours, args, folds=False, **train_unet.amp_settings('bfloat16'))
        build['train_unet, bfloat16, preset fast'] = partial(build_ours, args, 'fast')
        build['train_unet, bfloat16, preset fast, not folded'] = partial(build_ours, args, 'fast', folds=False)
    return build


def measure_speed(args, left):
    """Interleaved rounds without data loading, as many as there is time for."""
    build, contenders, begun = build_contenders(args), {}, time.monotonic()
    speeds = {name: [] for name in build}
    for number in range(args.rounds + 1):
        for name in tqdm(build, desc=f'round {number}'):
            if time.monotonic() - begun > left - 5:
                FAULTS.append(TIME_IS_UP)
                break
            if name not in contenders:
                contenders[name] = build[name]()
            speed = contenders[name].speed(args.steps)
            speeds[name] += [speed] * (number > 0)                     # the first round warms up
    medians = {name: median_and_spread(found) for name, found in speeds.items() if found}
    base = medians.get('plain smp loop, float32', [float('nan')])[0]
    return [{'contender': name, 'images/s': median, '+-': spread, 'rounds': len(speeds[name]),
             'of plain float32': median / base} for name, (median, spread) in medians.items()]


def measure_host(args, left):
    """Where the host takes as long as the step, the GPU waits for Python and for the driver."""
    rows = []
    for dtype in ('float32', 'bfloat16'):
        small = argparse.Namespace(**vars(args) | {'size': args.iou_size, 'batch': 8})
        ours = build_ours(small, **train_unet.amp_settings(dtype)).contender
        ours.step()
        times = []
        with count_waits() as waits:
            for _ in tqdm(range(args.rounds), desc=dtype):
                wait_for_device()
                begun = time.perf_counter()
                for _ in range(args.steps):
                    ours.step()
                started = time.perf_counter()
                wait_for_device()
                times.append((time.perf_counter() - begun, started - begun))
        step, host = (median_and_spread(1000 * seconds / args.steps for seconds in column)
                      for column in zip(*times))
        rows.append({'precision': dtype, 'ms per step': step[0], '+-': step[1], 'ms of the host': host[0],
                     'waits per step': len(waits) / args.steps / args.rounds})
    return rows


@contextlib.contextmanager
def count_waits():
    """Whatever waits for the GPU in here, torch.cuda.synchronize() apart -> the list of its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        found = []
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode('warn')
        try:
            yield found
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode('default')
            found += [one for one in caught if 'called a synchronizing CUDA operation' in str(one.message)]


def measure_memory(args, left):
    """memory.py with every preset."""
    names = ['plain', 'default', 'low_memory'] if args.quick else [
        'plain', 'default', 'fast-eager', 'stable', 'older_gpu', 'best', 'low_memory']
    return run_script('memory.py', *common_words(args), '--size', args.size, '--batch', args.batch,
                      '--rounds', 1, '--contenders', *names, left=left)


def measure_largest(args, left):
    """Powers of two until memory is full."""
    found, begun = [], time.monotonic()

    def repeat(value, size):
        return torch.cat([value[:1]] * size)

    plain = build_plain(args, 'float32')
    images, masks = next(plain.batches)

    def plain_step(size):
        plain.batches = iter([(repeat(images, size), repeat(masks, size))])
        plain.step()

    def our_step(ours, size):
        batch = {key: repeat(ours.first[key], size) for key in ('image', 'mask')}
        ours.state.batch_size = size
        ours.state.scaler = train_unet.build_scaler(ours.state.dtype, ours.config, ours.state.device)
        train_unet.train_step(ours.state, [batch], ours.loss_fn, ours.config)
        ours.state.optimizer.step()                                    # its states take memory too

    steps = {'plain smp loop, float32': plain_step}
    for preset in (None, 'low_memory'):
        ours = Ours(preset, **settings_of(args))
        ours.first = next(ours.windows)[0]
        steps[f'train_unet, {preset or "default"}'] = lambda size, ours=ours: our_step(ours, size)
    for name, step in tqdm(steps.items(), desc='contenders'):
        largest, end = 0, 'nothing larger was tried'
        for size in (2 ** n for n in range(1, 13)):
            end = 'the time' if time.monotonic() - begun > left else what_stops(step, size)
            if end:
                break
            largest = size
        if end == 'the time':
            FAULTS.append(TIME_IS_UP)
        found.append({'contender': name, 'largest batch': largest, 'the next was ended by': end})
    return found


def what_stops(step, size):
    """'' if a step with so many images runs, else why not; frees the memory in either case."""
    try:
        step(size)
        why = ''
    except RuntimeError as error:                                      # or an index of 32 bits
        why = 'memory' if train_unet.is_out_of_memory(error) else str(error).splitlines()[0][:80]
    free_cache()
    return why


def free_cache():
    """Give back what the GPU's cache keeps; after an error in a kernel every call raises that again."""
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def summary(result):
    """What a training came to, with every healing."""
    epochs = [row for row in result.history if not row['event']]
    return {'events': '; '.join(row['event'] for row in result.history if row['event']),
            'final loss': epochs[-1]['train_loss'], 'best IoU': result.best.get('iou'),
            'precision at the end': epochs[-1]['precision'],
            'batch at the end': epochs[-1]['batch_size']}


def heal_oom(args):
    """The same training with enough memory and with two thirds of what it took."""
    how = settings_of(args, data='demo', num_epochs=2, batch_size=args.batch, num_workers=0)
    rows = [{'training': 'enough memory', **summary(train_unet.train(**how))}]
    total = torch.cuda.get_device_properties(0).total_memory
    share = 2 / 3 * torch.cuda.max_memory_allocated() / total
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share)
    rows.append({'training': f'{share:.1%} of the memory', **summary(train_unet.train(**how))})
    if not rows[-1]['events']:
        raise RuntimeError('memory sufficed all the same: nothing was healed')
    return rows


def heal_overflow(args):
    """The same network, one convolution scaled by 1e5 before its norm, in float32 and float16."""
    rows = []
    for dtype in ('float32', 'float16'):
        how = settings_of(args, data='demo', num_epochs=2, batch_size=args.batch, num_workers=0,
                          **train_unet.amp_settings(dtype))
        model = train_unet.build_model(OurData(**how).config)
        conv = next(m for m in model.network.decoder.modules() if isinstance(m, torch.nn.Conv2d))
        conv.register_forward_hook(lambda module, inputs, output: output * 1e5)
        rows.append({'training': dtype, **summary(train_unet.train(model=model, **how))})
    return rows


def heal(name, args, left):
    """heal_oom or heal_overflow in a process of its own."""
    words = [f'--{key}={getattr(args, key)}' for key in ('device', 'encoder', 'size', 'batch')]
    with tempfile.TemporaryDirectory() as folder:
        return ask_subprocess(__file__, name, *words, cwd=folder, timeout=left)


def run_tune(args, left):
    """The program's own tune -> its lines, as far as it came."""
    words = [f'{key}={value}' for key, value in settings_of(args).items()]
    command = [sys.executable, '-u', str(ROOT / 'train_unet.py'), 'tune', *words]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'tune.txt'
        with open(path, 'w') as file:
            try:
                done = run_within(command, left, stdout=file, stderr=subprocess.PIPE, cwd=folder)
                if done.returncode:
                    FAULTS.append(f'failed: tune: {last_line(done.stderr)}')
            except subprocess.TimeoutExpired:
                FAULTS.append(TIME_IS_UP)
        print(path.read_text())
        return path.read_text().splitlines()


def measure_iou(args, left):
    """precision_iou.py on each set, the time shared."""
    words = ['--decoder', 'auto', '--size', args.iou_size, '--epochs', args.epochs,
             '--seeds', args.seeds, '--precisions', 'float32', *['bfloat16'] * (not args.quick)]
    found = {}
    for data in args.iou_data:
        found[Path(data).name] = run_script('precision_iou.py', *common_words(args, data), *words,
                                            left=left / len(args.iou_data))
    return found


PARTS = {'speed': measure_speed, 'host': measure_host, 'memory': measure_memory, 'limit': measure_limit,
         'largest': measure_largest, 'oom': lambda args, left: heal('oom', args, left),
         'overflow': lambda args, left: heal('overflow', args, left),
         'tune': run_tune, 'iou': measure_iou}
NEEDS_GPU = {'largest', 'oom'}


def parse_args():
    """The options; --quick makes everything small."""
    parser, sets = base_parser(__doc__, rounds=5), ('nuclei_dsb2018', 'camvid')
    option = parser.add_argument
    option('--iou-data', nargs='+', default=[default_data(name) for name in sets],
           help='folders for part iou')
    option('--encoder', default='resnet34')
    option('--size', type=whole_number, default=512, help='side of the images (512)')
    option('--batch', type=whole_number, default=16, help='images per step (16)')
    option('--steps', type=whole_number, default=20, help='steps of a round in part speed (20)')
    option('--epochs', type=whole_number, default=15, help='in part iou (15)')
    option('--iou-size', type=whole_number, default=256, help='side of the images in part iou (256)')
    option('--minutes', type=float, default=9, help='time for all parts (9)')
    option('--parts', nargs='+', choices=PARTS, default=list(PARTS))
    option('--quick', action='store_true', help='everything in small')
    option('--measure', choices=['oom', 'overflow'], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == 'auto':
        args.device = train_unet.choose_device('auto').type
    if args.quick:
        vars(args).update(encoder='resnet18', size=64, iou_size=64, batch=4, steps=2, rounds=1,
                          epochs=1, seeds=1)
    full = lambda data: data if data == 'demo' else os.path.abspath(data)
    args.data, args.iou_data = full(args.data), list(map(full, args.iou_data))
    return args


def main():
    args = parse_args()
    if args.measure:
        print(json.dumps({'oom': heal_oom, 'overflow': heal_overflow}[args.measure](args)))
        return
    end, results = time.monotonic() + 60 * args.minutes, {'settings': vars(args)}
    states = []
    for name in tqdm(args.parts, desc='parts'):
        begun = time.monotonic()
        state = run_part(name, args, end - begun, results)
        states.append({'part': name, 'state': state, 'seconds': time.monotonic() - begun})
        path = save_json('gpu', {**results, 'parts': states}, args.out, n=args.rounds, seed=0)
    for name in args.parts:
        rows = results.get(name)
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            print_table(name, rows)
    print_table('Parts', states)
    print(f'\n{describe_machine()}\n{path}')
    return int(any(part['state'].startswith('failed') for part in states))


def run_part(name, args, left, results):
    """One part into results -> how it went. A part that fails must not cost the others."""
    if name in NEEDS_GPU and args.device == 'cpu':
        return 'skipped: has no meaning on a CPU'
    if left < 15:
        return 'skipped: the time is up'
    print(f'\n=== {name}, {left:.0f} s left', flush=True)
    FAULTS.clear()
    try:
        results[name] = PARTS[name](args, left)
    except subprocess.TimeoutExpired:
        return TIME_IS_UP
    except (Exception, SystemExit) as error:
        results[name] = f'{type(error).__name__}: {error}'
        return f'failed: {str(error).splitlines()[-1][:60] if str(error) else type(error).__name__}'
    finally:
        gc.collect()                                                   # contenders hold themselves, and the GPU
        free_cache()
    return min(FAULTS, default='done')[:90]                            # what failed is told before what was stopped


if __name__ == '__main__':
    exit_with(main)
