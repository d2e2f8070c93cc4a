"""The benchmarks still run: in small, and with no clock that decides.

Run: python -m pytest tests/test_benchmarks.py
"""
import sys
import types

import pytest
import torch
from conftest import ROOT, TINY, draw_set

sys.path.insert(0, str(ROOT / 'tests' / 'benchmarks'))
import images_per_second  # noqa: E402
import peers  # noqa: E402
import plain  # noqa: E402
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
        assert not any(p.requires_grad for p in model.parameters())   # the moving average is judged
        seen.append(epoch)
        return {'seconds': seconds, 'epoch': epoch, 'score': 0.5}

    args = types.SimpleNamespace(size=[32, 32], device='cpu', budget=0.0, limit=1.5,
                                 ours=[f'{key}={value}'.replace(' ', '') for key, value in TINY.items()
                                       if key not in ('image_size', 'device')])
    curve = time_to_iou.train_ours(split_set, {'seed': 0}, args, None, judge)
    assert seen == [1] and curve[0]['is_best']                         # then the budget is spent


@pytest.mark.parametrize('script', sorted(p.name for p in (ROOT / 'tests' / 'benchmarks').glob('*.py')
                                          if 'base_parser(' in p.read_text() and p.name != 'common.py'))
def test_each_script_has_help(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, 'argv', [script, '--help'])
    module = __import__(script[:-3])
    with pytest.raises(SystemExit) as done:
        getattr(module, 'parse_args', module.main)()
    assert done.value.code == 0 and '--out' in capsys.readouterr().out
