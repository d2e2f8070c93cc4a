"""Command line: the script as it is typed, in a process of its own where that matters.

Run: python -m pytest tests/test_command_line.py
"""
import ast
import io
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import train_unet as tu
from conftest import ROOT, TINY, WRITES_ONNX, as_words, draw_set
from helpers import PRESETS

pytestmark = pytest.mark.usefixtures('one_thread')


# --- help, and what is refused before torch is loaded ---------------------------------


@pytest.fixture
def command_line(tmp_path):
    """Run the script in a process where importing torch ends it at once with exit code 77."""
    (tmp_path / 'stub').mkdir()
    (tmp_path / 'stub' / 'torch.py').write_text('raise SystemExit(77)')
    env = {**os.environ, 'PYTHONPATH': str(tmp_path / 'stub')}
    return lambda *words: subprocess.run([sys.executable, ROOT / 'train_unet.py', *words], env=env,
                                         capture_output=True, text=True, timeout=60)


def test_help_names_every_key_command_and_preset_without_torch(command_line):
    done = command_line('--help')
    assert done.returncode == 0
    told = {key: ast.literal_eval(value)
            for key, value in re.findall(r'(?m)^    (\w+)=(.*?) {2,}#', done.stdout)}
    assert told == tu.CONFIG
    assert 'images in one forward pass: what decides memory' in done.stdout         # with its comments
    words = [*tu.COMMANDS, *(path.stem for path in PRESETS), 'tta', 'threshold', 'skip_existing']
    assert [word for word in words if word not in done.stdout] == []


def test_a_current_folder_that_was_deleted_is_told(tmp_path):
    """MKL ended the program: Cannot load libtorch_cpu.so."""
    words = ['sh', '-c', 'mkdir gone && cd gone && rmdir ../gone && "$@"', 'sh', sys.executable, ROOT / 'train_unet.py']
    done = subprocess.run([*words, 'predict', '/run', '/images'], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, 'the current folder was deleted: change to another')


def test_a_script_without_its_presets_says_so(command_line, tmp_path):
    script = shutil.copy(ROOT / 'train_unet.py', tmp_path / 'my_trainer.py')
    told = [subprocess.run([sys.executable, script, *words], env={**os.environ, 'PYTHONPATH': str(tmp_path / 'stub')},
                           capture_output=True, text=True, timeout=60) for words in (['--help'], ['--preset', 'fast'])]
    assert [done.returncode for done in told] == [0, 2]
    for text in (told[0].stdout, told[1].stderr):
        assert 'none, as configs/ is not beside the script' in text


@pytest.mark.parametrize('words, told', [
    (['numepochs=5', 'batch_size=0'], "did you mean 'num_epochs'?"),
    (['--preset', 'fats'], "did you mean 'fast'?"),
    (['predict', 'runs/x'], 'needs a run folder and images, as in '),
    (['chek'], "did you mean 'check'?"),
    (['use_amp=[1]', 'bf16=true'], 'use_amp'),
])
def test_wrong_settings_exit_2_without_traceback_or_torch(command_line, words, told):
    done = command_line(*words)
    assert (done.returncode, done.stdout) == (2, '')
    assert told in done.stderr and 'Traceback' not in done.stderr


def test_right_settings_go_on_to_torch(command_line):
    assert command_line('num_epochs=5').returncode == 77


@pytest.mark.parametrize('kind', ['ImportError', 'OSError', 'AttributeError', 'ValueError'])       # DLLs, OpenCV, NumPy
def test_a_library_that_cannot_be_loaded_is_told_in_a_line(tmp_path, kind):
    """As where the system gives no memory for it."""
    (tmp_path / 'torch.py').write_text(f"raise {kind}('libtorch.so: failed to map segment from shared object')")
    done = subprocess.run([sys.executable, ROOT / 'train_unet.py', 'check'], capture_output=True, text=True, timeout=60,
                          env={**os.environ, 'PYTHONPATH': str(tmp_path)})
    assert (done.returncode, done.stderr) == (1, 'libtorch.so: failed to map segment from shared object: type  '
                                              'pip install -r requirements.txt\n')


@pytest.mark.parametrize('error, advice', [
    ("ImportError('libGL.so.1: cannot open shared object file')", '--force-reinstall opencv-python-headless'),
    ('AttributeError("module \'cv2\' has no attribute \'gapi\'")', '--force-reinstall opencv-python-headless'),
    ('ModuleNotFoundError("No module named \'cv2\'")', '-r requirements.txt')])
def test_an_opencv_that_wants_a_display_is_told_how_to_be_replaced(tmp_path, error, advice):
    """As opencv-python beside opencv-python-headless in a container: pip calls the requirements satisfied."""
    (tmp_path / 'cv2.py').write_text(f'raise {error}')
    done = subprocess.run([sys.executable, ROOT / 'train_unet.py', 'check'], capture_output=True, text=True, timeout=60,
                          env={**os.environ, 'PYTHONPATH': str(tmp_path)})
    assert done.returncode == 1 and done.stderr.endswith(f'pip install {advice}\n')


@pytest.mark.parametrize('line', ['import train_unet', 'import IPython, runpy, sys; sys.argv[1:] = ["export", "no"]; '
                                  'runpy.run_path("train_unet.py", run_name="__main__")'])
def test_the_backend_of_a_notebook_stays_its_own(line):
    """After %run train_unet.py its kernel showed no plots any more."""
    pytest.importorskip('IPython')
    told = 'import atexit, os; atexit.register(lambda: print(os.environ.get("MPLBACKEND"))); '
    done = subprocess.run([sys.executable, '-c', told + line], capture_output=True, text=True, timeout=60, cwd=ROOT,
                          env={**os.environ, 'MPLBACKEND': 'agg'})
    assert done.stdout == 'agg\n', done.stderr


# --- where the output goes ------------------------------------------------------------


def test_help_that_nobody_reads_to_its_end_is_no_error():
    read, write = os.pipe()
    os.close(read)                                                     # as head does
    done = subprocess.run([sys.executable, ROOT / 'train_unet.py', '--help'], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b'')


def test_in_a_notebook_the_next_line_is_a_call(monkeypatch):
    monkeypatch.setattr(tu, 'running_shell', lambda: True)
    assert tu.command_line('evaluate', tu.quoted('my run'), 'tta=True') == "train_unet.evaluate('my run', tta=True)"
    assert tu.command_line('predict', 'runs/x', 'YOUR_IMAGES') == "train_unet.predict('runs/x', 'YOUR_IMAGES')"
    assert tu.command_line() == 'train_unet.train()'
    assert tu.command_line(tu.as_typed('resume', Path('runs/a$b'))) == "train_unet.train(resume='runs/a$b')"
    words = '--preset', 'fast', tu.as_typed('data', 'a b'), tu.as_typed('mask_values', {255: 1})
    assert tu.command_line(*words) == "train_unet.train(preset='fast', data='a b', mask_values={255: 1})"


def test_a_file_that_takes_few_letters_takes_all_names(monkeypatch):
    """On Windows what is printed into a file has 256 letters."""
    file = io.BytesIO()
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(file, 'ascii'))
    assert not tu.main(['-h'])
    print('größe 図', flush=True)
    assert b'gr\\xf6\\xdfe \\u56f3' in file.getvalue()


def test_a_line_comes_once_where_the_root_logger_writes_too(capsys, monkeypatch):
    """As Colab's does, lines of any level, and everybody's after logging.basicConfig()."""
    monkeypatch.setattr(logging.getLogger(), 'handlers', [logging.StreamHandler(sys.stdout)])
    tu.warn('what one reads')
    assert capsys.readouterr().out == 'Note: what one reads\n'


# --- from one command to the next -----------------------------------------------------


@pytest.mark.parametrize('name', ['My run', "Bob's", 'a&b', 'D:/x', 'cost $5', 'größe'])
def test_a_path_is_quoted_for_shells_but_not_in_single_quotes(name):
    """cmd.exe knows no single quotes."""
    line = tu.quoted(tu.Path('runs') / name)
    assert not line.startswith("'")
    assert subprocess.run(['bash', '-c', f'printf %s {line}'], capture_output=True).stdout.decode() == f'runs/{name}'


@WRITES_ONNX
def test_the_four_commands_follow_from_each_other(tmp_path, capsys, monkeypatch):
    """Train, evaluate, predict, export: each time what the one before has printed (.ci/run types them in a shell). The
    graph itself takes ten seconds, and is for test_export."""
    draw_set(tmp_path / 'set', count=8)
    monkeypatch.setattr(tu, 'export_onnx', lambda model, path, *_: path.touch() or model)
    typed = f'{Path(sys.executable).name} train_unet.py data=set ' + shlex.join(as_words(TINY | {'num_epochs': 1}))
    steps = [('evaluate', 'best.pt'), ('predict', 'worst.png'), ('export', 'predictions/007.png'), ('', 'model.onnx')]
    for word, file in steps:
        python, script, *words = shlex.split(typed)
        assert (python, Path(script).name) == (Path(sys.executable).name, 'train_unet.py')
        assert tu.main(words) == 0
        assert (tmp_path / 'runs' / 'set-1' / file).exists()
        printed = capsys.readouterr().out
        typed = ''.join(re.findall('Next:  (.*)', printed)).replace('YOUR_IMAGES', 'set/images')
        assert f'{word} runs/set-1' in typed or not word


def test_the_next_line_names_the_script_as_it_was_called(two, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr('sys.argv', ['../there/train_unet.py'])
    tu.predict(two[0], [str(two[1] / 'images' / '001.png')], tmp_path / 'out')
    assert f'Next:  {Path(sys.executable).name} ../there/train_unet.py export' in capsys.readouterr().out


def test_a_signal_before_there_is_anything_to_save_is_told(monkeypatch, capsys):
    def walk(*_, **__):                                                # while the files are listed
        os.kill(os.getpid(), signal.SIGTERM)
        return iter(())

    monkeypatch.setattr(os, 'walk', walk)
    assert tu.main(['data=.', 'device=cpu']) == 143
    assert 'stopped by SIGTERM' in capsys.readouterr().err


def test_a_command_leaves_warnings_and_signals_as_they_were(two, tmp_path, monkeypatch):
    """%run in a notebook: SIGTERM no longer ended the kernel, and the user's own warnings lost their lines."""
    monkeypatch.setattr(tu, '__name__', '__main__')
    told, heard = warnings.showwarning, [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]
    assert tu.main(['predict', str(two[0]), str(two[1] / 'images/000.png'), '-o', str(tmp_path)]) == 0
    assert warnings.showwarning is told and heard == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize('executable, name', [('/usr/bin/python3', 'python3'), ('/env/bin/python', 'python'),
                                              ('/opt/bin/python3.12', 'python3.12'), ('', 'python'), (None, 'python')])
def test_the_next_line_names_python_as_it_was_called(monkeypatch, executable, name):
    """Debian and macOS have no python, only python3; uv installs the packages for itself alone."""
    monkeypatch.setattr('sys.executable', executable)
    monkeypatch.chdir(Path(tu.__file__).parent)
    assert tu.command_line('evaluate', 'runs/x') == f'{name} train_unet.py evaluate runs/x'
    monkeypatch.setenv('UV', '/usr/bin/uv')
    for prefix, began in (('/home/u/.cache/uv/environments-v2/train-unet-7a04', 'uv run'),
                          ('/home/u/.cache/uv/builds-v0/.tmp7a04', 'uv run'),      # with --with
                          ('/home/u/project/.venv', 'uv run python')):     # of a project: with its torch
        monkeypatch.setattr('sys.prefix', prefix)
        assert tu.command_line('evaluate', 'runs/x') == f'{began} train_unet.py evaluate runs/x'


def test_the_next_line_names_the_file_where_a_notebook_lies_elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert f' {tu.quoted(tu.__file__)} check' in tu.command_line('check')
    (tmp_path / 'train_unet.py').touch()
    assert ' train_unet.py check' in tu.command_line('check')


def test_the_next_line_names_the_script_as_it_was_called_from_elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'train_unet.py').mkdir()                               # a clone: no file that python runs
    monkeypatch.setattr('sys.argv', ['ipykernel_launcher.py'])
    assert f' {tu.quoted(tu.__file__)} check' in tu.command_line('check')
    monkeypatch.setattr('sys.argv', ['/x/y/train_unet.py'])
    assert ' /x/y/train_unet.py check' in tu.command_line('check')
