"""Shared by the benchmarks: what machine this is, medians, tables, JSON, common options.

Importing it puts the project root on sys.path, so that `import train_unet` works from anywhere.
"""
import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
from pathlib import Path

os.environ['NO_ALBUMENTATIONS_UPDATE'] = '1'       # importing albumentations would ask a server
os.environ.setdefault('HF_HUB_OFFLINE', '1')
CGROUP = Path('/sys/fs/cgroup')
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

STARTED = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')     # in names of files, so that none erases an earlier one
PACKAGES = ('torch', 'segmentation-models-pytorch', 'timm', 'numpy', 'albumentations', 'lightning',
            'fastai', 'monai', 'pytorch-ignite', 'accelerate')


def default_data(name=''):
    """The real sets beside the checkout, or one of them; 'demo' where they are missing."""
    path = ROOT.parent / 'shared' / 'data' / name
    return str(path) if path.is_dir() else 'demo'


def base_parser(doc, rounds=5, seeds=3, data=None):
    """Options of every benchmark; `doc` is the docstring of the script. None leaves one out, data=False too."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    option = parser.add_argument
    if data is not False:
        option('--data', type=data_folder, default=data or default_data('nuclei_dsb2018'),
               help='folder, or demo')
    if rounds is not None:
        option('--rounds', type=whole_number, default=rounds, help=f'interleaved rounds ({rounds})')
    if seeds is not None:
        option('--seeds', type=whole_number, default=seeds, help=f'number of seeds: 0, 1, ... ({seeds})')
    option('--device', default='auto', help='cpu, cuda, mps; auto: the best that is there')
    option('--out', type=json_file, help='JSON file to write (runs/benchmarks/NAME-DATE-TIME.json)')
    return parser


def whole_number(text, least=1):
    """An option that counts something: a whole number above 0, or from 0 on."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f'{text}: must be a whole number above {least - 1}')
    return int(text)


def data_folder(text):
    """An option that names a folder that is there, or demo."""
    if text != 'demo' and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f'{text}: there is no such folder')
    return text


def lacks(folder):
    """'' or what a folder with images/{train,val} and masks/{train,val} lacks."""
    missing = [f'{kind}/{split}' for kind in ('images', 'masks') for split in ('train', 'val')
               if not (Path(folder) / kind / split).is_dir()]
    return f'{folder} has no {", ".join(missing)}' if missing else ''


def json_file(text):
    """An option that names a file to write: refused before anything is measured if that cannot be."""
    path = Path(text).absolute()
    there = next(folder for folder in path.parents if folder.exists())
    if path.is_dir() or not (there.is_dir() and os.access(there, os.W_OK)):
        raise argparse.ArgumentTypeError(f'{text}: no file can be written there')
    return text


def exit_with(main):
    """main() of a script, whose exit code it gives. Ctrl-C and what train_unet refuses end in one line."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print('\nstopped; a JSON file that was written before is whole', file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        refused = getattr(sys.modules.get('train_unet'), 'UserError', ())
        if not isinstance(error, refused):
            raise
        sys.exit(str(error))


def describe_hardware():
    """CPU, cores, vector units, threads of torch, GPU -> dict."""
    import torch
    source = Path('/proc/cpuinfo')
    lines = source.read_text().splitlines() if source.exists() else []
    models = [line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')]
    flags = {word for line in lines if line.startswith('flags') for word in line.split()}
    units = ('avx2', 'avx512f', 'avx512_bf16', 'amx_bf16')
    return {'cpu': models[0] if models else platform.processor() or platform.machine(),
            'cores': count_cores(), 'simd': [name for name in units if name in flags],
            'torch_threads': torch.get_num_threads(), 'system': platform.system(),
            'gpu': torch.cuda.get_device_name() if torch.cuda.is_available() else None}


def count_cores():
    """Cores this process may use, and its container keep busy. (num_cores() of train_unet, whose import would change
    how a peer's workers start.)"""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    for names in ['cpu.max'], ['cpu/cpu.cfs_quota_us', 'cpu/cpu.cfs_period_us']:
        with contextlib.suppress(OSError, ValueError):
            quota, period = map(int, ' '.join((CGROUP / name).read_text() for name in names).split())
            cores = min(cores, quota // period) if quota > 0 else cores
    return max(1, cores)


def count_workers():
    """Processes that read for a peer: one for each core, at most as many as train_unet starts."""
    return min(8, count_cores())


def hash_program():
    """Which train_unet.py this is."""
    return hashlib.sha256((ROOT / 'train_unet.py').read_bytes()).hexdigest()[:12]


def describe_versions():
    """Python and the packages that are installed -> dict."""
    versions = {'python': platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return versions


def describe_machine():
    """One line for the end of a table."""
    machine, versions = describe_hardware(), describe_versions()
    return ', '.join([machine['gpu'] or machine['cpu'], f"{machine['cores']} cores",
                      *machine['simd'], f"{machine['torch_threads']} threads",
                      *(f'{name} {version}' for name, version in versions.items())])


def median_and_spread(values):
    """(median, half the distance between the quartiles), which is nan of less than two values."""
    values = sorted(float(value) for value in values)
    if len(values) < 2:
        return (values or [float('nan')])[0], float('nan')             # of one nobody knows the spread
    low, middle, high = statistics.quantiles(values, n=4, method='inclusive')
    return middle, (high - low) / 2


def print_table(title, rows):
    """rows: list of dicts with the same keys -> an aligned table that is valid Markdown."""
    print(f'\n{title}\n')
    if not rows:
        print('(nothing measured)')
        return
    cells = [list(rows[0])] + [[show(value) for value in row.values()] for row in rows]
    first, *rest = [max(map(len, column)) for column in zip(*cells)]
    for number, (name, *values) in enumerate(cells):
        print('| ' + ' | '.join([name.ljust(first), *map(str.rjust, values, rest)]) + ' |')
        if number == 0:
            print('|' + '|'.join(['-' * (first + 2), *('-' * (w + 1) + ':' for w in rest)]) + '|')


def show(value):
    """Numbers with three or four digits; None and NaN as a dash."""
    if value is None or value != value:
        return '-'
    if not isinstance(value, float):
        return str(value)
    return f'{value:.{0 if abs(value) >= 1000 else 1 if abs(value) >= 10 else 3}f}'


def json_path(name, out=None):
    """Where the results of benchmark `name` go."""
    return Path(out or Path('runs') / 'benchmarks' / f'{name}-{STARTED}.json')


def without_nan(value):
    """None for what was not measured: JSON knows no NaN."""
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [*map(without_nan, value)]
    return None if value != value else value


def save_json(name, results, out=None, n=None, seed=None):
    """Results with all that is needed to read them; written whole or not at all -> the path."""
    path = json_path(name, out)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {'benchmark': name, 'command': shlex.join(sys.argv), 'n': n, 'seed': seed,
              'train_unet.py': hash_program(),
              'date': datetime.datetime.now().isoformat(timespec='seconds'),
              'hardware': describe_hardware(), 'versions': describe_versions(), 'results': results}
    partial = path.with_suffix('.partial')
    partial.write_text(json.dumps(without_nan(record), indent=1, default=str) + '\n', encoding='utf-8')
    os.replace(partial, path)
    return path
