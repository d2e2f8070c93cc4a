"""The benchmarks still run: from their options to their table and JSON file, in small, and with no clock that decides.

Run: python -m pytest tests/test_benchmarks.py
"""
import contextlib
import importlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
import warnings

import numpy as np
import PIL.Image
import pytest
import torch
from torch import nn

import train_unet
from conftest import FORKS, ROOT, TINY, draw_set, run_script
from helpers import WORDS, lives

sys.path.insert(0, str(ROOT / 'tests' / 'benchmarks'))
import common  # noqa: E402
import gpu  # noqa: E402
import images_per_second  # noqa: E402
import large_image  # noqa: E402
import limit  # noqa: E402
import memory  # noqa: E402
import peers  # noqa: E402
import plain  # noqa: E402
import precision_iou  # noqa: E402
import processes  # noqa: E402
import scale  # noqa: E402
import start  # noqa: E402
import time_to_iou  # noqa: E402

pytestmark = pytest.mark.usefixtures('one_thread')


def words_of(**options):
    return [f'--{key}={value}' for key, value in options.items()]


def numbers(value):
    """All numbers in a nest of lists and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def row_of(first, printed):
    """The cells of the row of a table that begins with a word."""
    return re.split(r' +\| +', re.search(rf'^\| ({first} .*) \|$', printed, re.MULTILINE)[1])


@pytest.fixture
def results(monkeypatch, capsys, tmp_path):
    """Runs main() of a benchmark -> (results of its JSON file, what it printed); every number must be one."""
    def run(module, *words):
        path = tmp_path / 'found.json'
        monkeypatch.setattr(sys, 'argv', [module.__name__, *map(str, words), f'--out={path}'])
        assert not module.main()
        record, printed = json.loads(path.read_text()), capsys.readouterr().out
        assert {'benchmark', 'command', 'hardware', 'versions', 'results'} <= set(record)
        assert 'torch' in record['versions']
        assert all(number == number and abs(number) < float('inf') for number in numbers(record['results']))
        assert '\n|' in printed and not re.search(r'\bnan\b', printed.lower())
        return record['results'], printed
    return run


@pytest.fixture
def asked_here(monkeypatch):
    """Whoever asks a process of its own (`--measure`) is answered by this one: its words, its JSON, no five seconds."""
    def ask(module):
        def answer(script, *words, env=None, cwd=None, timeout=None):
            out = io.StringIO()
            with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
                patch.setattr(sys, 'argv', [str(script), '--measure', *map(str, words)])
                patch.chdir(cwd or os.getcwd())
                for key, value in (env or {}).items():
                    patch.setenv(key, value)
                module.main()
            return json.loads(out.getvalue().strip().splitlines()[-1])
        monkeypatch.setattr(module, 'ask_subprocess', answer)
    return ask


def run_here(forks_words, folder, environment=None):
    """The program in a forked process that has imported everything -> exit code."""
    process = FORKS.Process(target=run_script, args=(forks_words, str(folder / 'said.txt'), environment or {}, ''))
    process.start()
    process.join(60)
    return process.exitcode


@pytest.fixture
def quick_runs(forks, monkeypatch, tmp_path):
    """subprocess.run of the program, also below torchrun (as one process), without its imports."""
    def run(command, cwd=None, env=None, **_):
        words = command[1 + next(i for i, word in enumerate(command) if str(word).endswith('train_unet.py')):]
        code = run_here([str(word) for word in words], tmp_path)
        return subprocess.CompletedProcess(command, code, '', (tmp_path / 'said.txt').read_text())
    monkeypatch.setattr(subprocess, 'run', run)


# --- what they share ------------------------------------------------------------------


@pytest.mark.parametrize('script', sorted(p.name for p in (ROOT / 'tests' / 'benchmarks').glob('*.py')
                                          if 'base_parser(' in p.read_text() and p.name != 'common.py'))
def test_each_script_has_help(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, 'argv', [script, '--help'])
    module = __import__(script[:-3])
    with pytest.raises(SystemExit) as done:
        getattr(module, 'parse_args', module.main)()
    assert done.value.code == 0 and '--out' in capsys.readouterr().out


@pytest.mark.parametrize('script, words, told', [
    ('memory', ['--data=nowhere'], 'nowhere: there is no such folder'),
    ('memory', ['--batch=6', '--contenders', 'low_memory'], 'low_memory takes a batch in 4 passes'),
    ('scale', ['--workers=-1'], '-1: must be a whole number above -1'),
    ('limit', ['--rounds=0'], '0: must be a whole number above 0'),
    ('precision_iou', ['--seeds=-1'], '-1: must be a whole number above 0'),
    ('start', ['--out=.'], 'no file can be written there'),
    ('images_per_second', ['--steps=1'], 'one step has no rate'),
    ('images_per_second', ['--contenders', 'fastai', '--precision=bfloat16', '--device=cpu'], 'nothing is left'),
    ('images_per_second', ['--contenders', 'plain', '--data=.'], '. has no images/train, images/val, masks/train, '),
    ('time_to_iou', ['--size=1x2x3'], 'type pixels, as 128 or 96x128'),
    ('time_to_iou', ['--budget=0'], 'must be above 0'),
    ('time_to_iou', ['--budget=nan'], 'must be above 0, and finite'),
    ('time_to_iou', ['--limit=inf'], 'must be above 0, and finite'),
    ('time_to_iou', ['--data=.'], 'none of the --sets is in there')])
def test_what_cannot_be_measured_is_refused_before_anything_is(script, words, told, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, 'argv', [script, *words])
    with pytest.raises(SystemExit) as done:
        common.exit_with(__import__(script).main)
    assert told in capsys.readouterr().err + str(done.value.code) and done.value.code not in (0, None)
    written = [path for path in tmp_path.rglob('*') if path.is_file()]
    assert {path.parent for path in written} <= {tmp_path / 'cache/matplotlib'}        # its list of fonts, if it is new


def test_images_per_second_takes_two_classes(split_set, monkeypatch):
    """The peers' masks are what lies above 127: class numbers would all be background."""
    path = min(split_set.glob('masks/train/*'))
    PIL.Image.new('L', (32, 32), 3).save(path)
    monkeypatch.setattr(sys, 'argv', ['images_per_second', '--contenders', 'plain', f'--data={split_set}', '--steps=2',
                                      '--batch=2'])
    with pytest.raises(SystemExit, match=r'holds \[3\]; all contenders learn two classes'):
        images_per_second.main()


@pytest.mark.parametrize('error, code', [(KeyboardInterrupt(), 130), (gpu.train_unet.UserError('no such thing'),
                                                                      'cannot start:\n  no such thing')])
def test_a_benchmark_ends_without_a_traceback(error, code):
    def main():
        raise error

    with pytest.raises(SystemExit) as done:
        common.exit_with(main)
    assert done.value.code == code


@pytest.mark.parametrize('device, frugal', [('cpu', ['--frugal']), ('cpu', []), ('cuda', ['--frugal'])])
def test_frugal_peers_keep_memory_and_read_alone_on_a_cpu(split_set, tmp_path, monkeypatch, device, frugal):
    seen = {}
    def ask(_, words, env, **__):
        job = peers.Job(**json.loads(words))
        seen[job.variant] = (images_per_second.KEEP_MEMORY.items() <= env.items(), peers.build_loader(job).num_workers)
        return []

    monkeypatch.setattr(common, 'count_cores', lambda: 2)
    monkeypatch.setattr(images_per_second, 'ask_subprocess', ask)
    words = ['--contenders', 'plain', '--encoders', 'y', '--steps=2', '--batch=2', '--rounds=1', *frugal]
    paths = [f'--data={split_set}', f'--out={tmp_path / "x.json"}']
    monkeypatch.setattr(sys, 'argv', ['x', *words, *paths, f'--device={device}'])
    images_per_second.main()
    assert seen == {'documented': (False, 2), 'tuned': (True, 0) if frugal and device == 'cpu' else (False, 2)}


@pytest.mark.parametrize('frugal', [False, True])
def test_frugal_reaches_the_loader_of_fastai(split_set, frugal, monkeypatch):
    vision, seen = pytest.importorskip('fastai.vision.all'), []
    monkeypatch.setattr(common, 'count_cores', lambda: 1)

    class Learner(vision.Learner):
        def fit_one_cycle(self, *_):
            seen.append(self.dls.train.fake_l.num_workers)

    monkeypatch.setattr(vision, 'Learner', Learner)
    peers.fastai(peers.Job('fastai', 'tuned', 'tu-test_resnet', str(split_set), 32, 4, 2, 'cpu', 0, frugal=frugal))
    assert (seen == [0]) == frugal


def test_a_contender_that_fails_is_no_success(split_set, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(images_per_second, 'measure', lambda *_: [])
    words = [f'--data={split_set}', '--contenders', 'plain', '--steps=2', '--batch=2', '--rounds=1', '--device=cpu']
    monkeypatch.setattr(sys, 'argv', ['images_per_second.py', *words, f'--out={tmp_path / "x.json"}'])
    assert images_per_second.main() == 1 and '| plain, tuned ' in capsys.readouterr().out


@pytest.mark.parametrize('contenders', [['ours'], ['ours', 'plain'], ['ours', 'plain', 'monai']])
def test_each_round_begins_with_another_contender(split_set, tmp_path, monkeypatch, contenders):
    first = {}
    monkeypatch.setattr(images_per_second, 'measure', lambda job, _: first.setdefault(job.seed, job) and [])
    monkeypatch.setattr(images_per_second, 'is_installed', lambda *_: True)
    words = ['--steps=2', '--batch=2', '--rounds=3', '--encoders=y', '--device=cpu', f'--data={split_set}']
    monkeypatch.setattr(sys, 'argv', ['x', *words, f'--out={tmp_path / "x.json"}', '--contenders', *contenders])
    images_per_second.main()
    assert len({(job.contender, job.variant) for job in first.values()}) == min(3, 2 * len(contenders) - 2 or 3)


def test_a_result_erases_no_other():
    assert re.fullmatch(r'runs/benchmarks/x-\d{8}-\d{6}\.json', common.json_path('x').as_posix())
    assert common.json_path('x', 'here.json').name == 'here.json'


def test_json_is_whole_and_says_where_it_comes_from(tmp_path):
    path = common.save_json('x', {'a': float('1.5')}, tmp_path / 'deep' / 'x.json', n=1)
    record = json.loads(path.read_text())
    assert record['hardware']['cores'] >= 1 and record['hardware']['torch_threads'] == torch.get_num_threads()
    assert record['results'] == {'a': 1.5} and not list(path.parent.glob('*.partial'))


def test_medians_and_spreads():
    assert common.median_and_spread([1, 2, 3, 4, 5]) == (3, 1)
    assert [common.show(value) for value in common.median_and_spread([7])] == ['7.000', '-']
    assert [common.show(value) for value in (None, float('nan'), 0.12345, 12.34, 1236.2, 7)] == \
        ['-', '-', '0.123', '12.3', '1236', '7']


def test_a_process_is_watched():
    code = 'x = b"1" * 2**26; import time; time.sleep(1)'
    seconds, peak, code = processes.run_watched([sys.executable, '-c', code])
    assert 1 < seconds < 20 and 2**26 < peak < 2**27 and code == 0
    assert processes.peak_resident() >= processes.resident() > 2**26 and processes.proportional() > 2**26


def test_what_runs_too_long_ends_with_all_that_it_started(tmp_path):
    """Also where that runs something within a time of its own, in a session of its own."""
    inner = f"import os, time; open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(60)"
    middle = f"import sys; sys.path.insert(0, '{ROOT}/tests/benchmarks'); import processes; " \
             f"processes.run_within([sys.executable, '-c', {inner!r}])"
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run_within([sys.executable, '-c', middle], timeout=6)
    pid, end = int((tmp_path / 'pid').read_text()), time.monotonic() + 10
    while lives(pid):
        assert time.monotonic() < end, 'it lives on'
        time.sleep(0.05)


# --- images per second ----------------------------------------------------------------


@pytest.fixture
def split_set(small_set):
    """images/{train,val}: eight and four."""
    for kind in ('images', 'masks'):
        for number, path in enumerate(sorted((small_set / kind).iterdir())):
            target = small_set / kind / ('train' if number < 8 else 'val') / path.name
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
    return small_set


def test_images_per_second(split_set, results, asked_here, monkeypatch):
    """The rounds, the worker's words, the table: with both contenders that need no package."""
    asked_here(images_per_second)
    monkeypatch.setattr(common, 'count_cores', lambda: 1)              # worker
    found, printed = results(images_per_second, f'--data={split_set}', '--contenders', 'ours', 'plain', '--rounds=1',
                             '--steps=4', '--batch=2', '--size=32', '--encoders', 'tu-test_five_convs',
                             '--device=cpu')
    assert len(found['runs']) == 10
    assert all(run['images_per_second'] > 0 and run['parameters'] > 10**5 for run in found['runs'])
    assert '| ours, equal ' in printed and '1.000' in printed and '; 1 of 4 steps timed; ' in printed


def test_the_ratio_is_of_each_round_and_above_1_where_ours_is_faster():
    def runs(contender, variant, *speeds):
        return [{'contender': contender, 'variant': variant, 'loaded': loaded, 'seed': seed,
                 'images_per_second': speed * (1 if loaded else 10)} for seed, speed in enumerate(speeds)
                for loaded in (True, False)]

    records = runs('ours', 'equal', 20, 30, 60) + runs('ours', 'auto', 80, 60, 80) + runs('plain', 'tuned', 10, 30, 20)
    row, = images_per_second.build_rows(records, [('plain', 'tuned')])
    assert list(row.values()) == ['plain, tuned', 20, 5, 2, 0.5, 4, 200, 50, 2, 0.5, 4]


def test_the_middle_of_the_last_epoch_is_timed(monkeypatch):
    """Of 8 steps the first and last 2 do not count: three seconds for 3 times 4 images."""
    clock = itertools.accumulate([100] * 11 + [1, 1, 1] + [100] * 2)

    def train(job):
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(5))])
        for _ in range(16):
            optimizer.step()

    monkeypatch.setattr(images_per_second, 'AHEAD', 2)
    monkeypatch.setattr(time, 'perf_counter', lambda: next(clock))
    job = types.SimpleNamespace(contender='x', device='cpu', tuned=False, steps=8, batch=4)
    found = images_per_second.time_steps(job, types.SimpleNamespace(CONTENDERS={'x': train}, EPOCHS=2))
    assert found == {'images_per_second': 4, 'parameters': 5}


def test_ours_is_never_much_more_than_half_a_round_away():
    variants = peers.list_variants(images_per_second.NAMES)
    for number in range(5):
        turn = images_per_second.order(variants, number, 5)
        ours = [place for place, (name, _) in enumerate(turn) if name == 'ours']
        assert sorted(turn) == sorted(variants) and ours == [5, 6, 7] and len(turn) == 13


def test_networks_that_differ_are_told_after_the_first_two(split_set, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(images_per_second, 'measure', lambda job, _: asked.append(job) or [
        {'parameters': len(asked), 'encoder': job.encoder}])
    words = ['--steps=2', '--batch=2', '--encoders=y', '--device=cpu', f'--data={split_set}', '--contenders', 'plain']
    monkeypatch.setattr(sys, 'argv', ['x', *words, f'--out={tmp_path / "x.json"}'])
    with pytest.raises(SystemExit, match='the networks differ'):
        images_per_second.main()
    assert len(asked) == 2


@pytest.mark.parametrize('files', [{'cpu.max': '350000 100000'}, {
    'cpu/cpu.cfs_quota_us': '300000', 'cpu/cpu.cfs_period_us': '100000'}])
def test_peers_may_use_as_many_cores_as_a_container(monkeypatch, tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    threads = []
    assert common.count_cores() == train_unet.num_cores()
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(64), raising=False)
    assert common.count_workers() == 8
    monkeypatch.setattr(common, 'CGROUP', tmp_path)
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 64)
    monkeypatch.setattr(torch, 'set_num_threads', threads.append)
    monkeypatch.setattr(images_per_second, 'time_steps', lambda *_: {})
    job = peers.Job('plain', 'tuned', 'y', '', 32, 4, 2, 'cpu', 0)
    images_per_second.work(job.__dict__)
    assert threads == [3] and common.count_workers() == 3


def test_the_process_of_a_peer_is_without_ours():
    """Importing train_unet registers what runs at each fork, of workers too."""
    code = 'import images_per_second, sys; assert not {"torch", "train_unet"} & {*sys.modules}'
    subprocess.run([sys.executable, '-c', code], check=True, cwd=ROOT / 'tests/benchmarks')
    assert 'import plain' not in (ROOT / 'tests/benchmarks/peers.py').read_text()


@pytest.mark.parametrize('contender', [name for name in peers.CONTENDERS if name not in ('ours', 'plain')])
@pytest.mark.parametrize('variant', ['documented', 'tuned'])
def test_images_per_second_of_a_peer(split_set, contender, variant, monkeypatch):
    for package in peers.NEEDS[contender]:
        pytest.importorskip(package)
    monkeypatch.setattr(common, 'count_cores', lambda: 1)
    job = peers.Job(contender, variant, 'tu-test_resnet', str(split_set), 32, 4, 2, 'cpu', 0)
    assert images_per_second.time_steps(job, peers)['parameters'] > 10**5


@pytest.mark.parametrize('variant, kind', [('documented', 'MetaTensor'), ('tuned', 'Tensor')])
def test_monai_tuned_trains_without_meta_data(split_set, variant, kind, monkeypatch):
    pytest.importorskip('monai')
    seen = set()
    monkeypatch.setattr(common, 'count_cores', lambda: 1)
    monkeypatch.setattr(peers.Network, 'forward', lambda network, images, of=peers.Network.forward: seen.add(
        type(images).__name__) or of(network, images))
    peers.monai(peers.Job('monai', variant, 'tu-test_resnet', str(split_set), 32, 4, 2, 'cpu', 0))
    assert seen == {kind}


@pytest.mark.parametrize('contender', [name for name in peers.CONTENDERS if name not in peers.MIXED_ON_CUDA_ONLY])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_contenders_train_in_the_precision_of_the_job(split_set, contender, dtype, monkeypatch):
    for package in peers.NEEDS.get(contender, []):
        pytest.importorskip(package)
    monkeypatch.setattr(common, 'count_cores', lambda: 1)
    if contender == 'accelerate':                                      # its state is the process's
        importlib.import_module('accelerate.state').AcceleratorState._reset_state(True)
    variant, seen = 'equal' if contender == 'ours' else 'tuned', set()
    job = peers.Job(contender, variant, 'tu-test_five_convs', str(split_set), 32, 4, 2, 'cpu', 0, dtype=dtype)
    watch = nn.modules.module.register_module_forward_hook(
        lambda module, _, made: seen.add(made.dtype) if isinstance(module, nn.Conv2d) and module.training else None)
    try:
        images_per_second.time_steps(job, peers)
    finally:
        watch.remove()
    assert seen == {getattr(torch, dtype)}


def test_peers_whose_mixed_precision_wants_cuda_are_left_out_on_a_cpu(monkeypatch, capsys, tmp_path, split_set):
    monkeypatch.setattr(images_per_second, 'measure', lambda *_: [])
    monkeypatch.setattr(images_per_second, 'is_installed', lambda *_: True)
    words = [f'--data={split_set}', '--steps=2', '--batch=4', '--rounds=1', '--device=cpu', '--precision=bfloat16']
    monkeypatch.setattr(sys, 'argv', ['images_per_second.py', *words, f'--out={tmp_path / "x.json"}'])
    images_per_second.main()
    printed = capsys.readouterr().out
    assert 'skipped: monai, ' in printed and '| fastai' not in printed and '| accelerate, tuned ' in printed


@pytest.mark.parametrize('preset', [None, 'low_memory'])
def test_steps_of_ours_move_the_weights(split_set, preset):
    ours = plain.Ours(preset, data=str(split_set), **TINY)
    before = [p.detach().clone() for p in ours.state.model.parameters()]
    assert sum(ours.step() for _ in range(3)) >= 12                    # over the end of an epoch
    moved = [not torch.equal(a, b) for a, b in zip(before, ours.state.model.parameters())]
    assert sum(moved) > 0.9 * len(moved)


# --- time to an IoU, IoU of each precision --------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """The time of time_to_iou, in seconds, in a list: it stands still until a test moves it."""
    now = [0.0]
    monkeypatch.setattr(time_to_iou, 'time', types.SimpleNamespace(perf_counter=lambda: now[0]))
    return now


@pytest.mark.parametrize('target, budget, seconds', [
    (None, 500, [300, 600]), (0.5, 300, [300]), (0.9, 300, [300, 600])])   # 0.9 is waited for, for two budgets
def test_ours_is_judged_after_each_epoch_off_the_clock_until_its_time_is_up(
        split_set, monkeypatch, clock, target, budget, seconds):
    def judge(model, seconds, epoch):
        assert len(exchanged) % 2                                      # the moving average is judged
        clock[0] += 1000
        return {'seconds': seconds, 'epoch': epoch, 'score': 0.5}

    def close(*rest, of=train_unet.close_epoch):
        of(*rest)
        clock[0] += 300

    exchanged, exchange = [], train_unet.TrainState.exchange
    monkeypatch.setattr(train_unet.TrainState, 'exchange',
                        lambda *given, **how: exchanged.append(1) or exchange(*given, **how))
    monkeypatch.setattr(train_unet, 'close_epoch', close)
    args = types.SimpleNamespace(size=[32, 32], device='cpu', budget=budget, limit=2, epochs=None, ours=[
        *(word for word in WORDS if not word.startswith(('image_size', 'device', 'num_epochs'))), 'num_epochs=3'])
    curve = time_to_iou.train_ours(split_set, {'seed': 0}, args, target, judge)
    assert [(point['epoch'], point['seconds']) for point in curve] == [*enumerate(seconds, 1)]
    assert curve[0]['is_best'] and train_unet.close_epoch is close


@pytest.mark.parametrize('epochs, seconds', [(None, [20, 30]), (3, [20, 40, 60])])
def test_the_clock_of_the_plain_recipe_counts_its_steps_alone(monkeypatch, clock, epochs, seconds):
    """Two steps an epoch, ten seconds each; a budget of 30 ends it in mid-epoch."""
    def judge(model, seconds, epoch):
        clock[0] += 1000
        return epoch, seconds

    class Network(nn.Conv2d):
        def __init__(self, num_classes):
            super().__init__(3, 1, 1)

        def forward(self, images):
            clock[0] += 10
            return super().forward(images.float())

    monkeypatch.setattr(time_to_iou, 'PlainNetwork', Network)
    args = types.SimpleNamespace(budget=30, epochs=epochs)
    pairs = torch.zeros(20, 8, 8, 3, dtype=torch.uint8).numpy(), torch.ones(20, 8, 8, dtype=torch.uint8).numpy()
    curve = time_to_iou.train_plain(pairs, 2, {'seed': 0}, args, torch.device('cpu'), judge)
    assert curve == [*enumerate(seconds, 1)]


def test_the_judge_counts_the_pixels_of_the_whole_set():
    """Against counts by hand: 255 is left out, and so is a class that is predicted but occurs nowhere."""
    class Red(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.classes = classes

        def forward(self, images):
            red = images[:, 0].long()
            return red[:, None] - 0.5 if self.classes == 2 else nn.functional.one_hot(red, 3).movedim(-1, 1)

    def score(classes, predicted, truth):
        images, masks = (torch.tensor(rows, dtype=torch.uint8)[:, None] for rows in (predicted, truth))
        images = images[..., None].repeat(1, 1, 1, 3)
        return time_to_iou.score(Red(classes), (images.numpy(), masks.numpy()), classes, 'cpu', batch=1)

    assert score(2, [[1, 0, 1, 0, 1], [1, 1, 1, 0, 0]], [[1, 1, 0, 0, 255], [1, 1, 1, 0, 0]]) == {
        'foreground': 4 / 6, 'mean_iou': pytest.approx((4 / 6 + 3 / 5) / 2)}
    assert score(3, [[0, 2, 1, 1]], [[0, 0, 1, 1]]) == {'foreground': None, 'mean_iou': (1 / 2 + 1) / 2}


@pytest.mark.parametrize('values, shown, classes', [((0, 255), (0, 1), 2), ((0, 2, 255), (0, 2, 255), 3)])
def test_a_split_is_read_as_the_judge_wants_it(tmp_path, values, shown, classes):
    for kind in ('images', 'masks'):
        (tmp_path / kind / 'train').mkdir(parents=True)
    image = np.zeros((4, 8, 3), np.uint8)
    image[:, ::2, 0] = 200                                             # red stripes, which shrink to their mean
    mask = np.resize(np.repeat(values, 2), (4, 8)).astype(np.uint8)
    PIL.Image.fromarray(image).save(tmp_path / 'images/train/a.png')
    PIL.Image.fromarray(mask).save(tmp_path / 'masks/train/a.png')
    pixels, truth, found = time_to_iou.read_split(tmp_path, 'train', [2, 4])
    assert pixels.tolist() == [[[[100, 0, 0]] * 4] * 2] and found == classes
    assert set(truth.ravel().tolist()) == {*shown} and truth.shape == (1, 2, 4)


def test_after_equal_epochs_both_contenders_are_compared(split_set, tmp_path, monkeypatch, capsys):
    settings = [word for word in WORDS if not word.startswith(('image_size', 'device', 'num_epochs'))]
    monkeypatch.setattr(sys, 'argv', [
        'time_to_iou.py', f'--data={split_set.parent}', '--sets', 'set', '--size', '32', '--epochs', '2', '--seeds',
        '1', '--device', 'cpu', '--out', str(tmp_path / 'out.json'), '--ours', *settings])
    time_to_iou.main()
    runs = time_to_iou.read_runs(tmp_path / 'out.json')
    assert [[point['epoch'] for point in run['curve']] for run in runs] == [[1, 2], [1, 2]]
    assert 'After 2 epochs at 32 x 32' in capsys.readouterr().out


def test_plain_trains_before_ours_has_changed_the_process(split_set, tmp_path, monkeypatch):
    """After train_unet.keep_freed_memory a plain step on a CPU takes two thirds of its time."""
    begun = []
    monkeypatch.setattr(time_to_iou, 'measure', lambda job, *_: begun.append((job['contender'], job['set'])) or [
        {'seconds': 1.0, 'epoch': 1, 'score': 0.5}])
    (tmp_path / 'other').symlink_to(split_set)
    words = ['--sets', 'set', 'other', '--seeds=1', f'--data={tmp_path}', f'--out={tmp_path / "x.json"}']
    monkeypatch.setattr(sys, 'argv', ['time_to_iou.py', *words])
    time_to_iou.main()
    assert begun == [('plain', 'set'), ('plain', 'other'), ('ours', 'set'), ('ours', 'other')]


def test_the_time_of_the_plain_recipe_is_told_from_when_it_was_first_there():
    curve = lambda *points: [{'seconds': seconds, 'score': score} for seconds, score in points]
    runs = [{'set': 'x', 'size': [8, 8], 'budget': 420, 'epochs': None, 'contender': name, 'curve': found}
            for name, found in (('plain', curve((200, 0.49), (300, 0.52), (420, 0.48))),
                                ('ours', curve((130, 0.49), (421, 0.6))))]
    row = time_to_iou.build_rows(runs, 'x', types.SimpleNamespace(size=[8, 8], budget=420, epochs=None))[1]
    assert row['times faster'] == 420 / 130 and row['against that'] == 200 / 130
    assert (row['IoU at the budget'], row['highest'], row['after seconds']) == (0.49, 0.49, 130)
    assert (row['soonest'], row['latest']) == (130, 130)


def test_runs_of_another_program_are_told_where_they_are_continued(split_set, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time_to_iou, 'measure', lambda *_: [{'seconds': 1.0, 'epoch': 1, 'score': 0.5}])
    words = ['--sets=set', '--seeds=1', f'--data={tmp_path}', f'--out={tmp_path / "x.json"}']
    monkeypatch.setattr(sys, 'argv', ['time_to_iou.py', *words])
    time_to_iou.main()
    monkeypatch.setattr(sys, 'argv', ['time_to_iou.py', *words, '--resume'])
    for program, told in (common.hash_program(), False), ('another', True):
        monkeypatch.setattr(time_to_iou, 'hash_program', lambda: program)
        time_to_iou.main()
        assert ('of another program or machine' in capsys.readouterr().out) == told


def test_results_of_something_else_are_no_start_for_time_to_iou(tmp_path):
    for text in ('{"results": []}', '{', '{"results": {}}'):
        (tmp_path / 'x.json').write_text(text)
        with pytest.raises(SystemExit, match='holds no results of this benchmark'):
            time_to_iou.read_runs(tmp_path / 'x.json')


@pytest.mark.usefixtures('quick_runs')
def test_precision_iou(small_set, results):
    found, printed = results(precision_iou, *words_of(data=small_set, decoder='[16,12,8,8,8]', size=32, epochs=1,
                                                      seeds=1, device='cpu', within=2), 'num_workers=0', 'batch_size=4')
    assert 'Equal within' in printed
    for name, runs in found['iou_seconds_precisions'].items():
        assert all(0 <= iou <= 1 and 0 < seconds < 60 and precisions == [name] for iou, seconds, precisions in runs)


@pytest.mark.parametrize('bfloat16, trained, told', [
    ([0.804, 0.794], 'bfloat16', 'Equal within 0.005'), ([0.79, 0.8], 'bfloat16', 'NOT equal within 0.005'),
    ([0.804, 0.794], 'float32',
     "NOT comparable: what was to train in these precisions trained in {'bfloat16': ['float32']}")])
def test_the_verdict_on_precisions_and_what_it_may_be_worth(monkeypatch, capsys, tmp_path, bfloat16, trained, told):
    answers = itertools.cycle([(0.801, 1.0, ['float32']), (bfloat16[0], 1.0, [trained]),
                               (0.799, 1.0, ['float32']), (bfloat16[1], 1.0, [trained])])
    monkeypatch.setattr(precision_iou, 'train', lambda *_: next(answers))
    monkeypatch.setattr(sys, 'argv', ['precision_iou.py', '--seeds=2', f'--out={tmp_path / "x.json"}'])
    code, printed = precision_iou.main(), capsys.readouterr().out
    assert told in printed and code == (told if told.startswith('NOT') else None)
    assert row_of('bfloat16', printed)[-3:-1] == (['-0.0010', '0.0040'] if bfloat16[0] > 0.8 else ['-0.0050', '0.0060'])


# --- the limit of a machine, memory ---------------------------------------------------


@pytest.fixture
def small_shapes(monkeypatch):
    """A tenth of a second for what no network has to do with."""
    monkeypatch.setattr(limit, 'SHAPES', [(8, 8, 16)])
    monkeypatch.setattr(limit.measure_bandwidth, '__defaults__', (2 ** 16,))


@pytest.mark.usefixtures('small_shapes')
def test_limit(small_set, results):
    found, printed = results(limit, *words_of(data=small_set, encoder='tu-test_resnet', size=32, batch=2, rounds=1,
                                              device='cpu', dtype='float32'))
    assert found['flops'] > 10**7 and found['bytes_as_run'] > found['bytes_at_least'] > 10**6
    assert all(value > 0 for key, value in found['profile_ms'].items() if key in ('convolution', *limit.REGIONS))
    assert 0 < found['profile_ms']['Python and other'] < found['profiled_step_ms']    # the rest: no part counts twice


def test_where_a_step_goes_is_looked_for_where_it_is(small_set):
    """named_regions leaves out what it does not find: whoever renames a part would not be told."""
    ours = plain.Ours(data=str(small_set), **TINY)
    with limit.named_regions(ours):
        wrapped = [ours.loss_fn.losses, plain.train_unet.confusion_matrix, plain.train_unet.commit,
                   plain.train_unet.Snapshot, torch.nn.utils.clip_grad_norm_]
        assert all(one.__qualname__.startswith('recorded') for one in wrapped)


def test_bytes_are_counted_as_operators_read_and_write_them():
    def moved(function):
        with limit.ByteCounter() as counter:
            function()
        return counter.bytes / (4 * 1000)

    x, y, weight = torch.ones(1000), torch.ones(1000), torch.nn.Parameter(torch.ones(1000))
    weight.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()                                                   # which makes its states
    assert [moved(lambda: x + y), moved(lambda: x.add_(y)), moved(lambda: x.copy_(y)), moved(x.zero_),
            moved(lambda: x.view(10, 100)), moved(lambda: torch.add(x, y, out=x)),
            moved(lambda: torch._foreach_lerp_([x], [y], 0.5)), moved(lambda: torch._foreach_mul_([x], 2))] \
        == [3, 3, 2, 1, 0, 3, 3, 2]
    assert moved(optimizer.step) == pytest.approx(7, abs=0.1)          # weight and two states both ways, the gradient


def test_memory(small_set, results, asked_here):
    asked_here(memory)
    found, printed = results(memory, *words_of(data=small_set, encoder='tu-test_resnet', size=64, batch=4, steps=1,
                                               rounds=1, device='cpu'),
                             '--contenders', 'plain', 'default', 'low_memory')
    assert list(found['bytes']) == ['plain', 'default', 'low_memory'] and '100%' in printed
    assert all(one['imported'] > 10**7 for ones in found['bytes'].values() for one in ones)


def test_memory_of_plain_is_without_our_allocator_and_of_ours_with_the_images_it_keeps(small_set, monkeypatch, capsys):
    seen, keep = [], train_unet.keep_freed_memory
    monkeypatch.setattr(train_unet, 'keep_freed_memory', lambda: seen.append('kept') or keep())
    monkeypatch.setattr(memory, 'resident', lambda: seen.append('imported') or 1)
    monkeypatch.setattr(plain.Ours, 'step', lambda ours: seen.append(ours.dataset.cache[2].all()))
    args = types.SimpleNamespace(data=str(small_set), encoder='tu-test_resnet', size=64, batch=4, device='cpu', steps=1)
    for name, expected in ('plain', ['imported']), ('default', ['imported', 'kept', True]):
        memory.measure(name, args)
        assert seen == expected
        seen.clear()


def test_the_share_of_plain_memory(monkeypatch, results):
    answers = {'plain': {'peak': 400 * 2**20, 'imported': 100 * 2**20},
               'low_memory': {'peak': 2**28, 'imported': 2**26}}
    monkeypatch.setattr(memory, 'ask_subprocess', lambda _, name, *__: answers[name])
    _, printed = results(memory, '--data=demo', '--rounds=1', '--contenders', 'plain', 'low_memory')
    assert row_of('low_memory', printed)[1:] == ['256.0', '-', '64.0', '192.0', '64%', '64%']


def test_a_batch_larger_than_the_set_is_refused():
    with pytest.raises(SystemExit, match='3 training images make no batch of 4'):
        plain.read_batches([1, 2, 3], 4)


def test_memory_keeps_what_it_has_when_the_time_is_up(monkeypatch, tmp_path):
    """gpu.py gives it what is left of its minutes, and then kills it."""
    answers = iter([{'peak': 2, 'imported': 0}])
    monkeypatch.setattr(memory, 'ask_subprocess', lambda *_: next(answers))
    monkeypatch.setattr(sys, 'argv', ['memory.py', '--data=demo', '--rounds=1', '--contenders', 'plain', 'default',
                                      f'--out={tmp_path / "found.json"}'])
    with pytest.raises(StopIteration):
        memory.main()
    found = json.loads((tmp_path / 'found.json').read_text())['results']['bytes']
    assert found == {'plain': [{'peak': 2, 'imported': 0}], 'default': []}


def test_the_effective_batch_of_a_preset_is_that_of_the_others(tmp_path):
    args = types.SimpleNamespace(data=str(draw_set(tmp_path / 'set', 40)), encoder='tu-test_resnet', size=64, batch=8,
                                 device='cpu')
    assert {memory.build(name, args).step() for name in ('plain', 'default', 'low_memory')} == {8}


# --- scale, start, large images -------------------------------------------------------


def test_scale_of_the_first_batch(results, asked_here):
    asked_here(scale)
    found, _ = results(scale, '--parts=first', '--counts=40', '--batches=1', '--rounds=1', '--workers=1',
                       '--device=cpu')
    assert [row['loader'] for row in found['first']] == ['plain', 'ours, cold', 'ours, warm']
    assert all(row['first batch s'] > 0 and row['each worker MiB'] > 1 for row in found['first'])


def test_scale_of_sizes(results, monkeypatch):
    def step(ours, of=plain.Ours.step):
        assert ours.dataset.cache[2].all(), 'a step that is timed reads files'
        return of(ours)

    monkeypatch.setattr(plain.Ours, 'step', step)
    found, _ = results(scale, '--parts=size', '--sizes', 32, 64, '--rounds=1', '--batch=2', '--encoder=tu-test_resnet',
                       '--device=cpu')
    assert [row['side'] for row in found['size']] == [32, 64] and all(row['images/s'] > 0 for row in found['size'])


@pytest.mark.usefixtures('quick_runs')
def test_scale_of_processes(results):
    """All but torchrun itself."""
    found, _ = results(scale, '--parts=processes', '--processes', 1, '--images=24', '--size=32', '--rounds=1',
                       '--encoder=tu-test_resnet', '--device=cpu')
    assert found['processes'][0]['images/s'] > 0 and found['processes'][0]['against the first'] == 1


def test_scale_keeps_what_it_has_when_a_later_part_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(scale, 'PARTS', {'first': lambda *_: [{'images': 7}], 'size': lambda *_: 1 / 0})
    monkeypatch.setattr(sys, 'argv', ['scale.py', '--parts', 'first', 'size', f'--out={tmp_path / "x.json"}'])
    with pytest.raises(ZeroDivisionError):
        scale.main()
    assert json.loads((tmp_path / 'x.json').read_text())['results']['first'] == [{'images': 7}]


class Forked:
    """Popen of the program in a terminal, from a process that has imported everything."""

    def __init__(self, command, stdin, cwd, **_):
        terminal = f"import os, sys; [os.dup2(os.open({os.ttyname(stdin)!r}, os.O_RDWR), n) for n in (0, 1, 2)]; " \
                   f"sys.stdout, sys.stderr = open(1, 'w', 1), open(2, 'w', 1); os.chdir({str(cwd)!r})"
        self.process = FORKS.Process(target=run_script, args=(command[2:], os.devnull, dict(os.environ), terminal))
        self.process.start()
        held = os.dup(stdin)                                           # the process opens it later
        self.end = threading.Thread(target=lambda: (self.process.join(), os.close(held)))
        self.end.start()

    def __enter__(self):
        return self

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def __exit__(self, *_):
        self.end.join(20)


def test_start(forks, tmp_path, results, monkeypatch):
    small_set = draw_set(tmp_path / 'set', 200)                        # a bar shows what takes a tenth of a second
    monkeypatch.setattr(start, 'LIBRARIES', 'pass')
    monkeypatch.setattr(start.subprocess, 'Popen', Forked)
    runs = []

    def run(command, **_):                                             # subprocess.run would ask for Popen
        runs.append(command)
        code = os.spawnv(os.P_WAIT, command[0], command) if 'batchsize=4' not in command else 2
        return subprocess.CompletedProcess(command, code, '', '')

    monkeypatch.setattr(start.subprocess, 'run', run)
    monkeypatch.setattr(start, 'time_first_step', lambda *how, of=start.time_first_step: of(*how, most=30))
    found, printed = results(start, '--rounds=1', f'--data={small_set}', '--device=cpu',
                             *[word for word in WORDS if not word.startswith('device')])
    assert len(found['seconds']) == 6 and 'first step again' in printed and len(runs) == 4
    assert all(0 < seconds[0] < 30 for seconds in found['seconds'].values())


def test_what_is_refused_ends_with_the_code_that_start_expects(forks, tmp_path):
    assert run_here(['batchsize=4'], tmp_path) == 2


def test_the_largest_photo_is_the_one_of_most_pixels(tmp_path):
    for kind in ('images', 'masks'):
        (tmp_path / kind / 'val').mkdir(parents=True)
        (tmp_path / kind / 'train').mkdir()
        for split, name, size in (('train', 'c', (32, 32)), ('val', 'wide', (99, 20)), ('val', 'tall', (90, 90))):
            PIL.Image.new('L', size).save(tmp_path / kind / split / f'{name}.png')
    config = train_unet.resolve_config(None, {'data': str(tmp_path)})[0]
    assert large_image.choose_photo(types.SimpleNamespace(config=config)).endswith('tall.png')


def test_a_run_without_tiles_is_no_large_image(small_set, monkeypatch, tmp_path):
    train_unet.train(run_dir=str(tmp_path / 'run'), data=str(small_set), **TINY | {'num_epochs': 1})
    monkeypatch.setattr(sys, 'argv', ['large_image', f'--run={tmp_path}/run', '--device=cpu'])
    with pytest.raises(SystemExit, match='has size_policy=resize; only a run with crop'):
        large_image.main()


@pytest.mark.usefixtures('quick_runs')
def test_large_image(small_set, results, monkeypatch):
    def watched(command, **_):
        words = [str(word) for word in command[2:]]
        return 1.0, 2**20, run_here(words, small_set.parent)

    monkeypatch.setattr(large_image, 'run_watched', watched)
    monkeypatch.setattr(large_image, 'train_small', lambda args, folder: plain.train_unet.train(
        run_dir=str(folder), data=str(small_set), size_policy='crop', **TINY | {'num_epochs': 1}) and folder)
    photo = small_set.parent / 'photo.png'
    large_image.PIL.Image.open(small_set / 'images' / '000.png').resize((100, 80)).save(photo)
    found, _ = results(large_image, '--sides=600', '--tile=32', '--device=cpu', f'--photo={photo}',
                       f'--data={small_set}')
    assert [row['side'] for row in found['scans']] == [600] and found['scans'][0]['file MiB'] > 0.1
    assert len(found['seam']) == 3 and found['seam'][0]['largest difference'] > 0


# --- on a GPU -------------------------------------------------------------------------


NETWORK = dict(encoder='tu-test_five_convs', decoder_channels=[16, 12, 8, 8, 8])


def test_gpu_measures_speed_and_overflow_without_one(small_set, results, asked_here, monkeypatch):
    asked_here(gpu)
    monkeypatch.setattr(gpu, 'settings_of', lambda args, of=gpu.settings_of, **more: of(
        args, **{'data': str(small_set), **more}) | {'data': str(small_set), **NETWORK})
    monkeypatch.setattr(gpu, 'build_plain', lambda args, *how, of=gpu.build_plain: of(
        args, *how) if setattr(args, 'encoder', NETWORK['encoder']) is None else None)
    found, printed = results(gpu, '--device=cpu', '--quick', f'--data={small_set}', '--parts', 'speed', 'overflow',
                             'host', 'largest', '--minutes=60')
    assert [part['state'] for part in found['parts']] == ['done'] * 3 + ['skipped: has no meaning on a CPU']
    assert all(row['ms of the host'] > 0 for row in found['host'])
    assert all(row['images/s'] > 0 for row in found['speed']) and found['speed'][1]['of plain float32'] == 1
    assert {'plain smp loop, float32', 'plain smp loop, float32, tuned'} < {row['contender'] for row in found['speed']}
    exact, overflown = found['overflow']
    assert not exact['events'] and overflown['events'] and overflown['precision at the end'] != 'float16'


def test_waits_for_a_gpu_are_counted():
    with gpu.count_waits() as waits:
        for words in ('aten::item called a synchronizing CUDA operation', 'something else'):
            warnings.warn(words)
        assert not waits
    assert len(waits) == 1


def test_a_part_that_fails_on_a_gpu_is_not_called_done(tmp_path, monkeypatch):
    script, args = tmp_path / 'part.py', types.SimpleNamespace(device='cpu')
    monkeypatch.setitem(gpu.PARTS, 'limit', lambda args, left: gpu.run_script(script, left=3))
    saves = 'import sys, time; open(sys.argv[-1][6:], "w").write(\'{"results": [1]}\'); '
    for text, state, kept in (('raise SystemExit("no images")', 'failed: part.py: no images', 'no results'),
                              ('import time; time.sleep(60)', gpu.TIME_IS_UP, 'no results'), (saves, 'done', [1]),
                              (saves + 'raise SystemExit("NOT equal")', 'failed: part.py: NOT equal', [1]),
                              (saves + 'time.sleep(60)', gpu.TIME_IS_UP, [1])):
        script.write_text(text)
        results = {}
        assert gpu.run_part('limit', args, 60, results) == state and results == {'limit': kept}
    script.write_text('raise SystemExit("no images")')
    monkeypatch.setattr(sys, 'argv', ['gpu.py', '--device=cpu', '--parts', 'limit', f'--out={tmp_path / "x.json"}'])
    assert gpu.main() == 1


def test_the_presets_that_gpu_asks_memory_for_are_there(monkeypatch):
    monkeypatch.setattr(gpu, 'run_script', lambda *words, left: words)
    args = types.SimpleNamespace(quick=False, data='demo', device='cpu', encoder='x', size=64, batch=4)
    first, second, *names = ' '.join(map(str, gpu.measure_memory(args, 60))).partition('--contenders ')[2].split()
    assert (first, second) == ('plain', 'default') and len(names) > 3
    assert all(plain.train_unet.load_preset(name.partition('-')[0]) for name in names)
