"""Several processes that are stopped, continued and disturbed.  python -m pytest tests/test_processes_more.py"""
import functools
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from test_checkpoints import assert_same, final
from test_processes import free_port

import train_unet
from conftest import FORKS, TINY, draw_set

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='forks processes that are ready to train')
PATIENCE = 120                                                         # seconds: others may use the machine too
WINDOWS, STOP = 4, 5                                                   # steps of an epoch; the one that is disturbed
SETTINGS = TINY | {'encoder': 'tu-test_resnet', 'decoder_channels': [8] * 5, 'learning_rate': 0.01}


# ---------------------------------------------------------------- a job of two processes


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
                time.sleep(2)                                          # as torchrun: the others do not live on
                break
            time.sleep(0.05)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [process.exitcode for process in ranks], [(folder / f'printed{rank}.txt').read_text() for rank in '01']


@pytest.fixture(scope='module')
def undisturbed(forks, tmp_path_factory):
    """A run of two processes that nobody stopped: (run folder, data folder). Not to be changed."""
    folder = tmp_path_factory.mktemp('undisturbed')
    data = draw_set(folder / 'set', count=20)                          # 16 to train with
    codes, printed = run_job(folder, data)
    assert codes == [0, 0], printed
    assert train_unet.load_checkpoint(folder / 'run' / 'last.pt')['step'] == 2 * WINDOWS
    return folder / 'run', data


def at_step(number, act):
    """Within the step after so many, act()."""
    real = train_unet.train_step

    def step(state, *rest):
        if state.step == number:
            act()
        return real(state, *rest)

    train_unet.train_step = step


def ask():
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


# ---------------------------------------------------------------- stopped and continued


def ask_second(rank):
    """Only process 1 gets SIGTERM."""
    if rank == 1:
        at_step(STOP, ask)


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


def test_gradients_are_exchanged_once_per_window_and_not_for_each_of_its_batches(undisturbed, tmp_path):
    """16 images in windows of 8, each process having two batches of two images; the smoke test is one window more."""
    codes, printed = run_job(tmp_path / 'job', undisturbed[1], count_exchanges, batch_size=2, accumulation_steps=4,
                             num_epochs=1)
    assert codes == [0, 0], printed
    assert [text.count('exchanged') for text in printed] == [1 + 2] * 2


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


def ask_again_and_again(rank):
    """Each process gets SIGTERM twice within a step, and the first one a third while it saves."""
    at_step(STOP, ask)
    at_step(STOP, ask)
    real = train_unet.save_checkpoint

    def save(path, content):
        if content.get('step') == STOP + 1:
            ask()
        real(path, content)

    train_unet.save_checkpoint = save


def test_a_second_signal_does_not_keep_several_processes_from_saving(undisturbed, tmp_path):
    """As when the sender signals all processes and torchrun does so again."""
    codes, printed = run_job(tmp_path, undisturbed[1], ask_again_and_again)
    assert_stopped(tmp_path / 'run', codes, printed)


def test_a_short_last_window_of_accumulated_steps_trains(forks, tmp_path):
    """13 training images; one process speaks."""
    codes, printed = run_job(tmp_path / 'job', draw_set(tmp_path / 'set', count=16), accumulation_steps=2)
    assert codes == [0, 0], printed
    assert printed[0].count('Epoch 2/2') == 1 and 'Epoch' not in printed[1]
    best = train_unet.load_checkpoint(tmp_path / 'job' / 'run' / 'best.pt')
    assert all(torch.isfinite(value).all() for value in best['weights'].values())
    assert train_unet.load_last(tmp_path / 'job' / 'run')[0]['epoch'] == 2


# ---------------------------------------------------------------- layers without a gradient


@pytest.mark.parametrize('architecture, encoder', [('PSPNet', 'tu-mobilenetv3_small_050'), ('Unet', 'efficientnet-b0')])
def test_networks_train_although_layers_of_their_encoders_are_left_out(undisturbed, tmp_path, architecture, encoder):
    changes = {'architecture': architecture, 'encoder': encoder}
    network = train_unet.build_network({**train_unet.CONFIG, **SETTINGS, **changes, 'num_classes': 2})
    network(torch.randn(2, 3, 32, 32)).sum().backward()
    assert any(p.grad is None for p in network.parameters())           # or this test would show nothing
    codes, printed = run_job(tmp_path, undisturbed[1], **changes, num_epochs=1)
    assert codes == [0, 0], printed
    last = train_unet.load_checkpoint(tmp_path / 'run' / 'last.pt')
    assert last['step'] == WINDOWS and last['bad']['total'] == 0


# ---------------------------------------------------------------- data workers


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


def test_a_worker_killed_between_two_epochs_of_one_process_is_replaced(undisturbed, tmp_path):
    """The process that starts again agrees with the others before its next epoch, as they do."""
    codes, printed = run_job(tmp_path, undisturbed[1], kill_worker_when_an_epoch_is_closed, num_workers=1)
    assert codes == [0, 0] and (tmp_path / 'killed').exists(), printed
    assert_same(final(tmp_path / 'run'), final(undisturbed[0]))


def signal_everybody_in_validation(rank):
    """As SLURM does: SIGTERM to each process and to its data workers, when the first epoch is scored."""
    usual = train_unet.evaluate

    def score(*args, **named):
        if args and multiprocessing.active_children():                 # not in the smoke test
            pids = [os.getpid(), *(worker.pid for worker in multiprocessing.active_children())]
            subprocess.run(['kill', *map(str, pids)])                  # torch's workers know the hand of their parent
            time.sleep(1)                                              # a worker that dies has died by then
        return usual(*args, **named)

    train_unet.evaluate = score


def test_a_signal_to_all_processes_and_workers_in_validation_loses_nothing(undisturbed, tmp_path):
    codes, printed = run_job(tmp_path, undisturbed[1], signal_everybody_in_validation, num_workers=1)
    assert codes == [128 + signal.SIGTERM] * 2, printed
    assert not any('Traceback' in text for text in printed), printed
    last = train_unet.load_last(tmp_path / 'run')[0]
    assert (last['epoch'], last['window'], len(last['history'])) == (1, 0, 1)


# ---------------------------------------------------------------- what must be one, and what must not


def have_other_units(rank):
    """Process 1 runs on a processor with bfloat16 in hardware, process 0 on one without."""
    torch.backends.mkldnn.is_available = lambda: bool(rank)
    torch.cpu.get_capabilities = lambda: {'amx_bf16': True}
    usual = train_unet.train_step

    def step(state, *rest):
        print('precision:', state.dtype, 'draws:', torch.rand(1).item(), flush=True)
        return usual(state, *rest)

    train_unet.train_step = step


def test_processes_have_one_precision_and_random_numbers_of_their_own(undisturbed, tmp_path):
    codes, printed = run_job(tmp_path, undisturbed[1], have_other_units, use_amp='auto', num_epochs=1)
    assert codes == [0, 0], printed
    told = [re.findall(r'^precision: (\S+) draws: (\S+)$', text, re.MULTILINE)[-WINDOWS:] for text in printed]
    assert {precision for rows in told for precision, _ in rows} == {'float32'}
    assert len({draw for rows in told for _, draw in rows}) == 2 * WINDOWS


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


def test_a_signal_to_the_group_of_a_process_leaves_its_data_workers_alive(forks):
    """torchrun and schedulers signal whole groups; the worker must deliver what the last step needs."""
    process = FORKS.Process(target=signal_own_group)
    process.start()
    process.join(PATIENCE)
    process.kill()
    process.join()
    assert process.exitcode == 42
