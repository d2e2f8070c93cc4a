"""Several processes (gloo): the same result as one, however they are stopped, continued and disturbed.

Run: python -m pytest tests/test_processes.py
"""
import contextlib
import functools
import json
import logging
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import train_unet
from conftest import FORKS, ROOT, TINY, draw_set, made_once
from helpers import assert_same, final, save

needs_linux = pytest.mark.skipif(sys.platform != 'linux', reason='forks processes that are ready to train')

SCRIPT = '''
import atexit, os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
import torch, train_unet
from torch import nn
torch.set_num_threads(1)

@atexit.register
def look_for_threads():
    "Runs after all that is registered later. One of gloo's that is left may abort the process: not after a training."
    if 'result' in globals() and any('gloo' in path.read_text() for path in Path('/proc/self/task').glob('*/comm')):
        os._exit(3)

class Means(torch.utils.data.Dataset):
    def __len__(self):
        return 43
    def __getitem__(self, i):
        x = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(i))
        return {{'x': x, 'y': x.mean(0, keepdim=True)}}

def loss_fn(model, batch):
    if {ask} and os.environ.get('RANK') == '1' and model_calls.append(1) is None and len(model_calls) == {ask}:
        os.kill(os.getpid(), 15)
    if {hang} and os.environ.get('RANK') == '1' and model_calls.append(1) is None and len(model_calls) == 100:
        open('stopped', 'w').close()
        os.kill(os.getpid(), signal.SIGSTOP)
    if {die} and os.environ.get('RANK') == '1' and model_calls.append(1) is None and len(model_calls) > 30:
        os.kill(os.getpid(), 9)
    return (model(batch['x']) - batch['y']).square().mean((1, 2, 3))

model_calls = []
if {die}:
    train_unet.Run.is_due = lambda run: True       # the first epoch is saved on a busy machine too
torch.manual_seed(3)
net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
try:
    result = train_unet.train(model=net, loss_fn=loss_fn, train_data=Means(), val_data=Means(), num_epochs={epochs},
                              optimizer='SGD', learning_rate=0.05, batch_size=2, accumulation_steps=4, use_amp=False,
                              device='cpu', ema_decay=None, run_dir='run{count}')
except train_unet.UserError as error:
    print(error)
    sys.exit(2)
print(f'process {{os.environ["RANK"]}} stopped by {{result.stopped_by}}, best epoch {{result.best.get("epoch")}}')
'''


def write_script(count, die=False, ask=0, hang=False, epochs=1):
    """The script, in this folder -> its name."""
    script = f'script{count}.py'
    with open(script, 'w') as file:
        file.write(SCRIPT.format(root=str(ROOT), count=count, die=die, ask=ask, hang=hang, epochs=epochs))
    return script


def launch(folder, words, environment, printed):
    """What a forked process does: torchrun, whose processes are new interpreters; they print into a file."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with open(printed, 'w') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ['torchrun', *words]
    runpy.run_module('torch.distributed.run', run_name='__main__')


def start(*words, printed='printed.txt'):
    """torchrun in the background, with one thread for each process."""
    launcher = FORKS.Process(target=launch, args=(os.getcwd(), words, {**os.environ, 'OMP_NUM_THREADS': '1'}, printed))
    launcher.start()
    return launcher


def free_port():
    """A port where processes may meet."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def run_forked_script(folder, script, environment):
    """What a forked process does; it prints into a file."""
    os.chdir(folder)
    os.environ.update(environment)
    with open(f'printed{environment["RANK"]}.txt', 'w') as file:
        os.dup2(file.fileno(), 1)
    runpy.run_path(script)


def run_forked(count, script, codes=(0,)):
    """A script in `count` processes that torchrun might have started, to its end; each exit code is one of these."""
    common = {'WORLD_SIZE': str(count), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    ranks = [FORKS.Process(target=run_forked_script,
                           args=(os.getcwd(), script, common | {'RANK': rank, 'LOCAL_RANK': rank}))
             for rank in map(str, range(count))]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
            assert process.exitcode in codes
    finally:
        for process in ranks:
            process.kill()                                             # pytest would wait for one that hangs


PATIENCE = 120                                                         # seconds: others may use the machine too
WINDOWS, STOP = 4, 5                                                   # steps of an epoch; the one that is disturbed
SETTINGS = TINY | {'decoder_channels': [8] * 5, 'learning_rate': 0.01}


def work(folder, environment, prepare, words):
    """One process of a job: the real command, after prepare(rank) has changed what it wants."""
    os.chdir(folder)
    os.environ.update(environment)
    rank = int(environment['RANK'])
    with open(f'printed{rank}.txt', 'w') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    prepare(rank)
    sys.exit(train_unet.main(words))


def leave_alone(rank):
    """Nothing happens to this process."""


def run_job(folder, data, prepare=leave_alone, **changes):
    """Two processes that train into folder/run, to their end -> (their exit codes, what they printed)."""
    folder.mkdir(exist_ok=True)
    settings = {**SETTINGS, 'data': data, 'run_dir': 'run', **changes}
    words = shlex.split(' '.join(train_unet.as_typed(key, value) for key, value in settings.items()))
    common = {**os.environ, 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    ranks = [FORKS.Process(target=work, args=(folder, {**common, 'RANK': rank, 'LOCAL_RANK': rank}, prepare, words))
             for rank in '01']
    end = time.monotonic() + PATIENCE
    try:
        for process in ranks:
            process.start()
        while any(process.exitcode is None for process in ranks) and time.monotonic() < end:
            if any(process.exitcode not in (None, 0, 128 + signal.SIGTERM) for process in ranks):
                end = min(end, time.monotonic() + 20)                  # the others end by themselves, and soon
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [process.exitcode for process in ranks], [(folder / f'printed{rank}.txt').read_text() for rank in '01']


@pytest.fixture(scope='module')
def undisturbed(forks, tmp_path_factory):
    """A run of two processes that nobody stopped: (run folder, data folder). Not to be changed."""
    def make(folder):
        codes, printed = run_job(folder, draw_set(folder / 'set', count=20))                   # 16 to train with
        assert codes == [0, 0], printed
        assert train_unet.load_checkpoint(folder / 'run' / 'last.pt')['step'] == 2 * WINDOWS
    return made_once(tmp_path_factory, 'undisturbed', make)


def at_step(number, act):
    """Within the step after so many, act()."""
    real = train_unet.train_step

    def step(state, *rest):
        if state.step == number:
            act()
        return real(state, *rest)

    train_unet.train_step = step


# --- one result -----------------------------------------------------------------------


def run_on_two_machines(*typed, code=0):
    """Two scripts, with their words, under launchers that meet at one address, one process each -> what they print."""
    port, printed = free_port(), []
    # held here: the launcher that holds it may end first, and now and then the other one asks it once more
    store = torch.distributed.TCPStore('127.0.0.1', port, is_master=True, wait_for_workers=False)
    meeting = ['--nnodes=2', '--nproc_per_node=1', '--rdzv-backend=c10d', f'--rdzv-endpoint=127.0.0.1:{port}',
               '--rdzv-conf=is_host=0']
    jobs = [start(*meeting, *words, printed=f'printed{number}.txt') for number, words in enumerate(typed, 1)]
    try:
        for number, job in enumerate(jobs, 1):
            job.join(120)
            with open(f'printed{number}.txt') as file:
                printed.append(file.read())
            assert job.exitcode == code, printed[-1][-2000:]
    finally:
        for job in jobs:
            job.terminate()                                            # it stops its process, if there still is one
    del store
    return printed


def test_a_script_that_fails_before_it_meets_that_of_another_machine_ends_it_too(forks):
    with open('script.py', 'w') as file:
        file.write(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport train_unet\n"
                   "train_unet.train(**train_unet.parse_overrides(sys.argv[1:])[0])\n")
    first, second = run_on_two_machines(['script.py', 'data=demo'], ['script.py', 'nonsense=1'], code=1)
    assert "unknown key 'nonsense'" in second
    assert re.search('(closed|reset) by peer', first) and not os.path.exists('runs')


def train_twice(script):
    """Let the script train into again2 too, and print at its end what is left then."""
    with open(script) as file:
        text = file.read()
    body = text[text.index('result = '):text.index('except')]
    with open(script, 'w') as file:
        file.write('import atexit\natexit.register(lambda: '
                   "print('a group is left:', torch.distributed.is_initialized()))\n"
                   "atexit.register(lambda: print('smp is loaded:', 'segmentation_models_pytorch' in sys.modules))\n"
                   + text.replace(body, body + "    again = " + body.replace('run2', 'again2')[len('result = '):]))
    return script


def test_one_process_four_and_two_machines_give_the_same_weights_and_leave_the_group_at_their_end(forks):
    """43 images leave a short last window; SGD, because AdamW would enlarge rounding. gloo's threads abort, now and
    then, a process that exits with a group: a function registered before sees none, also after two trainings."""
    for count in (1, 4):
        run_forked(count, write_script(count))
    printed = run_on_two_machines(*[[train_twice(write_script(2))]] * 2)
    for said in printed:
        assert said.count('a group is left: False') == 1
        assert said.count('smp is loaded: False') == 1                 # nor by what looks at all modules
        assert len(re.findall('process [01] stopped by 0, best epoch 1', said)) == 1
    one, *others = (train_unet.load_checkpoint(f'run{count}/last.pt') for count in (1, 2, 4))
    assert one['step'] == train_unet.load_checkpoint('again2/last.pt')['step'] == 5
    for other in others:
        for name, value in one['model'].items():
            torch.testing.assert_close(other['model'][name], value, rtol=1e-5, atol=1e-6)
        for key in ('train_loss', 'val_loss'):
            assert other['history'][0][key] == pytest.approx(one['history'][0][key], rel=1e-5)


def test_a_process_that_fails_before_it_meets_that_of_another_machine_ends_it_too(forks):
    """Where a preset is on the disk of one of them, say. torchrun on the other one is told nothing."""
    script = train_unet.__file__
    first, second = run_on_two_machines([script, 'data=demo'], [script, 'nonsense=1'], code=1)
    assert "unknown key 'nonsense'" in second
    assert re.search('process [01]: another one has ended', first) and not os.path.exists('runs')


def count_exchanges(rank):
    """DDP tells whenever it has exchanged all gradients."""
    kind = torch.nn.parallel.DistributedDataParallel
    begin = kind.__init__

    def exchange(_, bucket):
        if bucket.is_last():
            print('exchanged', flush=True)
        return allreduce_hook(None, bucket)

    @functools.wraps(begin)
    def begin_and_count(self, *args, **named):
        begin(self, *args, **named)
        self.register_comm_hook(None, exchange)

    kind.__init__ = begin_and_count


@needs_linux
def test_gradients_are_exchanged_once_per_window_and_not_for_each_of_its_batches(undisturbed, tmp_path):
    """16 images in windows of 8, each process having two batches of two images; the smoke test is one window more."""
    codes, printed = run_job(tmp_path / 'job', undisturbed[1], count_exchanges, batch_size=2, accumulation_steps=4,
                             num_epochs=1)
    assert codes == [0, 0], printed
    assert [text.count('exchanged') for text in printed] == [1 + 2] * 2


@needs_linux
def test_a_short_last_window_of_accumulated_steps_trains(forks, tmp_path):
    """13 training images; one process speaks."""
    codes, printed = run_job(tmp_path / 'job', draw_set(tmp_path / 'set', count=16), accumulation_steps=2)
    assert codes == [0, 0], printed
    assert printed[0].count('Epoch 2/2') == 1 and 'Epoch' not in printed[1]
    best = train_unet.load_checkpoint(tmp_path / 'job' / 'run' / 'best.pt')
    assert all(torch.isfinite(value).all() for value in best['weights'].values())
    assert train_unet.load_last(tmp_path / 'job' / 'run')[0]['epoch'] == 2


@needs_linux
def test_networks_train_although_layers_of_their_encoders_are_left_out(undisturbed, tmp_path):
    changes = {'architecture': 'PSPNet', 'encoder': 'tu-test_efficientnet'}
    network = train_unet.build_network({**train_unet.CONFIG, **SETTINGS, **changes, 'num_classes': 2})
    network(torch.randn(2, 3, 32, 32)).sum().backward()
    assert any(p.grad is None for p in network.parameters())           # or this test would show nothing
    codes, printed = run_job(tmp_path, undisturbed[1], **changes, num_epochs=1)
    assert codes == [0, 0], printed
    last = train_unet.load_checkpoint(tmp_path / 'run' / 'last.pt')
    assert last['step'] == WINDOWS and last['bad']['total'] == 0


def have_other_units(rank):
    """Process 1 runs on a processor with bfloat16 in hardware, process 0 on one without."""
    torch.backends.mkldnn.is_available = lambda: bool(rank)
    torch.cpu.get_capabilities = lambda: {'amx_bf16': True}
    usual = train_unet.train_step

    def step(state, *rest):
        print('precision:', state.dtype, 'draws:', torch.rand(1).item(), flush=True)
        return usual(state, *rest)

    train_unet.train_step = step


@needs_linux
def test_processes_have_one_precision_and_random_numbers_of_their_own(undisturbed, tmp_path):
    codes, printed = run_job(tmp_path, undisturbed[1], have_other_units, use_amp='auto', num_epochs=1)
    assert codes == [0, 0], printed
    told = [re.findall(r'^precision: (\S+) draws: (\S+)$', text, re.MULTILINE)[-WINDOWS:] for text in printed]
    assert {precision for rows in told for precision, _ in rows} == {'float32'}
    assert len({draw for rows in told for _, draw in rows}) == 2 * WINDOWS


@pytest.mark.parametrize('images, wanted', [(3, True), (4, False)])
def test_statistics_are_shared_where_a_gpu_has_few_images(monkeypatch, images, wanted):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 1, 1))
    monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(0, 2))
    monkeypatch.setattr(nn.Module, 'to', lambda self, *_, **__: self)
    monkeypatch.setattr(nn.parallel, 'DistributedDataParallel', lambda network, devices, **_: network)
    config = {**train_unet.CONFIG, 'batch_size': 2 * images, 'learning_rate': 0.01, 'ema_decay': None}
    state = train_unet.build_state(model, config, train_unet.Precision('float32', 'high', ''), torch.device('cuda'))
    assert any(isinstance(module, nn.SyncBatchNorm) for module in state.model.modules()) == wanted


def test_shared_statistics_of_a_network_of_ones_own_are_refused_on_cpus(monkeypatch):
    monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(0, 2))
    monkeypatch.setattr(nn.parallel, 'DistributedDataParallel', lambda network, devices, **_: network)
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4)))
    with pytest.raises(train_unet.UserError, match='SyncBatchNorm.* on GPUs alone: give it BatchNorm here'):
        train_unet.build_state(model, train_unet.CONFIG | {'learning_rate': 0.1}, None, torch.device('cpu'))


def test_a_frozen_network_is_told_before_processes_share_it(monkeypatch):
    monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(0, 2))
    model = nn.Sequential(nn.Conv2d(3, 4, 1)).requires_grad_(False)    # DistributedDataParallel refuses it in its words
    with pytest.raises(train_unet.UserError, match='has no weights to train'):
        train_unet.build_state(model, train_unet.CONFIG | {'learning_rate': 0.1}, None, torch.device('cpu'))


def test_fewer_training_images_than_processes_are_refused(monkeypatch):
    monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(0, 4))
    with pytest.raises(train_unet.UserError, match='3 training images for 4 processes: start fewer'):
        train_unet.build_loaders(range(3), range(3), train_unet.CONFIG, torch.device('cpu'))


def test_processes_count_the_broken_files_of_all_and_save_by_the_first_ones_clock(monkeypatch):
    monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(1, 2))
    monkeypatch.setattr(train_unet, 'from_all', lambda ours: [(0, True, ['first.png']), ours])
    state, saved = SimpleNamespace(left_out={'second.png': 1}), []
    run = SimpleNamespace(asked=0, last_save=time.monotonic(), launcher=os.getppid(), save=lambda *_: saved.append(1))
    train_unet.Run.agree(run, state, {'checkpoint_minutes': 10}, ['second.png'])
    assert state.left_out == {'first.png': 1, 'second.png': 2} and saved == [1]


def test_what_torch_says_of_strides_is_not_shown():
    code = "import warnings, train_unet; train_unet.CONFIG; " \
           "warnings.warn('Grad strides do not match bucket view strides. ...')"
    done = subprocess.run([sys.executable, '-c', code], cwd=os.path.dirname(train_unet.__file__), capture_output=True,
                          text=True)
    assert done.returncode == 0 and 'Grad strides' not in done.stderr


def test_each_process_has_two_images_of_a_step(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '4')
    with pytest.raises(train_unet.ConfigError, match='at least two for each'):
        train_unet.processes_started({'batch_size': 4, 'accumulation_steps': 1})
    assert train_unet.processes_started({'batch_size': 4, 'accumulation_steps': 2}) == 4


def test_check_says_that_processes_share_the_batch(monkeypatch, small_set, caplog, capsys):
    monkeypatch.setenv('WORLD_SIZE', '2')
    train_unet.check(data='set', device='cpu', encoder='tu-test_five_convs', image_size=32, encoder_weights=None)
    assert 'check looks at one process with the whole batch, of which each of the 2' in caplog.text


PART = "(model(batch['x']) -"


@pytest.mark.parametrize('part', ["(model[2](model[1](model[0](batch['x']))) -", "(model.forward(batch['x']) -"])
def test_a_loss_that_calls_parts_of_the_model_is_refused_in_several_processes(forks, part):
    """Their gradients are not exchanged: each process would train a network of its own, unsaid."""
    script = write_script(2)
    with open(script) as file:
        text = file.read()
    assert PART in text
    with open(script, 'w') as file:
        file.write(text.replace(PART, part))
    run_forked(2, script, codes=(2,))
    for number in (0, 1):
        with open(f'printed{number}.txt') as file:
            assert 'exchange the gradients of what it calls as model(...) alone' in file.read()


@pytest.mark.parametrize('fault', ['.square().mean()', '.view(7).square().mean()'], ids=['TypeError', 'RuntimeError'])
def test_a_mistake_of_all_processes_leaves_no_folder_that_blocks_the_next_try(forks, fault):
    script = write_script(2)
    with open(script) as file:
        text = file.read()
    with open(script, 'w') as file:
        file.write(text.replace('.square().mean((1, 2, 3))', fault))
    run_forked(2, script, codes=(1,))
    assert not os.path.exists('run2')


def test_a_process_lets_the_others_threads_rest_before_it_forks_its_workers(monkeypatch):
    """Up to Python 3.11 a child hangs that was forked while a thread of gloo asked for the interpreter."""
    for count, waits in ((1, 0), (2, 1)):
        rests = []
        monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(0, count))
        monkeypatch.setattr(time, 'sleep', rests.append)
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        assert len(rests) == waits


def test_what_is_no_training_is_done_by_the_first_process_alone(monkeypatch):
    words = [['evaluate', 'none'], ['predict', 'none', 'x.png'], ['export', 'none'], ['check', 'data=none']]
    for rank, several, code in [('0', '2', 2), ('1', '2', 0), ('1', '1', 2), ('1', '', 2), ('', '', 2), ('1', None, 2)]:
        monkeypatch.setenv('RANK', rank)                               # alone it is no word of torchrun
        monkeypatch.delenv('WORLD_SIZE') if several is None else monkeypatch.setenv('WORLD_SIZE', several)
        assert [train_unet.main(typed) for typed in words] == [code] * 4


def test_a_number_of_processes_without_the_rest_is_told(monkeypatch):
    monkeypatch.delenv('RANK', raising=False)
    monkeypatch.setenv('WORLD_SIZE', '2')
    with pytest.raises(train_unet.ConfigError, match='RANK expected(.|\n)*unset WORLD_SIZE'):
        train_unet.join_processes(train_unet.CONFIG | {'device': 'cpu', 'batch_size': 4})
    with socket.create_server(('127.0.0.1', 0)) as taken:              # all of it, left over from another job
        for name, value in (('RANK', '0'), ('MASTER_ADDR', '127.0.0.1'), ('MASTER_PORT', str(taken.getsockname()[1]))):
            monkeypatch.setenv(name, value)
        with pytest.raises(train_unet.ConfigError, match='in use(.|\n)*unset WORLD_SIZE'):
            train_unet.join_processes(train_unet.CONFIG | {'device': 'cpu', 'batch_size': 4})


# --- what is refused ------------------------------------------------------------------


def test_a_number_of_processes_that_does_not_divide_the_batch_is_refused(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '3')
    words = 'cannot share an effective batch of 8 images evenly, at least two for each'
    with pytest.raises(train_unet.ConfigError, match=words):
        train_unet.join_processes({'device': 'cpu', 'batch_size': 2, 'accumulation_steps': 4})
    with pytest.raises(train_unet.ConfigError, match=words):           # not "ready", which the training would not be
        train_unet.check(device='cpu', batch_size=2, accumulation_steps=4)
    monkeypatch.setenv('WORLD_SIZE', 'four')
    with pytest.raises(train_unet.ConfigError, match="WORLD_SIZE='four' is in the environment"):
        train_unet.join_processes({'device': 'cpu', 'batch_size': 2, 'accumulation_steps': 4})


@needs_linux
@pytest.mark.parametrize('processes, fits', [(4, False), (3, True)])
def test_the_number_of_processes_must_suit_the_batch_of_the_run(tmp_path, monkeypatch, processes, fits):
    """A run of 6 images per step: 4 processes, which would suit the default of 8, are refused; 3 are not."""
    class Met(Exception):
        """The processes would meet now."""

    def meet(*_, **__):
        raise Met

    (tmp_path / 'run').mkdir()
    config = {**train_unet.CONFIG, 'batch_size': 3, 'accumulation_steps': 2, 'device': 'cpu'}
    (tmp_path / 'run' / 'config.py').write_text(train_unet.config_text(config))
    train_unet.save_checkpoint(tmp_path / 'run' / 'last.pt', {'format': 1, 'config': config, 'weights': {}})
    monkeypatch.setenv('WORLD_SIZE', str(processes))
    monkeypatch.setattr(train_unet.dist, 'init_process_group', meet)
    with pytest.raises(Met if fits else train_unet.ConfigError) as caught:
        train_unet.train(resume=str(tmp_path / 'run'))
    assert fits or '4 processes cannot share an effective batch of 6 images' in str(caught.value)
    assert {path.name for path in (tmp_path / 'run').iterdir()} == {'config.py', 'last.pt'}


@pytest.mark.parametrize('tasks, rank, told', [('8', '0', True), ('8', '3', False), ('1', '0', False),
                                               (None, None, False)])
def test_srun_without_torchrun_is_told_that_it_trains_many_runs(monkeypatch, caplog, tasks, rank, told):
    for name, value in (('SLURM_STEP_NUM_TASKS', tasks), ('SLURM_PROCID', rank), ('WORLD_SIZE', None)):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    train_unet.join_processes({'device': 'cpu', 'batch_size': 8, 'accumulation_steps': 1})
    assert ('srun started 8 tasks, and each of them trains' in caplog.text) == told


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(train_unet.torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(train_unet.torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('LOCAL_RANK', '1')
    with pytest.raises(train_unet.ConfigError, match='a process too many: .*nproc-per-node=1.*device=cpu'):
        train_unet.join_processes({'device': 'auto', 'batch_size': 8, 'accumulation_steps': 1})


def test_processes_of_srun_take_a_gpu_each(monkeypatch):
    """They have a RANK, as scripts export it, but no LOCAL_RANK."""
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    for name, value in (('WORLD_SIZE', '8'), ('RANK', '7')):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 4)
    monkeypatch.setattr(torch.cuda, 'set_device', lambda device: None)
    monkeypatch.setattr(torch.distributed, 'init_process_group', lambda *_, **__: None)
    config = {'device': 'auto', 'batch_size': 16, 'accumulation_steps': 1}
    assert train_unet.join_processes(config) == torch.device('cuda', 3)


@needs_linux
@pytest.mark.parametrize('kind', ['cpu', 'cuda'])
def test_processes_without_the_gpu_that_others_have_are_refused(monkeypatch, kind):
    other = kind, frozenset({'float16'})
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.distributed, 'get_rank', lambda: 0)
    monkeypatch.setattr(torch.distributed, 'get_world_size', lambda: 2)
    monkeypatch.setattr(torch.distributed, 'all_gather_object', lambda into, value: into.__setitem__(1, other))
    mine = train_unet.Hardware('cuda', 'a GPU', (8, 0), frozenset({'float16', 'bfloat16'}))
    if kind == 'cuda':
        assert train_unet.common_hardware(mine).units == {'float16'}
    else:
        with pytest.raises(train_unet.ConfigError, match=r'different devices \(cpu, cuda\)'):
            train_unet.common_hardware(mine)


def test_a_last_window_of_one_image_each_is_refused_before_the_first_step(forks):
    """18 images in windows of 4 leave two for two processes, and a BatchNorm at 1x1 refuses one."""
    script = write_script(2, epochs=50)
    with open(script) as file:
        text = file.read()
    text = text.replace('return 43', 'return 18').replace("'SGD',", "'SGD', checkpoint_minutes=0,")
    text = text.replace('accumulation_steps=4', 'accumulation_steps=2').replace(
        'nn.ReLU(),', 'nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(8),')
    with open(script, 'w') as file:
        file.write(text)
    run_forked(2, script, codes=(2,))
    assert 'BatchNorm cannot train on one image' in open('printed0.txt').read()
    assert not os.path.exists('run2')                                  # the next command has its name


@pytest.mark.parametrize('processes, batch, steps, line', [(2, 8, 1, 'batch_size=2 accumulation_steps=4'),
                                                           (4, 2, 4, 'batch_size=1 accumulation_steps=8'),
                                                           (4, 28, 1, 'batch_size=2 accumulation_steps=14')])
def test_advice_for_several_processes_out_of_memory_makes_each_hold_less(monkeypatch, processes, batch, steps, line):
    monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(0, processes))
    state = SimpleNamespace(batch_size=batch)
    with pytest.raises(train_unet.UserError, match=line):
        train_unet.halve(state, {'batch_size': batch, 'accumulation_steps': steps})


def look_elsewhere(rank):
    """Process 1 is on a machine that does not have the folder of the run."""
    if rank:
        os.mkdir('elsewhere')
        os.chdir('elsewhere')


@needs_linux
def test_processes_of_which_not_all_find_the_run_say_so(undisturbed, tmp_path):
    """One would begin anew and wait for those that go on."""
    shutil.copytree(undisturbed[0], tmp_path / 'run')
    codes, printed = run_job(tmp_path, undisturbed[1], look_elsewhere, resume='auto', num_epochs=3)
    assert codes == [2, 2] and all('not all processes find the run' in text for text in printed), printed


def decay_more(rank):
    """The script of process 1 was edited."""
    if rank:
        train_unet.CONFIG.update(weight_decay=0.5, num_workers=1)


def type_otherwise(key, value, rank):
    """Process 1 was given another setting."""
    real = train_unet.train
    if rank:
        train_unet.train = lambda *given, **named: real(*given, **named | {key: value})


def have_other_files(name, rank):
    """Process 1 has a copy of the data in which one file is longer."""
    real = os.path.getsize
    os.path.getsize = lambda path: real(path) + (rank and str(path).endswith(name))


@needs_linux
@pytest.mark.parametrize('prepare, told', [
    (decay_more, 'weight_decay=0.5: of process 1; the first has 0.01, and all need the same settings'),
    (functools.partial(type_otherwise, 'data', 'demo'), "data='demo': of process 1; the first has 'PATH', and all"),
    (functools.partial(type_otherwise, 'initial_weights', 'x'), "initial_weights='PATH': of process 1; the first has"),
    (functools.partial(type_otherwise, 'encoder_weights', 'imagenet'), "encoder_weights='imagenet': of process 1; the"),
    *((functools.partial(have_other_files, f'{kind}/003.png'), 'the data are not the same for all processes')
      for kind in ('images', 'masks'))])
def test_processes_with_other_settings_or_files_than_the_first_are_refused(undisturbed, tmp_path, prepare, told):
    """Each trained a network of its own, without a word, or they waited for each other."""
    codes, printed = run_job(tmp_path, undisturbed[1], prepare, num_epochs=1)
    assert codes == [2, 2] and told in printed[0] and 'num_workers=1' not in printed[0], printed
    assert not (tmp_path / 'run').exists()


def type_other_paths(folder, rank):
    """Process 1 was given the same files by other paths."""
    augment, weights = 'copy.json' if rank else 'flip.json', folder / 'best.pt' if rank else folder
    with open(augment, 'w') as file:
        json.dump(train_unet.A.to_dict(train_unet.A.HorizontalFlip(p=0.5)), file)
    train_unet.CONFIG.update(augment=augment, initial_weights=str(weights))


@needs_linux
def test_the_same_files_may_be_typed_by_other_paths(undisturbed, tmp_path):
    prepare = functools.partial(type_other_paths, undisturbed[0])
    codes, printed = run_job(tmp_path, undisturbed[1], prepare, num_epochs=1)
    assert codes == [0, 0], printed


@needs_linux
def test_masks_that_are_united_are_compared_file_by_file(undisturbed, tmp_path):
    data, prepare = tmp_path / 'set', functools.partial(have_other_files, '003_b.png')
    shutil.copytree(undisturbed[1], data)
    for stem in range(20):
        (data / f'masks/{stem:03d}.png').rename(data / f'masks/{stem:03d}_a.png')
        save(data / f'masks/{stem:03d}_b.png', np.eye(40)[::-1] * (np.arange(40) < 4) * 255)           # a corner
    codes, printed = run_job(tmp_path / 'job', data, prepare, mask_pattern='{stem}_*.png', num_epochs=1)
    assert codes == [2, 2] and 'the data are not the same' in printed[0], printed


def test_data_sets_of_ones_own_are_given_whole(forks, tmp_path):
    """Of unequal lengths they waited for each other."""
    script = write_script(2)
    with open(script) as file:
        text = file.read()
    assert 'return 43' in text
    with open(script, 'w') as file:
        file.write(text.replace('return 43', 'return 43 - 5 * int(os.environ["RANK"])'))
    run_forked(2, script, codes=(2,))
    with open('printed0.txt') as file:
        assert 'Datasets of your own are given whole' in file.read()


def break_an_image(rank):
    """Process 1 meets a file that broke."""
    real = train_unet.SegmentationDataset.read

    def read(self, index):
        if rank and os.path.exists('run/history.csv'):
            raise train_unet.DataError('broken.png: cannot be read')
        return real(self, index)

    train_unet.SegmentationDataset.read = read


@needs_linux
def test_what_ends_a_process_is_in_the_log_and_the_others_say_one_line(undisturbed, tmp_path):
    codes, printed = run_job(tmp_path, undisturbed[1], break_an_image, cache_images=False, num_epochs=3)
    assert codes == [1, 2], printed
    log_text = (tmp_path / 'run' / 'log.txt').read_text()
    assert 'process 1:   broken.png: cannot be read' in log_text
    for text in (printed[1], log_text):
        assert 'broken.png: cannot be read' in text
        assert re.search(r'It goes on with:  \S+ \S*train_unet.py resume=run', text)
    assert 'process 0: another one has ended; unless it was killed it says why' in printed[0]
    assert 'Traceback' not in ''.join(printed)


def print_saves(rank):
    """Which checkpoints are written."""
    real = train_unet.save_checkpoint

    def save(path, content):
        print('saved', path.name, content.get('epoch'), content.get('window'), flush=True)
        real(path, content)

    train_unet.save_checkpoint, train_unet.Run.is_due = save, lambda run: True


@needs_linux
def test_a_short_validation_costs_no_checkpoint_of_its_own(undisturbed, tmp_path):
    """Of the first nobody knows how long it takes; while a long one runs, torchrun may end all of them."""
    codes, printed = run_job(tmp_path, undisturbed[1], print_saves, num_epochs=3)
    assert codes == [0, 0], printed
    assert re.findall(r'saved last.pt (\d) (\d)', printed[0])[1:] == [('0', str(WINDOWS)), *zip('123', '000')]


def damage_best(rank):
    """best.pt is damaged when it is read at the end, and process 0 has more to do than to train."""
    real, train = train_unet.take_best, train_unet.train

    def take(model, config, run):
        if not rank:
            (run.folder / 'best.pt').write_bytes(b'PK damaged')
        return real(model, config, run)

    def train_and_go_on(*given, **named):
        result, deadline = train(*given, **named), time.monotonic() + 20
        open(f'done{rank}', 'w').close()
        while not os.path.exists('done1') and time.monotonic() < deadline:
            time.sleep(0.1)
        print('both have trained' if os.path.exists('done1') else 'the other still waits', flush=True)
        return result

    train_unet.take_best, train_unet.train = take, train_and_go_on


@needs_linux
def test_a_damaged_best_file_leaves_no_process_waiting(undisturbed, tmp_path):
    codes, printed = run_job(tmp_path, undisturbed[1], damage_best, num_epochs=1)
    assert codes == [0, 0], printed
    assert 'the last weights are returned instead' in printed[0] and 'both have trained' in printed[0]


@pytest.mark.parametrize('has_norms', [True, False])
def test_a_compiler_that_fails_where_norms_wait_for_each_other_ends_the_run(monkeypatch, has_norms):
    """Alone it would go on to ask the others, who wait in a norm for this process."""
    def compiled(*_):
        raise AssertionError('no kernel')

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4) if has_norms else nn.Identity())
    model._compiled_call_impl = compiled
    monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(1, 2))
    monkeypatch.setattr(train_unet, 'from_all', lambda value: [value, True])
    engine, calls = nn.Sequential(model), []                           # stands for DDP around it
    engine.no_sync = contextlib.nullcontext
    engine.register_forward_pre_hook(lambda *_: calls.append('through DDP'))
    state = SimpleNamespace(model=model, engine=engine, dtype='float32', optimizer=torch.optim.SGD(model.parameters()))
    ask = lambda: train_unet.agree_on_compiling(state, {'x': torch.ones(2, 3, 8, 8)},
                                                lambda model, batch: model(batch['x']).mean((1, 2, 3)), {})
    if has_norms:
        with pytest.raises(train_unet.UserError, match='process 1 .*no kernel.*type compile_model=False'):
            ask()
    else:
        ask()
        assert model._compiled_call_impl is None
    assert calls == ['through DDP']


def test_of_a_group_that_a_script_made_one_process_speaks(monkeypatch, caplog, capsys):
    """Nothing is in the environment there."""
    for name in ('RANK', 'LOCAL_WORLD_SIZE', 'SLURM_STEP_NUM_NODES'):
        monkeypatch.delenv(name, raising=False)
    record = logging.LogRecord('train_unet', logging.INFO, '', 0, 'a line', (), None)
    for rank in (0, 1):
        monkeypatch.setattr(train_unet, 'world', lambda: train_unet.World(rank, 2))
        train_unet.ScreenHandler().emit(record)
        assert train_unet.processes_here() == 2
    monkeypatch.setenv('SLURM_STEP_NUM_NODES', '2')                    # srun's, one on each machine
    assert train_unet.processes_here() == 1
    assert capsys.readouterr().out.count('a line') == 1


# --- stopped and continued ------------------------------------------------------------


def ask_to_stop():
    """SIGTERM to this process; it has been noticed when this returns."""
    os.kill(os.getpid(), signal.SIGTERM)


def assert_stopped(run, codes, printed):
    """Both left by the front door, with a checkpoint of the step at work."""
    assert codes == [128 + signal.SIGTERM] * 2, printed
    assert not any(word in text for text in printed for word in ('Traceback', 'interrupted')), printed
    last, path = train_unet.load_last(run)
    assert path.name == 'last.pt' and last['step'] == STOP + 1
    assert (last['epoch'], last['window']) == divmod(STOP + 1, WINDOWS)
    assert float(last['totals']['images']) == 4 * last['window']       # of both, each counted once


def ask_second(rank):
    """Only process 1 gets SIGTERM."""
    if rank == 1:
        at_step(STOP, ask_to_stop)


@needs_linux
def test_a_stopped_run_that_is_continued_ends_as_one_that_was_not(undisturbed, tmp_path):
    codes, printed = run_job(tmp_path / 'stopped', undisturbed[1], ask_second)
    run = tmp_path / 'stopped' / 'run'
    assert_stopped(run, codes, printed)
    codes, printed = run_job(tmp_path / 'stopped', undisturbed[1], resume='run')
    assert codes == [0, 0], printed
    assert 'Continuing run/last.pt at epoch 2' in printed[0]
    result, expected = final(run), final(undisturbed[0])
    rows, expected_rows = result.pop('history'), expected.pop('history')
    assert_same(result, expected)
    assert [row['epoch'] for row in rows] == [1, 2] and {'train_loss', 'train_iou'} <= rows[1].keys()
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row)                      # the loss was added up in another order


def test_a_signal_to_one_process_stops_all_after_the_same_step(forks):
    """Process 1 gets SIGTERM in its 30th pass: all end well, and the checkpoint is of that step."""
    run_forked(2, write_script(2, ask=30, epochs=50))
    for rank in (0, 1):
        with open(f'printed{rank}.txt') as file:
            assert f'process {rank} stopped by 15' in file.read()
    last, path = train_unet.load_last('run2')
    assert path.name == 'last.pt' and 2 < last['step'] < 50 and last['window'] > 0


IN_VALIDATION = '''
import os, sys
sys.path.insert(0, {root!r})
import torch, train_unet

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))

def loss_fn(model, batch):
    validates = not torch.is_grad_enabled() and os.path.exists('out/history.csv')   # from the second epoch on
    if os.environ['RANK'] == '1' and validates and not sent:
        sent.append(os.kill(os.getpid(), 15))
    return model(batch).square().mean((1, 2, 3))

sent = []
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 1, 3))
result = train_unet.train(model=net, loss_fn=loss_fn, train_data=Noise(), val_data=Noise(), num_epochs=1000,
                          batch_size=2, accumulation_steps=2, use_amp=False, device='cpu', run_dir='out')
print(f'process {{os.environ["RANK"]}} stopped by {{result.stopped_by}}, sent {{len(sent)}}')
'''


def test_a_signal_to_one_process_in_its_validation_stops_all(forks, tmp_path):
    """Process 1 gets SIGTERM while it validates; nobody waits for it in vain, and the epoch is saved."""
    (tmp_path / 'script.py').write_text(IN_VALIDATION.format(root=str(ROOT)))
    run_forked(2, 'script.py')
    for rank in (0, 1):
        assert f'process {rank} stopped by 15, sent {rank}' in (tmp_path / f'printed{rank}.txt').read_text()
    last, path = train_unet.load_last('out')
    assert path.name == 'last.pt' and 1 <= last['epoch'] < 1000


def test_a_signal_before_the_first_epoch_waits_for_nothing(forks):
    """Process 1 gets SIGTERM in its first pass, which may be followed by minutes of compiling."""
    run_forked(2, write_script(2, ask=1, epochs=50), codes=(1, 128 + 15))      # the other loses its partner
    assert train_unet.load_last('run2')[0]['step'] == 0


def ask_again_and_again(rank):
    """Each process gets SIGTERM twice within a step, and the first one a third while it saves."""
    at_step(STOP, ask_to_stop)
    at_step(STOP, ask_to_stop)
    real = train_unet.save_checkpoint

    def save(path, content):
        if content.get('step') == STOP + 1:
            ask_to_stop()
        real(path, content)

    train_unet.save_checkpoint = save


@needs_linux
def test_a_second_signal_does_not_keep_several_processes_from_saving(undisturbed, tmp_path):
    """As when the sender signals all processes and torchrun does so again."""
    codes, printed = run_job(tmp_path, undisturbed[1], ask_again_and_again)
    assert_stopped(tmp_path / 'run', codes, printed)


def signal_everybody_in_validation(rank):
    """As SLURM does: SIGTERM to each process and to its data workers, when the first epoch is scored."""
    usual = train_unet.evaluate_model

    def score(*args, **named):
        if args and multiprocessing.active_children():                 # not in the smoke test
            pids = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]
            subprocess.run(['kill', *map(str, pids)])                  # torch's workers know the hand of their parent
            time.sleep(1)                                              # a worker that dies has died by then
        return usual(*args, **named)

    train_unet.evaluate_model = score


@needs_linux
def test_a_signal_to_all_processes_and_workers_in_validation_loses_nothing(undisturbed, tmp_path):
    codes, printed = run_job(tmp_path, undisturbed[1], signal_everybody_in_validation, num_workers=1)
    assert codes == [128 + signal.SIGTERM] * 2, printed
    assert not any('Traceback' in text for text in printed), printed
    last = train_unet.load_last(tmp_path / 'run')[0]
    assert (last['epoch'], last['window'], len(last['history'])) == (1, 0, 1)


class Readers(torch.utils.data.Dataset):
    """Each sample is the process that read it."""

    def __len__(self):
        return 50

    def __getitem__(self, index):
        return os.getpid()


def signal_own_group():
    """SIGTERM to this process and to all that share its group, between two batches of a loader."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda *_: None)                     # a run would note it down
    torch.set_num_threads(1)
    loader = train_unet.build_loader(Readers(), {'num_workers': 1, 'seed': 0}, torch.device('cpu'))
    batches = iter(loader)
    pids = next(batches).tolist()
    os.killpg(0, signal.SIGTERM)
    pids += [pid for batch in batches for pid in batch.tolist()]
    assert len(pids) == 50 and len({*pids}) == 1 and os.getpid() not in pids
    sys.exit(42)


@needs_linux
def test_a_signal_to_the_group_of_a_process_leaves_its_data_workers_alive(forks):
    """torchrun and schedulers signal whole groups; the worker must deliver what the last step needs."""
    process = FORKS.Process(target=signal_own_group)
    process.start()
    process.join(PATIENCE)
    process.kill()
    process.join()
    assert process.exitcode == 42


# --- killed ---------------------------------------------------------------------------


def test_a_killed_process_ends_the_job_with_a_checkpoint(forks):
    """Process 1 kills itself in the second epoch: the other ends by itself, and the first epoch can be resumed."""
    run_forked(2, write_script(2, die=True, epochs=50), codes=(1, -signal.SIGKILL))
    assert train_unet.load_last('run2')[0]['epoch'] >= 1


def wait_for(condition, seconds=PATIENCE):
    """Until it holds; fails after too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, 'waited in vain'
        time.sleep(0.1)


def processes(word):
    """Process ids whose command line holds a word, zombies left out."""
    found = []
    for number in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{number}/cmdline', 'rb') as file:
                found += [int(number)] * (word.encode() in file.read())
        except OSError:
            continue
    return found


@pytest.mark.skipif(sys.platform != 'linux', reason='looks into /proc')
def test_a_killed_launcher_stops_its_processes_with_a_checkpoint(forks):
    script = os.path.abspath(write_script(2, epochs=1000))
    launcher = start('--standalone', '--nproc_per_node=2', script)
    try:
        wait_for(lambda: os.path.exists('run2/history.csv'))
    finally:
        launcher.kill()
        launcher.join()
    wait_for(lambda: not processes(script))                            # they save and draw first, on a busy machine
    last, path = train_unet.load_last('run2')
    assert path.name == 'last.pt' and 1 <= last['epoch'] < 1000
    assert 'Stopped by SIGTERM' in (train_unet.Path('run2') / 'log.txt').read_text()     # not torn down: asked


@pytest.mark.kills
@pytest.mark.skipif(sys.platform != 'linux', reason='looks into /proc')
def test_a_signal_in_a_blocked_collective_leaves_the_last_checkpoint(forks):
    """Process 1 freezes, so process 0 waits for it in a collective: SIGTERM cannot save, but costs no checkpoint."""
    script = os.path.abspath(write_script(2, hang=True, epochs=1000))
    launcher = start('--standalone', '--nproc_per_node=2', script)
    try:
        wait_for(lambda: os.path.exists('stopped'))
        launcher.terminate()
        launcher.join(60)                                              # torchrun allows its processes 30 s
        assert launcher.exitcode is not None
    finally:
        launcher.kill()
    wait_for(lambda: not processes(script), 10)
    assert train_unet.load_last('run2')[0]['epoch'] >= 1


def tell_workers():
    """Print which data workers this process has."""
    print('data workers:', *(child.pid for child in multiprocessing.active_children()), flush=True)


def kill_worker_in_a_step(rank):
    """The data worker of process 1 is killed while that computes."""
    def kill():
        tell_workers()
        worker, = multiprocessing.active_children()
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)       # seen, but left for torch to find

    if rank == 1:
        at_step(1, kill)
        at_step(WINDOWS - 1, tell_workers)


def kill_worker_that_is_waited_for(rank):
    """The data worker of process 1 is killed at an image of the third window, while that waits for it."""
    usual, trainer, seen = train_unet.SegmentationDataset.__getitem__, os.getpid(), []

    def build(self, key):
        if os.getpid() != trainer and self.is_training and not os.path.exists('killed'):
            seen.append(key)
            if len(seen) == 5:                                         # two of a window are this process's
                time.sleep(1)
                open('killed', 'w').close()
                os.kill(os.getpid(), signal.SIGKILL)
        return usual(self, key)

    if rank == 1:
        train_unet.SegmentationDataset.__getitem__ = build
        at_step(1, tell_workers)
        at_step(WINDOWS - 1, tell_workers)


@needs_linux
@pytest.mark.parametrize('prepare', [kill_worker_in_a_step, kill_worker_that_is_waited_for])
def test_a_killed_data_worker_of_one_process_is_replaced(undisturbed, tmp_path, prepare):
    codes, printed = run_job(tmp_path, undisturbed[1], prepare, num_workers=1)
    assert codes == [0, 0], printed
    before, after = re.findall(r'^data workers: (\d+)$', printed[1], re.MULTILINE)
    assert before != after
    assert_same(final(tmp_path / 'run'), final(undisturbed[0]))


def kill_worker_when_an_epoch_is_closed(rank):
    """The data worker of process 1 is killed while that writes down its first epoch."""
    usual = train_unet.close_epoch

    def close(state, *rest):
        usual(state, *rest)
        if rank == 1 and state.epoch == 1:
            worker = multiprocessing.active_children()[0]
            worker.kill()
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            open('killed', 'w').close()

    train_unet.close_epoch = close


@needs_linux
def test_a_worker_killed_between_two_epochs_of_one_process_is_replaced(undisturbed, tmp_path):
    """The process that starts again agrees with the others before its next epoch, as they do."""
    codes, printed = run_job(tmp_path, undisturbed[1], kill_worker_when_an_epoch_is_closed, num_workers=1)
    assert codes == [0, 0] and (tmp_path / 'killed').exists(), printed
    assert_same(final(tmp_path / 'run'), final(undisturbed[0]))


def kill_worker_in_validation(rank):
    """The data worker of process 1 is killed before its first epoch is scored."""
    usual = train_unet.evaluate_model

    def score(*args, **named):
        if rank == 1 and multiprocessing.active_children():            # not in the smoke test
            worker = multiprocessing.active_children()[0]
            worker.kill()
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)   # seen, but left for torch to find
        return usual(*args, **named)

    train_unet.evaluate_model = score


@needs_linux
def test_a_worker_killed_in_the_validation_of_one_process_ends_all_in_words(undisturbed, tmp_path):
    codes, printed = run_job(tmp_path, undisturbed[1], kill_worker_in_validation, num_workers=1)
    assert codes == [1, 2] and 'Traceback' not in ''.join(printed), printed
    for text in (printed[1], (tmp_path / 'run' / 'log.txt').read_text()):
        assert 'the data workers die' in text and 'fewer num_workers' in text and 'It goes on with' in text


# --- compiled networks ----------------------------------------------------------------


FAULT = """
import os
from torch import nn
calls = []

def compile_what_fails(model):
    def compiled(images):
        calls.append(1)
        if os.environ['RANK'] == '1' and len(calls) == {at}:
            raise {error}('out of order (a test)')
        return model._call_impl(images)
    model._compiled_call_impl = compiled

nn.Module.compile = compile_what_fails
"""


def compiled_in_two(at, error='RuntimeError'):
    """Two processes of which the second one's compiled network fails in its call number `at` -> what each printed."""
    script = write_script(2)
    with open(script) as file:
        text = file.read()
    text = text.replace('use_amp=False,', 'use_amp=False, compile_model=True,')
    text = text.replace('train_unet.UserError', 'Exception')
    with open(script, 'w') as file:
        file.write(FAULT.format(at=at, error=error) + text)
    run_forked(2, script, codes=(0, 2))
    printed = []
    for rank in (0, 1):
        with open(f'printed{rank}.txt') as file:
            printed.append(file.read())
    return printed


def test_processes_agree_at_the_start_to_go_without_a_compiler(forks):
    first, second = compiled_in_two(at=1)
    assert 'best epoch 1' in first and 'best epoch 1' in second and 'Compiled in' not in first
    assert 'torch.compile does not work in all processes' in first


@pytest.mark.parametrize('fault', [
    "os.environ['RANK'] == '1' and model.training",
    'any(frame.function == "_run_ddp_forward" for frame in inspect.stack())'],
    ids=['one in training mode', 'all within DDP'])
def test_networks_of_smp_and_faults_of_all_processes_agree_too(forks, small_set, fault):
    """A network of smp comes in eval mode to this place; torch compiles otherwise within DDP."""
    settings = SETTINGS | dict(data=str(small_set), num_epochs=1, image_size=64, compile_model=True, run_dir='run2')
    condition = FAULT.format(at=0, error='RuntimeError').replace("os.environ['RANK'] == '1' and len(calls) == 0", fault)
    with open('script2.py', 'w') as file:
        file.write('import inspect, sys, torch\n' + condition + f"""
sys.path.insert(0, {str(ROOT)!r})
import train_unet
torch.set_num_threads(1)
print('best epoch', train_unet.train(**{settings!r}).best['epoch'])
""")
    run_forked(2, 'script2.py')
    with open('printed0.txt') as file:
        printed = file.read()
    assert 'best epoch 1' in printed and 'torch.compile does not work' in printed and 'Compiled in' not in printed


def test_a_fault_of_one_process_in_mid_run_is_shown_and_not_replayed(forks):
    """A step that one of them repeats alone would meet the others' exchange of gradients."""
    first, second = compiled_in_two(at=8, error='ValueError')
    assert 'Compiled in' in first and 'out of order (a test)' in second
    assert 'does not work here' not in first + second and 'best epoch' not in first + second


PARTS = """
import sys, torch
from torch import nn
compile, parts = nn.Module.compile, []

def count(graph, inputs):
    parts.extend([graph] * net.training)                               # validation is compiled in one
    return graph

nn.Module.compile = lambda model: compile(model, backend=count)
sys.path.insert(0, {root!r})
import train_unet
torch.set_num_threads(1)

class Net(nn.Sequential):                                              # torch 2.6 compiles none of torch's own
    def forward(self, x):
        return self[2](self[1](self[0](x)))

net = Net(*[nn.Linear(2048, 2048) for _ in range(3)])
data = [{{"x": torch.ones(2048)}} for _ in range(8)]
result = train_unet.train(model=net, loss_fn=lambda model, batch: model(batch['x']).mean(1), train_data=data,
                          val_data=data, num_epochs=1, batch_size=2, accumulation_steps=2, use_amp=False,
                          compile_model=True, device='cpu', ema_decay=None, optimizer='SGD', num_workers=0,
                          run_dir='run2')
print('best epoch', result.best['epoch'], 'parts', len(parts))
"""


def test_compiled_networks_of_several_processes_exchange_gradients_while_they_compute_others(forks):
    """torch compiles one part for each bucket of gradients, of 25 MiB, if it first sees the network within DDP."""
    with open('script2.py', 'w') as file:
        file.write(PARTS.format(root=str(ROOT)))
    run_forked(2, 'script2.py')
    with open('printed0.txt') as file:
        printed = file.read()
    assert 'Compiled in' in printed and 'best epoch 1 parts 2' in printed, printed
