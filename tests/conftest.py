"""Shared by all tests: a small data set on disk, tiny settings, and no network."""
import contextlib
import gc
import importlib.machinery
import importlib.metadata
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import types
from pathlib import Path

import filelock
import numpy as np
import PIL.Image
import pytest

os.environ['NO_ALBUMENTATIONS_UPDATE'] = '1'
os.environ['HF_HUB_OFFLINE'] = '1'
os.environ['HF_HOME'] = str(Path(__file__).with_name('nowhere'))       # weights that lie on a machine are not found
os.environ['CUDA_VISIBLE_DEVICES'] = '-1'        # 'auto' is the CPU everywhere: runs are compared to the bit
os.environ.setdefault('OMP_NUM_THREADS', '1')    # tiny networks; and the threads of two tests at once would fight
if os.path.isdir('/dev/shm') and shutil.disk_usage('/dev/shm').free > 2 ** 32 \
        and not os.statvfs('/dev/shm').f_flag & os.ST_NOEXEC:          # in a container it is small, or runs no scripts
    os.environ.setdefault('PYTEST_DEBUG_TEMPROOT', '/dev/shm')         # on a drive test_pairing takes a third longer
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SHARED = ROOT.parent / 'shared' / 'data'

pytest.register_assert_rewrite('helpers')

TORCH = [int(part) for part in importlib.metadata.version('torch').split('.')[:2]]
WRITES_ONNX = pytest.mark.skipif(TORCH < [2, 9], reason='torch 2.6 cannot write these networks as ONNX')

FORKS = multiprocessing.get_context('forkserver')

# A network small enough for tests: an eighth of a second per epoch.
TINY = dict(encoder='tu-test_five_convs', decoder_channels=[16, 12, 8, 8, 8], image_size=32, batch_size=4, num_epochs=2,
            use_amp=False, num_workers=0, device='cpu', encoder_weights=None)
ENOUGH = TINY | {'image_size': 64, 'num_epochs': 6, 'learning_rate': 0.01}       # to find the discs of draw_set


def draw_set(folder, count=12, size=40, seed=0, values=(0, 255)):
    """images/ and masks/ with a bright disc on a noisy ground; returns the folder."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size]
    for number in range(count):
        cy, cx = draw.uniform(size * 0.3, size * 0.7, 2)
        disc = (y - cy) ** 2 + (x - cx) ** 2 < (size * 0.25) ** 2
        image = draw.integers(0, 90, (size, size, 3)) + disc[..., None] * np.array([120, 80, 40])
        for kind, array in (('images', image), ('masks', np.where(disc, values[1], values[0]))):
            path = Path(folder) / kind / f'{number:03d}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            PIL.Image.fromarray(array.astype(np.uint8)).save(path)
    return Path(folder)


def draw_three(folder, count=12):
    """draw_set with a third class: a blue corner. The values are class ids."""
    draw_set(folder, count, values=(0, 1))
    for number in range(count):
        for kind, value in (('images', (0, 0, 255)), ('masks', 2)):
            path = folder / kind / f'{number:03d}.png'
            array = np.array(PIL.Image.open(path))
            array[:15, :15] = value
            PIL.Image.fromarray(array).save(path)
    return folder


def run_script(words, output, environment, first):
    """What a forked process does: the real script, after these lines of Python; it prints into a file."""
    import torch
    os.setsid()
    os.environ.update(environment)
    with open(output, 'ab') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    exec(first, {'__name__': 'first'})
    sys.argv = [str(ROOT / 'train_unet.py'), *words]
    main = sys.modules['__main__'] = types.ModuleType('__main__')
    main.__file__ = sys.argv[0]
    loader = importlib.machinery.SourceFileLoader('__main__', sys.argv[0])
    exec(loader.get_code('__main__'), vars(main))                      # runpy would compile it anew, 0.3 s


def as_words(settings):
    """Settings as they are typed: [key=value, ...]."""
    return [f'{key}={value}'.replace(' ', '') for key, value in settings.items()]


def start_script(settings, output, environment=None, first=''):
    """The real script in a process of its own (wants the fixture forks); the process."""
    environment = {**os.environ, **(environment or {})}
    process = FORKS.Process(target=run_script, args=(as_words(settings), output, environment, first))
    process.start()
    return process


ASKED_FOR = {'kills': 'twenty kills in one training', 'device': 'the program on a device that is no CPU'}


def pytest_configure(config):
    """python -m pytest tests -m kills, or -m device"""
    for marker, what in ASKED_FOR.items():
        config.addinivalue_line('markers', f'{marker}: {what}; only when asked for')
    config.addinivalue_line('filterwarnings', 'error::DeprecationWarning:train_unet')


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """-n auto: one process more than there are cores, because some tests wait (a sixth of the time on two cores)."""
    return (yield) + ('PYTEST_XDIST_AUTO_NUM_WORKERS' not in os.environ)


def pytest_collection_modifyitems(config, items):
    """What takes minutes runs only when its marker is typed."""
    unasked = [marker for marker in ASKED_FOR if marker not in config.option.markexpr]
    apart = {item for item in items for marker in unasked if item.get_closest_marker(marker)}
    config.hook.pytest_deselected(items=[item for item in items if item in apart])
    items[:] = [item for item in items if item not in apart]
    gc.collect()
    gc.freeze()                    # what is imported by now need not be looked through again and again


def pytest_unconfigure():
    """Libraries count what is left at the end."""
    gc.unfreeze()


@pytest.fixture
def small_set(tmp_path):
    """Twelve images of 40 x 40 with masks of 0 and 255."""
    return draw_set(tmp_path / 'set')


@pytest.fixture(scope='session', autouse=True)
def fonts(tmp_path_factory):
    """matplotlib lists them once for all that the tests start, and not among the files of one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('MPLCONFIGDIR', str(tmp_path_factory.mktemp('matplotlib')))
        patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))         # of fixtures; see below for tests
        yield


@pytest.fixture(scope='session', autouse=True)
def encoder():
    """timm knows TINY's; no process that pytest starts does, but those of the fixture forks."""
    import small_encoder                                               # noqa: F401


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    """Runs and caches of a test go into its temporary folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.delenv('UV', raising=False)


class Nothing:
    """Axes that take whatever is drawn."""

    def __getattr__(self, name):
        return self

    def __call__(self, *_, **__):
        return self

    __getitem__ = __call__

    def __iter__(self):
        return iter([self] * 99)


def leave_pictures_out(put, keeps):
    """put(object, name, function): an empty file for each curves.png and confusion.png, and each sheet of a name that
    keeps(name) does not want."""
    from matplotlib.figure import Figure

    def savefig(figure, file, **how):
        file.write(b'')

    def save(picture, file, *words, real=PIL.Image.Image.save, **how):
        name = str(getattr(file, 'name', ''))
        if any(f'.{sheet}' in name and not keeps(sheet) for sheet in ('worst.png', 'samples.png')):
            file.write(b'')
        else:
            real(picture, file, *words, **how)
    if not keeps('curves.png'):
        put(Figure, 'savefig', savefig)
        put(Figure, 'subplots', lambda *_, **__: Nothing())            # to lay them out takes a tenth of the training
    put(PIL.Image.Image, 'save', save)


@pytest.fixture(autouse=True)
def without_pictures(request, monkeypatch):
    """To draw curves.png and samples.png takes nearly a third of a tiny training, and each evaluation draws two more;
    those of the fixtures two and three are drawn, and all of the tests that are named here."""
    looks = request.node.name.startswith(('test_a_confusion_matrix', 'test_predicted_files', 'test_the_curves'))
    measures = 'test_measuring' in request.path.stem
    leave_pictures_out(monkeypatch.setattr, lambda name: measures if name == 'samples.png' else looks)


@pytest.fixture(autouse=True)
def without_waiting_for_the_disk(monkeypatch):
    """No power is cut here, and a tiny training would wait for the disk half of its time, once for each file."""
    monkeypatch.setattr(os, 'fsync', os.fstat)                         # which refuses what is no open file, too


@pytest.fixture
def each_epoch_saved(monkeypatch):
    """However long saving takes on a busy machine: for what is said of the checkpoints of single epochs."""
    monkeypatch.setattr('train_unet.Run.is_due', lambda run: True)


@pytest.fixture(scope='session')
def forks():
    """A process that has imported everything: what it forks need not, which saves most of a small job's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('PYTHONPATH', os.pathsep.join([str(ROOT), str(ROOT / 'tests')]))
        FORKS.set_forkserver_preload(['train_unet', 'albumentations', 'segmentation_models_pytorch', 'torch._dynamo',
                                      'matplotlib.figure', 'small_encoder', 'forked'])
        first = FORKS.Process(target=os.getpid)
        first.start()
    first.join(120)
    assert first.exitcode == 0


@pytest.fixture
def one_thread():
    """Tiny networks are fastest with one thread, where cores are shared, and bits are equal for equal numbers of them.
    Signals are handled afterwards as they were, and one that a failure leaves unheard does not end pytest."""
    import torch
    before = torch.get_num_threads()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    signal.signal(signal.SIGUSR1, lambda *_: None)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def caplog(caplog, monkeypatch):
    """pytest's own, which listens where the program's lines do not go by themselves."""
    monkeypatch.setattr('train_unet.log.propagate', True)
    return caplog


@pytest.fixture
def make_pipe():
    """Makes a pipe with a name, into which nobody writes: who opens it waits. He is let go after twenty seconds, which
    fails the test."""
    opened, done = [], threading.Event()

    def let_go(path):
        done.wait(20)
        while not done.wait(0.2):
            with contextlib.suppress(OSError):                         # nobody waits
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                opened.append(path)

    def make(path):
        if not hasattr(os, 'mkfifo'):
            pytest.skip('Windows has no pipes with a name')
        os.mkfifo(path)
        threading.Thread(target=let_go, args=(path,), daemon=True).start()

    yield make
    done.set()
    assert not opened


@pytest.fixture
def hasty(monkeypatch):
    """torch waits five seconds for a worker that it has asked to end; who tests one that hangs need not."""
    monkeypatch.setattr('torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL', 0.5)


def made_once(tmp_path_factory, name, make):
    """A folder that make(folder) has filled: of several processes of xdist one does it, and the others wait."""
    folder = tmp_path_factory.getbasetemp() / name
    folder = folder.parents[1] / name if 'PYTEST_XDIST_WORKER' in os.environ else folder
    with filelock.FileLock(f'{folder}.lock'):
        if not (folder / 'done').exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            (folder / 'done').touch()
    return folder / 'run', folder / 'set'


@pytest.fixture(scope='session')
def two(tmp_path_factory):
    """A small run of two classes and its data: (run folder, data folder). Not to be changed."""
    import train_unet
    return made_once(tmp_path_factory, 'two', lambda folder: train_unet.train(
        **ENOUGH, data=str(draw_set(folder / 'set')), run_dir=str(folder / 'run')))


@pytest.fixture(scope='session')
def three(tmp_path_factory):
    """A small run of three classes and its data; a module of the network is kept in float32. Not to be changed."""
    import train_unet
    return made_once(tmp_path_factory, 'three', lambda folder: train_unet.train(
        **ENOUGH, data=str(draw_three(folder / 'set')), run_dir=str(folder / 'run'),
        class_names=['ground', 'disc', 'corner'], keep_float32='segmentation_head'))


@pytest.fixture
def own(two, tmp_path):
    """A copy of the run of two classes, for tests that write into it."""
    return shutil.copytree(two[0], tmp_path / 'own')
