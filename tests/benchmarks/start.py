"""Seconds from Enter to an answer: `--help`, a refused setting, the first training step.

    python tests/benchmarks/start.py --data demo

Beside them: Python alone, and Python importing the same libraries. Contenders take turns. The first
step is read off the program's own progress bar, in a terminal of its own; the program is then
killed. Data are scanned anew each time (`first step`) and found in the cache (`again`).
"""
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time

from common import (ROOT, base_parser, describe_machine, exit_with, median_and_spread, print_table,
                    save_json)
from tqdm import tqdm

TRAIN = [sys.executable, str(ROOT / 'train_unet.py')]
LIBRARIES = 'import torch, segmentation_models_pytorch, albumentations, cv2, PIL.Image, tqdm.auto'
FIRST_STEP = re.compile(rb'\[train\]:? [1-9]\d*/\d+')


def time_command(command, expected, folder):
    """Seconds until a command has ended with the expected exit code."""
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    seconds = time.perf_counter() - begun
    if done.returncode != expected:
        raise SystemExit(f'{command} ended with {done.returncode}:\n{done.stderr[-2000:]}')
    return seconds


def time_first_step(settings, folder, most=600):
    """Seconds until the bar of the first epoch counts a step."""
    parent, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack('HHHH', 40, 120, 0, 0))   # room for a bar
    begun, seen = time.perf_counter(), b''
    with subprocess.Popen([*TRAIN, *settings], stdin=terminal, stdout=terminal, stderr=terminal,
                          cwd=folder) as process:
        os.close(terminal)
        try:
            with contextlib.suppress(OSError):                         # the terminal closes with it
                while not FIRST_STEP.search(seen) and time.perf_counter() - begun < most:
                    if select.select([parent], [], [], 1)[0]:
                        seen += os.read(parent, 65536)
            seconds = time.perf_counter() - begun
        finally:
            process.send_signal(signal.SIGKILL)
            os.close(parent)
    if not FIRST_STEP.search(seen):
        raise SystemExit(f'no training step was seen:\n{seen.decode(errors="replace")[-2000:]}')
    return seconds


def main():
    parser = base_parser(__doc__, rounds=7, seeds=None)
    parser.add_argument('settings', nargs='*', help='more settings of the training: key=value')
    args = parser.parse_args()
    data = args.data if args.data == 'demo' else os.path.abspath(args.data)
    settings = [f'data={data}', f'device={args.device}', *args.settings]
    cases = {
        'python -c pass': lambda: time_command([sys.executable, '-c', 'pass'], 0, folder),
        'python, importing the libraries':
            lambda: time_command([sys.executable, '-c', LIBRARIES], 0, folder),
        'train_unet.py --help': lambda: time_command([*TRAIN, '--help'], 0, folder),
        'train_unet.py batchsize=4 (refused)':
            lambda: time_command([*TRAIN, 'batchsize=4'], 2, folder),
        'train_unet.py, first step': lambda: time_first_step(settings, folder),
        'train_unet.py, first step again': lambda: time_first_step(settings, folder),
    }
    times = {name: [] for name in cases}
    with tqdm(total=len(cases) * args.rounds, desc='starts') as bar:
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                os.environ['XDG_CACHE_HOME'] = os.path.join(folder, 'cache')
                for name, measure in cases.items():
                    bar.set_postfix_str(name)
                    times[name].append(measure())
                    bar.update()
            path = save_json('start', {'settings': vars(args), 'seconds': times}, args.out, n=args.rounds)
    medians = {name: median_and_spread(seconds) for name, seconds in times.items()}
    libraries = medians['python, importing the libraries'][0]
    print_table(f'Seconds from Enter ({" ".join(settings)}), medians of {args.rounds}', [
        {'what': name, 'seconds': median, '+-': spread, 'of the imports': median / libraries,
         'beyond them': median - libraries} for name, (median, spread) in medians.items()])
    print(f'\n{describe_machine()}\n{path}')


if __name__ == '__main__':
    exit_with(main)
