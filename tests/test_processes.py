"""Several processes (gloo): the same result as one.  python -m pytest tests/test_processes.py"""
import os
import subprocess
import sys

import pytest
import torch

import train_unet
from conftest import ROOT

SCRIPT = '''
import os, sys
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
    if {ask} and os.environ.get('RANK') == '1' and model_calls.append(1) is None and len(model_calls) == 30:
        os.kill(os.getpid(), 15)
    if {die} and os.environ.get('RANK') == '1' and model_calls.append(1) is None and len(model_calls) > 30:
        os.kill(os.getpid(), 9)
    return (model(batch['x']) - batch['y']).square().mean((1, 2, 3))

model_calls = []
torch.manual_seed(3)
net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
try:
    result = train_unet.train(model=net, loss_fn=loss_fn, train_data=Means(), val_data=Means(), num_epochs={epochs}, optimizer='SGD',
                     learning_rate=0.05, batch_size=2, accumulation_steps=4, use_amp=False, device='cpu', ema_decay=None,
                     run_dir='run{count}')
except train_unet.UserError as error:
    print(error)
    sys.exit(2)
print(f'process {{os.environ["RANK"]}} stopped by {{result.stopped_by}}')
'''


def run(count, die=False, ask=False, epochs=1, timeout=120):
    """The script under torchrun with `count` processes."""
    script = f'script{count}.py'
    with open(script, 'w') as file:
        file.write(SCRIPT.format(root=str(ROOT), count=count, die=die, ask=ask, epochs=epochs))
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', f'--nproc_per_node={count}', script]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, 'OMP_NUM_THREADS': '1'})


def test_one_two_and_four_processes_give_the_same_weights():
    """43 images leave a short last window; SGD, because AdamW would enlarge rounding."""
    weights = []
    for count in (1, 2, 4):
        done = run(count)
        assert done.returncode == 0, done.stderr[-2000:]
        weights.append(train_unet.load_checkpoint(f'run{count}/last.pt'))
    assert weights[0]['step'] == 5
    for other in weights[1:]:
        for name, value in weights[0]['model'].items():
            torch.testing.assert_close(other['model'][name], value, rtol=1e-5, atol=1e-6)
        for key in ('train_loss', 'val_loss'):
            assert other['history'][0][key] == pytest.approx(weights[0]['history'][0][key], rel=1e-5)


def test_a_number_of_processes_that_does_not_divide_the_batch_is_refused():
    done = run(3)
    assert done.returncode != 0 and 'cannot share an effective batch of 8 images: start 2' in done.stdout


def test_a_killed_process_ends_the_job_with_a_checkpoint():
    """Process 1 kills itself in the second epoch: nobody hangs, the first epoch can be resumed."""
    done = run(2, die=True, epochs=50, timeout=60)
    assert done.returncode != 0
    assert train_unet.load_last('run2')[0]['epoch'] >= 1


def test_a_signal_to_one_process_stops_all_after_the_same_step():
    """Process 1 gets SIGTERM in its 30th pass: all end well, and the checkpoint is of that step."""
    done = run(2, ask=True, epochs=50, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 'process 0 stopped by 15' in done.stdout and 'process 1 stopped by 15' in done.stdout
    last, path = train_unet.load_last('run2')
    assert path.name == 'last.pt' and 2 < last['step'] < 50 and last['window'] > 0
