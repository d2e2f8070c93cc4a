"""Runs that are killed again and again end as if they had not been, to the bit.

A few kills: python -m pytest tests/test_kills.py
Twenty in one training, about two minutes: python -m pytest tests -m kills
"""
import csv
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import draw_set, start_script

import train_unet as tu
from helpers import assert_same, final

pytestmark = pytest.mark.usefixtures('forks')

# A process runs this before the script. It writes down what the run does: the weights after every
# step, what it is at, what it saved. Told so, it stands still at one moment, to be killed there.
# Each step advances its clock by a minute, so that an interval of minutes is one of steps.
WITNESS = '''
import builtins, hashlib, os, time
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

notes = os.open(os.environ['WITNESS'], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
wanted, after, countdown = os.environ.get('STAND_STILL', 'nowhere 0 0').split()
after, countdown = int(after), int(countdown)
main, phase, steps, tested = os.getpid(), 'starting', 0, None    # tested: steps of the smoke test
real = {'open': open, 'save': torch.save, 'load': torch.load, 'fsync': os.fsync, 'replace': os.replace,
        'monotonic': time.monotonic}

def tell(*words):
    os.write(notes, (' '.join(map(str, words)) + '\\n').encode())

def enter(name):
    global phase
    if name != phase and os.getpid() == main:
        phase = name
        tell('phase', name)

def moment(what):
    global countdown
    place = 'starting' if tested is None else phase
    if place != wanted or tested is not None and steps - tested < after or os.getpid() != main:
        return
    if countdown == 0:
        tell('stands', what)
        time.sleep(600)
    countdown -= 1

def forward(module, inputs):
    enter('training' if torch.is_grad_enabled() else 'validation')
    moment(f'in front of {type(module).__name__}')

def stepped(optimizer, *_):
    global steps
    steps += 1
    weights = hashlib.sha1()
    for group in optimizer.param_groups:
        for parameter in group['params']:
            weights.update(parameter.detach().contiguous().numpy().tobytes())
    tell('step', weights.hexdigest())
    moment('after the update')

def save(*args, **kwargs):
    enter('saving')
    moment('in front of torch.save')
    real['save'](*args, **kwargs)
    moment('after torch.save')

def load(*args, **kwargs):
    global tested
    content = real['load'](*args, **kwargs)
    if tested is None and steps:
        tested = steps
        tell('begins')
    enter('between')
    return content

def fsync(number):
    moment('in front of fsync')
    real['fsync'](number)
    moment('after fsync')

def replace(source, target):
    name = os.path.basename(target)
    moment(f'in front of the rename to {name}')
    real['replace'](source, target)
    if name == 'last.pt':
        tell('saved')
    moment(f'after the rename to {name}')
    if name in ('last.pt', 'best.pt', 'history.csv'):
        enter('between')

class Slow:
    """A file that is written in two halves."""
    def __init__(self, file):
        self.file = file
    def __getattr__(self, name):
        return getattr(self.file, name)
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.file.close()
    def write(self, content):
        content = memoryview(content)
        self.file.write(content[:len(content) // 2])
        self.file.flush()
        moment('with half a file written')
        self.file.write(content[len(content) // 2:])

def open_slowly(*args, **kwargs):
    file = real['open'](*args, **kwargs)
    if args[1:2] != ('wb',):
        return file
    enter('saving')
    return Slow(file)

register_module_forward_pre_hook(forward)
register_optimizer_step_pre_hook(lambda *_: moment('in front of the update'))
register_optimizer_step_post_hook(stepped)
torch.save, torch.load, os.fsync, os.replace, builtins.open = save, load, fsync, replace, open_slowly
time.monotonic = lambda: real['monotonic']() + 60 * steps
'''

WINDOWS, INTERVAL = 5, 3                                               # steps per epoch and checkpoint
SETTINGS = dict(data='set', image_size=32, batch_size=2, accumulation_steps=2, num_workers=2,
                augment='strong', encoder='tu-test_efficientnet', decoder_channels='[16,12,8,8,8]',
                learning_rate=0.01, early_stopping_patience='none', device='cpu', use_amp=False,
                checkpoint_minutes=INTERVAL - 0.5, resume='auto')
MOMENTS = {'training': 150, 'validation': 250, 'saving': 25, 'starting': 300}  # less than there are


class Life:
    """The real script in a process of its own, with a witness."""

    def __init__(self, number, stand_still='nowhere 0 0', **settings):
        self.notes = Path(f'notes-{number}.txt')
        self.notes.touch()
        self.mid_epoch = False                                         # if it did some of its steps
        self.output = Path(f'output-{number}.txt').resolve()
        environment = {'WITNESS': str(self.notes.resolve()), 'STAND_STILL': stand_still}
        self.process = start_script(settings, self.output, environment, first=WITNESS)

    def until(self, word):
        """Wait until it tells so, and be sure that it lives."""
        begun = time.monotonic()
        while not any(line.startswith(word) for line in self.told()):
            assert self.process.exitcode is None, f'it ended by itself: {self.printed()}'
            assert time.monotonic() - begun < 300, f'it never {word}: {self.printed()}'
            time.sleep(0.01)

    def kill(self):
        self.process.kill()
        self.process.join(60)
        assert self.process.exitcode == -signal.SIGKILL, self.printed()

    def end(self):
        self.process.join(300)
        assert self.process.exitcode == 0, self.printed()

    def bury(self):
        """No process stays behind, whatever happened; not even workers without their parent."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()

    def told(self):
        return self.notes.read_text().splitlines()

    def printed(self):
        return self.output.read_text()[-3000:]

    def steps(self):
        """The weights after each step but that of the smoke test."""
        told = self.told()
        real = told[told.index('begins'):] if 'begins' in told else []
        return [line.split()[1] for line in real if line.startswith('step ')]

    def phase(self):
        """What it was at when it was killed."""
        told = self.told()
        if 'begins' not in told:
            return 'starting'
        return [line.split()[1] for line in told if line.startswith('phase ')][-1]


def kill_and_resume(places, seed, num_epochs):
    """A training killed at these places, one after the other, ends as one left alone -> the lives.

    The moment in a place is drawn; 'clock' is any up to half a second after the training began.
    """
    draw_set('set', count=26)
    settings, draw, lives = SETTINGS | {'num_epochs': num_epochs}, random.Random(seed), []
    undisturbed = Life('undisturbed', run_dir='undisturbed', **settings)
    try:
        for number, place in enumerate(places):
            moment = (f'{place} {draw.randint(1, 3)} {draw.randrange(MOMENTS[place])}'
                      if place in MOMENTS else 'nowhere 0 0')
            fresh = number % 2 or not os.path.exists('killed/last.pt')  # the same words as at first
            command = {**settings, 'run_dir': 'killed'} if fresh else {'resume': 'killed'}
            lives.append(Life(number, moment, **command))
            lives[-1].until('stands' if place in MOMENTS else 'begins')
            time.sleep(0 if place in MOMENTS else draw.uniform(0, 0.5))
            lives[-1].kill()
        lives.append(Life('last', resume='killed'))
        lives[-1].end()
        undisturbed.end()
    finally:
        [life.bury() for life in [*lives, undisturbed]]
    compare_steps(lives, undisturbed, num_epochs)
    compare_results()
    print('\n'.join(f'killed in {life.phase()}: {life.told()[-1]}' for life in lives[:-1]))
    return lives


def compare_steps(lives, undisturbed, num_epochs):
    """Every life takes up the undisturbed path, at most an interval behind where it had been."""
    path, since_saved = undisturbed.steps(), []
    assert len(set(path)) == len(path) == num_epochs * WINDOWS
    for line in undisturbed.told():
        since_saved += [0] if line == 'saved' else []
        since_saved[-1:] = [since_saved[-1] + line.startswith('step ')] if since_saved else []
    assert max(since_saved) == INTERVAL                                # it does save so often
    reached, repeated = 0, []
    for life in lives:
        steps = life.steps()
        if steps:
            first = path.index(steps[0])                               # so many were not repeated
            assert steps == path[first:first + len(steps)]
            assert 0 <= reached - first <= INTERVAL, (first, reached, life.notes)
            repeated.append(reached - first)
            reached = max(reached, first + len(steps))
            life.mid_epoch = (first + len(steps)) % WINDOWS != 0
    assert reached == len(path) and sum(repeated) > 0
    print('steps repeated after each kill:', repeated)


def compare_results():
    """Both folders hold the same weights, history and predictions, to the bit."""
    assert_same(final('killed'), final('undisturbed'))
    best = [tu.load_checkpoint(f'{run}/best.pt') for run in ('killed', 'undisturbed')]
    assert_same(*({key: x[key] for key in ('weights', 'metrics', 'epoch')} for x in best))
    tables = []
    for run in ('killed', 'undisturbed'):
        with open(f'{run}/history.csv', newline='') as file:
            tables.append([{key: value for key, value in row.items()
                            if key not in ('seconds', 'images_per_second')}
                           for row in csv.DictReader(file)])
        assert tu.main(['predict', run, 'set/images', '-o', f'{run}-masks', '--save',
                        'probability']) == 0
    assert tables[0] == tables[1] and len(tables[0]) > 3
    log = Path('killed/log.txt').read_text()
    assert all(f'Epoch {row["epoch"]}/' in log for row in tables[0])   # no line was lost
    masks = sorted(Path('killed-masks').iterdir())
    assert len(masks) == 26
    for mask in masks:
        assert mask.read_bytes() == Path('undisturbed-masks', mask.name).read_bytes()


def count_hits(lives):
    """How often the kills were where it matters."""
    hits = Counter(life.phase() for life in lives)
    hits['mid-epoch'] = sum(life.phase() == 'training' and life.mid_epoch for life in lives)
    return [hits[place] for place in ('mid-epoch', 'validation', 'saving')]


def test_a_run_killed_in_training_validation_and_saving_ends_as_if_it_had_not_been():
    lives = kill_and_resume(['training', 'validation', 'saving'], seed=1, num_epochs=6)
    assert count_hits(lives[:-1]) == [1, 1, 1]


@pytest.mark.kills
def test_a_run_killed_twenty_times_ends_as_if_it_had_not_been():
    places = ['training', 'validation', 'saving', 'clock'] * 4 + ['saving', 'starting'] * 2
    random.Random(0).shuffle(places)
    lives = kill_and_resume(places, seed=0, num_epochs=40)
    assert len(lives) == 21 and min(count_hits(lives[:-1])) >= 2, count_hits(lives[:-1])
