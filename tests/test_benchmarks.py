"""The benchmarks still run: in small, and with no clock that decides.

Run: python -m pytest tests/test_benchmarks.py
"""
import os
import subprocess
import sys
import time
import types

import pytest
import torch
from conftest import ROOT, TINY, draw_set

sys.path.insert(0, str(ROOT / 'tests' / 'benchmarks'))
import gpu  # noqa: E402
import images_per_second  # noqa: E402
import limit  # noqa: E402
import peers  # noqa: E402
import plain  # noqa: E402
import processes  # noqa: E402
import time_to_iou  # noqa: E402

pytestmark = pytest.mark.usefixtures('one_thread')


@pytest.fixture
def split_set(tmp_path):
    """images/{train,val} and masks/{train,val}: eight and four images of 40 x 40."""
    drawn, folder = draw_set(tmp_path / 'drawn'), tmp_path / 'set'
    for kind in ('images', 'masks'):
        for number, path in enumerate(sorted((drawn / kind).iterdir())):
            target = folder / kind / ('train' if number < 8 else 'val') / path.name
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    return folder


@pytest.mark.parametrize('variant', ['equal', 'default', 'auto'])
@pytest.mark.parametrize('loaded', [True, False], ids=['from files', 'in memory'])
def test_images_per_second_of_ours(split_set, variant, loaded):
    job = peers.Job('ours', variant, 'tu-test_resnet', str(split_set), 32, 4, 2, 'cpu', 0, loaded)
    found = images_per_second.time_steps(job, peers)               # which counts the steps
    assert found['images_per_second'] > 0 and found['parameters'] > 10**5


@pytest.mark.parametrize('variant', ['documented', 'tuned'])
@pytest.mark.parametrize('loaded', [True, False], ids=['from files', 'in memory'])
def test_images_per_second_of_a_plain_loop(split_set, variant, loaded):
    job = peers.Job('plain', variant, 'tu-test_resnet', str(split_set), 32, 4, 2, 'cpu', 0, loaded)
    assert images_per_second.time_steps(job, peers)['parameters'] > 10**5


@pytest.mark.parametrize('preset', [None, 'low_memory'])
def test_steps_of_ours_move_the_weights(split_set, preset):
    ours = plain.Ours(preset, data=str(split_set), **TINY)
    before = [p.detach().clone() for p in ours.state.model.parameters()]
    assert sum(ours.step() for _ in range(3)) >= 12                    # over the end of an epoch
    moved = [not torch.equal(a, b) for a, b in zip(before, ours.state.model.parameters())]
    assert sum(moved) > 0.9 * len(moved)


def test_time_to_iou_takes_a_point_of_the_curve_after_each_epoch(split_set):
    seen = []

    def judge(model, seconds, epoch):
        assert all(p.grad is None for p in model.parameters())        # the moving average is judged
        seen.append(epoch)
        return {'seconds': seconds, 'epoch': epoch, 'score': 0.5}

    args = types.SimpleNamespace(size=[32, 32], device='cpu', budget=0.0, limit=1.5, epochs=None,
                                 ours=[f'{key}={value}'.replace(' ', '') for key, value in TINY.items()
                                       if key not in ('image_size', 'device')])
    curve = time_to_iou.train_ours(split_set, {'seed': 0}, args, None, judge)
    assert seen == [1] and curve[0]['is_best']                         # then the budget is spent


def test_after_equal_epochs_both_contenders_are_compared(split_set, tmp_path, monkeypatch, capsys):
    settings = [f'{key}={value}'.replace(' ', '') for key, value in TINY.items()
                if key not in ('image_size', 'device', 'num_epochs')]
    monkeypatch.setattr(sys, 'argv', [
        'time_to_iou.py', f'--data={split_set.parent}', '--sets', 'set', '--size', '32', '--epochs', '2', '--seeds', '1',
        '--device', 'cpu', '--out', str(tmp_path / 'out.json'), '--ours', *settings])
    time_to_iou.main()
    runs = time_to_iou.read_runs(tmp_path / 'out.json')
    assert [[point['epoch'] for point in run['curve']] for run in runs] == [[1, 2], [1, 2]]
    assert 'After 2 epochs at 32 x 32' in capsys.readouterr().out


def test_the_time_of_the_plain_recipe_is_told_from_when_it_was_first_there():
    curve = lambda *points: [{'seconds': seconds, 'score': score} for seconds, score in points]
    runs = [{'set': 'x', 'size': [8, 8], 'budget': 420, 'epochs': None, 'contender': name, 'curve': found}
            for name, found in (('plain', curve((200, 0.49), (300, 0.52), (420, 0.48))), ('ours', curve((130, 0.49))))]
    row = time_to_iou.build_rows(runs, 'x', types.SimpleNamespace(size=[8, 8], budget=420, epochs=None))[1]
    assert row['times faster'] == 420 / 130 and row['against that'] == 200 / 130


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


def test_what_runs_too_long_ends_with_all_that_it_started(tmp_path):
    """Also where that runs something within a time of its own, in a session of its own."""
    inner = f"import os, time; open('{tmp_path}/pid', 'w').write(str(os.getpid())); time.sleep(60)"
    middle = f"import sys; sys.path.insert(0, '{ROOT}/tests/benchmarks'); import processes; " \
             f"processes.run_within([sys.executable, '-c', {inner!r}])"
    with pytest.raises(subprocess.TimeoutExpired):
        processes.run_within([sys.executable, '-c', middle], timeout=3)
    pid, end = int((tmp_path / 'pid').read_text()), time.monotonic() + 10
    while os.path.exists(f'/proc/{pid}') and 'Z' not in open(f'/proc/{pid}/stat').read().split()[2]:
        assert time.monotonic() < end, 'it lives on'
        time.sleep(0.05)


def test_a_part_that_fails_on_a_gpu_is_not_called_done(tmp_path, monkeypatch):
    script, args = tmp_path / 'part.py', types.SimpleNamespace(device='cpu')
    monkeypatch.setitem(gpu.PARTS, 'limit', lambda args, left: gpu.run_script(script, left=3))
    for text, state in (('raise SystemExit("no images")', 'failed: part.py: no images'),
                        ('import time; time.sleep(60)', 'nothing in time'),
                        ('import sys; open(sys.argv[-1][6:], "w").write(\'{"results": [1]}\')', 'done')):
        script.write_text(text)
        assert gpu.run_part('limit', args, 60, {}) == state


@pytest.mark.parametrize('script', sorted(p.name for p in (ROOT / 'tests' / 'benchmarks').glob('*.py')
                                          if 'base_parser(' in p.read_text() and p.name != 'common.py'))
def test_each_script_has_help(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, 'argv', [script, '--help'])
    module = __import__(script[:-3])
    with pytest.raises(SystemExit) as done:
        getattr(module, 'parse_args', module.main)()
    assert done.value.code == 0 and '--out' in capsys.readouterr().out
