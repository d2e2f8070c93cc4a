"""Several processes (gloo): the same result as one.  python -m pytest tests/test_processes.py"""
import os
import runpy
import socket
import subprocess
import sys
import time

import pytest
import torch

import train_unet
from conftest import FORKS, ROOT

SCRIPT = '''
import os, signal, sys
sys.path.insert(0, {root!r})
import torch, train_unet
from torch import nn
torch.set_num_threads(1)

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


def torchrun(*words):
    """Arguments of subprocess: the command, and one thread for each process."""
    return {'args': [sys.executable, '-m', 'torch.distributed.run', *words], 'text': True,
            'env': {**os.environ, 'OMP_NUM_THREADS': '1'}}


def start(*words):
    """torchrun in the background."""
    return subprocess.Popen(**torchrun(*words), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def run(count, timeout=120, **how):
    """The script under torchrun with `count` processes, to its end."""
    command = torchrun('--standalone', f'--nproc_per_node={count}', write_script(count, **how))
    return subprocess.run(**command, capture_output=True, timeout=timeout)


def wait_for(condition, seconds=60):
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


def free_port():
    """A port where processes may meet."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def run_script(folder, script, environment):
    """What a forked process does; it prints into a file."""
    os.chdir(folder)
    os.environ.update(environment)
    with open(f'printed{environment["RANK"]}.txt', 'w') as file:
        os.dup2(file.fileno(), 1)
    runpy.run_path(script)


def run_forked(count, script, codes=(0,)):
    """A script in `count` processes that torchrun might have started, to its end; each exit code is one of these."""
    common = {'WORLD_SIZE': str(count), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())}
    ranks = [FORKS.Process(target=run_script, args=(os.getcwd(), script, common | {'RANK': rank, 'LOCAL_RANK': rank}))
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


def run_on_two_machines():
    """The script under two launchers that meet at one address, with one process each, to its end."""
    script, port = write_script(2), free_port()
    # held here: the launcher that holds it may end first, and now and then the other one asks it once more
    store = torch.distributed.TCPStore('127.0.0.1', port, is_master=True, wait_for_workers=False)
    meeting = ['--nnodes=2', '--nproc_per_node=1', '--rdzv-backend=c10d', f'--rdzv-endpoint=127.0.0.1:{port}',
               '--rdzv-conf=is_host=0']
    for job in [start(*meeting, script) for _ in range(2)]:
        _, errors = job.communicate(timeout=120)
        assert job.returncode == 0, errors[-2000:]
    del store


def test_one_process_four_and_two_machines_give_the_same_weights(forks):
    """43 images leave a short last window; SGD, because AdamW would enlarge rounding."""
    for count in (1, 4):
        run_forked(count, write_script(count))
    run_on_two_machines()
    one, *others = (train_unet.load_checkpoint(f'run{count}/last.pt') for count in (1, 2, 4))
    assert one['step'] == 5
    for other in others:
        for name, value in one['model'].items():
            torch.testing.assert_close(other['model'][name], value, rtol=1e-5, atol=1e-6)
        for key in ('train_loss', 'val_loss'):
            assert other['history'][0][key] == pytest.approx(one['history'][0][key], rel=1e-5)


def test_a_script_trains_twice_and_leaves_the_group_at_its_end():
    """gloo's threads abort, now and then, a process that exits with a group: a function registered before sees none."""
    script = write_script(2)
    with open(script) as file:
        text = file.read()
    body = text[text.index('result = '):text.index('except')]
    with open(script, 'w') as file:
        file.write('import atexit\natexit.register(lambda: '
                   "print('a group is left:', torch.distributed.is_initialized()))\n"
                   "atexit.register(lambda: print('smp is loaded:', 'segmentation_models_pytorch' in sys.modules))\n"
                   + text.replace(body, body + "    again = " + body.replace('run2', 'again2')[len('result = '):]))
    done = subprocess.run(**torchrun('--standalone', '--nproc_per_node=2', script), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count('a group is left: False') == 2
    assert done.stdout.count('smp is loaded: False') == 2              # nor by what looks at all modules
    for number in (0, 1):
        assert f'process {number} stopped by 0, best epoch 1' in done.stdout
    first, second = (train_unet.load_checkpoint(f'{folder}/last.pt') for folder in ('run2', 'again2'))
    assert second['step'] == first['step'] == 5


def test_a_number_of_processes_that_does_not_divide_the_batch_is_refused(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '3')
    words = 'cannot share an effective batch of 8 images evenly, at least two for each'
    with pytest.raises(train_unet.ConfigError, match=words):
        train_unet.join_processes({'device': 'cpu', 'batch_size': 2, 'accumulation_steps': 4})


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(train_unet.torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(train_unet.torch.cuda, 'device_count', lambda: 1)
    monkeypatch.setenv('WORLD_SIZE', '2')
    monkeypatch.setenv('LOCAL_RANK', '1')
    with pytest.raises(train_unet.ConfigError, match="device='cuda:1': this machine has only cuda:0, "):
        train_unet.join_processes({'device': 'auto', 'batch_size': 8, 'accumulation_steps': 1})


def test_what_is_no_training_is_done_by_the_first_process_alone(monkeypatch):
    words = [['evaluate', 'none'], ['predict', 'none', 'x.png'], ['export', 'none'], ['check', 'data=none']]
    for rank, code in [('0', 2), ('1', 0)]:
        monkeypatch.setenv('RANK', rank)
        assert [train_unet.main(typed) for typed in words] == [code] * 4


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


def test_a_killed_process_ends_the_job_with_a_checkpoint():
    """Process 1 kills itself in the second epoch: nobody hangs, the first epoch can be resumed."""
    done = run(2, die=True, epochs=50, timeout=60)
    assert done.returncode != 0
    assert train_unet.load_last('run2')[0]['epoch'] >= 1


def test_a_signal_to_one_process_stops_all_after_the_same_step(forks):
    """Process 1 gets SIGTERM in its 30th pass: all end well, and the checkpoint is of that step."""
    run_forked(2, write_script(2, ask=30, epochs=50))
    for rank in (0, 1):
        with open(f'printed{rank}.txt') as file:
            assert f'process {rank} stopped by 15' in file.read()
    last, path = train_unet.load_last('run2')
    assert path.name == 'last.pt' and 2 < last['step'] < 50 and last['window'] > 0


def test_a_signal_before_the_first_epoch_waits_for_nothing(forks):
    """Process 1 gets SIGTERM in its first pass, which may be followed by minutes of compiling."""
    run_forked(2, write_script(2, ask=1, epochs=50), codes=(1, 128 + 15))      # the other loses its partner
    assert train_unet.load_last('run2')[0]['step'] == 0


@pytest.mark.skipif(sys.platform != 'linux', reason='looks into /proc')
def test_a_killed_launcher_stops_its_processes_with_a_checkpoint():
    script = os.path.abspath(write_script(2, epochs=1000))
    launcher = start('--standalone', '--nproc_per_node=2', script)
    wait_for(lambda: os.path.exists('run2/history.csv'))
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not processes(script))                            # they save and draw first, on a busy machine
    last, path = train_unet.load_last('run2')
    assert path.name == 'last.pt' and 1 <= last['epoch'] < 1000
    assert 'Stopped by SIGTERM' in (train_unet.Path('run2') / 'log.txt').read_text()     # not torn down: asked


@pytest.mark.kills
@pytest.mark.skipif(sys.platform != 'linux', reason='looks into /proc')
def test_a_signal_in_a_blocked_collective_leaves_the_last_checkpoint():
    """Process 1 freezes, so process 0 waits for it in a collective: SIGTERM cannot save, but costs no checkpoint."""
    script = os.path.abspath(write_script(2, hang=True, epochs=1000))
    launcher = start('--standalone', '--nproc_per_node=2', script)
    wait_for(lambda: os.path.exists('stopped'))
    launcher.terminate()
    launcher.wait(timeout=60)                                          # torchrun allows its processes 30 s
    wait_for(lambda: not processes(script), 10)
    assert train_unet.load_last('run2')[0]['epoch'] >= 1


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
    text = text.replace('use_amp=False,', 'use_amp=False, compile_model=True,').replace('train_unet.UserError', 'Exception')
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
    settings = dict(data=str(small_set), num_epochs=1, image_size=64, batch_size=4, encoder='resnet18', device='cpu',
                    decoder_channels=[8, 8, 8, 8, 8], use_amp=False, compile_model=True, num_workers=0, run_dir='run2')
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
